"""The fake engine: planted heads where they were planted, rows that are attention."""

import random

import pytest
import torch

from headbank.errors import InputError, InputTooLong
from headbank.models.base import CaptureRequest, HeadRunner, User
from headbank.models.fake import BIASED_HEAD, CONTEXT_TOKENS, FAKE_HEAD_SETS, MATCHING_HEAD, FakeRunner
from headbank.types import HeadId, PromptStyle, Span

QUERY = "What is the capital of France?"
BOTH = ("query", "response")
DOCUMENTS = ["Berlin is a city.", "", "The Capital of France is Paris, they say.", "What? The capital!"]


@pytest.fixture
def runner():
    return FakeRunner()


def words(runner, layout, span):
    return runner.decode(layout.ids[slice(*span)])


def test_spans_are_where_the_texts_are(runner):
    layout = runner.prompts.build(QUERY, DOCUMENTS)
    assert [span.length for span in layout.documents] == [5, 0, 10, 5]
    assert words(runner, layout, layout.documents[2]) == "the capital of france is paris they say"
    assert words(runner, layout, layout.query) == "what is the capital of france"
    assert words(runner, layout, (0, layout.prefix_end)) == "answer with the help of these documents"
    assert layout.documents[0].start == layout.prefix_end + 3
    assert layout.documents[-1].end == layout.tail_start == layout.tail_position
    assert [words(runner, layout, block) for block in layout.blocks[:2]] == [
        "document 1 berlin is a city",
        "document 2",
    ]
    assert (
        words(runner, layout, (layout.tail_start, layout.length))
        == "question what is the capital of france answer"
    )


def test_offsets_give_the_words_of_a_document(runner):
    document = " The (Capital)  of\nFrance é🙂."
    offsets = runner.prompts.offsets(document, 100)
    assert [document[a:b] for a, b in offsets] == ["The", "(", "Capital", ")", "of", "France", "é", "🙂", "."]
    assert runner.prompts.offsets(document, 2) == offsets[:2]
    layout = runner.prompts.build(QUERY, [document])
    assert layout.documents[0].length == len(offsets)


def test_long_documents_are_cut_and_named(runner):
    layout = runner.prompts.build(QUERY, DOCUMENTS, max_tokens_per_doc=5)
    assert layout.cut == (2,)
    assert words(runner, layout, layout.documents[2]) == "the capital of france is"


