"""What the DAG processor sees: cheap imports, and tasks that are wired, serialised and warned about."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

HEAVY = ("boto3", "runpod", "vastai", "pydo", "asyncssh", "torch", "prefect", "rich", "httpx", "fsspec")


def loaded_by(statement: str) -> set[str]:
    program = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_operators_loads_nothing_heavy() -> None:
    """Only what Airflow itself loads for a DAG may be there: every parse pays for it."""
    plain = loaded_by(
        "from airflow.sdk import DAG, BaseHook, BaseOperator, BaseOperatorLink, TaskGroup\n"
        "with DAG('d', schedule=None):\n    BaseOperator(task_id='t')\n"
    )
    ours = loaded_by(
        "from airflow.sdk import DAG\n"
        "import airflow_provider\n"
        "for name in airflow_provider.__all__: getattr(airflow_provider, name)\n"
        "with DAG('d', schedule=None):\n"
        "    airflow_provider.ResolveGpuOperator(task_id='t', gpus='cpu')\n"
    )
    assert (ours - plain) & set(HEAVY) == set()
    # Nor the engine itself: the catalog of GPUs alone costs 20 ms.
    assert {name for name in ours if name.startswith("gpu_flows.")} == set()


@pytest.fixture(scope="module")
def dags() -> Any:
    from tests.airflow.dags import steps

    return steps


def test_every_dag_is_serialised(dags: Any) -> None:
    from airflow.serialization.serialized_objects import DagSerialization

    for name in ("whole", "deferred", "sweep", "in_one"):
        data = DagSerialization.to_dict(getattr(dags, name))
        json.dumps(data)
        assert DagSerialization.from_dict(data).dag_id == name


def test_the_group_is_wired_as_its_promise_needs(dags: Any) -> None:
    dag = dags.whole
    reserve, provision, fit, teardown, gate = (
        dag.get_task(f"box.{name}") for name in ("reserve", "provision", "fit", "teardown", "gate")
    )
    assert reserve.is_setup
    assert provision.is_setup
    assert teardown.is_teardown
    assert not teardown.on_failure_fail_dagrun
    assert teardown.upstream_task_ids == {"box.reserve", "box.provision", "box.fit"}
    assert gate.upstream_task_ids == {"box.fit", "box.teardown"}
    assert fit.upstream_task_ids == {"box.provision"}
    assert provision.upstream_task_ids == {"box.reserve"}
    assert teardown.retries >= 5
    assert teardown.retry_exponential_backoff
    assert fit.box == {
        "name": "box",
        "mapped": False,
        "provision": "box.provision",
        "gpus": "cpu:2",
        "clouds": None,
        "max_duration": 300.0,
        "nodes": 1,
        "max_cost": None,
    }
    assert dags.sweep.get_task("cell.box.fit").box["mapped"]


def test_several_tasks_work_on_one_box() -> None:
    from airflow.sdk import DAG

    from airflow_provider import LaunchDDPOperator, gpu_box

    with DAG("several", schedule=None) as dag, gpu_box("box", gpus="cpu") as box:
        fit, check = (
            LaunchDDPOperator(task_id=name, box=box, entrypoint=f"{name}.py") for name in ("fit", "check")
        )
        fit >> check
        LaunchDDPOperator(task_id="beside", box=box, entrypoint="beside.py")
    assert dag.get_task("box.teardown").upstream_task_ids == {
        "box.reserve",
        "box.provision",
        "box.check",
        "box.beside",
    }
    assert dag.get_task("box.provision").downstream_task_ids == {"box.fit", "box.beside", "box.teardown"}


def test_an_empty_group_is_still_given_back() -> None:
    from airflow.sdk import DAG

    from airflow_provider import gpu_box

    with DAG("empty", schedule=None) as dag, gpu_box("box", gpus="cpu"):
        pass
    assert dag.get_task("box.gate").upstream_task_ids == {"box.provision", "box.teardown"}


def test_a_dagrun_timeout_is_warned_about() -> None:
    """Row A8: Airflow skips teardowns at the run's timeout."""
    from airflow.sdk import DAG

    from airflow_provider import gpu_box

    with (
        pytest.warns(UserWarning, match="dagrun_timeout"),
        DAG("late", schedule=None, dagrun_timeout=timedelta(hours=1)),
        gpu_box("box", gpus="cpu"),
    ):
        pass


