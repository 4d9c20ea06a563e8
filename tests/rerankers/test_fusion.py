"""Method `fusion`: log-odds and other voters' scores, standardised and weighted."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headbank.bank import Bank, validate
from headbank.errors import BankError, InputError, InputTooLong, NonFiniteScore
from headbank.models.base import HeadRunner
from headbank.models.fake import FakeRunner
from headbank.rerankers.base import Reranker, Task, by_score
from headbank.rerankers.bm25 import BM25
from headbank.rerankers.fusion import FusionReranker
from headbank.rerankers.heads import HeadReranker
from headbank.types import JOINT, Fusion, HeadId, HeadSet, PromptStyle, Ranking, RankOptions
from tests.rerankers.helpers import (
    DOCUMENTS,
    PARALLEL,
    QUERY,
    VOTERS,
    Recording,
    assert_alike,
    fitted,
    sigmoid,
    small_runner,
)
from tests.rerankers.test_heads import Broken
from tests.support.banks import bank_of_sets
from tests.support.tiny_models import tiny_runner


class Lengths:
    """A voter whose score is the number of characters; it has no open scale, and refuses some documents."""

    name = "dense"

    def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Ranking:
        if "forbidden" in documents:
            raise InputError("documents", "one is forbidden")
        scores = tuple(math.inf if text == "endless" else len(text) / 100 for text in documents)
        return Ranking(scores, tuple(range(len(scores))), self.name)


VOTING: dict[str, Reranker] = {"bm25": BM25(), "dense": Lengths()}


def fused_bank(runner: HeadRunner, *sets: HeadSet, voters: tuple[str, ...] = ("bm25", "dense")) -> Bank:
    """A bank with a fusion over each head set."""
    bank = bank_of_sets(runner.info, sets)
    n = 1 + len(voters)
    fusions = [
        Fusion(
            f"fusion.{heads.view}.{heads.style.layout}",
            heads.name,
            voters,
            "minilm" if "dense" in voters else "",
            mean=(-0.5, 2.0, 0.3)[:n],
            std=(1.5, 3.0, 0.25)[:n],
            weights=(0.7, 0.4, -0.2)[:n],
            platt=(2.0, -1.0),
        )
        for heads in sets
    ]
    bank = replace(bank, fusions={fusion.name: fusion for fusion in fusions})
    validate(bank)
    return bank


def new_fusion(runner: HeadRunner, bank: Bank) -> FusionReranker:
    return FusionReranker(HeadReranker(runner, bank), bank, VOTING)


@pytest.mark.parametrize("style", [JOINT, PARALLEL], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0)], ids=str)
def test_fusion_equals_its_sum(order: tuple[int, ...], style: PromptStyle) -> None:
    runner = tiny_runner("llama")
    names = ("bm25", "dense")[:: 1 if len(order) == 3 else -1][: len(order) - 1]
    bank = fused_bank(runner, fitted(style=style), voters=names)
    documents = [*DOCUMENTS, "", DOCUMENTS[1]]
    ranking = new_fusion(runner, bank).rank(QUERY, documents, RankOptions())
    odds = HeadReranker(runner, bank).rank(QUERY, documents, RankOptions()).raw_scores
    lexical = BM25().rank(QUERY, documents, RankOptions()).raw_scores
    features = {"bm25": lexical, "dense": [len(text) / 100 for text in documents]}
    (fusion,) = bank.fusions.values()
    expected = []
    for i in range(len(documents)):
        total = 0.0
        for at, feature in enumerate([odds, *(features[name] for name in names)]):
            assert feature is not None
            total += fusion.weights[at] * (feature[i] - fusion.mean[at]) / fusion.std[at]
        expected.append(total)
    assert ranking.raw_scores == pytest.approx(expected, abs=1e-5)
    assert ranking.scores == pytest.approx([sigmoid(z, 2.0, -1.0) for z in expected], abs=1e-5)
    assert ranking.raw_scores is not None
    assert ranking.order == by_score(ranking.raw_scores)
    assert ranking.order == by_score([round(z, 4) for z in expected])
    assert ranking.method == "fusion"
    assert ranking.input_tokens == runner.prompts.build(QUERY, documents, style=style).length


def test_explained_fusion_has_the_votes_of_its_heads() -> None:
    runner = tiny_runner("llama")
    bank = fused_bank(runner, fitted())
    options = RankOptions(explain=True, max_tokens_per_doc=9)
    ranking = new_fusion(runner, bank).rank(QUERY, DOCUMENTS, options)
    heads = HeadReranker(runner, bank).rank(QUERY, DOCUMENTS, options)
    assert (ranking.votes, ranking.snippets, ranking.cut) == (heads.votes, heads.snippets, heads.cut)
    assert [vote.head for vote in ranking.votes] == list(VOTERS)
    assert ranking.snippets
    assert ranking.cut
    plain = new_fusion(runner, bank).rank(QUERY, DOCUMENTS, RankOptions())
    assert (plain.votes, plain.snippets) == ((), ())


def test_neither_the_callers_rule_nor_that_of_the_set_changes_a_fusion() -> None:
    runner = Recording(tiny_runner("llama"))
    bank = fused_bank(runner, fitted(), fitted(view="response", style=JOINT))
    own = fused_bank(
        runner,
        fitted(default_aggregation="calibrated"),
        fitted(view="response", style=JOINT, default_aggregation="calibrated"),
    )
    for view in ("query", "response"):
        expected = new_fusion(runner, bank).rank(QUERY, DOCUMENTS, RankOptions(view=view))
        runner.requests.clear()
        assert_alike(new_fusion(runner, own).rank(QUERY, DOCUMENTS, RankOptions(view=view)), expected)
        named = RankOptions(view=view, aggregation="calibrated")
        assert_alike(new_fusion(runner, bank).rank(QUERY, DOCUMENTS, named), expected)
        # No content-free pass was made for nothing.
        assert len(runner.requests) == 2


def test_an_over_long_set_is_fused_from_windows() -> None:
    runner = Recording(small_runner(320))
    bank = fused_bank(runner, fitted(), voters=("bm25",))
    documents = [f"{text} {number}" for number in range(8) for text in DOCUMENTS]
    ranking = new_fusion(runner, bank).rank(QUERY, documents, RankOptions())
    assert len(runner.requests) > 1
    odds = HeadReranker(runner, bank).rank(QUERY, documents, RankOptions()).raw_scores
    lexical = BM25().rank(QUERY, documents, RankOptions()).raw_scores
    assert odds is not None
    assert lexical is not None
    expected = [0.7 * (z + 0.5) / 1.5 + 0.4 * (b - 2.0) / 3.0 for z, b in zip(odds, lexical, strict=True)]
    assert ranking.raw_scores == pytest.approx(expected, abs=1e-5)


def test_no_documents_give_no_scores_and_check_the_query_all_the_same() -> None:
    runner = tiny_runner("llama")
    fusion = new_fusion(runner, fused_bank(runner, fitted()))
    ranking = fusion.rank(QUERY, (), RankOptions(explain=True))
    assert (ranking.scores, ranking.order, ranking.votes) == ((), (), ())
    assert ranking.input_tokens == runner.prompts.build(QUERY, []).length
    with pytest.raises(InputTooLong, match=r"^query: "):
        fusion.rank("why " * 600, (), RankOptions())


def test_a_voter_that_is_not_there_is_named() -> None:
    runner = FakeRunner()
    bank = fused_bank(runner, fitted((HeadId(2, 1),)))
    fusion = FusionReranker(HeadReranker(runner, bank), bank, {"bm25": BM25()})
    for documents in (DOCUMENTS, ()):
        with pytest.raises(BankError, match=r"fusion\.query\.joint needs the voter dense"):
            fusion.rank(QUERY, documents, RankOptions())


def test_a_bank_without_the_fusion_is_named() -> None:
    runner = FakeRunner()
    bank = fused_bank(runner, fitted((HeadId(2, 1),)))
    fusion = new_fusion(runner, bank)
    with pytest.raises(BankError, match=r"no fusion\.query\.parallel; it has: fusion\.query\.joint"):
        fusion.rank(QUERY, DOCUMENTS, RankOptions(layout="parallel"))
    with pytest.raises(BankError, match=r"fusion\.response\.joint"):
        fusion.rank(QUERY, DOCUMENTS, RankOptions(view="response"))
    none = replace(bank, fusions={})
    with pytest.raises(BankError, match="it has: none"):
        new_fusion(runner, none).rank(QUERY, DOCUMENTS, RankOptions())


def test_many_are_fused_as_one_by_one_and_a_failure_harms_no_other() -> None:
    runner = Broken(math.nan, "Who bakes?")
    bank = fused_bank(runner, fitted((HeadId(2, 1),)), fitted((HeadId(2, 1),), style=PARALLEL))
    options = RankOptions(explain=True)
    tasks = [
        Task(QUERY, DOCUMENTS, options),
        Task("why " * 3000, DOCUMENTS, options),
        Task(QUERY, ("forbidden", *DOCUMENTS), options),
        Task("falcon", DOCUMENTS[::-1], RankOptions(layout="parallel")),
        Task(QUERY, (), options),
        Task("Who bakes?", DOCUMENTS, options),
        Task(QUERY, ("endless", *DOCUMENTS), options),
        Task(QUERY, DOCUMENTS, RankOptions(view="response")),
        Task("granite tower", DOCUMENTS, options),
    ]
    errors = {1: InputTooLong, 2: InputError, 5: NonFiniteScore, 6: NonFiniteScore, 7: BankError}
    found = new_fusion(runner, bank).rank_many(tasks)
    assert len(found) == len(tasks)
    alone = new_fusion(runner, bank)
    for i, (task, result) in enumerate(zip(tasks, found, strict=True)):
        if i in errors:
            assert type(result) is errors[i]
        else:
            assert isinstance(result, Ranking)
            assert_alike(result, alone.rank(task.query, task.documents, task.options), 0)
