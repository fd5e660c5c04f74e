"""The RunInstances call of one box, as plain values: the same offer and spec always give the same call.

It has to be so: AWS takes a repeated call for the same box only when its ClientToken and all else are equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from gpu_flows.clouds.aws.images import Image
from gpu_flows.clouds.aws.network import TAG, Place
from gpu_flows.clouds.base import BoxSpec
from gpu_flows.clouds.errors import RequestRefused
from gpu_flows.offers import Offer

MOST_USER_DATA_BYTES = 16384
"""Before the encoding as base64."""
MOST_TAG_CHARACTERS = 256
BOOT_FILE = "/var/lib/cloud/scripts/per-boot/gpu-flows"
"""cloud-init runs what lies there as root at every boot, the first one included, after users were made."""
SPOT_HEADROOM = 1.2
"""A spot box may come to cost a fifth more than offered; above that AWS takes it back. Without a limit it could
cost as much as on demand, and with none to spare the smallest change of price would end it."""

OWNER_TAG, DEADLINE_TAG = f"{TAG}-owner", f"{TAG}-deadline"
PRICE_TAG, GPU_TAG, GROUP_TAG = f"{TAG}-usd-per-hour", f"{TAG}-gpu", f"{TAG}-placement-group"

_TIMER_GRACE_S = 60
_MARK = "GPU_FLOWS_BOOT"


def namespace_of(spec: BoxSpec) -> str:
    """Return the namespace of a box, which its name carries."""
    parts = spec.name.split("-")
    return parts[1] if len(parts) > 1 else spec.name


def placement_group_of(spec: BoxSpec) -> str:
    """Return the name of the placement group of a lease, which its boxes share."""
    return "-".join(spec.name.split("-")[:3])


def client_token(offer: Offer, spec: BoxSpec) -> str:
    """Return the idempotency token: one for each create call, and for what it asks where.

    AWS keeps tokens by region, or by zone where one is given; a token with other parameters is an error.
    """
    market = "spot" if offer.spot else "od"
    return f"{spec.nonce}-{offer.instance_type}-{offer.zone or offer.region}-{market}"[:64]


def user_data(spec: BoxSpec, *, username: str) -> str:
    """Return the cloud-config of a box: who may log in, and what ends it.

    It starts the dead-man as the login user, and beside it a timer of systemd's that halts the machine soon after
    the deadline, whatever became of the dead-man: a halt is the end, since the box is made so that it
    terminates then.

    Args:
        spec: The box.
        username: The login user of its image.

    Raises:
        RequestRefused: When it is more than AWS takes.
    """
    script = "\n".join(
        [
            "#!/bin/sh",
            f"left=$(({math.ceil(spec.deadline.timestamp()) + _TIMER_GRACE_S} - $(date +%s)))",
            '[ "$left" -gt 0 ] || left=1',
            'systemd-run --quiet --on-active="$left" sh -c "shutdown -h now; sleep 300; poweroff -f"',
            *_dead_man(spec.boot_script, username),
            "",
        ]
    )
    files: list[dict[str, Any]] = [{"path": BOOT_FILE, "permissions": "0700", "content": script}]
    if spec.env:
        lines = "".join(f"{name}={_quoted(name, value)}\n" for name, value in sorted(spec.env.items()))
        files.append({"path": "/etc/environment", "append": True, "content": lines})
    # JSON is YAML, so no writer of YAML is needed.
    text = "#cloud-config\n" + json.dumps(
        {"ssh_authorized_keys": [spec.ssh_public_key.strip()], "write_files": files}, ensure_ascii=False
    )
    size = len(text.encode())
    if size > MOST_USER_DATA_BYTES:
        raise RequestRefused(
            f"the user data of the box would have {size} bytes, and AWS takes {MOST_USER_DATA_BYTES}",
            hint="pass environment and keys to the job (env, secrets): they travel over SSH",
        )
    return text


def _dead_man(boot_script: str, username: str) -> list[str]:
    if not boot_script:
        return []
    return [
        f"home=$(getent passwd {username} | cut -d: -f6)",
        f'cd "$home" && runuser -u {username} -- env HOME="$home" sh <<\'{_MARK}\'',
        boot_script.rstrip("\n"),
        _MARK,
    ]


def _quoted(name: str, value: str) -> str:
    if any(character in value for character in "\"\n'"):
        raise RequestRefused(
            f"the environment variable {name} holds a quote or a line end, which /etc/environment cannot",
            hint="pass it to the job instead (env)",
        )
    return f'"{value}"'


def run_request(
    offer: Offer,
    spec: BoxSpec,
    *,
    image: Image,
    place: Place,
    username: str,
    instance_profile: str | None = None,
    tags: Mapping[str, str] | None = None,
    private: bool = False,
) -> dict[str, Any]:
    """Return the parameters of RunInstances.

    Args:
        offer: What is rented.
        spec: The box.
        image: What it boots.
        place: Where it stands.
        username: The login user of the image.
        instance_profile: Name or ARN of a profile for the box.
        tags: More tags.
        private: Give it no public address, where its subnet is the user's.
    """
    together = offer.details.get("nodes", 1) > 1
    placement = {"AvailabilityZone": offer.zone} if offer.zone and not place.subnet_id else {}
    if together:
        placement["GroupName"] = placement_group_of(spec)
    request: dict[str, Any] = {
        "ImageId": image.id,
        "InstanceType": offer.instance_type,
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": client_token(offer, spec),
        "UserData": user_data(spec, username=username),
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled"},
        "BlockDeviceMappings": [
            {
                "DeviceName": image.root_device,
                "Ebs": {
                    "VolumeType": "gp3",
                    "VolumeSize": max(spec.disk_gb or 0, offer.details.get("disk_gb", 0), image.size_gb),
                    "DeleteOnTermination": True,
                },
            }
        ],
        "TagSpecifications": _tags(offer, spec, tags or {}),
    }
    if placement:
        request["Placement"] = placement
    if place.subnet_id:
        request["NetworkInterfaces"] = [
            {
                "DeviceIndex": 0,
                "SubnetId": place.subnet_id,
                "Groups": list(place.security_group_ids),
                "AssociatePublicIpAddress": not private,
                "DeleteOnTermination": True,
            }
        ]
    else:
        request["SecurityGroupIds"] = list(place.security_group_ids)
    if instance_profile:
        key = "Arn" if instance_profile.startswith("arn:") else "Name"
        request["IamInstanceProfile"] = {key: instance_profile}
    if offer.spot:
        most = offer.details["instance_usd_per_hour"] * SPOT_HEADROOM
        request["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {
                "SpotInstanceType": "one-time",
                "InstanceInterruptionBehavior": "terminate",
                "MaxPrice": f"{most:.4f}",
            },
        }
    return request


def _tags(offer: Offer, spec: BoxSpec, more: Mapping[str, str]) -> list[dict[str, Any]]:
    values = {
        **more,
        "Name": spec.name,
        TAG: namespace_of(spec),
        OWNER_TAG: spec.owner[:MOST_TAG_CHARACTERS],
        DEADLINE_TAG: spec.deadline.isoformat(),
        PRICE_TAG: str(offer.usd_per_hour),
        GPU_TAG: f"{offer.gpu}:{offer.gpu_count}",
    }
    if offer.details.get("nodes", 1) > 1:
        values[GROUP_TAG] = placement_group_of(spec)
    listed = [{"Key": key, "Value": value} for key, value in values.items()]
    kinds = ["instance", "volume", *(["spot-instances-request"] if offer.spot else [])]
    return [{"ResourceType": kind, "Tags": listed} for kind in kinds]
