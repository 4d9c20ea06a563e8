"""Shards made by hand, and statistics of planted masses, for tests of what comes after the capture."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headbank.jobs.capture import TOKEN_SCALE, Shard
from headbank.jobs.detect import Problem, SelectConfig
from headbank.jobs.statistics import view_statistics
from headbank.types import JOINT, PromptStyle, View
from tests.support.planted_masses import planted_samples

QUICK = SelectConfig(count=2, panel=3, exponents=(0.0, 1.0), strengths=(0.1,), folds=3)
"""Few enough combinations for a test."""


def shard_of(
    mass: Tensor,
    gold: Sequence[bool],
    *,
    null: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    question: int = 0,
    name: str = "s",
) -> Shard:
    """A shard whose query rows give `mass` [P, L, H, D] to the documents, spread evenly over their tokens.

    The reference mass is 0.1 everywhere, the content-free query gives a tenth of the mass unless `null` says more.
    """
    null = mass / 10 if null is None else null
    sizes = torch.tensor(lengths or [4] * mass.shape[-1])

    def tokens(masses: Tensor) -> Tensor:
        return ((masses / sizes).repeat_interleave(sizes, dim=-1) * TOKEN_SCALE).to(torch.float16)

    return Shard(
        name,
        {
            "relevance": torch.tensor(gold).long(),
            "lengths": sizes,
            "token_ids": torch.arange(int(sizes.sum())),
            "query_ids": torch.tensor([7, question]),
            "prompt_tokens": torch.tensor(100),
            "query.mass": mass.float(),
            "query.reference": torch.full(mass.shape[:-1], 0.1),
            "query.tokens": tokens(mass),
            "null.mass": null.float(),
            "null.reference": torch.full(mass.shape[:-1], 0.1),
            "null.tokens": tokens(null),
        },
    )


def with_response(shard: Shard, steps: Tensor, counts: Sequence[int]) -> Shard:
    """The shard with a response view too: rows `steps` [P, S, L, H, D], of which `counts` [P] were written."""
    tensors = {
        "response.mass": steps.float(),
        "response.reference": torch.full(steps.shape[:-1], 0.1),
        "response.steps": torch.tensor(counts),
    }
    return Shard(shard.sample_id, shard.tensors | tensors)


def planted_shards(n: int = 12, seed: int = 0) -> list[Shard]:
    """`tests.support.planted_masses` as shards of one placement, one question each."""
    return [
        shard_of(
            sample.mass[None],
            sample.gold.tolist(),
            null=sample.null_mass[None],
            question=i,
            name=f"s{i}",
        )
        for i, sample in enumerate(planted_samples(n, seed))
    ]


def problem_of(
    shards: Sequence[Shard],
    *,
    view: View = "query",
    style: PromptStyle = JOINT,
    config: SelectConfig = QUICK,
    layers: Sequence[bool] | None = None,
    **options: Any,
) -> Problem:
    """A problem over shards; `layers` may vote, None: all."""
    statistics = view_statistics(shards, view, style, **options)
    n_layers = statistics.mass[0].shape[1]
    return Problem(statistics, config, torch.tensor(layers or [True] * n_layers))
