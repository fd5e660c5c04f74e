"""The surface itself: verbs, flags, help, completion, and what it costs to show them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gpu_flows.cli.app import ALIASES, VERBS
from gpu_flows.cli.flags import CONFIG, FOLLOWING, MAX_COST, OWNER, RENTING, TRAINING
from tests.cli.conftest import Cli

_ROOT = Path(__file__).parents[2]


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(_ROOT), **environment},
        timeout=60,
    )


def test_every_verb_has_help(cli: Cli) -> None:
    listed = cli("--help")
    assert listed.code == 0
    for verb, (_, summary) in VERBS.items():
        assert f"  {verb}" in listed.out
        assert summary[:30] in listed.out
        said = cli(verb, "--help")
        assert said.code == 0
        assert said.out.startswith(f"Usage: gpu-flows {verb} ")
        assert "--format" in said.out
        assert "<str>" not in said.out.replace("REQUEST <list[str]>", "").replace("ENTRYPOINT <str>", "")


@pytest.mark.parametrize(("alias", "verb"), ALIASES.items())
def test_another_name_for_a_verb_is_that_verb(cli: Cli, alias: str, verb: str) -> None:
    assert cli(alias, "--help").out.split("\n")[2:] == cli(verb, "--help").out.split("\n")[2:]


def test_a_misspelt_verb_and_flag_are_corrected(cli: Cli) -> None:
    said = cli("resove")
    assert said.code == 2
    assert "resolve" in said.err
    said = cli("run", "train.py", "--gpu", "cpu")
    assert said.code == 2
    assert "--gpus" in said.err
    said = cli("run", "train.py", "--epochs", "3")
    assert said.code == 2
    assert "behind --" in said.err


def test_the_version_is_told(cli: Cli) -> None:
    version = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert cli("--version").out == f"gpu-flows {version}\n"


def test_parameters_have_the_names_that_they_have_in_python() -> None:
    from gpu_flows.runs.rental import rental
    from gpu_flows.runs.run import Following
    from gpu_flows.training.spec import TrainingSpec

    renting = {flag.name for flag in (*RENTING, MAX_COST)}
    assert renting == set(rental.__kwdefaults__ or {}) - {"settings"} | {"gpus"}
    training = {flag.name for flag in TRAINING} - {"module", CONFIG.name}
    # What is behind -- are the args; the shared ones are flags of renting.
    assert training == set(TrainingSpec.model_fields) - {"args", "nodes", "image", "max_duration"}
    assert {flag.name for flag in FOLLOWING} <= set(Following.__dataclass_fields__)
    assert OWNER.spelled == ("--owner", "--name")
    for flag in (*RENTING, MAX_COST, *TRAINING, *FOLLOWING):
        dashed = f"--{flag.name.replace('_', '-')}"
        assert flag.positional or flag.spelled in ((), ("--module", "-m"), (dashed.removesuffix("s"),)), flag


def test_showing_help_and_importing_loads_nothing_heavy() -> None:
    heavy = "asyncssh torch boto3 httpx cryptography airflow prefect gpu_flows.runs gpu_flows.remote"
    code = f"""
import sys
import gpu_flows.cli
first = sorted(set({heavy!r}.split() + ["pydantic", "rich", "typer"]) & set(sys.modules))
try:
    gpu_flows.cli.main(["--help"])
except SystemExit:
    pass
second = sorted(set({heavy!r}.split() + ["rich"]) & set(sys.modules))
print(first, second, file=sys.stderr)
"""
    assert _python(code).stderr == "[] []\n"


def test_completion_knows_verbs_flags_and_values() -> None:
    def complete(line: str) -> list[str]:
        words = line.split(" ")
        done = _python(
            "from gpu_flows.cli import main; main([])",
            _GPU_FLOWS_COMPLETE="complete_bash",
            COMP_WORDS=line,
            COMP_CWORD=str(len(words) - 1),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert {"resolve", "reap", "run"} == set(complete("gpu-flows r"))
    assert "--price-cap" in complete("gpu-flows run --price")
    assert complete("gpu-flows run --spot o") == ["only"]
    assert complete("gpu-flows resolve --gpus RTX5") == ["RTX5090"]
    assert complete("gpu-flows ps --format j") == ["json"]


def test_completion_can_be_installed(cli: Cli) -> None:
    said = cli("--help")
    assert "--install-completion" in said.out
