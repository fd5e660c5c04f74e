"""pydo, DigitalOcean's own client, with what it leaves open settled: one request a call, every failure an error."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from gpu_flows.clock import Clock
from gpu_flows.clouds._http import USER_AGENT, Answer, HttpApi, patiently
from gpu_flows.clouds.digitalocean.failures import VERDICTS, available_regions, error_code
from gpu_flows.clouds.errors import CloudUnreachable, UnexpectedAnswer
from gpu_flows.errors import MissingExtra

_CONNECT_TIMEOUT_S = 10.0


class PydoApi:
    """One account of DigitalOcean over pydo; safe to use from several threads.

    Left to itself, pydo repeats a create on 500, 503 and 504, and `get` and `destroy` return a 404 as though it
    were a droplet.

    Args:
        token: The account's API token.
        base_url: Of the API, without a trailing slash.
        secrets: More values that must never show up in an error.
        timeout_s: For one call.
        clock: Time and sleep.
    """

    def __init__(
        self,
        token: str,
        base_url: str,
        *,
        secrets: Sequence[str] = (),
        timeout_s: float = 60.0,
        clock: Clock,
    ) -> None:
        self._token = token
        self._base_url = base_url
        self._timeout_s = timeout_s
        self._clock = clock
        # Never asked to send anything: it knows what answers mean.
        self._judge = HttpApi(
            "digitalocean",
            base_url,
            headers={},
            secrets=[token, *secrets],
            verdicts=VERDICTS,
            error_code=error_code,
            secret_fields=("user_data",),
            clock=clock,
        )
        self._client: Any = None
        self._lock = threading.Lock()

    @property
    def skew_s(self) -> float | None:
        """The cloud's clock less ours in seconds, by the Date of its last answer."""
        return self._judge.skew_s

    def read(self, operation: str, *args: Any, accept: Sequence[int] = (), **options: Any) -> Answer:
        """Do what `call` does, repeated a few times where the cloud is busy or does not answer."""
        return patiently(lambda: self.call(operation, *args, accept=accept, **options), self._clock)

    def call(self, operation: str, *args: Any, accept: Sequence[int] = (), **options: Any) -> Answer:
        """Make one call, once.

        Args:
            operation: What pydo calls it: ``droplets.create``.
            *args: What pydo's method takes.
            accept: Statuses beside 2xx that are returned and not raised.
            **options: What pydo's method takes by name.

        Raises:
            MissingExtra: When pydo is not installed.
            CloudUnreachable: No answer, or a 5xx: what was asked may have been done.
            UnexpectedAnswer: An answer that is no JSON, or a failure that no verdict knows.
            CloudError: What the verdicts say.
        """
        response = self._send(operation, args, options)
        self._judge.note_date(response.headers.get("date"))
        text = response.text()
        try:
            body, is_json = (json.loads(text) if text.strip() else None), True
        except ValueError:
            body, is_json = None, False
        headers = {name.lower(): value for name, value in response.headers.items()}
        answer = Answer(response.status_code, body, text, headers)
        if not (200 <= answer.status < 300 or answer.status in accept):
            error = self._judge.error(answer, operation)
            if regions := available_regions(body):
                error.hint = f"DigitalOcean says that it can be had in {', '.join(regions)}"
            raise error
        if not is_json:
            raise UnexpectedAnswer(
                f"digitalocean answered {operation} with {answer.status} and no JSON",
                answer=self._judge.redact(text)[:200],
            )
        return answer

    def _send(self, operation: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return the raw response of one request, whatever its status."""
        method: Callable[..., Any] = attrgetter(operation)(self._open())
        from azure.core import exceptions as azure

        seen: list[Any] = []
        try:
            method(
                *args,
                retry_total=0,
                connection_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=self._timeout_s,
                raw_response_hook=lambda response: seen.append(response.http_response),
                **options,
            )
        except azure.HttpResponseError as error:
            # pydo raises for every status that is not in its specification.
            seen.append(error.response)
        except azure.AzureError as error:
            raise CloudUnreachable(
                f"digitalocean did not answer {operation}: {self._judge.redact(str(error))}",
                ambiguous=not _never_sent(error),
            ) from None
        except ValueError:
            pass  # The body is no JSON, and pydo stumbled over it; the response is at hand all the same.
        if not seen or seen[-1] is None:
            raise UnexpectedAnswer(f"digitalocean gave pydo no answer to {operation}")
        return seen[-1]

    def _open(self) -> Any:
        with self._lock:
            if self._client is None:
                try:
                    import pydo
                except ImportError as error:
                    raise MissingExtra("pydo", "digitalocean") from error
                from azure.core.credentials import AzureKeyCredential
                from azure.core.pipeline.policies import AzureKeyCredentialPolicy

                self._client = pydo.Client(
                    token=self._token,
                    endpoint=self._base_url,
                    # pydo's own policy refuses to send a token to an http endpoint, such as an emulator.
                    authentication_policy=AzureKeyCredentialPolicy(
                        AzureKeyCredential(self._token), "Authorization", prefix="Bearer"
                    ),
                    # A redirect would carry the token along.
                    permit_redirects=False,
                    user_agent=USER_AGENT,
                )
            return self._client


def _never_sent(error: Any) -> bool:
    """Tell whether a request failed before a byte of it was sent: no connection was made."""
    from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

    reason = getattr(error, "inner_exception", None)
    # requests wraps what urllib3 says, and urllib3 wraps what ended its attempts.
    if isinstance(reason, OSError) and reason.args:
        reason = reason.args[0]
    return isinstance(getattr(reason, "reason", None) or reason, NewConnectionError | ConnectTimeoutError)
