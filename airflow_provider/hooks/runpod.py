"""RunPod connections."""

from __future__ import annotations

from typing import Any, ClassVar

from airflow_provider.hooks.base import CloudHook, missing


class RunpodHook(CloudHook):
    """A RunPod account: its API key is the connection's password."""

    conn_type: ClassVar[str] = "runpod"
    default_conn_name: ClassVar[str] = "runpod_default"
    hook_name: ClassVar[str] = "RunPod"
    cloud_name: ClassVar[str] = "runpod"

    def get_conn(self) -> Any:
        """Return the module ``runpod``; its key is set for the whole process, as RunPod's own code does."""
        try:
            import runpod  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise missing("runpod", "runpod", error) from error
        runpod.api_key = self.options().get("api_key")
        return runpod
