"""One verb for every method: rank a query's documents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headbank.errors import NonFiniteScore
from headbank.types import Ranking, RankOptions


@dataclass(frozen=True)
class Task:
    """One ranking to make."""

    query: str
    documents: tuple[str, ...]
    options: RankOptions


class Reranker(Protocol):
    """A method of ranking; construction may load a model, `rank` never does."""

    @property
    def name(self) -> str:
        """The value of `method` that selects it."""
        ...

    def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Ranking:
        """Score every document; zero, one, empty and duplicated documents are legal.

        Raises InputTooLong when the input cannot fit, NonFiniteScore when a score is NaN or infinite.
        """
        ...


def by_score(scores: Sequence[float]) -> tuple[int, ...]:
    """Input indices, best first: score descending, then index, so that equal scores keep one order.

    Raises NonFiniteScore for a NaN or infinite score.
    """
    if not all(math.isfinite(score) for score in scores):
        raise NonFiniteScore("a document's score is not a finite number")
    return tuple(sorted(range(len(scores)), key=lambda i: (-scores[i], i)))
