"""The methods that `headrank evaluate` compares, built from their names."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headbank.errors import InputError
from headbank.jobs.evaluate import Method
from headbank.models.base import HeadRunner
from headbank.models.loading import load_runner
from headbank.rerankers.base import Reranker
from headbank.rerankers.bm25 import BM25
from headbank.rerankers.dense import Dense
from headbank.rerankers.fusion import FusionReranker
from headbank.rerankers.heads import HeadReranker, icr_set, open_bank
from headbank.rerankers.llm import ListwiseLLM
from headbank.types import JOINT, Aggregation, RankOptions, View

FROM_BANK = ("heads", "expert", "contrastive", "qr", "greedy", "weighted", "fusion")
"""Methods that need the model and its bank; all but the first and the last are names of detectors."""


@dataclass
class Built:
    """Methods, and what they run on."""

    methods: list[Method] = field(default_factory=list)
    runner: HeadRunner | None = None
    described: dict[str, Any] = field(default_factory=dict)
    """For the JSON file."""


def build_methods(
    names: Sequence[str],
    views: Sequence[View],
    *,
    model: str,
    bank: Path | None,
    dense_model: str,
    dtype: str,
    device: str,
    threads: int | None,
    response_tokens: int,
) -> Built:
    """Build the named methods, those on heads once per view. Raises as loading the model, bank and baselines does."""
    built = Built()
    baselines: dict[str, Reranker] = {}
    if "bm25" in names or "fusion" in names:
        baselines["bm25"] = BM25()
    if "dense" in names:
        baselines["dense"] = Dense(dense_model, device=None if device == "auto" else device)
        built.described["dense_model"] = dense_model
    if any(name in (*FROM_BANK, "icr", "llm") for name in names):
        runner = load_runner(model, dtype=dtype, device=device, threads=threads)
        built.runner = runner
        built.described |= {"model": runner.info.model_id, "dtype": runner.info.dtype}
        _add_head_methods(built, runner, names, views, bank, baselines, response_tokens)
        if "llm" in names:
            built.methods.append(Method("llm", ListwiseLLM(runner), RankOptions()))
    built.methods += [Method(name, reranker, RankOptions()) for name, reranker in baselines.items()]
    return built


def _add_head_methods(
    built: Built,
    runner: HeadRunner,
    names: Sequence[str],
    views: Sequence[View],
    bank: Path | None,
    baselines: dict[str, Reranker],
    response_tokens: int,
) -> None:
    loaded = open_bank(bank, runner.info) if any(name in FROM_BANK for name in names) else None
    for name in names:
        if name == "icr":
            style = loaded.head_set("query").style if loaded else JOINT
            icr = HeadReranker(runner, None, detector="icr", name="icr")
            options = RankOptions(layout=style.layout)
            built.methods.append(Method(f"icr ({style})", icr, options, icr_set(runner.info, style)))
        if name not in FROM_BANK or loaded is None:
            continue
        for view in views:
            options = RankOptions(view=view)
            if name == "fusion":
                fusion = loaded.fusion(view)
                if "dense" in fusion.voters and fusion.dense_model != built.described.get("dense_model"):
                    raise InputError(
                        "dense-model", f"fusion {fusion.name} needs dense with {fusion.dense_model}"
                    )
                reranker = HeadReranker(runner, loaded, response_tokens=response_tokens)
                row = FusionReranker(reranker, loaded, baselines)
                heads = loaded.head_sets[fusion.head_set]
                built.methods.append(Method(f"fusion ({view})", row, options, heads, fusion=fusion))
                continue
            detector = None if name == "heads" else name
            heads = loaded.head_set(view, detector=detector)
            voting = HeadReranker(runner, loaded, detector=detector, response_tokens=response_tokens)
            label = f"{name} vote ({view})" if name == "expert" else f"{name} ({view})"
            rule: Aggregation | None = "borda" if name == "expert" else None
            built.methods.append(Method(label, voting, options, heads, rule))
            built.described.setdefault("head_sets", {})[label] = heads.name
