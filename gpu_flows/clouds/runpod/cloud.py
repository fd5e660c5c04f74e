"""RunPod as the `Cloud` protocol wants it."""

from __future__ import annotations

import re
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds._credentials import no_credentials, previous_secret, secret_from_environment
from gpu_flows.clouds._http import HttpApi
from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Capabilities
from gpu_flows.clouds.errors import (
    AuthenticationFailed,
    CapacityUnavailable,
    NotOffered,
    OutOfBalance,
    RequestRefused,
    Scope,
    UnexpectedAnswer,
    Verdict,
)
from gpu_flows.clouds.runpod.boot import terminate_command
from gpu_flows.clouds.runpod.pods import box_of, create_request, differs, rows_of
from gpu_flows.clouds.runpod.prices import CLOUD, TIERS, offers_of, wanted_by
from gpu_flows.offers import Offer, OfferQuery, Spot

if TYPE_CHECKING:
    import httpx

BASE_URL = "https://api.runpod.io"
_VARIABLE = "RUNPOD_API_KEY"
_CREATE_TIMEOUT_S = 120.0
_ID = re.compile(r"[A-Za-z0-9_-]+")

# What the answer means, as data: first match wins. A 400 has no machine-readable code; what is left unknown is
# refused for this offer alone, and a 5xx is looked up by name.
_VERDICTS = (
    Verdict(AuthenticationFailed, status=401, hint="check RUNPOD_API_KEY"),
    Verdict(OutOfBalance, status=402, hint="add credit at console.runpod.io"),
    Verdict(AuthenticationFailed, status=403, hint="give the API key access to pods"),
    Verdict(
        UnexpectedAnswer,
        status=410,
        scope=Scope.CLOUD,
        ambiguous=False,
        hint="this version of the API is gone: update gpu-flows",
    ),
    Verdict(RequestRefused, status=422),
)
_CREATE_VERDICTS = (
    Verdict(CapacityUnavailable, status=400, contains="no longer any instances available"),
    Verdict(CapacityUnavailable, status=400, contains="enough disk space"),
    Verdict(CapacityUnavailable, status=400, contains="does not have the resources"),
    # A 403 is about one pool of hosts: "skip this candidate, keep going" (createPod in the specification).
    Verdict(
        NotOffered,
        status=403,
        scope=Scope.OFFER,
        hint="the account has no access to this pool, or its key may not create pods",
    ),
    Verdict(RequestRefused, status=404, hint="the image's template or registry is not there"),
)
_DELETE_VERDICTS = (Verdict(RequestRefused, status=409, hint="a member of a cluster goes with its cluster"),)


