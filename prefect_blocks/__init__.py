"""gpu-flows for Prefect: credentials as blocks, renting and training as tasks and flows."""

from prefect_blocks.boxes import GpuBox, gpu_box
from prefect_blocks.cleanup import CLEANUP, give_back
from prefect_blocks.credentials import (
    AwsCredentials,
    DigitalOceanCredentials,
    HotAisleCredentials,
    RunPodCredentials,
    VastAiCredentials,
)
from prefect_blocks.tasks import launch_ddp, provision_box, reserve, resolve_gpu, run, teardown_box
from prefect_blocks.training import GpuTraining, GpuTrainingRun

__all__ = [
    "CLEANUP",
    "AwsCredentials",
    "DigitalOceanCredentials",
    "GpuBox",
    "GpuTraining",
    "GpuTrainingRun",
    "HotAisleCredentials",
    "RunPodCredentials",
    "VastAiCredentials",
    "give_back",
    "gpu_box",
    "launch_ddp",
    "provision_box",
    "reserve",
    "resolve_gpu",
    "run",
    "teardown_box",
]
