"""AWS: the create call itself, and where its boxes stand."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpu_flows.clouds.aws import AwsCloud
from gpu_flows.clouds.aws.launch import BOOT_FILE, client_token, user_data
from gpu_flows.clouds.base import BoxSpec, BoxState
from gpu_flows.clouds.errors import RequestRefused
from gpu_flows.endpoint import SshEndpoint
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.leases.deadman import boot_script
from gpu_flows.offers import Offer, OfferQuery, Spot
from tests.clouds.aws_account import opened, share_models
from tests.clouds.contract import box_name
from tests.clouds.ssh_client import PUBLIC_KEY
from tests.emulators.aws import IMAGE_NAME, KEY_ID, SECRET, AwsEmulator, refuse
from tests.emulators.clock import FakeClock

DEADLINE = datetime(2027, 6, 1, tzinfo=UTC)


@pytest.fixture(scope="module", autouse=True)
def _models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        share_models(patch)
        yield


@pytest.fixture
def emulator() -> Iterator[AwsEmulator]:
    with AwsEmulator() as emulator:
        yield emulator
        assert not emulator.live()


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"clock": FakeClock(datetime.now(UTC)), "cache": str(tmp_path / "cache")}


@pytest.fixture
def cloud(emulator: AwsEmulator, options: dict[str, Any]) -> AwsCloud:
    return opened(emulator, **options)


def spec(name: str | None = None, **changes: Any) -> BoxSpec:
    name = name or box_name()
    given = {
        "name": name,
        "nonce": name.split("-")[5],
        "owner": '["cli","launch"]',
        "ssh_public_key": PUBLIC_KEY,
        "deadline": DEADLINE,
        **changes,
    }
    return BoxSpec(**given)


def an_offer(cloud: AwsCloud, request: str = "g4dn.xlarge", **wanted: Any) -> Offer:
    query = OfferQuery(request=GpuRequest.parse(request), **wanted)
    return next(offer for offer in cloud.offers(query) if offer.unavailable is None)


def sent(emulator: AwsEmulator, cloud: AwsCloud, offer: Offer, wanted: BoxSpec) -> dict[str, str]:
    """Rent a box, give it back, and return the call that made it."""
    box = cloud.create(offer, wanted)
    cloud.destroy(box)
    form = emulator.book[box.id].data["form"]
    assert isinstance(form, dict)
    return form


def test_a_create_carries_all_that_ends_the_box(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    wanted = spec(boot_script="echo boot\n")
    offer = an_offer(cloud)
    form = sent(emulator, cloud, offer, wanted)
    assert (form["MinCount"], form["MaxCount"]) == ("1", "1")
    assert form["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert form["BlockDeviceMapping.1.Ebs.DeleteOnTermination"] == "true"
    assert form["BlockDeviceMapping.1.Ebs.VolumeType"] == "gp3"
    assert form["BlockDeviceMapping.1.Ebs.VolumeSize"] == "100"
    assert form["MetadataOptions.HttpTokens"] == "required"
    assert form["Placement.AvailabilityZone"] == offer.zone
    assert "KeyName" not in form
    tags = _tags(form)
    assert tags["Name"] == wanted.name
    assert tags["gpu-flows"] == "test"
    assert tags["gpu-flows-owner"] == wanted.owner
    config = _config(form)
    assert config["ssh_authorized_keys"] == [PUBLIC_KEY]
    (file,) = config["write_files"]
    assert file["path"] == BOOT_FILE
    assert "echo boot" in file["content"]
    assert subprocess.run(["sh", "-n"], input=file["content"], text=True, check=True).returncode == 0
    assert SECRET not in json.dumps(form)


def test_the_token_tells_creates_types_zones_and_markets_apart(cloud: AwsCloud) -> None:
    offer, wanted = an_offer(cloud), spec()
    variants = [
        (offer, wanted),
        (offer, spec()),
        (replace(offer, instance_type="g4dn.2xlarge"), wanted),
        (replace(offer, zone="us-east-1f"), wanted),
        (replace(offer, spot=True), wanted),
    ]
    tokens = [client_token(*each) for each in variants]
    assert len(set(tokens)) == len(tokens)
    longest = replace(offer, instance_type="p6-b200.48xlarge", zone="ap-southeast-1-wl1-han1a", spot=True)
    assert all(len(token) <= 64 and token.isascii() for token in (*tokens, client_token(longest, wanted)))
    assert client_token(longest, wanted).endswith("-spot"), "nothing that tells them apart is cut off"


def test_a_spot_box_is_taken_once_and_costs_little_more_than_offered(
    emulator: AwsEmulator, cloud: AwsCloud
) -> None:
    emulator.spot_usd = {"g4dn.xlarge": 0.2}
    form = sent(emulator, cloud, an_offer(cloud, spot=Spot.ONLY), spec())
    assert form["InstanceMarketOptions.MarketType"] == "spot"
    assert form["InstanceMarketOptions.SpotOptions.SpotInstanceType"] == "one-time"
    assert form["InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior"] == "terminate"
    assert float(form["InstanceMarketOptions.SpotOptions.MaxPrice"]) == pytest.approx(0.24)
    assert "spot-instances-request" in form.values()


def test_a_preempted_box_says_so(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    box = cloud.create(an_offer(cloud, spot=Spot.ONLY), spec())
    assert box.spot
    emulator.drive(box.id, "terminated", "Server.SpotInstanceTermination", "Spot instance termination")
    now = cloud.describe(box)
    assert now.state is BoxState.GONE
    assert now.state_reason.startswith("Server.SpotInstanceTermination")


def test_c49_user_data_is_small_and_its_size_is_checked_here(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    offer = an_offer(cloud)
    end = cloud.self_destruct(spec())
    assert end is not None
    boot = boot_script(DEADLINE, end, length_s=86400)
    assert len(user_data(spec(boot_script=boot), username="ubuntu").encode()) < 8192
    large = spec(env={f"VARIABLE_{n}": "x" * 1000 for n in range(12)})
    with pytest.raises(RequestRefused, match="16384") as told:
        cloud.create(offer, replace(large, boot_script=boot + "#" * 4000))
    assert not told.value.ambiguous
    assert "over SSH" in str(told.value)
    assert emulator.calls["RunInstances"] == 0


def test_the_environment_of_a_box_is_that_of_its_logins(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    form = sent(emulator, cloud, an_offer(cloud), spec(env={"A": "one two", "B": "$x"}))
    (file,) = [each for each in _config(form)["write_files"] if each["path"] == "/etc/environment"]
    assert (file["append"], file["content"]) == (True, 'A="one two"\nB="$x"\n')
    with pytest.raises(RequestRefused, match="line end"):
        cloud.create(an_offer(cloud), spec(env={"A": "one\ntwo"}))


def test_a_group_is_made_once_for_each_namespace_and_lets_in_whom_it_should(
    emulator: AwsEmulator, options: dict[str, Any]
) -> None:
    cloud = opened(emulator, ssh_cidr="203.0.113.0/24", **options)
    offer = an_offer(cloud, regions=["us-east-2"])
    first = sent(emulator, cloud, offer, spec())
    again = sent(emulator, opened(emulator, ssh_cidr="203.0.113.0/24", **options), offer, spec())
    assert first["SecurityGroupId.1"] == again["SecurityGroupId.1"], "another process finds it"
    other = sent(emulator, cloud, offer, spec(box_name(namespace="test2")))
    assert other["SecurityGroupId.1"] != first["SecurityGroupId.1"]
    groups = _boto3(emulator, "us-east-2").describe_security_groups(GroupIds=[first["SecurityGroupId.1"]])
    (group,) = groups["SecurityGroups"]
    allowed = {
        (rule.get("FromPort"), *(each["CidrIp"] for each in rule["IpRanges"]))
        for rule in group["IpPermissions"]
    }
    assert (emulator.ssh_port, "203.0.113.0/24") in allowed
    assert "0.0.0.0/0" not in str(group["IpPermissions"])
    inside = [rule for rule in group["IpPermissions"] if rule["IpProtocol"] == "-1"]
    assert inside[0]["UserIdGroupPairs"][0]["GroupId"] == group["GroupId"], "its own boxes reach each other"


def test_where_groups_may_not_be_made_the_way_out_is_told(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    emulator.denied = {"CreateSecurityGroup"}
    with pytest.raises(Exception, match="security_group_ids") as told:
        cloud.create(an_offer(cloud), spec())
    assert not told.value.ambiguous  # type: ignore[attr-defined]
    assert emulator.calls["RunInstances"] == 0


def test_the_users_own_network_profile_and_tags_are_used(
    emulator: AwsEmulator, options: dict[str, Any]
) -> None:
    ec2 = _boto3(emulator, "us-east-1")
    subnet = ec2.describe_subnets(Filters=[{"Name": "availability-zone", "Values": ["us-east-1c"]}])[
        "Subnets"
    ][0]
    group = ec2.create_security_group(GroupName="mine", Description="x", VpcId=subnet["VpcId"])["GroupId"]
    emulator.denied = {"CreateSecurityGroup", "AuthorizeSecurityGroupIngress"}
    cloud = opened(
        emulator,
        subnet_ids=[subnet["SubnetId"]],
        security_group_ids=[group],
        tags={"team": "a", "Name": "not this"},
        private_address=True,
        ssh_proxy="jump@bastion.example:2222",
        **options,
    )
    box = cloud.create(an_offer(cloud), wanted := spec())
    form = emulator.book[box.id].data["form"]
    assert form["NetworkInterface.1.SubnetId"] == subnet["SubnetId"]
    assert form["NetworkInterface.1.SecurityGroupId.1"] == group
    assert form["NetworkInterface.1.AssociatePublicIpAddress"] == "false"
    assert "Placement.AvailabilityZone" not in form
    assert _tags(form) | {"team": "a", "Name": wanted.name} == _tags(form)
    endpoint = cloud.describe(box).endpoint
    assert endpoint == SshEndpoint(
        str(box.private_address),
        emulator.ssh_port,
        "ubuntu",
        proxy=SshEndpoint("bastion.example", 2222, "jump"),
    )
    cloud.destroy(box)


def test_an_instance_profile_goes_along(emulator: AwsEmulator, options: dict[str, Any]) -> None:
    cloud = opened(emulator, instance_profile="trainer", **options)
    emulator.fault("RunInstances", refuse("Unsupported"))
    with pytest.raises(Exception, match="Unsupported"):
        cloud.create(an_offer(cloud), spec())
    assert "IamInstanceProfile.Name=trainer" in str(emulator.requests[-1].body)


def test_boxes_of_one_lease_stand_together_and_leave_no_group_behind(
    emulator: AwsEmulator, cloud: AwsCloud
) -> None:
    offer = an_offer(cloud, nodes=2)
    boxes = [cloud.create(offer, spec(box_name(node=node))) for node in range(2)]
    forms = [emulator.book[box.id].data["form"] for box in boxes]
    assert {form["Placement.GroupName"] for form in forms} == {"gf1-test-leaseaaaaaaa"}
    assert {form["Placement.AvailabilityZone"] for form in forms} == {offer.zone}
    for box in boxes:
        cloud.destroy(box)
        cloud.describe(box)
    assert emulator.placement_groups == set()


def test_one_box_needs_no_group(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    assert "Placement.GroupName" not in sent(emulator, cloud, an_offer(cloud), spec())
    assert emulator.calls["CreatePlacementGroup"] == 0


def test_the_image_of_a_spec_comes_before_that_of_the_account(
    emulator: AwsEmulator, options: dict[str, Any]
) -> None:
    image = emulator.image("us-east-1")
    cloud = opened(emulator, image="/aws/service/none", regions=["us-east-1"], **options)
    assert {o.unavailable for o in cloud.offers(OfferQuery(request=GpuRequest.parse("g4dn.xlarge")))} == {
        "aws has not got the image '/aws/service/none' in us-east-1"
    }
    offer = an_offer(opened(emulator, **options), regions=["us-east-1"])
    assert sent(emulator, cloud, offer, spec(image=IMAGE_NAME))["ImageId"] == image


def test_more_than_one_page_is_read(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    theirs = [emulator.stranger(f"gf1-pages-{n:03d}") for n in range(120)]
    assert len(cloud.find("gf1-pages-")) == 120
    assert len(theirs) == 120


def test_boto3_itself_makes_lists_and_destroys_an_instance(emulator: AwsEmulator) -> None:
    """The vendor's own client is content with the emulator."""
    ec2 = _boto3(emulator, "us-east-1")
    call = {
        "ImageId": emulator.image("us-east-1"),
        "InstanceType": "g4dn.xlarge",
        "MinCount": 1,
        "MaxCount": 1,
    }
    made = ec2.run_instances(**call, ClientToken="one", UserData="#cloud-config\n{}")["Instances"][0]
    again = ec2.run_instances(**call, ClientToken="one", UserData="#cloud-config\n{}")["Instances"][0]
    assert again["InstanceId"] == made["InstanceId"]
    with pytest.raises(ec2.exceptions.ClientError, match="IdempotentParameterMismatch"):
        ec2.run_instances(**call, ClientToken="one", UserData="#cloud-config\n{} ")
    waiter = ec2.get_waiter("instance_running")
    waiter.wait(InstanceIds=[made["InstanceId"]], WaiterConfig={"Delay": 0, "MaxAttempts": 3})
    listed = [each["InstanceId"] for r in ec2.describe_instances()["Reservations"] for each in r["Instances"]]
    assert listed == [made["InstanceId"]]
    ec2.terminate_instances(InstanceIds=[made["InstanceId"]])
    with pytest.raises(ec2.exceptions.ClientError, match="IdempotentInstanceTerminated"):
        ec2.run_instances(**call, ClientToken="one", UserData="#cloud-config\n{}")
    history = ec2.describe_spot_price_history(InstanceTypes=["g4dn.xlarge"], StartTime=datetime.now(UTC))
    assert {each["InstanceType"] for each in history["SpotPriceHistory"]} == {"g4dn.xlarge"}


