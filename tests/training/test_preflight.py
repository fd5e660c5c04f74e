"""Is this the box that was promised? With programs that stand in for nvidia-smi and rocm-smi."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from gpu_flows.clouds.base import Box, BoxState
from gpu_flows.clouds.errors import BoxCheckFailed
from gpu_flows.offers import Offer
from gpu_flows.training.preflight import BoxFacts, GpuFact, check_box, parse_facts
from tests.training.shell import LocalShell

H100 = "NVIDIA H100 80GB HBM3, 81559, 570.86.15"
MI300X = """

WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status

device,VRAM Total Memory (B),VRAM Total Used Memory (B),Card Series,Card Model,Card Vendor,Card SKU
card0,206141652992,297111552,AMD Instinct MI300X OAM,0x74a1,"Advanced Micro Devices, Inc. [AMD/ATI]",M3000100
card1,206141652992,297111552,AMD Instinct MI300X OAM,0x74a1,"Advanced Micro Devices, Inc. [AMD/ATI]",M3000100
"""
OLD_ROCM = """device,Card series,Card model,Card vendor,VRAM Total Memory (B)
card0,0x74a1,AMD Instinct MI300X,Advanced Micro Devices,206141652992
"""


@pytest.fixture
def shell(tmp_path: Path) -> LocalShell:
    """A box with the tools of a small image, and what the test adds."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("nproc", "sed", "df", "awk"):
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    (tools / "python3").symlink_to(sys.executable)
    return LocalShell(tmp_path, str(tools))


def install(shell: LocalShell, tool: str, answer: str, exit_code: int = 0) -> None:
    program = shell.home / "bin" / tool
    program.unlink(missing_ok=True)
    program.write_text(
        f"#!/bin/sh\nwhile read -r line; do echo \"$line\"; done <<'END'\n{answer}\nEND\nexit {exit_code}\n"
    )
    program.chmod(0o755)


def offer(gpu: str | None, count: int = 0, vram_gb: float = 0, vcpus: int | None = None) -> Offer:
    return Offer(
        cloud="test",
        instance_type="x",
        gpu=gpu,
        gpu_count=count,
        vram_gb=vram_gb,
        vcpus=vcpus,
        usd_per_hour=1.0,
    )


BOX = Box(cloud="test", id="b-1", name="gf1-x", state=BoxState.RUNNING, gpu="H100", gpu_count=8)


def check(shell: LocalShell, promised: Offer | None) -> BoxFacts:
    return asyncio.run(check_box(shell, BOX, promised, timeout_s=30))


def test_the_promised_box_passes(shell: LocalShell) -> None:
    install(shell, "nvidia-smi", "\n".join([H100] * 8))
    for promised in (offer("H100", 8, 80), offer("H100-SXM", 8, 80), offer("H100", 4, 80), None):
        facts = check(shell, promised)
        assert facts.gpus == (GpuFact("NVIDIA H100 80GB HBM3", 81559),) * 8
        assert facts.driver == "570.86.15"
        assert facts.cores == len(os.sched_getaffinity(0))
        assert facts.python
        assert facts.to_json()["gpus"][0] == {"name": "NVIDIA H100 80GB HBM3", "vram_mib": 81559}


@pytest.mark.parametrize(
    ("answer", "promised", "words"),
    [
        (H100, offer("H100", 2, 80), "it has 1 GPUs, not 2"),
        (H100, offer("H100-PCIE", 1, 80), "1 x NVIDIA H100 80GB HBM3 with 80 GB instead of H100-PCIE"),
        ("NVIDIA A100-SXM4-40GB, 40960, 570", offer("A100-80GB", 1, 80), "instead of A100-80GB"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb, 9856, 570", offer("A100-80GB", 1, 80), "instead of A100-80GB"),
        ("NVIDIA GeForce RTX 4090 D, 24564, 570", offer("RTX4090", 1, 24), "instead of RTX4090"),
        ("Some Card, 16384, 570", offer("Unheard-Of", 1, 24), "instead of Unheard-Of"),
        (f"{H100}\nNVIDIA L4, 23034, 570", offer("H100", 2, 80), "1 x NVIDIA L4 with 22 GB instead of H100"),
        ("No devices were found", offer("H100", 1, 80), "it shows no GPU"),
    ],
)
def test_what_differs_is_named(shell: LocalShell, answer: str, promised: Offer, words: str) -> None:
    install(shell, "nvidia-smi", answer)
    with pytest.raises(BoxCheckFailed) as caught:
        check(shell, promised)
    assert words in str(caught.value)
    assert caught.value.message.startswith("box b-1 is not what was promised")


def test_a_driver_that_does_not_answer_is_quoted(shell: LocalShell) -> None:
    install(shell, "nvidia-smi", "NVIDIA-SMI has failed because it couldn't communicate\nwith the driver", 9)
    with pytest.raises(
        BoxCheckFailed, match=r"no GPU \(NVIDIA-SMI has failed because it couldn't communicate\)"
    ):
        check(shell, offer("H100", 1, 80))


def test_an_unknown_card_is_held_against_its_memory(shell: LocalShell) -> None:
    install(shell, "nvidia-smi", "Some Card, 24000, [N/A]")
    assert check(shell, offer("Unheard-Of", 1, 24)).gpus == (GpuFact("Some Card", 24000),)
    install(shell, "nvidia-smi", "Some Card, [N/A], 570")
    assert check(shell, offer("Unheard-Of", 1, 24)).gpus == (GpuFact("Some Card", None),)


@pytest.mark.parametrize(("answer", "count"), [(MI300X, 2), (OLD_ROCM, 1)])
def test_rocm_boxes_answer_by_rocm_smi(shell: LocalShell, answer: str, count: int) -> None:
    install(shell, "rocm-smi", answer)
    facts = check(shell, offer("MI300X", count, 192))
    assert [gpu.vram_mib for gpu in facts.gpus] == [196592] * count
    with pytest.raises(BoxCheckFailed, match="instead of H100"):
        check(shell, offer("H100", count, 80))


def test_a_cpu_box_has_its_cores(shell: LocalShell) -> None:
    cores = len(os.sched_getaffinity(0))
    assert check(shell, offer(None, vcpus=cores)).gpus == ()
    with pytest.raises(BoxCheckFailed, match=f"it has {cores} CPU cores, not 64"):
        check(shell, offer(None, vcpus=64))


@pytest.mark.parametrize(
    ("version", "words"), [("3.8.18", "its Python is 3.8.18"), (None, "it has no Python")]
)
def test_a_box_needs_python_3_9(shell: LocalShell, version: str | None, words: str) -> None:
    (shell.home / "bin" / "python3").unlink()
    if version:
        install(shell, "python3", f"python {version}")
    with pytest.raises(BoxCheckFailed, match=words):
        check(shell, offer(None))


def test_nonsense_is_no_fact() -> None:
    assert parse_facts("Welcome!\n\ncores many\nnvidia a,b\nrocm nonsense\n") == BoxFacts()
