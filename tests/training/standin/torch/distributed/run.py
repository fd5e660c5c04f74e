"""torchrun in small: a session for each rank, TERM to all when one fails, exit code 1 whatever happened."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--nnodes", type=int)
parser.add_argument("--nproc-per-node", type=int)
parser.add_argument("--node-rank", type=int, default=0)
parser.add_argument("--master-addr", default="127.0.0.1")
parser.add_argument("--master-port", default="29500")
parser.add_argument("--rdzv-backend")
parser.add_argument("--rdzv-conf")
parser.add_argument("--max-restarts")
parser.add_argument("--log-dir")
parser.add_argument("--standalone", action="store_true")
parser.add_argument("--no-python", action="store_true")
parser.add_argument("script")
parser.add_argument("args", nargs=argparse.REMAINDER)
options = parser.parse_args()
assert options.no_python

print("stand-in torchrun:", *sys.argv[1:], flush=True)
ranks = []
for local in range(options.nproc_per_node):
    env = {
        "RANK": options.node_rank * options.nproc_per_node + local,
        "LOCAL_RANK": local,
        "WORLD_SIZE": options.nnodes * options.nproc_per_node,
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
    }
    ranks.append(
        subprocess.Popen(
            [options.script, *options.args],
            env=os.environ | {name: str(value) for name, value in env.items()},
            start_new_session=True,
        )
    )


def end_all(*_: object) -> None:
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGTERM)
    for rank in ranks:
        rank.wait()
    sys.exit(1)


signal.signal(signal.SIGTERM, end_all)
while any(rank.poll() is None for rank in ranks):
    if any(rank.poll() for rank in ranks):
        break
    time.sleep(0.02)
if any(rank.poll() for rank in ranks):
    end_all()
