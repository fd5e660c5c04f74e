"""Programs that stand in for nvidia-smi and rocm-smi on a box without GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_NVIDIA = {
    "nvidia_h100": "NVIDIA H100 80GB HBM3, 81559, 570.86.15",
    "nvidia_l40s": "NVIDIA L40S, 46068, 570.86.15",
}
_ROCM_HEAD = (
    "device,VRAM Total Memory (B),VRAM Total Used Memory (B),Card Series,Card Model,Card Vendor,Card SKU"
)
_ROCM_ROW = "card{n},206141652992,10821632,AMD Instinct MI300X VF,0x74b5,Advanced Micro Devices,M3000100"


def environment_with(folder: Path, model: str, count: int) -> dict[str, str]:
    """Return the environment of a box on which those cards are seen.

    Args:
        folder: Where the programs go; made.
        model: As a cloud calls it: ``nvidia_h100``, ``MI300X``.
        count: How many.
    """
    folder.mkdir(parents=True)
    if model in _NVIDIA:
        program, lines = folder / "nvidia-smi", [_NVIDIA[model]] * count
    else:
        program = folder / "rocm-smi"
        lines = [_ROCM_HEAD, *(_ROCM_ROW.format(n=n) for n in range(count))]
    program.write_text("\n".join(["#!/bin/sh", "cat <<'END'", *lines, "END", ""]))
    program.chmod(0o755)
    path = [str(folder), os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"]
    return {"PATH": os.pathsep.join([*path, "/usr/sbin", "/sbin"])}
