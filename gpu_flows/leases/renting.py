"""One create call, and what its answer leaves open.

A create is sent once. Whatever the cloud answers, afterwards it is known whether the box exists: it is looked
for by the nonce in its name until the cloud's listing cannot lag behind any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu_flows.clock import Clock
from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Cloud, ref_of
from gpu_flows.clouds.errors import (
    CloudError,
    NotOffered,
    PriceTooHigh,
    Scope,
    SuspectedLeak,
    UnexpectedAnswer,
)
from gpu_flows.leases import journal as events
from gpu_flows.leases.deadman import HALT
from gpu_flows.leases.ending import cloud_now, end_box
from gpu_flows.leases.journal import Journal, JournalUnwritable
from gpu_flows.leases.lease import BoxName, Lease, LeasedBox, deadline_of, new_nonce
from gpu_flows.leases.shield import shielded
from gpu_flows.leases.suspects import described, suspected_boxes, unnamed_boxes
from gpu_flows.offers import Offer
from gpu_flows.progress import Listener, Progress

if TYPE_CHECKING:
    from gpu_flows.leases.provision import Terms

_END_TIMEOUT_S = 180.0
_REPEATS_OF_AN_IDEMPOTENT_CREATE = 2
_FIRST_LOOK_S, _LONGEST_PAUSE_S = 0.5, 15.0
_LOOK_AT_THEM = (
    "delete those that are nobody's, describe those that are somebody's, and tear the owner's lease down"
)


class Renting:
    """Sends creates and settles them.

    Args:
        journal: This machine's journal of the lease.
        public_key: Returns the SSH public key line for a cloud's account.
        boot_script: Returns the dead-man for a deadline and the sh text by which a box ends itself.
        clock: Time and sleep.
        listener: Told what happens.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        public_key: Callable[[Cloud], str],
        boot_script: Callable[..., str],
        clock: Clock,
        listener: Listener,
    ) -> None:
        self._journal = journal
        self._public_key = public_key
        self._boot_script = boot_script
        self._clock = clock
        self._listener = listener

    def rent(
        self, cloud: Cloud, lease: Lease, node: int, offer: Offer, terms: Terms, created: list[LeasedBox]
    ) -> LeasedBox:
        """Rent one box by one offer.

        Args:
            cloud: Who rents it out.
            lease: For whom.
            node: Index of the node.
            offer: What to rent.
            terms: The price cap, the durations, the image.
            created: Receives the box as soon as it exists, also if this call fails afterwards.

        Returns:
            The box, which may not have an address yet.

        Raises:
            CloudError: When there is none; the cloud is then known not to have made one.
            SuspectedLeak: When nobody can tell.
        """
        name, spec = self._spec(cloud, lease, node, terms)
        self._intend(cloud, spec)
        send = partial(self._send, cloud, offer, spec, node, name, created)
        try:
            leased = shielded(send)
        except CloudError as error:
            # Not shielded: a teardown after an interruption looks for the nonce just as well.
            leased = self._settle(cloud, offer, spec, node, name, created, error)
        cap, price = terms.price_cap, leased.box.usd_per_hour
        if cap is not None and price is not None and price > cap * (1 + 1e-9):
            raise PriceTooHigh(
                f"the box costs {price:.2f} dollars per hour, was offered for {offer.usd_per_hour:.2f}, and "
                f"the cap is {cap:.2f}",
                usd_per_hour=price,
            )
        if leased.box.gpu_count and offer.gpu_count and leased.box.gpu_count < offer.gpu_count:
            raise UnexpectedAnswer(
                f"the box has {leased.box.gpu_count} GPUs where {offer.gpu_count} were offered",
                ambiguous=False,
            )
        self._tell(
            "box.rented",
            f"rented {ref_of(cloud)} box {leased.box.id} ({offer.instance_type}) for "
            f"{leased.box.usd_per_hour or 0:.2f} dollars per hour, at most until {name.deadline:%Y-%m-%d %H:%M} UTC",
            id=leased.box.id,
            node=node,
            cloud=ref_of(cloud),
            name=spec.name,
            usd_per_hour=leased.box.usd_per_hour,
        )
        return leased

    def _spec(self, cloud: Cloud, lease: Lease, node: int, terms: Terms) -> tuple[BoxName, BoxSpec]:
        now = cloud_now(cloud, self._clock).replace(microsecond=0)
        ready_timeout_s = terms.ready_timeout_s or cloud.capabilities.ready_timeout_s
        deadline = deadline_of(now, ready_timeout_s=ready_timeout_s, max_duration=terms.max_duration)
        name = BoxName(
            namespace=lease.namespace,
            lease=lease.id,
            node=node,
            created=now,
            nonce=new_nonce(),
            deadline=deadline.replace(microsecond=0),
        )
        spec = BoxSpec(
            name=str(name),
            nonce=name.nonce,
            owner=str(lease.owner),
            ssh_public_key=self._public_key(cloud),
            deadline=name.deadline,
            image=terms.image.get(cloud.name, terms.image.get("")),
            disk_gb=terms.query.disk_gb,
        )
        self_destruct = cloud.self_destruct(spec)
        if self_destruct is None:
            return name, spec
        length_s = (name.deadline - now).total_seconds()
        # Where the cloud's API fails the dead-man for good, a halted machine at least works for nobody any more.
        last_resort = HALT if cloud.capabilities.whole_machine else ""
        boot = self._boot_script(name.deadline, self_destruct, length_s=length_s, last_resort=last_resort)
        return name, replace(spec, boot_script=boot)

    def _intend(self, cloud: Cloud, spec: BoxSpec) -> None:
        # Where a box is born without a name, only what was there before tells which one may be ours.
        before = {} if cloud.capabilities.names_at_create else {"unnamed": unnamed_boxes(cloud)}
        try:
            self._journal.record(events.INTENT, cloud=ref_of(cloud), name=spec.name, **before)
        except JournalUnwritable as error:
            if not cloud.capabilities.names_at_create:
                raise NotOffered(
                    f"{cloud.name} cannot be told a name, so nothing is rented there without a journal"
                ) from error
            self._tell("journal.unwritable", f"renting without a journal entry: {error}")

    def _send(
        self,
        cloud: Cloud,
        offer: Offer,
        spec: BoxSpec,
        node: int,
        name: BoxName,
        created: list[LeasedBox],
    ) -> LeasedBox:
        try:
            box = cloud.create(offer, spec)
        except CloudError:
            raise
        except Exception as error:
            # The adapter stumbled over the answer, so the call may well have gone through.
            raise UnexpectedAnswer(
                f"the create call to {ref_of(cloud)} ended in {type(error).__name__}: {error}"
            ) from error
        return self._accept(cloud, offer, box, node, name, created)

    def _accept(
        self, cloud: Cloud, offer: Offer, box: Box, node: int, name: BoxName, created: list[LeasedBox]
    ) -> LeasedBox:
        if box.usd_per_hour is None:
            box = replace(box, usd_per_hour=offer.usd_per_hour)
        leased = LeasedBox(node=node, box=box, offer=offer, created_at=name.created)
        created.append(leased)
        self._note(events.CREATED, cloud=ref_of(cloud), name=str(name), id=box.id, box=box.to_json())
        return leased

    def _settle(
        self,
        cloud: Cloud,
        offer: Offer,
        spec: BoxSpec,
        node: int,
        name: BoxName,
        created: list[LeasedBox],
        error: CloudError,
    ) -> LeasedBox:
        """Find out whether a failed create made a box: adopt it, or raise the error knowing that there is none."""
        for box_id in error.box_ids:
            suspect = Box(
                cloud=cloud.name,
                account=cloud.account,
                id=box_id,
                name=spec.name,
                state=BoxState.STARTING,
                usd_per_hour=offer.usd_per_hour,
                created_at=name.created,
                details={"billing_step_s": offer.billing_step_s, "minimum_minutes": offer.minimum_minutes},
            )
            # Known by its id, a later teardown ends it where we cannot.
            self._note(events.CREATED, cloud=ref_of(cloud), name=spec.name, id=box_id, box=suspect.to_json())
            self._end(cloud, suspect)
        if error.ambiguous and cloud.capabilities.idempotent_create:
            for _ in range(_REPEATS_OF_AN_IDEMPOTENT_CREATE):
                try:
                    return shielded(partial(self._send, cloud, offer, spec, node, name, created))
                except CloudError as again:
                    error = again
                    if not again.ambiguous:
                        break
        if error.ambiguous:
            self._tell("create.ambiguous", f"{ref_of(cloud)} did not say whether the box exists: {error}")
            box = self._look_for(cloud, spec, error)
            if box is not None:
                self._tell("create.adopted", f"{ref_of(cloud)} did make the box {box.id}: using it")
                return self._accept(cloud, offer, box, node, name, created)
        self._note(events.FAILED, cloud=ref_of(cloud), name=str(name), code=error.code)
        raise error

    def _look_for(self, cloud: Cloud, spec: BoxSpec, error: CloudError) -> Box | None:
        until = self._clock.monotonic() + cloud.capabilities.lag_s
        pause_s = _FIRST_LOOK_S
        while True:
            last_look = self._clock.monotonic() >= until
            try:
                found = [box for box in cloud.find(spec.name) if box.name == spec.name]
                suspects = suspected_boxes(cloud, self._journal) if last_look and not found else []
            except CloudError as unlisted:
                if last_look:
                    raise SuspectedLeak(
                        f"the create call to {ref_of(cloud)} failed ({error}), and whether it made a box cannot "
                        f"be found out: {unlisted}",
                        hint=f"look for a box named {spec.name}, or run the teardown of its owner again",
                        scope=Scope.REQUEST,
                    ) from error
            else:
                live = [box for box in found if box.state is not BoxState.GONE]
                for twin in live[1:]:
                    self._end(cloud, twin)
                if live:
                    return live[0]
                if suspects:
                    raise SuspectedLeak(
                        f"the create call to {ref_of(cloud)} failed ({error}), and {described(cloud, suspects)}",
                        hint=_LOOK_AT_THEM,
                    ) from error
                if last_look:
                    return None
            left_s = until - self._clock.monotonic()
            self._clock.sleep(max(0.0, min(pause_s, left_s)))
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def _end(self, cloud: Cloud, box: Box) -> None:
        shielded(
            partial(
                end_box,
                cloud,
                box,
                clock=self._clock,
                timeout_s=_END_TIMEOUT_S,
                journal=self._journal,
                listener=self._listener,
            )
        )

    def _note(self, event: str, **fields: Any) -> None:
        # The box exists already: losing its journal entry must not lose the box as well.
        with contextlib.suppress(JournalUnwritable):
            self._journal.record(event, **fields)

    def _tell(self, kind: str, message: str, **data: Any) -> None:
        self._listener(Progress("provision", kind, message, data))
