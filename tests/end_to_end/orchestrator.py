"""A run that kills itself with SIGKILL at a chosen step; started by the kill table as a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import gpu_flows.leases.lease as lease_module
from gpu_flows import Following, Installation, run
from gpu_flows.clouds.local.cloud import LocalCloud
from gpu_flows.leases.journal import this_process
from gpu_flows.progress import Progress

STEPS = (
    "before create",
    "during create",
    "after create",
    "during upload",
    "during training",
    "during teardown",
)


def die() -> NoReturn:
    # The end of the output tells the parent that the step was reached.
    print("killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()
    raise AssertionError


def main(step: str, code: Path, dead_man_alone: bool) -> None:
    original_create, original_destroy = LocalCloud.create, LocalCloud.destroy

    def create(self: LocalCloud, *args: Any) -> Any:
        if step == "before create":
            die()
        box = original_create(self, *args)
        # The box exists, and the answer has not arrived.
        return die() if step == "during create" else box

    def destroy(self: LocalCloud, box: Any) -> None:
        original_destroy(self, box)
        if step == "during teardown":
            die()

    def listen(progress: Progress) -> None:
        if step == "after create" and progress.kind == "box.rented":
            die()

    def show(_: str, line: str) -> None:
        if step == "during training" and "training" in line:
            die()

    def uploading(sent: int, total: int) -> None:
        if step == "during upload":
            die()

    LocalCloud.create, LocalCloud.destroy = create, destroy  # type: ignore[method-assign]
    if dead_man_alone:
        # The lease is shortened to what a test can wait for: ready in 20 s, a job of 5 s, no slack.
        lease_module.TEARDOWN_SLACK = timedelta(seconds=0)
    print(this_process(detached=False)["pid"], flush=True)
    run(
        "train.sh",
        gpus="cpu",
        name="kill-table",
        nodes=2,
        launcher="command",
        code=code,
        max_duration=5 if dead_man_alone else 600,
        ready_timeout_s=20,
        installation=Installation(listener=listen),
        following=Following(show_line=show, upload_progress=uploading),
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "dead-man")
