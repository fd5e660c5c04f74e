from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpu_flows.clouds import ALIASES, CLOUDS, PLANNED, CloudRef, open_cloud
from gpu_flows.clouds.local import LocalCloud
from gpu_flows.errors import BadRequest


def test_a_reference_names_a_cloud_and_perhaps_an_account() -> None:
    assert CloudRef.parse("local") == CloudRef("local", "default")
    assert CloudRef.parse(" Local ") == CloudRef("local")
    assert CloudRef.parse("local@Team.A-1") == CloudRef("local", "Team.A-1")
    assert [str(CloudRef.parse(text)) for text in ("local", "local@b", "LOCAL@default")] == [
        "local", "local@b", "local",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("locl", "did you mean local?"),
        ("lokal", "did you mean local?"),
        ("run-pod", "did you mean runpod?"),
        ("vastia", "did you mean vastai?"),
        ("skynet", "the clouds are: local"),
        ("", "the clouds are: local"),
        ("local@", "no account after the @"),
        ("local@a b", "no account after the @"),
        ("@team", "there is no cloud"),
    ],
)
def test_what_is_no_reference_is_refused_with_a_suggestion(text: str, said: str) -> None:
    with pytest.raises(BadRequest) as error:
        CloudRef.parse(text)
    assert said in str(error.value)


@pytest.mark.parametrize("name", sorted({*PLANNED, *ALIASES} - set(CLOUDS)))
def test_a_cloud_that_is_not_there_yet_says_so(name: str) -> None:
    if ALIASES.get(name, name) in CLOUDS:
        pytest.skip("it is there by now")
    with pytest.raises(BadRequest, match=r"gpu-flows \S+ does not rent from \w+ yet"):
        open_cloud(name)


def test_a_cloud_is_opened_by_its_reference(tmp_path: Path) -> None:
    cloud = open_cloud("local@team_a", root=str(tmp_path / "local"))
    assert isinstance(cloud, LocalCloud)
    assert (cloud.name, cloud.account) == ("local", "team_a")


def test_every_adapter_that_is_listed_exists() -> None:
    for name in CLOUDS:
        assert CloudRef.parse(name).cloud == name


def test_the_list_of_clouds_and_the_first_process_of_a_box_load_nothing_heavy() -> None:
    text = (
        "import sys, gpu_flows.clouds, gpu_flows.clouds.local.server, gpu_flows.clouds.local.registry;"
        "print(sorted({'boto3', 'runpod', 'vastai', 'pydo', 'asyncssh', 'torch', 'airflow', 'prefect',"
        " 'pydantic', 'rich', 'httpx'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", text], capture_output=True, check=True, text=True)
    assert output.stdout == "[]\n"
