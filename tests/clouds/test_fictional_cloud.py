"""One file and one line of the registry add a cloud, and the suite of every cloud holds for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpu_flows.clouds import CLOUDS, open_cloud
from gpu_flows.clouds.base import Box, BoxState, Cloud
from gpu_flows.clouds.errors import AuthenticationFailed, UnexpectedAnswer
from tests.clouds.contract import CloudContract
from tests.clouds.fictional_cloud import Stratus, StratusCloud

KEY = "invented-key-of-stratus"


class TestStratusCloud(CloudContract):
    request_text = "H100:8"
    unknown_id = "m-999"
    secrets = (KEY,)

    @pytest.fixture
    def provider(self) -> Stratus:
        return Stratus(KEY)

    @pytest.fixture
    def cloud(self, provider: Stratus, monkeypatch: pytest.MonkeyPatch) -> Cloud:
        monkeypatch.setitem(CLOUDS, "stratus", "tests.clouds.fictional_cloud:StratusCloud")
        return open_cloud("stratus", provider=provider, api_key=KEY)

    def reopen(self, cloud: Cloud) -> Cloud:
        return open_cloud("stratus", provider=_provider(cloud), api_key=KEY)

    @contextmanager
    def broken_listing(self, cloud: Cloud) -> Iterator[None]:
        _provider(cloud).listing = {"success": False, "error": "deprecated_endpoint"}
        yield
        _provider(cloud).listing = None

    def foreign_box(self, cloud: Cloud, name: str) -> str | None:
        _, machine = _provider(cloud).call(KEY, "POST", "/machines", {"type": "h100x8", "label": name})
        return str(machine["id"])

    def foreign_box_lives(self, cloud: Cloud, box_id: str) -> bool:
        return bool(_provider(cloud).machines[box_id]["phase"] == "active")

    def drive(self, cloud: Cloud, box: Box, state: BoxState) -> bool:
        phases = {
            BoxState.STARTING: "queued",
            BoxState.RUNNING: "active",
            BoxState.STOPPED: "off",
            BoxState.FAILED: "broken",
            BoxState.ENDING: "deleting",
        }
        _provider(cloud).machines[box.id]["phase"] = phases[state]
        return True

    @pytest.mark.parametrize("listing", ["<html>login</html>", "", 7, [{"id": "m-1"}], [None]])
    def test_c05_every_odd_listing_is_unknown(self, cloud: Cloud, provider: Stratus, listing: object) -> None:
        provider.listing = listing
        with pytest.raises(UnexpectedAnswer):
            cloud.find("gf1-")

    def test_a_wrong_key_is_told_without_the_key(self, cloud: Cloud, provider: Stratus) -> None:
        wrong = open_cloud("stratus@team_a", provider=provider, api_key="another-invented-key")
        assert wrong.account == "team_a"
        with pytest.raises(AuthenticationFailed) as error:
            wrong.find("gf1-")
        assert "another-invented-key" not in f"{error.value} {error.value.answer}"


def _provider(cloud: Cloud) -> Stratus:
    assert isinstance(cloud, StratusCloud)
    return cloud._provider
