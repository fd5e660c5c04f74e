"""The one HTTP client of the clouds: deadlines, no repeated creates, redacted secrets, the cloud's clock.

What an answer means is a cloud's own table of verdicts; this module only tells a clear refusal from an answer
that leaves open whether something happened.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds.errors import (
    AuthenticationFailed,
    CloudError,
    CloudUnreachable,
    RateLimited,
    RequestRefused,
    Scope,
    UnexpectedAnswer,
    Verdict,
    verdict_of,
)

if TYPE_CHECKING:
    import httpx

USER_AGENT = "gpu-flows/0.1 (+https://github.com/gpu-flows/gpu-flows)"
LONGEST_ANSWER = 600
"""Characters of an unknown answer that are kept in an error."""
_MASK = "***"
_RETRIES = 3
_LONGEST_PAUSE_S = 20.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a cloud answered.

    Attributes:
        status: HTTP status.
        body: The parsed JSON; None for an empty body.
        text: The body as text.
        headers: Lower-case names.
    """

    status: int
    body: Any
    text: str
    headers: Mapping[str, str]


class HttpApi:
    """One account of one cloud over HTTP; safe to use from several threads.

    Args:
        cloud: Name of the cloud, for errors.
        base_url: Without a trailing slash.
        headers: Sent with every request; may hold the key.
        secrets: Values that must never show up in an error.
        verdicts: What the cloud's failures mean; the first match wins.
        error_code: Reads the cloud's machine-readable error code from a body.
        box_ids: Reads the ids of boxes that a failure mentions: they may exist in spite of it.
        secret_fields: Fields of answers that hold a secret, whose values never show up in an error.
        timeout_s: For one call, unless the call says otherwise.
        clock: Time and sleep.
        transport: Replaces the network, for tests.
    """

    def __init__(
        self,
        cloud: str,
        base_url: str,
        *,
        headers: Mapping[str, str],
        secrets: Sequence[str],
        verdicts: Sequence[Verdict],
        error_code: Callable[[Any], str | None] = lambda _: None,
        box_ids: Callable[[Any], Sequence[str]] = lambda _: (),
        secret_fields: Sequence[str] = (),
        timeout_s: float = 30.0,
        clock: Clock = SYSTEM_CLOCK,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._cloud = cloud
        self._base_url = base_url.rstrip("/")
        self._headers = {"User-Agent": USER_AGENT, "Accept": "application/json", **headers}
        self._secrets = sorted((secret for secret in secrets if secret), key=len, reverse=True)
        self._verdicts = verdicts
        self._error_code = error_code
        self._box_ids = box_ids
        self._secret_field = _field_pattern(secret_fields) if secret_fields else None
        self._timeout_s = timeout_s
        self._clock = clock
        self._transport = transport
        self._client: httpx.Client | None = None
        self._lock = threading.Lock()
        self._skew_s: float | None = None

    @property
    def skew_s(self) -> float | None:
        """The cloud's clock less ours in seconds, by the Date of its last answer."""
        return self._skew_s

    def get(
        self,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        accept: Sequence[int] = (),
    ) -> Answer:
        """Read something; repeated a few times where the cloud is busy or does not answer.

        Raises:
            CloudError: What the answer means.
        """
        return self.read("GET", path, params=params, timeout_s=timeout_s, accept=accept)

    def read(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        accept: Sequence[int] = (),
    ) -> Answer:
        """Do what `get` does by another method: a search that is a POST.

        Raises:
            CloudError: What the answer means.
        """
        return patiently(
            lambda: self.call(method, path, body=body, params=params, timeout_s=timeout_s, accept=accept),
            self._clock,
        )

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        accept: Sequence[int] = (),
        verdicts: Sequence[Verdict] = (),
    ) -> Answer:
        """Make one call, once.

        Args:
            method: The HTTP method.
            path: Below the base URL; never holds a secret.
            body: Sent as JSON.
            params: The query; never holds a secret.
            timeout_s: For the whole call.
            accept: Statuses beside 2xx that are returned and not raised.
            verdicts: What failures of this call mean; looked at before those of the cloud.

        Returns:
            A 2xx or accepted answer with JSON or an empty body.

        Raises:
            CloudUnreachable: No answer, or a 5xx: what was asked may have been done.
            UnexpectedAnswer: A 2xx that is no JSON, or a failure that no verdict knows.
            CloudError: What the verdicts say.
        """
        import httpx

        where = f"{method} {path}"
        try:
            response = self._open().request(
                method,
                f"{self._base_url}{path}",
                json=body if body is not None else None,
                params=dict(params) if params else None,
                timeout=httpx.Timeout(timeout_s or self._timeout_s, connect=10.0),
            )
        except httpx.ConnectError as error:
            # Nothing was sent, so nothing was done.
            raise CloudUnreachable(
                f"{self._cloud} cannot be reached ({where}): {self.redact(str(error))}", ambiguous=False
            ) from None
        except httpx.ConnectTimeout:
            raise CloudUnreachable(
                f"{self._cloud} cannot be reached in time ({where})", ambiguous=False
            ) from None
        except httpx.HTTPError as error:
            raise CloudUnreachable(
                f"{self._cloud} did not answer {where}: {type(error).__name__} {self.redact(str(error))}".rstrip()
            ) from None
        self.note_date(response.headers.get("date"))
        return self._judged(where, response, accept, verdicts)

    def redact(self, text: str) -> str:
        """Return a text without the account's secrets."""
        for secret in self._secrets:
            text = text.replace(secret, _MASK)
        return text

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _open(self) -> httpx.Client:
        import httpx

        with self._lock:
            if self._client is None:
                # Proxies come from the environment; redirects are refused, since they would carry the key along.
                self._client = httpx.Client(
                    headers=self._headers, transport=self._transport, follow_redirects=False
                )
            return self._client

    def _judged(
        self, where: str, response: httpx.Response, accept: Sequence[int], verdicts: Sequence[Verdict]
    ) -> Answer:
        text = response.text
        try:
            body = json.loads(text) if text.strip() else None
            is_json = True
        except ValueError:
            body, is_json = None, False
        answer = Answer(response.status_code, body, text, {k.lower(): v for k, v in response.headers.items()})
        if response.is_success or answer.status in accept:
            if not is_json:
                raise UnexpectedAnswer(
                    f"{self._cloud} answered {where} with {answer.status} and no JSON",
                    answer=self._shown(text),
                )
            return answer
        raise self.error(answer, where, verdicts)

    def error(self, answer: Answer, where: str, verdicts: Sequence[Verdict] = ()) -> CloudError:
        """Return what a failure means, by the cloud's verdicts, else by its status.

        Args:
            answer: The failure.
            where: Which call it answered, for the message.
            verdicts: Looked at before those of the cloud.
        """
        shown = self._shown(answer.text)
        retry_after_s = _seconds(answer.headers.get("retry-after"))
        code = self._error_code(answer.body)
        known = (*verdicts, *self._verdicts)
        verdict = verdict_of(known, status=answer.status, code=code, text=answer.text)
        message = f"{self._cloud} answered {where} with {answer.status}: {shown or 'an empty body'}"
        verdict = verdict or _by_status(answer.status)
        box_ids = tuple(self._box_ids(answer.body))
        return verdict.error(
            message,
            hint=verdict.hint,
            scope=verdict.scope,
            ambiguous=True if box_ids else verdict.ambiguous,
            box_ids=box_ids,
            retry_after_s=retry_after_s,
            answer=shown,
        )

    def _shown(self, text: str) -> str:
        text = " ".join(self.redact(text).split())
        if self._secret_field is not None:
            text = self._secret_field.sub(rf"\1{_MASK}", text)
        return text if len(text) <= LONGEST_ANSWER else f"{text[:LONGEST_ANSWER]}..."

    def note_date(self, date: str | None) -> None:
        """Read the cloud's clock from the Date header of an answer, whichever client brought it."""
        if not date:
            return
        try:
            told = parsedate_to_datetime(date)
        except ValueError:
            return
        if told.tzinfo is None:
            told = told.replace(tzinfo=UTC)
        # The header has whole seconds: on average it is half a second behind.
        self._skew_s = (told - self._clock.now()).total_seconds() + 0.5