@pytest.mark.parametrize(
    ("query", "documents", "reserve", "field"),
    [
        ("word " * (CONTEXT_TOKENS // 2 + 1), ["a"], 0, "query"),
        ("a", ["word " * CONTEXT_TOKENS], 0, "documents"),
        ("a", ["a"], CONTEXT_TOKENS - 10, "documents"),
    ],
)
def test_what_does_not_fit_is_refused(runner, query, documents, reserve, field):
    with pytest.raises(InputTooLong) as refused:
        runner.prompts.build(query, documents, reserve_tokens=reserve)
    assert refused.value.field == field


def test_matching_head_looks_at_the_words_of_the_query(runner):
    layout = runner.prompts.build(QUERY, DOCUMENTS)
    capture = runner.capture(CaptureRequest(layout, (MATCHING_HEAD,)))
    row = capture.mass["query"][0]
    start = layout.documents[2].start
    matches = [start + 1, start + 3, layout.documents[3].start + 3]
    background = 0.1 / layout.length
    assert row[matches].tolist() == pytest.approx([0.3 + background] * 3)
    others = [j for j in range(layout.length) if j not in matches]
    assert row[others].tolist() == pytest.approx([background] * len(others))
    assert capture.source["query"] == tuple(range(*layout.query))


def test_biased_head_looks_at_the_first_document_and_the_rest_everywhere(runner):
    layout = runner.prompts.build(QUERY, DOCUMENTS)
    capture = runner.capture(CaptureRequest(layout, views=BOTH))
    assert len(capture.heads) == 16
    for mass in capture.mass.values():
        first = mass[capture.heads.index(BIASED_HEAD), slice(*layout.documents[0])].sum()
        assert float(first) == pytest.approx(0.9 + 0.1 * 5 / layout.length)
        uniform = mass[[i for i, h in enumerate(capture.heads) if h not in (BIASED_HEAD, MATCHING_HEAD)]]
        assert uniform.shape == (14, layout.length)
        assert torch.equal(uniform, torch.full_like(uniform, 1 / layout.length))


@pytest.mark.parametrize("documents", [DOCUMENTS, [], [""], ["nothing here"], ["capital"]])
def test_every_row_sums_to_one(runner, documents):
    layout = runner.prompts.build(QUERY, documents)
    capture = runner.capture(CaptureRequest(layout, views=BOTH))
    for mass in capture.mass.values():
        assert mass.dtype == torch.float32
        assert mass.shape == (16, layout.length)
        assert mass.sum(dim=1).tolist() == pytest.approx([1.0] * 16)


@pytest.mark.parametrize(
    ("documents", "limit", "written"),
    [
        (DOCUMENTS, 16, "is paris they say"),
        (DOCUMENTS, 2, "is paris"),
        (["nothing"], 16, "unknown"),
        ([], 16, "unknown"),
        (["the capital"], 16, "capital"),
    ],
)
def test_answer_is_copied_from_behind_the_best_match(runner, documents, limit, written):
    layout = runner.prompts.build(QUERY, documents)
    capture = runner.capture(CaptureRequest(layout, views=("response",), max_new_tokens=limit))
    assert runner.decode(capture.response) == written
    assert capture.source["response"] == tuple(range(layout.length, layout.length + len(capture.response)))
    assert list(capture.mass) == ["response"]
    assert capture.steps.shape == (len(capture.response), 16, layout.length)
    assert all(torch.equal(step, capture.mass["response"]) for step in capture.steps)
    if written.startswith("is paris"):
        copied = layout.documents[2].start + 4
        row = capture.mass["response"][capture.heads.index(MATCHING_HEAD)]
        planted = row[copied : copied + len(capture.response)].sum()
        assert float(planted) == pytest.approx(0.9 + 0.1 * len(capture.response) / layout.length)


def test_captures_repeat_and_do_not_depend_on_the_runner(runner):
    layout = runner.prompts.build(QUERY, DOCUMENTS)
    again = FakeRunner()
    assert again.prompts.build(QUERY, DOCUMENTS) == layout
    request = CaptureRequest(layout, views=BOTH)
    [one, two] = runner.capture_many([request, request])
    three = FakeRunner().capture(request)
    for view in BOTH:
        assert torch.equal(one.mass[view], two.mass[view])
        assert torch.equal(one.mass[view], three.mass[view])
    assert one.response == three.response


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"views": BOTH, "max_new_tokens": 0}, "max_new_tokens"),
        ({"heads": ()}, "heads"),
        ({"heads": (HeadId(0, 0), HeadId(4, 0))}, "heads"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused(runner, options, field):
    with pytest.raises(InputError) as refused:
        runner.capture(CaptureRequest(runner.prompts.build(QUERY, DOCUMENTS), **options))
    assert refused.value.field == field


def test_the_query_view_writes_nothing(runner):
    capture = runner.capture(CaptureRequest(runner.prompts.build(QUERY, DOCUMENTS), max_new_tokens=0))
    assert capture.response == ()
    assert capture.steps is None


PARALLEL = PromptStyle("parallel")


def test_parallel_prompts_have_unnumbered_blocks_and_a_near_tail(runner):
    layout = runner.prompts.build(QUERY, DOCUMENTS, style=PARALLEL)
    assert layout.style == PARALLEL
    assert [words(runner, layout, block) for block in layout.blocks] == [
        "document berlin is a city",
        "document",
        "document the capital of france is paris they say",
        "document what the capital",
    ]
    assert [block.length for block in layout.blocks] == [7, 2, 12, 7]
    assert (layout.blocks[0].start, layout.blocks[-1].end) == (layout.prefix_end, layout.tail_start)
    assert layout.tail_position == layout.prefix_end + 12
    far = runner.prompts.build(QUERY, DOCUMENTS, style=PromptStyle("parallel", tail="total"))
    assert far.tail_position == far.tail_start
    assert runner.prompts.build(QUERY, [], style=PARALLEL).tail_position == layout.prefix_end


def test_unlabelled_and_query_first(runner):
    layout = runner.prompts.build(QUERY, DOCUMENTS, style=PromptStyle(label=False, query_first=True))
    assert layout.blocks == layout.documents
    prefix = words(runner, layout, (0, layout.prefix_end))
    assert prefix == "answer with the help of these documents question what is the capital of france"


def test_only_the_longest_document_must_fit_in_parallel(runner):
    documents = ["word " * 1500] * 5
    layout = runner.prompts.build(QUERY, documents, style=PARALLEL)
    assert layout.length > CONTEXT_TOKENS
    with pytest.raises(InputTooLong) as refused:
        runner.prompts.build(QUERY, documents)
    assert refused.value.field == "documents"


def test_the_order_of_parallel_documents_does_not_matter(runner):
    """Also where two documents match equally well, and where one stands there twice."""
    chance = random.Random(0)
    documents = [*DOCUMENTS, "France has a capital of old.", DOCUMENTS[2]]
    base = runner.capture(CaptureRequest(runner.prompts.build(QUERY, documents, style=PARALLEL), views=BOTH))
    layout = runner.prompts.build(QUERY, documents, style=PARALLEL)
    for _ in range(10):
        order = chance.sample(range(len(documents)), len(documents))
        moved = runner.prompts.build(QUERY, [documents[i] for i in order], style=PARALLEL)
        capture = runner.capture(CaptureRequest(moved, views=BOTH))
        assert capture.response == base.response
        for view in BOTH:
            for place, i in enumerate(order):
                here = capture.mass[view][:, slice(*moved.documents[place])]
                assert torch.equal(here, base.mass[view][:, slice(*layout.documents[i])])
    biased = base.heads.index(BIASED_HEAD)
    assert float(base.mass["query"][biased, 0]) == pytest.approx(0.9 + 0.1 / layout.length)


def listwise(runner, query, documents, end=" Rank the passages, for example [4] > [2]."):
    parts = ["Rank these passages for the query. "]
    for number, document in enumerate(documents, start=1):
        parts += [f"[{number}] ", User(document), "\n"]
    return runner.prompts.chat([*parts, "Search Query: ", User(query), end])


@pytest.mark.parametrize(
    ("documents", "written"),
    [
        (DOCUMENTS, "[3] > [4] > [1] > [2]"),
        (DOCUMENTS[::-1], "[2] > [1] > [3] > [4]"),
        (["France"], "[1]"),
        (["nothing", "here"], "[1] > [2]"),
        # A document cannot spell an identifier, nor end the passages.
        (["a query: France", "[3] [1] capital", "France is the capital."], "[3] > [1] > [2]"),
    ],
)
def test_a_listwise_prompt_is_answered_with_a_permutation(runner, documents, written):
    ids = listwise(runner, QUERY, documents)
    assert runner.decode(runner.generate(ids, 100)) == written
    assert runner.decode(runner.generate(ids, 3)) == " ".join(written.split()[:3])


def test_the_query_may_stand_before_the_passages(runner):
    parts = ["Query: ", User(QUERY), "\n[1] ", User("Berlin"), "[2] ", User("Capital!"), "Your answer:"]
    assert runner.decode(runner.generate(runner.prompts.chat(parts), 9)) == "[2] > [1]"


def test_any_other_prompt_is_answered_with_unknown(runner):
    for parts in (["Who knows? ", User("[1] France query [2]")], []):
        ids = runner.prompts.chat(parts)
        assert runner.decode(runner.generate(ids, 9)) == "unknown"
        assert runner.generate(ids, 0) == ()


def test_a_chat_that_does_not_fit_is_refused(runner):
    assert len(runner.prompts.chat([User("word " * CONTEXT_TOKENS)])) == CONTEXT_TOKENS
    with pytest.raises(InputTooLong) as refused:
        runner.prompts.chat(["a ", User("word " * CONTEXT_TOKENS)])
    assert (refused.value.field, refused.value.limit) == ("documents", CONTEXT_TOKENS)


def test_head_sets_and_shape(runner):
    checked: HeadRunner = runner
    named = {(s.name, s.detector, s.view, s.style, s.heads) for s in FAKE_HEAD_SETS}
    assert named == {
        (f"expert.{view}.{layout}", "expert", view, PromptStyle(layout), (HeadId(2, 1),))
        for view in BOTH
        for layout in ("joint", "parallel")
    }
    assert len(FAKE_HEAD_SETS) == 4
    assert (checked.info.n_layers, checked.info.n_heads, checked.info.context_tokens) == (4, 4, 4096)


def test_delay_is_slept_at_every_capture(monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    slow = FakeRunner(delay_s=0.25)
    layout = slow.prompts.build(QUERY, DOCUMENTS)
    assert layout.query == Span(layout.tail_start + 2, layout.tail_start + 9)
    slow.capture(CaptureRequest(layout))
    slow.capture_many([CaptureRequest(layout)] * 2)
    slow.generate(layout.ids, 1)
    assert slept == [0.25] * 4
