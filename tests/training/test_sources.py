from __future__ import annotations

from pathlib import Path

import pytest

from gpu_flows.errors import BadRequest
from gpu_flows.training.sources import check_sources
from gpu_flows.training.spec import TrainingSpec


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my proj"
    for name in (
        "train.py",
        "train.sh",
        "jobs/nightly.py",
        "acme/__init__.py",
        "acme/train.py",
        "src/pkg/train.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("set -e\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"entrypoint": "train.py"}, ""),
        ({"entrypoint": "jobs/nightly.py"}, "jobs"),
        ({"entrypoint": "jobs/nightly.py", "code": "."}, ""),
        ({"entrypoint": "train.py", "code": "train.py"}, "train.py"),
        ({"entrypoint": "-m acme.train"}, ""),
        ({"entrypoint": "-m acme"}, ""),
        ({"entrypoint": "-m pkg.train"}, ""),
        ({"entrypoint": "-m lightning.pytorch.cli"}, ""),
        ({"entrypoint": "make -j | tee log", "launcher": "command"}, ""),
        ({"entrypoint": "train.sh"}, ""),
    ],
)
def test_what_is_uploaded(project: Path, fields: dict[str, str], path: str) -> None:
    assert check_sources(TrainingSpec(**fields)).path == project / path


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"entrypoint": "tain.py"}, "entrypoint: tain.py is not there"),
        ({"entrypoint": "train.py", "code": "nowhere"}, "code: nowhere is not there"),
        ({"entrypoint": "jobs/nightly.py", "code": "jobs"}, "write nightly.py"),
        ({"entrypoint": "acme.train"}, "entrypoint='-m acme.train'"),
        ({"entrypoint": "-m acme.tain"}, "there is no module acme.tain"),
        ({"entrypoint": "-m acne.train"}, "did you mean acme.train?"),
        ({"entrypoint": "-m nothing"}, "there is no module nothing"),
        ({"entrypoint": "-m acme.train", "code": "nowhere"}, "code: nowhere is not there"),
        ({"entrypoint": "-m acme.train", "code": "/"}, "/ is too much to upload"),
    ],
)
def test_what_is_missing_is_found_before_anything_is_rented(
    project: Path, fields: dict[str, str], words: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        check_sources(TrainingSpec(**fields))
    assert words in str(caught.value)


def test_the_home_folder_is_not_uploaded(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project))
    with pytest.raises(BadRequest, match="too much to upload"):
        check_sources(TrainingSpec(entrypoint="train.py"))


@pytest.mark.parametrize(
    "fields", [{"entrypoint": "train.sh"}, {"entrypoint": "./train.sh | cat", "launcher": "command"}]
)
def test_u15_windows_line_ends_are_found_with_the_way_to_mend_them(
    project: Path, fields: dict[str, str]
) -> None:
    (project / "train.sh").write_bytes(b"#!/bin/bash\r\nset -e\r\n")
    with pytest.raises(BadRequest, match="Windows line ends") as caught:
        check_sources(TrainingSpec(**fields))
    assert "sed -i 's/\\r$//'" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("python train.py | tee log\n", True),
        ("set -o pipefail\npython train.py | tee log\n", False),
        ("# x | tee log\npython train.py\n", False),
    ],
)
def test_u15_a_pipe_that_hides_the_exit_code_is_pointed_out(project: Path, text: str, told: bool) -> None:
    (project / "train.sh").write_text(text)
    assert bool(check_sources(TrainingSpec(entrypoint="train.sh")).advice) is told
