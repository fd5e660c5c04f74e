"""Credentials of the clouds as Prefect blocks: one class a cloud.

Each hands out two things: `get_client()` the vendor's own SDK client, `cloud()` the adapter of gpu-flows.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

from prefect.blocks.abstract import CredentialsBlock
from pydantic import Field, SecretStr

from gpu_flows.errors import MissingExtra

if TYPE_CHECKING:
    from gpu_flows.clouds.base import Cloud

DOCUMENTATION = "https://github.com/gpu-flows/gpu-flows/tree/main/docs/prefect.md"


class CloudCredentials(CredentialsBlock):
    """What the credentials of every cloud have in common; not a block to be saved."""

    _documentation_url: ClassVar[Any] = DOCUMENTATION
    cloud_name: ClassVar[str]
    """The cloud, as gpu-flows names it."""

    @property
    def account(self) -> str:
        """The account: the name that the block was saved under, else ``default``."""
        return self._block_document_name or "default"

    @property
    def ref(self) -> str:
        """The account as gpu-flows writes it: ``runpod@prod`` for a block saved as ``prod``."""
        return self.cloud_name if self.account == "default" else f"{self.cloud_name}@{self.account}"

    def options(self) -> dict[str, Any]:
        """Return what the cloud's adapter is opened with: plain values, and secrets in the clear.

        They go through a pipe to the watchdog beside a run, and nowhere else.
        """
        fields = {name: getattr(self, name) for name in self._adapter_fields()}
        plain = {
            name: value.get_secret_value() if isinstance(value, SecretStr) else value
            for name, value in fields.items()
        }
        return {name: value for name, value in plain.items() if value not in (None, "", [], {})}

    def cloud(self) -> Cloud:
        """Return the account as gpu-flows drives it; nothing has been asked of the cloud yet."""
        from gpu_flows.clouds import open_cloud

        return open_cloud(self.ref, **self.options())

    def _adapter_fields(self) -> list[str]:
        # "block_type_slug" is Prefect's own.
        return [name for name in type(self).model_fields if name != "block_type_slug"]


class RunPodCredentials(CloudCredentials):
    """An account of RunPod, to rent pods with GPUs.

    Example:
        ```python
        from prefect_blocks import RunPodCredentials

        credentials = RunPodCredentials.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "gpu-flows RunPod credentials"
    _block_type_slug = "gpu-flows-runpod"
    cloud_name: ClassVar[str] = "runpod"

    api_key: SecretStr = Field(title="API key", description="An API key of the account that may make pods.")
    base_url: str | None = Field(
        default=None, title="Base URL", description="Another address of the API than RunPod's own."
    )

    def get_client(self) -> Any:
        """Return the ``runpod`` package; it knows one account at a time, and from now on this one."""
        client = _module("runpod", "runpod")
        client.api_key = self.api_key.get_secret_value()
        return client


class VastAiCredentials(CloudCredentials):
    """An account of Vast.ai, to rent machines of its market.

    Example:
        ```python
        from prefect_blocks import VastAiCredentials

        credentials = VastAiCredentials.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "gpu-flows Vast.ai credentials"
    _block_type_slug = "gpu-flows-vastai"
    cloud_name: ClassVar[str] = "vastai"

    api_key: SecretStr = Field(title="API key", description="An API key of the account.")
    base_url: str | None = Field(
        default=None, title="Base URL", description="Another address of the API than Vast.ai's own."
    )

    def get_client(self) -> Any:
        """Return a ``vastai.VastAI``."""
        address = {"server_url": self.base_url} if self.base_url else {}
        return _module("vastai", "vastai").VastAI(api_key=self.api_key.get_secret_value(), **address)