def test_a_launch_can_be_mapped_on_one_box() -> None:
    from airflow.sdk import DAG
    from airflow.serialization.serialized_objects import DagSerialization

    from airflow_provider import LaunchDDPOperator, gpu_box

    with DAG("mapped", schedule=None) as dag, gpu_box("box", gpus="cpu") as box:
        LaunchDDPOperator.partial(task_id="fit", box=box, entrypoint="fit.py").expand(args=[["1"], ["2"]])
    json.dumps(DagSerialization.to_dict(dag))


@pytest.mark.parametrize(
    ("box", "map_index", "last"),
    [
        ({"name": "g", "mapped": False}, 3, ("g", "-1")),
        ({"name": "g", "mapped": True}, 3, ("g", "3")),
        ({"name": "g", "mapped": True}, -1, ("g", "-1")),
        ("mine", 3, ("mine", "-1")),
    ],
)
def test_every_task_of_a_run_means_the_same_box(box: Any, map_index: int, last: tuple[str, str]) -> None:
    from airflow_provider.boxes import owner_of

    context: Any = {"ti": SimpleNamespace(dag_id="d", run_id="r", map_index=map_index)}
    assert owner_of(box, context).parts == ("airflow", "d", "r", *last)


@pytest.mark.parametrize(
    ("owner", "state", "wanted"),
    [
        (("airflow", "d", "r", "g", "-1"), "running", True),
        (("airflow", "d", "r", "g", "-1"), "queued", True),
        (("airflow", "d", "r", "g", "-1"), "failed", False),
        (("airflow", "d", "r", "g", "-1"), "success", False),
        (("airflow", "d", "r", "g", "-1"), None, None),
        (("airflow", "d", "r", "g", "-1"), OSError("no channel"), None),
        (("cli", "nightly"), "failed", None),
    ],
)
def test_a_run_that_has_ended_wants_no_box(owner: tuple[str, ...], state: Any, wanted: bool | None) -> None:
    """An owner that Airflow does not know, or cannot be asked about, is never taken for ended."""
    from airflow_provider.liveness import AirflowLiveness
    from gpu_flows.leases.lease import Owner

    def ask(dag_id: str, run_id: str) -> str | None:
        assert (dag_id, run_id) == ("d", "r")
        if isinstance(state, Exception):
            raise state
        return str(state) if state else None

    assert AirflowLiveness(ask=ask).wants(Owner(owner), "ns", "lease") is wanted


@pytest.mark.parametrize(
    ("cloud", "url"),
    [
        ("runpod", "https://console.runpod.io/pods?id=b1"),
        (
            "aws",
            "https://eu-west-1.console.aws.amazon.com/ec2/home?region=eu-west-1#InstanceDetails:instanceId=b1",
        ),
        ("local", None),
    ],
)
def test_a_box_has_a_page_at_its_cloud(cloud: str, url: str | None) -> None:
    from airflow_provider.links.console import console_url

    box: Any = SimpleNamespace(cloud=cloud, id="b1", region="eu-west-1")
    assert console_url(box) == url


@pytest.mark.parametrize(
    ("entrypoint", "code", "launcher", "expected"),
    [
        ("train.py", None, None, ("train.py", "/dags")),
        ("jobs/train.py", None, None, ("train.py", "/dags/jobs")),
        ("train.py", "jobs", None, ("train.py", "/dags/jobs")),
        ("train.py", "/elsewhere", None, ("train.py", "/elsewhere")),
        ("-m acme.train", None, None, ("-m acme.train", "/dags")),
        ("make train", None, "command", ("make train", "/dags")),
        ("train.sh", None, "command", ("train.sh", "/dags")),
    ],
)
def test_code_is_taken_from_the_folder_of_the_dag(
    entrypoint: str, code: str | None, launcher: str | None, expected: tuple[str, str]
) -> None:
    from pathlib import Path

    from airflow_provider.operators.training import located

    assert located(entrypoint, code, launcher, Path("/dags")) == expected


def test_triggers_rebuild_themselves() -> None:
    from importlib import import_module

    from airflow_provider.triggers.capacity import CapacityTrigger
    from airflow_provider.triggers.follow import FollowJobTrigger

    for trigger in (
        CapacityTrigger(parameters={"gpus": "cpu"}, until="2030-01-01T00:00:00+00:00"),
        FollowJobTrigger(
            owner=["airflow", "d", "r", "g", "-1"],
            clouds=["local"],
            spec={"entrypoint": "train.py"},
            key="fit",
            nproc=2,
            until="2030-01-01T00:00:00+00:00",
        ),
    ):
        path, kwargs = trigger.serialize()
        module, _, name = path.rpartition(".")
        again = getattr(import_module(module), name)(**json.loads(json.dumps(kwargs)))
        assert again.serialize() == (path, kwargs)
