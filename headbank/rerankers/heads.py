"""Rerank by attention heads: one truncated prefill, the bank's heads vote."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from headbank.bank import Bank, check, find, read, shipped_root
from headbank.errors import HeadRankError, InputError, InputTooLong
from headbank.models.base import NULL_QUERY, Capture, CaptureRequest, HeadRunner
from headbank.models.fake import FAKE_HEAD_SETS, FAKE_MODEL
from headbank.numerics.spans import span_mass, span_mean, top_windows
from headbank.numerics.voting import ranks
from headbank.rerankers.base import Task
from headbank.rerankers.null import NullCache, null_key
from headbank.rerankers.scoring import Reading, Scores, merge, score
from headbank.rerankers.windows import windows
from headbank.types import (
    HeadId,
    HeadSet,
    HeadVote,
    ModelInfo,
    PromptLayout,
    PromptStyle,
    Ranking,
    RankOptions,
    Snippet,
    Span,
)

SNIPPET_TOKENS = 24
"""Length of an evidence snippet in tokens."""

SNIPPETS_PER_DOCUMENT = 2

EXPLAINED_HEADS = 16
"""Most heads whose votes an explanation shows; a weighted panel has hundreds, and each has a number per document."""

_LABEL_TOKENS = 8
"""Most tokens by which a document's label may differ between a window and the whole set."""


def open_bank(root: Path | None, info: ModelInfo) -> Bank:
    """The bank of a model under `root`; None: from the banks that ship with the package, or the fake engine's own.

    Raises BankError when there is none.
    """
    if root is None and info.model_id == FAKE_MODEL:
        sets = {heads.name: heads for heads in FAKE_HEAD_SETS}
        defaults = {heads.view: heads.name for heads in FAKE_HEAD_SETS}
        return Bank(info, sets, {}, defaults, maps={}, training={})
    return read(find(root or shipped_root(), info))


def icr_set(info: ModelInfo, style: PromptStyle) -> HeadSet:
    """ICR (arXiv 2410.02642) as a head set: all heads, nothing selected, calibrated by the content-free query."""
    every = tuple(HeadId(layer, head) for layer in range(info.n_layers) for head in range(info.n_heads))
    return HeadSet(f"icr.query.{style.layout}", "icr", "query", every, "calibrated", style)


@dataclass(frozen=True)
class Part:
    """One prompt of a task: all its documents, or a window of them."""

    documents: range
    layout: PromptLayout
    null: PromptLayout | None
    """The same documents under the content-free query, where the rule needs it."""

    @property
    def layouts(self) -> tuple[PromptLayout, ...]:
        """Both prompts, or the one there is."""
        return (self.layout,) if self.null is None else (self.layout, self.null)


@dataclass(frozen=True)
class Prepared:
    """A task, laid out."""

    task: Task
    heads: HeadSet
    voters: tuple[HeadId, ...]
    parts: tuple[Part, ...]
    tokenise_s: float

    @property
    def input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(part.layout.length for part in self.parts)

    @property
    def cut(self) -> tuple[int, ...]:
        """Indices of the documents that were cut."""
        return tuple(sorted({part.documents[i] for part in self.parts for i in part.layout.cut}))


