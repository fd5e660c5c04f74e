"""Accounts have variables of their own."""

from __future__ import annotations

import pytest

from gpu_flows.clouds._credentials import (
    no_credentials,
    previous_secret,
    secret_from_environment,
    variable_for,
)
from gpu_flows.clouds.errors import Scope


@pytest.mark.parametrize(
    ("account", "variable"),
    [
        ("default", "RUNPOD_API_KEY"),
        ("team_a", "RUNPOD_API_KEY__TEAM_A"),
        ("Team-a.2", "RUNPOD_API_KEY__TEAM_A_2"),
    ],
)
def test_each_account_has_its_variable(account: str, variable: str) -> None:
    assert variable_for("RUNPOD_API_KEY", account) == variable


def test_an_account_never_gets_the_key_of_another() -> None:
    environ = {"A_KEY": " one\n", "A_KEY__TEAM_A": "two", "B_KEY": "three", "A_KEY__TEAM_A_PREVIOUS": "old"}
    assert secret_from_environment("A_KEY", "B_KEY", account="default", environ=environ) == "one"
    assert secret_from_environment("A_KEY", account="team_a", environ=environ) == "two"
    assert secret_from_environment("B_KEY", account="team_a", environ=environ) is None
    assert previous_secret("A_KEY", account="team_a", environ=environ) == "old"
    assert previous_secret("A_KEY", account="default", environ=environ) is None


def test_missing_credentials_say_where_they_are_looked_for() -> None:
    error = no_credentials("runpod", "RUNPOD_API_KEY", account="team_a", also="~/.runpod/config.toml")
    assert error.scope is Scope.CLOUD
    assert not error.ambiguous
    assert (
        str(error) == "there are no credentials for runpod@team_a "
        "(set RUNPOD_API_KEY__TEAM_A or ~/.runpod/config.toml)"
    )
