"""Following a job to its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from airflow_provider.triggers.beside import Beside


class FollowJobTrigger(BaseTrigger):
    """Follow a job on the boxes of an owner: its log, the boxes' heartbeat, its limits.

    How far the log was delivered is kept on the triggerer's disk, in the folder of the run: a triggerer that
    starts again there goes on at exactly the next byte. It has no ``on_kill``: the box goes in the teardown,
    and the job with it; stopping the job from here would also hit the next attempt of a task that was cleared.

    The event says ``status``: ``ended`` (with the ``diagnosis``), ``timeout``, or ``error`` (when the boxes or
    the job could not be found or reached, which the worker judges).

    Args:
        owner: The parts of the owner.
        clouds: Where its boxes are; None for every configured cloud.
        spec: What runs, as `TrainingSpec.to_json` gives it.
        key: Tells the job from others on the same boxes.
        nproc: Processes on each node.
        until: When to give up, in ISO format; Airflow enforces no timeout on a deferred task.
        heartbeat_timeout_s: How long the boxes live on without hearing from us.
        max_cost: Dollars for all boxes of the lease.
    """

    def __init__(
        self,
        *,
        owner: Sequence[str],
        clouds: Sequence[str] | None,
        spec: dict[str, Any],
        key: str,
        nproc: int,
        until: str,
        heartbeat_timeout_s: float | None = 1800,
        max_cost: float | None = None,
    ) -> None:
        super().__init__()
        self.owner = list(owner)
        self.clouds = list(clouds) if clouds is not None else None
        self.spec = spec
        self.key = key
        self.nproc = nproc
        self.until = until
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.max_cost = max_cost

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return what rebuilds the trigger; it holds no secret but the values of ``env``."""
        names = ("owner", "clouds", "spec", "key", "nproc", "until", "heartbeat_timeout_s", "max_cost")
        return f"{__name__}.FollowJobTrigger", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Follow, and tell how it ended."""
        from airflow_provider.triggers.beside import Beside

        call = _Cancellable()
        beside = Beside(lambda log: self._follow(log, call), call.cancel)
        left_s = (datetime.fromisoformat(self.until) - datetime.now(UTC)).total_seconds()
        over = False
        try:
            async with asyncio.timeout(max(1.0, left_s)), aclosing(beside.lines()) as lines:
                async for level, line in lines:
                    self.log.log(level, "%s", line)
        except TimeoutError:
            over = True
            await self._log_rest(beside)
        except asyncio.CancelledError:
            # The triggerer stops, or somebody has acted on the task: what has been received is still delivered.
            await self._log_rest(beside)
            raise
        if over:
            yield TriggerEvent({"status": "timeout", "error": f"the job still ran at {self.until}"})
        elif beside.failure is not None:
            error = beside.failure
            yield TriggerEvent({"status": "error", "error": f"{type(error).__name__}: {error}"})
        else:
            yield TriggerEvent({"status": "ended", "diagnosis": beside.result})

    async def _log_rest(self, beside: Beside) -> None:
        for level, line in await beside.drain():
            self.log.log(level, "%s", line)

    def _follow(self, log: Beside, call: _Cancellable) -> dict[str, Any]:
        """Find the boxes and follow the job; runs in a thread of its own."""
        from dataclasses import replace

        from airflow_provider.installation import find_secret, open_installation
        from airflow_provider.operators.training import shown
        from gpu_flows.leases.lease import Owner
        from gpu_flows.remote.loop import blocking
        from gpu_flows.runs.lookup import find_lease
        from gpu_flows.runs.run import Following, launch_options
        from gpu_flows.runs.steps import prepared_launch
        from gpu_flows.training.spec import TrainingSpec

        spec = TrainingSpec(**self.spec)
        # Not for the job, which has them: for the masking of its log.
        secrets = spec.resolve_secrets(find_secret)
        with open_installation(log) as here:
            lease = find_lease(Owner(tuple(self.owner)), here, clouds=self.clouds, inspects=False)
            following = Following(
                key=self.key,
                heartbeat_timeout_s=self.heartbeat_timeout_s,
                show_line=lambda where, line: log.info("%s", shown(where, line)),
            )
            options = launch_options(
                lease, following, installation=here, secrets=secrets, max_cost=self.max_cost
            )
            launched = prepared_launch(
                lease, spec, nproc=self.nproc, installation=here, options=replace(options, only_attach=True)
            )
            result = blocking(call.run(launched))
        if result.diagnosis is None:
            raise RuntimeError("the job was not followed to its end")
        data: dict[str, Any] = {**result.diagnosis.to_json(), "port_taken": result.diagnosis.port_taken}
        return data


class _Cancellable:
    """A coroutine on another loop that can be cancelled from outside, also before it has begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cancelled = False

    async def run(self, coro: Coroutine[Any, Any, Any]) -> Any:
        """Run it, unless it was cancelled before."""
        with self._lock:
            if self._cancelled:
                coro.close()
                raise asyncio.CancelledError
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await coro

    def cancel(self) -> None:
        """Cancel it, or keep it from beginning."""
        with self._lock:
            self._cancelled = True
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)