class HeadReranker:
    """Method `heads`: a head set of the bank votes."""

    def __init__(
        self,
        runner: HeadRunner,
        bank: Bank | None,
        *,
        detector: str | None = None,
        name: str = "heads",
        response_tokens: int | None = None,
    ) -> None:
        """`detector` None takes the bank's default; `icr` needs no bank. `response_tokens` bounds the answer that the
        response view writes, None: what the head set was calibrated with.

        Raises BankMismatch when the bank belongs to another model.
        """
        if bank is not None:
            check(bank, runner.info)
        self.name = name
        self.runner = runner
        self._bank = bank
        self._detector = detector
        self._response_tokens = response_tokens
        self._null = NullCache()

    def head_set(self, options: RankOptions) -> HeadSet:
        """The heads that vote for a view and layout.

        Raises BankError when the bank has none, InputError for `icr` and a view other than the query's.
        """
        if self._detector == "icr":
            if options.view != "query":
                raise InputError("view", "icr compares queries, it needs the view query")
            return icr_set(self.runner.info, PromptStyle(options.layout or "joint"))
        assert self._bank is not None, "only icr works without a bank"
        return self._bank.head_set(options.view, layout=options.layout, detector=self._detector)

    def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Ranking:
        """Score documents by the vote of the heads (see `headbank.rerankers.base.Reranker.rank`)."""
        result = self.rank_many([Task(query, tuple(documents), options)])[0]
        if isinstance(result, HeadRankError):
            raise result
        return result

    def rank_many(self, tasks: Sequence[Task]) -> list[Ranking | HeadRankError]:
        """Rank several tasks in shared passes; a task that cannot be ranked gives its error and harms no other."""
        results: list[Ranking | HeadRankError | None] = [None] * len(tasks)
        prepared: dict[int, Prepared] = {}
        for i, task in enumerate(tasks):
            try:
                heads = self.head_set(task.options)
                if task.documents:
                    prepared[i] = self.prepare(task, heads)
                else:
                    results[i] = self.empty(task, heads)
            except HeadRankError as error:
                results[i] = error
        started = time.perf_counter()
        readings = self.read([prepared[i] for i in prepared])
        forward_s = time.perf_counter() - started
        for i, found in zip(prepared, readings, strict=True):
            try:
                results[i] = self._ranking(prepared[i], found, forward_s)
            except HeadRankError as error:
                results[i] = error
        return [result for result in results if result is not None]

    def prepare(self, task: Task, heads: HeadSet) -> Prepared:
        """Lay out the prompts of a task with documents for a head set.

        Raises InputTooLong for what cannot fit and when no voting head sees all of it, InputError for `calibrated`
        and a view other than the query's.
        """
        started = time.perf_counter()
        queries = [task]
        if (task.options.aggregation or heads.default_aggregation) == "calibrated":
            if heads.view != "query":
                raise InputError("aggregation", "calibrated compares queries, it needs the view query")
            queries.append(replace(task, query=NULL_QUERY))
        parts = self._parts(queries, heads)
        voters = self._voters(heads, [layout for part in parts for layout in part.layouts])
        return Prepared(task, heads, voters, tuple(parts), time.perf_counter() - started)

    def read(self, tasks: Sequence[Prepared]) -> list[Reading]:
        """The attention of the voters on the documents of every task, from shared passes."""
        requests: list[CaptureRequest] = []
        nulls: dict[str, Tensor] = {}
        unknown: dict[str, CaptureRequest] = {}
        for task in tasks:
            limit = max(1, self.answer_tokens(task.heads))
            for part in task.parts:
                requests.append(CaptureRequest(part.layout, task.voters, (task.heads.view,), limit))
                if part.null is not None:
                    key = null_key(part.null, task.voters)
                    rows = self._null.get(key)
                    if rows is None:
                        unknown[key] = CaptureRequest(part.null, task.voters)
                    else:
                        nulls[key] = rows
        captures = self.runner.capture_many([*requests, *unknown.values()])
        for key, capture in zip(unknown, captures[len(requests) :], strict=True):
            nulls[key] = capture.mass["query"]
            self._null.put(key, capture.mass["query"])
        found = iter(captures)
        return [self._reading(task, [next(found) for _ in task.parts], nulls) for task in tasks]

    def _reading(self, task: Prepared, captures: Sequence[Capture], nulls: Mapping[str, Tensor]) -> Reading:
        readings = []
        for part, capture in zip(task.parts, captures, strict=True):
            null = None if part.null is None else nulls[null_key(part.null, task.voters)]
            mass = capture.mass[task.heads.view]
            readings.append((part.documents, reading_of(part.layout, mass, part.null, null)))
        return readings[0][1] if len(readings) == 1 else merge(readings)

    def _ranking(self, task: Prepared, reading: Reading, forward_s: float) -> Ranking:
        started = time.perf_counter()
        scores: Scores = score(task.heads, reading, task.voters, task.task.options.aggregation)
        explain = task.task.options.explain
        return Ranking(
            scores=scores.scores,
            order=scores.order,
            method=self.name,
            raw_scores=None if scores.raw is None else tuple(scores.raw.tolist()),
            input_tokens=task.input_tokens,
            cut=task.cut,
            votes=votes_of(task.voters, reading) if explain else (),
            snippets=self.snippets(reading, task.task.documents) if explain else (),
            seconds={
                "tokenise": task.tokenise_s,
                "forward": forward_s,
                "vote": time.perf_counter() - started,
            },
        )

    def empty(self, task: Task, heads: HeadSet) -> Ranking:
        """The answer to a task without documents; its query is checked all the same."""
        started = time.perf_counter()
        layout = self._build(task, heads, range(0))
        seconds = {"tokenise": time.perf_counter() - started}
        return Ranking((), (), self.name, input_tokens=layout.length, seconds=seconds)

    def answer_tokens(self, heads: HeadSet) -> int:
        """Longest answer that a head set's view writes; 0 in the query view."""
        if heads.view == "query":
            return 0
        return self._response_tokens or heads.response_tokens or 16

    def _build(self, task: Task, heads: HeadSet, documents: range) -> PromptLayout:
        return self.runner.prompts.build(
            task.query,
            [task.documents[i] for i in documents],
            style=heads.style,
            max_tokens_per_doc=task.options.max_tokens_per_doc,
            reserve_tokens=self.answer_tokens(heads),
        )

    def _parts(self, queries: Sequence[Task], heads: HeadSet) -> list[Part]:
        """The prompts of all documents, or those of windows where a joint prompt of all does not fit the context.

        `queries` is the task and, where the rule needs it, the same under the content-free query.
        """
        everything = range(len(queries[0].documents))
        try:
            return [self._part(queries, heads, everything)]
        except InputTooLong as error:
            if error.field != "documents" or heads.style.layout != "joint" or len(everything) < 2:
                raise
        # On paper, a parallel prompt is laid out as a joint one, and is not held to the context as a whole.
        style = replace(heads.style, layout="parallel", tail="longest")
        papers = [self._build(task, replace(heads, style=style), everything) for task in queries]
        room = self.runner.info.context_tokens - self.answer_tokens(heads)
        room -= max(paper.prefix_end + paper.length - paper.tail_start for paper in papers)
        lengths = [block.length + _LABEL_TOKENS for block in papers[0].blocks]
        return [self._part(queries, heads, found) for found in windows(lengths, max(1, room))]

    def _part(self, queries: Sequence[Task], heads: HeadSet, documents: range) -> Part:
        asked, *null = (self._build(task, heads, documents) for task in queries)
        return Part(documents, asked, null[0] if null else None)

    def _voters(self, heads: HeadSet, layouts: Sequence[PromptLayout]) -> tuple[HeadId, ...]:
        """The heads that see the whole of every prompt: behind a shorter window a document would look unread.

        Raises InputTooLong (field `documents`) when none does.
        """
        sliding = self.runner.info.windows
        needed = self.answer_tokens(heads) + max(
            layout.tail_position + layout.length - layout.tail_start for layout in layouts
        )
        seeing = tuple(head for head in heads.heads if (sliding[head.layer] or needed) >= needed)
        if not seeing:
            limit = max(sliding[head.layer] or 0 for head in heads.heads)
            raise InputTooLong(
                "documents",
                f"take {needed} tokens, the voting heads see {limit}; send fewer or shorter ones",
                limit,
            )
        return seeing

    def snippets(self, reading: Reading, documents: Sequence[str]) -> tuple[Snippet, ...]:
        """The stretches of every document that all voting heads together look at most."""
        assert reading.token_mass is not None
        token_mass = reading.token_mass.sum(dim=0)
        snippets = []
        for index, (document, span) in enumerate(zip(documents, reading.spans(), strict=True)):
            total = float(token_mass[span.start : span.end].sum())
            if total <= 0:
                continue
            offsets = self.runner.prompts.offsets(document, span.length)
            for window in top_windows(token_mass, span, SNIPPET_TOKENS, SNIPPETS_PER_DOCUMENT):
                inside = offsets[window.start - span.start : window.end - span.start]
                start, end = inside[0][0], max(offset[1] for offset in inside)
                weight = float(token_mass[window.start : window.end].sum()) / total
                snippets.append(Snippet(index, start, end, document[start:end], weight))
        return tuple(snippets)


