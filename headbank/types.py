"""The plain values that layers hand to each other. No torch, no I/O.

Notation is in `headbank/numerics/__init__.py`. Spans are half-open token ranges `[start, end)`.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

View = Literal["query", "response"]
"""Which source rows vote: the question's tokens, or the tokens of the answer the model itself wrote."""

Aggregation = Literal["borda", "rrf", "share"]

VIEWS: tuple[View, ...] = ("query", "response")
AGGREGATIONS: tuple[Aggregation, ...] = ("borda", "rrf", "share")


class HeadId(NamedTuple):
    """A query head, both numbers zero-based; printed `L14H22`."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"


class Span(NamedTuple):
    """A half-open range of tokens `[start, end)`."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.end - self.start


@dataclass(frozen=True)
class Document:
    """A candidate document of a sample."""

    text: str
    title: str = ""
    id: str = ""
    gold: bool = False
    relevance: int = 0
    """Graded relevance; 1 for a gold document of a question, 0 for a distractor."""

    @property
    def content(self) -> str:
        """The string that every method ranks: the title on a line of its own, then the text."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True)
class Sample:
    """A question with candidate documents, as the readers in `headbank/data` return it."""

    id: str
    question: str
    documents: tuple[Document, ...]
    answer: str | None = None
    dataset: str = ""

    @property
    def golds(self) -> tuple[int, ...]:
        """Indices of the gold documents."""
        return tuple(i for i, d in enumerate(self.documents) if d.gold)

    @property
    def distractors(self) -> tuple[int, ...]:
        """Indices of the documents that are not gold."""
        return tuple(i for i, d in enumerate(self.documents) if not d.gold)


@dataclass(frozen=True)
class PromptLayout:
    """A prompt as token ids, with the place of every part recorded while it was built.

    `documents[i]` is the span of the text of document i (its label and separator lie outside);
    `prefix_end` is where the documents begin, `tail_start` where the last of them (with its separator) ends.
    """

    ids: tuple[int, ...]
    prefix_end: int
    documents: tuple[Span, ...]
    tail_start: int
    query: Span
    cut: tuple[int, ...] = ()
    """Indices of the documents that were cut to `max_tokens_per_doc`."""

    @property
    def length(self) -> int:
        """Number of tokens T."""
        return len(self.ids)


@dataclass(frozen=True)
class ModelInfo:
    """What identifies a loaded model; a bank made with one is valid for an equal one only."""

    model_id: str
    """Catalogue name, hub id, or the name of the folder or file."""
    revision: str
    config_hash: str
    """Hash of the fields of the configuration that shape the forward pass."""
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    context_tokens: int
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens, None where a layer sees everything."""
    tokenizer_hash: str
    template_hash: str
    norm_hashes: tuple[str, ...]
    """Per layer, a hash of its norm weights in bfloat16: they survive quantisation and tell fine-tunes apart."""
    dtype: str


@dataclass(frozen=True)
class HeadSet:
    """Heads that vote together, with what the calibration job learnt about them."""

    name: str
    view: View
    heads: tuple[HeadId, ...]
    default_aggregation: Aggregation
    strict_experts: int
    """How many of `heads` pass the strict criterion in every placement; the others are soft fill."""
    dev_metrics: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadVote:
    """How one head voted: its attention per document and the rank it gives each (1 is best)."""

    head: HeadId
    mass: tuple[float, ...]
    """Attention on each document, summed over its tokens, averaged over the source rows. [D]"""
    mean: tuple[float, ...]
    """`mass` divided by the number of tokens. [D]"""
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Snippet:
    """A stretch of a document that the voting heads look at; offsets count characters of the given string."""

    document: int
    start: int
    end: int
    text: str
    weight: float
    """Share of the document's attention that falls on the stretch."""


@dataclass(frozen=True)
class RankOptions:
    """What a caller may choose for one ranking."""

    view: View = "query"
    aggregation: Aggregation | None = None
    """None: what the bank names as the default of the head set."""
    max_tokens_per_doc: int | None = None
    """None: only the model's context limits a document."""
    explain: bool = False


@dataclass(frozen=True)
class Ranking:
    """The answer of a reranker.

    `scores` are in the order of the input; `order` lists input indices, best first (score descending, then index).
    """

    scores: tuple[float, ...]
    order: tuple[int, ...]
    method: str
    input_tokens: int = 0
    cut: tuple[int, ...] = ()
    votes: tuple[HeadVote, ...] = ()
    snippets: tuple[Snippet, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """Time split in seconds: `tokenise`, `forward`, `vote`."""
