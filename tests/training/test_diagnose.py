"""From what the nodes left to why the job ended: a row for every cause, and for what hides it."""

from __future__ import annotations

import pickle

import pytest

from gpu_flows.errors import GpuFlowsError
from gpu_flows.training.causes import Diagnosis, ExitCause, TrainingError
from gpu_flows.training.diagnose import NodeEvidence, RankEvidence, SetupEvidence, diagnose

TRACE = """\
step 10 loss 0.3
Traceback (most recent call last):
  File "/root/gpu-flows/x/train.py", line 12, in <module>
    main()
  File "/root/gpu-flows/x/train.py", line 7, in main
    raise ValueError("bad batch")
ValueError: bad batch
"""
PEER = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/root/gpu-flows/x/train.py", line 9, in main
[rank0]:     dist.all_reduce(loss)
[rank0]:   File "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py", line 2810, in all_reduce
[rank0]:     work.wait()
[rank0]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:3389
"""
CHAIN = "\nDuring handling of the above exception, another exception occurred:\n\n"
PORT = """\
  File "/usr/lib/python3/site-packages/torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py", line 67
torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. \
port: 23456, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use
"""


def raised(error: str) -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    f()\n{error}\n'


def rank(number: int, code: int | None, at: int = 0, tail: str = "") -> RankEvidence:
    return RankEvidence(
        rank=number, exit_code=code, by_signal=bool(code and 128 < code < 193), ended_ms=at, log_tail=tail
    )


def one(*ranks: RankEvidence, **more: object) -> NodeEvidence:
    return NodeEvidence(**{"node": 0, "exit_code": 1, "why": "exit", "ranks": ranks, **more})


def test_a_success_is_one() -> None:
    found = diagnose([one(rank(0, 0), exit_code=0), one(rank(1, 0), node=1, exit_code=0)])
    assert (found.cause, found.exit_code, found.error()) == (ExitCause.SUCCEEDED, 0, None)
    assert diagnose([one(exit_code=0)], stop=ExitCause.DEADLINE).cause == ExitCause.SUCCEEDED, (
        "it was quicker"
    )


def test_c35_the_cause_is_the_rank_that_failed_first_and_the_others_were_stopped() -> None:
    nodes = [
        one(rank(0, 143, at=9000), exit_code=143, why="cancelled", stopped=True),
        one(rank(1, 37, at=3000), node=1),
    ]
    found = diagnose(nodes)
    assert found.sentence == "rank 1 on node 1 exited with code 37"
    assert (found.cause, found.node, found.rank, found.exit_code) == (ExitCause.SCRIPT_ERROR, 1, 1, 37)
    assert [node.outcome for node in nodes] == ["stopped", "script_error"]


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([rank(0, 143, at=1000)], "ended by torchrun, whatever its clock says"),
        ([rank(0, 1, at=1000, tail=PEER)], "failed because rank 1 was gone"),
        ([rank(0, 1, at=1000, tail=PEER + CHAIN + TRACE)], "made its own error of rank 1 being gone"),
        ([rank(0, None)], "killed before it could leave a record"),
        ([rank(0, 1, at=3001, tail=TRACE.replace("bad", "another"))], "failed later"),
        ([rank(0, 0, at=1000)], "ended well"),
    ],
)
def test_victims_are_not_taken_for_the_cause(others: list[RankEvidence], why: str) -> None:
    found = diagnose([one(*others, rank(1, 1, at=3000, tail=TRACE))])
    assert (found.rank, found.cause) == (1, ExitCause.SCRIPT_ERROR), why
    assert found.sentence == "rank 1 exited with code 1: ValueError: bad batch (train.py:7)"
    assert found.traceback.startswith("Traceback (most recent call last):")
    assert found.traceback.endswith("ValueError: bad batch")


def test_clocks_that_differ_are_put_right() -> None:
    first, second = (
        one(rank(0, 1, at=100_000, tail=TRACE)),
        one(rank(1, 1, at=160_000, tail=TRACE), node=1, skew_s=90.0),
    )
    assert diagnose([first, second]).rank == 1, "its clock runs 90 s ahead"


@pytest.mark.parametrize(
    ("tail", "cause", "words"),
    [
        (
            raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
            "cuda_oom",
            "GPU memory",
        ),
        (raised("torch.cuda.OutOfMemoryError: HIP out of memory."), "cuda_oom", "GPU memory"),
        (
            raised("RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be"),
            "cuda_oom",
            "GPU memory",
        ),
        (
            raised("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
            "cuda_oom",
            "GPU memory",
        ),
        (raised("MemoryError"), "host_oom", "ran out of memory"),
        (
            raised("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8. TiB for"),
            "host_oom",
            "memory",
        ),
        (
            raised("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "host_oom",
            "memory",
        ),
        (
            raised("RuntimeError: DataLoader worker (pid(s) 77) is killed by signal: Killed. "),
            "host_oom",
            "memory",
        ),
        (raised("OSError: [Errno 28] No space left on device: 'model.pt'"), "disk_full", "disk full"),
        (
            raised(
                "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"
            ),
            "nccl_timeout",
            "in vain",
        ),
        (
            raised(
                "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined."
            ),
            "rendezvous_failed",
            "did not find",
        ),
        (raised("OSError: [Errno 98] Address already in use"), "script_error", "exited with code 1"),
        (
            raised("ConnectionResetError: [Errno 104] Connection reset by peer"),
            "script_error",
            "exited with code 1",
        ),
        (
            "  File \"train.py\", line 3\n    if x\n        ^\nSyntaxError: expected ':'\n",
            "script_error",
            "SyntaxError",
        ),
        ("nothing that looks like an error\n", "script_error", "rank 0 exited with code 1"),
        ("", "script_error", "rank 0 exited with code 1"),
        (raised("KeyError: 'x'") + "during cleanup\n", "script_error", "KeyError: 'x'"),
        # What was caught and survived is not the cause.
        (
            raised("torch.OutOfMemoryError: CUDA out of memory.") + "retrying\n" + TRACE,
            "script_error",
            "bad batch",
        ),
    ],
)
def test_the_log_tells_the_cause(tail: str, cause: str, words: str) -> None:
    found = diagnose([one(rank(0, 1, tail=tail), rank(1, 143, at=9))])
    assert found.cause == cause
    assert words in found.sentence
    assert "\n" not in found.sentence


def test_nccls_watchdog_aborts() -> None:
    tail = (
        "[rank0]:[E1201 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600000 milliseconds before timing out.\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    )
    found = diagnose([one(rank(0, 134, tail=tail))])
    assert found.cause == ExitCause.NCCL_TIMEOUT


@pytest.mark.parametrize(
    ("node", "cause", "words"),
    [
        (
            one(rank(0, 137), why="oom", exit_code=1),
            "host_oom",
            "rank 0 was killed because the box was out of memory",
        ),
        (one(rank(0, 137)), "unknown", "SIGKILL); most often the box is out of memory"),
        (one(rank(0, 139)), "script_error", "rank 0 was ended by SIGSEGV"),
        (one(rank(0, 143)), "unknown", "rank 0 was ended by SIGTERM from outside"),
        (one(rank(0, None), why="oom"), "host_oom", "out of memory"),
        (one(rank(0, 1, tail=PEER)), "unknown", "lost its connection to another rank"),
        (
            one(rank(0, 1, tail=raised("RuntimeError: file write failed")), free_kb=12),
            "disk_full",
            "disk full",
        ),
        (one(rank(0, 1, tail=TRACE), free_kb=1 << 20), "script_error", "bad batch"),
        (one(exit_code=1, log_tail=PORT), "rendezvous_failed", "EADDRINUSE"),
        (
            one(exit_code=7, log_tail="sh: 1: nonsense\n"),
            "unknown",
            "the job ended with exit code 7: sh: 1: nonsense",
        ),
        (one(exit_code=None), "unknown", "unknown exit code"),
        (one(exit_code=143, why="cancelled"), "cancelled", "cancelled"),
        (
            one(setup=SetupEvidence(2, 1, 3), log_tail="no such package\n"),
            "setup_failed",
            "command 1 of 3 failed",
        ),
        (one(setup=SetupEvidence(None, 0, 3)), "setup_failed", "the setup ended early"),
        (
            one(setup=SetupEvidence(1), log_tail="gpu-flows: no torch\n"),
            "setup_failed",
            "not ready to train: no torch",
        ),
        (one(lost="interrupted by the cloud"), "preempted", "node 0 was lost: interrupted by the cloud"),
    ],
)
def test_one_node(node: NodeEvidence, cause: str, words: str) -> None:
    found = diagnose([node])
    assert found.cause == cause
    assert words in found.sentence
    assert found.port_taken is (cause == "rendezvous_failed")


def test_c53_a_lost_box_is_no_failure_of_the_script() -> None:
    lost = NodeEvidence(node=1, lost="it is gone")
    assert diagnose([one(rank(0, 1, tail=PEER)), lost]).cause == ExitCause.PREEMPTED
    assert diagnose([one(rank(0, 143), why="cancelled", stopped=True), lost]).cause == ExitCause.PREEMPTED
    assert diagnose([one(rank(0, 1, tail=TRACE)), lost]).cause == ExitCause.SCRIPT_ERROR, (
        "with its own traceback"
    )


@pytest.mark.parametrize("stop", [ExitCause.DEADLINE, ExitCause.BUDGET, ExitCause.CANCELLED])
def test_what_gpu_flows_stopped_was_stopped(stop: ExitCause) -> None:
    cut = one(rank(0, 143), rank(1, 1, tail=raised("KeyboardInterrupt")), exit_code=143, why="cancelled")
    assert diagnose([cut], stop=stop).cause == stop
    own = one(rank(2, 1, tail=TRACE), node=1)
    assert diagnose([cut, own], stop=stop).cause == ExitCause.SCRIPT_ERROR, "it had failed before"


def test_no_evidence_is_unknown() -> None:
    assert diagnose([]).cause == ExitCause.UNKNOWN


@pytest.mark.parametrize("cause", [cause for cause in ExitCause if cause is not ExitCause.SUCCEEDED])
def test_every_cause_is_an_exception_of_that_name(cause: ExitCause) -> None:
    diagnosis = Diagnosis(cause=cause, sentence="it ended", rank=1, traceback="Traceback ...")
    error = diagnosis.error()
    assert isinstance(error, TrainingError)
    assert isinstance(error, GpuFlowsError)
    assert error.code == cause.value.upper()
    assert "it ended" in str(error)
    assert "Traceback ..." in str(error)
    assert pickle.loads(pickle.dumps(error)).diagnosis == diagnosis
    assert diagnosis.to_json()["cause"] == cause.value
