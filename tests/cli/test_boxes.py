"""``provision``, ``teardown``, ``ps`` and ``reap``."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from gpu_flows.clouds.base import BoxState
from gpu_flows.settings import ensure_namespace
from tests.cli.acme import Market
from tests.cli.conftest import Cli


def test_boxes_from_provision_to_teardown(cli: Cli) -> None:
    said = cli("provision", "--gpus", "cpu", "--nodes", "2", "--owner", "pair", "--max-duration", "10m")
    assert said.code == 0, said.err
    assert "pair holds 2 boxes" in said.err
    rows = [line.split("\t") for line in said.out.splitlines()]
    assert [row[0] for row in rows] == ["node", "0", "1"]

    again = cli("provision", "--gpus", "cpu", "--nodes", "2", "--owner", "pair", "--format", "json")
    assert again.code == 0, again.err
    ids = {leased["box"]["id"] for leased in again.json["boxes"]}
    assert {f"local {each}" for each in ids} == {row[1] for row in rows[1:]}

    listed = cli("ps", "--format", "json").json
    assert {box["id"] for box in listed["boxes"]} == ids
    assert {(box["owner"][1], box["state"], box["standing"]) for box in listed["boxes"]} == {
        ("pair", "running", "held")
    }
    line = cli("ps").out.splitlines()[1].split("\t")
    assert line[0] == "pair"
    assert line[6].endswith("min")

    gone = cli("down", "--owner", "pair", "--format", "json")
    assert gone.code == 0
    assert {box["id"] for box in gone.json["ended"]} == ids
    assert gone.json["left"] == []
    assert cli("ps", "--format", "json").json["boxes"] == []
    nothing = cli("teardown", "--owner", "pair")
    assert nothing.code == 0
    assert "there was nothing to end" in nothing.err


def test_a_teardown_that_is_not_proven_is_exit_code_4(cli: Cli, market: Market) -> None:
    box = market.holds("stuck", ensure_namespace(), ends_in=timedelta(hours=2))
    market.cloud.faults.destroy.extend(["fails"] * 50)
    said = cli("teardown", "--owner", "stuck", "--clouds", "acme", "--timeout-s", "0", "--format", "json")
    assert said.code == 4
    assert said.json["ok"] is False
    assert box.id in said.json["left"][0]
    assert f"https://console.invalid/{box.id}" in said.json["left"][0]
    assert "not everything" in said.err
    assert "run the teardown again" in said.err


def test_ps_names_clouds_that_cannot_be_asked(cli: Cli, market: Market) -> None:
    market.cloud.faults.find.append("denied")
    said = cli("ps", "--format", "json")
    assert said.code == 4
    assert said.json["unknown"] == ["acme: 401"]
    market.cloud.faults.find.append("unexpected")
    assert "cannot be asked, so it may hold boxes: acme" in cli("ps").err


def test_others_are_shown_only_when_all_are_asked_for(cli: Cli, market: Market) -> None:
    namespace = ensure_namespace()
    market.holds("mine", namespace, ends_in=timedelta(hours=2))
    market.holds("theirs", "other", ends_in=timedelta(hours=2), foreign=True)
    market.cloud.add("gpu-flows-by-hand", foreign=True)
    market.cloud.add("somebody-else", foreign=True)
    shown = cli("ps", "--format", "json").json
    assert len(shown["boxes"]) == 1
    assert shown["usd_per_hour"] == 20.0
    assert shown["boxes"][0]["usd_so_far"] > 0
    every = cli("ps", "--all", "--format", "json").json["boxes"]
    assert sorted(box["standing"] for box in every) == ["held", "look-alike", "other"]


def test_reap_only_shows_unless_told_to_end(cli: Cli, market: Market) -> None:
    namespace = ensure_namespace()
    held = market.holds("young", namespace, ends_in=timedelta(hours=2))
    late = market.holds("late", namespace, ends_in=timedelta(hours=-1))
    market.holds("theirs", "other", ends_in=timedelta(hours=-1), foreign=True)

    shown = cli("reap", "--format", "json")
    assert shown.code == 0
    assert shown.json["dry_run"] is True
    assert [box["id"] for box in shown.json["due"]] == [late.id]
    assert market.cloud.calls["destroy"] == 0
    said = cli("reap")
    assert "reap --yes" in said.err
    assert "running, expired" in said.out
    assert "over" in said.out.splitlines()[1].split("\t")

    done = cli("reap", "--yes", "--format", "json")
    assert done.code == 0
    assert [box["id"] for box in done.json["ended"]] == [late.id]
    assert [record.box.id for record in market.cloud.live()] == [held.id]
    assert "nothing to reap" in cli("reap", "--yes").err


def test_a_box_that_cannot_be_reaped_is_exit_code_4(
    cli: Cli, market: Market, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_flows.leases.reaper as reaper

    market.holds("late", ensure_namespace(), ends_in=timedelta(hours=-1), state=BoxState.STOPPED)
    market.cloud.faults.destroy.extend(["fails"] * 1000)
    end = reaper.reap
    monkeypatch.setattr(reaper, "reap", lambda *args, **more: end(*args, **{**more, "timeout_s": 0}))
    said = cli("reap", "--yes", "--format", "json")
    assert said.code == 4
    assert said.json["ok"] is False
    assert said.json["ended"] == []
    assert len(market.cloud.live()) == 1


def test_clouds_that_this_machine_cannot_use_are_asked_only_where_somebody_says_so(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_flows.clouds import CLOUDS

    monkeypatch.setitem(CLOUDS, "acme", "tests.cli.test_bad_input:needs_more")
    assert "runpod" in CLOUDS
    assert cli("ps").code == 0
    # But the settings may say that boxes are rented there.
    monkeypatch.setenv("GPU_FLOWS_CLOUDS", "acme,local,runpod")
    said = cli("ps")
    assert said.code == 4
    assert "pip install 'gpu-flows[acme]'" in said.err
    assert "there are no credentials for runpod" in said.err
    assert cli("ps", "--clouds", "acme").code == 2


def test_a_provision_without_a_name_gets_one(cli: Cli) -> None:
    said = cli("provision", "--gpus", "cpu", "--format", "json", "--max-duration", "10m")
    assert said.code == 0, said.err
    owner = said.json["owner"]
    assert owner[0] == "cli"
    assert owner[1].startswith("box-")
    assert cli("teardown", "--owner", owner[1]).code == 0


def test_the_pinned_host_keys_are_kept_without_secrets(cli: Cli, home: Path) -> None:
    assert cli("provision", "--gpus", "cpu", "--owner", "kept", "--max-duration", "10m").code == 0
    [handle] = (home / "state" / "runs").glob("*/lease.json")
    assert '"host_key": "ssh-ed25519 ' in handle.read_text()
    assert "PRIVATE KEY" not in handle.read_text()
    assert cli("teardown", "--owner", "kept").code == 0
