"""Which image a box boots: AWS's own with drivers, found anew in each region, or one that the user names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu_flows.clock import Clock
from gpu_flows.clouds.aws.api import AwsApi
from gpu_flows.clouds.aws.memo import Memo
from gpu_flows.clouds.aws.verdicts import code_of
from gpu_flows.clouds.errors import AuthenticationFailed, CloudError, NotOffered, Scope, UnexpectedAnswer

DEFAULT_PARAMETER = (
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
)
"""Drivers and no torch: it changes least, and torch is installed to match the driver."""
DEFAULT_NAME = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) *"
"""The same image by its name, where the parameter cannot be read."""
_LIFETIME_S = 3600.0


@dataclass(frozen=True, slots=True)
class Image:
    """An image in one region.

    Attributes:
        id: ``ami-...``.
        root_device: Name of the device that it boots from.
        size_gb: The least disk that holds it.
    """

    id: str
    root_device: str
    size_gb: int


class Images:
    """Finds images, each once an hour.

    Args:
        api: The account.
        clock: Time.
    """

    def __init__(self, api: AwsApi, clock: Clock) -> None:
        self._api = api
        self._found = Memo[Image](_LIFETIME_S, clock)

    def of(self, region: str, wanted: str | None) -> Image:
        """Return the image of a region.

        Args:
            region: Where.
            wanted: ``ami-...``, the path of an SSM parameter, or a name in which ``*`` stands for anything, of
                Amazon's or the account's own images; None for the default.

        Raises:
            NotOffered: When the region has no such image; another one may.
            CloudError: When it cannot be found out.
        """
        return self._found.get((region, wanted), lambda: self._find(region, wanted))

    def _find(self, region: str, wanted: str | None) -> Image:
        if wanted is None:
            image_id = self._by_parameter(region, DEFAULT_PARAMETER)
            named = DEFAULT_NAME if image_id is None else None
        elif wanted.startswith("/"):
            image_id, named = self._by_parameter(region, wanted), None
        elif wanted.startswith("ami-"):
            image_id, named = wanted, None
        else:
            image_id, named = None, wanted
        if image_id is None and named is None:
            raise _none(region, wanted)
        found = self._described(region, image_id, named)
        usable = [each for each in found if each.get("State") == "available"]
        if not usable:
            raise _none(region, wanted)
        newest = max(usable, key=lambda each: str(each.get("CreationDate", "")))
        return _image(newest)

    def _by_parameter(self, region: str, path: str) -> str | None:
        """Return the image that an SSM parameter names; None where there is none, or it may not be read."""
        try:
            answer = self._api.read("ssm", region, "get_parameter", Name=path)
        except AuthenticationFailed:
            return None
        except CloudError as error:
            if code_of(error).startswith("ParameterNotFound"):
                return None
            raise
        value = answer.get("Parameter", {}).get("Value")
        if not isinstance(value, str) or not value.startswith("ami-"):
            raise UnexpectedAnswer(f"aws names no image in {path} of {region}: {value!r}")
        return value

    def _described(self, region: str, image_id: str | None, name: str | None) -> list[dict[str, Any]]:
        if image_id is not None:
            which: dict[str, Any] = {"Filters": [{"Name": "image-id", "Values": [image_id]}]}
        else:
            filters = [{"Name": "name", "Values": [name]}, {"Name": "architecture", "Values": ["x86_64"]}]
            which = {"Owners": ["amazon", "self"], "Filters": filters}
        return list(self._api.pages("ec2", region, "describe_images", "Images", **which))


def _none(region: str, wanted: str | None) -> NotOffered:
    what = f"the image {wanted!r}" if wanted else "a Deep Learning AMI"
    return NotOffered(f"aws has not got {what} in {region}", scope=Scope.REGION)


def _image(data: dict[str, Any]) -> Image:
    root = data.get("RootDeviceName") or "/dev/sda1"
    mapped = data.get("BlockDeviceMappings") or []
    sizes = [each.get("Ebs", {}).get("VolumeSize", 0) for each in mapped if each.get("DeviceName") == root]
    return Image(str(data["ImageId"]), root, max(sizes, default=0) or 0)
