"""Hot Aisle's API: a team with virtual machines that are born without a name of ours."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from .cards import environment_with
from .http import HttpEmulator, Reply, Request, Row
from .spec import Exempt, SpecChecked

KEY = "hotaisle-invented-key-0123456789"
TEAM = "acme"


def machine_type(count: int, cents: int, quantity: int, *, minimum_minutes: int = 60) -> dict[str, Any]:
    """Return a kind of machine as the API lists it."""
    return {
        "Quantity": quantity,
        "OnDemandPrice": cents,
        "MinimumReservationMinutes": minimum_minutes,
        "Specs": {
            "cpu_cores": 13 * count,
            "cpus": {
                "count": 1,
                "manufacturer": "Intel",
                "model": "Xeon Platinum 8470",
                "cores": 13 * count,
                "frequency": 2000000000,
            },
            "disk_capacity": 13194139533312,
            "ram_capacity": 240518168576 * count,
            "gpus": [{"count": count, "manufacturer": "AMD", "model": "MI300X"}] if count else [],
        },
    }


class HotAisleEmulator(SpecChecked, HttpEmulator):
    """One team of Hot Aisle.

    Attributes:
        types: What is available.
        keys: SSH keys of the user: each new machine has them all.
        maximum: How many machines the team may have.
        longest_description: Characters that a description may have.
        programs: Folder for what stands in for rocm-smi on the machines; None for machines that show no cards.
    """

    spec_file = "hotaisle.json"
    spec_exempt = (
        Exempt(
            "to POST /api/teams/acme/virtual_machines/: it has no body", "refusals come with their reason"
        ),
    )

    def __init__(self, backing: Path | None = None, **options: Any) -> None:
        super().__init__(backing, **options)
        self.types = [
            machine_type(1, 199, 6),
            machine_type(2, 398, 3, minimum_minutes=120),
            machine_type(4, 796, 0),
            machine_type(0, 10, 5),
        ]
        self.keys: list[dict[str, Any]] = []
        self.maximum = 20
        self.longest_description = 100_000
        self.programs: Path | None = None
        self._numbers = itertools.count(1)
        machines = rf"/api/teams/{TEAM}/virtual_machines/"
        machine = machines + r"(?P<vm>[^/]+)/"
        # Literal paths before those with a name in them.
        self.route("GET", machines + "available/", "available", self._authorised(self._available))
        self.route("GET", machines, "list", self._authorised(self._list))
        self.route("POST", machines, "create", self._authorised(self._create))
        self.route("GET", machine, "get", self._authorised(self._get))
        self.route("PATCH", machine, "describe", self._authorised(self._describe))
        self.route("DELETE", machine, "delete", self._authorised(self._delete))
        self.route("GET", machine + "state/", "state", self._authorised(self._state))
        self.route("GET", "/api/user/ssh_keys/", "keys", self._authorised(lambda _: Reply(200, self.keys)))
        self.route("POST", "/api/user/ssh_keys/", "add_key", self._authorised(self._add_key))

    def unknown(self, request: Request) -> Reply:
        """Answer as for another team, or a machine that does not exist: they cannot be told apart."""
        return Reply(404, "Not Found: Resource not found")

    @property
    def base_url(self) -> str:
        """Where the API begins."""
        return f"{self.url}/api"

    def foreign(self, name: str, **data: Any) -> Row:
        """Put a machine of somebody else into the team; an empty name for one without a description."""
        return self.begin(self._row(self.types[0], name, foreign=True))

    def _row(self, kind: dict[str, Any], name: str = "", *, foreign: bool = False) -> Row:
        return Row(
            id=f"enc1-gpuvm{next(self._numbers):03d}",
            name=name,
            usd_per_hour=kind["OnDemandPrice"] / 100,
            foreign=foreign,
            data={"kind": kind},
        )

    def _authorised(self, handler: Any) -> Any:
        def authorised(request: Request) -> Reply:
            if request.headers.get("authorization") != f"Token {KEY}":
                return Reply(401, "Unauthorized")
            return handler(request)

        return authorised

    # Handlers

    def _available(self, request: Request) -> Reply:
        return Reply(200, self.types)

    def _list(self, request: Request) -> Reply:
        return Reply(200, [self._machine(row) for row in self.listed()])

    def _create(self, request: Request) -> Reply:
        if len(self.live()) >= self.maximum:
            return Reply(401, "Maximum VMs already provisioned for this team")
        kind = next((each for each in self.types if each["Specs"] == request.body), None)
        if kind is None or not kind["Quantity"]:
            return Reply(404, "No available virtual machine matching requested specifications")
        row = self.begin(self._row(kind))
        if self.keys:
            key = f"{self.keys[-1]['type']} {self.keys[-1]['public_key']}"
            count = kind["Specs"]["gpus"][0]["count"]
            programs = self.programs
            cards = environment_with(programs / row.id, "MI300X", count) if programs else {}
            self.back(row, public_key=key, environment=cards)
        return Reply(200, self._machine(row))

    def _get(self, request: Request) -> Reply:
        row = self._found(request)
        return Reply(200, self._machine(row)) if row else self.unknown(request)

    def _describe(self, request: Request) -> Reply:
        row = self._found(request)
        if row is None:
            return self.unknown(request)
        if len(request.body["description"]) > self.longest_description:
            return Reply(422, "Unprocessable Entity: Invalid data format")
        assert not row.foreign, f"a foreign machine was described: {row.id}"
        row.name = request.body["description"]
        return Reply(204)

    def _delete(self, request: Request) -> Reply:
        row = self._found(request)
        if row is None:
            return self.unknown(request)
        if request.query.get("force") != "true":
            return Reply(400, "Bad Request: the minimum reservation time has not been met")
        self.end(row)
        return Reply(204)

    def _state(self, request: Request) -> Reply:
        row = self._found(request)
        if row is None:
            return self.unknown(request)
        starting = row.local_id is not None and self.endpoint(row) is None
        return Reply(200, {"state": "starting" if starting else row.state, "host": "vm-host-01"})

    def _add_key(self, request: Request) -> Reply:
        kind, blob, *comment = request.body["authorized_key"].split()
        with self.lock:
            if any(key["public_key"] == blob for key in self.keys):
                return Reply(409)
            key = {"type": kind, "public_key": blob, "fingerprint": f"SHA256:{blob[-43:]}"}
            self.keys.append({**key, "comment": " ".join(comment)})
        return Reply(200, self.keys[-1])

    def _found(self, request: Request) -> Row | None:
        row = self.book.get(request.match["vm"])
        return row if row is not None and row.ended_at is None else None

    def _machine(self, row: Row) -> dict[str, Any]:
        endpoint = self.endpoint(row)
        access = {"ip_address": endpoint.host, "port": endpoint.port} if endpoint else None
        described = {"description": row.name} if row.name else {}
        reachable = {} if row.local_id is not None and access is None else {"ssh_access": access or _ACCESS}
        return {
            "name": row.id,
            "ip_address": access["ip_address"] if access else "10.0.0.7",
            **row.data["kind"]["Specs"],
            **described,
            **reachable,
        }


_ACCESS = {"ip_address": "192.0.2.20", "port": 2022}
