"""``provision``, ``teardown``, ``ps`` and ``reap``: what is rented, from its beginning to its proven end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from gpu_flows.cli.exits import Exit
from gpu_flows.cli.flags import CONFIG, OWNER, RENTING, WHERE
from gpu_flows.cli.output import Cell, Column, Output, length, usd
from gpu_flows.cli.session import clouds_of, command_for, fresh_name, installation, owner_named, shown
from gpu_flows.cli.verbs import Flag, Given, verb
from gpu_flows.errors import BadRequest, GpuFlowsError
from gpu_flows.progress import counted

if TYPE_CHECKING:
    from gpu_flows.clouds.base import Cloud
    from gpu_flows.leases.ending import EndedBox
    from gpu_flows.leases.reaper import Sighting, Survey
    from gpu_flows.runs.installation import Installation


@verb([OWNER, *RENTING, CONFIG])
def provision(given: Given, output: Output) -> int:
    """Rent boxes and keep them; `launch`, `ssh` and `teardown` find them by the owner.

    Repeating it with the same owner finds the boxes instead of renting more. They end themselves at their
    deadline, whatever happens here.
    """
    from gpu_flows.cli.asked import Asked
    from gpu_flows.cli.interrupts import Interrupts
    from gpu_flows.leases.lease import Owner
    from gpu_flows.runs.steps import provision_box, reserve, teardown_box

    asked = Asked.of(given)
    owner = Owner.parse(asked.following.get("owner") or fresh_name("box"))
    with installation(output) as here:
        wanted = asked.rental(here.settings)
        lease = reserve(owner, wanted, installation=here)
        with Interrupts(here, owner):
            output.screen.waiting(f"renting {wanted.nodes} x {wanted.request} on {', '.join(wanted.clouds)}")
            try:
                lease, attempts = provision_box(lease, wanted, installation=here)
            except KeyboardInterrupt:
                teardown_box(lease, installation=here, sole_creator=True)
                raise
    document = {
        **lease.to_json(),
        "usd_per_hour": lease.usd_per_hour,
        "deadline": lease.deadline.isoformat() if lease.deadline else None,
        "offers_walked": len(attempts),
    }
    output.table(
        document,
        [
            Column("node", right=True),
            Column("box"),
            Column("GPUs"),
            Column("$/h", right=True),
            Column("address"),
        ],
        [
            (
                str(leased.node),
                f"{leased.box.cloud} {leased.box.id}",
                f"{leased.box.gpu_count} x {leased.box.gpu}" if leased.box.gpu else "cpu",
                usd(leased.box.usd_per_hour),
                f"{leased.box.endpoint.host}:{leased.box.endpoint.port}" if leased.box.endpoint else "-",
            )
            for leased in lease.boxes
        ],
    )
    boxes = counted(len(lease.boxes), "box", "boxes")
    output.say(
        f"{shown(owner)} holds {boxes} for {usd(lease.usd_per_hour)} dollars per hour, at most until "
        f"{lease.deadline:%Y-%m-%d %H:%M} UTC"
    )
    output.command(command_for("teardown", owner))
    return Exit.OK


@verb(
    [
        OWNER,
        *WHERE,
        Flag("timeout_s", float, "How long to go on trying. Default 600.", "Whose boxes", metavar="SECONDS"),
    ]
)
def teardown(given: Given, output: Output) -> int:
    """End every box of an owner, in every state that bills, and prove that all are gone.

    Nothing is needed from whoever rented them, and repeating it does no harm. Without --clouds it looks where
    this machine knows of, else at every configured cloud.
    """
    from gpu_flows.cli.interrupts import Interrupts
    from gpu_flows.leases.teardown import TeardownFailed
    from gpu_flows.runs.steps import TEARDOWN_TIMEOUT_S, teardown_box

    owner = owner_named(given.get("owner"))
    with installation(output) as here, Interrupts(here, owner):
        output.screen.waiting(f"ending the boxes of {shown(owner)}")
        try:
            report = teardown_box(
                owner,
                installation=here,
                clouds=clouds_of(given),
                timeout_s=given.get("timeout_s", TEARDOWN_TIMEOUT_S),
            )
        except TeardownFailed as error:
            _show_ended(
                output, {"ok": False, "owner": list(owner.parts), "left": list(error.failures)}, error.ended
            )
            raise
    _show_ended(output, {"ok": True, **report.to_json(), "left": []}, report.ended)
    for reason in report.not_asked:
        output.say(f"not asked, and nothing can have been rented there: {reason}")
    output.say(f"nothing of {shown(owner)} is left" + ("" if report.ended else "; there was nothing to end"))
    return Exit.OK


@verb([Flag("all", bool, "Show other installations' boxes and look-alikes, too."), *WHERE])
def ps(given: Given, output: Output) -> int:
    """List the boxes of this installation on every configured cloud, and what they have cost so far."""
    from gpu_flows.leases.reaper import Standing

    ours = {Standing.HELD, Standing.EXPIRED, Standing.ORPHANED}
    with installation(output) as here:
        _, found = _survey(here, given, output)
    boxes = [each for each in found.sightings if given.get("all") or each.standing in ours]
    total = sum(each.box.usd_per_hour or 0.0 for each in boxes if each.standing in ours)
    output.table(
        {
            "boxes": [each.to_json() for each in boxes],
            "usd_per_hour": total,
            "unknown": list(found.unknown),
        },
        _BOX_COLUMNS,
        map(_box_row, boxes),
    )
    if boxes:
        output.say(f"{counted(len(boxes), 'box', 'boxes')}, {usd(total)} dollars per hour")
    elif not found.unknown:
        output.say("no boxes")
    return _exit_for(found, output)


@verb(
    [
        Flag("yes", bool, "End them; without it, only show what would be ended.", spelled=("--yes", "-y")),
        *WHERE,
    ]
)
def reap(given: Given, output: Output) -> int:
    """End the boxes that are past their deadline, or whose owner has ended.

    Without --yes it only shows them. Boxes of other installations are never touched.
    """
    from gpu_flows.leases.reaper import ReapFailed, Standing
    from gpu_flows.leases.reaper import reap as end

    with installation(output) as here:
        clouds, found = _survey(here, given, output)
        due = [each for each in found.sightings if each.standing in (Standing.EXPIRED, Standing.ORPHANED)]
        ended: Sequence[EndedBox] = ()
        failure: ReapFailed | None = None
        if given.get("yes") and due:
            output.screen.waiting(f"ending {counted(len(due), 'box', 'boxes')}")
            try:
                ended = end(
                    found, clouds, journals=here.settings.journals, clock=here.clock, listener=output.screen
                )
            except ReapFailed as error:
                ended, failure = error.ended, error
    output.table(
        {
            "ok": failure is None and not found.unknown,
            "dry_run": not given.get("yes"),
            "due": [each.to_json() for each in due],
            "ended": [box.to_json() for box in ended],
            "unknown": list(found.unknown),
        },
        _BOX_COLUMNS,
        map(_box_row, due),
    )
    if failure is not None:
        raise failure
    if not due:
        output.say("nothing to reap")
    elif given.get("yes"):
        output.say(f"{counted(len(ended), 'box', 'boxes')} ended and proven gone")
    else:
        output.say(f"{counted(len(due), 'box', 'boxes')} would be ended; `gpu-flows reap --yes` ends them")
    return _exit_for(found, output)


_BOX_COLUMNS = (
    Column("owner", whole=False),
    Column("box"),
    Column("state"),
    Column("GPUs"),
    Column("$/h", right=True),
    Column("age", right=True),
    Column("ends in", right=True),
    Column("cost", right=True),
)
_STATE_STYLES = {"running": "green", "starting": "yellow"}


def _box_row(seen: Sighting) -> tuple[str | Cell, ...]:
    box, name = seen.box, seen.name
    state = box.state.value if seen.standing.value == "held" else f"{box.state.value}, {seen.standing.value}"
    left = name.deadline - seen.seen_at if name else None
    return (
        shown(seen.owner, name.lease if name else None) if name else box.name,
        f"{seen.cloud} {box.id}",
        Cell(state, _STATE_STYLES.get(state, "red")),
        f"{box.gpu_count} x {box.gpu}" if box.gpu else "cpu",
        usd(box.usd_per_hour),
        length(seen.seen_at - name.created) if name else "?",
        "?" if left is None else Cell("over", "red") if left <= timedelta(0) else length(left),
        usd(seen.usd_so_far),
    )


def _survey(here: Installation, given: Given, output: Output) -> tuple[list[Cloud], Survey]:
    """Look at the clouds that were named, else at every configured one."""
    from dataclasses import replace

    from gpu_flows.clouds.base import ref_of
    from gpu_flows.leases.reaper import survey

    named = clouds_of(given)
    clouds: list[Cloud] = []
    unopened: list[str] = []
    refs = named or here.configured_clouds()
    for ref in refs:
        try:
            clouds.append(here.cloud(ref))
        except BadRequest:
            raise
        except GpuFlowsError as error:
            if named:
                raise
            unopened.append(f"{ref}: {error}")
    namespace = here.namespace([ref_of(cloud) for cloud in clouds])
    output.screen.waiting(f"asking {counted(len(clouds), 'cloud')}")
    found = survey(
        clouds, namespace, journals=here.settings.journals, liveness=here.liveness, clock=here.clock
    )
    return clouds, replace(found, unknown=(*found.unknown, *unopened))


def _show_ended(output: Output, document: dict[str, object], ended: Sequence[EndedBox]) -> None:
    from gpu_flows.leases.cost import cost_of_ended

    output.table(
        {**document, "ended": [box.to_json() for box in ended], "cost": cost_of_ended(ended).to_json()},
        [Column("ended"), Column("at"), Column("cost", right=True)],
        [
            (f"{box.cloud} {box.id}", f"{box.ended_at:%H:%M:%S} UTC", str(cost_of_ended([box])))
            for box in ended
        ],
    )


def _exit_for(found: Survey, output: Output) -> int:
    """Name the clouds that could not be asked: they may hold anything."""
    for reason in found.unknown:
        output.failed("CLOUD_UNKNOWN", f"cannot be asked, so it may hold boxes: {reason}")
    return Exit.MAY_BILL if found.unknown else Exit.OK


COMMANDS = {"provision": provision, "teardown": teardown, "ps": ps, "reap": reap}
