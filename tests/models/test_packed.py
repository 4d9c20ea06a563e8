"""Passes by themselves: how nodes are split, joined and batched, what they see, and what they leave behind."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from headbank.models.packed import (
    PASS_TOKENS,
    KeptRows,
    KeyValues,
    Node,
    Pass,
    Read,
    TokenMass,
    joined,
    passes,
)
from headbank.models.tap import tapping
from tests.support.tiny_models import tiny_model

CPU = torch.device("cpu")


def node(length: int, start: int = 0, *context: Node, **options: Any) -> Node:
    return Node(tuple(range(3, 3 + length)), start, context, **options)


def test_token_mass_sums_chunks_and_drops_later_columns() -> None:
    rows = torch.arange(3 * 4 * 5, dtype=torch.float32).reshape(3, 4, 5)
    total, kept = TokenMass(n_tokens=3), KeptRows()
    for reducer in (total, kept):
        reducer.add(1, rows[:, :3])
        reducer.add(1, rows[:, 3:])
        reducer.add(0, rows[:, :1])
    assert torch.equal(total.totals[1], rows.sum(1)[:, :3])
    assert torch.equal(total.totals[0], rows[:, 0, :3])
    assert torch.equal(kept.rows(1), rows)


def test_token_mass_counts_columns_that_are_not_there_as_zero() -> None:
    """Rows of a query in two pieces: the first piece sees less."""
    total = TokenMass(n_tokens=4)
    total.add(0, torch.ones(2, 3, 2))
    total.add(0, torch.full((2, 1, 5), 2.0))
    assert total.totals[0].tolist() == [[5, 5, 2, 2]] * 2


def test_passes_fill_the_budget_in_order() -> None:
    nodes = [node(n) for n in (4, 6, 1, 9, 25, 2, 0, 3)]
    split = [[len(n.ids) for n in batch] for batch, _, _ in passes(nodes, 10)]
    assert split == [[4, 6], [1, 9], [25], [2, 0, 3]]
    assert [n for batch, _, _ in passes(nodes, 10) for n in batch] == nodes
    assert list(passes([], 10)) == []
    within = [node(PASS_TOKENS - 1), node(1), node(1)]
    assert [len(batch) for batch, _, _ in passes(within)] == [2, 1]


def test_passes_name_what_later_ones_need() -> None:
    a = node(4)
    b = node(4, 4, a)
    c = node(4, 8, a, b)
    d = node(4, 12, c, keep=True)
    e = node(2, 0)
    kept = [[n for n in (a, b, c, d, e) if n in needed] for _, needed, _ in passes([a, b, c, d, e], 8)]
    # b is seen by c in a later pass, a too; c is seen by d in its own pass only; d is wanted afterwards.
    assert kept == [[a, b], [d], []]


def key_values(*values: int) -> KeyValues:
    layer = torch.tensor(values, dtype=torch.float32)[None, None, :, None].expand(2, 1, -1, 2)
    return KeyValues((layer, layer + 100), torch.tensor(values))


def test_joined_is_one_stretch() -> None:
    nodes = [node(2, computed=key_values(5, 6)), node(1, computed=key_values(2))]
    found = joined(nodes)
    assert found.positions.tolist() == [5, 6, 2]
    assert [layer.shape for layer in found.layers] == [(2, 1, 3, 2)] * 2
    assert found.layers[1][1, 0, :, 0].tolist() == [105, 106, 102]
    assert found.n_bytes == 2 * (2 * 1 * 3 * 2) * 4
    with pytest.raises(AssertionError, match="not been computed"):
        joined([*nodes, node(1)])


def shape_of(packed: Pass) -> list[list[int]]:
    """Lengths of the runs of every batch."""
    return [[run.end - run.begin for run in batch.runs] for batch in packed.batches]


def test_a_chain_attends_as_one_stretch() -> None:
    a = node(3)
    b = node(2, 3, a, continues=True)
    c = node(4, 5, a, b, continues=True)
    packed = Pass([a, b, c], [], None, CPU)
    assert shape_of(packed) == [[9]]
    assert packed.tokens.tolist() == [[3, 4, 5, 3, 4, 3, 4, 5, 6]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8]]
    # Causality is all there is to know.
    assert packed.batches[0].mask(None) is None


@pytest.mark.parametrize("between", [0, 2])
def test_a_stretch_is_not_joined_to_another_one_s_end(between: int) -> None:
    """Two chains on one start: the second begins a run of its own, on the place of what it follows."""
    a = node(3)
    b = node(2, 3, a, continues=True)
    others = [node(between, 9)] if between else []
    c = node(4, 3, a, continues=True)
    packed = Pass([a, b, *others, c], [], None, CPU)
    assert sorted(shape_of(packed)) == sorted([[5], [4], *([[2]] if between else [])])
    last = next(batch for batch in packed.batches if batch.length == 4)
    assert last.context == [(0, 3)]
    assert last.positions.tolist() == [0, 1, 2]


def test_a_stretch_that_sees_less_is_not_joined() -> None:
    a = node(3)
    b = node(2, 3, a, continues=True)
    c = node(4, 5, b, continues=True)
    assert shape_of(Pass([a, b, c], [], None, CPU)) == [[5], [4]]


def test_stretches_at_different_positions_are_not_one_batch() -> None:
    prefix = node(2)
    same = [node(5, 2, prefix), node(5, 3, prefix), node(5, 2, prefix)]
    packed = Pass([prefix, *same], [], None, CPU)
    assert sorted(shape_of(packed), key=len) == [[2], [5], [5, 5]]


def test_documents_of_like_length_form_padded_batches() -> None:
    prefix = node(2)
    documents = [node(n, 2, prefix) for n in (3, 10, 9, 1, 10)]
    tail = node(2, 12, prefix, *documents)
    packed = Pass([prefix, *documents, tail], [], None, CPU)
    # Padding adds at most a quarter: 4 * 10 <= 1.25 * 32, but 5 * 10 > 1.25 * 33.
    assert sorted(shape_of(packed), key=len) == [[2], [1], [2], [10, 10, 9, 3]]
    batch = next(batch for batch in packed.batches if len(batch.runs) == 4)
    assert isinstance(batch.index, Tensor)
    assert batch.filled is not None
    assert batch.filled.sum(1).tolist() == [10, 10, 9, 3]
    assert batch.index[3].tolist() == [2, 3, 4, *[2] * 7]
    row = torch.arange(37.0)[None, None, :, None]
    assert [batch.queries(row)[i, 0, 0, 0].item() for i in range(4)] == [5, 25, 15, 2]
    # Own keys after those of the prefix, for every member.
    keys = batch.keys(0, 0, row)[:, 0, :, 0]
    assert keys[0].tolist() == [0, 1, *range(5, 15)]
    assert keys[2].tolist() == [0, 1, *range(15, 24), 15]


def test_a_stretch_with_rows_to_read_is_alone() -> None:
    prefix = node(2)
    read = Read({0: torch.tensor([0])}, torch.tensor([1]), KeptRows())
    same = [node(5, 2, prefix), node(5, 2, prefix, read=read), node(5, 2, prefix)]
    packed = Pass([prefix, *same], [], None, CPU)
    assert sorted(shape_of(packed), key=len) == [[2], [5], [5, 5]]
    chain = node(2, 2, prefix, continues=True, read=read)
    [batch] = Pass([prefix, chain], [], None, CPU).batches
    [(source, found)] = batch.reads()
    assert (source.tolist(), found) == ([3], read)


@pytest.mark.parametrize("window", [None, 1, 4, 12, 100])
def test_who_sees_whom(window: int | None) -> None:
    """All of the context that is near enough in position, and causally oneself; random positions of the context."""
    chance = random.Random(7)
    for _ in range(20):
        before = [node(chance.randint(1, 6), chance.randint(0, 9)) for _ in range(chance.randint(0, 3))]
        own = node(chance.randint(1, 9), chance.randint(9, 20), *before)
        packed = Pass([*before, own], [], None, CPU)
        batch = next(b for b in packed.batches if own in b.runs[0].nodes)
        known = [n.start + i for n in before for i in range(len(n.ids))]
        assert batch.positions.tolist() == known
        expected = []
        for i in range(len(own.ids)):
            here = own.start + i
            places = [*known, *(own.start + j for j in range(len(own.ids)))]
            near = [window is None or here - place < window for place in places]
            causal = [True] * len(known) + [j <= i for j in range(len(own.ids))]
            expected.append([a and b for a, b in zip(near, causal, strict=True)])
        mask = batch.mask(window)
        if mask is None:
            # Then plain causality says the same: the queries stand at the end of the keys.
            n, width = len(own.ids), len(known) + len(own.ids)
            mask = torch.ones(n, width, dtype=torch.bool).tril(width - n)
            assert not (known and n > 1)
        assert mask.tolist() == expected
        assert batch.mask(window) is batch.mask(window)


def test_logits_are_wanted_of_last_tokens() -> None:
    nodes = [node(3, wants_logits=True), node(2), node(4, wants_logits=True)]
    assert Pass(nodes, [], None, CPU).last_tokens().tolist() == [2, 8]
    assert Pass(nodes[1:2], [], None, CPU).last_tokens().tolist() == []


def run(nodes: list[Node], kept: list[Node], stop_at: int | None = None) -> None:
    model = tiny_model("llama")
    packed = Pass(nodes, kept, stop_at, model.device)
    with torch.no_grad(), tapping(packed, (None,) * 3):
        model.base_model(input_ids=packed.tokens, position_ids=packed.positions, use_cache=False)
    packed.finish()


def test_a_pass_leaves_the_keys_and_values_that_are_needed() -> None:
    a, b, c = node(4), node(3, 7), node(2, 5)
    run([a, b, c], [a, c])
    assert b.computed is None
    for one in (a, c):
        assert one.computed is not None
        assert [layer.shape for layer in one.computed.layers] == [(2, 2, len(one.ids), 8)] * 3
        assert one.computed.positions.tolist() == list(range(one.start, one.start + len(one.ids)))
        # No views into the buffers of the pass.
        for held in (*one.computed.layers, one.computed.positions):
            assert held.untyped_storage().nbytes() == held.nbytes
    alone = node(2, 5)
    run([alone], [alone], stop_at=1)
    assert alone.computed is not None and c.computed is not None
    assert len(alone.computed.layers) == 2
    for mine, theirs in zip(alone.computed.layers, c.computed.layers, strict=False):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


def test_what_was_computed_earlier_is_seen_as_what_stands_in_the_pass() -> None:
    rows: list[Tensor] = []
    for at_once in (True, False):
        prefix = node(6)
        documents = [node(5, 6, prefix), node(9, 6, prefix)]
        found = KeptRows()
        tail = node(3, 15, prefix, *documents, read=Read({2: torch.arange(4)}, torch.arange(3), found))
        if at_once:
            run([prefix, *documents, tail], [])
        else:
            for step in (prefix, *documents, tail):
                run([step], [step])
        rows.append(found.rows(2))
        assert rows[-1].shape == (4, 3, 23)
    torch.testing.assert_close(rows[0], rows[1], atol=1e-5, rtol=0)


def test_stretches_are_spent_after_the_pass_of_their_last_use() -> None:
    a = Node((1,) * 4, 0)
    b = Node((2,) * 4, 4, (a,))
    c = Node((3,) * 4, 8, (a, b), keep=True)
    d = Node((4,) * 4, 12, (b, c))
    spent = [nodes for _, _, nodes in passes([a, b, c, d], 4)]
    # a is last seen by c, b by d; c is kept though d is the last to see it, and nobody sees d.
    assert spent == [[], [], [a], [b]]
