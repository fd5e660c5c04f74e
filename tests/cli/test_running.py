"""``run``, ``launch``, ``attach``, ``logs`` and ``ssh`` against boxes of this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

LINES = "for i in 1 2 3; do echo line $i; done; echo out > out.txt"
HOLD = "echo begun; until [ -e go ]; do sleep 0.05; done; echo gone on; echo out > out.txt"
COMMAND = ("--launcher", "command", "--gpus", "cpu", "--max-duration", "10m")


@pytest.fixture(autouse=True)
def code() -> None:
    """Give each job a folder of its own to upload."""
    Path("code").mkdir()
    Path("code/data.txt").write_text("1 2 3\n")


def test_run_from_request_to_report(cli: Cli) -> None:
    said = cli("run", LINES, *COMMAND, "--code", "code", "--output", "out.txt", "--output", "nope-*")
    assert said.code == 0, said.err + said.out
    assert said.out.startswith("succeeded")
    assert "1 ended and proven gone" in said.out
    assert "nope-*: matches nothing" in said.out
    for text in ("rented local box", "is ready", "rank 0     line 3", "is gone"):
        assert text in said.err
    assert "\x1b" not in said.out + said.err


def test_the_report_is_one_document(cli: Cli) -> None:
    said = cli(
        "run",
        LINES,
        *COMMAND,
        "--code",
        "code",
        "--output",
        "out.txt",
        "--outputs-to",
        "here",
        "--format=json",
    )
    assert said.code == 0, said.err
    report = said.json
    assert report["ok"] is True
    assert report["cause"] == "succeeded"
    assert [Path(path).read_text() for path in report["outputs"]] == ["out\n"]
    assert Path("here/out.txt").exists()
    assert len(report["ended"]) == 1
    assert report["left"] == []


def test_a_training_that_failed_is_exit_code_1_with_its_cause(cli: Cli) -> None:
    said = cli("run", "echo begun; exit 7", *COMMAND, "--code", "code", "--format", "json")
    assert said.code == 1
    assert said.json["ok"] is False
    assert said.json["exit_code"] == 7
    assert "7" in said.json["sentence"]
    assert said.json["left"] == []


def test_arguments_behind_the_dashes_arrive_byte_for_byte(cli: Cli) -> None:
    Path("args.sh").write_text('printf "[%s]" "$@"; echo\n')
    words = ["--epochs", "3", "a  b", "", "$HOME", "*", "--", "ü'\"", "-h", "--format=yaml"]
    said = cli("run", "args.sh", "--gpus", "cpu", "--max-duration", "10m", "--", *words)
    assert said.code == 0, said.err
    assert "".join(f"[{word}]" for word in words) in said.err


def test_environment_and_secrets_reach_the_job_and_no_log(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cr3t-value")
    monkeypatch.setenv("PASSED", "passed on")
    line = 'echo "$A|$PASSED|${#TOKEN}|$TOKEN"'
    said = cli(
        "run",
        line,
        *COMMAND,
        "--code",
        "code",
        "--env",
        "A=1=2",
        "--env",
        "PASSED",
        "--secret",
        "TOKEN=MY_TOKEN",
    )
    assert said.code == 0, said.err
    assert "1=2|passed on|12|***" in said.err
    for path in home.rglob("*"):
        if path.is_file():
            assert b"s3cr3t-value" not in path.read_bytes(), path


def test_a_file_says_what_to_run_and_flags_win(cli: Cli) -> None:
    folder = Path("project")
    folder.mkdir()
    (folder / "job.sh").write_text('echo "$A $B $C $*"\n')
    (folder / "job.toml").write_text(
        """
[training]
entrypoint = "job.sh"
args = ["from the file", 3]
env = { A = "file", B = "file" }
max_duration = "10m"

