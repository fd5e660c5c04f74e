"""boto3 as the adapter wants it: one session, clients by service and region, one attempt a call, our own errors."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from gpu_flows.clock import Clock
from gpu_flows.clouds.aws.verdicts import translated
from gpu_flows.clouds.errors import AuthenticationFailed, CloudUnreachable, RateLimited, UnexpectedAnswer
from gpu_flows.errors import MissingExtra

DEFAULT_REGION = "us-east-1"
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 60
_TRIES = 3
_MASK = "***"
_MOST_PAGES = 1000


class AwsApi:
    """One account of AWS; safe to use from several threads.

    Args:
        profile: A profile of the shared configuration; None for boto3's own chain.
        access_key_id: Explicit credentials, before the chain.
        secret_access_key: Goes with it.
        session_token: Goes with it where it is temporary.
        base_url: Where every service is asked instead of at AWS, for emulators.
        clock: Time and sleep.
    """

    def __init__(
        self,
        *,
        profile: str | None,
        access_key_id: str | None,
        secret_access_key: str | None,
        session_token: str | None,
        base_url: str | None,
        clock: Clock,
    ) -> None:
        self._profile = profile
        self._explicit = {
            "aws_access_key_id": access_key_id,
            "aws_secret_access_key": secret_access_key,
            "aws_session_token": session_token,
        }
        self._base_url = base_url
        self._clock = clock
        self._lock = threading.RLock()
        self._session: Any = None
        self._secrets: tuple[str, ...] = ()
        self._clients: dict[tuple[str, str], Any] = {}
        self._skew_s: float | None = None

    @property
    def skew_s(self) -> float | None:
        """The clock of AWS less ours in seconds, by the Date of its last answer."""
        return self._skew_s

    @property
    def home_region(self) -> str:
        """The region that the profile or the environment names."""
        return self._opened().region_name or DEFAULT_REGION

    def known_regions(self) -> tuple[str, ...]:
        """Return every region of the partition, whether the account has it enabled or not."""
        session = self._opened()
        partition = session.get_partition_for_region(self.home_region)
        return tuple(session.get_available_regions("ec2", partition_name=partition))

    def static_secret(self) -> str | None:
        """Return the secret key; None where the credentials are temporary.

        Raises:
            AuthenticationFailed: When there are no credentials.
        """
        credentials = self._credentials()
        temporary = hasattr(credentials, "refresh_needed") or credentials.token
        return None if temporary else str(credentials.secret_key)

    def read(self, service: str, region: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """Ask something that changes nothing; repeated a few times where AWS is busy or does not answer.

        Raises:
            CloudError: What the answer means.
        """
        pause_s = 0.5
        for left in reversed(range(_TRIES)):
            try:
                return self.call(service, region, operation, **parameters)
            except (CloudUnreachable, RateLimited):
                if not left:
                    raise
                self._clock.sleep(pause_s * random.uniform(0.7, 1.3))  # noqa: S311 - jitter
                pause_s *= 3
        raise AssertionError("unreachable")

    def pages(self, service: str, region: str, operation: str, key: str, **parameters: Any) -> Iterator[Any]:
        """Yield the items of every page of a listing.

        Args:
            service: As boto3 names it.
            region: Where.
            operation: As boto3 names it.
            key: Where the items are.
            **parameters: Of the call.

        Raises:
            UnexpectedAnswer: When an answer holds no list there: it is "unknown", never "none".
            CloudError: What the answer means.
        """
        for _ in range(_MOST_PAGES):
            answer = self.read(service, region, operation, **parameters)
            items = answer.get(key)
            if not isinstance(items, list):
                raise UnexpectedAnswer(f"aws answered {operation} in {region} without {key}")
            yield from items
            token = answer.get("NextToken")
            if not token:
                return
            parameters["NextToken"] = token
        raise UnexpectedAnswer(f"aws goes on giving pages of {operation} in {region}")

    def call(
        self, service: str, region: str, operation: str, *, creating: bool = False, **parameters: Any
    ) -> dict[str, Any]:
        """Make one call, once.

        Args:
            service: As boto3 names it.
            region: Where.
            operation: As boto3 names it.
            creating: Whether it creates a box, so that an error may be ambiguous.
            **parameters: Of the call.

        Raises:
            CloudError: What the answer means; the exception of boto3 is its cause.
        """
        client = self._client(service, region)
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        try:
            answer: dict[str, Any] = getattr(client, operation)(**parameters)
        except ClientError as error:
            self._note_date(error.response)
            raise translated(error, f"{operation} in {region}", redact=self.redact) from error
        except (BotoCoreError, ResponseParserError) as error:
            where = f"{operation} in {region}"
            raise translated(error, where, creating=creating, redact=self.redact) from error
        self._note_date(answer)
        return answer

    def redact(self, text: str) -> str:
        """Return a text without the account's secrets."""
        for secret in self._secrets:
            text = text.replace(secret, _MASK)
        return text

    def _client(self, service: str, region: str) -> Any:
        self._credentials()
        with self._lock:
            key = (service, region)
            if key not in self._clients:
                from botocore.config import Config

                # RunInstances that fails for lack of capacity is HTTP 500, which botocore would send again;
                # what may be repeated is repeated here, by the injected clock.
                config = Config(
                    retries={"total_max_attempts": 1},
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    read_timeout=_READ_TIMEOUT_S,
                    user_agent_extra="gpu-flows/0.1",
                    max_pool_connections=16,
                )
                self._clients[key] = self._opened().client(
                    service, region_name=region, endpoint_url=self._base_url, config=config
                )
            return self._clients[key]

    def _credentials(self) -> Any:
        """Return the credentials as boto3 found them; those that renew themselves do so when they are used."""
        session = self._opened()
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            with self._lock:
                credentials = session.get_credentials()
                if credentials is not None and not self._secrets:
                    values = (credentials.secret_key, credentials.token)
                    self._secrets = tuple(value for value in values if value)
        except (BotoCoreError, ClientError) as error:
            raise AuthenticationFailed(
                f"aws: the credentials cannot be had: {error}", hint=self._hint()
            ) from error
        if credentials is None:
            raise AuthenticationFailed("aws: there are no credentials", hint=self._hint())
        return credentials

    def _hint(self) -> str:
        if self._profile:
            return f"configure the profile {self._profile!r}: `aws configure --profile {self._profile}`"
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or configure a profile or a role"

    def _opened(self) -> Any:
        with self._lock:
            if self._session is None:
                try:
                    import boto3
                    from botocore.exceptions import BotoCoreError
                except ImportError as error:
                    raise MissingExtra("boto3", "aws") from error
                try:
                    self._session = boto3.Session(profile_name=self._profile, **self._explicit)
                except BotoCoreError as error:
                    raise AuthenticationFailed(f"aws: {error}", hint=self._hint()) from error
            return self._session

    def _note_date(self, answer: Mapping[str, Any]) -> None:
        date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        if not date:
            return
        try:
            told = parsedate_to_datetime(date)
        except ValueError:
            return
        told = told if told.tzinfo else told.replace(tzinfo=UTC)
        # The header has whole seconds: on average it is half a second behind.
        self._skew_s = (told - self._clock.now()).total_seconds() + 0.5

    def now(self) -> datetime:
        """Return the time by the clock of AWS, as far as it has told it."""
        return self._clock.now() + timedelta(seconds=self._skew_s or 0.0)
