"""Packed passes: many stretches of tokens in one row, each seeing a context of its own.

A prompt is a graph of nodes. A node is a stretch of tokens at given positions that sees every token of its context
nodes and, causally, itself. `joint` prompts are chains; in `parallel` all documents hang on the prefix and the tail
hangs on all of them; several prompts are several graphs that may share nodes. Passes take nodes in order, as many as
fit a token budget: everything but attention works on the plain row of tokens, so nothing is computed for padding.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

PASS_TOKENS = 2048
"""Most tokens in one pass, which bounds the memory of activations and masks."""

_PADDING = 1.25
"""Documents that share a context attend as one padded batch while padding adds no more than this factor."""


class Reducer(Protocol):
    """Takes the rows of one layer as soon as they exist, so that they can be summed instead of stored."""

    def add(self, layer: int, rows: Tensor) -> None:
        """Take rows [n, S, T] of one layer; S may be a chunk of the source rows, T the tokens visible so far."""
        ...


@dataclass
class TokenMass:
    """Sums rows over the source, keeping the columns of the first `n_tokens` keys."""

    n_tokens: int
    totals: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> [n, n_tokens], the sum over the source rows seen so far."""

    def add(self, layer: int, rows: Tensor) -> None:
        """Add rows [n, S, T]; columns that are not there count as zero."""
        seen = rows[..., : self.n_tokens].sum(dim=1)
        if layer not in self.totals:
            self.totals[layer] = seen.new_zeros(len(rows), self.n_tokens)
        self.totals[layer][:, : seen.shape[1]] += seen


@dataclass
class KeptRows:
    """Keeps every row; for short prompts and tests."""

    chunks: dict[int, list[Tensor]] = field(default_factory=dict)

    def add(self, layer: int, rows: Tensor) -> None:
        """Keep rows [n, S, T]."""
        self.chunks.setdefault(layer, []).append(rows)

    def rows(self, layer: int) -> Tensor:
        """All rows of a layer, [n, S, T]."""
        return torch.cat(self.chunks[layer], dim=1)


@dataclass(frozen=True)
class Read:
    """Which rows of a node to read."""

    heads: Mapping[int, Tensor]
    """Layer -> indices of the query heads. [n] int64"""
    source: Tensor
    """Source rows, as indices of the node's tokens. [S] int64"""
    reducer: Reducer


@dataclass(frozen=True, eq=False)
class KeyValues:
    """Keys and values of a stretch of tokens."""

    layers: tuple[Tensor, ...]
    """Of layers 0, 1, ... as far as they were computed, each [2, K, n, d_h]."""
    positions: Tensor
    """[n] int64"""

    @property
    def n_bytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)


@dataclass(eq=False)
class Node:
    """A stretch of at most `PASS_TOKENS` tokens."""

    ids: tuple[int, ...]
    start: int
    """Position of its first token."""
    context: tuple["Node", ...] = ()
    """The nodes that it sees in full, in the order of the columns of its rows."""
    continues: bool = False
    """It follows the last node of its context directly, so that both can attend as one stretch."""
    read: Read | None = None
    wants_logits: bool = False
    keep: bool = False
    """Its keys and values are needed after the run."""
    computed: KeyValues | None = None
    logits: Tensor | None = None
    """[V] float32 of the last token."""


@dataclass(eq=False)
class _Run:
    """Nodes of one pass that attend as one causal stretch: tokens [begin, end) of the pass."""

    begin: int
    end: int
    start: int
    context: tuple[Node, ...]
    nodes: list[Node]


@dataclass
class _Batch:
    """Runs with one context and one start, padded to the longest; a run with rows to read or of its own is alone."""

    runs: list[_Run]
    context: list[KeyValues | tuple[int, int]]
    """What lies before: computed earlier, or a range of tokens of this pass."""
    positions: Tensor
    """Of the context's tokens. [C] int64"""
    index: Tensor | slice
    """Places of the runs' tokens in the pass: [B, N], or a slice for a single run."""
    filled: Tensor | None
    """Which places are no padding, [B, N] bool; None for a single run."""
    length: int
    """N, the longest run."""
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def queries(self, row: Tensor) -> Tensor:
        """Of a row [1, H, T, d]: [B, H, N, d]."""
        if isinstance(self.index, slice):
            return row[:, :, self.index]
        return row[0][:, self.index].transpose(0, 1)

    def keys(self, layer: int, part: int, row: Tensor) -> Tensor:
        """Context and own keys (part 0) or values (part 1) of a row [1, K, T, d]: [B, K, C + N, d]."""
        own = self.queries(row)
        if not self.context:
            return own
        before = [
            source.layers[layer][part] if isinstance(source, KeyValues) else row[0, :, source[0] : source[1]]
            for source in self.context
        ]
        shared = torch.cat(before, dim=1).expand(len(own), -1, -1, -1)
        return torch.cat([shared, own], dim=2)

    def mask(self, window: int | None) -> Tensor | None:
        """What every query sees, [N, C + N] bool; None where it is all of the context and plainly causal."""
        if window not in self.masks:
            self.masks[window] = self._mask(window)
        return self.masks[window]

    def _mask(self, window: int | None) -> Tensor | None:
        device = self.positions.device
        own = self.runs[0].start + torch.arange(self.length, device=device)
        keys = torch.cat([self.positions, own])
        distance = own[:, None] - keys
        near = torch.ones_like(distance, dtype=torch.bool) if window is None else distance < window
        if bool(near.all()) and (self.length == 1 or not len(self.positions)):
            return None
        order = torch.arange(self.length, device=device)
        causal = order[:, None] >= order
        return near & torch.cat([causal.new_ones(self.length, len(self.positions)), causal], dim=1)

    def reads(self) -> Iterator[tuple[Tensor, Read]]:
        """Source rows within the (single) run, and what to do with them."""
        for run in self.runs:
            offset = 0
            for node in run.nodes:
                if node.read is not None:
                    yield node.read.source + offset, node.read
                offset += len(node.ids)


