"""Where a box stands: subnet, security group, placement group; the user's own, or made once and kept."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpu_flows.clock import Clock
from gpu_flows.clouds.aws.api import AwsApi
from gpu_flows.clouds.aws.memo import Memo
from gpu_flows.clouds.aws.verdicts import code_of
from gpu_flows.clouds.errors import AuthenticationFailed, CloudError, RequestRefused, Scope, UnexpectedAnswer

TAG = "gpu-flows"
"""Key of the tag that everything of ours carries; its value is the namespace."""
_LIFETIME_S = 600.0
_NEW_GROUP_PAUSES_S = (1.0, 2.0, 4.0)
"""A group that was just made may not have come round yet."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Subnet:
    """A subnet that the user named."""

    id: str
    vpc_id: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a box is put.

    Attributes:
        security_group_ids: At least one.
        subnet_id: None for the default subnet of its zone.
    """

    security_group_ids: tuple[str, ...]
    subnet_id: str | None = None


class Network:
    """The network of one account.

    Args:
        api: The account.
        subnet_ids: Subnets to use, of any region; empty for the default ones.
        security_group_ids: Groups to use, of any region; empty for one of our own in each.
        ssh_cidr: Who may reach SSH, where the group is ours.
        ssh_port: Where SSH answers.
        clock: Time.
    """

    def __init__(
        self,
        api: AwsApi,
        *,
        subnet_ids: Sequence[str],
        security_group_ids: Sequence[str],
        ssh_cidr: Sequence[str],
        ssh_port: int,
        clock: Clock,
    ) -> None:
        self._api = api
        self._subnet_ids = tuple(subnet_ids)
        self._group_ids = tuple(security_group_ids)
        self._ssh_cidr = tuple(sorted(ssh_cidr))
        self._ssh_port = ssh_port
        self._clock = clock
        self._subnets = Memo[dict[str, Subnet]](_LIFETIME_S, clock)
        self._groups = Memo[tuple[str, ...]](_LIFETIME_S, clock)

    def zones(self, region: str) -> frozenset[str] | None:
        """Return the zones of a region in which the user has named a subnet; None when all will do."""
        return frozenset(self._own_subnets(region)) if self._subnet_ids else None

    def place(self, region: str, zone: str, namespace: str) -> Place:
        """Return where a box of a namespace is put, making the security group where need be.

        Raises:
            RequestRefused: When the user's own network does not reach there.
            CloudError: What AWS answered.
        """
        subnet = self._own_subnets(region).get(zone) if self._subnet_ids else None
        if self._subnet_ids and subnet is None:
            raise RequestRefused(
                f"aws: none of the subnets {', '.join(self._subnet_ids)} is in {zone}", scope=Scope.ZONE
            )
        vpc_id = subnet.vpc_id if subnet else None
        groups = self._groups.get(
            (region, vpc_id, namespace), lambda: self._security_groups(region, vpc_id, namespace)
        )
        return Place(groups, subnet.id if subnet else None)

    def forget(self) -> None:
        """Look everything up again: what was found may have been removed."""
        self._subnets.forget()
        self._groups.forget()

    def make_placement_group(self, region: str, name: str, namespace: str) -> None:
        """Make the group that keeps the boxes of one lease close together; there already is fine."""
        tags = _tagged("placement-group", namespace)
        try:
            self._api.call(
                "ec2",
                region,
                "create_placement_group",
                GroupName=name,
                Strategy="cluster",
                TagSpecifications=tags,
            )
        except CloudError as error:
            if not code_of(error).startswith("InvalidPlacementGroup.Duplicate"):
                raise

    def remove_placement_group(self, region: str, name: str) -> None:
        """Remove the group of a lease, if that can be done: it costs nothing, and holds up no teardown.

        Another box of the lease may still be in there; its end then removes it.
        """
        try:
            self._api.call("ec2", region, "delete_placement_group", GroupName=name)
        except CloudError as error:
            _log.info("the placement group %s in %s stays: %s", name, region, error)

    def _own_subnets(self, region: str) -> dict[str, Subnet]:
        def ask() -> dict[str, Subnet]:
            filters = [{"Name": "subnet-id", "Values": list(self._subnet_ids)}]
            found = self._api.pages("ec2", region, "describe_subnets", "Subnets", Filters=filters)
            return {each["AvailabilityZone"]: Subnet(each["SubnetId"], each["VpcId"]) for each in found}

        return self._subnets.get(region, ask)

    def _security_groups(self, region: str, vpc_id: str | None, namespace: str) -> tuple[str, ...]:
        if self._group_ids:
            found = self._described(region, [{"Name": "group-id", "Values": list(self._group_ids)}])
            if not found:
                named = ", ".join(self._group_ids)
                raise RequestRefused(
                    f"aws: none of the security groups {named} is in {region}", scope=Scope.REGION
                )
            return tuple(sorted(each["GroupId"] for each in found))
        try:
            return (self._own_group(region, vpc_id, namespace),)
        except AuthenticationFailed as error:
            error.hint = "where security groups may not be made, name security_group_ids (and subnet_ids)"
            raise

    def _own_group(self, region: str, vpc_id: str | None, namespace: str) -> str:
        # The rules are part of the name: two settings of one namespace do not change each other's group.
        rules = hashlib.sha256(f"{self._ssh_cidr} {self._ssh_port}".encode()).hexdigest()[:6]
        name = f"gpu-flows-{namespace}-{rules}"
        where: dict[str, Any] = {"VpcId": vpc_id} if vpc_id else {}
        try:
            made = self._api.call(
                "ec2",
                region,
                "create_security_group",
                GroupName=name,
                Description=f"Boxes of gpu-flows, namespace {namespace}",
                TagSpecifications=_tagged("security-group", namespace),
                **where,
            )
            group_id = str(made["GroupId"])
        except CloudError as error:
            if not code_of(error).startswith("InvalidGroup.Duplicate"):
                raise
            filters = [{"Name": "group-name", "Values": [name]}]
            filters += [{"Name": "vpc-id", "Values": [vpc_id]}] if vpc_id else []
            found = self._described(region, filters)
            if not found:
                raise UnexpectedAnswer(
                    f"aws has a security group {name} in {region} and does not show it"
                ) from error
            group_id = str(found[0]["GroupId"])
        # Each by itself, and again for a group that is there: whoever made it may have died before its rules.
        ssh = {"IpProtocol": "tcp", "FromPort": self._ssh_port, "ToPort": self._ssh_port}
        for cidr in self._ssh_cidr:
            key, field = ("Ipv6Ranges", "CidrIpv6") if ":" in cidr else ("IpRanges", "CidrIp")
            self._allow(region, group_id, {**ssh, key: [{field: cidr}]})
        self._allow(region, group_id, {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]})
        return group_id

    def _allow(self, region: str, group_id: str, rule: dict[str, Any]) -> None:
        for pause_s in (*_NEW_GROUP_PAUSES_S, None):
            try:
                self._api.call(
                    "ec2", region, "authorize_security_group_ingress", GroupId=group_id, IpPermissions=[rule]
                )
            except CloudError as error:
                code = code_of(error)
                if code.startswith("InvalidPermission.Duplicate"):
                    return
                if not code.startswith("InvalidGroup.NotFound") or pause_s is None:
                    raise
                self._clock.sleep(pause_s)
            else:
                return

    def _described(self, region: str, filters: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return list(
            self._api.pages("ec2", region, "describe_security_groups", "SecurityGroups", Filters=filters)
        )


def _tagged(kind: str, namespace: str) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": [{"Key": TAG, "Value": namespace}]}]
