"""Styles of prompts and chat messages: what stands where, at which position, and what fits."""

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from headbank.errors import InputTooLong
from headbank.models import prompt
from headbank.models.base import User
from headbank.models.prompt import PromptBuilder
from headbank.types import JOINT, PromptLayout, PromptStyle, Span
from tests.support.tiny_models import CHAT_TEMPLATE, tiny_tokenizer

CONTEXT = 2048
QUERY = "Which <|im_end|> one? 🙂"
DOCUMENTS = (
    "A plain document.",
    "",
    "日本語 <|im_start|>user",
    "A plain document.",
    "Around: \n\nDocument:\n and more. ",
)
PARALLEL = PromptStyle("parallel")
STYLES = [
    PromptStyle(layout, label, query_first, tail)
    for layout, label, query_first, tail in product(
        ("joint", "parallel"), (True, False), (True, False), ("longest", "total")
    )
]


def builder(context: int = CONTEXT, **options: Any) -> PromptBuilder:
    return PromptBuilder(tiny_tokenizer(**options), context)


def text_of(layout: PromptLayout, start: int, end: int) -> str:
    text: str = tiny_tokenizer().decode(layout.ids[start:end])
    return text


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_every_part_is_where_the_layout_says(style: PromptStyle) -> None:
    layout = builder().build(QUERY, DOCUMENTS, style=style)
    assert layout.style == style
    prefix = "<|im_start|>user\n" + prompt.INSTRUCTION
    if style.query_first:
        prefix += f"Question:\n{QUERY}\n\n"
    assert text_of(layout, 0, layout.prefix_end) == prefix
    edges = [layout.prefix_end, *(edge for block in layout.blocks for edge in block), layout.tail_start]
    assert all(end == start for end, start in list(pairwise(edges))[::2])
    assert len(layout.blocks) == len(layout.documents) == len(DOCUMENTS)
    for number, (block, span, document) in enumerate(
        zip(layout.blocks, layout.documents, DOCUMENTS, strict=True), start=1
    ):
        label = (
            "" if not style.label else f"Document {number}:\n" if style.layout == "joint" else "Document:\n"
        )
        assert text_of(layout, block.start, span.start) == label
        assert text_of(layout, *span) == document
        assert text_of(layout, span.end, block.end) == "\n\n"
    assert text_of(layout, layout.tail_start, layout.query.start) == "Question:\n"
    assert text_of(layout, *layout.query) == QUERY
    assert text_of(layout, layout.query.end, layout.length) == (
        prompt.REQUEST + "<|im_end|>\n<|im_start|>assistant\n" + prompt.OPENING
    )
    # The template's own markers are special, those of the texts are not.
    assert [i for i in layout.ids if i in (0, 1, 2)] == [1, 2, 1]


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_the_tail_stands_after_the_longest_document_or_after_all(style: PromptStyle) -> None:
    for documents in (DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS[1:2], ()):
        layout = builder().build(QUERY, documents, style=style)
        if style.layout == "parallel" and style.tail == "longest":
            longest = max([block.length for block in layout.blocks], default=0)
            assert layout.tail_position == layout.prefix_end + longest
            assert (layout.tail_position < layout.tail_start) is (len(documents) > 1)
        else:
            assert layout.tail_position == layout.tail_start


def test_the_default_is_joint_and_labelled() -> None:
    layout = builder().build(QUERY, DOCUMENTS)
    assert layout == builder().build(QUERY, DOCUMENTS, style=JOINT)
    assert PromptStyle("joint", True, False, "longest") == JOINT
    bare = PromptStyle("parallel", label=False, query_first=True, tail="total")
    assert [str(style) for style in (JOINT, PARALLEL, bare)] == [
        "joint",
        "parallel",
        "parallel+unlabelled+query-first+far-tail",
    ]


@pytest.mark.parametrize("label", [True, False])
def test_a_parallel_block_does_not_depend_on_its_place(label: bool) -> None:
    layout = builder().build(QUERY, DOCUMENTS, style=replace(PARALLEL, label=label))
    blocks = [layout.ids[block.start : block.end] for block in layout.blocks]
    assert blocks[0] == blocks[3]
    turned = builder().build("Else?", DOCUMENTS[::-1], style=replace(PARALLEL, label=label))
    assert [turned.ids[block.start : block.end] for block in turned.blocks] == blocks[::-1]
    joint = builder().build(QUERY, DOCUMENTS)
    numbered = [joint.ids[block.start : block.end] for block in joint.blocks]
    assert numbered[0] != numbered[3]


def test_cuts_are_named_in_every_style() -> None:
    for style in STYLES:
        layout = builder().build(
            QUERY, ["x", "one two three four five six"], style=style, max_tokens_per_doc=4
        )
        assert layout.cut == (1,)
        assert layout.documents[1].length == 4
        assert text_of(layout, layout.documents[1].end, layout.blocks[1].end) == "\n\n"


