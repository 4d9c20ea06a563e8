"""Splitting a candidate set: how many pairs change their order."""

from collections.abc import Sequence

import pytest

from headbank.errors import InputError, InputTooLong
from headbank.jobs.stability import SPLIT_DOCUMENTS, split_stability
from headbank.rerankers.base import Task
from headbank.types import Document, Ranking, RankOptions, Sample


class Scripted:
    """Scores each document by its number; sets of eight get an offset, as a normaliser over the set would add."""

    def __init__(self, offset: float) -> None:
        self.offset = offset
        self.seen: list[Task] = []

    def rank_many(self, tasks: Sequence[Task]) -> list[Ranking | Exception]:
        self.seen += tasks
        results: list[Ranking | Exception] = []
        for task in tasks:
            shift = self.offset if task.documents[0] == "0" and len(task.documents) == 8 else 0.0
            z = tuple(float(document) + shift for document in task.documents)
            results.append(Ranking(z, tuple(range(len(z))), "heads", raw_scores=z))
        return results


def sample(n: int) -> Sample:
    return Sample("q", "question", tuple(Document(str(i)) for i in range(n)))


def test_scores_that_mean_the_same_flip_nothing() -> None:
    reranker = Scripted(0.0)
    result = split_stability(reranker, [sample(20), sample(3)], RankOptions(), 9)  # type: ignore[arg-type]
    assert result.questions == 1
    assert result.flipped["mean"] == 0.0
    assert [len(task.documents) for task in reranker.seen] == [16, 8, 8]
    assert all(task.options.aggregation == "evidence" for task in reranker.seen)


def test_a_shifted_half_flips_the_pairs_across_it() -> None:
    # The first half moves above the whole second half: all 8 x 8 pairs across flip, of 16 * 15 / 2.
    result = split_stability(Scripted(100.0), [sample(16)], RankOptions(), 9)  # type: ignore[arg-type]
    assert result.flipped["mean"] == pytest.approx(64 / 120)


def test_too_few_documents_are_an_error_that_names_the_limit() -> None:
    with pytest.raises(InputError, match=str(SPLIT_DOCUMENTS)):
        split_stability(Scripted(0.0), [sample(15)], RankOptions(), 9)  # type: ignore[arg-type]


def test_an_error_of_ranking_is_raised() -> None:
    class Failing(Scripted):
        def rank_many(self, tasks: Sequence[Task]) -> list[Ranking | Exception]:
            return [InputTooLong("query", "too long", 1)] * len(tasks)

    with pytest.raises(InputTooLong):
        split_stability(Failing(0.0), [sample(16)], RankOptions(), 9)  # type: ignore[arg-type]
