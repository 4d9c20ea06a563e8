"""Windows over candidate sets that do not fit one joint prompt."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from headbank.errors import InputTooLong
from headbank.models.base import NULL_QUERY, CaptureRequest
from headbank.models.fake import CONTEXT_TOKENS, MATCHING_HEAD, FakeRunner
from headbank.rerankers.base import Task
from headbank.rerankers.heads import HeadReranker, reading_of
from headbank.rerankers.scoring import merge, score
from headbank.rerankers.windows import windows
from headbank.types import AGGREGATIONS, JOINT, Aggregation, PromptStyle, RankOptions, View
from tests.rerankers.helpers import DOCUMENTS, QUERY, VOTERS, Recording, assert_alike, fitted, small_runner
from tests.support.banks import bank_of_sets
from tests.support.planted import planted_runner, planted_samples

SENTENCES = [
    "The lamp was lit by Ada.",
    "Nobody wrote it, and 🙂 nobody read it either.",
    "",
    "Ada wrote the book in 1843, on a long and quiet evening by the old lamp.",
    "Rivers carry cold water.",
    "x",
]


@pytest.mark.parametrize("seed", range(60))
def test_windows_cover_all_fit_and_overlap(seed: int) -> None:
    chance = random.Random(seed)
    room = chance.randint(1, 120)
    longest = chance.choice([room // 4 + 1, room, 2 * room])
    lengths = [chance.randint(0, longest) for _ in range(chance.randint(1, 30))]
    found = windows(lengths, room)
    assert {i for window in found for i in window} == set(range(len(lengths)))
    assert found[0].stop == len(lengths)
    assert found[-1].start == 0
    assert len(found) <= len(lengths)
    for window in found:
        assert len(window) == 1 or sum(lengths[window.start : window.stop]) <= room
        # It could take no more.
        assert window.start == 0 or sum(lengths[window.start - 1 : window.stop]) > room
    for behind, window in pairwise(found):
        assert window.start < behind.start
        half = behind.start + len(behind) // 2
        assert behind.start <= window.stop <= half
        # Less than half only where half would leave no room for the document in front.
        assert window.stop == half or sum(lengths[behind.start - 1 : window.stop + 1]) > room


def test_equal_documents_overlap_by_half() -> None:
    assert windows([10] * 10, 40) == [range(6, 10), range(4, 8), range(2, 6), range(4)]


def test_a_long_document_in_front_costs_no_windows_that_show_nothing_new() -> None:
    assert windows([100] + [10] * 8, 100) == [range(1, 9), range(1)]


def test_nothing_needs_no_window() -> None:
    assert windows([], 10) == []


def test_a_room_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        windows([1], 0)


def long_set(count: int, seed: int = 0) -> list[str]:
    """Documents of very different lengths, some empty, some there twice."""
    chance = random.Random(seed)
    return [" ".join(chance.choices(SENTENCES, k=chance.randint(0, 2))) for _ in range(count)]


CONTEXT = 320
RULES: list[tuple[View, Aggregation]] = [("query", rule) for rule in AGGREGATIONS] + [
    ("response", "evidence")
]


@pytest.mark.parametrize(("view", "rule"), RULES)
def test_an_over_long_set_scores_as_its_windows_merged_by_hand(view: View, rule: Aggregation) -> None:
    runner = Recording(small_runner(CONTEXT))
    heads = fitted(view=view)
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [heads]))
    documents = long_set(24)
    ranking = reranker.rank(QUERY, documents, RankOptions(view=view, aggregation=rule))
    asked = [r for r in runner.requests if r.layout.ids[slice(*r.layout.query)] == query_ids(runner, QUERY)]
    assert len(asked) > 2
    assert all(r.layout.length + (3 if view == "response" else 0) <= CONTEXT for r in asked)
    assert ranking.input_tokens == sum(r.layout.length for r in asked)
    ranges = placed(documents, [len(r.layout.documents) for r in asked])
    parts = []
    for window in ranges:
        texts = [documents[i] for i in window]
        layout = runner.prompts.build(QUERY, texts)
        null = runner.prompts.build(NULL_QUERY, texts)
        mass = runner.inner.capture(CaptureRequest(layout, VOTERS, (view,), 3)).mass[view]
        empty = runner.inner.capture(CaptureRequest(null, VOTERS)).mass["query"]
        parts.append((window, reading_of(layout, mass, null, empty)))
    expected = score(heads, merge(parts), VOTERS, rule)
    assert ranking.scores == pytest.approx(expected.scores, abs=1e-5)
    assert ranking.order == expected.order


def query_ids(runner: Recording, query: str) -> tuple[int, ...]:
    layout = runner.prompts.build(query, [])
    return layout.ids[slice(*layout.query)]


def placed(documents: Sequence[str], sizes: Sequence[int]) -> list[range]:
    """Where windows of these sizes, from the back, each ending in the middle of the one behind it, lie."""
    found: list[range] = []
    end = len(documents)
    for size in sizes:
        found.append(range(end - size, end))
        end = end - size + size // 2
    assert found[-1].start == 0
    return found


def test_a_set_that_just_fits_takes_one_prompt() -> None:
    whole = small_runner(1024).prompts.build(QUERY, DOCUMENTS).length
    counts = []
    for context in (whole, whole - 1):
        runner = Recording(small_runner(context))
        HeadReranker(runner, bank_of_sets(runner.info, [fitted()])).rank(QUERY, DOCUMENTS, RankOptions())
        counts.append([len(request.layout.documents) for request in runner.requests])
    assert counts[0] == [3]
    assert len(counts[1]) > 1


def test_the_content_free_query_may_be_what_does_not_fit() -> None:
    prompts = small_runner(1024).prompts
    short, null = (prompts.build(query, DOCUMENTS).length for query in ("a", NULL_QUERY))
    assert short < null
    runner = Recording(small_runner(short))
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted()]))
    ranking = reranker.rank("a", DOCUMENTS, RankOptions(aggregation="calibrated"))
    assert len(ranking.scores) == 3
    assert len(runner.requests) > 2
    assert all(request.layout.length <= short for request in runner.requests)
    reranker.rank("a", DOCUMENTS, RankOptions(aggregation="evidence"))
    assert len(runner.requests[-1].layout.documents) == 3


@pytest.mark.parametrize("style", [JOINT, PromptStyle(label=False, query_first=True, tail="total")], ids=str)
def test_windows_keep_the_style_of_the_heads(style: PromptStyle) -> None:
    runner = Recording(small_runner(CONTEXT))
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted(style=style)]))
    reranker.rank(QUERY, long_set(24), RankOptions())
    assert len(runner.requests) > 2
    assert {request.layout.style for request in runner.requests} == {style}


def test_windows_leave_room_for_the_answer() -> None:
    runner = Recording(FakeRunner())
    heads = fitted((MATCHING_HEAD,), view="response")
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [heads]), response_tokens=500)
    # An answer longer than a document and all that is spared for labels.
    documents = [f"{DOCUMENTS[i % 3]} {'word ' * 280}" for i in range(30)]
    ranking = reranker.rank(QUERY, documents, RankOptions(view="response"))
    assert ranking.order[0] % 3 == 1
    assert len(runner.requests) > 2
    assert all(request.layout.length + 500 <= CONTEXT_TOKENS for request in runner.requests)


def test_a_question_without_tokens_is_ranked_in_windows_too() -> None:
    runner = small_runner(CONTEXT)
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted()]))
    assert len(reranker.rank("", long_set(24), RankOptions()).scores) == 24


@pytest.mark.parametrize("style", [JOINT, PromptStyle("parallel")], ids=str)
def test_one_document_that_cannot_fit_is_refused_by_name(style: PromptStyle) -> None:
    runner = small_runner(CONTEXT)
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted(style=style)]))
    huge = "word and word " * 200
    with pytest.raises(InputTooLong, match="max_tokens_per_doc") as caught:
        reranker.rank(QUERY, [DOCUMENTS[0], huge], RankOptions())
    assert (caught.value.field, caught.value.limit) == ("documents", CONTEXT)
    ranking = reranker.rank(QUERY, [DOCUMENTS[0], huge], RankOptions(max_tokens_per_doc=40))
    assert ranking.cut == (1,)


def test_explained_windows_name_places_in_the_given_documents() -> None:
    runner = small_runner(CONTEXT)
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted()]))
    documents = long_set(20, seed=1)
    documents[2] = "🙂 The falcon nests on the granite tower. " * 3
    documents[13] = documents[2]
    ranking = reranker.rank(QUERY, documents, RankOptions(explain=True, max_tokens_per_doc=30))
    lengths = [len(ids) for ids in tokens_of(documents)]
    assert ranking.cut == tuple(i for i, length in enumerate(lengths) if length > 30)
    assert {2, 13} <= set(ranking.cut)
    assert {snippet.document for snippet in ranking.snippets} == {i for i, n in enumerate(lengths) if n}
    for snippet in ranking.snippets:
        text = documents[snippet.document]
        assert text[snippet.start : snippet.end] == snippet.text
        assert 0 < snippet.weight <= 1 + 1e-9
    for vote in ranking.votes:
        assert len(vote.mass) == len(documents)
        assert sorted(vote.ranks) == list(range(1, len(documents) + 1))


def tokens_of(documents: Sequence[str]) -> list[list[int]]:
    tokenizer = small_runner(CONTEXT)._tokenizer
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in documents]


@pytest.mark.parametrize("rule", ["borda", "share", "evidence", "calibrated"])
def test_a_planted_gold_is_found_first_wherever_it_stands(rule: Aggregation) -> None:
    runner, known = planted_runner()
    heads = fitted((known["planted"],), default_aggregation=rule, exponent=1.0)
    recording = Recording(runner)
    reranker = HeadReranker(recording, bank_of_sets(runner.info, [heads]))
    sample = next(s for s in planted_samples(2, n_documents=8) if len(s.golds) == 1)
    (gold,) = sample.golds
    others = [d.content for d in sample.documents if not d.gold] * 8
    for place in (0, 1, 13, 28, 41, 55, 56):
        documents = [*others[:place], sample.documents[gold].content, *others[place:]]
        recording.requests.clear()
        ranking = reranker.rank(sample.question, documents, RankOptions())
        assert len(recording.requests) > 1
        assert ranking.order[0] == place


def test_windows_of_several_tasks_share_passes() -> None:
    runner = small_runner(CONTEXT)
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted()]))
    options = RankOptions(explain=True)
    tasks = [Task(q, tuple(d), options) for q, d in ((QUERY, long_set(24)), ("Who?", DOCUMENTS))]
    tasks.append(Task("What?", tuple(long_set(15, seed=3)), options))
    for task, found in zip(tasks, reranker.rank_many(tasks), strict=True):
        assert not isinstance(found, Exception)
        assert_alike(found, reranker.rank(task.query, task.documents, options))
