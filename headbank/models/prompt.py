"""Prompts from token-id segments: spans are recorded while building, never searched for afterwards.

    prefix   chat template head + instruction (+ the question, where the style asks for it)
    document label, text, separator          (one block per document; the span is the text alone)
    tail     "Question:" + the query + request for a short answer + chat template end + opening of the answer

Fixed parts are encoded with their special tokens; user text is encoded with special tokens split, so that a
document that spells `<|im_end|>` stays text. Every segment is encoded on its own, which keeps a document's tokens
the same wherever it stands.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from threading import Lock
from typing import Any

from headbank.errors import InputError, InputTooLong, ModelError
from headbank.models.base import User, tail_position
from headbank.types import JOINT, PromptLayout, PromptStyle, Span

INSTRUCTION = "Answer the question with the help of these documents.\n\n"
LABEL = "Document {number}:\n"
PARALLEL_LABEL = "Document:\n"
SEPARATOR = "\n\n"
QUESTION = "Question:\n"
REQUEST = "\n\nAnswer the question in a few words. Write the answer only."
OPENING = "The answer is:"
"""The answer's first words are given: small models otherwise spend theirs on repeating the prompt. Rows of the query
come before and are not changed by it."""

CHARS_PER_TOKEN = 40
"""Text beyond this many characters per allowed token is cut before encoding, which bounds the encoder's time."""

_LONGEST_TOKEN = 256
"""Characters; the longest tokens of the public tokenizers are runs of 128 blanks."""

_SLOT = "headrank-slot"

_DAY = "26 Jul 2024"
"""The day that chat templates print: a bank must not depend on the date it was made or is used."""

_FIXED_CLOCK = "{% macro strftime_now(format) %}" + _DAY + "{% endmacro %}\n"
"""Hides the clock of templates that call it (SmolLM3, Mistral, Granite); Llama's read `date_string`."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def _chat_frame(tokenizer: Any) -> tuple[str, str]:
    """The chat template's text before and after a single user message; empty strings for a base model."""
    if not tokenizer.chat_template:
        return "", ""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _SLOT}],
        chat_template=_FIXED_CLOCK + tokenizer.get_chat_template(),
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
        date_string=_DAY,
    )
    if text.count(_SLOT) != 1:
        raise ModelError("the model's chat template does not show a user message exactly once")
    head, end = text.split(_SLOT)
    return head, end


def _with_accents(text: str, end: int) -> int:
    """`end`, moved past the combining marks that stand there; a tokenizer that composes them leaves them out."""
    while end < len(text) and unicodedata.combining(text[end]):
        end += 1
    return end


def _too_long(n_documents: int, needed: int, room: int, style: PromptStyle) -> str:
    if style.layout == "parallel" and style.tail == "longest":
        what, hint = "the longest document and the query", "send shorter documents"
    else:
        what, hint = f"{n_documents} documents and the query", "send fewer documents"
    return (
        f"{what} take {needed} tokens, the model's context has room for {room}; {hint} or a smaller "
        "max_tokens_per_doc"
    )


