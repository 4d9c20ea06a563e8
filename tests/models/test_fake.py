"""The fake engine: planted heads where they were planted, rows that are attention."""

import pytest
import torch

from headbank.errors import InputError, InputTooLong
from headbank.models.base import HeadRunner
from headbank.models.fake import BIASED_HEAD, CONTEXT_TOKENS, FAKE_HEAD_SETS, MATCHING_HEAD, FakeRunner
from headbank.types import HeadId, Span

QUERY = "What is the capital of France?"
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
    assert layout.documents[-1].end == layout.tail_start
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
    capture = runner.capture(layout, heads=[MATCHING_HEAD])
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
    capture = runner.capture(layout, views=("query", "response"))
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
    capture = runner.capture(layout, views=("query", "response"))
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
    capture = runner.capture(layout, views=("response",), max_new_tokens=limit)
    assert runner.decode(capture.response) == written
    assert capture.source["response"] == tuple(range(layout.length, layout.length + len(capture.response)))
    assert list(capture.mass) == ["response"]
    if written.startswith("is paris"):
        copied = layout.documents[2].start + 4
        row = capture.mass["response"][capture.heads.index(MATCHING_HEAD)]
        planted = row[copied : copied + len(capture.response)].sum()
        assert float(planted) == pytest.approx(0.9 + 0.1 * len(capture.response) / layout.length)


def test_captures_repeat_and_do_not_depend_on_the_runner(runner):
    layout = runner.prompts.build(QUERY, DOCUMENTS)
    again = FakeRunner()
    assert again.prompts.build(QUERY, DOCUMENTS) == layout
    [one, two] = runner.capture_many([layout, layout], views=("query", "response"))
    three = FakeRunner().capture(layout, views=("query", "response"))
    for view in ("query", "response"):
        assert torch.equal(one.mass[view], two.mass[view])
        assert torch.equal(one.mass[view], three.mass[view])
    assert one.response == three.response


def test_at_least_one_token_must_be_written(runner):
    with pytest.raises(InputError, match="max_new_tokens"):
        runner.capture(runner.prompts.build(QUERY, DOCUMENTS), max_new_tokens=0)


def test_head_sets_and_shape(runner):
    checked: HeadRunner = runner
    assert [(s.name, s.view, s.heads) for s in FAKE_HEAD_SETS] == [
        ("expert.query", "query", (HeadId(2, 1),)),
        ("expert.response", "response", (HeadId(2, 1),)),
    ]
    assert (checked.info.n_layers, checked.info.n_heads, checked.info.context_tokens) == (4, 4, 4096)


def test_delay_is_slept_at_every_capture(monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    slow = FakeRunner(delay_s=0.25)
    layout = slow.prompts.build(QUERY, DOCUMENTS)
    assert layout.query == Span(layout.tail_start + 2, layout.tail_start + 9)
    slow.capture(layout)
    slow.capture(layout)
    assert slept == [0.25, 0.25]
