"""AWS: moto's server behind a layer that adds what moto leaves out.

moto keeps the account (instances, tags, groups, types). The layer adds idempotency tokens, capacity and quota
errors, late failures, permissions, the services that moto has not got (quotas, prices, the parameters of the
Deep Learning images), a listing that lags behind, and real boxes, booted as cloud-init would boot them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlencode
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from gpu_flows.clouds.aws.launch import BOOT_FILE, MOST_USER_DATA_BYTES
from gpu_flows.clouds.aws.shapes import Shape, known_shapes

from .aws_machine import stand_ins
from .forward import Forwarder, free_port
from .http import Fault, HttpEmulator, Reply, Request, Row

KEY_ID = "AKIAINVENTEDKEY00001"
SECRET = "invented/secret/key/of/no/account/000001"
REGIONS = ("us-east-1", "us-east-2", "us-west-2", "eu-west-1")
IMAGE_PARAMETER = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
IMAGE_NAME = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) 20261120"
GP3_USD_PER_GB_MONTH = 0.08

CARDS = {"H100-SXM": ("NVIDIA H100 80GB HBM3", 81559), "T4": ("Tesla T4", 15360)}
"""What nvidia-smi says of a card."""

_ACCOUNT = "123456789012"
_EC2 = "http://ec2.amazonaws.com/doc/2016-11-15"
_CREDENTIAL = re.compile(r"Credential=(?P<key>[^/]+)/\d+/(?P<region>[^/]+)/(?P<service>[^/]+)/")
_OFF = re.compile(r"/hypervisor/off/(i-[0-9a-f]+)")
_moto_lock = threading.RLock()
_application: Callable[..., Any] | None = None


def refuse(code: str, message: str = "no", status: int = 400) -> Fault:
    """Answer with an error of EC2, and do nothing."""
    return lambda _: refusal(code, message, status)


def refusal(code: str, message: str, status: int = 400) -> Reply:
    body = (
        f"<Response><Errors><Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error>"
        "</Errors><RequestID>11111111-2222-3333-4444-555555555555</RequestID></Response>"
    )
    return Reply(status, body, {"Content-Type": "text/xml"})


def refuse_json(code: str, message: str = "no", status: int = 400) -> Fault:
    """Answer with an error of the services that speak JSON."""
    return lambda _: Reply(status, {"__type": code, "message": message})


class AwsEmulator(HttpEmulator):
    """One account of AWS.

    Operations are named as in the API: ``RunInstances``, ``GetParameter``.

    Args:
        backing: Folder for real boxes behind the instances; None for instances that nothing answers.
        skew_s: How far its clock is ahead of ours.

    Attributes:
        always: By operation, what goes wrong each time.
        denied: Operations that the account may not call.
        regions: Those that the account has enabled.
        imageless: Regions without a Deep Learning image.
        quotas: vCPUs by region and code; `default_quota` where nothing is said.
        spot_usd: Spot prices by type; a third of the list price where nothing is said.
        on_demand_usd: Prices by type and region, instead of the list price.
        ssh_port: Where all its boxes answer SSH, each at its own address.
    """

    def __init__(self, backing: Path | None = None, *, skew_s: float = 0.0) -> None:
        super().__init__(backing, skew_s=skew_s)
        self.always: dict[str, Fault] = {}
        self.denied: set[str] = set()
        self.regions: tuple[str, ...] = REGIONS
        self.imageless: set[str] = set()
        self.quotas: dict[tuple[str, str], float] = {}
        self.default_quota = 768.0
        self.spot_usd: dict[str, float] = {}
        self.on_demand_usd: dict[str, dict[str, float]] = {}
        self.ssh_port = free_port()
        self.keys = {KEY_ID}
        self.placement_groups: set[str] = set()
        self._shapes = known_shapes()
        self._tokens: dict[tuple[str, ...], tuple[str, str]] = {}
        self._images: dict[str, str] = {}
        self._forwarders: dict[str, Forwarder] = {}
        self._bin = stand_ins(backing / "bin") if backing else None

    def __enter__(self) -> Self:
        _moto("POST", "/moto-api/reset", {"Host": "moto"}, b"")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for forwarder in self._forwarders.values():
            forwarder.close()

    # What tests use

    def instance(self, box_id: str) -> Any:
        """Return moto's own record of an instance."""
        from moto.backends import get_backend

        for region in self.regions:
            for instance in get_backend("ec2")[_ACCOUNT][region].all_instances():
                if instance.id == box_id:
                    return instance
        raise KeyError(box_id)

    def drive(self, box_id: str, state: str, code: str = "", message: str = "") -> None:
        """Bring an instance into a state, with the reason that AWS would give."""
        codes = {
            "pending": 0,
            "running": 16,
            "shutting-down": 32,
            "terminated": 48,
            "stopping": 64,
            "stopped": 80,
        }
        with _moto_lock:
            instance = self.instance(box_id)
            instance._state.name, instance._state.code = state, codes[state]
            if code:
                instance.state_reason.code, instance.state_reason.message = code, f"{code}: {message}"
        self.book[box_id].state = state
        self.book[box_id].data.pop("booting", None)
        if state == "terminated":
            self.end(self.book[box_id])

    def stranger(self, name: str, region: str = "us-east-1") -> Row:
        """Put an instance of somebody else into the account."""
        from moto.backends import get_backend

        with _moto_lock:
            tags = {"instance": {"Name": name}} if name else {}
            reservation = get_backend("ec2")[_ACCOUNT][region].run_instances(
                "ami-12c6146b", 1, None, [], instance_type="m5.large", placement=None, region_name=region,
                is_instance_type_default=False, tags=tags, nics=[], subnet_id=None, security_group_ids=[],
                instance_initiated_shutdown_behavior="stop", client_token="foreign",
            )  # fmt: skip
        return self.begin(Row(id=reservation.instances[0].id, name=name, foreign=True))

    # Answering

    def answer(self, request: Request) -> Reply:
        if off := _OFF.fullmatch(request.path):
            return self._power_off(off[1])
        signed = _CREDENTIAL.search(request.headers.get("authorization", ""))
        if signed is None:
            return refusal("MissingAuthenticationToken", "the request is not signed", 403)
        form = _form(request)
        operation = form.get("Action") or request.headers.get("x-amz-target", "").rpartition(".")[2]
        if signed["key"] not in self.keys:
            return refusal("AuthFailure", "AWS was not able to validate the provided access credentials", 401)
        with self.lock:
            self.calls[operation] += 1
            waiting = self.faults.get(operation)
            fault = waiting.popleft() if waiting else self.always.get(operation)
        found = Request(**{**vars(request), "match": signed.groupdict()})
        handle = partial(self._handle, operation, found, form)
        return handle() if fault is None else fault(handle)

    def _handle(self, operation: str, request: Request, form: Mapping[str, str]) -> Reply:
        if operation in self.denied:
            who = "User: arn:aws:iam::123456789012:user/invented"
            if request.match["service"] == "ec2":
                return refusal(
                    "UnauthorizedOperation", f"You are not authorized to perform {operation}. {who}", 403
                )
            return Reply(400, {"__type": "AccessDeniedException", "message": f"{who} may not {operation}"})
        handler = getattr(self, f"_on_{operation}", None)
        region = request.match["region"]
        return self._forward(request) if handler is None else handler(request, form, region)

    def _forward(self, request: Request) -> Reply:
        kept = ("authorization", "content-type", "x-amz-target", "x-amz-date")
        headers = {name: value for name, value in request.headers.items() if name in kept}
        body = request.body if isinstance(request.body, str) else json.dumps(request.body)
        return _moto(request.method, request.path, headers, body.encode())

    # EC2

    def _on_DescribeRegions(self, request: Request, form: Mapping[str, str], region: str) -> Reply:
        items = "".join(f"<item><regionName>{name}</regionName></item>" for name in self.regions)
        return _xml("DescribeRegions", f"<regionInfo>{items}</regionInfo>")

    def _on_RunInstances(self, request: Request, form: Mapping[str, str], region: str) -> Reply:
        with self.lock:
            wanted = {key: value for key, value in form.items() if key != "ClientToken"}
            zone = form.get("Placement.AvailabilityZone") or form.get("NetworkInterface.1.SubnetId", "")
            token = (region, zone, form.get("ClientToken", ""))
            if token in self._tokens:
                return self._repeated(token, json.dumps(wanted, sort_keys=True))
            refused = self._refused(form, region)
            if refused is not None:
                return refused
            reply = self._forward(request)
            if reply.status != 200:
                return reply
            box_id = re.search(r"<instanceId>(i-[0-9a-f]+)</instanceId>", str(reply.body))
            assert box_id is not None, reply.body
            self._tokens[token] = (json.dumps(wanted, sort_keys=True), box_id[1])
            row = self.begin(
                Row(id=box_id[1], name=_tag(form, "Name"), state="pending", data={"form": dict(form)})
            )
            self._boot(row, form)
        return reply

    def _repeated(self, token: tuple[str, ...], wanted: str) -> Reply:
        first, box_id = self._tokens[token]
        if first != wanted:
            return refusal("IdempotentParameterMismatch", "The token was used with other parameters")
        if self.book[box_id].ended_at is not None:
            return refusal("IdempotentInstanceTerminated", "The instance of this token has been terminated")
        described = self._described(token[0], box_id)
        inner = "".join(ElementTree.tostring(each, "unicode") for each in described)
        return _xml("RunInstances", inner)

    def _described(self, region: str, box_id: str) -> list[ElementTree.Element]:
        form = urlencode({"Action": "DescribeInstances", "Version": "2016-11-15", "InstanceId.1": box_id})
        reply = _moto("POST", "/", _signed(region), form.encode())
        item = ElementTree.fromstring(str(reply.body)).find(f".//{{{_EC2}}}reservationSet/{{{_EC2}}}item")
        assert item is not None
        return list(item)

    def _refused(self, form: Mapping[str, str], region: str) -> Reply | None:
        kind = form["InstanceType"]
        if kind not in self._shapes:
            return refusal("InvalidParameterValue", f"Invalid value '{kind}' for InstanceType.")
        if form["ImageId"] != self._images.get(region):
            return refusal("InvalidAMIID.NotFound", f"The image id '[{form['ImageId']}]' does not exist")
        data = base64.b64decode(form.get("UserData", ""))
        if len(data) > MOST_USER_DATA_BYTES:
            return refusal("InvalidParameterValue", "User data is limited to 16384 bytes")
        code = self._shapes[kind].quotas[
            "spot" if "InstanceMarketOptions.MarketType" in form else "on_demand"
        ]
        if self._quota(region, code) < (self._shapes[kind].vcpus or 0):
            stem = (
                "MaxSpotInstanceCountExceeded"
                if "InstanceMarketOptions.MarketType" in form
                else "VcpuLimitExceeded"
            )
            return refusal(stem, "You have requested more vCPU capacity than your current vCPU limit allows")
        return None

    def _boot(self, row: Row, form: Mapping[str, str]) -> None:
        """Do what cloud-init does with the user data: let the key in, write the file, run it."""
        if self._bin is None:
            return
        self.drive(row.id, "pending")  # without an address, until the machine behind it answers
        row.data["booting"] = True
        self.instance(row.id).nics[0].public_ip = None
        config = json.loads(base64.b64decode(form["UserData"]).decode().removeprefix("#cloud-config\n"))
        (script,) = [each["content"] for each in config["write_files"] if each["path"] == BOOT_FILE]
        shape = self._shapes[form["InstanceType"]]
        name, mib = CARDS.get(shape.gpu, (f"NVIDIA {shape.gpu}", int(shape.vram_gb * 1024)))
        environment = {
            "PATH": f"{self._bin}:{_path()}",
            "CARDS": f"{name}, {mib}, 570.86.15\n" * shape.gpu_count,
            "EC2_HYPERVISOR": f"{self.url}/hypervisor/off/{row.id}",
        }
        self.back(
            row, public_key=config["ssh_authorized_keys"][0], boot_script=script, environment=environment
        )

    def _on_DescribeInstances(self, request: Request, form: Mapping[str, str], region: str) -> Reply:
        shown = {row.id for row in self.listed()}
        for row in self.live():
            self._address(row)
        reply = self._forward(request)
        hidden = {row.id for row in self.book.values() if row.ended_at is None and row.id not in shown}
        if not hidden or reply.status != 200:
            return reply
        ElementTree.register_namespace("", _EC2)
        tree = ElementTree.fromstring(str(reply.body))
        listing = tree.find(f"{{{_EC2}}}reservationSet")
        assert listing is not None
        for item in list(listing):
            if item.findtext(f".//{{{_EC2}}}instanceId") in hidden:
                listing.remove(item)
        return Reply(200, ElementTree.tostring(tree, "unicode"), reply.headers)

    def _address(self, row: Row) -> None:
        """Give an instance the address of the real box behind it, once that answers."""
        endpoint = self.endpoint(row) if self._bin else None
        if endpoint is None:
            return
        with self.lock:
            if row.id not in self._forwarders:
                self._forwarders[row.id] = Forwarder(endpoint, self.ssh_port)
            if row.data.pop("booting", False):
                self.drive(row.id, "running")
        self.instance(row.id).nics[0].public_ip = endpoint.host

    def _on_TerminateInstances(self, request: Request, form: Mapping[str, str], region: str) -> Reply:
        named = [value for key, value in form.items() if key.startswith("InstanceId.")]
        for box_id in named:
            row = self.book.get(box_id)
            if row is not None and self.polls - row.born_at_poll < self.list_lag_polls:
                return refusal("InvalidInstanceID.NotFound", f"The instance ID '{box_id}' does not exist")
        ended = {box_id: self.instance(box_id)._reason for box_id in named if self._has_ended(box_id)}
        reply = self._forward(request)
        with _moto_lock:
            for box_id, reason in ended.items():  # moto writes the time anew, AWS keeps that of the first end
                self.instance(box_id)._reason = reason
        if reply.status == 200:
            for box_id in named:
                already = self.book[box_id].ended_at is not None
                self.end(self.book[box_id])
                if already:  # moto says shutting-down for ever
                    reply = Reply(200, str(reply.body).replace("shutting-down", "terminated"), reply.headers)
        return reply

    def _has_ended(self, box_id: str) -> bool:
        row = self.book.get(box_id)
        return row is not None and row.ended_at is not None

    def _power_off(self, box_id: str) -> Reply:
        """The machine has halted itself: what becomes of it was settled when it was made."""
        row = self.book[box_id]
        if row.data["form"].get("InstanceInitiatedShutdownBehavior") != "terminate":
            self.drive(box_id, "stopped")
            return Reply(200, {})
        with _moto_lock:
            self.instance(box_id).terminate()
        self.end(row)
        return Reply(200, {})

    def _on_CreatePlacementGroup(self, request: Request, form: Mapping[str, str], region: str) -> Reply:
        with self.lock:
            if form["GroupName"] in self.placement_groups:
                return refusal("InvalidPlacementGroup.Duplicate", "The placement group already exists")
            self.placement_groups.add(form["GroupName"])
        return _xml("CreatePlacementGroup", "<return>true</return>")

    def _on_DeletePlacementGroup(self, request: Request, form: Mapping[str, str], region: str) -> Reply:
        name = form["GroupName"]
        with self.lock:
            if name not in self.placement_groups:
                return refusal("InvalidPlacementGroup.Unknown", "The placement group is unknown")
            if any(row.data["form"].get("Placement.GroupName") == name for row in self.live()):
                return refusal("InvalidPlacementGroup.InUse", "The placement group is in use")
            self.placement_groups.remove(name)
        return _xml("DeletePlacementGroup", "<return>true</return>")

    def _on_DescribeSpotPriceHistory(self, request: Request, form: Mapping[str, str], region: str) -> Reply:
        items = ""
        for key, kind in form.items():
            if key.startswith("InstanceType."):
                usd = self.spot_usd.get(kind, round((self._shapes[kind].usd_per_hour or 60.0) / 3, 4))
                items += "".join(
                    f"<item><instanceType>{kind}</instanceType><productDescription>Linux/UNIX</productDescription>"
                    f"<spotPrice>{usd:.6f}</spotPrice><timestamp>2026-11-30T12:00:00.000Z</timestamp>"
                    f"<availabilityZone>{region}{letter}</availabilityZone></item>"
                    for letter in "abcdf"
                )
        return _xml(
            "DescribeSpotPriceHistory", f"<spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken/>"
        )

    # What moto has not got

    def _on_GetParameter(self, request: Request, form: Mapping[str, str], region: str) -> Reply:
        if request.body["Name"] != IMAGE_PARAMETER or region in self.imageless:
            return Reply(400, {"__type": "ParameterNotFound", "message": ""})
        return Reply(
            200, {"Parameter": {"Name": IMAGE_PARAMETER, "Type": "String", "Value": self.image(region)}}
        )

    def _on_DescribeImages(self, request: Request, form: Mapping[str, str], region: str) -> Reply:
        if region not in self.imageless:
            self.image(region)
        return self._forward(request)

    def image(self, region: str) -> str:
        """Return the Deep Learning image of a region, put there when it is first asked for."""
        from moto.backends import get_backend

        with self.lock, _moto_lock:
            if region not in self._images:
                backend = get_backend("ec2")[_ACCOUNT][region]
                image = backend.register_image(name=IMAGE_NAME, description="")
                image.owner_id, image.owner_alias, image.architecture = "898082745236", "amazon", "x86_64"
                image.root_device_name = "/dev/sda1"
                self._images[region] = image.id
            return self._images[region]

    def _quota(self, region: str, code: str) -> float:
        return self.quotas.get((region, code), self.default_quota)

    def _on_GetServiceQuota(self, request: Request, form: Mapping[str, str], region: str) -> Reply:
        code = request.body["QuotaCode"]
        quota = {
            "ServiceCode": "ec2",
            "QuotaCode": code,
            "Value": self._quota(region, code),
            "Adjustable": True,
        }
        return Reply(200, {"Quota": quota})

    def _on_GetProducts(self, request: Request, form: Mapping[str, str], region: str) -> Reply:
        asked = {each["Field"]: each["Value"] for each in request.body["Filters"]}
        if asked.get("productFamily") == "Storage":
            prices = dict.fromkeys(self.regions, GP3_USD_PER_GB_MONTH)
        else:
            prices = self._prices(self._shapes[asked["instanceType"]])
        products = [json.dumps(_product(region, usd)) for region, usd in prices.items()]
        return Reply(200, {"FormatVersion": "aws_v1", "PriceList": products})

    def _prices(self, shape: Shape) -> dict[str, float]:
        if shape.type in self.on_demand_usd:
            return self.on_demand_usd[shape.type]
        return dict.fromkeys(self.regions, shape.usd_per_hour) if shape.usd_per_hour else {}


