"""The `parallel` layout: how documents are ordered changes no score, and what comes along hardly does."""

import random

import pytest

from headbank.rerankers.heads import HeadReranker
from headbank.types import AGGREGATIONS, JOINT, Aggregation, HeadId, PromptStyle, RankOptions, View
from tests.rerankers.helpers import BARE, PARALLEL, QUERY, assert_alike, fitted
from tests.support.banks import bank_of_sets
from tests.support.tiny_models import tiny_runner

EVERY = tuple(HeadId(layer, head) for layer in range(3) for head in range(4))
WORDS = ["the", "lamp", "was", "lit", "by", "Ada", "in", "1843", "and", "nobody", "wrote", "it", "down"]
RULES: list[tuple[View, Aggregation]] = [("query", rule) for rule in AGGREGATIONS]
RULES += [("response", rule) for rule in AGGREGATIONS if rule != "calibrated"]


def random_documents(chance: random.Random) -> list[str]:
    """Some empty, some there twice, of very different lengths."""
    documents = [" ".join(chance.choices(WORDS, k=chance.choice([0, 1, 5, 20]))) for _ in range(5)]
    return [*documents, *chance.sample(documents, 2)]


@pytest.mark.parametrize("style", [PARALLEL, PromptStyle("parallel", tail="total"), BARE], ids=str)
@pytest.mark.parametrize(("view", "rule"), RULES)
def test_permuted_documents_keep_their_scores(view: View, rule: Aggregation, style: PromptStyle) -> None:
    runner = tiny_runner("llama")
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted(EVERY, view=view, style=style)]))
    options = RankOptions(view=view, aggregation=rule)
    chance = random.Random(str((view, rule, style)))
    for _ in range(3):
        documents = random_documents(chance)
        order = chance.sample(range(len(documents)), len(documents))
        given = reranker.rank(QUERY, documents, options)
        turned = reranker.rank(QUERY, [documents[i] for i in order], options)
        assert turned.scores == pytest.approx([given.scores[i] for i in order], abs=1e-5)
        assert turned.input_tokens == given.input_tokens
        for i, j in enumerate(order):
            twins = [k for k, text in enumerate(documents) if text == documents[j]]
            assert turned.scores[i] == pytest.approx(given.scores[twins[0]], abs=1e-5)


@pytest.mark.parametrize(("view", "rule"), RULES)
def test_joint_documents_in_one_order_have_one_answer(view: View, rule: Aggregation) -> None:
    runner = tiny_runner("llama")
    documents = random_documents(random.Random(1))
    answers = set()
    for _ in range(2):
        reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted(EVERY, view=view, style=JOINT)]))
        for _ in range(2):
            ranking = reranker.rank(QUERY, documents, RankOptions(view=view, aggregation=rule))
            answers.add((ranking.scores, ranking.order, ranking.raw_scores))
    assert len(answers) == 1


def test_evidence_of_the_first_layer_does_not_depend_on_who_comes_along() -> None:
    """There the only row of a one-token query has seen nobody, and its softmax denominator cancels."""
    runner = tiny_runner("llama")
    query = "s"
    assert runner.prompts.build(query, []).query.length == 1
    heads = fitted(tuple(head for head in EVERY if head.layer == 0), style=PARALLEL)
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [heads]))
    documents = ["nobody wrote it down " * 6, "the lamp was lit", "by Ada", "in 1843 and"]
    whole, part = (reranker.rank(query, found, RankOptions()) for found in (documents, documents[:2]))
    assert whole.raw_scores is not None
    assert part.raw_scores == pytest.approx(whole.raw_scores[:2], abs=1e-4)
    # Votes compare the documents of one request, so that they cannot have this property.
    votes = [
        reranker.rank(query, found, RankOptions(aggregation="share")).scores[0]
        for found in (documents, documents[:2])
    ]
    assert votes[1] > votes[0] + 0.01


def test_a_parallel_set_over_the_context_is_one_prompt() -> None:
    runner = tiny_runner("llama")
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted(EVERY, style=PARALLEL)]))
    documents = [f"the lamp was lit by Ada in {year} and nobody wrote it down" for year in range(1843, 1883)]
    ranking = reranker.rank(QUERY, documents, RankOptions())
    assert ranking.input_tokens > runner.info.context_tokens
    half = reranker.rank(QUERY, documents[:20], RankOptions())
    assert half.input_tokens < ranking.input_tokens
    assert_alike(ranking, reranker.rank(QUERY, documents, RankOptions()))
