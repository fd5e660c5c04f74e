"""The launch with the real torchrun. A run costs several seconds, so each serves several assertions."""

from __future__ import annotations

import json
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_flows.training.causes import ExitCause
from gpu_flows.training.commands import node_command
from gpu_flows.training.diagnose import diagnose
from gpu_flows.training.spec import TrainingSpec
from tests.training.nodes import Node
from tests.training.test_commands import C45

MEET = textwrap.dedent(
    """
    import json, os, sys
    from gpu_flows import distributed as dist

    def train(word):
        mean = dist.all_reduce_mean(float(dist.rank()))
        dist.print0("mean", mean)
        return [word, dist.rank(), dist.world_size(), mean]

    if __name__ == "__main__":
        result = dist.run(train, "here")
        seen = {"result": result, "argv": sys.argv[1:], "file": dist.__file__, "omp": os.environ["OMP_NUM_THREADS"]}
        json.dump(seen, open(f"seen{dist.rank()}.json", "w"))
    """
)
FAIL = textwrap.dedent(
    """
    import os, sys, time
    from gpu_flows import distributed as dist

    def train():
        dist.barrier()
        if dist.rank() == 1:
            sys.stdout.write("x" * 4095 + "é" + "漢" * 70_000)
            sys.stdout.flush()
            sys.stdout.buffer.write(b"\\xff\\n")
            sys.exit(37)
        time.sleep(600)

    if __name__ == "__main__":
        dist.run(train)
    """
)


@pytest.fixture
def torch_node(new_node: Callable[..., Node]) -> Callable[[], Node]:
    """Make nodes whose python3 has the real torch."""
    return lambda: new_node(python=Path(sys.executable), path=())


def code_of(node: Node, name: str, text: str) -> Path:
    code = node.home / "my code"
    (code / name).parent.mkdir(parents=True, exist_ok=True)
    (code / name).write_text(text)
    return code


def test_c41_c45_u01_two_runs_at_once_beside_a_foreign_listener(torch_node: Callable[[], Node]) -> None:
    first, second = torch_node(), torch_node()
    script = code_of(first, "train.py", MEET)
    package = code_of(second, "src/acme_fc/train.py", MEET)
    (package / "src" / "acme_fc" / "__init__.py").touch()
    try:
        foreign = socket.create_server(("127.0.0.1", 29500))
    except OSError:  # somebody holds it already, which is what is wanted
        foreign = socket.socket()
    with foreign:
        one = {"node": 0, "nodes": 1}
        runs = [
            first.start(
                node_command(
                    TrainingSpec(entrypoint="train.py", args=C45), nproc=2, code_dir=str(script), **one
                )
            ),
            second.start(
                node_command(
                    TrainingSpec(entrypoint="-m acme_fc.train"), nproc=1, code_dir=str(package), **one
                )
            ),
        ]
        codes = [run.wait(120) for run in runs]
    assert codes == [0, 0], first.log() + second.log()
    for rank in (0, 1):
        seen = json.loads((script / f"seen{rank}.json").read_text())
        assert seen["argv"] == C45
        assert seen["result"] == ["here", rank, 2, 0.5], "each rank gets what its own call returned"
        assert first.rank_exit(rank)[:2] == ["0", "exit"]
    assert first.rank_log(0) == "mean 0.5\n"
    assert first.rank_log(1) == ""
    assert json.loads((package / "seen0.json").read_text())["result"] == ["here", 0, 1, 0.0]
    assert diagnose([first.evidence(0, 0)]).cause == ExitCause.SUCCEEDED


def test_c35_c31_two_nodes_meet_and_the_first_failure_is_the_cause(
    torch_node: Callable[[], Node], until: Callable[..., None]
) -> None:
    nodes = [torch_node(), torch_node()]
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    spec = TrainingSpec(entrypoint="train.py", nodes=2)
    runs = [
        node.start(
            node_command(
                spec,
                node=index,
                nodes=2,
                nproc=1,
                master_addr="127.0.0.1",
                master_port=port,
                code_dir=str(code_of(node, "train.py", FAIL)),
            )
        )
        for index, node in enumerate(nodes)
    ]
    assert runs[1].wait(120) == 1, "torchrun answers 1 whatever happened"
    failed_at = time.time()
    assert nodes[1].rank_exit(1)[:2] == ["37", "exit"]
    assert failed_at - int(nodes[1].rank_exit(1)[2]) / 1000 < 10, "fast, not after rank 0's 600 s"
    # What follows a failure: the other nodes are ended.
    if runs[0].poll() is None:
        runs[0].send_signal(signal.SIGTERM)
    runs[0].wait(60)
    log = (nodes[1].job() / "ranks" / "1.log").read_bytes()
    assert log.startswith(("x" * 4095 + "é" + "漢" * 70_000).encode() + b"\xff\n"), "whole, under LANG=C"
    evidence = [nodes[0].evidence(0, 1, stopped=True), nodes[1].evidence(1, 1)]
    found = diagnose(evidence)
    assert (found.node, found.rank, found.exit_code, found.cause) == (1, 1, 37, ExitCause.SCRIPT_ERROR)
    assert evidence[0].outcome == "stopped"
    assert [node.processes() for node in nodes] == [[], []]


def test_c41_a_port_that_was_taken_meanwhile_is_told_from_a_failure(torch_node: Callable[[], Node]) -> None:
    node = torch_node()
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        command = node_command(
            TrainingSpec(entrypoint="train.py", nodes=2),
            node=0,
            nodes=2,
            nproc=1,
            master_addr="127.0.0.1",
            master_port=foreign.getsockname()[1],
            code_dir=str(code_of(node, "train.py", MEET)),
        )
        assert node.run(command) == 1
    found = diagnose([node.evidence(0, 1)])
    assert (found.cause, found.port_taken) == (ExitCause.RENDEZVOUS_FAILED, True), node.log()
