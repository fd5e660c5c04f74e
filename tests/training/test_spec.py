from __future__ import annotations

import shlex
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_flows.errors import BadRequest
from gpu_flows.training.spec import Kind, Launcher, MissingSecrets, TrainingSpec


def test_a_spec_is_the_same_in_python_toml_and_json(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        """
        [training]
        entrypoint = "train.py"
        args = ["--epochs", 3, "--lr", 0.1]
        secrets = ["HF_TOKEN"]
        nodes = 2
        setup = "pip install -r requirements.txt"
        outputs = ["runs/**", "~/ckpt/*"]
        max_duration = "6h"
        image = { aws = "ami-1" }
        code = "project"
        [training.env]
        EPOCHS = 3
        [other]
        gpus = "H100:8"
        """
    )
    spec = TrainingSpec.from_toml(tmp_path / "run.toml")
    assert spec == TrainingSpec(
        entrypoint="train.py",
        args=("--epochs", "3", "--lr", "0.1"),
        env={"EPOCHS": "3"},
        secrets={"HF_TOKEN": "HF_TOKEN"},
        nodes=2,
        setup=["pip install -r requirements.txt"],
        outputs=["runs/**", "~/ckpt/*"],
        max_duration=timedelta(hours=6),
        image={"aws": "ami-1"},
        code=tmp_path / "project",
    )
    assert TrainingSpec(**spec.to_json()) == spec
    assert (spec.image_for("aws"), spec.image_for("runpod")) == ("ami-1", None)


@pytest.mark.parametrize(
    ("text", "code", "target"),
    [
        ('entrypoint = "jobs/train.py"', "jobs", "train.py"),
        ('entrypoint = "-m acme.train"', "", "acme.train"),
        ('entrypoint = "make"\nlauncher = "command"', "", "make"),
    ],
)
def test_paths_in_a_toml_file_stand_for_paths_beside_it(
    tmp_path: Path, text: str, code: str, target: str
) -> None:
    (tmp_path / "run.toml").write_text(text)
    spec = TrainingSpec.from_toml(tmp_path / "run.toml")
    assert (spec.code, spec.target) == (tmp_path / code, target)


