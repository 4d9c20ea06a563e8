"""Do scores mean the same when the candidate set is split? Whole sets against their halves, by `evidence`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from headbank.errors import HeadRankError, InputError
from headbank.numerics.evidence import flipped_pairs
from headbank.numerics.metrics import mean_with_interval
from headbank.rerankers.base import Task
from headbank.rerankers.heads import HeadReranker
from headbank.types import Ranking, RankOptions, Sample

SPLIT_DOCUMENTS = 16


@dataclass(frozen=True)
class Stability:
    """How often pairs change their order when a set is ranked in two halves."""

    questions: int
    flipped: dict[str, float]
    """Share of flipped pairs over questions: mean, low, high (95 % bootstrap)."""


def split_stability(
    reranker: HeadReranker, samples: Sequence[Sample], options: RankOptions, count: int, seed: int = 0
) -> Stability:
    """Rank the first 16 documents of the first `count` questions that have so many, whole and in halves; compare z.

    Raises InputError when no question has 16 documents, and what ranking raises.
    """
    chosen = splittable(samples)[:count]
    if not chosen:
        raise InputError("data", f"no question has {SPLIT_DOCUMENTS} documents", SPLIT_DOCUMENTS)
    by_evidence = replace(options, aggregation="evidence")
    shares = []
    for sample in chosen:
        documents = tuple(document.content for document in sample.documents[:SPLIT_DOCUMENTS])
        half = SPLIT_DOCUMENTS // 2
        parts = (documents, documents[:half], documents[half:])
        whole, first, second = (
            _z(result)
            for result in reranker.rank_many([Task(sample.question, p, by_evidence) for p in parts])
        )
        indices = list(range(SPLIT_DOCUMENTS))
        shares.append(flipped_pairs(whole, [(indices[:half], first), (indices[half:], second)]))
    return Stability(len(chosen), mean_with_interval(shares, seed))


def splittable(samples: Sequence[Sample]) -> list[Sample]:
    """The questions with at least 16 documents."""
    return [sample for sample in samples if len(sample.documents) >= SPLIT_DOCUMENTS]


def _z(result: Ranking | HeadRankError) -> torch.Tensor:
    if isinstance(result, HeadRankError):
        raise result
    assert result.raw_scores is not None, "evidence gives log-odds"
    return torch.tensor(result.raw_scores, dtype=torch.float64)
