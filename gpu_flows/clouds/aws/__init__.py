"""Boxes of Amazon EC2, through boto3.

`cloud` is the adapter; `market` says what can be rented, `launch` writes the create call, `answers` reads what
comes back, `verdicts` says what a failure means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_flows.clouds.aws.cloud import AwsCloud as AwsCloud


def __getattr__(name: str) -> Any:
    if name == "AwsCloud":
        from gpu_flows.clouds.aws.cloud import AwsCloud

        return AwsCloud
    raise AttributeError(name)