[rental]
gpus = ["cpu:1"]
nodes = 1
"""
    )
    said = cli("run", "--config", "project/job.toml", "--env", "B=flag", "--env", "C=flag")
    assert said.code == 0, said.err
    assert "file flag flag from the file 3" in said.err
    plan = cli(
        "run", "--config", "project/job.toml", "--nodes", "2", "--dry-run", "--format=json", "--", "x"
    ).json
    assert len(plan["create"]) == 2
    assert plan["commands"][0].endswith("job.sh x")


def test_a_dry_run_shows_everything_and_rents_nothing(cli: Cli, home: Path) -> None:
    Path("train.py").touch()
    said = cli(
        "run",
        "train.py",
        "--gpus",
        "cpu:1",
        "--nodes",
        "2",
        "--dry-run",
        "--format",
        "json",
        "--",
        "--lr",
        "1",
    )
    assert said.code == 0
    assert [offer["cloud"] for offer in said.json["resolution"]["offers"]] == ["local"]
    assert len(said.json["create"]) == 2
    assert said.json["create"][0]["name"].startswith("gf1-")
    assert said.json["create"][0]["ssh_public_key"].startswith("ssh-ed25519 ")
    assert "--nproc-per-node=1" in said.json["commands"][1]
    assert said.json["commands"][1].endswith("train.py --lr 1")
    shown = cli("run", "train.py", "--gpus", "cpu:1", "--dry-run").out
    assert "nothing was rented" in shown
    assert not list((home / "state").glob("local/boxes/*"))
    assert not list((home / "state").glob("journal/*/*"))


def test_the_steps_of_separate_calls_on_one_owner(cli: Cli, home: Path) -> None:
    assert cli("provision", *COMMAND[2:], "--nodes", "2", "--owner", "steps").code == 0
    early = cli("logs", "--owner", "steps")
    assert early.code == 2
    assert "no job was started" in early.err

    launch = ("launch", HOLD, *COMMAND[:2], "--max-duration", "5m", "--code", "code", "--output", "out.txt")
    started = cli(*launch, "--owner", "steps", "--detach", "--format", "json")
    assert started.code == 0, started.err
    assert started.json["cause"] == "running"
    assert "gpu-flows attach --owner steps" in started.err

    said = cli("ssh", "--owner", "steps", "--node", "1", "--", "cat gpu-flows/*/data.txt; exit 3")
    assert said.code == 3
    said = cli("logs", "--owner", "steps", "--rank", "0")
    assert said.out in ("begun\n", "")
    for number in ("0", "1"):
        assert (
            cli(
                "ssh",
                "--owner",
                "steps",
                "--node",
                number,
                "--",
                "sh",
                "-c",
                'for d in gpu-flows/*/; do touch "$d/go"; done',
            ).code
            == 0
        )

    followed = cli("attach", "--owner", "steps", "--outputs-to", "brought", "--format", "json")
    assert followed.code == 0, followed.err
    assert followed.json["cause"] == "succeeded"
    assert Path("brought/out.txt").read_text() == "out\n"
    assert "rank 0     gone on" in followed.err
    assert len(followed.json["nodes"]) == 2

    live = cli("logs", "--owner", "steps", "--rank", "1")
    assert live.out == "begun\ngone on\n"
    lines = cli("logs", "--owner", "steps", "-f").out
    assert "rank 0     gone on\n" in lines
    assert cli("logs", "--owner", "steps", "--rank", "2").code == 2
    assert cli("teardown", "--owner", "steps").code == 0

    copy = cli("logs", "--owner", "steps", "--rank", "1")
    assert copy.out == live.out
    document = cli("logs", "--owner", "steps", "--format", "json").json
    assert document["logs"]["rank 0"] == "begun\ngone on\n"
    assert cli("logs", "--owner", "steps", "--rank", "9").code == 2


def test_a_detached_run_is_taken_up_and_given_back(cli: Cli) -> None:
    said = cli("run", "echo begun; echo done", *COMMAND, "--code", "code", "--owner", "away", "--detach")
    assert said.code == 0, said.err
    assert said.out.startswith("running")
    again = cli("attach", "--owner", "away", "--teardown", "--format", "json")
    assert again.code == 0, again.err
    assert again.json["cause"] == "succeeded"
    assert len(again.json["ended"]) == 1
    assert cli("ps", "--format", "json").json["boxes"] == []


def test_a_detached_run_that_cannot_start_leaves_no_boxes(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_flows.remote.errors import SshUnreachable

    async def lost(*_: object, **__: object) -> None:
        raise SshUnreachable("the box went away")

    monkeypatch.setattr("gpu_flows.remote.jobs.start_job", lost)
    said = cli("run", "echo", *COMMAND, "--code", "code", "--detach", "--format", "json")
    assert said.code == 1
    assert len(said.json["ended"]) == 1


def test_secrets_go_only_to_boxes_whose_host_keys_are_known(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_flows.clouds.local.cloud import LocalCloud

    assert cli("provision", *COMMAND[2:], "--owner", "unpinned").code == 0
    [handle] = (home / "state" / "runs").glob("*/lease.json")
    handle.unlink()
    describe = LocalCloud.describe

    def without_key(self: LocalCloud, box: object) -> object:
        from dataclasses import replace

        found = describe(self, box)  # type: ignore[arg-type]
        return replace(found, endpoint=replace(found.endpoint, host_key=None)) if found.endpoint else found

    monkeypatch.setattr(LocalCloud, "describe", without_key)
    monkeypatch.setenv("TOKEN", "s3cr3t-value")
    launch = ("launch", "echo", *COMMAND[:2], "--max-duration", "5m", "--code", "code", "--owner", "unpinned")
    said = cli(*launch, "--secret", "TOKEN")
    assert said.code == 2
    assert "nobody here knows the host key" in said.err
    assert cli(*launch).code == 0
    assert cli("teardown", "--owner", "unpinned").code == 0


def test_a_changed_host_key_is_an_error(cli: Cli, home: Path) -> None:
    assert cli("provision", *COMMAND[2:], "--owner", "changed").code == 0
    [handle] = (home / "state" / "runs").glob("*/lease.json")
    data = json.loads(handle.read_text())
    endpoint = data["lease"]["boxes"][0]["box"]["endpoint"]
    endpoint["host_key"] = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIMjxmOFVCXXvrHNjEdBPyXxBrPAHZdEBVhbXuDqXXXXX"
    handle.write_text(json.dumps(data))
    said = cli("ssh", "--owner", "changed", "--", "true")
    assert said.code != 0
    assert "host key" in said.err
    assert cli("teardown", "--owner", "changed").code == 0


def test_without_a_client_ssh_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    said = cli("ssh", "--owner", "x")
    assert said.code == 2
    assert "no ssh client" in said.err
