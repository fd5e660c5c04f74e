"""What importing the package costs: nothing heavy is loaded before it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("boto3", "runpod", "vastai", "pydo", "asyncssh", "torch", "airflow", "prefect", "pydantic", "rich")


def loaded_by(statement: str) -> list[str]:
    program = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "statement",
    [
        "import gpu_flows",
        "import gpu_flows; gpu_flows.list_gpus(); gpu_flows.GpuRequest.parse('H100:8'); dir(gpu_flows)",
        "import gpu_flows.leases.watchdog, gpu_flows.leases.teardown, gpu_flows.leases.reaper",
        "from gpu_flows import distributed, gpu_box, run, teardown_box",
    ],
)
def test_nothing_heavy_is_loaded(statement: str) -> None:
    modules = set(loaded_by(statement))
    assert modules & set(HEAVY) == set()


def test_every_public_name_exists_and_is_loaded_when_used() -> None:
    import gpu_flows

    for name in gpu_flows.__all__:
        assert getattr(gpu_flows, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        gpu_flows.nonsense  # noqa: B018 - the access is the test
    assert callable(gpu_flows.run), "the function, not the module of that name"