@pytest.mark.parametrize(
    "text", ["entrypoint = ", b"\xff", "training = 3", "[training]\nnode = 2\nentrypoint='x.py'"]
)
def test_a_wrong_toml_file_is_named(tmp_path: Path, text: str | bytes) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadRequest, match=r"run\.toml"):
        TrainingSpec.from_toml(file)
    with pytest.raises(BadRequest, match=r"none\.toml cannot be read"):
        TrainingSpec.from_toml(tmp_path / "none.toml")


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_c45_a_list_of_arguments_is_left_as_it_is_and_a_string_is_split_once(args: list[str]) -> None:
    assert list(TrainingSpec(entrypoint="x.py", args=args).args) == args
    assert list(TrainingSpec(entrypoint="x.py", args=shlex.join(args)).args) == args


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90),
        (1.5, 1.5),
        ("90", 90),
        ("90s", 90),
        ("6h", 21600),
        ("1d2h30m", 95400),
        ("1 h 1 m", 3660),
        ("PT6H", 21600),
        (timedelta(days=2), 172800),
    ],
)
def test_a_duration_is_seconds_words_or_iso_8601(value: object, seconds: float) -> None:
    assert TrainingSpec(entrypoint="x.py", max_duration=value).max_duration.total_seconds() == seconds


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "entrypoint: is missing"),
        ({"entrypoint": ""}, "entrypoint: is empty"),
        ({"entrypoint": " "}, "entrypoint: is empty"),
        ({"entrypoint": "a\0b.py"}, "entrypoint: contains a NUL byte"),
        ({"entrypoint": "python train.py"}, "entrypoint: names the script alone"),
        ({"entrypoint": "train.py --lr 1"}, "entrypoint: names the script alone"),
        ({"entrypoint": "-m a.b --lr 1"}, "arguments go into args"),
        (
            {"entrypoint": "../x.py", "code": "."},
            "entrypoint: ../x.py has to be relative to code and inside of it",
        ),
        ({"entrypoint": "/x.py", "code": "."}, "entrypoint: /x.py has to be relative"),
        ({"entrypoint": "my train.sh"}, "launcher='command', entrypoint=\"bash 'my train.sh'\""),
        ({"node": 2}, "node: there is no such field; did you mean nodes?"),
        ({"gpus": "H100"}, "gpus: there is no such field"),
        ({"nodes": 0}, "nodes: has to be at least 1"),
        ({"nodes": 100}, "nodes: has to be at most 99"),
        ({"nodes": 1.5}, "nodes: has to be a whole number"),
        ({"nproc_per_node": 0}, "nproc_per_node: has to be at least 1"),
        ({"launcher": "slurm"}, "launcher: has to be 'torchrun', 'python' or 'command'"),
        ({"launcher": "python", "nodes": 2}, "nodes: launcher 'python' is one process on one box"),
        ({"launcher": "python", "nproc_per_node": 2}, "nproc_per_node: launcher 'python' is one process"),
        ({"args": "--name 'x"}, "args: cannot be split into words"),
        ({"args": ["a\0"]}, "args.0: contains a NUL byte"),
        ({"args": [True]}, "args.0: has to be text"),
        ({"args": ["漢" * 44_000]}, "args.0: is too long"),
        ({"env": {"A B": "x"}}, "env.A B: is not the name of an environment variable"),
        ({"env": {"GPU_FLOWS_X": "x"}}, "env.GPU_FLOWS_X: begins with GPU_FLOWS_"),
        ({"env": {"UID": "x"}}, "env.UID: is read-only in bash"),
        ({"env": {"A": "x"}, "secrets": ["A"]}, "secrets: A is in env as well"),
        ({"max_duration": 0}, "max_duration: has to be a time above zero"),
        ({"max_duration": "soon"}, "max_duration: has to be a time above zero"),
        ({"max_duration": "1.2.3h"}, "max_duration: has to be a time above zero"),
        ({"outputs_to": "s3://bucket/x"}, "outputs_to: has to be a folder of this machine"),
        ({"image": {"aws": ""}}, "image.aws: is empty"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence_that_names_the_field(
    fields: dict[str, object], words: str
) -> None:
    complete = fields if not fields else {"entrypoint": "train.py", **fields}
    with pytest.raises(BadRequest) as caught:
        TrainingSpec(**complete)
    assert caught.value.message.startswith("the training spec is wrong: ")
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.code == "BAD_REQUEST"


@pytest.mark.parametrize(
    ("entrypoint", "launcher", "kind", "target"),
    [
        ("train.py", None, Kind.FILE, "train.py"),
        ("jobs/train.py", None, Kind.FILE, "train.py"),
        ("my train.py", None, Kind.FILE, "my train.py"),
        ("-m acme.train", None, Kind.MODULE, "acme.train"),
        ("train.sh", None, Kind.SHELL_FILE, "train.sh"),
        ("train.sh", "torchrun", Kind.SHELL_FILE, "train.sh"),
        ("train.sh", "command", Kind.SHELL_FILE, "train.sh"),
        ("bash train.sh", "command", Kind.SHELL_LINE, "bash train.sh"),
        ("make | tee x.sh", "command", Kind.SHELL_LINE, "make | tee x.sh"),
    ],
)
def test_what_an_entrypoint_names(entrypoint: str, launcher: str | None, kind: Kind, target: str) -> None:
    spec = TrainingSpec(entrypoint=entrypoint, **({"launcher": launcher} if launcher else {}))
    assert (spec.kind, spec.target) == (kind, target)
    default = Launcher.COMMAND if entrypoint.endswith(".sh") else Launcher.TORCHRUN
    assert spec.launcher == (launcher or default)


def test_processes_are_one_per_gpu_or_the_n_of_cpu_n() -> None:
    spec = TrainingSpec(entrypoint="x.py")
    assert [spec.processes(gpus=8), spec.processes(gpus=0, cpus=2), spec.processes(gpus=0)] == [8, 2, 1]
    assert TrainingSpec(entrypoint="x.py", nproc_per_node=4).processes(gpus=8) == 4
    assert TrainingSpec(entrypoint="x.py", launcher="python").processes(gpus=8) == 1


def test_secrets_are_looked_up_late_and_missing_ones_named_together() -> None:
    spec = TrainingSpec(
        entrypoint="x.py", secrets={"HF_TOKEN": "MY_HF", "WANDB_API_KEY": "WANDB_API_KEY", "C": "C"}
    )
    with pytest.raises(MissingSecrets, match="secrets HF_TOKEN, C") as caught:
        spec.resolve_secrets({"WANDB_API_KEY": "w", "C": ""}.get)
    assert caught.value.names == ("HF_TOKEN", "C")
    assert spec.resolve_secrets({"WANDB_API_KEY": "w", "C": "c", "MY_HF": "h"}.get) == {
        "HF_TOKEN": "h",
        "WANDB_API_KEY": "w",
        "C": "c",
    }


def test_c51_no_secret_is_in_what_is_shown() -> None:
    env = {"HF_TOKEN": "hf_inventedA1", "MY_DB_URI": "pg://u:pw9@h/x", "EPOCHS": "3"}
    spec = TrainingSpec(entrypoint="x.py", env=env)
    for shown in (repr(spec), str(spec), str(spec.redacted())):
        assert "inventedA1" not in shown
        assert "pw9" not in shown
    assert spec.redacted()["env"] == {"HF_TOKEN": "***", "MY_DB_URI": "***", "EPOCHS": "3"}
    assert set(spec.sensitive_values()) == {"hf_inventedA1", "pg://u:pw9@h/x"}
    for wrong in ({"env": {"HF_TOKEN": ["hf_inventedA1"]}}, {"secrets": ["hf_inventedA1"]}):
        with pytest.raises(BadRequest) as caught:
            TrainingSpec(entrypoint="x.py", **wrong)
        assert "inventedA1" not in str(caught.value)
    with pytest.raises(MissingSecrets) as missing:
        TrainingSpec(entrypoint="x.py", secrets={"TOKEN": "the secret itself"}).resolve_secrets({}.get)
    assert "itself" not in str(missing.value)
