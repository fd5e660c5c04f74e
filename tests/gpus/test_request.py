"""The grammar of requests: spellings, marks, counts, pools, and typos that buy nothing."""

import copy
import enum
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_flows.errors import BadRequest
from gpu_flows.gpus import GpuAlternative, GpuGroup, GpuRequest, GpuType, list_gpus, load_catalog
from gpu_flows.gpus.model import Kind

VOCABULARY = sorted({selection.name for selection in load_catalog().vocabulary.words.values()})
INSTANCES = sorted(
    name for model in list_gpus() for listing in model.clouds.values() for name in listing.instances
)


def only(asked: object) -> GpuAlternative:
    (alternative,) = GpuRequest.parse(asked).alternatives  # type: ignore[arg-type]
    return alternative


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("H100", "H100"),
        ("H100:1", "H100"),
        ("H100:8", "H100:8"),
        ("A100-80GB:4", "A100-80GB:4"),
        ("A100-SXM", "A100-SXM"),
        ("a100 sxm4", "A100-SXM"),
        ("A100-SXM-80GB", "A100-80GB-SXM"),
        ("A100 80GB PCIe", "A100-80GB-PCIe"),
        ("H100!:8", "H100!:8"),
        ("H100 ! : 8", "H100!:8"),
        ("B200+", "B200+"),
        ("B200+:8", "B200+:8"),
        ("RTX4090", "RTX4090"),
        ("RTX 4090", "RTX4090"),
        ("rtx-4090", "RTX4090"),
        ("RTX_4090", "RTX4090"),
        ("MI300X-192GB", "MI300X"),
        ("RTX-PRO-6000", "RTX-PRO-6000"),
        ("RTXPro6000", "RTX-PRO-6000"),
        ("RTX PRO 6000 Max-Q", "RTX-PRO-6000-Max-Q"),
        ("RTX 6000 Ada", "RTX-6000-Ada"),
        ("A6000:2", "RTX-A6000:2"),
        ("L4-24GB", "L4"),
        ("A10G-24GB", "A10G"),
        ("H100-80GB", "H100-80GB"),
        ("H100-94GB", "H100-NVL"),
        ("AMPERE_80", "AMPERE_80"),
        ("ampere-80:4", "AMPERE_80:4"),
        ("ANY", "ANY"),
        ("any:2", "ANY:2"),
        ("NVIDIA_A100_80GB_PCIe", "A100-80GB-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA GeForce RTX 4090:2", "RTX4090:2"),
        ("Tesla T4", "T4"),
        ("Tesla V100", "V100"),
        ("nvidia_rtx4000_ada", "RTX-4000-Ada"),
        ("AMD Instinct MI325X OAM", "MI325X"),
        ("p5.48xlarge", "p5.48xlarge:8"),
        ("p5.48xlarge:2", "p5.48xlarge:2"),
        ("gpu-h100x1-80gb", "gpu-h100x1-80gb:1"),
        ("cpu", "cpu"),
        ("CPU:2", "cpu:2"),
        ("raw:RTX_4080", "raw:RTX_4080"),
        ("RAW : My Card! : 4", "raw:My Card!:4"),
        ("H100:08", "H100:8"),
        (" H100:8 , a100-80gb:8 ", "H100:8, A100-80GB:8"),
        (["H100!:8", "A100-80GB:8"], "H100!:8, A100-80GB:8"),
        (["H100", "h100 ", "H100-80GB"], "H100, H100-80GB"),
    ],
)
def test_spellings(written: object, canonical: str) -> None:
    request = GpuRequest.parse(written)  # type: ignore[arg-type]
    assert str(request) == canonical
    assert GpuRequest.parse(canonical) == request
    assert GpuRequest.from_json(json.loads(json.dumps(request.to_json()))) == request
    assert pickle.loads(pickle.dumps(copy.deepcopy(request))) == request


@pytest.mark.parametrize(
    ("typo", "part", "suggestion"),
    [
        ("A100-8:8", "A100-8", "A100"),
        ("H10:1", "H10", "H100"),
        ("A10O:2", "A10O", "A10"),
        ("H100:0", "'0'", None),
        ("H100:-1", "'-1'", None),
        ("H100:1.5", "'1.5'", None),
        ("H100:8:2", "8:2", "NAME:COUNT"),
        (":4", "name of the GPU is missing", None),
        ("H100:", "''", None),
    ],
)
def test_c21_a_typo_buys_nothing_and_is_told_what_it_may_have_meant(
    typo: str, part: str, suggestion: str | None
) -> None:
    with pytest.raises(BadRequest) as caught:
        GpuRequest.parse(typo)
    assert isinstance(caught.value, ValueError)
    assert part in str(caught.value)
    assert suggestion is None or suggestion in (caught.value.hint or "")


