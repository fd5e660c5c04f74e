"""The HTTP client of the clouds: what is certain, what is ambiguous, and what must never be shown."""

from __future__ import annotations

import httpx
import pytest

from gpu_flows.clouds._http import HttpApi
from gpu_flows.clouds.errors import (
    AuthenticationFailed,
    CapacityUnavailable,
    CloudError,
    CloudUnreachable,
    OutOfBalance,
    RateLimited,
    RequestRefused,
    Scope,
    UnexpectedAnswer,
    Verdict,
)
from tests.emulators.clock import FakeClock

KEY = "rpa_SECRETSECRET"


def api(answer: object, clock: FakeClock | None = None, seen: list[httpx.Request] | None = None) -> HttpApi:
    """Return a client whose network gives this answer, or the next of a list of answers, or raises it."""
    answers = list(answer) if isinstance(answer, list) else None

    def handle(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append(request)
        now = answers.pop(0) if answers is not None else answer
        if isinstance(now, Exception):
            raise now
        assert isinstance(now, httpx.Response)
        return now

    return HttpApi(
        "cloudy",
        "https://cloudy.invalid/v2",
        headers={"Authorization": f"Bearer {KEY}"},
        secrets=[KEY],
        verdicts=(
            Verdict(CapacityUnavailable, status=400, contains="no longer any instances"),
            Verdict(OutOfBalance, status=402, hint="add credit"),
        ),
        clock=clock or FakeClock(),
        transport=httpx.MockTransport(handle),
    )


def test_json_comes_back_parsed() -> None:
    answer = api(httpx.Response(200, json={"id": 1})).call("GET", "/pods")
    assert answer.body == {"id": 1}
    assert api(httpx.Response(204)).call("DELETE", "/pods/1").body is None


@pytest.mark.parametrize(
    ("answer", "error", "scope", "ambiguous"),
    [
        (httpx.Response(401, text="no"), AuthenticationFailed, Scope.CLOUD, False),
        (httpx.Response(402, text="poor"), OutOfBalance, Scope.CLOUD, False),
        (
            httpx.Response(400, json={"detail": "No longer any instances"}),
            CapacityUnavailable,
            Scope.OFFER,
            False,
        ),
        (httpx.Response(400, json={"detail": "odd"}), RequestRefused, Scope.OFFER, False),
        (httpx.Response(429, text="slow down"), RateLimited, Scope.CALL, False),
        (httpx.Response(500, text="oops"), CloudUnreachable, Scope.OFFER, True),
        (httpx.Response(410, text="gone"), UnexpectedAnswer, Scope.OFFER, True),
        (
            httpx.Response(301, headers={"location": "https://else.invalid"}),
            UnexpectedAnswer,
            Scope.OFFER,
            True,
        ),
        (httpx.Response(200, text="<html>login</html>"), UnexpectedAnswer, Scope.OFFER, True),
        (httpx.ReadTimeout("slow"), CloudUnreachable, Scope.OFFER, True),
        (httpx.RemoteProtocolError("reset"), CloudUnreachable, Scope.OFFER, True),
        (httpx.ConnectError("refused"), CloudUnreachable, Scope.OFFER, False),
        (httpx.ConnectTimeout("slow"), CloudUnreachable, Scope.OFFER, False),
    ],
)
def test_what_an_answer_means(answer: object, error: type[CloudError], scope: Scope, ambiguous: bool) -> None:
    with pytest.raises(error) as caught:
        api(answer).call("POST", "/pods", body={})
    assert type(caught.value) is error
    assert caught.value.scope is scope
    assert caught.value.ambiguous is ambiguous


def test_a_create_is_sent_once_whatever_is_answered() -> None:
    for answer in (httpx.Response(503), httpx.Response(429), httpx.ReadTimeout("slow")):
        seen: list[httpx.Request] = []
        with pytest.raises(CloudError):
            api(answer, seen=seen).call("POST", "/pods", body={"name": "x"})
        assert len(seen) == 1


def test_reading_is_repeated_and_waits_as_long_as_it_is_asked_to() -> None:
    clock = FakeClock()
    answers = [
        httpx.Response(429, headers={"retry-after": "7"}),
        httpx.Response(502),
        httpx.Response(200, json=[]),
    ]
    assert api(answers, clock).get("/pods").body == []
    assert clock.slept[0] == 7
    with pytest.raises(RateLimited) as caught:
        api(httpx.Response(429, headers={"retry-after": "900"}), clock).get("/pods")
    assert caught.value.retry_after_s == 900, "nobody sleeps through a quarter of an hour here"


def test_no_secret_is_ever_in_an_error() -> None:
    for answer in (httpx.Response(400, text=f"bad key {KEY}"), httpx.ReadError(f"failed for {KEY}")):
        with pytest.raises(CloudError) as caught:
            api(answer).call("GET", "/pods")
        error: BaseException | None = caught.value
        while error is not None:
            assert KEY not in repr(error)
            assert KEY not in str(vars(error))
            error = error.__cause__


def test_a_long_answer_is_shortened_and_kept() -> None:
    with pytest.raises(UnexpectedAnswer) as caught:
        api(httpx.Response(200, text="x" * 100_000)).call("GET", "/pods")
    assert caught.value.answer is not None
    assert 500 < len(caught.value.answer) < 700


def test_the_clouds_clock_is_read_from_its_answers() -> None:
    cloudy = api(httpx.Response(200, json={}, headers={"date": "Mon, 01 Jun 2026 12:05:00 GMT"}))
    assert cloudy.skew_s is None
    cloudy.call("GET", "/pods")
    assert cloudy.skew_s == pytest.approx(300.5)


def test_a_proxy_from_the_environment_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    direct = HttpApi("cloudy", "https://cloudy.invalid", headers={}, secrets=[], verdicts=())
    with pytest.raises(CloudUnreachable) as caught:
        direct.call("GET", "/pods", timeout_s=5)
    assert not caught.value.ambiguous


def test_a_failure_that_mentions_a_box_is_ambiguous_and_names_it() -> None:
    """Rule 1 of the clouds: a create that errors may have made a billing box."""
    client = HttpApi(
        "cloudy",
        "https://cloudy.invalid",
        headers={},
        secrets=[],
        verdicts=(Verdict(CapacityUnavailable, status=400, contains="bid"),),
        box_ids=lambda body: [str(body["contract"])] if "contract" in (body or {}) else [],
        secret_fields=["box_key"],
        transport=httpx.MockTransport(
            lambda _: httpx.Response(400, json={"msg": "bid too low", "contract": 7, "box_key": "s3cret"})
        ),
    )
    with pytest.raises(CapacityUnavailable) as failure:
        client.call("PUT", "/asks/1")
    assert failure.value.ambiguous
    assert failure.value.box_ids == ("7",)
    assert "s3cret" not in str(failure.value) + (failure.value.answer or "")
    assert "bid too low" in str(failure.value)


def test_a_search_that_is_a_post_is_repeated_like_a_get() -> None:
    clock = FakeClock()
    seen: list[httpx.Request] = []
    answers = [httpx.Response(429), httpx.Response(503), httpx.Response(200, json={"offers": []})]
    assert api(answers, clock, seen).read("POST", "/search", body={"q": 1}).body == {"offers": []}
    assert [request.content for request in seen] == [b'{"q":1}'] * 3
