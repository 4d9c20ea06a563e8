"""`calibrated`: attention less that of the content-free query, which requests on the same documents share."""

import pytest
import torch

from headbank.models.base import NULL_QUERY, CaptureRequest
from headbank.models.fake import FakeRunner
from headbank.numerics.icr import icr_scores
from headbank.rerankers.base import Task
from headbank.rerankers.heads import HeadReranker
from headbank.rerankers.null import NullCache, null_key
from headbank.types import JOINT, HeadId, PromptStyle, Ranking, RankOptions, Span
from tests.rerankers.helpers import BARE, DOCUMENTS, PARALLEL, QUERY, VOTERS, Recording, assert_alike, fitted
from tests.support.banks import bank_of_sets
from tests.support.tiny_models import Work, tiny_runner

CALIBRATED = RankOptions(aggregation="calibrated")


def new_reranker(runner: object, style: PromptStyle = JOINT) -> HeadReranker:
    assert isinstance(runner, Recording)
    heads = fitted(style=style, default_aggregation="calibrated")
    return HeadReranker(runner, bank_of_sets(runner.info, [heads]))


@pytest.mark.parametrize("style", [JOINT, PARALLEL, BARE], ids=str)
@pytest.mark.parametrize("limit", [None, 9])
def test_calibrated_is_icr_on_both_captures(style: PromptStyle, limit: int | None) -> None:
    runner = Recording(tiny_runner("llama"))
    documents = [*DOCUMENTS, "", DOCUMENTS[1]]
    ranking = new_reranker(runner, style).rank(QUERY, documents, RankOptions(max_tokens_per_doc=limit))
    rows, spans = [], []
    for query in (QUERY, NULL_QUERY):
        layout = runner.prompts.build(query, documents, style=style, max_tokens_per_doc=limit)
        mass = runner.inner.capture(CaptureRequest(layout, VOTERS)).mass["query"]
        rows.append(torch.cat([mass[:, s.start : s.end] for s in layout.documents], dim=1))
        ends = torch.tensor([s.length for s in layout.documents]).cumsum(0).tolist()
        spans = [Span(end - s.length, end) for s, end in zip(layout.documents, ends, strict=True)]
    expected = icr_scores(rows[0], rows[1], spans).tolist()
    assert ranking.scores == pytest.approx(expected, abs=1e-6)
    assert ranking.scores[3] == 0.0
    assert ranking.order == tuple(sorted(range(5), key=lambda i: (-ranking.scores[i], i)))


def nulls(runner: Recording) -> int:
    """How many content-free prompts were read so far."""
    null = runner.prompts.build(NULL_QUERY, [])
    ids = null.ids[slice(*null.query)]
    return sum(r.layout.ids[slice(*r.layout.query)] == ids for r in runner.requests)


@pytest.mark.parametrize("style", [JOINT, PARALLEL], ids=str)
def test_two_queries_on_the_same_documents_share_the_content_free_pass(style: PromptStyle) -> None:
    runner = Recording(tiny_runner("llama"))
    reranker = new_reranker(runner, style)
    tokens = []
    for query in (QUERY, "Who bakes?"):
        with Work(runner.inner._model) as work:  # type: ignore[attr-defined]
            reranker.rank(query, DOCUMENTS, CALIBRATED)
        tokens.append(sum(work.tokens))
    assert nulls(runner) == 1
    asked = runner.prompts.build("Who bakes?", DOCUMENTS, style=style)
    assert tokens[1] == asked.length < tokens[0]
    reranker.rank(QUERY, DOCUMENTS[::-1], CALIBRATED)
    assert nulls(runner) == 2


def test_two_queries_of_one_batch_share_the_content_free_pass() -> None:
    runner = Recording(tiny_runner("llama"))
    reranker = new_reranker(runner)
    tasks = [Task(query, DOCUMENTS, CALIBRATED) for query in (QUERY, "Who bakes?", QUERY)]
    found = reranker.rank_many(tasks)
    assert nulls(runner) == 1
    assert len(runner.requests) == 4
    alone = new_reranker(runner)
    for task, ranking in zip(tasks, found, strict=True):
        assert isinstance(ranking, Ranking)
        assert_alike(ranking, alone.rank(task.query, task.documents, task.options))


def test_other_heads_and_other_limits_have_rows_of_their_own() -> None:
    runner = Recording(tiny_runner("llama"))
    sets = [fitted(), fitted(VOTERS[:2], style=PARALLEL)]
    reranker = HeadReranker(runner, bank_of_sets(runner.info, sets))
    for options in (
        CALIBRATED,
        RankOptions(aggregation="calibrated", layout="parallel"),
        RankOptions(aggregation="calibrated", max_tokens_per_doc=9),
    ):
        kept, fresh = reranker, HeadReranker(runner, bank_of_sets(runner.info, sets))
        assert_alike(kept.rank(QUERY, DOCUMENTS, options), fresh.rank(QUERY, DOCUMENTS, options))
    assert nulls(runner) == 6


@pytest.mark.parametrize("room", [0, 1, 2], ids=["nothing", "one", "two"])
def test_a_batch_that_the_cache_cannot_hold_is_still_right(room: int) -> None:
    runner = Recording(tiny_runner("llama"))
    sets = [DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS[1:] + DOCUMENTS[:1], DOCUMENTS]
    one = 4 * len(VOTERS) * runner.prompts.build(NULL_QUERY, DOCUMENTS).length
    reranker = new_reranker(runner)
    reranker._null = NullCache(room * one)
    tasks = [Task(QUERY, tuple(documents), CALIBRATED) for documents in sets]
    for _ in range(2):
        found = reranker.rank_many(tasks)
        assert reranker._null.n_bytes <= room * one
        for task, ranking in zip(tasks, found, strict=True):
            assert isinstance(ranking, Ranking)
            assert_alike(ranking, new_reranker(runner).rank(task.query, task.documents, task.options))


def test_the_cache_is_bounded_and_forgets_what_was_used_least_recently() -> None:
    cache = NullCache(100)
    for name in "abc":
        cache.put(name, torch.zeros(8))
    assert cache.n_bytes == 96
    assert cache.get("a") is not None
    cache.put("d", torch.ones(8))
    assert [name for name in "abcd" if cache.get(name) is not None] == ["a", "c", "d"]
    cache.put("huge", torch.zeros(26))
    cache.put("nan", torch.full((2,), torch.nan))
    assert cache.get("huge") is cache.get("nan") is None
    assert cache.n_bytes == 96
    cache.put("e", torch.zeros(25))
    assert [name for name in "acde" if cache.get(name) is not None] == ["e"]
    assert cache.n_bytes == 100


def test_keys_are_small_and_tell_prompts_and_heads_apart() -> None:
    prompts = FakeRunner().prompts
    heads = (HeadId(0, 1), HeadId(1, 2))
    layouts = [
        prompts.build(NULL_QUERY, documents, style=style, max_tokens_per_doc=limit)
        for documents in (DOCUMENTS, DOCUMENTS[::-1], [*DOCUMENTS, ""], ["", *DOCUMENTS])
        for style in (JOINT, PARALLEL, BARE)
        for limit in (None, 4)
    ]
    keys = {null_key(layout, chosen) for layout in layouts for chosen in (heads, heads[::-1], heads[:1])}
    assert len(keys) == 3 * len(layouts)
    assert {len(key) for key in keys} == {64}
    assert null_key(prompts.build(NULL_QUERY, DOCUMENTS), heads) in keys
