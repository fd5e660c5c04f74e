"""Runs DAGs one after the other with `dag.test()`, and says how each ended; started by the tests as a process."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from gpu_flows.clouds import open_cloud


def outcome(dag: Any, run: Any) -> dict[str, Any]:
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        tis = session.scalars(select(TaskInstance).where(TaskInstance.run_id == run.run_id)).all()
        states = {f"{ti.task_id}[{ti.map_index}]": str(ti.state) for ti in tis}
        rows = session.scalars(select(XComModel).where(XComModel.run_id == run.run_id)).all()
        xcoms = {f"{row.task_id}[{row.map_index}].{row.key}": row.value for row in rows}
    return {"state": str(run.state.value), "run_id": run.run_id, "states": states, "xcoms": xcoms}


def main(names: list[str]) -> None:
    from tests.airflow.dags import steps

    results = {}
    for name in names:
        began = time.monotonic()
        dag = getattr(steps, name)
        sys.stdout.flush()
        print(f"=== {name}", flush=True)
        run = dag.test()
        results[name] = outcome(dag, run)
        results[name]["seconds"] = round(time.monotonic() - began, 1)
        results[name]["boxes"] = [box.name for box in open_cloud("local").find("gf1-")]
    with open(os.environ["RESULTS"], "w") as file:
        json.dump(results, file, default=str)


if __name__ == "__main__":
    main(sys.argv[1:])
