"""The `fake` engine: planted heads, no weights. For tests and for trying the API.

4 layers of 4 heads over words instead of tokens. `L2H1` looks at the words of the query wherever documents
repeat them, `L1H0` looks at the first document whatever it says, every other head looks everywhere equally.
"""

import re
import string
import time
import zlib
from collections.abc import Sequence

import torch

from headbank.errors import InputError, InputTooLong
from headbank.models.base import Capture
from headbank.types import HeadId, HeadSet, ModelInfo, PromptLayout, Span, View

FAKE_MODEL = "fake"
"""The value of `--model` that selects this engine."""

CONTEXT_TOKENS = 4096
MATCHING_HEAD = HeadId(2, 1)
BIASED_HEAD = HeadId(1, 0)

FAKE_HEAD_SETS = tuple(
    HeadSet(f"expert.{view}", view, (MATCHING_HEAD,), default_aggregation="borda", strict_experts=1)
    for view in ("query", "response")
)
"""The head sets of a bank for this engine: the matching head votes in both views."""

_LAYERS = _HEADS = 4
_PLANTED = 0.9
"""Share of a planted head's attention that goes where it was planted; the rest is spread over the prompt."""

_TOKEN = re.compile(r"\w+|[^\w\s]")
_STOP_WORDS = frozenset(
    _TOKEN.findall(
        "a an and are as at be by did do does for from had has have how in is it its of on or that the their "
        "there they this to was were what when where which who whom whose why will with"
    )
)


def _token_id(word: str) -> int:
    return zlib.crc32(word.lower().encode())


_IGNORED_IDS = frozenset(map(_token_id, _STOP_WORDS.union(string.punctuation)))
_PREFIX = "Answer with the help of these documents ."
_LABEL = "Document {number} :"
_QUESTION = "Question :"
_REQUEST = "Answer :"
_UNKNOWN = "unknown"


