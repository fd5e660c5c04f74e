"""AWS as the `Cloud` protocol wants it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds._credentials import previous_secret, secret_from_environment
from gpu_flows.clouds.aws.answers import BILLING, box_of, state_of
from gpu_flows.clouds.aws.api import AwsApi
from gpu_flows.clouds.aws.images import Images
from gpu_flows.clouds.aws.launch import namespace_of, placement_group_of, run_request
from gpu_flows.clouds.aws.market import REGIONS_AT_ONCE, Market
from gpu_flows.clouds.aws.network import Network
from gpu_flows.clouds.aws.prices import Prices
from gpu_flows.clouds.aws.verdicts import code_of
from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Capabilities
from gpu_flows.clouds.errors import (
    AuthenticationFailed,
    CloudError,
    CloudUnreachable,
    RequestRefused,
    UnexpectedAnswer,
)
from gpu_flows.endpoint import SshEndpoint
from gpu_flows.errors import BadRequest
from gpu_flows.offers import Offer, OfferQuery

_INSTANCE_ID = re.compile(r"i-[0-9a-f]+")
_USERNAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_PLAIN = re.compile(r"[A-Za-z0-9_.-]*")
_YOUNG_S = 120.0
"""So long after its create a box that AWS does not know may just not have come round yet."""


class AwsCloud:
    """Boxes of Amazon EC2.

    Args:
        account: ``default`` for boto3's own chain of credentials; any other name is that of a profile, unless
            the environment has keys for it (``AWS_ACCESS_KEY_ID__TEAM_A``).
        profile: A profile by another name than the account's.
        access_key_id: Explicit credentials, before the chain.
        secret_access_key: Goes with it.
        session_token: Goes with it where it is temporary.
        base_url: Where every service is asked instead of at AWS, for emulators.
        regions: The only regions to rent and to look in; empty for every one that the account has enabled.
        image: What boxes boot unless they are told otherwise: ``ami-...``, the path of an SSM parameter, or a name
            with ``*``; None for AWS's Deep Learning image with drivers.
        username: The login user of the image.
        ssh_port: Where the image answers SSH.
        ssh_cidr: Who may reach SSH, where the security group is ours: one or several CIDRs.
        subnet_ids: Subnets to use, of any region, instead of the default ones.
        security_group_ids: Security groups to use, of any region, instead of one of our own.
        instance_profile: Name or ARN of an instance profile for the boxes.
        tags: More tags for boxes and their disks.
        private_address: Reach boxes at their private address; with `subnet_ids` they get no public one.
        ssh_proxy: A jump host: ``user@host:port``, or a table of ``host``, ``port`` and ``username``.
        cache: Folder in which prices are remembered; in the installation's state folder unless given.
        clock: Time and sleep.

    Raises:
        BadRequest: When an option makes no sense.
    """

    name = "aws"
    capabilities = Capabilities(
        spot=True, multi_node=True, idempotent_create=True, lag_s=60, ready_timeout_s=900
    )

    def __init__(
        self,
        account: str = "default",
        *,
        profile: str | None = None,
        access_key_id: str | None = None,
        secret_access_key: str | None = None,
        session_token: str | None = None,
        base_url: str | None = None,
        regions: Sequence[str] = (),
        image: str | None = None,
        username: str = "ubuntu",
        ssh_port: int = 22,
        ssh_cidr: str | Sequence[str] = "0.0.0.0/0",
        subnet_ids: Sequence[str] = (),
        security_group_ids: Sequence[str] = (),
        instance_profile: str | None = None,
        tags: Mapping[str, str] | None = None,
        private_address: bool = False,
        ssh_proxy: str | Mapping[str, Any] | None = None,
        cache: str | Path | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        from gpu_flows.settings import state_folder

        if not _USERNAME.fullmatch(username):
            raise BadRequest(f"aws: {username!r} is no name of a login user")
        self.account = account
        self._image = image
        self._username = username
        self._ssh_port = ssh_port
        self._instance_profile = instance_profile
        self._tags = dict(tags or {})
        self._private = private_address
        self._proxy = _proxy(ssh_proxy)
        self._asked_to_end: set[str] = set()
        if account != "default" and not (profile or access_key_id):
            told = partial(secret_from_environment, account=account)
            access_key_id, secret_access_key = told("AWS_ACCESS_KEY_ID"), told("AWS_SECRET_ACCESS_KEY")
            session_token = told("AWS_SESSION_TOKEN")
        named = profile or (None if account == "default" or access_key_id else account)
        self._api = AwsApi(
            profile=named,
            access_key_id=access_key_id,
            secret_access_key=secret_access_key,
            session_token=session_token,
            base_url=base_url,
            clock=clock,
        )
        folder = Path(cache) if cache else state_folder(os.environ) / "aws"
        self._images = Images(self._api, clock)
        self._network = Network(
            self._api,
            subnet_ids=subnet_ids,
            security_group_ids=security_group_ids,
            ssh_cidr=[ssh_cidr] if isinstance(ssh_cidr, str) else list(ssh_cidr),
            ssh_port=ssh_port,
            clock=clock,
        )
        self._market = Market(
            self._api,
            account=account,
            images=self._images,
            network=self._network,
            prices=Prices(self._api, folder / "prices.json", clock),
            image=image,
            regions=regions,
            public=not (private_address and subnet_ids),
            clock=clock,
        )

    def offers(self, query: OfferQuery) -> list[Offer]:
        """Return the types that carry the cards asked for, by region, zone and market."""
        return self._market.offers(query)

    def create(self, offer: Offer, spec: BoxSpec) -> Box:
        """Rent one box by one RunInstances call; the same offer and spec again give the same box."""
        if offer.cloud != self.name or not offer.region:
            raise RequestRefused(
                f"not an offer of aws: {offer.cloud} {offer.instance_type} in {offer.region!r}"
            )
        try:
            request = self._request(offer, spec)
        except CloudError as error:
            error.ambiguous = False  # nothing was created by then
            raise
        try:
            answer = self._api.call("ec2", offer.region, "run_instances", creating=True, **request)
        except RequestRefused:
            self._network.forget()  # a group or subnet that was there may have been removed
            raise
        instances = answer.get("Instances")
        if not isinstance(instances, list) or len(instances) != 1:
            raise UnexpectedAnswer(f"aws answered run_instances in {offer.region} without its one instance")
        return self._box(offer.region, instances[0])

    def find(self, name_prefix: str) -> list[Box]:
        """Return every box whose name starts with the prefix, in every region and every state that bills."""
        filters = [{"Name": "instance-state-name", "Values": list(BILLING)}]
        if name_prefix and _PLAIN.fullmatch(name_prefix):
            filters.append({"Name": "tag:Name", "Values": [f"{name_prefix}*"]})
        found = self._everywhere(filters)
        return [box for box in found if box.name.startswith(name_prefix)]

    def describe(self, box: Box) -> Box:
        """Return the box as it is now."""
        filters = [{"Name": "instance-id", "Values": [self._own_id(box)]}]
        try:
            found = self._in_region(box.region, filters) if box.region else self._everywhere(filters)
        except AuthenticationFailed:
            if box.id not in self._asked_to_end or not box.region:
                raise
            # To describe is forbidden and to terminate is allowed: asked again, it tells the state as well.
            return self._terminated(box)
        if found:
            return self._settled(found[0])
        return box if self._is_young(box) else self._settled(replace(box, state=BoxState.GONE, endpoint=None))

    def destroy(self, box: Box) -> None:
        """Terminate the box, its disk included."""
        box_id = self._own_id(box)
        region = box.region
        if not region:
            found = self._everywhere([{"Name": "instance-id", "Values": [box_id]}])
            if not found:
                return
            region = found[0].region
        self._terminated(replace(box, region=region))

    def self_destruct(self, spec: BoxSpec) -> str | None:
        """Return sh that halts the machine: it was made so that this terminates it."""
        return "sudo -n shutdown -h now || shutdown -h now"

    def clock_skew_s(self) -> float | None:
        """Return the clock of AWS less ours, as its last answer told."""
        return self._api.skew_s

    def identity_secrets(self) -> tuple[bytes, ...]:
        """Return the secret access key; nothing where the credentials are temporary."""
        secret = self._api.static_secret()
        if secret is None:
            return ()
        previous = previous_secret("AWS_SECRET_ACCESS_KEY", account=self.account)
        return tuple(value.encode() for value in (secret, previous) if value)

    def console_url(self, box: Box) -> str | None:
        """Return the page of the box in the console of AWS."""
        if not box.region:
            return None
        return (
            f"https://{box.region}.console.aws.amazon.com/ec2/home?region={box.region}"
            f"#InstanceDetails:instanceId={box.id}"
        )

    def _request(self, offer: Offer, spec: BoxSpec) -> dict[str, Any]:
        namespace = namespace_of(spec)
        image = self._images.of(offer.region, spec.image or self._image)
        place = self._network.place(offer.region, offer.zone or "", namespace)
        request = run_request(
            offer,
            spec,
            image=image,
            place=place,
            username=self._username,
            instance_profile=self._instance_profile,
            tags=self._tags,
            private=self._private,
        )
        if "GroupName" in request.get("Placement", {}):
            self._network.make_placement_group(offer.region, placement_group_of(spec), namespace)
        return request

    def _everywhere(self, filters: list[dict[str, Any]]) -> list[Box]:
        regions = self._market.regions()
        with ThreadPoolExecutor(REGIONS_AT_ONCE) as pool:
            listed = list(pool.map(partial(self._in_region, filters=filters), regions))
        return [box for boxes in listed for box in boxes]

    def _in_region(self, region: str, filters: list[dict[str, Any]]) -> list[Box]:
        reservations = self._api.pages("ec2", region, "describe_instances", "Reservations", Filters=filters)
        return [self._box(region, instance) for each in reservations for instance in _instances(each, region)]

    def _box(self, region: str, instance: Mapping[str, Any]) -> Box:
        return box_of(
            instance,
            account=self.account,
            region=region,
            username=self._username,
            ssh_port=self._ssh_port,
            private=self._private,
            proxy=self._proxy,
        )

    def _terminated(self, box: Box) -> Box:
        """Ask for the end of a box, and return it as the answer says that it is."""
        try:
            answer = self._api.call("ec2", box.region, "terminate_instances", InstanceIds=[box.id])
        except CloudError as error:
            if not code_of(error).startswith("InvalidInstanceID.NotFound"):
                raise
            if self._is_young(box):
                raise CloudUnreachable(
                    f"aws does not know its new box {box.id} yet: it is asked again"
                ) from error
            return replace(box, state=BoxState.GONE, endpoint=None)
        self._asked_to_end.add(box.id)
        ending = answer.get("TerminatingInstances")
        if not isinstance(ending, list) or len(ending) != 1:
            raise UnexpectedAnswer(
                f"aws answered terminate_instances in {box.region} without its one instance"
            )
        return replace(box, state=state_of(ending[0]["CurrentState"]["Name"]), endpoint=None)

    def _settled(self, box: Box) -> Box:
        """Return the box; what its lease leaves behind goes with it."""
        group = box.details.get("placement_group")
        if box.state is BoxState.GONE and group and box.region:
            self._network.remove_placement_group(box.region, group)
        return box

    def _is_young(self, box: Box) -> bool:
        return box.created_at is not None and (self._api.now() - box.created_at).total_seconds() < _YOUNG_S

    def _own_id(self, box: Box) -> str:
        if box.cloud != self.name or not _INSTANCE_ID.fullmatch(box.id):
            raise RequestRefused(f"not a box of aws: {box.cloud} {box.id!r}")
        return box.id


def _instances(reservation: Mapping[str, Any], region: str) -> list[Mapping[str, Any]]:
    instances = reservation.get("Instances")
    if not isinstance(instances, list):
        raise UnexpectedAnswer(f"aws listed a reservation without instances in {region}")
    return instances


def _proxy(told: str | Mapping[str, Any] | None) -> SshEndpoint | None:
    if told is None:
        return None
    if not isinstance(told, str):
        return SshEndpoint(told["host"], int(told.get("port", 22)), told.get("username", "ubuntu"))
    user, _, address = told.rpartition("@")
    host, _, port = address.partition(":")
    return SshEndpoint(host, int(port or 22), user or "ubuntu")