class Pass:
    """One pass over the tokens of some nodes: what its attention needs, and the keys and values it leaves."""

    def __init__(
        self, nodes: Sequence[Node], kept: Sequence[Node], stop_at: int | None, device: torch.device
    ) -> None:
        """`kept` are the nodes whose keys and values must outlive the pass."""
        self.nodes = nodes
        self.stop_at = stop_at
        self.tokens = torch.tensor([[i for node in nodes for i in node.ids]], device=device)
        self.positions = torch.cat(
            [torch.arange(n.start, n.start + len(n.ids), device=device) for n in nodes]
        )[None]
        self.place: dict[Node, tuple[int, int]] = {}
        end = 0
        for node in nodes:
            self.place[node] = (end, end + len(node.ids))
            end += len(node.ids)
        self.batches = list(self._batches(device))
        self._kept: dict[Node, list[Tensor]] = {node: [] for node in kept}

    def last_tokens(self) -> Tensor:
        """Places of the tokens whose logits are wanted, in the order of `nodes`. int64"""
        wanted = [self.place[node][1] - 1 for node in self.nodes if node.wants_logits]
        return torch.tensor(wanted, device=self.tokens.device, dtype=torch.long)

    def store(self, key: Tensor, value: Tensor) -> None:
        """Keep one layer's keys and values [1, K, T, d_h] of the nodes that need it."""
        for node, layers in self._kept.items():
            begin, end = self.place[node]
            layers.append(torch.stack([key[0, :, begin:end], value[0, :, begin:end]]))

    def finish(self) -> None:
        """Hand the stored keys and values to their nodes."""
        for node, layers in self._kept.items():
            begin, end = self.place[node]
            node.computed = KeyValues(tuple(layers), self.positions[0, begin:end].clone())

    def _runs(self) -> list[_Run]:
        runs: list[_Run] = []
        for node in self.nodes:
            begin, end = self.place[node]
            last = runs[-1] if runs else None
            if (
                last is not None
                and node.continues
                and node.context[-1] is last.nodes[-1]
                and len(node.context) == len(last.context) + len(last.nodes)
            ):
                last.nodes.append(node)
                last.end = end
            else:
                runs.append(_Run(begin, end, node.start, node.context, [node]))
        return runs

    def _batches(self, device: torch.device) -> Iterator[_Batch]:
        groups: dict[object, list[_Run]] = {}
        for run in self._runs():
            alone = len(run.nodes) > 1 or run.nodes[0].read is not None
            key = run if alone else (run.context, run.start)
            groups.setdefault(key, []).append(run)
        for group in groups.values():
            group.sort(key=lambda run: run.begin - run.end)
            while group:
                longest, total, count = group[0].end - group[0].begin, 0, 0
                for run in group:
                    if (count + 1) * longest > _PADDING * (total + run.end - run.begin):
                        break
                    total += run.end - run.begin
                    count += 1
                yield self._batch(group[:count], device)
                del group[:count]

    def _batch(self, runs: list[_Run], device: torch.device) -> _Batch:
        context = [node.computed or self.place[node] for node in runs[0].context]
        positions = [
            source.positions if isinstance(source, KeyValues) else self.positions[0, source[0] : source[1]]
            for source in context
        ]
        known = torch.cat(positions) if positions else torch.empty(0, dtype=torch.long, device=device)
        length = runs[0].end - runs[0].begin
        if len(runs) == 1:
            return _Batch(runs, context, known, slice(runs[0].begin, runs[0].end), None, length)
        begin = torch.tensor([run.begin for run in runs], device=device)
        end = torch.tensor([run.end for run in runs], device=device)
        index = begin[:, None] + torch.arange(length, device=device)
        filled = index < end[:, None]
        return _Batch(runs, context, known, torch.where(filled, index, begin[:, None]), filled, length)


def passes(
    nodes: Sequence[Node], budget: int = PASS_TOKENS
) -> Iterator[tuple[list[Node], list[Node], list[Node]]]:
    """Split nodes, contexts before those who see them, into passes of at most `budget` tokens.

    Yields the nodes of each pass; those among them that are needed afterwards, for their own `keep` or a later node's
    context; and the nodes whose keys and values nobody needs after the pass. A single node may exceed the budget.
    """
    taken: list[list[Node]] = []
    size = 0
    for node in nodes:
        if not taken or size + len(node.ids) > budget:
            taken.append([])
            size = 0
        taken[-1].append(node)
        size += len(node.ids)
    last_use = {seen: turn for turn, batch in enumerate(taken) for node in batch for seen in node.context}
    for turn, batch in enumerate(taken):
        kept = [node for node in batch if node.keep or last_use.get(node, turn) > turn]
        yield batch, kept, [node for node, use in last_use.items() if use == turn and not node.keep]


def joined(nodes: Sequence[Node]) -> KeyValues:
    """Keys and values of computed nodes as one stretch."""
    parts = [node.computed for node in nodes if node.computed is not None]
    assert len(parts) == len(nodes), "a node has not been computed"
    return KeyValues(
        tuple(torch.cat(layer, dim=2) for layer in zip(*(part.layers for part in parts), strict=True)),
        torch.cat([part.positions for part in parts]),
    )