class FakePrompts:
    """Lays out prompts of words: every `\\w+` run and every other visible character is one token."""

    template_hash = "fake"

    def __init__(self) -> None:
        self.words: dict[int, str] = {}
        self._encode(_UNKNOWN)

    def _encode(self, text: str) -> list[int]:
        words = _TOKEN.findall(text)
        ids = [_token_id(word) for word in words]
        self.words.update(
            (i, word.lower()) for i, word in zip(ids, words, strict=True) if word[0] not in string.punctuation
        )
        return ids

    def build(
        self,
        query: str,
        documents: Sequence[str],
        *,
        max_tokens_per_doc: int | None = None,
        reserve_tokens: int = 0,
    ) -> PromptLayout:
        """Lay out a prompt (see `headbank.models.base.Prompts.build`)."""
        question = self._encode(query)
        if len(question) > CONTEXT_TOKENS // 2:
            raise InputTooLong("query", "takes more than half of the model's context", CONTEXT_TOKENS // 2)
        ids = self._encode(_PREFIX)
        prefix_end = len(ids)
        spans, cut = [], []
        for index, document in enumerate(documents):
            ids += self._encode(_LABEL.format(number=index + 1))
            body = self._encode(document)
            kept = body[:max_tokens_per_doc]
            if len(kept) < len(body):
                cut.append(index)
            spans.append(Span(len(ids), len(ids) + len(kept)))
            ids += kept
        tail_start = len(ids)
        ids += self._encode(_QUESTION)
        query_span = Span(len(ids), len(ids) + len(question))
        ids += question + self._encode(_REQUEST)
        room = CONTEXT_TOKENS - reserve_tokens
        if len(ids) > room:
            raise InputTooLong(
                "documents", f"the prompt takes {len(ids)} tokens, there is room for {room}", room
            )
        return PromptLayout(tuple(ids), prefix_end, tuple(spans), tail_start, query_span, tuple(cut))

    def offsets(self, document: str, n_tokens: int) -> list[tuple[int, int]]:
        """Character range of each of the first `n_tokens` words of a document."""
        return [match.span() for match in _TOKEN.finditer(document)][:n_tokens]


class FakeRunner:
    """A HeadRunner whose attention is made up from the words of the prompt."""

    def __init__(self, *, delay_s: float = 0.0) -> None:
        """`delay_s` is slept at every capture, to stand for the time of a real model."""
        self._delay_s = delay_s
        self._prompts = FakePrompts()
        self._info = ModelInfo(
            model_id=FAKE_MODEL,
            revision="",
            config_hash="fake",
            n_layers=_LAYERS,
            n_heads=_HEADS,
            n_kv_heads=_HEADS // 2,
            d_model=_HEADS * 16,
            d_head=16,
            context_tokens=CONTEXT_TOKENS,
            windows=(None,) * _LAYERS,
            tokenizer_hash="fake",
            template_hash=FakePrompts.template_hash,
            norm_hashes=("fake",) * _LAYERS,
            dtype="float32",
        )

    @property
    def info(self) -> ModelInfo:
        """Identity and shape of the model that isn't there."""
        return self._info

    @property
    def prompts(self) -> FakePrompts:
        """The prompt builder."""
        return self._prompts

    def capture_many(
        self,
        layouts: Sequence[PromptLayout],
        *,
        heads: Sequence[HeadId] | None = None,
        views: Sequence[View] = ("query",),
        max_new_tokens: int = 16,
    ) -> list[Capture]:
        """`capture` for several prompts."""
        return [self.capture(x, heads=heads, views=views, max_new_tokens=max_new_tokens) for x in layouts]

    def decode(self, ids: Sequence[int]) -> str:
        """The lower-cased words, blanks between them; a word this runner has never seen is left out."""
        return " ".join(self._prompts.words[i] for i in ids if i in self._prompts.words)

    def capture(
        self,
        layout: PromptLayout,
        *,
        heads: Sequence[HeadId] | None = None,
        views: Sequence[View] = ("query",),
        max_new_tokens: int = 16,
    ) -> Capture:
        """Read heads over one prompt (see `headbank.models.base.HeadRunner.capture`); every row sums to 1."""
        if max_new_tokens < 1:
            raise InputError("max_new_tokens", "must be at least 1", 1)
        time.sleep(self._delay_s)
        every = tuple(HeadId(layer, head) for layer in range(_LAYERS) for head in range(_HEADS))
        chosen = every if heads is None else tuple(heads)
        copied = _copied_span(layout, max_new_tokens)
        mass: dict[View, torch.Tensor] = {}
        source: dict[View, tuple[int, ...]] = {}
        response: tuple[int, ...] = ()
        if "query" in views:
            mass["query"] = _rows(layout, chosen, _matches(layout))
            source["query"] = tuple(range(*layout.query))
        if "response" in views:
            response = layout.ids[slice(*copied)] or (_token_id(_UNKNOWN),)
            mass["response"] = _rows(layout, chosen, list(range(*copied)))
            source["response"] = tuple(range(layout.length, layout.length + len(response)))
        return Capture(chosen, mass, source, response)


def _query_ids(layout: PromptLayout) -> frozenset[int]:
    """The content words of the query: no stop words, no punctuation."""
    return frozenset(layout.ids[slice(*layout.query)]) - _IGNORED_IDS


def _matches(layout: PromptLayout) -> list[int]:
    """Positions of the document tokens that repeat a content word of the query."""
    wanted = _query_ids(layout)
    return [j for span in layout.documents for j in range(*span) if layout.ids[j] in wanted]


def _copied_span(layout: PromptLayout, limit: int) -> Span:
    """What the model copies as its answer: the words after the last match in the document with most of the
    query.

    Where the match ends its document, the matching word itself. Empty when no document matches.
    """
    wanted = _query_ids(layout)
    found = [len(wanted.intersection(layout.ids[slice(*span)])) for span in layout.documents]
    if not any(found):
        return Span(0, 0)
    best = layout.documents[found.index(max(found))]
    last = max(j for j in range(*best) if layout.ids[j] in wanted)
    start = min(last + 1, best.end - 1)
    return Span(start, min(start + limit, best.end))


def _rows(layout: PromptLayout, heads: Sequence[HeadId], matches: Sequence[int]) -> torch.Tensor:
    """Attention [n, T] of the heads; a planted head with nothing to look at looks at the first token."""
    rows = torch.full((len(heads), layout.length), 1.0 / layout.length)
    first = list(range(*layout.documents[0])) if layout.documents else []
    for row, head in zip(rows, heads, strict=True):
        if head in (MATCHING_HEAD, BIASED_HEAD):
            places = list(matches if head == MATCHING_HEAD else first) or [0]
            row *= 1 - _PLANTED
            row[places] += _PLANTED / len(places)
    return rows
