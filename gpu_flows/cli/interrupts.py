"""Ctrl-C, as often as it is pressed: the first tears down, the second says what is alive, the third leaves."""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpu_flows.cli.exits import Exit
from gpu_flows.cli.output import length
from gpu_flows.cli.session import command_for, shown
from gpu_flows.errors import GpuFlowsError
from gpu_flows.progress import counted

if TYPE_CHECKING:
    from gpu_flows.leases.lease import Owner
    from gpu_flows.runs.installation import Installation

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(GpuFlowsError):
    """A person, or whoever stops programs, wanted no more of it.

    Args:
        message: What became of it.
        hint: What can be done about it.
        exit: The exit code.
    """

    code = "INTERRUPTED"

    def __init__(self, message: str, *, hint: str | None = None, exit: Exit = Exit.INTERRUPTED) -> None:  # noqa: A002
        super().__init__(message, hint=hint)
        self.exit = exit


class Interrupts:
    """Takes Ctrl-C and SIGTERM while boxes are held; makes an `Interrupted` of them in the end.

    The first one becomes a KeyboardInterrupt, on which the composition tears down, shielded; the later ones only
    speak, so that nothing interrupts the teardown itself.

    Args:
        installation: Whose journal says what is alive.
        owner: Whose boxes are held.
        ends: Whether an interruption ends the boxes; else it only ends the following.
        silence_s: How long boxes live that nobody follows; None for their deadline alone.
    """

    def __init__(
        self,
        installation: Installation,
        owner: Owner,
        *,
        ends: bool = True,
        silence_s: float | None = None,
    ) -> None:
        self._installation, self._owner, self._ends = installation, owner, ends
        self._silence_s = silence_s
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, KeyboardInterrupt):
            raise self._outcome(error) from error

    def _take(self, number: int, frame: FrameType | None) -> None:
        """Take a signal. No lock of the screen is taken here: whoever was interrupted may hold it."""
        self._count += 1
        if self._count == 1:
            _say(self._announcement())
            raise KeyboardInterrupt
        alive = self._alive()
        if self._count == 2:
            alive = alive or ["nothing is known to be alive any more; still making sure of it"]
            _say("\n".join([*alive, "press Ctrl-C once more to leave without waiting"]))
        else:
            os._exit(Exit.MAY_BILL if alive and self._ends else Exit.INTERRUPTED)

    def _announcement(self) -> str:
        if not self._ends:
            return "no longer following"
        number = len(self._live())
        what = (
            f"tearing down {counted(number, 'box', 'boxes')}"
            if number
            else "making sure that nothing is left"
        )
        return f"{what}; press Ctrl-C again to see what is still alive"

    def _outcome(self, error: KeyboardInterrupt) -> Interrupted:
        if not self._ends:
            until = f" for {length(timedelta(seconds=self._silence_s))}" if self._silence_s else ""
            return Interrupted(
                f"no longer following; the boxes of {shown(self._owner)} and its job run on{until}",
                hint=f"{command_for('attach', self._owner)} follows it again, "
                f"{command_for('teardown', self._owner)} ends it",
            )
        failed = [*getattr(error, "__notes__", ()), *([str(error.__cause__)] if error.__cause__ else [])]
        if failed or self._live():
            return Interrupted(
                "\n".join(["interrupted, and not everything is proven gone", *failed, *self._alive()]),
                exit=Exit.MAY_BILL,
            )
        return Interrupted("interrupted; everything that was rented is proven gone")

    def _live(self) -> list[tuple[str, Any]]:
        namespace = self._installation.namespace(())
        return self._installation.journal(self._owner, namespace).live_boxes()

    def _alive(self) -> list[str]:
        """Return a line for each box that is not proven gone, and the command that ends them."""
        lines = []
        for ref, box in self._live():
            where = self._installation.cloud(ref).console_url(box)
            price = f", {box.usd_per_hour:.2f} dollars per hour" if box.usd_per_hour else ""
            lines.append(f"still alive: {ref} box {box.id}{price}" + (f", {where}" if where else ""))
        return [*lines, f"to end them: {command_for('teardown', self._owner)}"] if lines else []


def _say(text: str) -> None:
    # Not through sys.stderr: the signal may have come in the middle of a write to it.
    start = "\n" if sys.stderr.isatty() else ""
    os.write(2, f"{start}{text}\n".encode(errors="replace"))