def test_opening_the_cloud_loads_no_client() -> None:
    text = (
        "import sys; from gpu_flows.clouds import open_cloud; open_cloud('aws');"
        "print(sorted({'boto3', 'botocore'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", text], capture_output=True, check=True, text=True)
    assert output.stdout == "[]\n"


def test_a_box_is_looked_at_in_the_console(cloud: AwsCloud, emulator: AwsEmulator) -> None:
    box = cloud.create(an_offer(cloud), spec(deadline=datetime.now(UTC) + timedelta(hours=1)))
    assert f"instanceId={box.id}" in str(cloud.console_url(box))
    cloud.destroy(box)


def _boto3(emulator: AwsEmulator, region: str) -> Any:
    import boto3

    return boto3.client(
        "ec2",
        region_name=region,
        endpoint_url=emulator.url,
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=SECRET,
    )


def _tags(form: dict[str, str]) -> dict[str, str]:
    keys = {
        name: value
        for name, value in form.items()
        if name.startswith("TagSpecification.1.") and ".Key" in name
    }
    return {value: form[name.replace(".Key", ".Value")] for name, value in keys.items()}


def _config(form: dict[str, str]) -> Any:
    text = base64.b64decode(form["UserData"]).decode()
    assert text.startswith("#cloud-config\n")
    return json.loads(text.removeprefix("#cloud-config\n"))
