"""Vast.ai as the `Cloud` protocol wants it, over its REST API."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds._credentials import no_credentials, previous_secret, secret_from_environment
from gpu_flows.clouds._http import Answer, HttpApi
from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Capabilities
from gpu_flows.clouds.errors import RequestRefused, UnexpectedAnswer
from gpu_flows.clouds.vastai import boot, failures, market
from gpu_flows.clouds.vastai.failures import error_code, is_id
from gpu_flows.clouds.vastai.instances import box_of
from gpu_flows.clouds.vastai.pace import Pace
from gpu_flows.gpus.catalog import Catalog, load_catalog
from gpu_flows.offers import Offer, OfferQuery

BASE_URL = "https://console.vast.ai"
DEFAULT_IMAGE = "vastai/pytorch:@vastai-automatic-tag"
"""Vast.ai's own image with torch; the tag stands for the one that fits the machine's driver."""
_SEARCH, _LISTING = "/api/v0/bundles/", "/api/v1/instances/"
_VARIABLE = "VAST_API_KEY"
_SEARCHES_A_MINUTE = 10
_SEARCHES_AT_ONCE = 8
"""Searches that one call for offers makes at most, so that the next one need not wait."""
_PAGE_BOXES = 25
_MOST_PAGES = 1000
_CREATE_TIMEOUT_S = 60.0

_log = logging.getLogger(__name__)


class VastaiCloud:
    """Vast.ai: a market of other people's machines, rented as containers; billed by the second, disk included.

    Source: the published API specification, the vendor's SDK (``vastai`` 1.9), and public issues.

    Args:
        account: Accounts other than the default one have their key in ``VAST_API_KEY__<ACCOUNT>``.
        api_key: The key; else ``VAST_API_KEY``, and for the default account the vendor's own file.
        base_url: Of the API; another one is for emulators.
        reliability: Least reliability of a machine, by Vast.ai's own estimate, 0 to 1.
        verified: Only machines that Vast.ai has tested.
        bid_factor: What is bid for an interruptible box, over the least bid at the time.
        clock: Time and sleep.
    """

    name = market.CLOUD
    capabilities = Capabilities(spot=True, multi_node=False, lag_s=60.0, ready_timeout_s=1200.0)

    def __init__(
        self,
        account: str = "default",
        *,
        api_key: str | None = None,
        base_url: str = BASE_URL,
        reliability: float = 0.95,
        verified: bool = True,
        bid_factor: float = 1.1,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.account = account
        self._api_key = api_key
        self._base_url = base_url.rstrip("/")
        self._standards = market.Standards(reliability=reliability, verified=verified, bid_factor=bid_factor)
        self._clock = clock
        self._pace = Pace(_SEARCHES_A_MINUTE, 60.0, clock)
        self._lock = threading.Lock()
        self._opened: HttpApi | None = None

    def offers(self, query: OfferQuery) -> list[Offer]:
        """Return what is on the market now, the cheapest first; a shape that nobody offers is one row."""
        catalog = load_catalog()
        wanted = market.searches(query, self._standards, catalog)
        found: list[Offer] = []
        for search in wanted:
            rows = self._rows(search, most_pages=max(1, _SEARCHES_AT_ONCE // len(wanted)))
            offers = self._understood(rows, search, query, catalog)
            found += offers or [market.nothing_found(search, self.account, catalog)]
        return found

    def _understood(
        self, rows: Sequence[Any], search: market.Search, query: OfferQuery, catalog: Catalog
    ) -> list[Offer]:
        """Return the offers that the rows are; a bad row among good ones is left out."""
        offers: list[Offer] = []
        bad: list[str] = []
        for row in rows:
            try:
                offer = market.offer_of(row, search, query, self.account, catalog)
            except (KeyError, TypeError, ValueError) as error:
                bad.append(f"{type(error).__name__}: {error} in {str(row)[:200]}")
            else:
                offers += [offer] if offer else []
        if bad and len(bad) == len(rows):
            raise UnexpectedAnswer(f"Vast.ai lists asks that are none: {bad[0]}")
        if bad:
            _log.warning(
                "%d of %d asks of Vast.ai were left out, the first for %s", len(bad), len(rows), bad[0]
            )
        return offers

    def _rows(self, search: market.Search, *, most_pages: int) -> list[Any]:
        """Return the asks of a search, by price: a page has 64 rows, whatever is asked for."""
        rows: dict[Any, Any] = {}
        price, stuck = None, False
        for _ in range(most_pages):
            self._pace.wait()
            body = search.body(from_usd_per_hour=price, after=stuck)
            page = self._list(self._api.read("POST", _SEARCH, body=body), f"POST {_SEARCH}", "offers")
            before = len(rows)
            rows |= {row.get("id"): row for row in page}
            if len(page) < market.PAGE_ROWS:
                break
            # A page of nothing but one price that is known: the next one begins beyond it, or this would not end.
            price, stuck = page[-1].get("dph_total"), len(rows) == before
            if not isinstance(price, int | float):
                raise UnexpectedAnswer(f"Vast.ai lists an ask without a price: {str(page[-1])[:200]}")
        return list(rows.values())

    def create(self, offer: Offer, spec: BoxSpec) -> Box:
        """Rent one box, by one call that carries all of it: name, key, dead-man."""
        ask = offer.details.get("ask")
        if offer.cloud != self.name or not is_id(ask):
            raise RequestRefused(f"not an offer of Vast.ai: {offer.cloud} {offer.instance_type}")
        bid = offer.details.get("bid")
        if offer.spot and bid is None:
            raise RequestRefused("an interruptible box needs a bid, and the offer has none")
        body = {
            "client_id": "me",
            "image": spec.image or DEFAULT_IMAGE,
            "disk": spec.disk_gb or offer.details.get("disk_gb") or market.DEFAULT_DISK_GB,
            "label": spec.name,
            "runtype": "ssh_direct",
            "env": {**spec.env, "-p 22:22": "1"},
            "onstart": boot.onstart(spec.ssh_public_key, spec.boot_script),
            "target_state": "running",
            # Else an ask that is taken is a success: "state change queued", and it bills when it is free again.
            "cancel_unavail": True,
        }
        if offer.spot:
            body["price"] = bid
        path = f"/api/v0/asks/{ask}/"
        answer = self._api.call("PUT", path, body=body, timeout_s=_CREATE_TIMEOUT_S)
        contract = answer.body.get("new_contract") if isinstance(answer.body, dict) else None
        if not is_id(contract) or answer.body.get("success") is not True:
            raise self._api.error(answer, f"PUT {path}")
        return Box(
            cloud=self.name,
            account=self.account,
            region=offer.region,
            zone=offer.zone,
            id=str(contract),
            name=spec.name,
            state=BoxState.STARTING,
            gpu=offer.gpu,
            gpu_count=offer.gpu_count,
            spot=offer.spot,
            details={"machine": offer.machine},
        )

    def find(self, name_prefix: str) -> list[Box]:
        """Return every instance, running or not, whose label starts with the prefix."""
        catalog = load_catalog()
        boxes = (box_of(row, self.account, catalog) for row in self._instances())
        return [box for box in boxes if box.name.startswith(name_prefix)]

    def _instances(self) -> Iterator[Any]:
        # By id, so that a box that is made or ends meanwhile moves no other one to a page that has been read.
        asked = {"limit": _PAGE_BOXES, "order_by": json.dumps([{"col": "id", "dir": "asc"}])}
        token: str | None = None
        read = 0
        for _ in range(_MOST_PAGES):
            params = asked if token is None else {**asked, "after_token": token}
            answer = self._api.get(_LISTING, params=params)
            page = self._list(answer, f"GET {_LISTING}", "instances")
            read += len(page)
            yield from page
            before, token = token, answer.body.get("next_token")
            if not token:
                total = answer.body.get("total_instances")
                if is_id(total) and read < total:
                    raise UnexpectedAnswer(f"Vast.ai counts {total} instances and lists {read} of them")
                return
            if not isinstance(token, str) or token == before:
                break
        raise UnexpectedAnswer("the list of instances of Vast.ai does not end")

    def describe(self, box: Box) -> Box:
        """Return the instance as it is now."""
        path = f"/api/v0/instances/{_id(box)}/"
        answer = self._api.get(path, accept=(404,))
        if answer.status == 404:
            if error_code(answer.body) in ("no_such_instance", "not_found"):
                return _gone(box)
            raise self._api.error(answer, f"GET {path}")
        if not isinstance(answer.body, dict) or "instances" not in answer.body:
            raise self._api.error(answer, f"GET {path}")
        row = answer.body["instances"]
        if not row:
            return _gone(box)
        now = box_of(row, self.account)
        if now.id != box.id:
            raise UnexpectedAnswer(f"Vast.ai was asked for instance {box.id} and describes {now.id}")
        return now

    def destroy(self, box: Box) -> None:
        """Destroy the instance with its disk; stopping it would go on billing."""
        path = f"/api/v0/instances/{_id(box)}/"
        answer = self._api.call("DELETE", path, accept=(404,))
        if answer.status == 404 and error_code(answer.body) != "auth_error":
            return  # gone already
        if answer.status == 404 or not isinstance(answer.body, dict) or answer.body.get("success") is False:
            raise self._api.error(answer, f"DELETE {path}")

    def self_destruct(self, spec: BoxSpec) -> str | None:
        """Return the call by which an instance destroys itself, with the key that it has for that."""
        return boot.self_destruct(self._base_url)

    def clock_skew_s(self) -> float | None:
        """Return the clock of Vast.ai less ours, as its last answer told."""
        return self._opened.skew_s if self._opened else None

    def identity_secrets(self) -> tuple[bytes, ...]:
        """Return the API key, and the one before it where that is known."""
        previous = previous_secret(_VARIABLE, account=self.account)
        return tuple(key.encode() for key in (self._key(), previous) if key)

    def console_url(self, box: Box) -> str | None:
        """Return the page of all instances: there is none for a single one."""
        return "https://cloud.vast.ai/instances/"

    def _list(self, answer: Answer, where: str, field: str) -> list[dict[str, Any]]:
        """Return the rows of an answer; one of another shape is never taken for an empty list (C05)."""
        body = answer.body
        rows = body.get(field) if isinstance(body, dict) and body.get("success") is not False else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise self._api.error(answer, where)
        return rows

    def __repr__(self) -> str:
        return f"VastaiCloud(account={self.account!r})"

    def _key(self) -> str:
        key = self._api_key or secret_from_environment(_VARIABLE, account=self.account)
        if not key and self.account == "default":
            key = _key_of_the_vendors_file()
        if not key:
            also = "vastai set api-key" if self.account == "default" else ""
            raise no_credentials(self.name, _VARIABLE, account=self.account, also=also)
        return key

    @property
    def _api(self) -> HttpApi:
        with self._lock:
            if self._opened is None:
                key = self._key()
                self._opened = HttpApi(
                    self.name,
                    self._base_url,
                    headers={"Authorization": f"Bearer {key}"},
                    secrets=[key],
                    verdicts=failures.VERDICTS,
                    error_code=error_code,
                    box_ids=failures.instances_in,
                    secret_fields=failures.SECRET_FIELDS,
                    clock=self._clock,
                )
            return self._opened


def _id(box: Box) -> str:
    """Return the id of an instance; anything else would address something else."""
    if box.cloud != market.CLOUD or not (box.id.isascii() and box.id.isdigit()):
        raise RequestRefused(f"not a box of Vast.ai: {box.cloud} {box.id!r}")
    return box.id


def _gone(box: Box) -> Box:
    return replace(box, state=BoxState.GONE, state_reason="", endpoint=None)


def _key_of_the_vendors_file() -> str | None:
    """Return the key that the vendor's own command line has stored, where its SDK looks for it."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    for path in (folder / "vastai" / "vast_api_key", Path.home() / ".vast_api_key"):
        if path.is_file():
            return path.read_text("utf-8").strip() or None
    return None
