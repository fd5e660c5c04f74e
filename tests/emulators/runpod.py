"""RunPod's REST v2 on loopback: the catalog, pods with real boxes behind them, and what goes wrong there."""

from __future__ import annotations

import base64
import gzip
import re
import secrets
import shlex
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_flows.clouds.runpod.boot import started_after_boot

from .http import Reply, Request, Row
from .spec import SpecChecked

KEY = "rpa_INVENTEDKEYOFTHEACCOUNT"
NO_INSTANCES = (
    "There are no longer any instances available with the requested specifications. "
    "Please refresh and try again."
)
NO_DISK = "There are no longer any instances available with enough disk space."

LEVELS = ("NONE", "LOW", "MEDIUM", "HIGH")
_ACTIONS = {
    "RUNNING": ["stop", "restart", "terminate"],
    "EXITED": ["start", "terminate"],
    "ERROR": ["start", "terminate"],
    "PROVISIONING": ["stop", "terminate"],
    "STARTING": ["stop", "terminate"],
    "TERMINATED": [],
}


@dataclass
class Card:
    """One line of the catalog.

    Attributes:
        id: RunPod's own id.
        memory: GB.
        secure: Dollars per GPU and hour; None where it is not rented so.
        community: As `secure`.
        most: Most GPUs on a pod, by tier.
        stock: Availability by data centre of the secure tier, and under ``""`` of the community's hosts.
    """

    id: str
    memory: int
    secure: float | None
    community: float | None
    most: Mapping[str, int] = field(default_factory=lambda: {"SECURE": 8, "COMMUNITY": 4})
    stock: dict[str, str] = field(default_factory=lambda: {"US-KS-2": "HIGH", "EU-RO-1": "LOW", "": "MEDIUM"})

    def price(self, tier: str) -> float | None:
        return self.secure if tier == "SECURE" else self.community

    def places(self, tier: str) -> dict[str, str]:
        return {place: level for place, level in self.stock.items() if bool(place) == (tier == "SECURE")}


