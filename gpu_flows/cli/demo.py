"""``demo``: a real training run on two boxes of this machine; nothing has to be configured."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from gpu_flows.cli.exits import Exit
from gpu_flows.cli.output import Output
from gpu_flows.cli.session import fresh_name, installation
from gpu_flows.cli.verbs import Flag, Given, verb


@verb([Flag("folder", str, "Where the checkpoint goes. Default: runs/demo/ and the time.", metavar="FOLDER")])
def demo(given: Given, output: Output) -> int:
    """Train a small network on handwritten digits with DDP, on two boxes of this machine, and give them back.

    Two boxes are rented from the embedded cloud, the code is uploaded over SSH, torchrun starts two processes on
    each, the checkpoint is fetched, and the boxes are proven gone.
    """
    from gpu_flows.cli.interrupts import Interrupts
    from gpu_flows.cli.running import show_report
    from gpu_flows.demo import LEAST_ACCURACY, check_installed, run_demo, settings_for
    from gpu_flows.leases.lease import Owner
    from gpu_flows.runs.run import Following
    from gpu_flows.settings import load_settings

    check_installed()
    told = given.get("folder") or f"runs/demo/{datetime.now().astimezone():%Y-%m-%d-%H%M%S}"
    folder = Path(told).expanduser()
    owner = Owner.parse(fresh_name("demo"))
    following = Following(show_line=output.screen.log_line, upload_progress=output.screen.uploaded)
    with installation(output, settings=settings_for(load_settings())) as here, Interrupts(here, owner):
        shown = run_demo(owner, installation=here, following=following, folder=folder.absolute())
    code = show_report(shown.report, output)
    if code == Exit.OK:
        output.say(
            f"accuracy {shown.metrics['accuracy']:.4f} on digits that it had never seen, above {LEAST_ACCURACY}"
        )
        output.say(f"checkpoint: {folder / 'model.pt'}")
    return code


COMMANDS = {"demo": demo}