def patiently(read: Callable[[], T], clock: Clock) -> T:
    """Return what a read returns; it is repeated a few times where the cloud is busy or does not answer.

    Args:
        read: Makes one call that may be repeated without harm.
        clock: Its sleep.

    Raises:
        CloudError: What the last answer means.
    """
    pause_s = 0.5
    for left in reversed(range(_RETRIES)):
        try:
            return read()
        except (CloudUnreachable, RateLimited) as error:
            wait_s = error.retry_after_s or pause_s * random.uniform(0.7, 1.3)  # noqa: S311 - jitter
            if not left or wait_s > _LONGEST_PAUSE_S:
                raise
            clock.sleep(wait_s)
            pause_s *= 3
    raise AssertionError("unreachable")


def _by_status(status: int) -> Verdict:
    """Return what a failure that no verdict of the cloud knows means, by its status alone."""
    match status:
        case 401 | 403:
            return Verdict(AuthenticationFailed)
        case 429:
            return Verdict(RateLimited)
        case 400 | 422:
            return Verdict(RequestRefused, scope=Scope.OFFER)
    return Verdict(CloudUnreachable if status >= 500 else UnexpectedAnswer)


def _field_pattern(names: Sequence[str]) -> re.Pattern[str]:
    return re.compile(rf'("(?:{"|".join(map(re.escape, names))})"\s*:\s*)"[^"]*"')


def _seconds(header: str | None) -> float | None:
    """Read Retry-After: seconds, or a date."""
    if not header:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (until - datetime.now(UTC)).total_seconds())
