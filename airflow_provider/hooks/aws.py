"""AWS connections: those of the amazon provider where it is installed, and their usual fields otherwise."""

from __future__ import annotations

from typing import Any, ClassVar

from airflow_provider._compat import mask
from airflow_provider.hooks.base import CloudHook, missing


class AwsHook(CloudHook):
    """An AWS account.

    With the amazon provider, its own hook reads the connection, and assumes roles; without it, the login is the
    access key id, the password the secret, and an empty connection leaves everything to boto3's chain.
    """

    conn_type: ClassVar[str] = "aws"
    default_conn_name: ClassVar[str] = "aws_default"
    hook_name: ClassVar[str] = "Amazon Web Services"
    cloud_name: ClassVar[str] = "aws"
    fields: ClassVar[tuple[str, ...]] = (
        "session_token",
        "regions",
        "image",
        "subnet_ids",
        "security_group_ids",
        "instance_profile",
        "ssh_cidr",
    )
    secret_fields: ClassVar[tuple[str, ...]] = ("aws_session_token", "session_token")
    password_option: ClassVar[str] = "secret_access_key"  # noqa: S105 - the name of an argument

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments by which our adapter opens the account; see `CloudHook.options`."""
        options = super().options()
        extra = self.connection.extra_dejson
        for name, theirs in (("base_url", "endpoint_url"), ("session_token", "aws_session_token")):
            if extra.get(theirs):
                options.setdefault(name, extra[theirs])
        if self.connection.login:
            options["access_key_id"] = self.connection.login
        elif extra.get("profile_name"):
            options["profile"] = extra["profile_name"]
        if extra.get("region_name"):
            options.setdefault("regions", [extra["region_name"]])
        for name in ("regions", "subnet_ids", "security_group_ids"):
            if isinstance(options.get(name), str):
                options[name] = [part.strip() for part in options[name].split(",") if part.strip()]
        official = _official_hook(self.conn_id)
        found = official.get_credentials() if official is not None else None
        if found is not None:
            for secret in (found.secret_key, found.token):
                mask(secret)
            options |= {"access_key_id": found.access_key, "secret_access_key": found.secret_key}
            if found.token:
                options["session_token"] = found.token
        return options

    def get_conn(self) -> Any:
        """Return a ``boto3.Session`` for the account."""
        official = _official_hook(self.conn_id)
        if official is not None:
            return official.get_session()
        try:
            import boto3
        except ImportError as error:
            raise missing("boto3", "aws", error) from error
        options = self.options()
        return boto3.Session(
            aws_access_key_id=options.get("access_key_id"),
            aws_secret_access_key=options.get("secret_access_key"),
            aws_session_token=options.get("session_token"),
            profile_name=options.get("profile"),
            region_name=next(iter(options.get("regions", ())), None),
        )


def _official_hook(conn_id: str) -> Any:
    """Return the amazon provider's hook for a connection; None where that provider is not installed."""
    try:
        from airflow.providers.amazon.aws.hooks.base_aws import (  # type: ignore[import-not-found,unused-ignore]
            AwsGenericHook,
        )
    except ImportError:
        return None
    return AwsGenericHook(aws_conn_id=conn_id, client_type="ec2")
