"""Hot Aisle as the `Cloud` protocol wants it."""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds._credentials import no_credentials, previous_secret, secret_from_environment
from gpu_flows.clouds._http import HttpApi, patiently
from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Capabilities
from gpu_flows.clouds.errors import (
    AuthenticationFailed,
    CapacityUnavailable,
    CloudError,
    CloudUnreachable,
    NotOffered,
    OutOfBalance,
    QuotaExceeded,
    RequestRefused,
    Scope,
    UnexpectedAnswer,
    Verdict,
)
from gpu_flows.clouds.hotaisle.machines import (
    box_of,
    description_of,
    offers_of,
    shape_of,
    state_of,
)
from gpu_flows.clouds.hotaisle.turns import turn_at
from gpu_flows.offers import Offer, OfferQuery

API = "https://admin.hotaisle.app/api"

_KEY, _TEAM = "HOTAISLE_API_KEY", "HOTAISLE_TEAM"
_CREATE_TIMEOUT_S = 330.0
"""Creates take minutes, and go on when nobody waits for them."""
_DELETE_TIMEOUT_S = 20.0
"""A delete answers when it is done, minutes later, and goes on when nobody waits for it."""
_TURN_TIMEOUT_S = 900.0
_VM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class _Absent(CloudError):
    """There is no such machine, or no such team: the answers are the same."""


class _Registered(CloudError):
    """An SSH key is one of the user's already."""


# What the answers mean, as data; the first match wins.
VERDICTS = (
    Verdict(
        QuotaExceeded,
        status=401,
        contains="Maximum VMs",
        scope=Scope.CLOUD,
        hint="end a machine of the team, or have its maximum raised",
    ),
    Verdict(AuthenticationFailed, status=401, hint="the API key is wrong or was revoked"),
    Verdict(OutOfBalance, status=402, hint="buy credit for the team"),
    Verdict(AuthenticationFailed, status=403, hint="the API key needs the role operator in the team"),
    Verdict(
        AuthenticationFailed, status=404, hint=f"{_TEAM} is the handle of a team that the API key belongs to"
    ),
    Verdict(RequestRefused, status=422, scope=Scope.OFFER),
    Verdict(RequestRefused, status=428, scope=Scope.CLOUD, hint="the team has to meet a condition first"),
)
_OF_A_CREATE = (Verdict(CapacityUnavailable, status=404),)
_OF_A_NAME = (Verdict(CloudUnreachable, status=404),)
"""A machine that was born a moment ago may not be known everywhere yet: ask again."""
_OF_A_MACHINE = (Verdict(_Absent, status=404),)
_OF_A_KEY = (
    Verdict(_Registered, status=409),
    Verdict(
        AuthenticationFailed,
        status=403,
        hint="the API key needs the role owner of its user to register an SSH key",
    ),
)