class DigitalOceanCredentials(CloudCredentials):
    """An account of DigitalOcean, to rent GPU droplets.

    Example:
        ```python
        from prefect_blocks import DigitalOceanCredentials

        credentials = DigitalOceanCredentials.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "gpu-flows DigitalOcean credentials"
    _block_type_slug = "gpu-flows-digitalocean"
    cloud_name: ClassVar[str] = "digitalocean"

    token: SecretStr = Field(title="Token", description="A personal access token that may make droplets.")
    token_on_box: SecretStr | None = Field(
        default=None,
        title="Token on the box",
        description="A token that every droplet gets, so that it can end its own billing.",
    )
    base_url: str | None = Field(
        default=None, title="Base URL", description="Another address of the API than DigitalOcean's own."
    )

    def get_client(self) -> Any:
        """Return a ``pydo.Client``."""
        address = {"endpoint": self.base_url} if self.base_url else {}
        return _module("pydo", "digitalocean").Client(token=self.token.get_secret_value(), **address)


class HotAisleCredentials(CloudCredentials):
    """A team of Hot Aisle, to rent virtual machines with AMD cards.

    Example:
        ```python
        from prefect_blocks import HotAisleCredentials

        credentials = HotAisleCredentials.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "gpu-flows Hot Aisle credentials"
    _block_type_slug = "gpu-flows-hotaisle"
    cloud_name: ClassVar[str] = "hotaisle"

    api_key: SecretStr = Field(title="API key", description="An API token with access to the team.")
    team: str | None = Field(
        default=None, title="Team", description="The team; needed only where the token sees several."
    )
    base_url: str | None = Field(
        default=None, title="Base URL", description="Another address of the API than Hot Aisle's own."
    )

    def get_client(self) -> Any:
        """Return an ``httpx.Client`` that is logged in: Hot Aisle has no SDK for Python."""
        import httpx

        from gpu_flows.clouds.hotaisle.cloud import API

        return httpx.Client(
            base_url=self.base_url or API,
            headers={"Authorization": f"Token {self.api_key.get_secret_value()}"},
        )


class AwsCredentials(CloudCredentials):
    """An account of AWS, to rent EC2 instances. A block of prefect-aws does as well.

    Without a key and a profile, boto3 finds the credentials of the machine.

    Example:
        ```python
        from prefect_blocks import AwsCredentials

        credentials = AwsCredentials.load("BLOCK_NAME")
        ```
    """

    # prefect-aws has an "AWS Credentials" of its own; the two must not overwrite each other on a server.
    _block_type_name = "gpu-flows AWS credentials"
    _block_type_slug = "gpu-flows-aws"
    cloud_name: ClassVar[str] = "aws"

    access_key_id: SecretStr | None = Field(
        default=None, title="Access key ID", description="The ID of an access key."
    )
    secret_access_key: SecretStr | None = Field(
        default=None, title="Secret access key", description="The secret of that access key."
    )
    session_token: SecretStr | None = Field(
        default=None, title="Session token", description="The token of temporary credentials."
    )
    profile: str | None = Field(
        default=None, title="Profile", description="A profile of the configuration files of AWS."
    )
    regions: list[str] = Field(
        default_factory=list, title="Regions", description="Regions to rent in; the account's own if empty."
    )
    subnet_ids: list[str] = Field(
        default_factory=list, title="Subnets", description="Subnets to rent in; the default ones if empty."
    )
    security_group_ids: list[str] = Field(
        default_factory=list,
        title="Security groups",
        description="Security groups that let SSH through; one is made if this is empty.",
    )
    base_url: str | None = Field(
        default=None, title="Base URL", description="Another address of the API than AWS's own."
    )

    def get_client(self, service: str = "ec2", region: str | None = None) -> Any:
        """Return a client of boto3.

        Args:
            service: As boto3 names it.
            region: The first of ``regions`` unless given.
        """
        options = self.options()
        session = _module("boto3", "aws").Session(
            aws_access_key_id=options.get("access_key_id"),
            aws_secret_access_key=options.get("secret_access_key"),
            aws_session_token=options.get("session_token"),
            profile_name=options.get("profile"),
            region_name=region or next(iter(self.regions), None),
        )
        return session.client(service, endpoint_url=self.base_url)

    @classmethod
    def from_prefect_aws(cls, block: Any) -> AwsCredentials:
        """Return ours for an ``AwsCredentials`` of prefect-aws, under the same name.

        Args:
            block: The block; only its fields are read, so prefect-aws need not be there.
        """
        region = getattr(block, "region_name", None)
        # Theirs keeps the key's ID in the clear.
        found = {
            "access_key_id": block.aws_access_key_id,
            "secret_access_key": block.aws_secret_access_key,
            "session_token": getattr(block, "aws_session_token", None),
            "profile": getattr(block, "profile_name", None),
            "regions": [region] if region else [],
        }
        endpoint = getattr(getattr(block, "aws_client_parameters", None), "endpoint_url", None)
        ours = cls(**{name: value for name, value in found.items() if value}, base_url=endpoint)
        ours._block_document_name = getattr(block, "_block_document_name", None)
        return ours


CREDENTIALS: dict[str, type[CloudCredentials]] = {
    each.cloud_name: each
    for each in (
        RunPodCredentials,
        VastAiCredentials,
        DigitalOceanCredentials,
        HotAisleCredentials,
        AwsCredentials,
    )
}
"""The block of each cloud that needs credentials, by the cloud's name."""


def _module(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(name, extra) from error


__all__ = (
    "CREDENTIALS",
    "AwsCredentials",
    "CloudCredentials",
    "DigitalOceanCredentials",
    "HotAisleCredentials",
    "RunPodCredentials",
    "VastAiCredentials",
)
