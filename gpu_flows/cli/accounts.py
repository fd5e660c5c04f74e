"""``check``: would a run get through, on each cloud, spending nothing."""

from __future__ import annotations

from gpu_flows.cli.exits import Exit
from gpu_flows.cli.flags import WHERE
from gpu_flows.cli.output import Column, Output
from gpu_flows.cli.session import clouds_of, installation
from gpu_flows.cli.verbs import Given, verb


@verb([*WHERE])
def check(given: Given, output: Output) -> int:
    """Tell for each cloud whether its credentials work, and what would stop a run there; rents nothing.

    Without --clouds it looks at every configured cloud, else at those that this machine has credentials for.
    """
    from gpu_flows.runs.accounts import check_accounts

    with installation(output) as here:
        refs = clouds_of(given) or here.configured_clouds()
        output.screen.waiting(f"asking {', '.join(refs)}")
        found = check_accounts(refs, here)
    output.table(
        {"ok": all(account.ok for account in found), "clouds": [account.to_json() for account in found]},
        [Column("cloud"), Column("a run"), Column("boxes", right=True), Column("because", whole=False)],
        [
            (
                account.ref,
                "gets through" if account.ok else "is stopped",
                "?" if account.boxes is None else str(account.boxes),
                "; ".join([*account.stops, *account.advice]) or "-",
            )
            for account in found
        ],
    )
    return Exit.OK if all(account.ok for account in found) else Exit.BAD_INPUT


COMMANDS = {"check": check}
