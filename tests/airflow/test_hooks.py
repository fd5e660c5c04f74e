"""Connections: what Airflow shows of them, and what they open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from airflow_provider.settings import OPTIONS
from gpu_flows.clouds import CLOUDS, CloudRef
from gpu_flows.errors import BadRequest
from tests.emulators.runpod import KEY, RunpodEmulator


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make connections as a secrets backend would: by environment variables."""

    def make(conn_id: str, **fields: Any) -> None:
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(fields))

    return make


def test_airflow_shows_the_provider() -> None:
    """What `airflow providers hooks|widgets|behaviours|configs` print, without five commands of 7 s each."""
    from airflow.providers_manager import ProvidersManager

    shown = ProvidersManager()
    ours = {kind: hook for kind, hook in shown.hooks.items() if hook and hook.package_name == "gpu-flows"}
    assert set(ours) == set(CLOUDS) - {"local"}
    assert ours["runpod"].hook_name == "RunPod"
    assert "extra__digitalocean__token_on_box" in shown.connection_form_widgets
    assert shown.field_behaviours["vastai"]["relabeling"] == {"password": "API key"}
    options = dict(shown.provider_configs)["gpu-flows"]["gpu_flows"]["options"]
    assert set(options) == set(OPTIONS)


def test_the_description_is_what_airflow_wants() -> None:
    import importlib
    import importlib.resources

    import jsonschema
    from airflow import __file__ as airflow

    from airflow_provider.get_provider_info import get_provider_info

    info = get_provider_info()
    schema = json.loads((Path(airflow).parent / "provider_info.schema.json").read_text())
    jsonschema.validate(info, schema)
    modules = [m for kind in ("operators", "hooks", "triggers", "sensors") for m in _modules(info, kind)]
    for module in modules:
        importlib.import_module(module)
    for form in info["connection-types"]:
        module, _, name = form["hook-class-name"].rpartition(".")
        hook = getattr(importlib.import_module(module), name)
        assert hook.conn_type == form["connection-type"]
        assert set(form["conn-fields"]) <= set(hook.fields)
        assert all(
            (field["schema"].get("format") == "password") == (key in hook.secret_fields)
            for key, field in form["conn-fields"].items()
        )


def _modules(info: dict[str, Any], kind: str) -> list[str]:
    return [module for entry in info.get(kind, ()) for module in entry["python-modules"]]


def test_beside_the_amazon_provider_its_type_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_provider import get_provider_info as described

    monkeypatch.setattr(described, "_has_amazon_provider", lambda: True)
    types = [form["connection-type"] for form in described.get_provider_info()["connection-types"]]
    assert "aws" not in types
    assert "runpod" in types


def test_a_connection_opens_its_cloud_and_is_tested(own_environment: Path, connection: Any) -> None:
    from airflow_provider.hooks import hook_for

    with RunpodEmulator() as emulator:
        connection("team_a", conn_type="runpod", password=KEY, extra={"base_url": emulator.url})
        hook = hook_for(CloudRef.parse("runpod@team_a"))
        assert hook is not None
        assert hook.account == "team_a"
        assert hook.test_connection() == (True, "runpod answers; gpu-flows holds 0 boxes there")
        connection("wrong", conn_type="runpod", password="another", extra={"base_url": emulator.url})
        refused = hook_for(CloudRef.parse("runpod@wrong"))
        assert refused is not None
        works, why = refused.test_connection()
    assert not works
    assert "another" not in why


def test_a_task_opens_clouds_by_their_connections(own_environment: Path, connection: Any) -> None:
    import logging

    from airflow_provider.installation import open_installation

    with RunpodEmulator() as emulator:
        connection("team_a", conn_type="runpod", password=KEY, extra={"base_url": emulator.url})
        with open_installation(logging.getLogger(__name__)) as here:
            assert here.cloud("runpod@team_a").find("gf1-") == []
            # The watchdog beside a task opens the same account.
            assert here.options("runpod@team_a")["api_key"] == KEY


