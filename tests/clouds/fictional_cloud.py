"""A cloud that does not exist, as short as an adapter can be: what `docs/adding-a-cloud.md` points to.

`Stratus` stands for the provider: it speaks in plain JSON values, as its API would over HTTP.
"""

from __future__ import annotations

import itertools
import threading
from datetime import UTC, datetime
from typing import Any

from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Capabilities
from gpu_flows.clouds.errors import (
    AuthenticationFailed,
    CapacityUnavailable,
    CloudUnreachable,
    RequestRefused,
    UnexpectedAnswer,
    Verdict,
    verdict_of,
)
from gpu_flows.endpoint import SshEndpoint
from gpu_flows.gpus.catalog import find
from gpu_flows.offers import Offer, OfferQuery


class Stratus:
    """The provider, with its own book of machines and its own words."""

    def __init__(self, api_key: str) -> None:
        self.api_key = api_key
        self.machines: dict[str, dict[str, Any]] = {}
        self.listing: Any = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def call(
        self, api_key: str, method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[int, Any]:
        """Answer one request with a status and a body."""
        if api_key != self.api_key:
            return 401, {"error": "invalid key"}
        with self._lock:
            match method, path.strip("/").split("/"):
                case "GET", ["types"]:
                    return 200, [
                        {"type": "h100x8", "card": "H100-SXM", "cards": 8, "hourly": 19.6, "free": 3}
                    ]
                case "POST", ["machines"]:
                    return self._create(body or {})
                case "GET", ["machines"]:
                    return 200, self.listing if self.listing is not None else [*self.machines.values()]
                case "GET", ["machines", id_] if id_ in self.machines:
                    return 200, self.machines[id_]
                case "DELETE", ["machines", id_] if id_ in self.machines:
                    self.machines[id_]["phase"] = "deleted"
                    self.machines[id_].setdefault("deleted", datetime.now(UTC).isoformat())
                    return 202, {}
                case _:
                    return 404, {"error": "not found"}

    def _create(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["type"] != "h100x8":
            return 422, {"error": f"unknown type {body['type']}"}
        id_ = f"m-{next(self._numbers)}"
        self.machines[id_] = {
            "id": id_, "label": body["label"], "type": body["type"], "phase": "active", "hourly": 19.6,
            "cards": 8, "ip": f"192.0.2.{len(self.machines) + 1}", "made": datetime.now(UTC).isoformat(),
        }  # fmt: skip
        return 201, self.machines[id_]


class StratusCloud:
    """Stratus: H100 nodes by the hour, one region, no way for a box to end itself.

    Source: invented.
    """

    name = "stratus"
    capabilities = Capabilities(multi_node=True, self_destruct=False, lag_s=5)

    def __init__(self, account: str = "default", *, provider: Stratus, api_key: str) -> None:
        self.account = account
        self._provider = provider
        self._api_key = api_key

    def offers(self, query: OfferQuery) -> list[Offer]:
        return [
            Offer(
                cloud=self.name,
                account=self.account,
                instance_type=row["type"],
                gpu=row["card"],
                gpu_count=row["cards"],
                used_count=row["cards"],
                vram_gb=find(row["card"]).vram_gb,
                usd_per_hour=row["hourly"],
                stock=row["free"],
                unavailable=None if row["free"] else "sold out",
                alternative=index,
            )
            for row in self._rows("/types")
            for index, wanted in enumerate(query.request.alternatives)
            if wanted.accepts(row["card"])
        ]

    def create(self, offer: Offer, spec: BoxSpec) -> Box:
        body = {"type": offer.instance_type, "label": spec.name, "ssh_key": spec.ssh_public_key}
        return self._box(self._call("POST", "/machines", body))

    def find(self, name_prefix: str) -> list[Box]:
        boxes = [self._box(row) for row in self._rows("/machines")]
        return [b for b in boxes if b.name.startswith(name_prefix) and b.state is not BoxState.GONE]

    def describe(self, box: Box) -> Box:
        row = self._call("GET", f"/machines/{self._id(box)}", none_on=404)
        return self._box(row or {**_UNKNOWN, "id": box.id, "label": box.name})

    def destroy(self, box: Box) -> None:
        self._call("DELETE", f"/machines/{self._id(box)}", none_on=404)

    def self_destruct(self, spec: BoxSpec) -> str | None:
        return None

    def clock_skew_s(self) -> float | None:
        return None

    def identity_secrets(self) -> tuple[bytes, ...]:
        return (self._api_key.encode(),)

    def console_url(self, box: Box) -> str | None:
        return f"https://stratus.invalid/machines/{box.id}"

    def _id(self, box: Box) -> str:
        if box.cloud != self.name or not box.id:
            raise RequestRefused(f"not a box of {self.name}: {box.cloud} {box.id!r}")
        return box.id

    def _rows(self, path: str) -> list[dict[str, Any]]:
        rows = self._call("GET", path)
        if not isinstance(rows, list):
            raise UnexpectedAnswer(f"{self.name}: {path} gave no list but {type(rows).__name__}")
        return rows

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None, none_on: int = 0) -> Any:
        status, answer = self._provider.call(self._api_key, method, path, body)
        if status < 300:
            return answer
        if status == none_on:
            return None
        verdict = verdict_of(_VERDICTS, status=status, text=str(answer))
        error = verdict.error if verdict else CloudUnreachable
        raise error(f"{self.name}: {method} {path} answered {status}", answer=str(answer)[:200])

    def _box(self, row: dict[str, Any]) -> Box:
        try:
            return Box(
                cloud=self.name,
                account=self.account,
                id=row["id"],
                name=row["label"],
                state=_STATES[row["phase"]],
                usd_per_hour=row["hourly"],
                endpoint=SshEndpoint(row["ip"]) if row["ip"] else None,
                private_address=row["ip"],
                gpu=None,
                gpu_count=row["cards"],
                created_at=datetime.fromisoformat(row["made"]) if row["made"] else None,
                ended_at=datetime.fromisoformat(row["deleted"]) if "deleted" in row else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UnexpectedAnswer(f"{self.name}: not a machine: {str(row)[:200]}") from error


_STATES = {
    "queued": BoxState.STARTING,
    "active": BoxState.RUNNING,
    "off": BoxState.STOPPED,
    "broken": BoxState.FAILED,
    "deleting": BoxState.ENDING,
    "deleted": BoxState.GONE,
}

_UNKNOWN: dict[str, Any] = {"phase": "deleted", "hourly": None, "ip": None, "cards": 0, "made": None}

# What the answer means, as data: first match wins.
_VERDICTS = (
    Verdict(status=401, error=AuthenticationFailed),
    Verdict(status=409, contains="sold out", error=CapacityUnavailable),
    Verdict(status=422, error=RequestRefused),
)
