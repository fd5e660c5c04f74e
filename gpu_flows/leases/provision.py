"""Walking the offers until every node of a lease stands, is ready, and is what was promised.

All of failing over happens here; what is not promised any more is destroyed before the next offer is tried,
and only what this attempt created.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds.base import Box, Cloud, ref_of
from gpu_flows.clouds.errors import (
    CapacityUnavailable,
    CloudError,
    NotOffered,
    PriceTooHigh,
    Scope,
    UnexpectedAnswer,
)
from gpu_flows.endpoint import SshEndpoint
from gpu_flows.errors import GpuFlowsError
from gpu_flows.leases.blocked import BlockedScopes
from gpu_flows.leases.ending import NotProvenGone, cloud_now, end_box
from gpu_flows.leases.journal import Journal
from gpu_flows.leases.lease import BoxName, Lease, LeaseConflict, LeasedBox
from gpu_flows.leases.liveness import OwnerLiveness
from gpu_flows.leases.parallel import in_parallel
from gpu_flows.leases.shield import shielded
from gpu_flows.offers import Offer, OfferQuery
from gpu_flows.progress import Listener, Progress, ignore

MAX_CLOCK_SKEW_S = 300.0
END_TIMEOUT_S = 180.0


class BoxCheck(Protocol):
    """Reaches a box over SSH and tells whether it is what was promised."""

    def __call__(
        self, box: Box, offer: Offer | None, *, timeout_s: float
    ) -> tuple[SshEndpoint, Mapping[str, Any]]:
        """Check a box.

        Args:
            box: A box that has an address.
            offer: What was promised; None for a box that an earlier attempt rented.
            timeout_s: How long one try may take.

        Returns:
            The endpoint with its host key pinned, and what the box says about itself.

        Raises:
            BoxNotReady: It does not answer yet; worth another try.
            BoxCheckFailed: It answers, and is not what was promised.
        """
        ...


class OwnerEnded(GpuFlowsError):
    """The owner no longer wants its boxes, so nothing more is rented for it."""

    code = "OWNER_ENDED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Under which a lease may be filled.

    Attributes:
        query: What is wanted.
        offers: Returns the offers worth walking, best first, unavailable ones last with their reason; called
            again for each round of waiting for capacity.
        price_cap: Dollars per hour for one whole box; None for no cap.
        max_duration: How long the job may run.
        ready_timeout_s: Per box until checked; None for the cloud's own default.
        wait_for_capacity: How long to go on asking.
        image: Image to boot, by cloud; the key "" is for every cloud.
        allow_unreaped: Rent also where a box cannot end its own billing.
    """

    query: OfferQuery
    offers: Callable[[], Sequence[Offer]]
    price_cap: float | None = None
    max_duration: timedelta = timedelta(hours=24)
    ready_timeout_s: float | None = None
    wait_for_capacity: timedelta = timedelta(0)
    image: Mapping[str, str] = field(default_factory=dict)
    allow_unreaped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One offer that was walked.

    Attributes:
        cloud: ``cloud`` or ``cloud@account``.
        region: Where.
        instance_type: What.
        gpu: The GPUs, as ``model:count``; empty for CPU.
        usd_per_hour: The price it was offered for.
        code: ``OK``, or the code of what went wrong.
        reason: What went wrong, as a sentence.
        seconds: How long it took.
        box_ids: Boxes that were created on the way.
        kept: Of these, the ones that could not be proven gone.
        tried: Whether a create call was sent; otherwise it was known beforehand that none would do.
    """

    cloud: str
    region: str
    instance_type: str
    gpu: str
    usd_per_hour: float
    code: str
    reason: str = ""
    seconds: float = 0.0
    box_ids: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    tried: bool = False


class ProvisionError(GpuFlowsError):
    """No offer led to the boxes that were asked for.

    Args:
        message: Why, in a sentence.
        attempts: Every offer that was walked, with its cause.
        code: ``CAPACITY_UNAVAILABLE`` when lack of capacity is all there was to it.
    """

    def __init__(
        self, message: str, *, attempts: Sequence[Attempt], code: str, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.attempts = tuple(attempts)
        self.code = code  # type: ignore[misc]  # narrower than the class's own


class Provisioner:
    """Fills leases from several clouds.

    Args:
        clouds: The opened accounts, in order.
        journal: This machine's journal of the lease.
        public_key: Returns the SSH public key line for a cloud's account.
        boot_script: Returns the dead-man for a deadline and the sh text by which a box ends itself.
        check: Reaches a box and compares it with its promise.
        liveness: Knows whether the owner still wants its boxes.
        job_started: Tells whether a job was started on a box; it decides which of two boxes stays.
        blocked: Failures that are still worth remembering.
        clock: Time and sleep.
        listener: Told what happens.
    """

    def __init__(
        self,
        clouds: Sequence[Cloud],
        *,
        journal: Journal,
        public_key: Callable[[Cloud], str],
        boot_script: Callable[..., str],
        check: BoxCheck,
        liveness: OwnerLiveness | None = None,
        job_started: Callable[[Box], bool] = lambda _: False,
        blocked: BlockedScopes | None = None,
        clock: Clock = SYSTEM_CLOCK,
        listener: Listener = ignore,
    ) -> None:
        from gpu_flows.leases.renting import Renting

        self.clouds = {ref_of(cloud): cloud for cloud in clouds}
        self.journal = journal
        self.check = check
        self.liveness = liveness
        self.job_started = job_started
        self.blocked = blocked or BlockedScopes(clock)
        self.clock = clock
        self.listener = listener
        self.renting = Renting(
            journal=journal, public_key=public_key, boot_script=boot_script, clock=clock, listener=listener
        )

    def provision(self, lease: Lease, terms: Terms) -> tuple[Lease, list[Attempt]]:
        """Fill a lease, starting from what an earlier attempt of the same owner may have left.

        Args:
            lease: The lease, with its number of nodes.
            terms: Under which it may be filled.

        Returns:
            The lease with its checked boxes, and every offer that was walked.

        Raises:
            ProvisionError: When no offer led there.
            LeaseConflict: When a box of this lease exists that cannot serve the request.
            OwnerEnded: When the owner no longer wants it.
            SuspectedLeak: When a create may have gone through and its cloud cannot be asked.
        """
        attempts: list[Attempt] = []
        adopted: list[LeasedBox] = []
        unlisted = self._adopt_or_clear(lease, terms, adopted)
        if len(adopted) == lease.nodes:
            return self._ready_adopted(lease, terms, adopted), attempts
        until = self.clock.monotonic() + terms.wait_for_capacity.total_seconds()
        pause_s = 15.0
        while True:
            boxes = self._walk(lease, terms, attempts, unlisted)
            if boxes is not None:
                return lease.with_boxes(boxes), attempts
            left_s = until - self.clock.monotonic()
            if left_s <= 0 or not _waiting_helps(attempts):
                raise _give_up(attempts)
            # What was not even tried is judged anew in the next round.
            attempts[:] = [attempt for attempt in attempts if attempt.tried]
            # Jitter: a fleet of waiting runs must not ask in step.
            wait_s = min(left_s, pause_s * random.uniform(0.7, 1.3))  # noqa: S311
            self._tell("capacity.waiting", f"nothing to rent now, asking again in {wait_s:.0f} s")
            self.clock.sleep(wait_s)
            pause_s = min(pause_s * 1.7, 300.0)

    def settle_duplicates(self, lease: Lease) -> Lease:
        """Look across all clouds of the lease, and leave one box for each node.

        A box on which a job was started stays, else the oldest. Called after each create, before the job
        starts, and at the first renewal after the clouds' lag.

        Raises:
            BoxLost: When a box of the lease is not the one that stays, so that this attempt has to yield.
        """
        from gpu_flows.clouds.errors import BoxLost

        stays = self._survivors(lease)
        for leased in lease.boxes:
            other = stays.get(leased.node)
            if other is not None and other.id != leased.box.id:
                raise BoxLost(
                    f"node {leased.node} is held by the box {other.id} of another attempt of this owner"
                )
        return lease

    # What an earlier attempt left

    def _adopt_or_clear(self, lease: Lease, terms: Terms, adopted: list[LeasedBox]) -> dict[str, str]:
        """Adopt what serves, end what is dead, and return the clouds that could not be asked."""
        found, unlisted = self._find(lease)
        for ref, reason in unlisted.items():
            self._tell("cloud.unlisted", f"{ref} cannot be asked, so nothing is rented there: {reason}")
        for ref, name, box in found:
            if name.node >= lease.nodes or not box.state.may_serve:
                self._end(ref, box)
        stays = self._survivors(lease)
        for node, box in sorted(stays.items()):
            parsed = BoxName.parse(box.name)
            if parsed is None or node >= lease.nodes:
                continue
            cap = terms.price_cap
            if cap is not None and (box.usd_per_hour or 0.0) > cap:
                raise LeaseConflict(
                    f"box {box.id} of this owner costs {box.usd_per_hour:.2f} dollars per hour, above the cap "
                    f"of {cap:.2f}",
                    hint="tear the lease down first, or raise the cap",
                )
            adopted.append(LeasedBox(node=node, box=box, created_at=parsed.created))
        if 0 < len(adopted) < lease.nodes:
            # A gang that lacks a node cannot work; whoever rented it failed half-way.
            for leased in adopted:
                self._end(leased.box.ref, leased.box)
            adopted.clear()
        return unlisted

    def _ready_adopted(self, lease: Lease, terms: Terms, adopted: Sequence[LeasedBox]) -> Lease:
        self._tell("box.adopted", f"{lease.owner} holds its boxes already: using them")
        ready = in_parallel(
            [partial(self._make_ready, leased, terms) for leased in adopted], interruptible=True
        )
        for outcome in ready:
            if isinstance(outcome, Exception):
                raise outcome
        return lease.with_boxes([leased for leased in ready if isinstance(leased, LeasedBox)])

    def _find(self, lease: Lease) -> tuple[list[tuple[str, BoxName, Box]], dict[str, str]]:
        from gpu_flows.leases.lease import boxes_of

        outcomes = in_parallel(
            [partial(cloud.find, lease.prefix) for cloud in self.clouds.values()], interruptible=True
        )
        found: list[tuple[str, BoxName, Box]] = []
        unlisted: dict[str, str] = {}
        for ref, outcome in zip(self.clouds, outcomes, strict=True):
            if isinstance(outcome, CloudError):
                unlisted[ref] = f"{outcome.code}: {outcome}"
            elif isinstance(outcome, Exception):
                raise outcome
            else:
                found += [(ref, name, box) for name, box in boxes_of(outcome, lease.namespace, lease.id)]
        return found, unlisted

    def _survivors(self, lease: Lease) -> dict[int, Box]:
        """Return the box that stays for each node, after ending the other live ones."""
        by_node: dict[int, list[tuple[str, BoxName, Box]]] = {}
        for ref, name, box in self._find(lease)[0]:
            if box.state.may_serve:
                by_node.setdefault(name.node, []).append((ref, name, box))
        stays: dict[int, Box] = {}
        for node, candidates in by_node.items():
            candidates.sort(key=lambda item: (item[1].created, item[1].nonce))
            winner = candidates[0]
            if len(candidates) > 1:
                winner = next((item for item in candidates if self.job_started(item[2])), winner)
                for ref, _, box in candidates:
                    if box.id != winner[2].id:
                        self._tell(
                            "box.duplicate", f"ending {ref} box {box.id}: a second one for node {node}"
                        )
                        self._end(ref, box)
            stays[node] = winner[2]
        return stays

    # Walking

    def _walk(
        self, lease: Lease, terms: Terms, attempts: list[Attempt], unlisted: Mapping[str, str]
    ) -> list[LeasedBox] | None:
        for offer in terms.offers():
            ref = offer.ref
            started = self.clock.monotonic()
            reason = offer.unavailable
            code = CapacityUnavailable.code
            if ref in unlisted:
                reason, code = f"its boxes cannot be listed: {unlisted[ref]}", UnexpectedAnswer.code
            elif reason is None and (why := self.blocked.why(offer)) is not None:
                code, _, reason = why.partition(": ")
            if reason is not None:
                attempts.append(_attempt(offer, code, reason))
                continue
            self._still_wanted(lease)
            created: list[LeasedBox] = []
            try:
                boxes = self._rent_gang(lease, offer, terms, created)
            except CloudError as error:
                kept = self._discard(_at_the_real_price(created, error))
                attempts.append(
                    replace(
                        _attempt(offer, error.code, str(error)),
                        seconds=self.clock.monotonic() - started,
                        box_ids=tuple(leased.box.id for leased in created),
                        kept=tuple(kept),
                        tried=True,
                    )
                )
                self._tell("offer.failed", f"{_label(offer)}: {error}", code=error.code)
                if error.scope is Scope.REQUEST:
                    raise _give_up(attempts) from error
                self.blocked.block(offer, error)
                continue
            except GpuFlowsError:
                self._discard(created)
                raise
            seconds = self.clock.monotonic() - started
            box_ids = tuple(leased.box.id for leased in boxes)
            attempts.append(replace(_attempt(offer, "OK", ""), seconds=seconds, box_ids=box_ids, tried=True))
            return boxes
        return None

    def _rent_gang(
        self, lease: Lease, offer: Offer, terms: Terms, created: list[LeasedBox]
    ) -> list[LeasedBox]:
        """Rent every node by one offer, all or nothing."""
        cloud = self.clouds[offer.ref]
        self._may_rent(cloud, lease, terms)
        for outcome in in_parallel(
            [
                partial(self.renting.rent, cloud, lease, node, offer, terms, created)
                for node in range(lease.nodes)
            ]
        ):
            if isinstance(outcome, Exception):
                raise outcome
        self._still_wanted(lease)
        mine = {leased.node: leased for leased in created}
        for node, box in self._survivors(lease).items():
            if node in mine and mine[node].box.id != box.id:
                name = BoxName.parse(box.name)
                assert name is not None  # noqa: S101 - survivors are found by their parsed name
                mine[node] = LeasedBox(node=node, box=box, created_at=name.created)
        ready: list[LeasedBox] = []
        failed: list[Exception] = []
        for outcome in in_parallel(
            [partial(self._make_ready, leased, terms) for leased in mine.values()], interruptible=True
        ):
            if isinstance(outcome, Exception):
                failed.append(outcome)
            else:
                ready.append(outcome)
        if failed:
            raise failed[0]
        return ready

    def _may_rent(self, cloud: Cloud, lease: Lease, terms: Terms) -> None:
        abilities = cloud.capabilities
        if lease.nodes > 1 and not abilities.multi_node:
            raise NotOffered(f"{cloud.name} cannot connect {lease.nodes} boxes to each other")
        if not (abilities.self_destruct or abilities.native_timer or terms.allow_unreaped):
            raise NotOffered(
                f"a box of {cloud.name} cannot end its own billing when everything else has died",
                hint="run the reaper on a schedule and pass allow_unreaped=True",
            )
        skew_s = cloud.clock_skew_s() or 0.0
        if abs(skew_s) > MAX_CLOCK_SKEW_S:
            raise NotOffered(
                f"this machine's clock is {abs(skew_s):.0f} s away from the clock of {cloud.name}, so deadlines "
                "would be wrong",
                hint="synchronise the clock",
            )

    def _make_ready(self, leased: LeasedBox, terms: Terms) -> LeasedBox:
        from gpu_flows.leases.readiness import wait_until_ready

        cloud = self.clouds[leased.box.ref]
        ready = wait_until_ready(
            cloud,
            leased,
            check=self.check,
            price_cap=terms.price_cap,
            timeout_s=terms.ready_timeout_s or cloud.capabilities.ready_timeout_s,
            clock=self.clock,
        )
        self._tell(
            "box.ready",
            f"{ref_of(cloud)} box {ready.box.id} is ready",
            id=ready.box.id,
            node=ready.node,
            facts=dict(ready.facts),
        )
        return replace(ready, ready_at=cloud_now(cloud, self.clock))

    def _discard(self, created: Sequence[LeasedBox]) -> list[str]:
        """End what this attempt created; return the ids that could not be proven gone."""
        outcomes = in_parallel([partial(self._end, item.box.ref, item.box) for item in created])
        return [
            item.box.id
            for item, outcome in zip(created, outcomes, strict=True)
            if isinstance(outcome, NotProvenGone)
        ]

    def _end(self, ref: str, box: Box) -> None:
        shielded(
            partial(
                end_box,
                self.clouds[ref],
                box,
                clock=self.clock,
                timeout_s=END_TIMEOUT_S,
                journal=self.journal,
                listener=self.listener,
            )
        )

    def _still_wanted(self, lease: Lease) -> None:
        if self.liveness and self.liveness.wants(lease.owner, lease.namespace, lease.id) is False:
            raise OwnerEnded(f"{lease.owner} has ended: nothing is rented for it any more")

    def _tell(self, kind: str, message: str, **data: Any) -> None:
        self.listener(Progress("provision", kind, message, data))


def _at_the_real_price(created: Sequence[LeasedBox], error: CloudError) -> list[LeasedBox]:
    """Return what was created, priced as the cloud now says: the bill has to hold the actual rate."""
    if not isinstance(error, PriceTooHigh):
        return list(created)
    return [
        replace(
            item, box=replace(item.box, usd_per_hour=max(item.box.usd_per_hour or 0.0, error.usd_per_hour))
        )
        for item in created
    ]


def _label(offer: Offer) -> str:
    where = f" in {offer.zone or offer.region}" if offer.zone or offer.region else ""
    return f"{offer.ref} {offer.instance_type}{where}"


def _attempt(offer: Offer, code: str, reason: str) -> Attempt:
    return Attempt(
        cloud=offer.ref,
        region=offer.zone or offer.region,
        instance_type=offer.instance_type,
        gpu=f"{offer.gpu}:{offer.gpu_count}" if offer.gpu else "",
        usd_per_hour=offer.usd_per_hour,
        code=code,
        reason=reason,
    )


def _capacity_only(attempts: Sequence[Attempt]) -> bool:
    return all(attempt.code in _CAPACITY_CODES for attempt in attempts)


def _waiting_helps(attempts: Sequence[Attempt]) -> bool:
    """Tell whether some cloud may have in a while what it has not now."""
    return not attempts or any(attempt.code in _CAPACITY_CODES for attempt in attempts)


_CAPACITY_CODES = {CapacityUnavailable.code, "BOX_NOT_READY", "BOX_LOST", "BOX_CHECK_FAILED", "RATE_LIMITED"}


def _give_up(attempts: Sequence[Attempt]) -> ProvisionError:
    if not attempts:
        return ProvisionError(
            "no cloud offers what was asked for", attempts=attempts, code=CapacityUnavailable.code
        )
    lines = [
        f"  {a.cloud} {a.instance_type}{' in ' + a.region if a.region else ''}: {a.code}: {a.reason}"
        for a in attempts
    ]
    shown = lines if len(lines) <= 12 else [*lines[:10], f"  ... and {len(lines) - 10} more"]
    codes = {attempt.code for attempt in attempts}
    code = CapacityUnavailable.code if _capacity_only(attempts) else "PROVISION_FAILED"
    code = next(iter(codes)) if len(codes) == 1 else code
    return ProvisionError(
        f"none of {len(attempts)} offers led to the boxes asked for:\n" + "\n".join(shown),
        attempts=attempts,
        code=code,
    )
