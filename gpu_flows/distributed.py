"""Helpers for a training script: ``from gpu_flows import distributed as dist``.

The same file is put on every box, so a script that uses it runs there without gpu-flows being installed.
"""

from gpu_flows.training.distributed import (
    CardUnsupported,
    RankFailed,
    all_reduce_mean,
    barrier,
    device,
    is_main,
    local_rank,
    print0,
    rank,
    run,
    shard,
    world_size,
    wrap,
)

__all__ = [
    "CardUnsupported",
    "RankFailed",
    "all_reduce_mean",
    "barrier",
    "device",
    "is_main",
    "local_rank",
    "print0",
    "rank",
    "run",
    "shard",
    "world_size",
    "wrap",
]
