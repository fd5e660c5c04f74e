"""Opens an emulated account of AWS."""

from __future__ import annotations

from typing import Any

from gpu_flows.clouds import open_cloud
from gpu_flows.clouds.aws import AwsCloud
from tests.emulators.aws import KEY_ID, SECRET, AwsEmulator


def share_models(patch: Any) -> None:
    """Let every session of boto3 read the models of the services once: a second of processor time each."""
    from botocore import loaders

    shared = loaders.create_loader()
    patch.setattr(loaders, "create_loader", lambda *_, **__: shared)


def opened(emulator: AwsEmulator, **options: Any) -> AwsCloud:
    cloud = open_cloud(
        "aws",
        **{
            "access_key_id": KEY_ID,
            "secret_access_key": SECRET,
            "base_url": emulator.url,
            "ssh_port": emulator.ssh_port,
            **options,
        },
    )
    assert isinstance(cloud, AwsCloud)
    return cloud