@pytest.mark.parametrize(
    ("conn_id", "fields", "options"),
    [
        (
            "vastai_default",
            {"password": "k", "extra": {"verified": False}},
            {"api_key": "k", "verified": False},
        ),
        ("digitalocean_default", {"password": "t"}, {"token": "t"}),
        ("hotaisle_default", {"password": "k", "extra": {"team": "blue"}}, {"api_key": "k", "team": "blue"}),
        (
            "aws_default",
            {"login": "AKIA", "password": "s", "extra": {"region_name": "eu-west-1", "subnet_ids": "a, b"}},
            {
                "access_key_id": "AKIA",
                "secret_access_key": "s",
                "regions": ["eu-west-1"],
                "subnet_ids": ["a", "b"],
            },
        ),
        (
            "runpod_default",
            {"password": "k", "extra": {"gpu_flows": {"base_url": "http://x"}}},
            {"api_key": "k", "base_url": "http://x"},
        ),
    ],
)
def test_what_a_connection_says_reaches_the_adapter(
    own_environment: Path, connection: Any, conn_id: str, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    from airflow_provider.hooks import hook_for

    name = conn_id.removesuffix("_default")
    connection(conn_id, conn_type=name, **fields)
    hook = hook_for(CloudRef.parse(name))
    assert hook is not None
    assert hook.options() == options
    assert hook.cloud().name == name


def test_an_unknown_argument_is_named(own_environment: Path, connection: Any) -> None:
    from airflow_provider.hooks.runpod import RunpodHook

    connection("runpod_default", conn_type="runpod", password="k", extra={"gpu_flows": {"nonsense": 1}})
    with pytest.raises(BadRequest, match=r"runpod_default.*nonsense"):
        RunpodHook().cloud()


@pytest.mark.parametrize(
    ("name", "client"),
    [
        ("aws", "Session"),
        ("vastai", "VastAI"),
        ("digitalocean", "Client"),
        ("hotaisle", "Client"),
        ("runpod", ""),
    ],
)
def test_the_vendors_own_client_is_handed_out(
    own_environment: Path, connection: Any, name: str, client: str
) -> None:
    from airflow_provider.hooks import hook_for

    connection(f"{name}_default", conn_type=name, login="AKIA" if name == "aws" else None, password="secret")
    hook = hook_for(CloudRef.parse(name))
    assert hook is not None
    given = hook.get_conn()
    assert (type(given).__name__ == client) if client else (given.api_key == "secret")


def test_secrets_are_masked_in_airflows_log(own_environment: Path, connection: Any) -> None:
    from airflow.sdk._shared.secrets_masker import redact

    from airflow_provider.hooks.digitalocean import DigitalOceanHook

    connection(
        "digitalocean_default",
        conn_type="digitalocean",
        password="a-password-of-1-account",
        extra={"token_on_box": "a-token-for-2-boxes"},
    )
    DigitalOceanHook().options()
    shown = str(redact("a-password-of-1-account, a-token-for-2-boxes"))
    assert "password-of-1" not in shown
    assert "token-for-2" not in shown


def test_without_a_connection_the_adapter_looks_for_itself(own_environment: Path) -> None:
    from airflow_provider.installation import ConnectionOptions

    options = ConnectionOptions()
    assert options["runpod"] == {}
    assert options["local"] == {}


def test_airflows_configuration_wins(own_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_provider.settings import airflow_settings

    monkeypatch.setenv("GPU_FLOWS_NAMESPACE", "byenv")
    assert airflow_settings().namespace == "byenv"
    monkeypatch.setenv("AIRFLOW__GPU_FLOWS__NAMESPACE", "byairflow")
    monkeypatch.setenv("AIRFLOW__GPU_FLOWS__CLOUDS", "aws, runpod@team_a")
    monkeypatch.setenv("AIRFLOW__GPU_FLOWS__MAX_GPUS", "16")
    settings = airflow_settings()
    assert (settings.namespace, settings.clouds, settings.max_gpus) == (
        "byairflow",
        ("aws", "runpod@team_a"),
        16,
    )


def test_secrets_come_from_connections_variables_and_the_environment(
    own_environment: Path, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_provider.installation import find_secret

    connection("hub", conn_type="generic", password="of-the-hub")
    monkeypatch.setenv("AIRFLOW_VAR_KEY", "of-the-variable")
    monkeypatch.setenv("PLAIN_KEY", "of-the-worker")
    assert find_secret("conn:hub") == "of-the-hub"
    assert find_secret("var:key") == "of-the-variable"
    assert find_secret("PLAIN_KEY") == "of-the-worker"
    assert find_secret("NOWHERE_KEY") is None
