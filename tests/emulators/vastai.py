"""Vast.ai on loopback: the market, instances with their own keys, and every way in which it was seen to fail.

Sources: the published specification, the vendor's SDK, and the project's facts of the clouds. An ask can be taken
as often as a test likes, unless it says ``once``.
"""

from __future__ import annotations

import itertools
import operator
import re
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_flows.endpoint import SshEndpoint

from .http import HttpEmulator, Reply, Request, Row
from .spec import Exempt, SpecChecked

PAGE_ROWS = 64
HOURS_A_MONTH = 730
_OPERATORS = {
    "eq": operator.eq,
    "neq": operator.ne,
    "gt": operator.gt,
    "lt": operator.lt,
    "gte": operator.ge,
    "lte": operator.le,
    "in": lambda value, allowed: value in allowed,
    "notin": lambda value, banned: value not in banned,
}
_KEY = re.compile(r"(?:ssh|ecdsa)-[a-z0-9-]+ [A-Za-z0-9+/=]{40,}")


def ask(
    number: int, gpu: str = "H100 SXM", count: int = 8, gpu_ram: int = 81559, **changes: Any
) -> dict[str, Any]:
    """Return an ask of a host, as a search shows it but for what depends on the search.

    Args:
        number: Its id; the machine's is made of it.
        gpu: Vast.ai's name of the card.
        count: How many.
        gpu_ram: Memory of each in MiB.
        **changes: Any other field; ``once`` makes it vanish when it is taken, ``breaks`` is what an instance says
            that never starts.
    """
    return {
        "id": number,
        "ask_contract_id": number,
        "machine_id": 40_000 + number,
        "host_id": 7,
        "gpu_name": gpu,
        "num_gpus": count,
        "gpu_ram": gpu_ram,
        "gpu_total_ram": gpu_ram * count,
        "gpu_arch": "nvidia",
        "cpu_arch": "amd64",
        "cpu_cores_effective": 16.0 * count,
        "cuda_max_good": 12.8,
        "dph_base": 2.0 * count,
        "min_bid": 0.9 * count,
        "storage_cost": 0.15,
        "disk_space": 2048.5,
        "inet_down_cost": 0.00123,
        "inet_up_cost": 0.00456,
        "reliability": 0.9987,
        "reliability2": 0.9987,
        "verification": "verified",
        "verified": True,
        "rentable": True,
        "rented": False,
        "external": False,
        "direct_port_count": 42,
        "geolocation": "California, US",
        "duration": 2_592_000.0,
        "once": False,
        "breaks": None,
        **changes,
    }


