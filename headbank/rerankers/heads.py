"""Rerank by attention heads: one truncated prefill, the bank's heads vote."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from headbank.bank import Bank, check, find, read, shipped_root
from headbank.errors import BankError, InputTooLong
from headbank.models.base import Capture, HeadRunner
from headbank.models.fake import FAKE_HEAD_SETS, FAKE_MODEL
from headbank.numerics.spans import span_mass, span_mean, top_windows
from headbank.numerics.voting import ranks, vote_order
from headbank.types import (
    Aggregation,
    HeadId,
    HeadSet,
    HeadVote,
    ModelInfo,
    PromptLayout,
    Ranking,
    RankOptions,
    Snippet,
    View,
)

SNIPPET_TOKENS = 24
"""Length of an evidence snippet in tokens."""

SNIPPETS_PER_DOCUMENT = 2


def open_bank(root: Path | None, info: ModelInfo) -> Bank:
    """The bank of a model under `root`; None: from the banks that ship with the package, or the fake engine's own.

    Raises BankError when there is none.
    """
    if root is None and info.model_id == FAKE_MODEL:
        return Bank(info, "joint", {heads.name: heads for heads in FAKE_HEAD_SETS}, maps={}, training={})
    return read(find(root or shipped_root(), info))


class HeadReranker:
    """Method `heads`: the head set of the bank that belongs to the asked view votes."""

    name = "heads"

    def __init__(
        self, runner: HeadRunner, bank: Bank, *, detector: str = "expert", response_tokens: int = 16
    ) -> None:
        """`response_tokens` bounds the answer that the response view writes.

        Raises BankMismatch when the bank belongs to another model.
        """
        check(bank, runner.info)
        self._runner = runner
        self._bank = bank
        self._detector = detector
        self._response_tokens = response_tokens

    def head_set(self, view: View) -> HeadSet:
        """The heads that vote for a view, `<detector>.<view>` in the bank. Raises BankError when it has none."""
        name = f"{self._detector}.{view}"
        if name not in self._bank.head_sets:
            raise BankError(
                f"the bank has no head set {name}; it has: {', '.join(sorted(self._bank.head_sets))}"
            )
        return self._bank.head_sets[name]

    def layout(self, query: str, documents: Sequence[str], options: RankOptions) -> PromptLayout:
        """The prompt over which the heads vote. Raises InputTooLong when it does not fit the model's context."""
        return self._runner.prompts.build(
            query,
            documents,
            max_tokens_per_doc=options.max_tokens_per_doc,
            reserve_tokens=self._response_tokens if options.view == "response" else 0,
        )

    def voters(self, layout: PromptLayout, view: View) -> tuple[HeadId, ...]:
        """The heads of a view that see the whole prompt: behind a shorter window a document would look unread.

        Raises InputTooLong (field `documents`) when none does, BankError when the bank has no heads for the view.
        """
        windows = self._runner.info.windows
        needed = layout.length + (self._response_tokens if view == "response" else 0)
        chosen = self.head_set(view).heads
        seeing = tuple(head for head in chosen if (windows[head.layer] or needed) >= needed)
        if not seeing:
            limit = max(windows[head.layer] or 0 for head in chosen)
            raise InputTooLong(
                "documents",
                f"take {needed} tokens, the voting heads see {limit}; send fewer or shorter ones",
                limit,
            )
        return seeing

    def capture(self, layout: PromptLayout, views: Sequence[View]) -> Capture:
        """The attention of the voting heads of all given views over a prompt, from one forward pass.

        Raises as `voters` does.
        """
        heads = dict.fromkeys(head for view in views for head in self.voters(layout, view))
        return self._runner.capture(
            layout, heads=tuple(heads), views=views, max_new_tokens=self._response_tokens
        )

    def rank_captured(
        self, capture: Capture, layout: PromptLayout, view: View, aggregation: Aggregation | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Let the view's heads vote on a capture that holds their rows.

        Returns their mass [n, D] float64 (the mean is `span_mean` of it), the scores [D] float64 and the order.
        Raises NonFiniteScore for attention that is not finite, and as `voters` does.
        """
        rows = [capture.heads.index(head) for head in self.voters(layout, view)]
        mass = span_mass(capture.mass[view][rows], layout.documents)
        means = span_mean(mass, torch.tensor([span.length for span in layout.documents]))
        scores, order = vote_order(means, aggregation or self.head_set(view).default_aggregation)
        return mass, scores, order

    def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Ranking:
        """Score documents by the vote of the heads (see `headbank.rerankers.base.Reranker.rank`)."""
        started = time.perf_counter()
        layout = self.layout(query, documents, options)
        tokenised = time.perf_counter()
        if not documents:
            return Ranking((), (), self.name, layout.length, seconds={"tokenise": tokenised - started})
        capture = self.capture(layout, (options.view,))
        forwarded = time.perf_counter()
        mass, scores, order = self.rank_captured(capture, layout, options.view, options.aggregation)
        votes: tuple[HeadVote, ...] = ()
        snippets: tuple[Snippet, ...] = ()
        if options.explain:
            votes = _votes(capture, mass, layout)
            snippets = self._snippets(capture.mass[options.view].sum(dim=0), layout, documents)
        return Ranking(
            scores=tuple(scores.tolist()),
            order=order,
            method=self.name,
            input_tokens=layout.length,
            cut=layout.cut,
            votes=votes,
            snippets=snippets,
            seconds={
                "tokenise": tokenised - started,
                "forward": forwarded - tokenised,
                "vote": time.perf_counter() - forwarded,
            },
        )

    def _snippets(
        self, token_mass: torch.Tensor, layout: PromptLayout, documents: Sequence[str]
    ) -> tuple[Snippet, ...]:
        """The stretches of every document that all voting heads together look at most; token_mass is [T]."""
        snippets = []
        for index, (document, span) in enumerate(zip(documents, layout.documents, strict=True)):
            total = float(token_mass[span.start : span.end].sum())
            if total <= 0:
                continue
            offsets = self._runner.prompts.offsets(document, span.length)
            for window in top_windows(token_mass, span, SNIPPET_TOKENS, SNIPPETS_PER_DOCUMENT):
                start = offsets[window.start - span.start][0]
                end = max(
                    offset[1] for offset in offsets[window.start - span.start : window.end - span.start]
                )
                weight = float(token_mass[window.start : window.end].sum()) / total
                snippets.append(Snippet(index, start, end, document[start:end], weight))
        return tuple(snippets)


def _votes(capture: Capture, mass: torch.Tensor, layout: PromptLayout) -> tuple[HeadVote, ...]:
    means = span_mean(mass, torch.tensor([span.length for span in layout.documents]))
    places = ranks(means)
    return tuple(
        HeadVote(head, tuple(mass[i].tolist()), tuple(means[i].tolist()), tuple(places[i].tolist()))
        for i, head in enumerate(capture.heads)
    )
