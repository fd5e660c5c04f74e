"""U-cases of bad input: one clear message that says what to do, exit code 2 (3 for the cap), nothing rented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.acme import Market
from tests.cli.conftest import Cli

SCRIPT = "train.py"

BAD = {
    "a GPU that is none": (["run", SCRIPT, "--gpus", "H10"], "no GPU is called 'H10'", "did you mean H100"),
    "a letter for a digit": (["run", SCRIPT, "--gpus", "A10O"], "'A10O'", "did you mean"),
    "a malformed count": (["run", SCRIPT, "--gpus", "H100:many"], "the count 'many'", ""),
    "two counts": (["resolve", "H100:8:8"], "more than one count", "NAME:COUNT"),
    "an empty alternative": (["resolve", "H100:8,,A100"], "the name of the GPU is missing", ""),
    "a memory that the card has not": (["resolve", "A100-60GB"], "has 40 GB or 80 GB", ""),
    "no GPU": (["run", SCRIPT], "no GPU was asked for", "--gpus"),
    "nothing to run": (["run", "--gpus", "cpu"], "nothing to run", "train.py"),
    "a missing file": (["run", "trian.py", "--gpus", "cpu"], "trian.py is not there", ""),
    "a missing module": (["run", "-m", "nope", "--gpus", "cpu"], "there is no module nope", "code"),
    "a file and a module": (["run", SCRIPT, "-m", "nope", "--gpus", "cpu"], "not both", ""),
    "a missing folder": (["run", SCRIPT, "--gpus", "cpu", "--code", "nope"], "nope is not there", ""),
    "a missing secret": (
        ["run", SCRIPT, "--gpus", "cpu", "--secret", "HF_TOKEN"],
        "HF_TOKEN",
        "set the environment",
    ),
    "a secret instead of its name": (
        ["run", SCRIPT, "--gpus", "cpu", "--secret", "hf_abcdefghijkl"],
        "looks like a secret itself",
        "",
    ),
    "a variable that is not there": (
        ["run", SCRIPT, "--gpus", "cpu", "--env", "NOPE"],
        "--env NOPE",
        "NOPE=VALUE",
    ),
    "a variable that cannot be": (["run", SCRIPT, "--gpus", "cpu", "--env", "1A=x"], "env.1A", ""),
    "an unknown cloud": (
        ["run", SCRIPT, "--gpus", "H100", "--clouds", "runpdo"],
        "no cloud 'runpdo'",
        "runpod",
    ),
    "no cloud at all": (["run", SCRIPT, "--gpus", "H100"], "no cloud is named", "config.toml"),
    "an account without a name": (
        ["resolve", "cpu", "--clouds", "local@"],
        "names no account",
        "cloud@account",
    ),
    "two ways to name clouds": (
        ["resolve", "cpu", "--clouds", "local", "--provider", "local"],
        "not both",
        "",
    ),
    "a time that is none": (["run", SCRIPT, "--gpus", "cpu", "--max-duration", "5x"], "max_duration", ""),
    "an unknown strategy": (["resolve", "cpu", "--strategy", "lucky"], "strategy", "ordered, cheapest"),
    "an unknown wish for spot": (["resolve", "cpu", "--spot", "often"], "spot", "never, prefer, only"),
    "an unknown launcher": (["run", SCRIPT, "--gpus", "cpu", "--launcher", "slurm"], "launcher", ""),
    "an unknown format": (["ps", "--format", "yaml"], "'yaml'", "table, plain, json"),
    "a negative price": (["resolve", "cpu", "--price-cap", "-1"], "price_cap", ""),
    "a price in words": (["resolve", "cpu", "--price-cap", "cheap"], "--price-cap", ""),
    "no nodes": (["run", SCRIPT, "--gpus", "cpu", "--nodes", "0"], "nodes", ""),
    "images without clouds": (
        ["run", SCRIPT, "--gpus", "cpu", "--image", "a", "--image", "b"],
        "--image a",
        "CLOUD=IMAGE",
    ),
    "a missing file of settings": (["run", SCRIPT, "--config", "nope.toml"], "nope.toml", ""),
    "no owner": (["teardown"], "whose boxes?", "--owner"),
    "an owner that is half JSON": (["teardown", "--owner", '["a"'], "no JSON list", ""),
    "an owner without boxes": (["attach", "--owner", "nobody"], "holds no boxes", ""),
    "logs of nobody": (["logs", "--owner", "nobody"], "nobody holds no boxes", "ps"),
    "a shell at nobody's": (["ssh", "--owner", "nobody"], "holds no boxes", ""),
    "a launch on nothing": (["launch", SCRIPT, "--owner", "nobody"], "holds no boxes", ""),
    "an endless document": (["logs", "--owner", "x", "-f", "--format", "json"], "no JSON document", "plain"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_message(case: str, cli: Cli, home: Path) -> None:
    words, message, hint = BAD[case]
    Path(SCRIPT).write_text("print('never run')\n")
    said = cli(*words)
    assert said.code == 2, said.err
    assert message in said.err
    assert hint in said.err
    assert "Traceback" not in said.err
    if not said.err.startswith("Usage:"):
        assert said.err.startswith("error: ")
        assert len(said.err.splitlines()) <= 2, said.err
    assert not list((home / "state").glob("local/boxes/*"))
    assert not list((home / "state").glob("journal/*/*")), "something was reserved"


def test_a_planned_cloud_is_told_from_an_unknown_one(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_flows.clouds.PLANNED", ("someday",))
    said = cli("resolve", "H100", "--clouds", "someday")
    assert said.code == 2
    assert "does not rent from someday yet" in said.err
    assert "local" in said.err


def test_an_error_is_a_document_too(cli: Cli) -> None:
    said = cli("resolve", "H10", "--format", "json")
    assert said.code == 2
    assert said.json["ok"] is False
    assert said.json["error"]["code"] == "BAD_REQUEST"
    assert "H100" in said.json["error"]["hint"]


def test_debug_shows_the_traceback(cli: Cli) -> None:
    assert "Traceback" in cli("resolve", "H10", "--debug").err


def test_a_fault_of_our_own_is_called_that(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("gpu_flows.gpus.catalog.list_gpus", broken)
    said = cli("gpus")
    assert said.code == 1
    assert "gpu-flows itself failed: ZeroDivisionError" in said.err
    assert "Traceback" not in said.err


def test_a_price_cap_that_nothing_meets_names_the_cheapest(cli: Cli, market: Market) -> None:
    market.sells(31.5, 24.25, 29.0)
    Path(SCRIPT).touch()
    for verb in (
        ["resolve", "H100:8"],
        ["run", SCRIPT, "--gpus", "H100:8"],
        ["provision", "--gpus", "H100:8"],
    ):
        said = cli(*verb, "--clouds", "acme", "--price-cap", "20")
        assert said.code == 3, said.err
        assert "24.25" in said.out + said.err
        assert "over the price cap of 20" in said.out + said.err
    assert market.cloud.calls["create"] == 0


def test_no_capacity_is_exit_code_3_with_every_attempt(cli: Cli, market: Market) -> None:
    market.sells(20.0, 21.0)
    market.cloud.faults.create.extend(["no_capacity", "no_capacity"])
    said = cli("provision", "--gpus", "H100:8", "--clouds", "acme")
    assert said.code == 3
    assert said.err.count("is sold out") >= 2


def test_a_missing_extra_names_the_pip_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_flows.clouds import CLOUDS

    monkeypatch.setitem(CLOUDS, "acme", "tests.cli.test_bad_input:needs_more")
    said = cli("resolve", "H100", "--clouds", "acme")
    assert said.code == 2
    assert "acme-sdk is not installed" in said.err
    assert "pip install 'gpu-flows[acme]'" in said.err


def needs_more(**_: object) -> None:
    from gpu_flows.errors import MissingExtra

    raise MissingExtra("acme-sdk", "acme")


def test_settings_that_cannot_be_understood_are_named(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = home / "config" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("cluods = ['local']\n")
    said = cli("ps")
    assert said.code == 2
    assert "config.toml: 'cluods' is no setting" in said.err
    config.write_text("")
    monkeypatch.setenv("GPU_FLOWS_NAMESPACE", "Not Allowed")
    assert "namespace" in cli("ps").err


def test_a_namespace_is_made_for_the_user(cli: Cli, home: Path) -> None:
    assert cli("ps").code == 0
    made = (home / "config" / "namespace").read_text().strip()
    assert made.isalnum()
    assert cli("ps").code == 0
    assert (home / "config" / "namespace").read_text().strip() == made


FILES = {
    "no TOML": ("not toml", "not valid TOML"),
    "an unknown field": ("[training]\nentrypiont = 'train.py'", "did you mean entrypoint?"),
    "an unknown parameter": ("[rental]\nprice_kap = 3", "did you mean price_cap?"),
    "a stray name": ("nodes = 2\n[training]\nentrypoint = 'train.py'", "'nodes' stands outside"),
    "no table": ("training = 3", "training has to be a table"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_named_with_what_is_wrong(case: str, cli: Cli) -> None:
    text, message = FILES[case]
    Path("job.toml").write_text(text)
    Path(SCRIPT).touch()
    said = cli("run", "--config", "job.toml", "--gpus", "cpu", "--dry-run")
    assert said.code == 2
    assert "job.toml" in said.err
    assert message in said.err


def test_no_message_holds_a_secret(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(SCRIPT).touch()
    said = cli("run", SCRIPT, "--gpus", "cpu", "--env", "API_KEY=verysecretvalue", "--nodes", "0", "--debug")
    assert said.code == 2
    assert "verysecretvalue" not in said.err + said.out
    assert json.dumps("verysecretvalue") not in said.out
