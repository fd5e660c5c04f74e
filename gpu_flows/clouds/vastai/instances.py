"""Instances: what a row of Vast.ai's own book says of a box. No network here."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gpu_flows.clouds.base import Box, BoxState
from gpu_flows.clouds.errors import UnexpectedAnswer
from gpu_flows.clouds.vastai.failures import is_id
from gpu_flows.clouds.vastai.market import CLOUD, region_of
from gpu_flows.endpoint import SshEndpoint
from gpu_flows.gpus.catalog import Catalog, load_catalog

_STATES = {
    # It has been accepted, and no host has reported yet.
    "": BoxState.STARTING,
    "created": BoxState.STARTING,
    "scheduling": BoxState.STARTING,
    "loading": BoxState.STARTING,
    "connecting": BoxState.STARTING,
    "rebooting": BoxState.STARTING,
    "running": BoxState.RUNNING,
    "stopped": BoxState.STOPPED,
    # Paused with its memory: even the GPU bills.
    "frozen": BoxState.STOPPED,
    # These never become running again by themselves, and the disk bills on.
    "exited": BoxState.FAILED,
    "unknown": BoxState.FAILED,
    "offline": BoxState.FAILED,
}
_FAILED_MESSAGES = ("OCI runtime create failed", "manifest unknown", "pull access denied")
"""In ``status_msg`` of an instance that says to be loading, and will for ever."""


def box_of(row: Any, account: str, catalog: Catalog | None = None) -> Box:
    """Return the box that an instance is.

    Args:
        row: One of the ``instances`` of an answer.
        account: Who rents it.
        catalog: The catalog; None for the installation's.

    Raises:
        UnexpectedAnswer: When the row is no instance.
    """
    if not isinstance(row, dict) or not is_id(row.get("id")):
        raise UnexpectedAnswer(f"Vast.ai lists something that is no instance: {str(row)[:100]}")
    state, reason = _state(row)
    region, zone = region_of(row.get("geolocation"))
    proxy = _proxy(row)
    return Box(
        cloud=CLOUD,
        account=account,
        region=region,
        zone=zone,
        id=str(row["id"]),
        name=str(row.get("label") or ""),
        state=state,
        state_reason=reason,
        usd_per_hour=_number(row.get("dph_total")),
        endpoint=(_direct(row) or proxy) if state is BoxState.RUNNING else None,
        gpu=_gpu(row, catalog or load_catalog()),
        gpu_count=int(_number(row.get("num_gpus")) or 0),
        spot=bool(row.get("is_bid")),
        created_at=_time(row.get("start_date")),
        details={
            "machine": row.get("machine_id"),
            "status": row.get("actual_status"),
            "ssh_proxy": f"{proxy.host}:{proxy.port}" if proxy else None,
        },
    )


def _state(row: Mapping[str, Any]) -> tuple[BoxState, str]:
    status = str(row.get("actual_status") or "")
    message = " ".join(str(row.get("status_msg") or "").split())
    wanted = (row.get("cur_state"), row.get("intended_status"), row.get("next_state"))
    if all(each == "stopped" for each in wanted):
        # Nobody here stops an instance: another bid was higher, or the credit is used up.
        why = "outbid, or out of credit" if row.get("is_bid") else "stopped, as when the credit is used up"
        return BoxState.STOPPED, f"{why}: {message}" if message else why
    if status != "running" and any(each in message for each in _FAILED_MESSAGES):
        return BoxState.FAILED, message
    state = _STATES.get(status)
    if state is None:
        return BoxState.STARTING, f"Vast.ai calls it {status!r}, which is not known here"
    if state is BoxState.FAILED:
        return state, f"{status}: {message}" if message else f"Vast.ai calls it {status}"
    return state, "" if state is BoxState.RUNNING else message


def _direct(row: Mapping[str, Any]) -> SshEndpoint | None:
    """Return the address of the host itself, where it lets one in."""
    ports = row.get("ports")
    mapped = ports.get("22/tcp") if isinstance(ports, dict) else None
    first = mapped[0] if isinstance(mapped, list) and mapped else None
    return _endpoint(row.get("public_ipaddr"), first.get("HostPort") if isinstance(first, dict) else None)


def _proxy(row: Mapping[str, Any]) -> SshEndpoint | None:
    return _endpoint(row.get("ssh_host"), row.get("ssh_port"))


def _endpoint(address: Any, port: Any) -> SshEndpoint | None:
    host, number = (
        str(address or "").strip(),
        str(port or "").strip(),
    )  # addresses come with blanks around them
    return SshEndpoint(host, int(number), "root") if host and number.isdecimal() else None


def _gpu(row: Mapping[str, Any], catalog: Catalog) -> str | None:
    name = row.get("gpu_name")
    card = catalog.from_cloud_id(CLOUD, str(name), _number(row.get("gpu_ram"))) if name else None
    return card.name if card else name


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _time(seconds: Any) -> datetime | None:
    number = _number(seconds)
    return datetime.fromtimestamp(number, UTC) if number else None
