"""The catalog: the cards of the lists, each cloud's own names, memory, and a user's own file."""

import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from gpu_flows.errors import BadRequest, SettingsError
from gpu_flows.gpus import (
    GpuRequest,
    find,
    from_cloud_id,
    from_product_name,
    list_gpus,
    load_catalog,
    nominal_vram_gb,
    vram_for,
)
from gpu_flows.gpus.catalog_file import SHIPPED
from gpu_flows.gpus.spelling import key

# name: memory, architecture, generation, form factors, clouds
CARDS = {
    "T4": (16, "cuda", "turing", "", "aws vastai modal"),
    "L4": (24, "cuda", "ada", "", "aws runpod vastai modal"),
    "A10": (24, "cuda", "ampere", "", "vastai modal"),
    "A10G": (24, "cuda", "ampere", "", "aws vastai"),
    "L40": (48, "cuda", "ada", "", "runpod vastai"),
    "L40S": (48, "cuda", "ada", "", "aws runpod vastai digitalocean modal"),
    "A40": (48, "cuda", "ampere", "", "runpod vastai"),
    "A16": (16, "cuda", "ampere", "", "vastai"),
    "A30": (24, "cuda", "ampere", "", "runpod vastai"),
    "V100-16GB": (16, "cuda", "volta", "PCIe SXM", "aws runpod vastai"),
    "V100-32GB": (32, "cuda", "volta", "PCIe SXM", "aws runpod vastai"),
    "A100-40GB": (40, "cuda", "ampere", "PCIe SXM", "aws vastai modal"),
    "A100-80GB": (80, "cuda", "ampere", "PCIe SXM", "aws runpod vastai modal"),
    "H100": (80, "cuda", "hopper", "PCIe SXM", "aws runpod vastai digitalocean modal"),
    "H100-NVL": (94, "cuda", "hopper", "NVL", "runpod vastai"),
    "H200": (141, "cuda", "hopper", "SXM NVL", "aws runpod vastai digitalocean modal"),
    "GH200": (96, "cuda", "hopper", "", "vastai"),
    "B200": (180, "cuda", "blackwell", "SXM", "aws runpod vastai modal"),
    "B300": (288, "cuda", "blackwell", "SXM", "aws runpod vastai"),
    "RTX3090": (24, "cuda", "ampere", "", "runpod vastai"),
    "RTX4090": (24, "cuda", "ada", "", "runpod vastai"),
    "RTX5090": (32, "cuda", "blackwell", "", "runpod vastai"),
    "RTX-A4000": (16, "cuda", "ampere", "", "runpod vastai"),
    "RTX-A4500": (20, "cuda", "ampere", "", "runpod vastai"),
    "RTX-A5000": (24, "cuda", "ampere", "", "runpod vastai"),
    "RTX-A6000": (48, "cuda", "ampere", "", "runpod vastai"),
    "RTX-2000-Ada": (16, "cuda", "ada", "", "runpod vastai"),
    "RTX-4000-Ada": (20, "cuda", "ada", "", "runpod vastai digitalocean"),
    "RTX-6000-Ada": (48, "cuda", "ada", "", "runpod vastai digitalocean"),
    "RTX-PRO-4500": (32, "cuda", "blackwell", "", "runpod vastai"),
    "RTX-PRO-6000": (96, "cuda", "blackwell", "Server Workstation Max-Q", "aws runpod vastai modal"),
    "MI300X": (192, "rocm", "cdna3", "OAM", "hotaisle runpod digitalocean"),
    "MI325X": (256, "rocm", "cdna3", "OAM", "digitalocean"),
}


def test_every_card_of_the_lists_is_there_and_no_other() -> None:
    assert [model.name for model in list_gpus()] == list(tomllib.loads(SHIPPED.read_text())["gpu"])
    assert {model.name for model in list_gpus()} == set(CARDS)


@pytest.mark.parametrize("name", CARDS)
def test_a_card_carries_what_is_known_of_it(name: str) -> None:
    vram_gb, architecture, generation, forms, clouds = CARDS[name]
    model = find(name)
    assert (model.name, model.vram_gb, model.architecture, model.generation) == (
        name,
        vram_gb,
        architecture,
        generation,
    )
    assert model.form_factors == tuple(forms.split())
    assert set(model.providers) == set(clouds.split())
    assert all(model.ids[cloud] and model.max_count[cloud] >= 1 for cloud in model.providers)
    assert (model.compute_capability is None) == (architecture == "rocm")
    assert model.label
    json.dumps(model.to_json())


