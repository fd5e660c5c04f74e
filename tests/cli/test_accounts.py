"""``check``."""

from __future__ import annotations

from tests.cli.acme import Market
from tests.cli.conftest import Cli


def test_check_tells_what_would_stop_a_run_and_rents_nothing(cli: Cli, market: Market) -> None:
    fine = cli("check", "--clouds", "acme,local", "--format", "json")
    assert fine.code == 0, fine.err
    assert [account["cloud"] for account in fine.json["clouds"]] == ["acme", "local"]
    assert fine.json["ok"] is True
    market.cloud.faults.find.append("denied")
    stopped = cli("check", "--clouds", "acme,local")
    assert stopped.code == 2
    rows = [line.split("\t") for line in stopped.out.splitlines()]
    assert rows[1][:3] == ["acme", "is stopped", "?"]
    assert "401" in rows[1][3]
    assert rows[2][:2] == ["local", "gets through"]
    assert market.cloud.calls["create"] == 0
