"""Which banks are sound, and which head set or fusion a caller gets."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headbank.bank as banks
from headbank.bank import Bank
from headbank.errors import BankError
from headbank.types import HeadId, HeadSet, Layout, PromptStyle, View
from tests.bank.sample_bank import expert_set, fusion, sample_bank, weighted_set

FREQUENCY = sample_bank().maps["expert.query.joint.frequency"]
NAN, INF = float("nan"), float("inf")


def _sets(*sets: HeadSet) -> dict[str, Any]:
    return {"head_sets": sample_bank().head_sets | {heads.name: heads for heads in sets}}


def _expert(**changes: Any) -> dict[str, Any]:
    """The changes that put a changed unfitted set into the sample bank, under its old name."""
    return {
        "head_sets": sample_bank().head_sets | {"expert.query.joint": replace(expert_set("query"), **changes)}
    }


def _weighted(**changes: Any) -> dict[str, Any]:
    return {
        "head_sets": sample_bank().head_sets | {"weighted.query.parallel": replace(weighted_set(), **changes)}
    }


def _fusion(**changes: Any) -> dict[str, Any]:
    return {"fusions": {"fusion.query.parallel": replace(fusion(), **changes)}}


def _map(name: str, values: torch.Tensor) -> dict[str, Any]:
    return {"maps": {name: values}}


EXPERT, WEIGHTED = r"head set expert\.query\.joint: ", r"head set weighted\.query\.parallel: "
FUSION = r"fusion fusion\.query\.parallel: "
SOFT = "expert.query.joint.soft"

INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "no sets": ({"head_sets": {}, "fusions": {}, "defaults": {}}, r"^head_sets: a bank needs at least one"),
    "layer outside": (_expert(heads=(HeadId(6, 0),), strict_experts=0), EXPERT + r"L6H0 is outside"),
    "head outside": (_expert(heads=(HeadId(0, 4),), strict_experts=0), EXPERT + r"L0H4 is outside"),
    "negative head": (_expert(heads=(HeadId(0, -1),), strict_experts=0), EXPERT + r"L0H-1 is outside"),
    "duplicate": (_expert(heads=(HeadId(1, 1), HeadId(1, 1))), EXPERT + r"a head is named twice"),
    "no heads": (_expert(heads=(), strict_experts=0), EXPERT + r"it has no heads"),
    "too many experts": (_expert(strict_experts=4), EXPERT + r"strict_experts is 4, the set has 3 heads"),
    "negative experts": (_expert(strict_experts=-1), EXPERT + r"strict_experts is -1"),
    "other key": ({"head_sets": {"other": expert_set("query")}}, r"head set other: its own name differs"),
    "other detector": (_expert(detector="qr"), EXPERT + r"its name is not <detector>\.<view>\.<layout>"),
    "other view": (_expert(view="response"), EXPERT + r"its name is not <detector>"),
    "other layout": (_expert(style=PromptStyle("parallel")), EXPERT + r"its name is not <detector>"),
    "dotted detector": (
        _sets(replace(expert_set("query"), name="a.b.query.joint", detector="a.b")),
        r"head set a\.b\.query\.joint: its name is not <detector>",
    ),
    "no response tokens": (_expert(response_tokens=0), EXPERT + r"response_tokens is 0, at least 1"),
    "short z_mean": (_weighted(z_mean=(1.0,)), WEIGHTED + r"z_mean has 1 values, the set has 2 heads"),
    "long z_std": (_weighted(z_std=(1.0,) * 3), WEIGHTED + r"z_std has 3 values, the set has 2 heads"),
    "short weights": (_weighted(weights=(1.0,)), WEIGHTED + r"weights has 1 values, the set has 2 heads"),
    "z_mean alone": (_weighted(z_std=()), WEIGHTED + r"z_mean and z_std go together"),
    "z_std alone": (_weighted(z_mean=()), WEIGHTED + r"z_mean and z_std go together"),
    "weights alone": (_expert(weights=(1.0, 1.0, 1.0)), EXPERT + r"weights are of standardised log-odds"),
    "evidence without z": (
        _expert(default_aggregation="evidence"),
        EXPERT + r"its default_aggregation is evidence, z_mean is missing",
    ),
    "zero deviation": (_weighted(z_std=(1.0, 0.0)), WEIGHTED + r"z_std: a deviation is not positive"),
    "negative deviation": (_weighted(z_std=(-1.0, 1.0)), WEIGHTED + r"z_std: a deviation is not positive"),
    "NaN mean": (_weighted(z_mean=(1.0, NAN)), WEIGHTED + r"z_mean: a value is not a finite number"),
    "inf deviation": (_weighted(z_std=(1.0, INF)), WEIGHTED + r"z_std: a value is not a finite number"),
    "inf weight": (_weighted(weights=(-INF, 1.0)), WEIGHTED + r"weights: a value is not a finite number"),
    "negative exponent": (
        _weighted(exponent=-0.1),
        WEIGHTED + r"exponent is -0.1, it must be finite and not",
    ),
    "NaN exponent": (_weighted(exponent=NAN), WEIGHTED + r"exponent is nan, it must be finite"),
    "inf exponent": (_weighted(exponent=INF), WEIGHTED + r"exponent is inf, it must be finite"),
    "falling platt": (_weighted(platt=(-0.1, 0.0)), WEIGHTED + r"platt has a negative slope"),
    "NaN platt": (_weighted(platt=(1.0, NAN)), WEIGHTED + r"platt: a value is not a finite number"),
    "NaN metric": (
        _expert(dev_metrics={"p": {"q": [1.0, NAN]}}),
        EXPERT + r"dev_metrics.p.q\[1\] is not a finite number",
    ),
    "fusion's key": ({"fusions": {"fusion.x": fusion()}}, r"fusion fusion\.x: its own name differs"),
    "fusion of nothing": (
        _fusion(head_set="qr.query.parallel"),
        FUSION
        + r"head_set names qr\.query\.parallel; it has: expert\.query\.joint, expert\.response\.joint, ",
    ),
    "fusion's layout": (
        _fusion(head_set="expert.query.joint"),
        FUSION + r"its name is not fusion\.<view>\.<layout> of its head_set expert\.query\.joint",
    ),
    "fusion without z": (
        _weighted(z_mean=(), z_std=(), weights=(), default_aggregation="borda"),
        FUSION + r"its head_set weighted\.query\.parallel has no z_mean",
    ),
    "voter twice": (_fusion(voters=("bm25", "bm25"), dense_model=""), FUSION + r"voters must be distinct"),
    "unknown voter": (_fusion(voters=("bm25", "llm"), dense_model=""), FUSION + r".* of bm25, dense$"),
    "dense without model": (_fusion(dense_model=""), FUSION + r"dense_model names a model where dense"),
    "model without dense": (
        _fusion(voters=("bm25",), mean=(0.0,) * 2, std=(1.0,) * 2, weights=(1.0,) * 2),
        FUSION + r"dense_model names a model where dense",
    ),
    "fusion's mean": (_fusion(mean=(0.0,) * 2), FUSION + r"mean has 2 values, there are 3 features"),
    "fusion's std": (_fusion(std=(1.0,) * 4), FUSION + r"std has 4 values, there are 3 features"),
    "fusion's weights": (_fusion(weights=()), FUSION + r"weights has 0 values, there are 3 features"),
    "NaN in fusion's mean": (_fusion(mean=(0.0, NAN, 0.0)), FUSION + r"mean: a value is not a finite"),
    "inf in fusion's weights": (
        _fusion(weights=(0.0, 0.0, INF)),
        FUSION + r"weights: a value is not a finite",
    ),
    "fusion's zero std": (_fusion(std=(1.0, 0.0, 1.0)), FUSION + r"std: a deviation is not positive"),
    "fusion's platt": (_fusion(platt=(-1.0, 0.0)), FUSION + r"platt has a negative slope"),
    "fusion's inf platt": (_fusion(platt=(INF, 0.0)), FUSION + r"platt: a value is not a finite"),
    "fusion's metrics": (_fusion(dev_metrics={"p": INF}), FUSION + r"dev_metrics.p is not a finite number"),
    "default of nothing": (
        {"defaults": {"query": "qr.query.joint"}},
        r"defaults\.query: there is no head set qr\.query\.joint; it has: expert\.query\.joint, ",
    ),
    "default of another view": (
        {"defaults": {"response": "expert.query.joint"}},
        r"defaults\.response: the head set expert\.query\.joint is of another view",
    ),
    "inf in training": ({"training": {"tau": INF}}, r"training.tau is not a finite number"),
    "number as key": (
        {"training": {"rejected": {1: 2}}},
        r"training.rejected has a key that is not a string",
    ),
    "object in training": (
        {"training": {"path": Path("x")}},
        r"training.path is a PosixPath, not a JSON value",
    ),
    "map without layout": (
        _map("expert.query.soft", torch.zeros(6, 4)),
        r"expert\.query\.soft: its name is not",
    ),
    "map of another view": (_map("x.answer.joint.a", torch.zeros(6, 4)), r"its name is not <detector>"),
    "map of another layout": (_map("x.query.spiral.a", torch.zeros(6, 4)), r"its name is not <detector>"),
    "other shape": (_map(SOFT, torch.zeros(3, 4, 6)), r"shape \[3, 4, 6\] does not end in"),
    "one dimension": (_map(SOFT, torch.zeros(4)), r"shape \[4\] does not end in \[L, H\]"),
    "four dimensions": (_map(SOFT, torch.zeros(1, 1, 6, 4)), r"does not end in"),
    "other placements": (
        {"maps": {"expert.query.joint.frequency": FREQUENCY, SOFT: FREQUENCY[:2]}},
        r"map expert\.query\.joint\.soft: 2 placements, unlike other maps of expert\.query\.joint$",
    ),
    "half precision": (_map(SOFT, torch.zeros(6, 4).half()), r"dtype torch.float16 is not"),
    "inf in maps": (_map(SOFT, torch.full((6, 4), INF)), r"soft: a value is not a finite number"),
}


@pytest.mark.parametrize("kind", INVALID)
def test_what_is_wrong_with_a_bank_is_named(kind: str) -> None:
    changes, message = INVALID[kind]
    with pytest.raises(BankError, match=message):
        banks.validate(sample_bank(**changes))


SOUND: dict[str, dict[str, Any]] = {
    "sample": {},
    "placements by layout": {
        "maps": {
            "expert.query.joint.frequency": FREQUENCY,
            "expert.query.parallel.frequency": FREQUENCY[:2],
            "expert.response.joint.frequency": FREQUENCY[:1],
            "locos.query.joint.interval": torch.zeros(2, 6, 4),
        }
    },
    "no defaults": {"defaults": {}},
    "flat platt": _weighted(platt=(0.0, -1.0)),
    "no exponent": _weighted(exponent=0.0),
    "no weights": _weighted(weights=()),
    "no platt": _weighted(platt=None),
    "one voter": _fusion(
        voters=("bm25",),
        dense_model="",
        mean=(0.0,) * 2,
        std=(1.0,) * 2,
        weights=(-1.0,) * 2,
        platt=(0.0, 0.0),
    ),
}


@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_bank_is_accepted(kind: str) -> None:
    banks.validate(sample_bank(**SOUND[kind]))


def _bank(names: list[str], **defaults: str) -> Bank:
    """A bank of head sets and fusions by name."""
    sets = {}
    for name in names:
        detector, view, layout = name.split(".")
        sets[name] = HeadSet(name, detector, view, (HeadId(0, 0),), "borda", PromptStyle(layout))  # type: ignore[arg-type]
    return sample_bank(head_sets=sets, defaults=defaults)


BANK = _bank(
    [
        "expert.query.joint",
        "expert.query.parallel",
        "expert.response.joint",
        "qr.query.joint",
        "icr.response.parallel",
        "weighted.query.parallel",
    ],
    query="expert.query.parallel",
    response="expert.response.joint",
)


@pytest.mark.parametrize(
    ("view", "layout", "detector", "name"),
    [
        ("query", None, None, "expert.query.parallel"),
        ("response", None, None, "expert.response.joint"),
        # Another layout is voted on by the default's detector.
        ("query", "joint", None, "expert.query.joint"),
        ("query", "parallel", None, "expert.query.parallel"),
        ("response", "joint", None, "expert.response.joint"),
        # Another detector votes in the default's layout, or in its only one.
        ("query", None, "expert", "expert.query.parallel"),
        ("query", None, "weighted", "weighted.query.parallel"),
        ("query", None, "qr", "qr.query.joint"),
        ("response", None, "icr", "icr.response.parallel"),
        ("query", "joint", "qr", "qr.query.joint"),
        ("query", "joint", "expert", "expert.query.joint"),
    ],
)
def test_the_head_set_that_votes(view: View, layout: Layout | None, detector: str | None, name: str) -> None:
    assert BANK.head_set(view, layout=layout, detector=detector) is BANK.head_sets[name]


HAS = (
    r"; it has: expert\.query\.joint, expert\.query\.parallel, expert\.response\.joint, icr\.response\.parallel, "
    r"qr\.query\.joint, weighted\.query\.parallel$"
)


@pytest.mark.parametrize(
    ("view", "layout", "detector", "message"),
    [
        ("response", "parallel", None, r"has no expert\.response\.parallel" + HAS),
        ("query", "parallel", "qr", r"has no qr\.query\.parallel" + HAS),
        ("query", None, "core", r"has no core\.query\.joint or core\.query\.parallel" + HAS),
        ("response", None, "qr", r"has no qr\.response\.joint or qr\.response\.parallel" + HAS),
    ],
)
def test_a_head_set_that_is_missing(
    view: View, layout: Layout | None, detector: str | None, message: str
) -> None:
    with pytest.raises(BankError, match=message):
        BANK.head_set(view, layout=layout, detector=detector)


def test_a_view_without_a_default() -> None:
    bank = _bank(["expert.query.joint", "expert.query.parallel", "qr.query.joint"])
    with pytest.raises(
        BankError, match=r"no default head set of the view query; it has: expert\.query\.joint, "
    ):
        bank.head_set("query")
    with pytest.raises(BankError, match=r"no default head set of the view query"):
        bank.head_set("query", layout="joint")
    with pytest.raises(
        BankError, match=r"name a layout of expert\.query\.joint and expert\.query\.parallel$"
    ):
        bank.head_set("query", detector="expert")
    assert bank.head_set("query", detector="qr").name == "qr.query.joint"
    assert bank.head_set("query", layout="parallel", detector="expert").name == "expert.query.parallel"


def test_the_fusion_of_a_view() -> None:
    both = {
        f"fusion.query.{layout}": replace(fusion(), name=f"fusion.query.{layout}")
        for layout in ("joint", "parallel")
    }
    bank = sample_bank(fusions=both)
    assert bank.fusion("query") is both["fusion.query.parallel"]
    assert bank.fusion("query", "joint") is both["fusion.query.joint"]
    only = sample_bank(fusions={"fusion.query.joint": both["fusion.query.joint"]})
    assert only.fusion("query") is both["fusion.query.joint"]
    with pytest.raises(BankError, match=r"no fusion\.query\.parallel; it has: fusion\.query\.joint$"):
        only.fusion("query", "parallel")
    with pytest.raises(
        BankError, match=r"no fusion\.response\.joint or fusion\.response\.parallel; it has: none$"
    ):
        sample_bank(fusions={}).fusion("response")
