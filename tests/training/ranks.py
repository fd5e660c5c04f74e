"""What the ranks of the tests do: functions of a module, as `distributed.run` needs them."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from gpu_flows import distributed as dist


def look_around(size: int) -> dict[str, Any]:
    import torch

    mean = dist.all_reduce_mean(torch.tensor([float(dist.rank()), 4.0]))
    dist.barrier()
    return {
        "world": (dist.rank(), dist.local_rank(), dist.world_size(), dist.is_main()),
        "device": str(dist.device()),
        "mean": mean.tolist(),
        "mean of numbers": dist.all_reduce_mean(dist.rank()),
        "mean of integers": dist.all_reduce_mean(torch.tensor(dist.rank())).item(),
        "part": list(dist.shard(range(5))),
        "even part": list(dist.shard(range(5), even=True)),
        "tensor": torch.ones(2),
        "blob": b"x" * size,
    }


def learn() -> list[Any]:
    """DistributedDataParallel imports torch's compiler, which takes seconds."""
    import torch

    model = dist.wrap(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(dist.rank()))).sum().backward()
    return [type(model).__name__, next(model.parameters()).grad]


def fail(how: str) -> None:
    dist.barrier()
    if dist.rank() == 1:
        if how == "raise":
            raise ValueError("bad batch")
        if how == "sys.exit":
            sys.exit(37)
        if how == "os._exit":
            os._exit(37)
        os.kill(os.getpid(), getattr(signal, how))
    dist.barrier()
    time.sleep(600)


def sleep(folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(f"{folder}/{dist.rank()}.pid", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
