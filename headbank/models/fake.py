"""The `fake` engine: planted heads, no weights. For tests and for trying the API.

4 layers of 4 heads over words instead of tokens. `L2H1` looks at the words of the query wherever documents
repeat them, `L1H0` looks at the first document whatever it says (in `parallel`, where no document is the first, at
the first token of the prompt), every other head looks everywhere equally. It writes the words that follow the query's
in the best document, or the permutation that a listwise prompt asks for.
"""

import re
import string
import time
import zlib
from collections.abc import Mapping, Sequence

import torch

from headbank.errors import InputError, InputTooLong
from headbank.models.base import Capture, CaptureRequest, User, tail_position
from headbank.types import (
    JOINT,
    LAYOUTS,
    VIEWS,
    HeadId,
    HeadSet,
    ModelInfo,
    PromptLayout,
    PromptStyle,
    Span,
    View,
)

FAKE_MODEL = "fake"
"""The value of `--model` that selects this engine."""

CONTEXT_TOKENS = 4096
MATCHING_HEAD = HeadId(2, 1)
BIASED_HEAD = HeadId(1, 0)

FAKE_HEAD_SETS = tuple(
    HeadSet(
        f"expert.{view}.{layout}",
        "expert",
        view,
        (MATCHING_HEAD,),
        default_aggregation="borda",
        style=PromptStyle(layout),
        strict_experts=1,
        z_mean=(0.0,),
        z_std=(1.0,),
        platt=(1.0, 0.0),
    )
    for layout in LAYOUTS
    for view in VIEWS
)
"""The head sets of a bank for this engine: the matching head votes in both views."""

_LAYERS = _HEADS = 4
_PLANTED = 0.9
"""Share of a planted head's attention that goes where it was planted; the rest is spread over the prompt."""

_TOKEN = re.compile(r"\w+|[^\w\s]")
_MARK = re.compile(r"\[\d+\]|\bquery\b", re.IGNORECASE)
"""What structures a listwise prompt; in its fixed texts a token of its own kind, which no user text can spell."""

_STOP_WORDS = frozenset(
    _TOKEN.findall(
        "a an and are as at be by did do does for from had has have how in is it its of on or that the their "
        "there they this to was were what when where which who whom whose why will with"
    )
)


def _token_id(word: str) -> int:
    return zlib.crc32(word.lower().encode(errors="surrogatepass"))


def _mark_id(mark: str) -> int:
    return _token_id(f"<{mark}>")


_IGNORED_IDS = frozenset(map(_token_id, _STOP_WORDS.union(string.punctuation)))
_PREFIX = "Answer with the help of these documents ."
_LABEL = "Document {number} :"
_PARALLEL_LABEL = "Document :"
_QUESTION = "Question :"
_REQUEST = "Answer :"
_UNKNOWN = "unknown"
_BEFORE = ">"
"""Stands between the identifiers of a permutation."""