def test_public_functions() -> None:
    assert list_gpus("local") == []
    assert vram_for("A100") == 80
    assert vram_for("V100") == 32
    assert vram_for("h100") == 80
    assert find("rtx4090").vram_gb == 24
    assert find("A100").name == "A100-80GB"
    assert find("NVIDIA GeForce RTX 4090") is find("RTX_4090")
    assert [model.name for model in list_gpus("hotaisle")] == ["MI300X"]
    assert list_gpus("vast") == list_gpus("VastAI") != []


def test_unknown_names_suggest_what_was_meant() -> None:
    with pytest.raises(BadRequest, match="did you mean runpod"):
        list_gpus("runpd")
    with pytest.raises(BadRequest, match="did you mean H100"):
        find("H10")
    with pytest.raises(BadRequest, match="'ANY' is a pool"):
        vram_for("ANY")


def test_where_sources_disagree_the_notes_say_so() -> None:
    for name, vram_gb in {"B200": 180, "RTX-PRO-6000": 96, "RTX-4000-Ada": 20, "RTX-A4500": 20}.items():
        assert find(name).vram_gb == vram_gb
        assert "Sources disagree" in find(name).notes


@pytest.mark.parametrize(
    ("cloud", "name", "mib", "expected"),
    [
        ("aws", "A100", 40960, "A100-40GB-SXM"),
        ("aws", "A100", 81920, "A100-80GB-SXM"),
        ("aws", "L4", 22888, "L4"),
        ("aws", "L40S", 45776, "L40S"),
        ("aws", "H200", 144384, "H200-SXM"),
        ("aws", "RTX PRO Server 6000", 97887, "RTX-PRO-6000-Server"),
        ("runpod", "NVIDIA A100 80GB PCIe", None, "A100-80GB-PCIe"),
        ("runpod", "NVIDIA H100 80GB HBM3", None, "H100-SXM"),
        ("runpod", "NVIDIA H100 NVL", None, "H100-NVL"),
        ("runpod", "NVIDIA RTX PRO 6000 Blackwell Server Edition", None, "RTX-PRO-6000-Server"),
        ("runpod", "NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb", None, None),
        ("runpod", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9984, None),
        ("runpod", "NVIDIA H100 80GB HBM3", 9984, None),
        ("vastai", "A100 SXM4", 40536, "A100-40GB-SXM"),
        ("vast", "A100 SXM4", 81251, "A100-80GB-SXM"),
        ("vastai", "A100 SXM4", None, None),
        ("vastai", "A100 PCIE", 40536, "A100-40GB-PCIe"),
        ("vastai", "Tesla V100", 16160, "V100-16GB"),
        ("vastai", "Tesla V100", 32510, "V100-32GB"),
        ("vastai", "RTX 4090", 24564, "RTX4090"),
        ("vastai", "RTX 4090D", 24564, None),
        ("vastai", "RTX 6000Ada", 49140, "RTX-6000-Ada"),
        ("vastai", "RTX PRO 6000 WS", 97887, "RTX-PRO-6000-Workstation"),
        ("vastai", "RTX 3080", 10240, None),
        ("digitalocean", "nvidia_h100", None, "H100-SXM"),
        ("digitalocean", "amd_mi325x", 262144, "MI325X"),
        ("hotaisle", "MI300X", None, "MI300X"),
        ("modal", "A100-80GB", None, "A100-80GB"),
        ("a-plugin", "NVIDIA L4", 23034, "L4"),
    ],
)
def test_a_clouds_own_id_is_matched_whole(
    cloud: str, name: str, mib: float | None, expected: str | None
) -> None:
    found = from_cloud_id(cloud, name, mib)
    assert (found.name if found else None) == expected


