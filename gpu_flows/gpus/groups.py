"""RunPod's own names for pools and cards, so that code written for RunPod asks here in the same words.

Members and values are those of RunPod's Flash SDK (``runpod_flash.GpuGroup``, ``runpod_flash.GpuType``).
What each pool holds is data: the ``pools`` of the catalog.
"""

from __future__ import annotations

from enum import StrEnum


class GpuGroup(StrEnum):
    """RunPod's pools of similar cards."""

    ANY = "any"
    AMPERE_16 = "AMPERE_16"
    AMPERE_24 = "AMPERE_24"
    ADA_24 = "ADA_24"
    ADA_32_PRO = "ADA_32_PRO"
    AMPERE_48 = "AMPERE_48"
    ADA_48_PRO = "ADA_48_PRO"
    AMPERE_80 = "AMPERE_80"
    ADA_80_PRO = "ADA_80_PRO"
    BLACKWELL_96 = "BLACKWELL_96"
    HOPPER_141 = "HOPPER_141"
    BLACKWELL_180 = "BLACKWELL_180"


class GpuType(StrEnum):
    """RunPod's names of single cards."""

    ANY = "any"
    NVIDIA_RTX_A4000 = "NVIDIA RTX A4000"
    NVIDIA_RTX_A4500 = "NVIDIA RTX A4500"
    NVIDIA_RTX_4000_ADA_GENERATION = "NVIDIA RTX 4000 Ada Generation"
    NVIDIA_RTX_2000_ADA_GENERATION = "NVIDIA RTX 2000 Ada Generation"
    NVIDIA_RTX_A5000 = "NVIDIA RTX A5000"
    NVIDIA_L4 = "NVIDIA L4"
    NVIDIA_GEFORCE_RTX_3090 = "NVIDIA GeForce RTX 3090"
    NVIDIA_GEFORCE_RTX_4090 = "NVIDIA GeForce RTX 4090"
    NVIDIA_GEFORCE_RTX_5090 = "NVIDIA GeForce RTX 5090"
    NVIDIA_A40 = "NVIDIA A40"
    NVIDIA_RTX_A6000 = "NVIDIA RTX A6000"
    NVIDIA_RTX_6000_ADA_GENERATION = "NVIDIA RTX 6000 Ada Generation"
    NVIDIA_A100_80GB_PCIe = "NVIDIA A100 80GB PCIe"
    NVIDIA_A100_SXM4_80GB = "NVIDIA A100-SXM4-80GB"
    NVIDIA_H100_80GB_HBM3 = "NVIDIA H100 80GB HBM3"
    NVIDIA_RTX_PRO_6000_BLACKWELL_SERVER_EDITION = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    NVIDIA_RTX_PRO_6000_BLACKWELL_WORKSTATION_EDITION = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
    NVIDIA_RTX_PRO_6000_BLACKWELL_MAX_Q_WORKSTATION_EDITION = (
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
    )
    NVIDIA_H200 = "NVIDIA H200"
    NVIDIA_B200 = "NVIDIA B200"