class PromptBuilder:
    """Builds the prompts of one tokenizer, in every style of `PromptStyle`."""

    def __init__(self, tokenizer: Any, context_tokens: int) -> None:
        self._tokenizer = tokenizer
        # Splitting special tokens is a setting of the shared encoder, flipped by each call.
        self._lock = Lock()
        self.context_tokens = context_tokens
        head, end = _chat_frame(tokenizer)
        if not head and tokenizer.bos_token is not None:
            head = tokenizer.bos_token
        self._head, self._end = self._fixed(head), self._fixed(end)
        self._prefix = self._fixed(head + INSTRUCTION)
        self._separator = self._fixed(SEPARATOR)
        self._question = self._fixed(QUESTION)
        self._request = self._fixed(REQUEST + (end or SEPARATOR) + OPENING)
        described = ["segments-2", LABEL, PARALLEL_LABEL, self._prefix, self._separator, self._question]
        described.append(self._request)
        self.template_hash = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    def _fixed(self, text: str) -> list[int]:
        with self._lock:
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _user(self, texts: Sequence[str], *, offsets: bool = False) -> Any:
        """Encoding of user text: its special tokens split, half a surrogate pair (legal in JSON) as U+FFFD."""
        with self._lock:
            return self._tokenizer(
                [_LONE_SURROGATE.sub("\ufffd", text) for text in texts],
                add_special_tokens=False,
                split_special_tokens=True,
                return_offsets_mapping=offsets,
                verbose=False,
            )

    def _question_ids(self, query: str) -> list[int]:
        half = self.context_tokens // 2
        ids: list[int] = self._user([query[: half * CHARS_PER_TOKEN]])["input_ids"][0]
        if len(ids) > half or len(query) > half * CHARS_PER_TOKEN:
            raise InputTooLong("query", f"takes more than {half} tokens, half of the model's context", half)
        return ids

    def build(
        self,
        query: str,
        documents: Sequence[str],
        *,
        style: PromptStyle = JOINT,
        max_tokens_per_doc: int | None = None,
        reserve_tokens: int = 0,
    ) -> PromptLayout:
        """Lay out a prompt, documents in the given order (see `headbank.models.base.Prompts.build`)."""
        limit = self.context_tokens
        if max_tokens_per_doc is not None:
            limit = min(limit, max_tokens_per_doc)
        if limit < 1:
            raise InputError("max_tokens_per_doc", "must be at least 1", 1)
        question = self._question_ids(query)
        ids = list(self._prefix)
        if style.query_first:
            ids += self._question + question + self._separator
        prefix_end = len(ids)
        spans: list[Span] = []
        blocks: list[Span] = []
        cut: list[int] = []
        bodies = (
            self._user([d[: limit * CHARS_PER_TOKEN] for d in documents])["input_ids"] if documents else []
        )
        for index, (document, body) in enumerate(zip(documents, bodies, strict=True)):
            if len(body) > limit or len(document) > limit * CHARS_PER_TOKEN:
                cut.append(index)
            start = len(ids)
            ids += self._label(index, style)
            spans.append(Span(len(ids), len(ids) + len(body[:limit])))
            ids += body[:limit]
            ids += self._separator
            blocks.append(Span(start, len(ids)))
        tail_start = len(ids)
        ids += self._question
        query_span = Span(len(ids), len(ids) + len(question))
        ids += question + self._request
        position = tail_position(style, prefix_end, blocks, tail_start)
        needed = position + len(ids) - tail_start
        room = self.context_tokens - reserve_tokens
        if needed > room:
            raise InputTooLong("documents", _too_long(len(documents), needed, room, style), room)
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
        """Token ids of one user message in the model's chat template, made of fixed and user texts.

        Raises InputTooLong (field `documents`) when they do not fit the model's context.
        """
        ids = list(self._head)
        for part in parts:
            ids += self._user([part.text])["input_ids"][0] if isinstance(part, User) else self._fixed(part)
        ids += self._end
        if len(ids) > self.context_tokens:
            raise InputTooLong(
                "documents",
                f"the prompt takes {len(ids)} tokens, the model's context has room for {self.context_tokens}",
                self.context_tokens,
            )
        return tuple(ids)

    def _label(self, index: int, style: PromptStyle) -> list[int]:
        if not style.label:
            return []
        return self._fixed(PARALLEL_LABEL if style.layout == "parallel" else LABEL.format(number=index + 1))

    def offsets(self, document: str, n_tokens: int) -> list[tuple[int, int]]:
        """Character range of each of the first `n_tokens` tokens of a document.

        A token that holds only a part of a character (byte-level pieces of an emoji, a letter whose accents follow
        as characters of their own) gets the range of the whole character.
        """
        if n_tokens < 1:
            return []
        n_chars = n_tokens * CHARS_PER_TOKEN + _LONGEST_TOKEN
        while True:
            found = self._user([document[:n_chars]], offsets=True)["offset_mapping"][0][:n_tokens]
            # Tokens near a cut may not be those of the whole text.
            settled = len(found) == n_tokens and found[-1][1] + _LONGEST_TOKEN <= n_chars
            if settled or n_chars >= len(document):
                return [(int(a), _with_accents(document, int(b))) for a, b in found]
            n_chars *= 2
