"""Evaluation: metrics per method on questions with a known answer, and what is left out."""

from collections.abc import Sequence
from typing import Any

import pytest

from headbank.errors import InputError
from headbank.jobs.evaluate import Method, evaluate, head_methods
from headbank.models.fake import FakeRunner
from headbank.rerankers.base import by_score
from headbank.rerankers.heads import HeadReranker, open_bank
from headbank.types import Document, Ranking, RankOptions, Sample


class Fixed:
    """Ranks documents by a number they carry."""

    name = "fixed"

    def __init__(self, sign: float) -> None:
        self.sign = sign
        self.calls = 0

    def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Ranking:
        self.calls += 1
        scores = tuple(self.sign * float(document) for document in documents)
        return Ranking(scores, by_score(scores), self.name)


def question(id: str, relevance: Sequence[int]) -> Sample:
    documents = [Document(str(i), gold=r > 0, relevance=r) for i, r in enumerate(relevance)]
    return Sample(id, "question", tuple(documents))


def test_metrics_of_known_rankings() -> None:
    # Descending numbers put document 3 first. q1: golds 2, 3 -> P@2 1. q2: golds 0, 3 -> P@2 1/2, AP (1 + 2/4) / 2.
    samples = [question("q1", [0, 0, 1, 1]), question("q2", [1, 0, 0, 1])]
    down, up = Method("down", Fixed(1), RankOptions()), Method("up", Fixed(-1), RankOptions())
    result = evaluate([down, up], samples, latency_questions=0)
    assert result.questions == 2
    assert result.metrics["down"]["P@2"]["mean"] == pytest.approx(0.75)
    assert result.metrics["down"]["MAP"]["mean"] == pytest.approx((1 + 0.75) / 2)
    # Ascending: q1 ranks its golds third and fourth, AP (1/3 + 2/4) / 2.
    assert result.metrics["up"]["MAP"]["mean"] == pytest.approx(((1 / 3 + 1 / 2) / 2 + 0.75) / 2)
    low, high = result.metrics["down"]["P@2"]["low"], result.metrics["down"]["P@2"]["high"]
    assert (low, high) == (0.5, 1.0)
    assert set(result.p_values) == {"down vs up"}
    assert result.latency_s == {}


def test_questions_without_a_relevant_document_are_left_out_for_all() -> None:
    samples = [question("none", [0, 0]), question("some", [0, 1])]
    result = evaluate([Method("m", Fixed(1), RankOptions())], samples, latency_questions=0)
    assert result.questions == 1
    assert result.skipped == {"no_relevant_document": ["none"]}


def test_no_question_left_is_an_error() -> None:
    with pytest.raises(InputError, match="data"):
        evaluate([Method("m", Fixed(1), RankOptions())], [question("none", [0, 0])])


def test_latency_is_timed_on_whole_calls_after_a_warm_up() -> None:
    reranker = Fixed(1)
    samples = [question(str(i), [0, 1]) for i in range(4)]
    result = evaluate([Method("m", reranker, RankOptions())], samples, latency_questions=3)
    # 4 for quality, 1 to warm up, 3 timed.
    assert reranker.calls == 8
    assert result.latency_s["m"]["questions"] == 3
    assert 0 < result.latency_s["m"]["median"] <= result.latency_s["m"]["high"]


class CountingRunner(FakeRunner):
    """Counts forward passes."""

    captures = 0

    def capture(self, *args: Any, **kwargs: Any) -> Any:
        type(self).captures += 1
        return super().capture(*args, **kwargs)


def words_sample(id: str = "w") -> Sample:
    documents = (
        Document("Rivers carry cold water to the sea."),
        Document("The falcon nests on the granite tower.", gold=True, relevance=1),
        Document("Bread is baked in the morning."),
    )
    return Sample(id, "Where does the falcon nest?", documents)


def test_all_methods_on_heads_read_one_forward_pass() -> None:
    runner = CountingRunner()
    reranker = HeadReranker(runner, open_bank(None, runner.info))
    CountingRunner.captures = 0
    result = evaluate(
        head_methods(reranker, ("query", "response")), [words_sample()], k=1, latency_questions=0
    )
    assert CountingRunner.captures == 1
    assert set(result.metrics) == {"heads (query)", "heads (response)"}
    assert result.metrics["heads (query)"]["P@1"]["mean"] == 1.0


def test_a_question_too_long_for_the_model_is_left_out_for_every_method() -> None:
    runner = FakeRunner()
    reranker = HeadReranker(runner, open_bank(None, runner.info))
    long = Sample("long", "falcon", (Document("word " * 9000, gold=True, relevance=1), Document("b")))
    methods = [*head_methods(reranker, ("query",)), Method("fixed", ByLength(), RankOptions())]
    result = evaluate(methods, [long, words_sample()], latency_questions=0)
    assert result.skipped == {"too_long": ["long"]}
    assert result.questions == 1


class ByLength:
    """Ranks longer documents first."""

    name = "length"

    def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Ranking:
        scores = tuple(float(len(document)) for document in documents)
        return Ranking(scores, by_score(scores), self.name)
