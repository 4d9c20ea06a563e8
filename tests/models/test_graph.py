"""From prompts to nodes: chains, what is shared, what is read, what is kept."""

from typing import Any

import pytest
import torch

from headbank.models import graph as graphs
from headbank.models.cache import DocumentCache, document_key
from headbank.models.graph import PromptGraph, chain
from headbank.models.packed import KeptRows, KeyValues, Node
from headbank.types import PromptLayout, PromptStyle, Span
from tests.support.reference import BARE, PARALLEL

JOINT = PromptStyle()
HEADS = {0: torch.tensor([1])}


def layout(
    blocks: list[tuple[int, ...]], style: PromptStyle, tail: tuple[int, ...] = (9, 8, 7, 6)
) -> PromptLayout:
    """A prompt of a three-token prefix (1, 2, 3), blocks of given tokens, and a tail that asks (8, 7)."""
    ids: tuple[int, ...] = (1, 2, 3)
    spans = []
    for block in blocks:
        spans.append(Span(len(ids), len(ids) + len(block)))
        ids += block
    start = len(ids)
    longest = 3 + max((len(block) for block in blocks), default=0)
    near = style.layout == "parallel" and style.tail == "longest"
    return PromptLayout(
        ids + tail,
        3,
        tuple(spans),
        start,
        Span(start + 1, start + len(tail) - 1),
        (),
        tuple(spans),
        style,
        longest if near else start,
    )


def add(graph: PromptGraph, prompt: PromptLayout, *, writes: bool = False, heads: Any = HEADS) -> Node:
    return graph.add(prompt, heads, KeptRows(), writes)


def described(nodes: list[Node]) -> list[tuple[tuple[int, ...], int, list[tuple[int, ...]], bool]]:
    return [(n.ids, n.start, [c.ids for c in n.context], n.continues) for n in nodes]


def test_a_chain_is_cut_into_pieces_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "PASS_TOKENS", 4)
    before = Node((1, 2), 0)
    ids = tuple(range(10, 20))
    pieces = [ids[:4], ids[4:8], ids[8:]]
    for follows in (False, True):
        assert described(chain(ids, 5, (before,), follows)) == [
            (pieces[0], 5, [(1, 2)], follows),
            (pieces[1], 9, [(1, 2), pieces[0]], True),
            (pieces[2], 13, [(1, 2), *pieces[:2]], True),
        ]
    # There is nothing that the first stretch of a prompt could follow.
    assert described(chain(ids[:4], 0, (), True)) == [(pieces[0], 0, [], False)]
    assert chain((), 3, (before,)) == []


def test_a_joint_prompt_is_a_chain() -> None:
    graph = PromptGraph(None, 1)
    last = add(graph, layout([(4,), (5, 5)], JOINT))
    assert described(graph.nodes) == [
        ((1, 2, 3), 0, [], False),
        ((4,), 3, [(1, 2, 3)], True),
        ((5, 5), 4, [(1, 2, 3), (4,)], True),
        ((9, 8, 7, 6), 6, [(1, 2, 3), (4,), (5, 5)], True),
    ]
    assert last is graph.nodes[-1]


def test_parallel_documents_hang_on_the_prefix_and_the_tail_on_all_of_them() -> None:
    graph = PromptGraph(None, 1)
    add(graph, layout([(4,), (5, 5)], PARALLEL))
    assert described(graph.nodes) == [
        ((1, 2, 3), 0, [], False),
        ((4,), 3, [(1, 2, 3)], False),
        ((5, 5), 3, [(1, 2, 3)], False),
        ((9, 8, 7, 6), 5, [(1, 2, 3), (4,), (5, 5)], False),
    ]
    far = PromptGraph(None, 1)
    add(far, layout([(4,), (5, 5)], BARE))
    assert far.nodes[-1].start == 6


def test_long_parallel_documents_are_chains_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "PASS_TOKENS", 3)
    graph = PromptGraph(DocumentCache(1 << 20), 1)
    add(graph, layout([(4, 4, 4, 5, 5)], PARALLEL))
    assert described(graph.nodes) == [
        ((1, 2, 3), 0, [], False),
        ((4, 4, 4), 3, [(1, 2, 3)], False),
        ((5, 5), 6, [(1, 2, 3), (4, 4, 4)], True),
        ((9, 8, 7), 8, [(1, 2, 3), (4, 4, 4), (5, 5)], False),
        ((6,), 11, [(1, 2, 3), (4, 4, 4), (5, 5), (9, 8, 7)], True),
    ]


def test_a_document_that_stands_there_twice_is_one_node() -> None:
    for documents in (None, DocumentCache(1 << 20)):
        graph = PromptGraph(documents, 1)
        last = add(graph, layout([(4,), (5, 5), (4,)], PARALLEL))
        assert [n.ids for n in graph.nodes] == [(1, 2, 3), (4,), (5, 5), (9, 8, 7, 6)]
        assert last.context[1] is last.context[3]
    joint = PromptGraph(None, 1)
    add(joint, layout([(4,), (5, 5), (4,)], JOINT))
    assert [n.ids for n in joint.nodes] == [(1, 2, 3), (4,), (5, 5), (4,), (9, 8, 7, 6)]