def test_one_hash_for_all_styles_and_it_covers_the_parallel_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bank names the style of each head set; the hash says that the texts are the same."""
    prompts = builder()
    before = prompts.template_hash
    for style in STYLES:
        prompts.build(QUERY, DOCUMENTS, style=style)
        prompts.chat(["text"])
    assert prompts.template_hash == builder().template_hash == before
    monkeypatch.setattr(prompt, "PARALLEL_LABEL", "Text:\n")
    assert builder().template_hash != before


def test_only_the_longest_document_counts_in_parallel() -> None:
    documents = ["one two three"] * 20
    joint = builder().build("Who?", documents)
    parallel = builder().build("Who?", documents, style=PARALLEL)
    needed = parallel.tail_position + parallel.length - parallel.tail_start
    assert needed < joint.length / 5
    assert builder(needed).build("Who?", documents, style=PARALLEL).length == parallel.length
    far = PromptStyle("parallel", tail="total")
    for context, reserve, style, limit in (
        (needed - 1, 0, PARALLEL, needed - 1),
        (needed + 7, 8, PARALLEL, needed - 1),
        (parallel.length - 1, 0, far, parallel.length - 1),
    ):
        with pytest.raises(InputTooLong) as caught:
            builder(context).build("Who?", documents, style=style, reserve_tokens=reserve)
        assert (caught.value.field, caught.value.limit) == ("documents", limit)
        assert str(limit) in str(caught.value)
        assert "three" not in str(caught.value)
        assert ("longest document" in str(caught.value)) is (style is PARALLEL)
        assert ("20 documents" in str(caught.value)) is (style is far)


def test_a_query_before_the_documents_counts_twice() -> None:
    once = builder().build("Who was it?", ["x"])
    twice = builder().build("Who was it?", ["x"], style=PromptStyle(query_first=True))
    question = once.query.start - once.tail_start
    separator = once.tail_start - once.documents[0].end
    assert twice.length == once.length + question + once.query.length + separator
    with pytest.raises(InputTooLong, match="documents"):
        builder(twice.length - 1).build("Who was it?", ["x"], style=PromptStyle(query_first=True))


def test_a_chat_is_one_message_of_fixed_and_user_texts() -> None:
    ids = builder().chat(["Rank these: [1] ", User("A <|im_end|> text"), " [2] ", User(""), "."])
    assert tiny_tokenizer().decode(ids) == (
        "<|im_start|>user\nRank these: [1] A <|im_end|> text [2] .<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [i for i in ids if i in (0, 1, 2)] == [1, 2, 1]
    assert (
        tiny_tokenizer().decode(builder().chat([])) == "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_of_fixed_text_are_special_and_those_of_users_are_not() -> None:
    spelled = "<|im_end|><|endoftext|>"
    fixed, user = builder().chat([spelled]), builder().chat([User(spelled)])
    assert [i for i in fixed if i in (0, 1, 2)] == [1, 2, 0, 2, 1]
    assert [i for i in user if i in (0, 1, 2)] == [1, 2, 1]
    assert tiny_tokenizer().decode(user) == tiny_tokenizer().decode(fixed)


def test_user_text_is_the_same_tokens_in_a_chat_as_in_a_prompt() -> None:
    text = "A <|im_end|> text\ud83d"
    layout = builder().build("Who?", [text])
    body = layout.ids[slice(*layout.documents[0])]
    ids = builder().chat(["x", User(text), "y"])
    places = [i for i in range(len(ids)) if ids[i : i + len(body)] == body]
    assert len(places) == 1
    assert Span(places[0], places[0] + len(body)).length == len(body) > 5


def test_a_chat_that_does_not_fit_is_refused() -> None:
    parts = ["Rank these: ", User("word " * 30)]
    length = len(builder().chat(parts))
    assert len(builder(length).chat(parts)) == length
    with pytest.raises(InputTooLong) as caught:
        builder(length - 1).chat(parts)
    assert (caught.value.field, caught.value.limit) == ("documents", length - 1)
    assert str(length) in str(caught.value)
    assert "word" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "start", "end"),
    [
        ({"chat_template": None}, "Hello", "Hello"),
        ({"chat_template": None, "bos": "<|endoftext|>"}, "<|endoftext|>Hello", "Hello"),
        (
            {"chat_template": "{{ bos_token }}" + CHAT_TEMPLATE, "bos": "<|endoftext|>"},
            "<|endoftext|><|im_start|>user",
            "assistant\n",
        ),
    ],
)
def test_a_chat_begins_and_ends_as_the_template_does(options: dict[str, Any], start: str, end: str) -> None:
    text = tiny_tokenizer(**options).decode(builder(**options).chat(["Hello"]))
    assert text.startswith(start)
    assert text.endswith(end)
    assert text.count("<|endoftext|>") == start.count("<|endoftext|>")
