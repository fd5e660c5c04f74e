"""What Airflow is told about this provider; read without importing any hook."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

_DOCS = "https://github.com/gpu-flows/gpu-flows/tree/main/docs"


def get_provider_info() -> dict[str, Any]:
    """Return the provider's description, as Airflow's entry point ``apache_airflow_provider`` wants it."""
    kinds = ("operators", "hooks", "triggers", "sensors")
    return {
        "package-name": "gpu-flows",
        "name": "gpu-flows",
        "description": "Rent GPU boxes, train on them over SSH with PyTorch DDP, and give them back.",
        "integrations": [{"integration-name": "gpu-flows", "external-doc-url": _DOCS, "tags": ["service"]}],
        **{
            kind: [{"integration-name": "gpu-flows", "python-modules": list(modules)}]
            for kind in kinds
            if (modules := _MODULES[kind])
        },
        "connection-types": _connection_types(),
        "extra-links": list(_LINKS),
        "config": {"gpu_flows": _CONFIG},
    }


_MODULES: dict[str, tuple[str, ...]] = {
    "operators": tuple(
        f"airflow_provider.operators.{name}"
        for name in ("launch", "provision", "reap", "resolve", "teardown", "train")
    ),
    "hooks": tuple(
        f"airflow_provider.hooks.{name}" for name in ("aws", "digitalocean", "hotaisle", "runpod", "vastai")
    ),
    "triggers": ("airflow_provider.triggers.capacity", "airflow_provider.triggers.follow"),
    "sensors": ("airflow_provider.sensors.available",),
}

_LINKS = ("airflow_provider.links.console.ConsoleLink",)


def _option(description: str, example: str, kind: str = "string") -> dict[str, Any]:
    return {
        "description": description,
        "version_added": "0.1.0",
        "type": kind,
        "example": example,
        "default": None,
    }


_CONFIG = {
    "description": "What holds for the whole installation of gpu-flows; it wins over GPU_FLOWS_* and config.toml.",
    "options": {
        "namespace": _option(
            "Tells this installation's boxes from those of every other one on the same accounts: 1 to 16 "
            "characters of a-z and 0-9. Every real cloud needs it, and every worker the same one.",
            "prod",
        ),
        "clouds": _option("Clouds to ask where a task names none, in order.", "aws,runpod@team_a"),
        "enabled_clouds": _option("The only clouds that may be rented from.", "aws,runpod"),
        "max_gpus": _option("Most GPUs that one lease may hold.", "16", "integer"),
        "max_usd_per_hour": _option("Most dollars per hour that one lease may cost.", "60", "float"),
        "ssh_key": _option(
            "File with the private key for the boxes of accounts whose credentials are temporary.",
            "/run/secrets/gpu-flows-key",
        ),
    },
}


def _text(label: str, description: str = "", *, secret: bool = False) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": ["string", "null"]}
    if secret:
        schema["format"] = "password"
    return {"label": label, "description": description, "schema": schema}


_URL = _text("API URL", "Only for tests and proxies.")

_PLAIN = ["schema", "login", "host", "port", "extra"]
"""Fields of every connection that these clouds have no use for."""


def _keyed(cloud: str, hook: str, name: str, key: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the form of a cloud whose whole credential is one key."""
    return {
        "connection-type": cloud,
        "hook-class-name": f"airflow_provider.hooks.{cloud}.{hook}",
        "hook-name": name,
        "ui-field-behaviour": {
            "hidden-fields": _PLAIN,
            "relabeling": {"password": key},
            "placeholders": {},
        },
        "conn-fields": fields,
    }


def _connection_types() -> list[dict[str, Any]]:
    forms = [
        _keyed("runpod", "RunpodHook", "RunPod", "API key", {"base_url": _URL}),
        _keyed(
            "vastai",
            "VastaiHook",
            "Vast.ai",
            "API key",
            {
                "base_url": _URL,
                "reliability": {
                    "label": "Least reliability of a host",
                    "description": "From 0 to 1.",
                    "schema": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
                },
                "verified": {
                    "label": "Verified hosts only",
                    "description": "",
                    "schema": {"type": ["boolean", "null"]},
                },
            },
        ),
        _keyed(
            "digitalocean",
            "DigitalOceanHook",
            "DigitalOcean",
            "Token",
            {
                "base_url": _URL,
                "token_on_box": _text(
                    "Token on the box",
                    "A token that every box gets, so that it can end itself; it opens the whole account.",
                    secret=True,
                ),
            },
        ),
        _keyed(
            "hotaisle",
            "HotAisleHook",
            "Hot Aisle",
            "API key",
            {"base_url": _URL, "team": _text("Team", "Where the key belongs to several.")},
        ),
    ]
    # The amazon provider owns the type `aws`: beside it ours would be a second one of that name.
    return forms if _has_amazon_provider() else [_aws(), *forms]


def _aws() -> dict[str, Any]:
    listed = "Several are separated by commas."
    return {
        "connection-type": "aws",
        "hook-class-name": "airflow_provider.hooks.aws.AwsHook",
        "hook-name": "Amazon Web Services",
        "ui-field-behaviour": {
            "hidden-fields": ["schema", "host", "port", "extra"],
            "relabeling": {"login": "Access key id", "password": "Secret access key"},
            "placeholders": {"login": "empty: boto3's own chain", "password": ""},
        },
        "conn-fields": {
            "session_token": _text("Session token", secret=True),
            "regions": _text("Regions", listed),
            "image": _text("AMI", "By default the newest of AWS's own with drivers and torch."),
            "subnet_ids": _text("Subnets", listed),
            "security_group_ids": _text("Security groups", listed),
            "instance_profile": _text("Instance profile"),
            "ssh_cidr": _text("Who may reach SSH", "A CIDR block."),
        },
    }


def _has_amazon_provider() -> bool:
    try:
        return find_spec("airflow.providers.amazon") is not None
    except ImportError:
        return False
