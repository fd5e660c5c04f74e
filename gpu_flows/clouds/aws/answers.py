"""What AWS says of an instance, as a box."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gpu_flows.clouds.aws.launch import GPU_TAG, GROUP_TAG, OWNER_TAG, PRICE_TAG
from gpu_flows.clouds.base import Box, BoxState
from gpu_flows.clouds.errors import UnexpectedAnswer
from gpu_flows.endpoint import SshEndpoint

MINIMUM_MINUTES = 1
"""Shortest time that is billed."""
BILLING = ("pending", "running", "shutting-down", "stopping", "stopped")
"""A stopped instance bills its disk."""

_STATES = {
    "pending": BoxState.STARTING,
    "running": BoxState.RUNNING,
    "shutting-down": BoxState.ENDING,
    "stopping": BoxState.STOPPED,
    "stopped": BoxState.STOPPED,
    "terminated": BoxState.GONE,
}
_MOMENT = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


def state_of(name: str) -> BoxState:
    """Return the state that a word of AWS stands for.

    Raises:
        UnexpectedAnswer: For a word that is not known.
    """
    try:
        return _STATES[name]
    except KeyError:
        raise UnexpectedAnswer(f"aws names a state that is not known: {name!r}") from None


def box_of(
    instance: Mapping[str, Any],
    *,
    account: str,
    region: str,
    username: str,
    ssh_port: int,
    private: bool,
    proxy: SshEndpoint | None,
) -> Box:
    """Return an instance of DescribeInstances or RunInstances as a box.

    Args:
        instance: As boto3 gives it.
        account: Whose it is.
        region: Where it is.
        username: Its login user.
        ssh_port: Where it answers SSH.
        private: Reach it at its private address.
        proxy: Through which jump host.

    Raises:
        UnexpectedAnswer: When it is not an instance.
    """
    try:
        box_id, state = str(instance["InstanceId"]), state_of(instance["State"]["Name"])
    except (KeyError, TypeError) as error:
        raise UnexpectedAnswer(f"aws described something that is no instance: {error!r}") from error
    tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags") or []}
    gpu, _, count = tags.get(GPU_TAG, "").rpartition(":")
    address = instance.get("PrivateIpAddress" if private else "PublicIpAddress")
    launched = instance.get("LaunchTime")
    endpoint = None
    if address and state.may_serve:
        endpoint = SshEndpoint(address, ssh_port, username, proxy=proxy)
    details = {"instance_type": instance.get("InstanceType"), "image": instance.get("ImageId")}
    details |= {"owner": tags.get(OWNER_TAG), "placement_group": tags.get(GROUP_TAG)}
    details["minimum_minutes"] = MINIMUM_MINUTES
    return Box(
        cloud="aws",
        account=account,
        region=region,
        zone=instance.get("Placement", {}).get("AvailabilityZone"),
        id=box_id,
        name=tags.get("Name", ""),
        state=state,
        state_reason=_reason(instance),
        usd_per_hour=_number(tags.get(PRICE_TAG)),
        endpoint=endpoint,
        private_address=instance.get("PrivateIpAddress"),
        gpu=gpu or None,
        gpu_count=int(count) if count.isdigit() else 0,
        spot=instance.get("InstanceLifecycle") == "spot",
        created_at=launched.astimezone(UTC) if launched else None,
        ended_at=_ended_at(instance) if state is BoxState.GONE else None,
        details={key: value for key, value in details.items() if value},
    )


def _reason(instance: Mapping[str, Any]) -> str:
    """Return why it is in its state; late failures tell it only here (``Server.InsufficientInstanceCapacity``)."""
    reason = instance.get("StateReason") or {}
    code, message = reason.get("Code") or "", reason.get("Message") or ""
    return message if message.startswith(code) else f"{code}: {message}" if message else code


def _ended_at(instance: Mapping[str, Any]) -> datetime | None:
    found = _MOMENT.search(instance.get("StateTransitionReason") or "")
    if found is None:
        return None
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
