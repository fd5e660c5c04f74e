"""What the hooks of all clouds have in common."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseHook

from airflow_provider._compat import mask
from gpu_flows.errors import BadRequest, GpuFlowsError

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from gpu_flows.clouds.base import Cloud

OWN_EXTRA = "gpu_flows"
"""Key of a connection's extra that holds further arguments of our adapter, whoever owns the form."""


class CloudHook(BaseHook):
    """One account of one cloud, as an Airflow connection describes it.

    Args:
        conn_id: The connection; the cloud's default one unless given.

    Attributes:
        cloud_name: The cloud, as in ``clouds=[...]``.
        conn_type: Type of the connection.
        fields: Fields of the form, by the adapter's argument; they are the keys of the connection's extra.
        secret_fields: Those of them that must not be shown.
        password_option: The adapter's argument that the connection's password stands for.
    """

    conn_name_attr: ClassVar[str] = "conn_id"
    default_conn_name: ClassVar[str]
    conn_type: ClassVar[str]
    hook_name: ClassVar[str]
    cloud_name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]] = ("base_url",)
    secret_fields: ClassVar[tuple[str, ...]] = ()
    password_option: ClassVar[str] = "api_key"  # noqa: S105 - the name of an argument

    def __init__(self, conn_id: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.conn_id = conn_id or self.default_conn_name

    @cached_property
    def connection(self) -> Connection:
        """The connection, from Airflow's secrets backends; everything secret in it is masked from then on."""
        connection = self.get_connection(self.conn_id)
        extra = connection.extra_dejson
        for secret in (connection.password, *(extra.get(name) for name in self.secret_fields)):
            mask(secret)
        return connection

    @property
    def account(self) -> str:
        """What stands behind the ``@`` in ``clouds=[...]``."""
        return "default" if self.conn_id == self.default_conn_name else self.conn_id

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments by which our adapter opens the account; they hold secrets.

        Raises:
            AirflowNotFoundException: When there is no such connection.
            BadRequest: When its extra cannot be understood.
        """
        extra = self.connection.extra_dejson
        own = extra.get(OWN_EXTRA) or {}
        if not isinstance(own, dict):
            raise BadRequest(f"connection {self.conn_id}: {OWN_EXTRA} in its extra has to be an object")
        told = {name: extra[name] for name in self.fields if extra.get(name) not in (None, "", [])}
        if self.connection.password:
            told[self.password_option] = self.connection.password
        return {**told, **own}

    def cloud(self) -> Cloud:
        """Return our adapter for the account; nothing has been asked of the cloud yet.

        Raises:
            MissingExtra: When its dependencies are not installed.
            BadRequest: When the connection holds an argument that the adapter does not know.
        """
        from gpu_flows.clouds import CloudRef, open_cloud

        options = self.options()
        try:
            return open_cloud(CloudRef(self.cloud_name, self.account), **options)
        except TypeError as error:
            raise BadRequest(f"connection {self.conn_id}: {error}") from error

    def get_conn(self) -> Any:
        """Return the vendor's own client for the account."""
        raise NotImplementedError

    def test_connection(self) -> tuple[bool, str]:
        """List the account's boxes: it proves the credentials, and the right that every teardown needs."""
        try:
            boxes = self.cloud().find("gf1-")
        except GpuFlowsError as error:
            return False, str(error)
        return True, f"{self.cloud_name} answers; gpu-flows holds {len(boxes)} boxes there"


def missing(package: str, extra: str, error: ImportError) -> GpuFlowsError:
    """Return the error for a vendor's client that is not installed."""
    from gpu_flows.errors import MissingExtra

    problem = MissingExtra(package, extra)
    problem.__cause__ = error
    return problem