def test_c21_case_and_blanks_do_not_count() -> None:
    assert str(GpuRequest.parse("a100-80gb : 2")) == "A100-80GB:2"


@pytest.mark.parametrize(
    "wrong",
    [
        *("", " ", ",", "H100,", "A1-00", "A10-0", "A10080GB", "A100-60GB", "A100-NVL", "H100-", "-H100"),
        *("RTX 6000", "RTX4090D", "RTX4090 Ti", "4090", "8xH100", "H100x8", "H100:8!", "H100:8+", "H100=8"),
        *("H100!+", "T4+", "A100+", "ANY!", "AMPERE_80+", "cpu!", "cpu+", "p5.48xlarge!", "p5.48xlarge:9"),
        *("H100:99999", "H100:８", "H100:+8", "H100:eight", "raw:", "raw: :2", "raw:x:0", "raw:a\x00b", "!"),
        *(
            "!:8",
            "cpu:0",
            "x" * 10_000,
            "H100" * 500,
            "GpuGroup.AMPERE_80",
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        ),
        *(
            [],
            None,
            5,
            True,
            {"H100": 8},
            {"H100"},
            [["H100"]],
            ["H100", None],
            b"H100",
            enum.Enum("E", "A").A,
        ),  # type: ignore[attr-defined]
    ],
)
def test_malformed_requests_are_refused(wrong: object) -> None:
    with pytest.raises(BadRequest):
        GpuRequest.parse(wrong)  # type: ignore[arg-type]


def test_a_memory_that_a_card_does_not_have_is_named() -> None:
    with pytest.raises(BadRequest, match="A100 has 40 GB or 80 GB, not 60 GB"):
        GpuRequest.parse("A100-60GB:2")


@pytest.mark.parametrize("member", [*GpuGroup, *GpuType], ids=lambda member: member.name)
def test_runpods_members_are_understood_by_name_and_by_value(member: enum.StrEnum) -> None:
    foreign = enum.Enum(type(member).__name__, {member.name: member.value})  # as in RunPod's own SDK
    assert (
        GpuRequest.parse(member)
        == GpuRequest.parse(member.name)
        == GpuRequest.parse([member.value])
        == GpuRequest.parse(foreign[member.name])
    )


@pytest.mark.parametrize(
    ("pool", "members"),
    {
        "AMPERE_16": "RTX-A4000 RTX-4000-Ada RTX-2000-Ada",
        "AMPERE_24": "RTX-A4500 RTX-A5000 RTX3090",
        "ADA_24": "L4 RTX4090",
        "ADA_32_PRO": "RTX5090",
        "AMPERE_48": "A40 RTX-A6000",
        "ADA_48_PRO": "L40S L40 RTX-6000-Ada",
        "AMPERE_80": "A100-80GB A100-80GB-PCIe A100-80GB-SXM",
        "ADA_80_PRO": "H100-SXM",
        "BLACKWELL_96": "RTX-PRO-6000 RTX-PRO-6000-Server RTX-PRO-6000-Workstation RTX-PRO-6000-Max-Q",
        "HOPPER_141": "H200 H200-SXM H200-NVL",
        "BLACKWELL_180": "B200",
    }.items(),
)
def test_pools(pool: str, members: str) -> None:
    assert pool in GpuGroup.__members__
    assert only(pool).variants() == set(members.split())
    assert only(pool).kind is Kind.POOL


def test_any_is_every_card_but_no_cpu() -> None:
    asked = only("ANY")
    assert all(asked.accepts(model.name) for model in list_gpus())
    assert not asked.accepts(None)
    assert not asked.accepts("RTX 4080")


@pytest.mark.parametrize(
    ("asked", "offered", "accepted"),
    [
        ("A100", "A100-40GB-PCIe", True),
        ("A100", "A100-80GB", True),
        ("A100-80GB", "A100-40GB", False),
        ("A100-80GB", "A100-80GB-SXM", True),
        ("A100-SXM", "A100-80GB-SXM", True),
        ("A100-SXM", "A100-80GB-PCIe", False),
        ("A100-SXM", "A100-80GB", False),
        ("H100", "H100-NVL", True),
        ("H100-80GB", "H100-NVL", False),
        ("H100", "H200-SXM", False),
        ("H100+", "H200-SXM", True),
        ("B200+", "B300", True),
        ("B200", "B300", False),
        ("A10", "A10G", False),
        ("L40", "L40S", False),
        ("RTX4090", "RTX 4090D", False),
        ("raw:RTX_4090D", "RTX 4090D", True),
        ("p5.48xlarge", "H100-SXM", True),
        ("p5.48xlarge", "H100-PCIe", False),
        ("cpu", None, True),
        ("cpu", "T4", False),
        ("T4", None, False),
    ],
)
def test_what_an_alternative_accepts(asked: str, offered: str | None, accepted: bool) -> None:
    assert only(asked).accepts(offered) is accepted
    variant = load_catalog().variant(offered) if offered else None
    if variant:
        assert only(asked).accepts(variant) is accepted