class RunpodCloud:
    """RunPod: pods, billed by the second, on its own hosts (secure) and on those of others (community).

    Source: the specification of REST v2 (api.runpod.io/v2) and docs.runpod.io.

    Args:
        account: ``default``, or what stands after the ``@`` of ``runpod@team_a``.
        api_key: The key; by default ``RUNPOD_API_KEY`` of the account, else the profile of that name in
            ``~/.runpod/config.toml``.
        base_url: Where the API answers, without ``/v2``.
        clock: Time and sleep.
        transport: Replaces the network, for tests.
    """

    name = CLOUD
    capabilities = Capabilities(lag_s=60, ready_timeout_s=900)

    def __init__(
        self,
        account: str = "default",
        *,
        api_key: str | None = None,
        base_url: str = BASE_URL,
        clock: Clock = SYSTEM_CLOCK,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.account = account
        self._given_key = api_key
        self._base_url = base_url.rstrip("/")
        self._clock = clock
        self._transport = transport
        self._api: HttpApi | None = None
        self._lock = threading.Lock()

    def offers(self, query: OfferQuery) -> list[Offer]:
        """Return the shapes of the cards that are asked for, in each tier and data centre."""
        if query.spot is Spot.ONLY:
            raise NotOffered(
                "runpod's interruptible pods exist only in its GraphQL API, which is being retired",
                hint="ask with spot=never or spot=prefer",
            )
        if query.nodes > 1:
            raise NotOffered(
                "pods of runpod reach each other only within a cluster, which gpu-flows does not rent yet",
                hint="ask for one node with more GPUs, or name another cloud",
            )
        found: list[Offer] = []
        for count in sorted({each.count for each in wanted_by(query)}):
            for tier in TIERS:
                # Stock differs by count and by tier, so each is asked for.
                params = {"include": "AVAILABILITY", "product": "POD", "count": count, "cloud": tier}
                body = self._http().get("/v2/catalog/gpus", params=params).body
                found += offers_of(body, query, account=self.account, count=count, tier=tier)
        return found

    def create(self, offer: Offer, spec: BoxSpec) -> Box:
        """Rent one pod: one call.

        Raises:
            CloudError: With ``ambiguous`` wherever the pod may exist: RunPod has answered 500 after making one.
        """
        body = create_request(offer, spec)
        answer = self._http().call(
            "POST", "/v2/pods", body=body, timeout_s=_CREATE_TIMEOUT_S, verdicts=_CREATE_VERDICTS
        )
        box = box_of(answer.body, self.account)
        if box.name != spec.name:
            raise UnexpectedAnswer(f"runpod answered a create of {spec.name} with the pod {box.name!r}")
        if wrong := differs(box, offer):
            raise UnexpectedAnswer(
                f"runpod made another pod than was asked for, with {wrong}",
                ambiguous=False,
                box_ids=[box.id],
            )
        return box

    def find(self, name_prefix: str) -> list[Box]:
        """Return every pod whose name starts with the prefix: stopped and broken ones bill too."""
        # Members of clusters are left out unless asked for; the listing has no pages.
        body = self._http().get("/v2/pods", params={"includeClusterPods": "true"}).body
        rows = [row for row in rows_of(body) if row["name"].startswith(name_prefix)]
        boxes = [box_of(row, self.account) for row in rows]
        return [box for box in boxes if box.state is not BoxState.GONE]

    def describe(self, box: Box) -> Box:
        """Return the pod as it is now."""
        answer = self._http().get(self._path(box), accept=(404,))
        if answer.status == 404:
            return replace(box, state=BoxState.GONE, state_reason="", endpoint=None)
        now = box_of(answer.body, self.account)
        if now.id != box.id:
            raise UnexpectedAnswer(f"runpod answered for the pod {box.id} with {now.id}")
        return now

    def destroy(self, box: Box) -> None:
        """Delete the pod; one that is gone already is fine."""
        self._http().call("DELETE", self._path(box), accept=(404,), verdicts=_DELETE_VERDICTS)

    def self_destruct(self, spec: BoxSpec) -> str | None:
        """Return sh by which the pod terminates itself, with the key that RunPod gives to each pod."""
        return terminate_command(self._base_url)

    def clock_skew_s(self) -> float | None:
        """Return RunPod's clock less ours in seconds, by its last answer."""
        return self._api.skew_s if self._api else None

    def identity_secrets(self) -> tuple[bytes, ...]:
        """Return the API key, and the one before it where ``..._PREVIOUS`` holds one."""
        keys = (self._key(), previous_secret(_VARIABLE, account=self.account))
        return tuple(key.encode() for key in keys if key)

    def console_url(self, box: Box) -> str | None:
        """Return the pod's page."""
        return f"https://console.runpod.io/pods?id={box.id}"

    def _http(self) -> HttpApi:
        with self._lock:
            if self._api is None:
                key = self._key()
                self._api = HttpApi(
                    self.name,
                    self._base_url,
                    headers={"Authorization": f"Bearer {key}"},
                    secrets=[key],
                    verdicts=_VERDICTS,
                    clock=self._clock,
                    transport=self._transport,
                )
            return self._api

    def _key(self) -> str:
        key = self._given_key or secret_from_environment(_VARIABLE, account=self.account)
        key = key or _key_of_profile(self.account)
        if not key:
            also = f"api_key of [{self.account}] in ~/.runpod/config.toml"
            raise no_credentials(self.name, _VARIABLE, account=self.account, also=also)
        return key

    def _path(self, box: Box) -> str:
        if (box.cloud, box.account) != (self.name, self.account) or not _ID.fullmatch(box.id):
            raise RequestRefused(f"not a box of this account of runpod: {box.cloud}@{box.account} {box.id!r}")
        return f"/v2/pods/{box.id}"


def _key_of_profile(account: str) -> str | None:
    """Return the key that RunPod's own command line has stored."""
    path = Path.home() / ".runpod" / "config.toml"
    try:
        profile = tomllib.loads(path.read_text("utf-8")).get(account)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise AuthenticationFailed(f"{path} cannot be read: {type(error).__name__}") from error
    return profile.get("api_key") if isinstance(profile, dict) else None