def _product(region: str, usd: float) -> dict[str, Any]:
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": f"{usd:.10f}"}}
    return {
        "product": {
            "sku": "INVENTED",
            "attributes": {"regionCode": region, "locationType": "AWS Region", "marketoption": "OnDemand"},
        },
        "serviceCode": "AmazonEC2",
        "terms": {"OnDemand": {"INVENTED.T": {"priceDimensions": {"INVENTED.T.D": dimension}}}},
    }


def _form(request: Request) -> dict[str, str]:
    if not isinstance(request.body, str):
        return {}
    return {name: values[0] for name, values in parse_qs(request.body, keep_blank_values=True).items()}


def _tag(form: Mapping[str, str], name: str) -> str:
    keys = [key for key, value in form.items() if key.startswith("TagSpecification.1.Tag.") and value == name]
    return form[keys[0].replace(".Key", ".Value")] if keys else ""


def _xml(operation: str, inner: str) -> Reply:
    body = f'<{operation}Response xmlns="{_EC2}"><requestId>1</requestId>{inner}</{operation}Response>'
    return Reply(200, body, {"Content-Type": "text/xml"})


def _signed(region: str) -> dict[str, str]:
    scope = f"AWS4-HMAC-SHA256 Credential={KEY_ID}/20261201/{region}/ec2/aws4_request"
    return {"authorization": scope, "content-type": "application/x-www-form-urlencoded"}


def _path() -> str:
    return f"{os.path.dirname(sys.executable)}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _moto(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
    """Ask moto's server, which is an application of this very process."""
    global _application
    from werkzeug.test import Client

    with _moto_lock:
        if _application is None:
            # The thousand images that moto would make for each region cost a second of every test.
            os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
            from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

            _application = DomainDispatcherApplication(create_backend_app)
        response = Client(_application).open(path, method=method, headers=dict(headers), data=body)
        return Reply(
            response.status_code,
            response.get_data(as_text=True),
            {"Content-Type": response.content_type or ""},
        )
