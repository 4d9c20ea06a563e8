"""A small bank with every kind of content, made from arithmetic alone."""

from typing import Any

import torch

from headbank.bank import Bank
from headbank.types import VIEWS, Fusion, HeadId, HeadSet, ModelInfo, PromptStyle, View

PLACEMENTS, LAYERS, HEADS = 3, 6, 4


def model_info(**changes: Any) -> ModelInfo:
    fields: dict[str, Any] = {
        "model_id": "Owner/Tiny-Model",
        "revision": "r1",
        "config_hash": "c0ffee",
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": 2,
        "d_model": 32,
        "d_head": 8,
        "context_tokens": 2048,
        "windows": (None, 16, None, 16, None, 16),
        "tokenizer_hash": "70ce",
        "template_hash": "7e3a",
        "norm_hashes": tuple(f"n{layer}" for layer in range(LAYERS)),
        "dtype": "float32",
    }
    return ModelInfo(**(fields | changes))


def expert_set(view: View) -> HeadSet:
    """As few fields as a set may have: nothing is fitted."""
    return HeadSet(
        f"expert.{view}.joint",
        "expert",
        view,
        (HeadId(4, 1), HeadId(2, 3), HeadId(5, 0)),
        "borda",
        strict_experts=2,
        dev_metrics={
            "ndcg_at_2": 0.1 + 0.2,
            "samples": 7,
            "by_aggregation": {"borda": [0.5, 0.75]},
        },
    )


def weighted_set() -> HeadSet:
    """Every field differs from its default."""
    return HeadSet(
        "weighted.query.parallel",
        "weighted",
        "query",
        (HeadId(4, 1), HeadId(0, 0)),
        "evidence",
        PromptStyle("parallel", label=False, query_first=True, tail="total"),
        strict_experts=1,
        exponent=0.5,
        z_mean=(-1.5, 1 / 3),
        z_std=(0.25, 2.0),
        weights=(0.7, -0.1),
        platt=(1.25, -2.0),
        response_tokens=16,
        dev_metrics={"samples": 7},
    )


def all_heads_set() -> HeadSet:
    """Every head of the model."""
    heads = tuple(HeadId(layer, head) for layer in range(LAYERS) for head in range(HEADS))
    return HeadSet("icr.query.joint", "icr", "query", heads, "calibrated")


def fusion() -> Fusion:
    return Fusion(
        "fusion.query.parallel",
        "weighted.query.parallel",
        ("bm25", "dense"),
        "all-minilm-l6-v2",
        mean=(0.0, 2.5, 0.3),
        std=(1.0, 1.5, 0.1),
        weights=(0.6, 0.3, 0.2),
        platt=(1.5, -1.0),
        dev_metrics={"ndcg_at_2": 0.9},
    )


def _maps(view: View) -> dict[str, torch.Tensor]:
    cells = torch.arange(PLACEMENTS * LAYERS * HEADS, dtype=torch.float64).reshape(PLACEMENTS, LAYERS, HEADS)
    expert = torch.zeros(LAYERS, HEADS, dtype=torch.uint8)
    expert[4, 1] = expert[2, 3] = 1
    sensitive = expert.clone()
    sensitive[2] = 1
    return {
        f"expert.{view}.joint.frequency": cells / cells.max(),
        f"expert.{view}.joint.strength": (cells / 7).sin().abs().float(),
        f"expert.{view}.joint.soft": 1 - cells / (2 * cells.max()),
        f"expert.{view}.joint.expert": expert,
        f"expert.{view}.joint.sensitive": sensitive,
    }


def sample_bank(**changes: Any) -> Bank:
    sets = [*map(expert_set, VIEWS), weighted_set(), all_heads_set()]
    fields: dict[str, Any] = {
        "info": model_info(),
        "head_sets": {heads.name: heads for heads in sets},
        "fusions": {fusion().name: fusion()},
        "defaults": {"query": "weighted.query.parallel", "response": "expert.response.joint"},
        "maps": {name: values for view in VIEWS for name, values in _maps(view).items()},
        "training": {
            "data": {"name": "musique", "sha256": "da7a"},
            "sample_ids": ["s1", "s2", "s-ü"],
            "seed": 0,
            "thresholds": {"tau_f": 0.6, "tau_p": 0.9},
            "rejected": {"too_long": 1},
            "options": {"placements": None, "chat": True},
            "choice": {
                "query": [
                    {"name": "weighted.query.parallel", "NDCG@2": {"mean": 0.75, "low": 0.7, "high": 0.8125}},
                    {
                        "name": "expert.query.joint",
                        "NDCG@2": {"mean": 0.5, "low": 0.4, "high": 0.6},
                        "note": "x",
                    },
                ]
            },
        },
    }
    return Bank(**(fields | changes))