def cards() -> dict[str, Card]:
    """Return a catalog of prices that are invented."""
    rows = [
        Card("NVIDIA H100 80GB HBM3", 80, 2.69, None),
        Card("NVIDIA H100 PCIe", 80, 2.39, 1.99),
        Card("NVIDIA A100-SXM4-80GB", 80, 1.49, None),
        Card("NVIDIA A100 80GB PCIe", 80, 1.39, 1.19),
        Card("NVIDIA RTX A6000", 48, 0.76, 0.49),
        Card("NVIDIA GeForce RTX 4090", 24, 0.69, 0.34),
        Card("NVIDIA B300 SXM6 AC", 288, 7.89, None),
        Card("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, 1.69, None),
        Card("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb", 24, 0.42, None),
        Card("AMD Instinct MI300X OAM", 192, 0.99, None),
    ]
    return {card.id: card for card in rows}


class RunpodEmulator(SpecChecked):
    """One account of RunPod.

    Operations for `fault`: catalog, create, list, get, delete, action.

    Args:
        backing: Folder for real boxes behind the pods.
        **options: For `HttpEmulator`.

    Attributes:
        cards: The catalog.
        births: The status that the next new pods have from their first moment on; RUNNING when used up.
        tools: Folder of programs that stand before all others on the pods' PATH.
        gets_address: Whether a running pod gets a public port for its sshd.
        price_factor: What a pod costs, against its list price.
        changes: What a new pod is made as, against the wish of its request.
    """

    spec_file = "runpod-v2.json"

    def __init__(self, backing: Path | None = None, **options: Any) -> None:
        super().__init__(backing, **options)
        self.cards = cards()
        self.births: deque[str] = deque()
        self.tools: Path | None = None
        self.gets_address = True
        self.price_factor = 1.0
        self.changes: dict[str, Any] = {}
        self.route("GET", "/v2/catalog/gpus", "catalog", self._catalog)
        self.route("POST", "/v2/pods", "create", self._create)
        self.route("GET", "/v2/pods", "list", self._list)
        self.route("GET", "/v2/pods/(?P<id>[^/]+)", "get", self._get)
        self.route("DELETE", "/v2/pods/(?P<id>[^/]+)", "delete", self._delete)
        self.route("POST", "/v2/pods/(?P<id>[^/]+)/action", "action", self._action)

    # What tests use

    def stranger(self, name: str, **data: Any) -> Row:
        """Put a pod of somebody else into the account."""
        row = self.foreign(name, gpu={"id": "NVIDIA GeForce RTX 4090", "count": 1}, **data)
        row.state, row.usd_per_hour = "RUNNING", 0.69
        return row

    def preempt(self, row: Row, status: str = "EXITED") -> None:
        """Stop a pod from outside."""
        row.state = status
        self.end_backing(row)

    # Answering

    def answer(self, request: Request) -> Reply:
        reply = super().answer(request)
        if reply.status >= 400 and isinstance(reply.body, dict):
            return replace(reply, headers={"Content_Type": "application/problem+json", **reply.headers})
        return reply

    def unknown(self, request: Request) -> Reply:
        return problem(404, f"no route for {request.method} {request.path}")

    def _refusal(self, request: Request, pod: Row | None = None) -> Reply | None:
        """Tell who may not: a pod's own key reaches no further than the pod."""
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key == KEY or (pod is not None and key == pod.data.get("key")):
            return None
        if any(key == row.data.get("key") for row in self.book.values()):
            return problem(403, "access denied")
        return problem(401, "invalid API key")

    def _catalog(self, request: Request) -> Reply:
        if refusal := self._refusal(request):
            return refusal
        tier, count = request.query.get("cloud", "SECURE"), int(request.query.get("count", "1"))
        return Reply(200, {"gpus": [self._listed(card, tier, count) for card in self.cards.values()]})

    def _listed(self, card: Card, tier: str, count: int) -> dict[str, Any]:
        fits = card.price(tier) is not None and count <= card.most[tier]
        places = card.places(tier) if fits else {}
        row: dict[str, Any] = {
            "id": card.id,
            "name": card.id.removeprefix("NVIDIA "),
            "pool": None,
            "manufacturer": "AMD" if card.id.startswith("AMD") else "NVIDIA",
            "memory": card.memory,
            "secure": card.secure is not None,
            "community": card.community is not None,
            "price": {"secure": card.secure or 0.0, "community": card.community or 0.0},
            "maxCount": {
                "secure": card.most["SECURE"] if card.secure is not None else 0,
                "community": card.most["COMMUNITY"] if card.community is not None else 0,
            },
            "availability": max(places.values(), key=LEVELS.index, default="NONE"),
        }
        if listed := [place for place in places if place]:
            row["dataCenters"] = [
                {"id": place, "name": place, "availability": places[place]} for place in listed
            ]
        return row

    def _create(self, request: Request) -> Reply:
        if refusal := self._refusal(request):
            return refusal
        body = request.body
        tier, wish = body.get("cloud", "SECURE"), body["gpu"]
        card, count = self.cards.get(wish["id"]), wish.get("count", 1)
        if card is None:
            return problem(400, f"gpu type {wish['id']} not found")
        price = card.price(tier)
        places = {
            place: level
            for place, level in card.places(tier).items()
            if level != "NONE" and place in (body.get("dataCenterIds") or [place])
        }
        if price is None or count > card.most[tier] or not places:
            return problem(400, NO_INSTANCES)
        row = Row(
            id=secrets.token_hex(7),
            name=body["name"],
            usd_per_hour=round(price * count * self.price_factor, 4),
            state=self.births.popleft() if self.births else "RUNNING",
            data={
                "gpu": {"id": card.id, "count": count},
                "cloud": tier,
                "dataCenterId": next(iter(places)) or None,
                "image": body["image"],
                "args": body.get("args", ""),
                "disk": body.get("disk", 20),
                "env": body.get("env", {}),
                "ports": body.get("ports", []),
                "key": f"rpa_POD{secrets.token_hex(12)}",
                **self.changes,
            },
        )
        self.begin(row)
        if row.state == "RUNNING":
            self._start(row)
        return Reply(201, self._pod(row))

    def _start(self, row: Row) -> None:
        """Run the container: its sshd, and the boot script of its command line."""
        env = {**row.data["env"], "RUNPOD_POD_ID": row.id, "RUNPOD_API_KEY": row.data["key"]}
        if self.tools is not None:
            programs = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
            env["PATH"] = f"{self.tools}:{programs}"
        boot = boot_script_of(row.data["args"]) if row.data["args"] else ""
        self.back(row, public_key=env["PUBLIC_KEY"], boot_script=boot, environment=env)

    def _list(self, request: Request) -> Reply:
        if refusal := self._refusal(request):
            return refusal
        everyone = request.query.get("includeClusterPods") == "true"
        shown = [row for row in self.listed() if everyone or "cluster" not in row.data]
        return Reply(200, {"pods": [self._pod(row) for row in shown]})

    def _get(self, request: Request) -> Reply:
        row = self.book.get(request.match["id"])
        if refusal := self._refusal(request, row):
            return refusal
        if row is None or row.ended_at is not None:
            return problem(404, "pod not found")
        return Reply(200, self._pod(row))

    def _delete(self, request: Request) -> Reply:
        row = self.book.get(request.match["id"])
        if refusal := self._refusal(request, row):
            return refusal
        if row is None or row.ended_at is not None:
            return problem(404, "pod not found")
        if "cluster" in row.data:
            return problem(409, "pod belongs to a cluster; delete the cluster instead")
        self.end(row)
        return Reply(204)

    def _action(self, request: Request) -> Reply:
        if request.body["action"] != "terminate":
            return problem(409, f"{request.body['action']} is not valid for the current status")
        return self._delete(request)

    def _pod(self, row: Row) -> dict[str, Any]:
        data, running = row.data, row.state == "RUNNING"
        pod = {
            "id": row.id,
            "name": row.name,
            "status": row.state,
            "actions": _ACTIONS.get(row.state, []),
            "image": data.get("image", "somebody/else"),
            "args": data.get("args", ""),
            "disk": data.get("disk", 20),
            "mounts": data.get("mounts", {}),
            "ports": data.get("ports", []),
            "env": data.get("env", {}),
            "registry": None,
            "gpu": data["gpu"],
            "cloud": data.get("cloud", "SECURE"),
            "dataCenterId": data.get("dataCenterId"),
            "cudaVersion": "12.8",
            "ssh": {"proxy": None, "direct": self._direct(row) if running and self.gets_address else None},
            "template": None,
            "cost": row.usd_per_hour if row.state not in ("EXITED", "TERMINATED") else 0.0,
            "locked": False,
            "globalNetworking": {"enabled": False},
            "runtime": {} if running else None,
            "createdAt": row.began_at.isoformat().replace("+00:00", "Z"),
            "startedAt": row.began_at.isoformat().replace("+00:00", "Z") if running else None,
        }
        return {**pod, "cluster": data["cluster"]} if "cluster" in data else pod

    def _direct(self, row: Row) -> dict[str, Any] | None:
        if row.local_id is None:
            host, port, user = "192.0.2.7", 34446, "root"
        elif (endpoint := self.endpoint(row)) is not None:
            host, port, user = endpoint.host, endpoint.port, endpoint.username
        else:
            return None  # not up yet
        return {"host": host, "port": port, "username": user, "command": f"ssh {user}@{host} -p {port}"}


def boot_script_of(args: str) -> str:
    """Return what a container runs by its arguments, less what starts its sshd: the box behind it has one."""
    shell, option, script = shlex.split(args)
    assert (shell, option) == ("sh", "-c")
    packed = re.match(r"echo (\S+) \| base64 -d \| gzip -d >(\S+) && exec sh \2$", script)
    assert packed, script
    text = gzip.decompress(base64.b64decode(packed[1])).decode()
    assert text.endswith(started_after_boot())
    return text.removesuffix(started_after_boot())


def problem(status: int, detail: str) -> Reply:
    """Return a failure as RunPod words it."""
    titles = {
        400: "Bad Request",
        401: "Unauthorized",
        402: "Payment Required",
        403: "Forbidden",
        404: "Not Found",
        409: "Conflict",
        422: "Unprocessable Entity",
        429: "Too Many Requests",
        500: "Internal Server Error",
    }
    return Reply(status, {"title": titles.get(status, "Error"), "status": status, "detail": detail})