def test_prompts_share_what_stands_at_one_place_after_the_same_tokens() -> None:
    graph = PromptGraph(None, 1)
    for blocks in ([(4,), (5,)], [(4,), (6,)], [(6,), (5,)], [(4,), (5,), (6,)]):
        add(graph, layout(blocks, JOINT))
    asked = (9, 8, 7, 6)
    assert [n.ids for n in graph.nodes] == [
        *((1, 2, 3), (4,), (5,), asked),
        *((6,), asked),
        # Another document before it: neither (6,) nor (5,) is what it was.
        *((6,), (5,), asked),
        *((6,), asked),
    ]
    parallel = PromptGraph(None, 1)
    for blocks in ([(4,), (5,)], [(6,), (5,)], [(5,), (4,)]):
        add(parallel, layout(blocks, PARALLEL))
    assert [n.ids for n in parallel.nodes] == [(1, 2, 3), (4,), (5,), asked, (6,), asked, asked]


@pytest.mark.parametrize("documents", [None, DocumentCache(1 << 20)])
def test_another_prefix_of_the_same_length_shares_nothing(documents: DocumentCache | None) -> None:
    graph = PromptGraph(documents, 1)
    one = layout([(4,)], PARALLEL)
    add(graph, one)
    add(graph, PromptLayout(**{**vars(one), "ids": (1, 2, 30, *one.ids[3:])}))
    asked = (9, 8, 7, 6)
    assert [n.ids for n in graph.nodes] == [(1, 2, 3), (4,), asked, (1, 2, 30), (4,), asked]


def test_only_the_tokens_of_the_query_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = layout([(4,)], JOINT, tail=(9, *range(20, 27), 6))
    for size, expected in ((100, [[1, 2, 3, 4, 5, 6, 7]]), (3, [[1, 2], [0, 1, 2], [0, 1]]), (1, [[0]] * 7)):
        monkeypatch.setattr(graphs, "PASS_TOKENS", size)
        graph = PromptGraph(None, 1)
        reducer = KeptRows()
        graph.add(prompt, HEADS, reducer, False)
        reads = [n.read for n in graph.nodes if n.read is not None]
        assert [read.source.tolist() for read in reads] == expected
        assert all(read.reducer is reducer and read.heads is HEADS for read in reads)
    unread = PromptGraph(None, 1)
    add(unread, prompt, heads={})
    empty = PromptGraph(None, 1)
    add(empty, layout([(4,)], JOINT, tail=(9, 6)))
    assert all(n.read is None for n in (*unread.nodes, *empty.nodes))


@pytest.mark.parametrize("style", [JOINT, PARALLEL], ids=str)
def test_a_response_needs_everything_and_a_query_nothing(style: PromptStyle) -> None:
    prompt = layout([(4,), (5,)], style)
    graph = PromptGraph(None, 1)
    last = add(graph, prompt)
    assert not any(n.keep or n.wants_logits for n in graph.nodes)
    again = add(graph, prompt, writes=True)
    assert again is not last
    assert all(n.keep for n in (*again.context, again))
    assert [n for n in graph.nodes if n.wants_logits] == [again]


def computed(node: Node, layers: int) -> KeyValues:
    layer = torch.zeros(2, 1, len(node.ids), 2)
    return KeyValues((layer,) * layers, torch.arange(node.start, node.start + len(node.ids)))


def fill(cache: DocumentCache, prompt: PromptLayout, layers: int) -> None:
    graph = PromptGraph(cache, layers)
    add(graph, prompt)
    for node in graph.nodes:
        node.computed = computed(node, layers)
    graph.remember()


def test_kept_documents_are_not_computed_again() -> None:
    cache = DocumentCache(1 << 20)
    fill(cache, layout([(4,), (5, 5)], PARALLEL), layers=2)
    assert cache.counts.documents == 3
    for key in (document_key((), (1, 2, 3)), document_key((1, 2, 3), (4,)), document_key((1, 2, 3), (5, 5))):
        assert cache.get(key, 2) is not None
    graph = PromptGraph(cache, 2)
    last = add(graph, layout([(6,), (4,), (4,)], PARALLEL, tail=(9, 30, 31, 6)))
    assert [n.ids for n in graph.nodes] == [(6,), (9, 30, 31, 6)]
    assert [n.ids for n in last.context] == [(1, 2, 3), (6,), (4,), (4,)]
    assert [n.computed is not None for n in last.context] == [True, False, True, True]
    deeper = PromptGraph(cache, 3)
    add(deeper, layout([(4,)], PARALLEL))
    assert [n.ids for n in deeper.nodes] == [(1, 2, 3), (4,), (9, 8, 7, 6)]


@pytest.mark.parametrize("style", [JOINT, BARE], ids=str)
def test_documents_that_depend_on_what_stands_before_are_not_kept(style: PromptStyle) -> None:
    cache = DocumentCache(1 << 20)
    fill(cache, layout([(4,), (5, 5)], style), layers=2)
    assert cache.counts == DocumentCache(0).counts