@pytest.mark.parametrize(
    ("asked", "offered", "accepted"),
    [
        ("H100", "H200", True),
        ("H100-SXM", "H200-SXM", True),
        ("H100-SXM", "H200-NVL", False),
        ("H100-PCIe", "H200-SXM", False),
        ("H100!", "H200", False),
        ("A100-40GB", "A100-80GB-SXM", True),
        ("A100-40GB!", "A100-80GB", False),
        ("A100-80GB", "A100-40GB", False),
        ("B200", "B300", False),
        ("V100-16GB", "V100-32GB", False),
    ],
)
def test_upgrades_only_under_a_price_cap_and_never_with_a_mark(
    asked: str, offered: str, accepted: bool
) -> None:
    assert only(asked).accepts(offered, price_capped=True) is accepted
    assert not only(asked).accepts(offered, price_capped=False)


def test_ids_worth_asking_a_cloud_for() -> None:
    assert GpuRequest.parse("A100-80GB").ids_for("runpod") == (
        "NVIDIA A100 80GB PCIe",
        "NVIDIA A100-SXM4-80GB",
    )
    assert GpuRequest.parse("A100-40GB!").ids_for("runpod") == ()
    assert GpuRequest.parse("A100-40GB").ids_for("runpod", price_capped=False) == ()
    assert set(GpuRequest.parse("H100, p5.48xlarge").ids_for("vastai")) == {
        *("H100 PCIE", "H100 SXM", "H100 NVL", "H200", "H200 NVL")
    }
    assert GpuRequest.parse("p5.48xlarge").ids_for("vastai") == ()
    assert GpuRequest.parse("p5.48xlarge").ids_for("aws") == ("H100",)
    assert GpuRequest.parse("cpu").ids_for("aws") == ()


def test_cpu_alone() -> None:
    assert GpuRequest.parse(["cpu:4", "cpu"]).is_cpu
    assert not GpuRequest.parse("cpu, T4").is_cpu


# Properties.

counts = st.integers(1, 9999).map(lambda count: f":{count}") | st.just("")
raw_names = st.text(min_size=1, max_size=100).filter(
    lambda text: text.strip() and text.isprintable() and not set(",:") & set(text)
)
items = st.one_of(
    st.builds("{}{}{}".format, st.sampled_from(VOCABULARY), st.sampled_from(["", "!", "+"]), counts),
    st.builds("{}{}".format, st.sampled_from(["cpu", "CPU", *GpuType, *GpuGroup]), counts),
    st.builds("raw:{}{}".format, raw_names, counts),
    st.sampled_from(INSTANCES),
)
fragments = st.lists(
    st.sampled_from(["H100", "A100", "80GB", "SXM", "RTX", "4090", "raw", "cpu", "ANY", *":!+-_ ,0189OxX\n"])
).map("".join)


def understood(asked: object) -> GpuRequest | None:
    try:
        return GpuRequest.parse(asked)  # type: ignore[arg-type]
    except BadRequest:
        return None


@given(st.lists(items, min_size=1, max_size=4))
def test_a_request_survives_being_written_down(texts: list[str]) -> None:
    request = understood(texts)
    if request is None:  # some marks belong to no pool, some cards have no successor
        return
    assert GpuRequest.parse(str(request)) == request
    assert GpuRequest.parse(list(request.alternatives)) == request
    assert GpuRequest.from_json(request.to_json()) == request


@given(st.text() | fragments | st.lists(st.text() | fragments, max_size=3))
def test_any_text_is_understood_or_refused(asked: object) -> None:
    request = understood(asked)
    if request is not None:
        assert GpuRequest.parse(str(request)) == request
        assert all(alternative.count >= 1 for alternative in request.alternatives)


@given(st.sampled_from(VOCABULARY), counts, st.data())
def test_case_blanks_dashes_and_underscores_do_not_count(name: str, count: str, data: st.DataObject) -> None:
    written = ""
    for index, char in enumerate(name):
        if char in "-_ ":
            between_digits = name[index - 1].isdigit() and name[index + 1].isdigit()
            choices = ["-", "_", " ", " - "] + ([] if between_digits else [""])
            written += data.draw(st.sampled_from(choices))
        else:
            written += data.draw(st.sampled_from([char.lower(), char.upper()]))
    blank = data.draw(st.sampled_from(["", " "]))
    assert GpuRequest.parse(f"{blank}{written}{blank}{count}") == GpuRequest.parse(f"{name}{count}")