@pytest.mark.parametrize("model", list_gpus(), ids=lambda model: model.name)
def test_every_id_leads_back_to_its_card(model) -> None:
    for cloud, ids in model.ids.items():
        for name in ids:
            found = from_cloud_id(cloud, name, model.vram_gb * 1024 * 0.96)
            assert found is not None
            assert found.model.family == model.family
            assert found.vram_gb == model.vram_gb
            assert GpuRequest.parse(name).alternatives[0].accepts(found)


@pytest.mark.parametrize(
    ("name", "mib", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB-SXM"),
        ("A100-SXM4-40GB", 40536, "A100-40GB-SXM"),
        ("NVIDIA A100-PCIE-40GB", 40960, "A100-40GB-PCIe"),
        ("NVIDIA A100 80GB PCIe", 81559, "A100-80GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100-SXM"),
        ("NVIDIA H100 PCIe", 81559, "H100-PCIe"),
        ("NVIDIA H100 NVL", 95830, "H100-NVL"),
        ("NVIDIA H200", 143771, "H200-SXM"),
        ("NVIDIA H200 NVL", 143771, "H200-NVL"),
        ("NVIDIA GH200 480GB", 97871, "GH200"),
        ("NVIDIA B200", 183359, "B200"),
        ("NVIDIA B300 SXM6 AC", 275040, "B300"),
        ("Tesla T4", 15109, "T4"),
        ("Tesla V100-SXM2-16GB", 16160, "V100-16GB-SXM"),
        ("NVIDIA L4", 23034, "L4"),
        ("NVIDIA A10G", 23028, "A10G"),
        ("NVIDIA A10", 23028, "A10"),
        ("NVIDIA L40S", 46068, "L40S"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX4090"),
        ("NVIDIA GeForce RTX 5090", 32607, "RTX5090"),
        ("NVIDIA RTX A6000", 49140, "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 4500 Blackwell", 32623, "RTX-PRO-4500"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            97887,
            "RTX-PRO-6000-Max-Q",
        ),
        ("AMD Instinct MI300X OAM", 196592, "MI300X"),
        ("AMD Instinct MI300X VF", 196592, "MI300X"),
        ("AMD Instinct MI300X", None, "MI300X"),
        ("AMD Instinct MI325X", 262128, "MI325X"),
        ("NVIDIA A100", 40960, "A100-40GB"),
        ("NVIDIA A100", None, None),
        ("NVIDIA GeForce RTX 4090 D", 24564, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9984, None),
        ("NVIDIA A100-SXM-64GB", 65536, None),
        ("Quadro RTX 6000", 24576, None),
        ("GRID A100-10C", 10240, None),
        ("", None, None),
    ],
)
def test_a_drivers_name_is_read(name: str, mib: float | None, expected: str | None) -> None:
    found = from_product_name(name, mib)
    assert (found.name if found else None) == expected


def test_a_form_factor_that_nobody_told_is_no_contradiction() -> None:
    catalog = load_catalog()
    plain, sxm, pcie = (catalog.variant(name) for name in ("H100", "H100-SXM", "H100-PCIe"))
    assert plain
    assert sxm
    assert pcie
    assert sxm.is_a(plain)
    assert plain.is_a(sxm)
    assert not sxm.is_a(pcie)
    other = catalog.variant("H200-SXM")
    assert other
    assert not other.is_a(sxm)


def test_c23_known_cards_have_their_nominal_memory_whatever_is_reported() -> None:
    reported = {
        "RTX 4090": 24217,
        "L4": 22.5 * 1024,
        "RTX 3090": 24 * 1024,
        "RTX A5000": 23028,
        "RTX 4080": 16376,
    }
    nominal = {
        name: nominal_vram_gb(from_cloud_id("vastai", name, mib), mib) for name, mib in reported.items()
    }
    assert nominal == {"RTX 4090": 24, "L4": 24, "RTX 3090": 24, "RTX A5000": 24, "RTX 4080": 15.99}


# A file of the user's own.

OWN = """
[clouds]
acme = ["ac-me"]

[gpu.RTX4080]
label = "NVIDIA GeForce RTX 4080"
vram_gb = 16
architecture = "cuda"
generation = "ada"
clouds.vastai = { ids = ["RTX 4080"], max_count = 8 }
clouds.acme = { ids = ["gf-4080"], instances = { "a1.large" = 2 } }

[gpu.T4]
notes = "Ours are slow."
clouds.acme = { ids = ["t4"], max_count = 1 }

[pools]
OURS = ["RTX4080", "T4"]
ADA_24 = ["RTX4090"]
"""


def test_a_file_of_ones_own_extends_and_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "gpus.toml"
    own.write_text(OWN)
    assert load_catalog(own) is load_catalog(own)
    monkeypatch.setenv("GPU_FLOWS_CATALOG", str(own))
    assert find("rtx 4080").vram_gb == 16
    assert find("T4").notes == "Ours are slow."
    assert set(find("T4").providers) == {"aws", "vastai", "modal", "acme"}
    assert [model.name for model in list_gpus("AC-ME")] == ["T4", "RTX4080"]
    assert str(GpuRequest.parse("ours:2, RTX_4080-16GB, a1.large")) == "OURS:2, RTX4080, a1.large:2"
    assert not GpuRequest.parse("ADA_24").alternatives[0].accepts("L4")
    monkeypatch.delenv("GPU_FLOWS_CATALOG")
    with pytest.raises(BadRequest):
        GpuRequest.parse("OURS")


CARD = '[gpu.X1]\nlabel = "X"\nvram_gb = 8\narchitecture = "cuda"\ngeneration = "ada"\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gpu = [", "is not TOML"),
        ("gpus = {}", "gpus is not a key.*did you mean gpu"),
        ("[gpu]\nX1 = 3", r"gpu.X1 must be a table"),
        (CARD.replace("vram_gb = 8\n", ""), r"gpu.X1.vram_gb is missing"),
        (CARD.replace("= 8", "= true"), r"gpu.X1.vram_gb must be a whole number"),
        (CARD.replace("= 8", "= -8"), r"gpu.X1.vram_gb must be a whole number"),
        (CARD.replace("vram_gb", "vram"), r"gpu.X1.vram is not a key.*did you mean vram_gb"),
        (CARD.replace("cuda", "metal"), r"gpu.X1.architecture must be cuda or rocm"),
        (CARD + "aliases = 'x'", r"gpu.X1.aliases must be a list"),
        (CARD + "clouds.runpd = { ids = ['x'], max_count = 1 }", r"clouds.runpd.*did you mean runpod"),
        (CARD + "clouds.runpod = { ids = ['x'] }", r"clouds.runpod.max_count is missing"),
        (CARD + "clouds.runpod = { ids = { x = 'SXM' }, max_count = 1 }", r"ids.x names no form factor"),
        (CARD + "aliases = ['A100']", r"'A100' could mean"),
        (CARD.replace("X1", "H100-SXM"), r"'H100-SXM' is the name of two cards"),
        (CARD + "successor = 'B20'", r"no card is called 'B20'.*did you mean B200"),
        ("[pools]\nP = ['H10']", r"pools.P names 'H10'.*did you mean H100"),
    ],
)
def test_a_broken_file_is_one_clear_error(tmp_path: Path, text: str, complaint: str) -> None:
    own = tmp_path / "gpus.toml"
    own.write_text(text)
    with pytest.raises(SettingsError, match=complaint) as caught:
        load_catalog(own)
    assert str(own) in str(caught.value)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot be read.*GPU_FLOWS_CATALOG"):
        load_catalog(tmp_path / "none.toml")


def test_nothing_is_read_before_the_first_question() -> None:
    script = """
import sys
import gpu_flows.gpus
from gpu_flows.gpus import GpuRequest, list_gpus, GpuGroup
assert "tomllib" not in sys.modules
assert not {"pydantic", "rich", "asyncssh", "torch", "httpx"} & set(sys.modules)
list_gpus()
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    with pytest.raises(AttributeError):
        _ = sys.modules["gpu_flows.gpus"].nothing_of_that_name


def test_loading_is_quick(tmp_path: Path) -> None:
    own = tmp_path / "empty.toml"
    own.write_text("")
    start = time.process_time()
    load_catalog(own)
    assert time.process_time() - start < 0.2


def test_names_are_compared_whole() -> None:
    assert key("RTX 4090") == key("rtx-4090") == key("Rtx_4090") == key(" RTX4090 ")
    assert key("A10-0") != key("A100")
    assert key("H100-") != key("H100")
    assert key("") == ""