class FakePrompts:
    """Lays out prompts of words: every `\\w+` run and every other visible character is one token."""

    template_hash = "fake"

    def __init__(self) -> None:
        self.words: dict[int, str] = {_token_id(_BEFORE): _BEFORE}
        """Token id -> how it is printed; punctuation is not."""
        self._encode(_UNKNOWN)

    def _encode(self, text: str) -> list[int]:
        words = _TOKEN.findall(text)
        ids = [_token_id(word) for word in words]
        self.words.update(
            (i, word.lower()) for i, word in zip(ids, words, strict=True) if word[0] not in string.punctuation
        )
        return ids

    def _encode_fixed(self, text: str) -> list[int]:
        """Fixed text of a chat prompt, whose marks are tokens of their own kind."""
        ids: list[int] = []
        end = 0
        for found in _MARK.finditer(text):
            mark = found.group().lower()
            ids += [*self._encode(text[end : found.start()]), _mark_id(mark)]
            self.words[ids[-1]] = mark
            end = found.end()
        return ids + self._encode(text[end:])

    def build(
        self,
        query: str,
        documents: Sequence[str],
        *,
        style: PromptStyle = JOINT,
        max_tokens_per_doc: int | None = None,
        reserve_tokens: int = 0,
    ) -> PromptLayout:
        """Lay out a prompt (see `headbank.models.base.Prompts.build`)."""
        parallel = style.layout == "parallel"
        question = self._encode(query)
        if len(question) > CONTEXT_TOKENS // 2:
            raise InputTooLong("query", "takes more than half of the model's context", CONTEXT_TOKENS // 2)
        ids = self._encode(_PREFIX)
        if style.query_first:
            ids += self._encode(_QUESTION) + question
        prefix_end = len(ids)
        spans, blocks, cut = [], [], []
        for index, document in enumerate(documents):
            begin = len(ids)
            if style.label:
                ids += self._encode(_PARALLEL_LABEL if parallel else _LABEL.format(number=index + 1))
            body = self._encode(document)
            kept = body[:max_tokens_per_doc]
            if len(kept) < len(body):
                cut.append(index)
            spans.append(Span(len(ids), len(ids) + len(kept)))
            ids += kept
            blocks.append(Span(begin, len(ids)))
        tail_start = len(ids)
        position = tail_position(style, prefix_end, blocks, tail_start)
        ids += self._encode(_QUESTION)
        query_span = Span(len(ids), len(ids) + len(question))
        ids += question + self._encode(_REQUEST)
        _check_room(position + len(ids) - tail_start, CONTEXT_TOKENS - reserve_tokens)
        return PromptLayout(
            tuple(ids),
            prefix_end,
            tuple(spans),
            tail_start,
            query_span,
            tuple(cut),
            tuple(blocks),
            style,
            position,
        )

    def chat(self, parts: Sequence[str | User]) -> tuple[int, ...]:
        """Token ids of a message (see `headbank.models.base.Prompts.chat`)."""
        ids: list[int] = []
        for part in parts:
            ids += self._encode(part.text) if isinstance(part, User) else self._encode_fixed(part)
        _check_room(len(ids), CONTEXT_TOKENS)
        return tuple(ids)

    def offsets(self, document: str, n_tokens: int) -> list[tuple[int, int]]:
        """Character range of each of the first `n_tokens` words of a document."""
        return [match.span() for match in _TOKEN.finditer(document)][:n_tokens]


def _check_room(needed: int, room: int) -> None:
    if needed > room:
        raise InputTooLong("documents", f"the prompt takes {needed} tokens, there is room for {room}", room)


class FakeRunner:
    """A HeadRunner whose attention is made up from the words of the prompt."""

    def __init__(self, *, delay_s: float = 0.0) -> None:
        """`delay_s` is slept at every capture and every answer, to stand for the time of a real model."""
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

    def decode(self, ids: Sequence[int]) -> str:
        """The lower-cased words, blanks between them; a word this runner has never seen is left out."""
        return " ".join(self._prompts.words[i] for i in ids if i in self._prompts.words)

    def capture_many(self, requests: Sequence[CaptureRequest]) -> list[Capture]:
        """`capture` of several requests."""
        return [self.capture(request) for request in requests]

    def capture(self, request: CaptureRequest) -> Capture:
        """Read heads over one prompt (see `headbank.models.base.HeadRunner.capture_many`); every row sums to 1."""
        layout = request.layout
        chosen = _checked_heads(request)
        time.sleep(self._delay_s)
        mass: dict[View, torch.Tensor] = {}
        source: dict[View, tuple[int, ...]] = {}
        if "query" in request.views:
            mass["query"] = _rows(layout, chosen, _matches(layout))
            source["query"] = tuple(range(*layout.query))
        if "response" not in request.views:
            return Capture(chosen, mass, source)
        copied = _copied_spans(layout, request.max_new_tokens)
        response = layout.ids[slice(*copied[0])] if copied else (_token_id(_UNKNOWN),)
        mass["response"] = _rows(layout, chosen, [j for span in copied for j in range(*span)])
        source["response"] = tuple(range(layout.length, layout.length + len(response)))
        steps = mass["response"].expand(len(response), -1, -1).clone()
        return Capture(chosen, mass, source, response, steps)

    def generate(self, ids: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
        """A permutation of the identifiers `[1]`, `[2]`, ... in the fixed texts of a chat prompt, or `unknown`.

        The passage after an identifier is better the more content words it shares with what follows the word
        `query`; between equals the earlier one is first.
        """
        time.sleep(self._delay_s)
        written = _permutation(ids, self._prompts.words) or (_token_id(_UNKNOWN),)
        return written[:max_new_tokens]


def _checked_heads(request: CaptureRequest) -> tuple[HeadId, ...]:
    if "response" in request.views and request.max_new_tokens < 1:
        raise InputError("max_new_tokens", "must be at least 1", 1)
    every = tuple(HeadId(layer, head) for layer in range(_LAYERS) for head in range(_HEADS))
    if request.heads is None:
        return every
    if not request.heads:
        raise InputError("heads", "needs at least one head", 1)
    for head in request.heads:
        if head not in every:
            raise InputError("heads", f"{head} is outside {_LAYERS} x {_HEADS} heads")
    return request.heads


def _permutation(ids: Sequence[int], words: Mapping[int, str]) -> tuple[int, ...]:
    """The identifiers of a listwise prompt, best first, with `>` between them; empty when there is none."""
    marked = [i for i, token in enumerate(ids) if token == _mark_id(words.get(token, ""))]
    places = [i for i in marked if words[ids[i]] != "query"]
    queries = [i for i in marked if words[ids[i]] == "query"]
    if not places:
        return ()
    # The query stands after the passages, or else before them.
    after = [i for i in queries if i > places[0]]
    asked = min(after, default=max(queries, default=len(ids)))
    if after:
        places = [i for i in places if i < asked]
    wanted = frozenset(ids[asked : None if after else places[0]]) - _IGNORED_IDS
    ends = [*places[1:], asked if after else len(ids)]
    found = [len(wanted.intersection(ids[i + 1 : end])) for i, end in zip(places, ends, strict=True)]
    order = sorted(range(len(places)), key=lambda i: -found[i])
    return tuple(token for i in order for token in (_token_id(_BEFORE), ids[places[i]]))[1:]


def _query_ids(layout: PromptLayout) -> frozenset[int]:
    """The content words of the query: no stop words, no punctuation."""
    return frozenset(layout.ids[slice(*layout.query)]) - _IGNORED_IDS


def _matches(layout: PromptLayout) -> list[int]:
    """Positions of the document tokens that repeat a content word of the query."""
    wanted = _query_ids(layout)
    return [j for span in layout.documents for j in range(*span) if layout.ids[j] in wanted]


def _copied_spans(layout: PromptLayout, limit: int) -> list[Span]:
    """What the model copies as its answer: the words after the last match in the document with most of the
    query, in every copy of that document.

    Where the match ends its document, the matching word itself. Empty when no document matches. Between equals the
    document decides that is first in the order of token ids, so that their order in the prompt does not matter.
    """
    wanted = _query_ids(layout)
    texts = [layout.ids[slice(*span)] for span in layout.documents]
    found = [len(wanted.intersection(text)) for text in texts]
    if not any(found):
        return []
    best = min(text for text, count in zip(texts, found, strict=True) if count == max(found))
    last = max(j for j, token in enumerate(best) if token in wanted)
    start = min(last + 1, len(best) - 1)
    end = min(start + limit, len(best))
    return [
        Span(span.start + start, span.start + end)
        for span, text in zip(layout.documents, texts, strict=True)
        if text == best
    ]


def _rows(layout: PromptLayout, heads: Sequence[HeadId], matches: Sequence[int]) -> torch.Tensor:
    """Attention [n, T] of the heads; a planted head with nothing to look at looks at the first token."""
    rows = torch.full((len(heads), layout.length), 1.0 / layout.length)
    joint = layout.style.layout == "joint"
    first = list(range(*layout.documents[0])) if layout.documents and joint else []
    for row, head in zip(rows, heads, strict=True):
        if head in (MATCHING_HEAD, BIASED_HEAD):
            places = list(matches if head == MATCHING_HEAD else first) or [0]
            row *= 1 - _PLANTED
            row[places] += _PLANTED / len(places)
    return rows
