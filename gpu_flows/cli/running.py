"""``run``, ``launch`` and ``attach``: a training, from its request to its report."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_flows.cli.asked import Asked
from gpu_flows.cli.exits import MAY_BILL_CODES, Exit
from gpu_flows.cli.flags import FOLLOWING, MAX_COST, MAX_PREEMPTIONS, OWNER, RENTING, TRAINING, WHERE
from gpu_flows.cli.output import Output, length
from gpu_flows.cli.session import clouds_of, command_for, fresh_name, installation, owner_named
from gpu_flows.cli.verbs import Flag, Given, verb

if TYPE_CHECKING:
    from gpu_flows.runs.report import RunReport
    from gpu_flows.runs.run import DryRun, Following

_SCRIPT_ARGUMENTS = "SCRIPT ARGUMENTS"
_MAX_DURATION = tuple(flag for flag in RENTING if flag.name == "max_duration")


@verb(
    [
        *TRAINING,
        *RENTING,
        MAX_COST,
        OWNER,
        *FOLLOWING,
        MAX_PREEMPTIONS,
        Flag(
            "dry_run",
            bool,
            "Show the offers, the create calls and the command lines; spend nothing.",
            "Output",
        ),
    ],
    rest=_SCRIPT_ARGUMENTS,
)
def run(given: Given, output: Output) -> int:
    """Rent boxes, train on them, fetch the outputs, and give the boxes back, whatever happens.

    Ctrl-C tears down. A run that is repeated with the --owner of a detached one follows its job.
    """
    from gpu_flows.cli.interrupts import Interrupts
    from gpu_flows.leases.lease import Owner
    from gpu_flows.runs.run import dry_run
    from gpu_flows.runs.run import run as carry_out

    only_shown = given.pop("dry_run", False)
    asked = Asked.of(given)
    parameters = asked.parameters
    owner = Owner.parse(asked.following.get("owner") or fresh_name(asked.training["entrypoint"]))
    with installation(output) as here:
        if only_shown:
            return _show_plan(dry_run(name=owner, installation=here, **parameters), output)
        following = _following(asked, output)
        with Interrupts(here, owner):
            output.screen.waiting("checking")
            report = carry_out(name=owner, installation=here, following=following, **parameters)
    return show_report(report, output)


@verb([OWNER, *TRAINING, *_MAX_DURATION, *WHERE, *FOLLOWING], rest=_SCRIPT_ARGUMENTS)
def launch(given: Given, output: Output) -> int:
    """Run a training on the boxes that an owner holds, follow it to its end, and fetch its outputs.

    The boxes stay. Repeated with the same entrypoint and arguments, it follows the job that runs already. Ctrl-C
    ends only the following: `attach` takes it up again.
    """
    from gpu_flows.cli.interrupts import Interrupts
    from gpu_flows.runs.launching import launch_held

    asked = Asked.of(given)
    owner = owner_named(asked.following.get("owner"))
    spec = asked.spec()
    following = _following(asked, output)
    silence_s = following.heartbeat_timeout_s
    with installation(output) as here, Interrupts(here, owner, ends=False, silence_s=silence_s):
        output.screen.waiting("looking for the boxes")
        report = launch_held(
            owner, spec, installation=here, clouds=clouds_of(asked.renting), following=following
        )
    return show_report(report, output, silence_s=silence_s)


@verb(
    [
        OWNER,
        *WHERE,
        Flag("outputs_to", str, "Folder for the outputs. Default: where the launch said.", metavar="FOLDER"),
        Flag("teardown", bool, "End the boxes afterwards."),
        *(flag for flag in FOLLOWING if flag.name == "heartbeat_timeout_s"),
    ]
)
def attach(given: Given, output: Output) -> int:
    """Follow the job of an owner to its end, fetch its outputs, and report; the boxes stay.

    For jobs that were started with --detach, or whose launch was cut off.
    """
    from gpu_flows.cli.interrupts import Interrupts
    from gpu_flows.runs.launching import attach as follow

    owner = owner_named(given.get("owner"))
    outputs_to = Path(given["outputs_to"]).expanduser() if "outputs_to" in given else None
    following = _following(Asked(training={}, renting={}, following=given), output)
    silence_s = following.heartbeat_timeout_s
    with installation(output) as here, Interrupts(here, owner, ends=False, silence_s=silence_s):
        output.screen.waiting("looking for the boxes")
        report = follow(
            owner,
            installation=here,
            clouds=clouds_of(given),
            following=following,
            outputs_to=outputs_to,
            ends=given.get("teardown", False),
        )
    return show_report(report, output, silence_s=silence_s)


def show_report(report: RunReport, output: Output, *, silence_s: float | None = None) -> int:
    """Write a report, and what can be done now; return the exit code that it means.

    Args:
        report: The report.
        output: Where to.
        silence_s: How long boxes that were left live without anybody who follows them.
    """
    output.report(report.to_json(), report)
    if report.left or report.cause in MAY_BILL_CODES:
        output.say("not everything is proven gone; this tries again:")
        output.command(command_for("teardown", report.owner))
        return Exit.MAY_BILL
    if report.detached:
        if silence_s and report.cause != "running":
            span = length(timedelta(seconds=silence_s))
            output.say(f"the boxes end themselves when nothing is launched on them for {span}")
        for name in ("attach", "logs -f", "teardown") if report.cause == "running" else ("teardown",):
            output.command(command_for(name, report.owner))
    if report.cause in ("succeeded", "running"):
        return Exit.OK
    return Exit.FAILED if report.boxes is not None else Exit.NOTHING_RENTED


def _following(asked: Asked, output: Output) -> Following:
    from gpu_flows.runs.run import Following

    heartbeat_s = asked.following.get("heartbeat_timeout_s", Following().heartbeat_timeout_s)
    return Following(
        heartbeat_timeout_s=heartbeat_s or None,
        detach=asked.following.get("detach", False),
        max_preemptions=asked.following.get("max_preemptions", Following().max_preemptions),
        show_line=output.screen.log_line,
        upload_progress=output.screen.uploaded,
    )


def _show_plan(plan: DryRun, output: Output) -> int:
    output.report(plan.to_json(), plan)
    if plan.create:
        return Exit.OK
    output.failed("CAPACITY_UNAVAILABLE", plan.resolution.why_nothing())
    return Exit.NOTHING_RENTED


COMMANDS = {"run": run, "launch": launch, "attach": attach}
