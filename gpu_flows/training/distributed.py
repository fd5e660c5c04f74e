"""One training function for one card, for every card of a box, and for several boxes.

    from gpu_flows import distributed as dist

    def train(cfg):
        model = dist.wrap(Net().to(dist.device()))
        for batch in dist.shard(batches, even=True):
            ...
            dist.print0(f"loss {dist.all_reduce_mean(loss).item():.4f}")
        return {"loss": ...}

    if __name__ == "__main__":
        print(dist.run(train, {"lr": 1e-3}))

`run` starts one process per card. With one card, or none, it calls the function where it stands and every helper
answers as a world of one. Under torchrun or accelerate the process is a rank already, and `run` joins the group.

This file is shipped to the boxes by itself: it imports nothing of gpu_flows, runs on Python 3.9, and imports torch
only when it is used.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

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

T = TypeVar("T")

# What torchrun and accelerate give to every rank. A box may preset some of these (RunPod: WORLD_SIZE), never all.
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_END_GRACE_S = 5.0


class RankFailed(RuntimeError):
    """A rank that `run` had started failed; the others were ended.

    Attributes:
        rank: Which one.
        exit_code: Its exit code; -n when signal n ended it.
        remote_traceback: Its own traceback; empty when it could not write one.
    """

    def __init__(self, rank: int, exit_code: int, remote_traceback: str = "", why: str = "") -> None:
        if not why:
            why = (
                f"was ended by {_signal_name(-exit_code)}"
                if exit_code < 0
                else f"exited with code {exit_code}"
            )
        super().__init__(
            f"rank {rank} {why}" + (f"\n\n{remote_traceback.rstrip()}" if remote_traceback else "")
        )
        self.rank = rank
        self.exit_code = exit_code
        self.remote_traceback = remote_traceback
        self.why = why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.exit_code, self.remote_traceback, self.why)


class CardUnsupported(RuntimeError):
    """With the NCCL that is installed, the first collective on this card would fail."""


def run(
    fn: Callable[..., T], /, *args: Any, nproc: int | None = None, backend: str | None = None, **kwargs: Any
) -> T:
    """Call a function on every rank and return what rank 0 returned.

    Under a launcher (torchrun, accelerate) every process is a caller of its own: it joins the group, and gets what
    its own call returned.

    Args:
        fn: A function of a module: ranks are processes of their own and import it by its name.
        args: Its arguments; everything that a rank needs goes in here.
        nproc: Number of processes; by default one per GPU of this machine, or one.
        backend: Of `torch.distributed`; nccl on GPUs and gloo elsewhere by default.
        kwargs: Its keyword arguments.

    Returns:
        What rank 0 returned, whatever its size; its tensors are moved to the CPU when ranks were started.

    Raises:
        RankFailed: When a rank that was started here failed, with its own traceback.
        CardUnsupported: When NCCL has to be newer for the cards of this machine.
        TypeError: When the function or an argument cannot be sent to another process.
    """
    if _is_rank():
        ours = _join(backend)
        result = fn(*args, **kwargs)
        # Only after a good end: leaving can wait for ranks, and after a failure those wait for this one.
        group = _group()
        if ours and group is not None:
            group.destroy_process_group()
        return result
    if nproc is None:
        import torch

        nproc = torch.cuda.device_count()
    if nproc <= 1:
        return fn(*args, **kwargs)
    return _spawn(fn, args, kwargs, nproc, backend)


def rank() -> int:
    """Return this process's rank among all of them, on every box."""
    return _place()[0]


def world_size() -> int:
    """Return how many ranks there are, on every box; 1 when there is nobody else."""
    return _place()[1]


def local_rank() -> int:
    """Return this process's rank on its box, which is the number of its card."""
    own = os.environ.get("LOCAL_RANK")
    if own is not None and _is_rank():
        return int(own)
    cards = _cards()
    return rank() % cards if cards else rank()


def is_main() -> bool:
    """Tell whether this is rank 0."""
    return rank() == 0