class HotAisleCloud:
    """Hot Aisle: virtual machines with AMD MI300X cards, billed by the minute with a least charge; one site.

    A machine cannot be told a name in the create call, nor what to do at boot: creates take turns, the name follows
    at once in the machine's description, and no machine ends its own billing.

    Source: the API's published specification (the swagger of Hot Aisle's command line).

    Args:
        account: ``default``, or what stands after the ``@``.
        api_key: The API key; from the environment unless given.
        team: The team's handle; from the environment unless given.
        base_url: Of the API.
        state: Folder of this machine's memory, where creates take turns.
        clock: Time and sleep.
    """

    name = "hotaisle"
    capabilities = Capabilities(self_destruct=False, names_at_create=False, lag_s=330.0)

    def __init__(
        self,
        account: str = "default",
        *,
        api_key: str | None = None,
        team: str | None = None,
        base_url: str = API,
        state: str | Path | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        from gpu_flows.settings import state_folder

        self.account = account
        self._api_key = api_key
        self._team = team
        self._base_url = base_url.rstrip("/")
        self._state = Path(state) if state else state_folder(os.environ)
        self._clock = clock
        self._http: HttpApi | None = None
        self._keys: set[str] = set()
        self._lock = threading.RLock()

    def offers(self, query: OfferQuery) -> list[Offer]:
        """Return every kind of machine with cards, in the numbers in which the listing sells them."""
        if query.request.is_cpu:
            return []
        rows = self._rows(f"{self._machines}available/")
        return offers_of(rows, account=self.account, disk_gb=query.disk_gb)

    def create(self, offer: Offer, spec: BoxSpec) -> Box:
        """Make one machine and write its name into its description; one that cannot be named is told by its id."""
        specs = self._specs(offer, spec)
        try:
            self._register_key(spec)
        except CloudError as error:
            error.ambiguous = False  # no machine has been asked for yet
            raise
        with turn_at(self._turns, timeout_s=_TURN_TIMEOUT_S, clock=self._clock):
            sent_at = self._clock.now() + timedelta(seconds=self.clock_skew_s() or 0.0)
            answer = self._api.call(
                "POST", self._machines, body=specs, timeout_s=_CREATE_TIMEOUT_S, verdicts=_OF_A_CREATE
            )
            row = answer.body
            machine = row.get("name") if isinstance(row, dict) else None
            if not isinstance(machine, str) or not _VM_NAME.fullmatch(machine):
                raise UnexpectedAnswer(f"hotaisle made a machine and gave it no name: {answer.text[:200]}")
            note = {
                "usd_per_hour": offer.usd_per_hour,
                "created_at": sent_at.isoformat(timespec="seconds"),
                "minimum_minutes": offer.minimum_minutes,
                "owner": spec.owner,
            }
            description = self._describe(machine, spec.name, note)
        return box_of({**row, "description": description}, account=self.account)

    def find(self, name_prefix: str) -> list[Box]:
        """Return every machine, in every state, whose name starts with the prefix; "" finds those without one."""
        boxes = [box_of(row, account=self.account) for row in self._rows(self._machines)]
        return [self._with_state(box) for box in boxes if box.name.startswith(name_prefix)]

    def describe(self, box: Box) -> Box:
        """Return the machine as it is now; it is gone only where the team's listing agrees."""
        path = self._path(box)
        try:
            answer = patiently(lambda: self._api.call("GET", path, verdicts=_OF_A_MACHINE), self._clock)
        except _Absent as absent:
            # A wrong team is answered with the same 404.
            if any(row.get("name") == box.id for row in self._rows(self._machines)):
                raise UnexpectedAnswer(
                    f"hotaisle lists the machine {box.id} and says that it does not exist"
                ) from absent
            return replace(box, state=BoxState.GONE, state_reason="", endpoint=None)
        return self._with_state(box_of(answer.body, account=self.account))

    def destroy(self, box: Box) -> None:
        """Delete the machine with its data; one that is gone already is fine."""
        try:
            # Without force it fails as long as the minimum reservation lasts, which is charged anyway.
            self._api.call(
                "DELETE",
                self._path(box),
                params={"force": "true"},
                timeout_s=_DELETE_TIMEOUT_S,
                verdicts=_OF_A_MACHINE,
            )
        except _Absent:
            return
        except CloudUnreachable as error:
            # It was sent, and nobody has said a word: it goes on.
            if not error.ambiguous or error.answer is not None:
                raise

    def self_destruct(self, spec: BoxSpec) -> str | None:
        """Return None: a machine has no means to end its own billing."""
        return None

    def clock_skew_s(self) -> float | None:
        """Return the cloud's clock less ours, from the Date header of its last answer."""
        return self._http.skew_s if self._http else None

    def identity_secrets(self) -> tuple[bytes, ...]:
        """Return the API key, and the one before it where that is still known."""
        previous = previous_secret(_KEY, account=self.account)
        return tuple(secret.encode() for secret in (self._secret(), previous) if secret)

    def console_url(self, box: Box) -> str | None:
        """Return where a person logs in; there is no page of its own for a machine."""
        return "https://admin.hotaisle.app"

    @property
    def _api(self) -> HttpApi:
        with self._lock:
            if self._http is None:
                key = self._secret()
                self._http = HttpApi(
                    self.name,
                    self._base_url,
                    headers={"Authorization": f"Token {key}"},
                    secrets=[key],
                    verdicts=VERDICTS,
                    clock=self._clock,
                )
            return self._http

    def _secret(self) -> str:
        key = self._api_key or secret_from_environment(_KEY, account=self.account)
        if key is None:
            raise no_credentials(self.name, _KEY, account=self.account)
        return key

    @property
    def _handle(self) -> str:
        team = self._team or secret_from_environment(_TEAM, account=self.account)
        if team is None:
            raise no_credentials(self.name, _TEAM, account=self.account)
        return team

    @property
    def _machines(self) -> str:
        return f"/teams/{quote(self._handle, safe='')}/virtual_machines/"

    @property
    def _turns(self) -> Path:
        team = re.sub(r"[^A-Za-z0-9_-]", "_", self._handle)
        return self._state / "hotaisle" / f"{team}.lock"

    def _path(self, box: Box) -> str:
        if box.cloud != self.name or not _VM_NAME.fullmatch(box.id):
            raise RequestRefused(f"not a machine of Hot Aisle: {box.cloud} {box.id!r}")
        return f"{self._machines}{box.id}/"

    def _rows(self, path: str) -> list[Any]:
        answer = self._api.get(path)
        if not isinstance(answer.body, list) or not all(isinstance(row, dict) for row in answer.body):
            raise UnexpectedAnswer(f"hotaisle gave no list for {path}: {answer.text[:200]}")
        return answer.body

    def _with_state(self, box: Box) -> Box:
        """Return the box with its state; one whose state cannot be read exists all the same."""
        try:
            body = self._api.call("GET", f"{self._path(box)}state/").body
            state, reason = state_of(body["state"])
        except (CloudError, KeyError, TypeError, AttributeError) as error:
            # The machine's host answers this one, and may be down while the machine is billed.
            state, reason = BoxState.STARTING, f"its state cannot be read: {error}"
        return replace(box, state=state, state_reason=reason)

    def _specs(self, offer: Offer, spec: BoxSpec) -> dict[str, Any]:
        if spec.image is not None:
            raise NotOffered(
                f"Hot Aisle boots its own image only, so not {spec.image}",
                hint='name the image for the other clouds only: image={"runpod": ...}',
            )
        if spec.env:
            raise NotOffered("a machine has no environment of its own", hint="pass env= to the job instead")
        specs = offer.details.get("specs")
        if not isinstance(specs, dict) or shape_of(specs) != offer.instance_type:
            raise RequestRefused(f"not an offer of Hot Aisle: {offer.cloud} {offer.instance_type}")
        return specs

    def _register_key(self, spec: BoxSpec) -> None:
        """See to it that the key is one of the user's: these open every new machine."""
        kind, blob = spec.ssh_public_key.split()[:2]
        with self._lock:
            if blob in self._keys:
                return
            known = self._rows("/user/ssh_keys/")
            if not any((row.get("type"), row.get("public_key")) == (kind, blob) for row in known):
                body = {"authorized_key": spec.ssh_public_key.strip()}
                with suppress(_Registered):  # by somebody else, since we have looked
                    self._api.call("POST", "/user/ssh_keys/", body=body, verdicts=_OF_A_KEY)
            self._keys.add(blob)

    def _describe(self, machine: str, name: str, note: dict[str, Any]) -> str:
        """Write a machine's name and note, or its name alone where the note is too much for Hot Aisle."""

        def write(text: str) -> str:
            path, body = f"{self._machines}{machine}/", {"description": text}
            patiently(lambda: self._api.call("PATCH", path, body=body, verdicts=_OF_A_NAME), self._clock)
            return text

        try:
            try:
                return write(description_of(name, note))
            except RequestRefused:
                return write(name)
        except CloudError as error:
            # It is ours for sure, and nobody would find it again: whoever called ends it by its id.
            raise type(error)(
                f"the machine {machine} could not be given its name: {error.message}",
                hint=error.hint,
                scope=error.scope,
                ambiguous=False,
                box_ids=(machine,),
                retry_after_s=error.retry_after_s,
                answer=error.answer,
            ) from error
