"""gpu-flows for Prefect: credentials as blocks, renting and training as tasks and flows."""

from prefect_blocks.credentials import (
    AwsCredentials,
    DigitalOceanCredentials,
    HotAisleCredentials,
    RunPodCredentials,
    VastAiCredentials,
)

__all__ = [
    "AwsCredentials",
    "DigitalOceanCredentials",
    "HotAisleCredentials",
    "RunPodCredentials",
    "VastAiCredentials",
]