def device() -> torch.device:
    """Return this rank's card, or the CPU."""
    import torch

    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def wrap(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """Return the model as DistributedDataParallel, or itself in a world of one.

    Args:
        model: On `device` already.
        options: For DistributedDataParallel.
    """
    if world_size() == 1:
        return model
    _join()
    from torch.nn.parallel import DistributedDataParallel

    if next(model.parameters()).is_cuda:
        options.setdefault("device_ids", [local_rank()])
    return DistributedDataParallel(model, **options)


def shard(items: Sequence[T], *, even: bool = False) -> Sequence[T]:
    """Return this rank's part of a list, tensor or array: every ``world_size()``-th item.

    Args:
        items: What to share out; the same on every rank.
        even: Drop the last items where the ranks would get unequal numbers. A loop with a gradient in every step
            needs it, or the ranks with one item more wait for the others for ever. Without it every item is in
            exactly one part, which is what an evaluation needs.
    """
    size = world_size()
    end = len(items) // size * size if even else len(items)
    return items[rank() : end : size]


def all_reduce_mean(value: Any) -> Any:
    """Return the mean over all ranks.

    Args:
        value: A tensor, which is left as it is, or a number.

    Returns:
        A new tensor without gradient on the same device, or a float.
    """
    loaded: Any = sys.modules.get("torch")
    if loaded is None or not isinstance(value, loaded.Tensor):
        if world_size() == 1:
            return float(value)
        import torch

        return float(all_reduce_mean(torch.tensor(float(value), dtype=torch.float64)))
    floats = value.is_floating_point() or value.is_complex()
    mean = value.detach().to(value.dtype if floats else loaded.float64, copy=True)
    if world_size() == 1:
        return mean
    _join()
    distributed = loaded.distributed
    if distributed.get_backend() == "nccl":
        mean = mean.to(device())
    mean /= world_size()  # before the sum, which overflows in half precision
    distributed.all_reduce(mean)
    return mean.to(value.device)


def barrier() -> None:
    """Wait until every rank is here."""
    if world_size() == 1:
        return
    _join()
    import torch.distributed as distributed

    distributed.barrier(device_ids=[local_rank()] if distributed.get_backend() == "nccl" else None)


def print0(*values: Any, **options: Any) -> None:
    """Print at once, on rank 0 alone; takes what `print` takes."""
    if is_main():
        print(*values, **{"flush": True, **options})  # noqa: T201 - this is what it is for


# The group.


def _is_rank() -> bool:
    """Tell whether a launcher started this process, or its group is there already."""
    return _group() is not None or all(name in os.environ for name in _LAUNCHED)


def _group() -> Any:
    """Return `torch.distributed` when a group exists, without importing torch to find out."""
    distributed: Any = sys.modules.get("torch.distributed")
    return (
        distributed if distributed and distributed.is_available() and distributed.is_initialized() else None
    )


def _place() -> tuple[int, int]:
    group = _group()
    if group is not None:
        return group.get_rank(), group.get_world_size()
    if _is_rank():
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def _cards() -> int:
    loaded: Any = sys.modules.get("torch")
    return int(loaded.cuda.device_count()) if loaded else 0


def _join(backend: str | None = None) -> bool:
    """Join the group of the launched ranks; return False when somebody has done it already."""
    if _group() is not None:
        return False
    import torch
    import torch.distributed as distributed

    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        # ROCm's torch calls its cards cuda, too; the quirks are NVIDIA's.
        if torch.version.hip is None:
            known = [Card(card.name, card.major) for card in cards]
            os.environ.update(card_settings(known, torch.cuda.nccl.version(), torch.version.cuda, os.environ))
    distributed.init_process_group(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    return True


# Quirks of cards.


@dataclass(frozen=True)
class Card:
    """A card as torch describes it: its name, and the major version of its compute capability."""

    name: str
    capability: int


@dataclass(frozen=True)
class Quirk:
    """What some cards need before the first collective.

    Attributes:
        why: What happens without it.
        name: Pattern for the names of the cards.
        capability: Major compute capability of the cards; None for any.
        env: Variables to set, unless the user has set them.
        nccl: Oldest version of NCCL that works.
    """

    why: str
    name: str = ""
    capability: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    nccl: tuple[int, int] | None = None

    def concerns(self, card: Card) -> bool:
        """Tell whether a card has this quirk."""
        return re.search(self.name, card.name) is not None and self.capability in (None, card.capability)


QUIRKS = (
    Quirk("peer-to-peer transport hangs", name=r"RTX PRO 6000", env={"NCCL_P2P_DISABLE": "1"}),
    Quirk(
        'an older NCCL has no kernels for it: the first collective dies with "invalid argument"',
        capability=12,
        nccl=(2, 26),
    ),
)


def card_settings(
    cards: Iterable[Card], nccl: Sequence[int], cuda: str | None, env: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that the cards of a machine need; what the user has set is not among them.

    Args:
        cards: The machine's cards.
        nccl: Version of the NCCL that torch uses.
        cuda: Version of CUDA that torch was built for, which the package to install is named after.
        env: What is set already.

    Raises:
        CardUnsupported: When NCCL is too old for a card.
    """
    settings: dict[str, str] = {}
    for card in cards:
        for quirk in QUIRKS:
            if not quirk.concerns(card):
                continue
            settings.update((name, value) for name, value in quirk.env.items() if name not in env)
            if quirk.nccl and tuple(nccl[:2]) < quirk.nccl:
                wanted, found = (".".join(map(str, version)) for version in (quirk.nccl, nccl))
                raise CardUnsupported(
                    f"{card.name} needs NCCL {wanted} or newer and torch uses {found}: {quirk.why}. "
                    f"Install it: pip install -U 'nvidia-nccl-cu{(cuda or '12').split('.')[0]}>={wanted}'"
                )
    return settings


# Ranks of our own.


def _spawn(fn: Callable[..., T], args: Any, kwargs: Any, nproc: int, backend: str | None) -> T:
    import torch
    import torch.distributed as distributed

    try:
        payload = pickle.dumps((fn, args, kwargs, backend))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{getattr(fn, '__qualname__', fn)} or one of its arguments cannot be sent to another process: {error}. "
            "The function has to stand at the top level of a module"
        ) from error
    folder = Path(tempfile.mkdtemp(prefix="gpu-flows-ranks-"))
    ranks: list[Any] = []
    try:
        (folder / "payload").write_bytes(payload)
        # The store lives here, on a port that the kernel chose: no two runs can want the same one.
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for number in range(nproc):
            arguments = (str(folder), number, nproc, store.port, os.getpid())
            ranks.append(context.Process(target=_rank_main, args=arguments, name=f"rank {number}"))
            ranks[-1].start()
        _wait(ranks, folder)
        if not (folder / "result").exists():
            raise RankFailed(0, 0, why="exited with code 0 before its function returned")
        result: T = torch.load(folder / "result", map_location="cpu", weights_only=False)
        return result
    finally:
        _end(ranks)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(ranks: Sequence[Any], folder: Path) -> None:
    """Wait for all ranks to end well; raise for the one that failed first."""
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            running.pop(sentinel).join()
        if any(process.exitcode for process in ranks):
            raise _failure(ranks, folder)


def _failure(ranks: Sequence[Any], folder: Path) -> RankFailed:
    """Find the rank that is the cause, among it and those that failed because it was gone."""
    codes = {number: process.exitcode for number, process in enumerate(ranks) if process.exitcode}
    # A rank writes its error before its connections close, so that those of its victims are later.
    errors = sorted(pickle.loads(path.read_bytes()) for path in folder.glob("*.error"))  # noqa: S301 - our own
    # Victims raise, too; a rank without an error was struck from outside, crashed, or left by os._exit. Only SIGABRT
    # may be a collective giving up on somebody else.
    silent = set(codes) - {number for _, number, _, _ in errors}
    number = min(silent, key=lambda one: (codes[one] == -signal.SIGABRT, one), default=-1)
    if errors and (not silent or codes[number] == -signal.SIGABRT):
        _, number, code, text = errors[0]
        return RankFailed(number, code, text, why="failed" if code == 1 else "")
    if codes[number] < 0 or (folder / f"{number}.started").exists():
        return RankFailed(number, codes[number])
    return RankFailed(
        number,
        codes[number],
        why=f"exited with code {codes[number]} before it could call the function; what it printed says why. "
        'A script has to call run under `if __name__ == "__main__":`',
    )


def _end(ranks: Iterable[Any]) -> None:
    alive = [process for process in ranks if process.pid is not None and process.is_alive()]
    for process in alive:
        process.terminate()
    deadline = time.monotonic() + _END_GRACE_S
    for process in alive:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in alive:
        process.kill()
        process.join()


def _rank_main(folder_name: str, number: int, size: int, port: int, parent: int) -> None:
    folder = Path(folder_name)
    _die_with(parent)
    (folder / f"{number}.started").touch()
    os.environ.update(
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        # As under torchrun, every rank is a client of a store that lives elsewhere.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine may not know its own name
    code = 0
    try:
        import torch

        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, _cores() // size))
        fn, args, kwargs, backend = pickle.loads((folder / "payload").read_bytes())  # noqa: S301 - our own
        try:
            result = run(fn, *args, backend=backend, **kwargs)
        except SystemExit as stop:
            if stop.code:
                raise
            result = None
        if number == 0:
            torch.save(result, folder / "result")
    except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets to see it
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        record = (time.time_ns(), number, code, _own_traceback(error))
        partial = folder / f"{number}.writing"
        partial.write_bytes(pickle.dumps(record))
        partial.rename(folder / f"{number}.error")
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # Not by the way of the interpreter: leaving the group could wait for ranks that wait for this one.
        os._exit(code)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _own_traceback(error: BaseException) -> str:
    """Return a traceback that begins with the user's own code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent dies, however that dies."""
    if sys.platform != "linux":
        return
    import ctypes

    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it was quicker
        os._exit(1)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
