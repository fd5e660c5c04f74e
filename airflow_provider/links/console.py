"""The cloud's own page for a box."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator, Context
    from airflow.sdk.types import TaskInstanceKey

    from gpu_flows.clouds.base import Box

_KEY = "gpu_flows_console"

_PAGES = {
    "aws": "https://{region}.console.aws.amazon.com/ec2/home?region={region}#InstanceDetails:instanceId={id}",
    "digitalocean": "https://cloud.digitalocean.com/droplets/{id}",
    "hotaisle": "https://admin.hotaisle.app/",
    "runpod": "https://console.runpod.io/pods?id={id}",
    "vastai": "https://cloud.vast.ai/instances/",
}


def console_url(box: Box) -> str | None:
    """Return the address of a box in its cloud's console; None where there is none (`local`)."""
    page = _PAGES.get(box.cloud)
    return page.format(id=box.id, region=box.region or "us-east-1") if page else None


class ConsoleLink(BaseOperatorLink):
    """Leads to the box in the console of its cloud."""

    name = "Box at the cloud"

    @staticmethod
    def keep(context: Context, box: Box) -> None:
        """Keep the address for the link, which Airflow builds at the end of the task."""
        if (url := console_url(box)) is not None:
            context["ti"].xcom_push(key=_KEY, value=url)

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the address that the task kept; empty when it kept none."""
        from airflow.sdk.execution_time.xcom import XCom

        return XCom.get_value(key=_KEY, ti_key=ti_key) or ""
