"""What AWS charges: the Pricing API, remembered on disk for a day, and a list of prices as the last resort."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from gpu_flows.clock import Clock
from gpu_flows.clouds.aws.api import AwsApi
from gpu_flows.clouds.aws.shapes import Shape, list_prices
from gpu_flows.clouds.errors import CloudError, UnexpectedAnswer

PRICING_REGION = "us-east-1"
"""The Pricing API lives in few regions, and answers for all of them."""
HOURS_PER_MONTH = 730
DISK = "gp3"
_LIFETIME = timedelta(hours=24)
_AT_ONCE = 8
_SILENCE_S = 600.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """The prices of one thing in every region.

    Attributes:
        usd: Dollars per hour of an instance type, or per GB and month of disk, by region.
        at: When the Pricing API said so, aware.
    """

    usd: Mapping[str, float]
    at: datetime


@dataclass(frozen=True, slots=True)
class Price:
    """What something costs.

    Attributes:
        usd: Dollars; None when it is not sold so.
        note: Where the price comes from, when it is not the Pricing API's own answer of today.
    """

    usd: float | None
    note: str = ""


class PriceList:
    """Prices as they were found, for one question.

    Args:
        known: What the Pricing API said, by type, with `DISK` for disk.
        now: To tell how old it is.
    """

    def __init__(self, known: Mapping[str, Known], now: datetime) -> None:
        self._known = known
        self._now = now

    def on_demand(self, shape: Shape, region: str) -> Price:
        """Return dollars per hour of a type."""
        known = self._known.get(shape.type)
        if known is None or not known.usd:
            note = f"list price of us-east-1 in {list_prices().as_of}: the Pricing API did not say"
            return Price(shape.usd_per_hour, note)
        return Price(known.usd.get(region), self._age(known))

    def disk(self, region: str, disk_gb: int) -> float:
        """Return dollars per hour of a gp3 volume."""
        known = self._known.get(DISK)
        monthly = list_prices().gp3_usd_per_gb_month
        if known is not None:
            monthly = known.usd.get(region, monthly)
        return monthly * disk_gb / HOURS_PER_MONTH

    def _age(self, known: Known) -> str:
        return "" if self._now - known.at < _LIFETIME else f"price of {known.at:%Y-%m-%d}"


class Prices:
    """Asks the Pricing API for what is not known yet.

    Args:
        api: The account.
        path: Where prices are remembered; they are public, and the same for every account.
        clock: Tells how old they are.
    """

    def __init__(self, api: AwsApi, path: Path, clock: Clock) -> None:
        self._api = api
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._silent_until = float("-inf")

    def of(self, types: Iterable[str]) -> PriceList:
        """Return the prices of instance types and of disk.

        The Pricing API is asked for what is older than a day. What it does not say is taken from an older
        answer, or left to the list.
        """
        wanted = {*types, DISK}
        now = self._clock.now()
        with self._lock:
            known = {name: each for name, each in self._remembered().items() if name in wanted}
            stale = [
                name for name in sorted(wanted) if name not in known or now - known[name].at >= _LIFETIME
            ]
            fresh = self._asked(stale, now)
            if fresh:
                self._remember(fresh)
        return PriceList({**known, **fresh}, now)

    def _asked(self, names: list[str], now: datetime) -> dict[str, Known]:
        if not names or self._clock.monotonic() < self._silent_until:
            return {}
        first, *rest = names
        try:
            found = {first: Known(self._ask(first), now)}
        except CloudError as error:
            # Often it is not allowed, and renting does not need it: it is left alone for a while.
            self._silent_until = self._clock.monotonic() + _SILENCE_S
            _log.info("the Pricing API of aws does not answer: %s", error)
            return {}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = {name: pool.submit(partial(self._ask, name)) for name in rest}
        for name, answer in answers.items():
            try:
                found[name] = Known(answer.result(), now)
            except CloudError as error:
                _log.info("no price of %s: %s", name, error)
        return found

    def _ask(self, name: str) -> dict[str, float]:
        if name == DISK:
            wanted = {"productFamily": "Storage", "volumeApiName": DISK}
        else:
            wanted = {
                "instanceType": name,
                "operatingSystem": "Linux",
                "preInstalledSw": "NA",
                "tenancy": "Shared",
                "capacitystatus": "Used",
            }
        filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
        products = self._api.pages(
            "pricing", PRICING_REGION, "get_products", "PriceList", ServiceCode="AmazonEC2", Filters=filters
        )
        prices = (_price_of(product) for product in products)
        return dict(price for price in prices if price is not None)

    def _remembered(self) -> dict[str, Known]:
        try:
            data = json.loads(self._path.read_bytes())
            return {
                name: Known(dict(each["usd"]), datetime.fromisoformat(each["at"]))
                for name, each in data.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("the prices in %s cannot be read and are asked for again: %s", self._path, error)
            return {}

    def _remember(self, fresh: Mapping[str, Known]) -> None:
        merged = self._remembered() | dict(fresh)
        text = json.dumps(
            {name: {"at": each.at.isoformat(), "usd": dict(each.usd)} for name, each in merged.items()}
        )
        partial_path = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial_path.write_text(text, "utf-8")
            partial_path.replace(self._path)
        except OSError as error:
            _log.info("prices cannot be remembered in %s: %s", self._path, error)
            with contextlib.suppress(OSError):
                partial_path.unlink(missing_ok=True)


def _price_of(product: Any) -> tuple[str, float] | None:
    """Return the region and the price of one product; None when it is not sold on demand in a region.

    Raises:
        UnexpectedAnswer: When it is no product.
    """
    try:
        data = json.loads(product)
        attributes = data["product"]["attributes"]
        if attributes.get("locationType", "AWS Region") != "AWS Region":
            return None
        if attributes.get("marketoption", "OnDemand") != "OnDemand":
            return None
        for term in data.get("terms", {}).get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                usd = float(dimension["pricePerUnit"]["USD"])
                if usd > 0:
                    return attributes["regionCode"], usd
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnexpectedAnswer(f"aws named a price in an unknown way: {error!r}") from error
    return None