def reading_of(
    layout: PromptLayout, mass: Tensor, null_layout: PromptLayout | None = None, null: Tensor | None = None
) -> Reading:
    """What rows of attention [n, T] give to the documents of a prompt; `null` those under the content-free query."""
    outside = [Span(0, layout.prefix_end), Span(layout.tail_start, layout.length)]
    null_mass = None
    if null_layout is not None and null is not None:
        null_mass = _document_tokens(null, null_layout)
    return Reading(
        mass=span_mass(mass, layout.documents),
        reference=span_mass(mass, outside).sum(-1),
        lengths=torch.tensor([span.length for span in layout.documents], dtype=torch.long),
        token_mass=_document_tokens(mass, layout),
        null_mass=null_mass,
        token_ids=tuple(i for span in layout.documents for i in layout.ids[span.start : span.end]),
        query_ids=layout.ids[slice(*layout.query)],
    )


def _document_tokens(rows: Tensor, layout: PromptLayout) -> Tensor:
    return torch.cat([rows[:, span.start : span.end] for span in layout.documents], dim=1)


def votes_of(voters: Sequence[HeadId], reading: Reading) -> tuple[HeadVote, ...]:
    """How the first `EXPLAINED_HEADS` voters rank the documents; sets list the heads that count most first."""
    shown = voters[:EXPLAINED_HEADS]
    mass = reading.mass[: len(shown)]
    means = span_mean(mass, reading.lengths)
    places = ranks(means)
    return tuple(
        HeadVote(head, tuple(mass[i].tolist()), tuple(means[i].tolist()), tuple(places[i].tolist()))
        for i, head in enumerate(shown)
    )
