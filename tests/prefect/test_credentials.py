"""Credentials as blocks: what the standard suite asks of them, what they hand out, and that they keep secrets."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.testing.standard_test_suites import BlockStandardTestSuite
from pydantic import SecretStr

from gpu_flows.errors import MissingExtra
from prefect_blocks import (
    AwsCredentials,
    DigitalOceanCredentials,
    HotAisleCredentials,
    RunPodCredentials,
    VastAiCredentials,
)
from prefect_blocks.credentials import CREDENTIALS, CloudCredentials

SECRET = "secret-0123456789"

BLOCKS: list[CloudCredentials] = [
    RunPodCredentials(api_key=SECRET),
    VastAiCredentials(api_key=SECRET),
    DigitalOceanCredentials(token=SECRET, token_on_box=SECRET),
    HotAisleCredentials(api_key=SECRET, team="acme"),
    AwsCredentials(access_key_id=SECRET, secret_access_key=SECRET, regions=["us-east-1"]),
]
EACH = pytest.mark.parametrize("credentials", BLOCKS, ids=lambda each: each.cloud_name)

# A block that is stored on a server is read by its checksum: a change here means that users have to register again,
# so it goes with a default for whatever is new.
CHECKSUMS = {
    "runpod": "ff99f37c7a113c9fb50cc8233b47fdf9dadb0c4ad61d93b0f2558bc1e09ed91e",
    "vastai": "f9f4bc998c7e80410ad9ffe2afb3f6770b1c348adde4dc6c667f1f8e216a6a5d",
    "digitalocean": "77897de75d152415a3b35f1df0278fd3d7332c4263fb7b2adb748936ea4fdecb",
    "hotaisle": "77749a8503f75320b0e4cc018bcb9563c6c23821a567afaa37e5626fde6c1eb2",
    "aws": "5e67ee9d4e772a3e304102b4cc95a3d2af1be60a1e868b60e1ea8fb8e558e358",
}


@pytest.mark.parametrize("block", CREDENTIALS.values(), ids=CREDENTIALS)
class TestStandard(BlockStandardTestSuite):
    test_has_a_valid_image = None  # asks the internet for a logo

    @pytest.fixture
    def block(self, request: pytest.FixtureRequest) -> type[CloudCredentials]:
        return request.param


def test_schemas_do_not_change_unnoticed() -> None:
    found = {name: block._calculate_schema_checksum() for name, block in CREDENTIALS.items()}
    assert found == {name: f"sha256:{checksum}" for name, checksum in CHECKSUMS.items()}


@EACH
def test_it_opens_the_cloud_of_its_name(credentials: CloudCredentials) -> None:
    cloud = credentials.cloud()
    assert (cloud.name, cloud.account) == (credentials.cloud_name, "default")
    assert SECRET.encode() in cloud.identity_secrets()


@EACH
def test_no_secret_is_shown(credentials: CloudCredentials) -> None:
    assert SECRET not in repr(credentials) + str(credentials) + json.dumps(
        credentials.model_dump(mode="json")
    )


@EACH
def test_every_field_of_a_secret_is_one(credentials: CloudCredentials) -> None:
    for name in type(credentials).model_fields:
        if any(word in name for word in ("key", "token", "secret")):
            assert isinstance(getattr(credentials, name), SecretStr | None), name


def test_the_clients_are_the_vendors() -> None:
    kinds = {
        each.cloud_name: f"{type(c := each.get_client()).__module__}.{type(c).__name__}" for each in BLOCKS
    }
    assert kinds == {
        "runpod": "builtins.module",
        "vastai": "vastai.sdk.VastAI",
        "digitalocean": "pydo._patch.Client",
        "hotaisle": "httpx.Client",
        "aws": "botocore.client.EC2",
    }
    assert BLOCKS[0].get_client().api_key == SECRET
    assert BLOCKS[3].get_client().headers["Authorization"] == f"Token {SECRET}"


def test_a_missing_sdk_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vastai", None)
    with pytest.raises(MissingExtra, match=r"gpu-flows\[vastai\]"):
        BLOCKS[1].get_client()


def test_a_block_of_prefect_aws_does_as_well() -> None:
    theirs = SimpleNamespace(
        _block_document_name="prod",
        aws_access_key_id="AKIA1",
        aws_secret_access_key=SecretStr(SECRET),
        aws_session_token=None,
        profile_name=None,
        region_name="eu-west-1",
        aws_client_parameters=SimpleNamespace(endpoint_url=None),
    )
    ours = AwsCredentials.from_prefect_aws(theirs)
    assert ours.ref == "aws@prod"
    assert ours.options() == {
        "access_key_id": "AKIA1",
        "secret_access_key": SECRET,
        "regions": ["eu-west-1"],
    }


def test_a_saved_block_is_loaded_with_its_account(prefect_server: Path) -> None:
    from prefect.client.orchestration import get_client

    BLOCKS[0].model_copy().save("prod", overwrite=True, _sync=True)
    loaded: Any = RunPodCredentials.load("prod", _sync=True)
    assert loaded.ref == "runpod@prod"
    assert loaded.options() == {"api_key": SECRET}
    with get_client(sync_client=True) as client:
        (document,) = client._client.post("/block_documents/filter", json={}).json()
    assert SECRET not in json.dumps(document)


def test_the_collection_is_found_by_prefect() -> None:
    from importlib.metadata import entry_points

    (found,) = [each for each in entry_points(group="prefect.collections") if each.name == "gpu_flows"]
    assert found.load().RunPodCredentials is RunPodCredentials