class VastaiEmulator(SpecChecked, HttpEmulator):
    """An account of Vast.ai.

    Args:
        backing: Folder for real boxes behind the instances.
        api_key: The account's key.

    Attributes:
        asks: The market.
        searches_a_minute: More than that many get a 429.
        looks_until_running: How often an instance is looked at before it says to run.
        page_boxes: Instances on a page of the listing.
        auth_status: The status of an answer to a wrong key: often 404.
        shows_direct_ports: Whether hosts map port 22 to a port of their own.
        image_environment: What the image sets for process 1.
    """

    spec_file = "vastai.yaml"
    spec_exempt = (
        Exempt("$.num_gpus: Unevaluated properties", "its own description has {'gte': 4}"),
        Exempt("$.type: 'on-demand' is not one of", "its own example says on-demand, as does the SDK"),
        Exempt("('client_id' was unexpected)", "the facts and the SDK send it"),
        Exempt("$.env: {", "the facts and the SDK send an object"),
        Exempt("('instance_api_key' was unexpected)", "the facts have it in the answer to a create"),
        Exempt(
            "('new_contract' was unexpected)",
            "the facts: a bid that is too low is an error with new_contract",
        ),
        Exempt("$.instances: None is not of type 'object'", "the facts: an instance that is gone is null"),
        Exempt("$.instances.ports", "the facts, the SDK and the listing have an object by port"),
        Exempt("$.instances.extra_env", "the SDK and the listing have pairs"),
        Exempt("answer 404 to DELETE", "the facts: no_such_instance"),
    )

    # The SDK sends what it likes.
    spec_judges = staticmethod(lambda request: "vastai-" not in request.headers.get("user-agent", ""))

    def __init__(
        self, backing: Path | None = None, *, api_key: str = "vast-invented-key", skew_s: float = 0.0
    ) -> None:
        super().__init__(backing, skew_s=skew_s)
        self.api_key = api_key
        self.asks: list[dict[str, Any]] = [ask(1001)]
        self.searches_a_minute = 1000
        self.looks_until_running = 1
        self.page_boxes = 25
        self.auth_status = 404
        self.shows_direct_ports = True
        self.image_environment: dict[str, str] = {}
        self._contracts = itertools.count(7_000_001)
        self._searches: deque[float] = deque()
        instance = r"/api/v0/instances/(?P<id>\d+)/?"
        self.route("POST", r"/api/v0/bundles/?", "search", self._search)
        self.route("PUT", r"/api/v0/asks/(?P<id>\d+)/?", "create", self._create)
        self.route("GET", r"/api/v1/instances/?", "list", self._list)
        self.route("GET", r"/api/v0/instances/?", "old_list", self._old_list)
        self.route("GET", instance, "show", self._show)
        self.route("DELETE", instance, "destroy", self._destroy)

    # Who asks

    def answer(self, request: Request) -> Reply:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key != self.api_key and not self._is_its_own(key, request):
            return Reply(
                self.auth_status, {"success": False, "error": "auth_error", "msg": "Invalid user key"}
            )
        return super().answer(request)

    def _is_its_own(self, key: str, request: Request) -> bool:
        """Tell whether it is the key of the very instance that is asked about."""
        match = re.fullmatch(r"/api/v0/instances/(\d+)/?", request.path)
        row = self.book.get(match[1]) if match else None
        return row is not None and key == row.data["instance_api_key"]

    # The market

    def _search(self, request: Request) -> Reply:
        now = time.monotonic()
        with self.lock:
            while self._searches and now - self._searches[0] > 60:
                self._searches.popleft()
            if len(self._searches) >= self.searches_a_minute:
                return Reply(429, {"detail": "API requests too frequent endpoint threshold=6.0"})
            self._searches.append(now)
        asked = dict(request.body)
        bid = asked.pop("type", "on-demand") == "bid"
        order, limit = asked.pop("order", [["score", "desc"]]), asked.pop("limit", PAGE_ROWS)
        storage_gb = asked.pop("allocated_storage", 8)
        rows = [self._priced(each, storage_gb, bid) for each in self.asks]
        rows = [row for row in rows if all(_fits(row, name, tests) for name, tests in asked.items())]
        for name, direction in reversed(order):
            rows.sort(key=lambda row: row.get(name, 0), reverse=direction == "desc")
        shown = rows[: min(limit, PAGE_ROWS)]
        return Reply(
            200,
            {
                "offers": [
                    {k: v for k, v in row.items() if k not in ("once", "breaks", "verified")} for row in shown
                ]
            },
        )

    @staticmethod
    def _priced(each: Mapping[str, Any], storage_gb: float, bid: bool) -> dict[str, Any]:
        base = each["min_bid"] if bid else each["dph_base"]
        disk = each["storage_cost"] * storage_gb / HOURS_A_MONTH
        return {**each, "dph_base": base, "dph_total": round(base + disk, 6), "is_bid": bid}

    # Instances

    def _create(self, request: Request) -> Reply:
        number, body = int(request.match["id"]), request.body
        with self.lock:
            found = next((each for each in self.asks if each["id"] == number), None)
            if found is None:
                return self._refused(
                    404,
                    "invalid_args",
                    f"error 404/3603: no_such_ask Instance type by id {number} is not available.",
                    number,
                )
            if len(body.get("onstart") or "") > 4096:
                return self._refused(400, "invalid_args", "error 400/3471: onstart is too long", number)
            if not body.get("cancel_unavail") and found["rented"]:
                self._begin(found, body, status="stopped")
                return Reply(200, {"success": True, "msg": "state change queued"})
            if found["rented"]:
                return self._refused(
                    410,
                    "no_such_ask",
                    f"error 410/3907: no_such_ask Instance type {number} is no longer available.",
                    number,
                )
            if found["once"]:
                self.asks.remove(found)
            price = body.get("price")
            if price is not None and price < found["min_bid"]:
                row = self._begin(found, body, status="stopped")
                refusal = self._refused(
                    400, "invalid_price", f"error 400/3485: bid {price} is below {found['min_bid']}", number
                )
                return Reply(400, {**refusal.body, "new_contract": int(row.id)})
            row = self._begin(found, body)
        self._start(row, body)
        key = row.data["instance_api_key"]
        return Reply(200, {"success": True, "new_contract": int(row.id), "instance_api_key": key})

    def _begin(self, found: Mapping[str, Any], body: Mapping[str, Any], status: str | None = None) -> Row:
        contract = next(self._contracts)
        bid = body.get("price")
        base = found["dph_base"] if bid is None else bid
        disk_gb = float(body.get("disk") or 8)
        data = {
            "gpu_name": found["gpu_name"],
            "gpu_ram": found["gpu_ram"],
            "num_gpus": found["num_gpus"],
            "machine_id": found["machine_id"],
            "geolocation": found["geolocation"],
            "dph_base": base,
            "dph_total": round(base + found["storage_cost"] * disk_gb / HOURS_A_MONTH, 6),
            "disk_space": disk_gb,
            "is_bid": bid is not None,
            "min_bid": found["min_bid"],
            "image_uuid": body["image"],
            "image_runtype": body.get("runtype") or "ssh",
            "onstart": body.get("onstart") or "",
            "extra_env": [[name, value] for name, value in (body.get("env") or {}).items()],
            "instance_api_key": f"instance-key-{contract}",
            "intended_status": status or "running",
            "cur_state": status or "running",
            "next_state": status or "running",
            "actual_status": status,
            "status_msg": found["breaks"],
            "looks": 0,
        }
        return self.begin(
            Row(id=str(contract), name=body.get("label") or "", usd_per_hour=data["dph_total"], data=data)
        )

    def _start(self, row: Row, body: Mapping[str, Any]) -> None:
        """Start what backs an instance: its onstart brings the key that may log in, as on a real one."""
        key = _KEY.search(body.get("onstart") or "")
        self.back(
            row,
            public_key=key[0] if key else "",
            boot_script=body.get("onstart") or "",
            environment=self.environment(row),
        )

    def _list(self, request: Request) -> Reply:
        rows = sorted(self.listed(), key=lambda row: int(row.id))
        total = len(rows)
        after = request.query.get("after_token")
        if after is not None:
            if not after.isdigit():
                return Reply(400, {"error": "invalid_token", "msg": "after_token is none"})
            rows = [row for row in rows if int(row.id) > int(after)]
        limit = min(int(request.query.get("limit", 25)), self.page_boxes)
        page = rows[:limit]
        return Reply(
            200,
            {
                "success": True,
                "instances_found": len(page),
                "total_instances": total,
                "next_token": page[-1].id if len(rows) > limit else None,
                "instances": [self._shown(row) for row in page],
            },
        )

    def _old_list(self, _: Request) -> Reply:
        return Reply(410, {"success": False, "error": "deprecated_endpoint", "msg": "use /api/v1/instances/"})

    def _show(self, request: Request) -> Reply:
        row = self.book.get(request.match["id"])
        gone = row is None or row.ended_at is not None
        return Reply(200, {"instances": None if gone or row is None else self._shown(row)})

    def _destroy(self, request: Request) -> Reply:
        row = self.book.get(request.match["id"])
        if row is None or row.ended_at is not None:
            message = f"error 404/3103: Instance {request.match['id']} not found"
            return Reply(404, {"success": False, "error": "no_such_instance", "msg": message})
        self.end(row)
        return Reply(200, {"success": True, "msg": "Instance destroyed successfully"})

    def _shown(self, row: Row) -> dict[str, Any]:
        data = row.data
        endpoint = self.endpoint(row) or SshEndpoint("192.0.2.45", 20022)
        backed = row.local_id is None or self.endpoint(row) is not None
        if (
            data.get("actual_status") in (None, "loading")
            and data.get("intended_status") == "running"
            and "looks" in data
        ):
            data["looks"] += 1
            ready = data["looks"] > self.looks_until_running and backed and not data["status_msg"]
            data["actual_status"] = "running" if ready else "loading"
        running = data.get("actual_status") == "running"
        ports = {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(endpoint.port)}]}
        shown = {k: v for k, v in data.items() if k not in ("instance_api_key", "looks")}
        return {
            "id": int(row.id),
            "label": row.name or None,
            "start_date": row.began_at.timestamp(),
            # With blanks around it, as hosts report it.
            "public_ipaddr": f" {endpoint.host}\n",
            "ssh_host": "ssh4.vast.ai" if self.shows_direct_ports else endpoint.host,
            "ssh_port": 10600 if self.shows_direct_ports else endpoint.port,
            "ports": ports if running and self.shows_direct_ports else None,
            **shown,
        }

    def foreign(self, name: str, **data: Any) -> Row:
        """Put an instance of somebody else into the account."""
        row = self._begin(self.asks[0], {"image": "theirs", "label": name})
        row.foreign = True
        row.data |= {"actual_status": "running", **data}
        return row

    @staticmethod
    def _refused(status: int, error: str, message: str, number: int) -> Reply:
        return Reply(status, {"success": False, "error": error, "msg": message, "ask_id": number})

    # What tests use

    def environment(self, row: Row) -> dict[str, str]:
        """Return the environment of process 1 of an instance."""
        asked = {name: value for name, value in row.data["extra_env"] if not name.startswith("-")}
        return {
            **self.image_environment,
            **asked,
            "CONTAINER_ID": row.id,
            "CONTAINER_API_KEY": row.data["instance_api_key"],
        }

    def host_key(self, contract: str) -> str:
        """Return the host key of the real box behind an instance."""
        endpoint = self.endpoint(self.book[contract])
        assert endpoint is not None
        assert endpoint.host_key is not None
        return endpoint.host_key

    def drive(
        self, contract: str, status: str | None, *, message: str | None = None, intended: str = "running"
    ) -> None:
        """Bring an instance into a state, as its host or the market would."""
        data = self.book[contract].data
        data |= {"actual_status": status, "status_msg": message}
        data |= {"intended_status": intended, "cur_state": intended, "next_state": intended}

    def outbid(self, contract: str) -> None:
        """Stop an instance for a higher bid: what runs in it ends, and its disk goes on billing."""
        self.drive(contract, "exited", intended="stopped")
        self.end_backing(self.book[contract])


def _fits(row: Mapping[str, Any], name: str, tests: Any) -> bool:
    if not isinstance(tests, dict):
        return True
    value = row.get(name)
    if name == "geolocation":
        value = str(value).rpartition(",")[2].strip()
    return value is not None and all(_OPERATORS[test](value, wanted) for test, wanted in tests.items())
