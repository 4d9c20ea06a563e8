"""How two banks differ."""

from dataclasses import replace

import headbank.bank as banks
from headbank.bank import FINGERPRINT_FIELDS, Difference
from headbank.types import HeadId
from tests.bank.sample_bank import expert_set, fusion, model_info, sample_bank, weighted_set

SETS = sample_bank().head_sets


def test_equal_banks_do_not_differ() -> None:
    assert banks.diff(sample_bank(), sample_bank()) == []


def test_maps_metrics_and_records_are_not_compared() -> None:
    heads = replace(weighted_set(), dev_metrics={})
    other = sample_bank(
        info=model_info(model_id="other", dtype="bfloat16"),
        head_sets=SETS | {heads.name: heads},
        fusions={fusion().name: replace(fusion(), dev_metrics={})},
        maps={},
        training={},
    )
    assert banks.diff(sample_bank(), other) == []


def test_every_field_of_the_fingerprint_is_compared() -> None:
    other = replace(model_info(), **{field: f"other {field}" for field in FINGERPRINT_FIELDS})
    assert banks.diff(sample_bank(), sample_bank(info=other)) == [
        Difference(f"model: {field}", getattr(model_info(), field), f"other {field}")
        for field in FINGERPRINT_FIELDS
    ]


def test_sets_and_fusions_of_one_bank_only() -> None:
    few = sample_bank(head_sets={"expert.query.joint": expert_set("query")}, fusions={}, defaults={})
    gone = [
        Difference("default: query", "weighted.query.parallel", None),
        Difference("default: response", "expert.response.joint", None),
        Difference("head set expert.response.joint", "expert.response.joint", None),
        Difference("head set icr.query.joint", "icr.query.joint", None),
        Difference("head set weighted.query.parallel", "weighted.query.parallel", None),
        Difference("fusion fusion.query.parallel", "fusion.query.parallel", None),
    ]
    assert banks.diff(sample_bank(), few) == gone
    assert banks.diff(few, sample_bank()) == [replace(d, left=None, right=d.left) for d in gone]


def test_what_differs_in_a_set_is_named() -> None:
    heads = (HeadId(4, 1), HeadId(5, 0), HeadId(1, 1))
    changed = replace(expert_set("query"), heads=heads, default_aggregation="rrf")
    weighted = replace(weighted_set(), weights=(0.5, 0.5))
    other = sample_bank(head_sets=SETS | {changed.name: changed, weighted.name: weighted})
    # Of four heads in all, L4H1 and L5H0 are in both.
    assert banks.diff(sample_bank(), other) == [
        Difference("head set expert.query.joint: heads", expert_set("query").heads, heads, 0.5),
        Difference("head set expert.query.joint: default_aggregation", "borda", "rrf"),
        Difference("head set weighted.query.parallel: weights", (0.7, -0.1), (0.5, 0.5)),
    ]


def test_the_same_heads_in_another_order_differ() -> None:
    changed = replace(expert_set("query"), heads=expert_set("query").heads[::-1])
    (found,) = banks.diff(sample_bank(), sample_bank(head_sets=SETS | {changed.name: changed}))
    assert (found.part, found.jaccard) == ("head set expert.query.joint: heads", 1.0)


def test_defaults_and_fusions() -> None:
    other = sample_bank(
        defaults={"query": "icr.query.joint", "response": "expert.response.joint"},
        fusions={fusion().name: replace(fusion(), weights=(1.0, 0.0, 0.0), dense_model="other")},
    )
    assert banks.diff(sample_bank(), other) == [
        Difference("default: query", "weighted.query.parallel", "icr.query.joint"),
        Difference("fusion fusion.query.parallel: dense_model", "all-minilm-l6-v2", "other"),
        Difference("fusion fusion.query.parallel: weights", (0.6, 0.3, 0.2), (1.0, 0.0, 0.0)),
    ]
