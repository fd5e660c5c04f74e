"""Accounts, keys and settings of an installation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpu_flows import Installation, SettingsError
from gpu_flows.clouds.local import LocalCloud
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.leases.lease import Owner
from gpu_flows.offers import Offer, OfferQuery, match
from gpu_flows.runs.rental import rental
from gpu_flows.runs.steps import held, provision_box
from gpu_flows.settings import load_settings
from tests.end_to_end.conftest import Machine, machine

__all__ = ["machine"]


def settings_file(machine: Machine, text: str) -> None:
    folder = Path(machine.environment["GPU_FLOWS_CONFIG_HOME"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(text)


def test_a_cloud_is_opened_with_what_the_settings_say_of_its_account(machine: Machine) -> None:
    settings_file(
        machine, '[accounts.local]\nusd_per_hour = 1.5\n\n[accounts."local@dear"]\nusd_per_hour = 9.0\n'
    )
    query = OfferQuery(request=GpuRequest.parse("cpu"))
    here = Installation()
    assert here.cloud("local").offers(query)[0].usd_per_hour == 1.5
    assert here.cloud("local@dear").offers(query)[0].usd_per_hour == 9.0
    assert here.options("local@dear") == {"ref": "local@dear", "usd_per_hour": 9.0}, "for the watchdog"
    told = Installation(cloud_options={"local": {"usd_per_hour": 3.0}})
    assert told.cloud("local").offers(query)[0].usd_per_hour == 3.0


def test_options_that_are_looked_up_are_asked_for_when_an_account_is_opened(machine: Machine) -> None:
    class LookedUp(Mapping[str, Mapping[str, Any]]):
        """As the connections of an orchestrator are: empty until it is asked."""

        def __getitem__(self, ref: str) -> Mapping[str, Any]:
            return {"usd_per_hour": 4.0} if ref == "local@looked_up" else {}

        def __iter__(self) -> Iterator[str]:
            return iter(())

        def __len__(self) -> int:
            return 0

    here = Installation(cloud_options=LookedUp())
    query = OfferQuery(request=GpuRequest.parse("cpu"))
    assert here.cloud("local@looked_up").offers(query)[0].usd_per_hour == 4.0
    assert here.options("local@looked_up") == {"ref": "local@looked_up", "usd_per_hour": 4.0}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("accounts = 3\n", "table of tables"),
        ("nonsense = 1\n", "no setting"),
        ('namespace = "Team A"\n', "namespace"),
        ("max_gpus = 'many'\n", "max_gpus"),
        ("[", "cannot be read"),
    ],
)
def test_wrong_settings_are_named(machine: Machine, text: str, part: str) -> None:
    settings_file(machine, text)
    with pytest.raises(SettingsError, match=part):
        load_settings()


def test_account_options_are_not_shown(machine: Machine) -> None:
    settings_file(machine, '[accounts.runpod]\napi_key = "rpa_planted"\n')
    assert "rpa_planted" not in repr(load_settings())


def test_temporary_credentials_need_a_configured_key(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_flows.remote.keys import load_or_create_identity

    monkeypatch.setattr(LocalCloud, "identity_secrets", lambda self: ())
    here = Installation()
    with pytest.raises(SettingsError, match="GPU_FLOWS_SSH_KEY"):
        here.identity(here.cloud("local"), "a")
    made = load_or_create_identity(tmp_path / "key")
    monkeypatch.setenv("GPU_FLOWS_SSH_KEY", str(tmp_path / "key"))
    here = Installation()
    assert here.identity(here.cloud("local"), "a").public_key == made.public_key


def test_a_box_that_was_made_under_the_previous_secret_still_opens(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Installation() as before:
        wanted = rental("cpu", settings=before.settings)
        with held(Owner(("cli", "rotated")), wanted, installation=before) as (lease, _):
            provision_box(lease, wanted, installation=before)
            first = before.identity(before.cloud("local"), lease.namespace)
            (old,) = before.cloud("local").identity_secrets()
            monkeypatch.setattr(LocalCloud, "identity_secrets", lambda self: (b"a new secret", old))
            with Installation() as after:
                assert after.identity(after.cloud("local"), lease.namespace) != first
                filled, _ = provision_box(lease, wanted, installation=after)
                assert len(filled.boxes) == 1
                assert len(machine.boxes()) == 1, "the box was found and opened, not replaced"


@pytest.mark.parametrize(
    ("asked", "region", "fits"),
    [
        ("us-west", "us-west-2", True),
        ("eu", "eu-west-1", True),
        ("US-West-2 ", "us-west-2", True),
        ("us-west-22", "us-west-2", False),
        ("us-w", "us-west-2", False),
        ("us-west-2", "us-west-22", False),
    ],
)
def test_c25_a_part_of_the_world_stands_for_its_regions(asked: str, region: str, fits: bool) -> None:
    offer = Offer(
        cloud="aws", region=region, instance_type="p5", gpu="H100-SXM", gpu_count=8, usd_per_hour=1.0
    )
    (judged,) = match([offer], OfferQuery(request=GpuRequest.parse("H100:8"), regions=[asked]))
    assert (judged.unavailable is None) is fits


def test_first_calls_at_once_agree_on_one_namespace(machine: Machine) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from gpu_flows.settings import ensure_namespace

    with ThreadPoolExecutor(16) as pool:
        namespaces = set(pool.map(lambda _: ensure_namespace(), range(64)))
    assert len(namespaces) == 1
    (left,) = Path(machine.environment["GPU_FLOWS_CONFIG_HOME"]).iterdir()
    assert left.name == "namespace"
