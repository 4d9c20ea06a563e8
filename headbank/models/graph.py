"""From prompts to the graph of nodes that packed passes compute; what prompts share is one node."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headbank.models.cache import DocumentCache, document_key
from headbank.models.packed import PASS_TOKENS, Node, Read, Reducer
from headbank.types import PromptLayout, Span


def chain(ids: tuple[int, ...], start: int, context: tuple[Node, ...], follows: bool = False) -> list[Node]:
    """Nodes of at most `PASS_TOKENS` tokens for one stretch that begins at position `start` after `context`.

    `follows`: the stretch directly follows the last node of its context.
    """
    nodes: list[Node] = []
    for begin in range(0, len(ids), PASS_TOKENS):
        piece = ids[begin : begin + PASS_TOKENS]
        seen = (*context, *nodes)
        nodes.append(Node(piece, start + begin, seen, continues=bool(seen) and (follows or bool(nodes))))
    return nodes


class PromptGraph:
    """Collects the nodes of several prompts, contexts before those who see them."""

    def __init__(self, documents: DocumentCache | None, depth: int) -> None:
        """`depth`: layers that will be computed; kept documents with fewer are of no use."""
        self._documents = documents
        self._depth = depth
        self._shared: dict[tuple[tuple[int, ...], int, tuple[int, ...]], list[Node]] = {}
        self._fresh: dict[str, Node] = {}
        self.nodes: list[Node] = []
        """What is to be computed."""

    def add(self, layout: PromptLayout, heads: Mapping[int, Tensor], reducer: Reducer, writes: bool) -> Node:
        """Add a prompt and return the last node of its tail.

        The rows of `heads` (layer -> indices) from the query's tokens go to `reducer`; `writes` keeps everything that
        a response needs.
        """
        parallel = layout.style.layout == "parallel"
        head = layout.ids[: layout.prefix_end]
        keeps = parallel and not layout.style.query_first
        prefix = self._kept((), head, ()) if keeps else self._stretch(head, 0, (), False)
        context = tuple(prefix)
        for block in layout.blocks:
            ids = layout.ids[block.start : block.end]
            if keeps:
                context += tuple(self._kept(head, ids, tuple(prefix)))
            elif parallel:
                context += tuple(self._stretch(ids, len(head), tuple(prefix), False))
            else:
                context += tuple(self._stretch(ids, block.start, context, True))
        tail = chain(layout.ids[layout.tail_start :], layout.tail_position, context, not parallel)
        self._read_query(tail, layout, heads, reducer)
        self.nodes += tail
        if writes:
            tail[-1].wants_logits = True
            for node in (*context, *tail):
                node.keep = True
        return tail[-1]

    def remember(self) -> None:
        """After the run: hand the newly computed documents to the cache."""
        for key, node in self._fresh.items():
            assert self._documents is not None and node.computed is not None
            self._documents.put(key, node.computed)

    def _kept(self, head: tuple[int, ...], ids: tuple[int, ...], prefix: tuple[Node, ...]) -> list[Node]:
        """The nodes of a stretch after `head` that does not depend on the query, from the cache where it is there."""
        if self._documents is None or len(ids) > PASS_TOKENS:
            return self._stretch(ids, len(head), prefix, False)
        place = (ids, len(head), tuple(map(id, prefix)))
        if place not in self._shared:
            key = document_key(head, ids)
            known = self._documents.get(key, self._depth, counted=bool(head))
            node = Node(ids, len(head), prefix, keep=True, computed=known)
            self._shared[place] = [node]
            if node.computed is None:
                self._fresh[key] = node
                self.nodes.append(node)
        return self._shared[place]

    def _stretch(
        self, ids: tuple[int, ...], start: int, context: tuple[Node, ...], follows: bool
    ) -> list[Node]:
        place = (ids, start, tuple(map(id, context)))
        if place not in self._shared:
            self._shared[place] = chain(ids, start, context, follows)
            self.nodes += self._shared[place]
        return self._shared[place]

    def _read_query(
        self, tail: Sequence[Node], layout: PromptLayout, heads: Mapping[int, Tensor], reducer: Reducer
    ) -> None:
        if not heads:
            return
        begin = layout.tail_start
        for node in tail:
            inside = Span(max(layout.query.start, begin), min(layout.query.end, begin + len(node.ids)))
            if inside.length > 0:
                node.read = Read(heads, torch.arange(inside.start - begin, inside.end - begin), reducer)
            begin += len(node.ids)
