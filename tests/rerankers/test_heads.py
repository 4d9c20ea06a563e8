"""The head reranker: which heads vote, what they make of the documents, what is explained and what is refused."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from headbank.bank import Bank
from headbank.errors import BankError, BankMismatch, InputError, InputTooLong, NonFiniteScore
from headbank.models.base import NULL_QUERY, Capture, CaptureRequest
from headbank.models.fake import FakeRunner
from headbank.models.hf import HFRunner
from headbank.numerics.icr import icr_scores
from headbank.rerankers.heads import HeadReranker, icr_set, open_bank
from headbank.types import (
    AGGREGATIONS,
    JOINT,
    LAYOUTS,
    Aggregation,
    HeadId,
    Layout,
    PromptStyle,
    RankOptions,
    View,
)
from tests.rerankers.helpers import (
    BARE,
    DOCUMENTS,
    PARALLEL,
    QUERY,
    VOTERS,
    Recording,
    Windowed,
    evidence_by_hand,
    fitted,
    sigmoid,
    sums,
)
from tests.support import oracles
from tests.support.banks import bank_of, bank_of_sets
from tests.support.planted import planted_runner, planted_samples
from tests.support.tiny_models import tiny_runner


@pytest.fixture(scope="module")
def planted() -> tuple[HFRunner, dict[str, HeadId]]:
    return planted_runner()


@pytest.fixture
def fake() -> HeadReranker:
    runner = FakeRunner()
    return HeadReranker(runner, open_bank(None, runner.info))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("view", ["query", "response"])
def test_the_document_the_heads_look_at_comes_first(fake: HeadReranker, view: View, layout: Layout) -> None:
    ranking = fake.rank(QUERY, DOCUMENTS, RankOptions(view=view, layout=layout))
    assert ranking.order[0] == 1
    assert ranking.scores[1] == max(ranking.scores)
    assert ranking.method == "heads"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("view", ["query", "response"])
def test_planted_head_ranks_golds_wherever_they_stand(planted: Any, view: View, layout: Layout) -> None:
    runner, heads = planted
    bank = bank_of(runner.info, (heads["planted"],), styles=[PromptStyle(layout)])
    reranker = HeadReranker(runner, bank, response_tokens=2)
    for sample in planted_samples(3):
        golds = set(sample.golds)
        for turn in range(len(sample.documents)):
            order = [(i + turn) % len(sample.documents) for i in range(len(sample.documents))]
            ranking = reranker.rank(
                sample.question, [sample.documents[i].content for i in order], RankOptions(view=view)
            )
            assert {order[i] for i in ranking.order[: len(golds)]} == golds


@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weighted"])
@pytest.mark.parametrize("style", [JOINT, PARALLEL, BARE], ids=str)
@pytest.mark.parametrize("view", ["query", "response"])
def test_evidence_is_what_the_capture_says(view: View, style: PromptStyle, weighted: bool) -> None:
    runner = tiny_runner("llama")
    heads = fitted(view=view, style=style, weighted=weighted)
    documents = [*DOCUMENTS, "", DOCUMENTS[0]]
    ranking = HeadReranker(runner, bank_of_sets(runner.info, [heads])).rank(
        QUERY, documents, RankOptions(view=view)
    )
    layout = runner.prompts.build(QUERY, documents, style=style)
    capture = runner.capture(CaptureRequest(layout, VOTERS, (view,), 3))
    z = evidence_by_hand(*sums(capture.mass[view], layout), heads, VOTERS)
    assert ranking.raw_scores == pytest.approx(z, abs=1e-5)
    assert ranking.scores == pytest.approx([sigmoid(value, 1.5, -0.25) for value in z], abs=1e-5)
    assert ranking.order == tuple(oracles.by_score(ranking.raw_scores))
    assert ranking.input_tokens == layout.length


@pytest.mark.parametrize("style", [JOINT, PARALLEL], ids=str)
def test_heads_behind_a_window_leave_and_the_others_keep_their_moments(style: PromptStyle) -> None:
    runner = tiny_runner("qwen2")
    assert [w is None for w in runner.info.windows] == [True, True, False]
    heads = fitted(style=style, weighted=True)
    ranking = HeadReranker(runner, bank_of_sets(runner.info, [heads])).rank(
        QUERY, DOCUMENTS, RankOptions(explain=True)
    )
    voters = tuple(head for head in VOTERS if head.layer < 2)
    assert 0 < len(voters) < len(VOTERS)
    assert tuple(vote.head for vote in ranking.votes) == voters
    layout = runner.prompts.build(QUERY, DOCUMENTS, style=style)
    rows = runner.capture(CaptureRequest(layout, voters)).mass["query"]
    z = evidence_by_hand(*sums(rows, layout), heads, voters)
    assert ranking.raw_scores == pytest.approx(z, abs=1e-5)


def test_heads_behind_a_window_shorter_than_the_prompt_do_not_vote() -> None:
    runner = Windowed((None, 20, None, None))
    reranker = HeadReranker(runner, bank_of(runner.info, (HeadId(1, 0), HeadId(2, 1))))
    long = reranker.rank(QUERY, DOCUMENTS, RankOptions(explain=True))
    assert [str(vote.head) for vote in long.votes] == ["L2H1"]
    short = reranker.rank("falcon", ("a",), RankOptions(explain=True))
    assert short.input_tokens <= 20
    assert [str(vote.head) for vote in short.votes] == ["L1H0", "L2H1"]


def test_a_window_must_reach_over_the_longest_document_of_a_parallel_prompt_only() -> None:
    needed = FakeRunner().prompts.build(QUERY, DOCUMENTS[1:2], style=PARALLEL).length
    for window, votes in ((needed, True), (needed - 1, False)):
        runner = Windowed((None, None, window, None))
        reranker = HeadReranker(runner, bank_of(runner.info, (HeadId(2, 1),), styles=[PARALLEL]))
        if votes:
            assert reranker.rank(QUERY, DOCUMENTS * 9, RankOptions()).order[0] == 1
        else:
            with pytest.raises(InputTooLong, match=f"the voting heads see {window}"):
                reranker.rank(QUERY, DOCUMENTS * 9, RankOptions())


def test_a_window_must_reach_over_the_content_free_prompt_too() -> None:
    short, null = (FakeRunner().prompts.build(query, DOCUMENTS).length for query in ("falcon", NULL_QUERY))
    assert short < null
    runner = Windowed((None, short, None, None))
    reranker = HeadReranker(runner, bank_of(runner.info, (HeadId(1, 0), HeadId(2, 1))))
    votes = {}
    for rule in ("borda", "calibrated"):
        ranking = reranker.rank("falcon", DOCUMENTS, RankOptions(aggregation=rule, explain=True))
        votes[rule] = [str(vote.head) for vote in ranking.votes]
    assert votes == {"borda": ["L1H0", "L2H1"], "calibrated": ["L2H1"]}


@pytest.mark.parametrize(("room", "legal"), [(0, False), (16, True)])
def test_the_response_view_counts_the_answer_towards_the_window(room: int, legal: bool) -> None:
    layout = FakeRunner().prompts.build(QUERY, DOCUMENTS)
    runner = Windowed((None, None, layout.length + room, None))
    reranker = HeadReranker(runner, bank_of(runner.info, (HeadId(2, 1),)), response_tokens=16)
    assert reranker.rank(QUERY, DOCUMENTS, RankOptions(view="query")).order[0] == 1
    if legal:
        assert reranker.rank(QUERY, DOCUMENTS, RankOptions(view="response")).order[0] == 1
    else:
        with pytest.raises(InputTooLong) as caught:
            reranker.rank(QUERY, DOCUMENTS, RankOptions(view="response"))
        assert (caught.value.field, caught.value.limit) == ("documents", layout.length)


@pytest.mark.parametrize(("given", "fitted_with", "expected"), [(2, 3, 2), (None, 3, 3), (None, None, 16)])
def test_the_answer_is_as_long_as_asked_else_as_calibrated(
    given: int | None, fitted_with: int | None, expected: int
) -> None:
    runner = Recording(FakeRunner())
    heads = fitted((HeadId(2, 1),), view="response", response_tokens=fitted_with)
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [heads]), response_tokens=given)
    reranker.rank(QUERY, DOCUMENTS, RankOptions(view="response"))
    assert [request.max_new_tokens for request in runner.requests] == [expected]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1])
def test_no_and_one_document_are_legal(fake: HeadReranker, count: int, layout: Layout) -> None:
    ranking = fake.rank(QUERY, DOCUMENTS[1 : 1 + count], RankOptions(layout=layout, explain=True))
    assert ranking.order == tuple(range(count))
    assert ranking.scores == (1.0,) * count
    assert ranking.input_tokens > 0


@pytest.mark.parametrize("rule", AGGREGATIONS)
@pytest.mark.parametrize("style", [JOINT, PARALLEL, BARE], ids=str)
@pytest.mark.parametrize("query", [QUERY, ""], ids=["query", "no query"])
@pytest.mark.parametrize("documents", [("",), ("", ""), (*DOCUMENTS, "", DOCUMENTS[0])], ids=len)
def test_empty_documents_and_questions_have_finite_scores(
    documents: tuple[str, ...], query: str, style: PromptStyle, rule: Aggregation
) -> None:
    runner = tiny_runner("llama")
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted(style=style)]))
    ranking = reranker.rank(query, documents, RankOptions(aggregation=rule, explain=True))
    assert all(map(math.isfinite, ranking.scores))
    assert sorted(ranking.order) == list(range(len(documents)))
    assert {snippet.document for snippet in ranking.snippets} <= {i for i, d in enumerate(documents) if d}
    for vote in ranking.votes:
        assert [mass for mass, text in zip(vote.mass, documents, strict=True) if not text] == [
            0.0
        ] * documents.count("")


def test_empty_and_duplicated_documents_keep_input_order(fake: HeadReranker) -> None:
    ranking = fake.rank(QUERY, ("", DOCUMENTS[0], DOCUMENTS[0], ""), RankOptions(aggregation="borda"))
    assert ranking.scores[1] == ranking.scores[2]
    assert ranking.scores[0] == ranking.scores[3]
    assert ranking.order.index(1) < ranking.order.index(2)
    assert ranking.order.index(0) < ranking.order.index(3)


@pytest.mark.parametrize("rule", AGGREGATIONS)
def test_the_same_request_gives_the_same_scores(rule: Aggregation) -> None:
    runner = tiny_runner("llama")
    first, second = (
        HeadReranker(runner, bank_of_sets(runner.info, [fitted()])).rank(
            QUERY, DOCUMENTS, RankOptions(aggregation=rule, explain=True)
        )
        for _ in range(2)
    )
    assert replace(first, seconds={}) == replace(second, seconds={})


def test_votes_name_every_head_with_masses_means_and_ranks() -> None:
    runner = tiny_runner("llama")
    ranking = HeadReranker(runner, bank_of_sets(runner.info, [fitted()])).rank(
        QUERY, [*DOCUMENTS, ""], RankOptions(explain=True)
    )
    layout = runner.prompts.build(QUERY, [*DOCUMENTS, ""])
    masses, _, lengths = sums(runner.capture(CaptureRequest(layout, VOTERS)).mass["query"], layout)
    assert [vote.head for vote in ranking.votes] == list(VOTERS)
    means = [[m / max(n, 1) for m, n in zip(row, lengths, strict=True)] for row in masses]
    for vote, row, mean, places in zip(ranking.votes, masses, means, oracles.ranks(means), strict=True):
        assert vote.mass == pytest.approx(row, abs=1e-7)
        assert vote.mean == pytest.approx(mean, abs=1e-8)
        assert list(vote.ranks) == places


def test_without_explain_there_are_no_votes(fake: HeadReranker) -> None:
    ranking = fake.rank(QUERY, DOCUMENTS, RankOptions())
    assert (ranking.votes, ranking.snippets) == ((), ())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cut_document_is_reported_and_the_others_still_rank(fake: HeadReranker, layout: Layout) -> None:
    documents = ("word " * 5000, DOCUMENTS[1])
    ranking = fake.rank(QUERY, documents, RankOptions(max_tokens_per_doc=50, layout=layout))
    assert ranking.cut == (0,)
    assert ranking.order[0] == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_document_over_the_context_is_refused_by_name(fake: HeadReranker, layout: Layout) -> None:
    with pytest.raises(InputTooLong) as caught:
        fake.rank(QUERY, ("word " * 5000, DOCUMENTS[1]), RankOptions(layout=layout))
    assert caught.value.field == "documents"
    assert caught.value.limit is not None


def test_a_question_over_half_the_context_is_refused_by_name() -> None:
    runner = tiny_runner("llama")
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted()]))
    for documents in (DOCUMENTS, ()):
        with pytest.raises(InputTooLong) as caught:
            reranker.rank("why " * 600, documents, RankOptions())
        assert (caught.value.field, caught.value.limit) == ("query", 512)


def test_a_bank_of_another_model_is_refused() -> None:
    runner = FakeRunner()
    with pytest.raises(BankMismatch, match="config_hash"):
        HeadReranker(runner, open_bank(None, replace(runner.info, config_hash="other")))


def test_a_view_and_a_layout_without_heads_are_named(planted: Any) -> None:
    runner, heads = planted
    reranker = HeadReranker(runner, bank_of(runner.info, (heads["planted"],), views=("query",)))
    with pytest.raises(BankError, match=r"the view response; it has: expert\.query\.joint"):
        reranker.rank(QUERY, DOCUMENTS, RankOptions(view="response"))
    with pytest.raises(BankError, match=r"no expert\.query\.parallel; it has: expert\.query\.joint"):
        reranker.rank(QUERY, DOCUMENTS, RankOptions(layout="parallel"))


def two_detectors(runner: HFRunner) -> Bank:
    sets = [fitted(), fitted(VOTERS[:2], detector="greedy"), fitted(VOTERS[1:], style=PARALLEL)]
    return bank_of_sets(runner.info, sets)


@pytest.mark.parametrize(
    ("detector", "layout", "voters"),
    [
        (None, None, VOTERS),
        ("greedy", None, VOTERS[:2]),
        (None, "parallel", VOTERS[1:]),
        ("expert", "joint", VOTERS),
    ],
)
def test_detector_and_layout_choose_the_heads(
    detector: str | None, layout: Layout | None, voters: tuple[HeadId, ...]
) -> None:
    runner = tiny_runner("llama")
    reranker = HeadReranker(runner, two_detectors(runner), detector=detector, name="mine")
    ranking = reranker.rank(QUERY, DOCUMENTS, RankOptions(layout=layout, explain=True))
    assert tuple(vote.head for vote in ranking.votes) == voters
    assert ranking.method == reranker.name == "mine"


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_icr_without_a_bank_is_that_of_the_paper(layout: Layout | None) -> None:
    runner = tiny_runner("llama")
    icr = HeadReranker(runner, None, detector="icr", name="icr")
    documents = [*DOCUMENTS, "", DOCUMENTS[0]]
    ranking = icr.rank(QUERY, documents, RankOptions(layout=layout))
    style = PromptStyle(layout or "joint")
    found = []
    for query in (QUERY, NULL_QUERY):
        prompt = runner.prompts.build(query, documents, style=style)
        capture = runner.capture(CaptureRequest(prompt))
        assert capture.heads == icr_set(runner.info, style).heads
        found.append(capture.mass["query"][:, prompt.prefix_end : prompt.tail_start])
    spans = [type(s)(s.start - prompt.prefix_end, s.end - prompt.prefix_end) for s in prompt.documents]
    expected = icr_scores(found[0], found[1], spans)
    assert ranking.scores == pytest.approx(expected.tolist(), abs=1e-5)
    assert ranking.order[0] == int(expected.argmax())
    assert (ranking.method, ranking.raw_scores) == ("icr", None)


def test_the_content_free_query_has_no_counterpart_among_answers() -> None:
    runner = tiny_runner("llama")
    icr = HeadReranker(runner, None, detector="icr")
    with pytest.raises(InputError, match=r"^view: "):
        icr.rank(QUERY, DOCUMENTS, RankOptions(view="response"))
    heads = HeadReranker(runner, bank_of_sets(runner.info, [fitted(view="response")]))
    with pytest.raises(InputError, match=r"^aggregation: "):
        heads.rank(QUERY, DOCUMENTS, RankOptions(view="response", aggregation="calibrated"))


class Broken(FakeRunner):
    """Its attention on the last token of the first document is not a number."""

    def __init__(self, value: float, query: str | None = None) -> None:
        super().__init__()
        self.value = value
        self.ids = None if query is None else tuple(self.prompts._encode(query))

    def capture(self, request: CaptureRequest) -> Capture:
        found = super().capture(request)
        layout = request.layout
        if layout.documents and self.ids in (None, layout.ids[slice(*layout.query)]):
            for rows in found.mass.values():
                rows[0, layout.documents[0].end - 1] = self.value
        return found


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rule", AGGREGATIONS)
def test_attention_that_is_not_finite_is_refused(rule: Aggregation, value: float) -> None:
    runner = Broken(value)
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted((HeadId(2, 1),))]))
    with pytest.raises(NonFiniteScore):
        reranker.rank(QUERY, DOCUMENTS, RankOptions(aggregation=rule, explain=True))


def test_content_free_attention_that_is_not_finite_is_refused_and_not_kept() -> None:
    runner = Broken(math.nan, NULL_QUERY)
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted((HeadId(2, 1),))]))
    options = RankOptions(aggregation="calibrated")
    with pytest.raises(NonFiniteScore):
        reranker.rank(QUERY, DOCUMENTS, options)
    assert torch.isfinite(torch.tensor(reranker.rank(QUERY, DOCUMENTS, RankOptions()).scores)).all()
    runner.value = 0.0
    assert reranker.rank(QUERY, DOCUMENTS, options).order[0] == 1
