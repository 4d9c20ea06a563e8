"""The plain values that layers hand to each other. No torch, no I/O.

Notation is in `headbank/numerics/__init__.py`. Spans are half-open token ranges `[start, end)`.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

View = Literal["query", "response"]
"""Which source rows vote: the question's tokens, or the tokens of the answer the model itself wrote."""

Layout = Literal["joint", "parallel"]
"""`joint`: documents follow each other in one causal context. `parallel`: every document is encoded on its own after
the same prefix, all at the same positions, and the tail sees them all."""

Aggregation = Literal["borda", "rrf", "share", "evidence", "calibrated"]
"""From heads to one score a document. `borda`, `rrf` and `share` compare the documents of one request; `evidence` is
the log-odds of a document against tokens that every prompt has, comparable between requests; `calibrated` is ICR's
attention less that of a content-free query."""

VIEWS: tuple[View, ...] = ("query", "response")
LAYOUTS: tuple[Layout, ...] = ("joint", "parallel")
Reweighting = Literal["frequency", "entropy"]
"""ReAttn (arXiv 2602.19969): words of the query that many candidates share count less; so does a document whose
attention rests on few tokens."""

REWEIGHTINGS: tuple[Reweighting, ...] = ("frequency", "entropy")

VOTES: tuple[Aggregation, ...] = ("borda", "rrf", "share")
"""The rules that compare the documents of one request."""

AGGREGATIONS: tuple[Aggregation, ...] = ("borda", "rrf", "share", "evidence", "calibrated")


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
class PromptStyle:
    """What shapes a prompt besides its texts; a head set is valid for the style it was calibrated with."""

    layout: Layout = "joint"
    label: bool = True
    """A line before each document: "Document 3:" in `joint`, "Document:" in `parallel`, where documents have no
    number."""
    query_first: bool = False
    """The question also stands before the documents. In `parallel` no document can then be kept for other queries."""
    tail: Literal["longest", "total"] = "longest"
    """Where the tail of `parallel` stands: after the longest document, or as far as if all followed each other."""

    def __str__(self) -> str:
        extras = [
            name
            for name, on in (
                ("unlabelled", not self.label),
                ("query-first", self.query_first),
                ("far-tail", self.tail == "total"),
            )
            if on
        ]
        return "+".join([self.layout, *extras])


JOINT = PromptStyle()
"""The papers' prompt."""


@dataclass(frozen=True)
class PromptLayout:
    """A prompt as token ids, with the place of every part recorded while it was built.

    `ids` is always prefix, then one block per document, then tail; in `parallel` that is an order on paper, and
    positions come from `start_positions`. `blocks[i]` holds label, text and separator of document i, `documents[i]`
    its text alone.
    """

    ids: tuple[int, ...]
    prefix_end: int
    documents: tuple[Span, ...]
    tail_start: int
    query: Span
    cut: tuple[int, ...] = ()
    """Indices of the documents that were cut to `max_tokens_per_doc`."""
    blocks: tuple[Span, ...] = ()
    """Contiguous from `prefix_end` to `tail_start`. [D]"""
    style: PromptStyle = JOINT
    tail_position: int = 0
    """Position of the first tail token; in `joint` that is `tail_start`."""

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
    """`<detector>.<view>.<layout>`."""
    detector: str
    view: View
    heads: tuple[HeadId, ...]
    default_aggregation: Aggregation
    style: PromptStyle = JOINT
    """The prompt that the heads were calibrated with."""
    strict_experts: int = 0
    """How many of `heads` pass the strict criterion in every placement; the others are soft fill."""
    exponent: float = 1.0
    """Of the length in `evidence`: 0 leaves masses as they are, 1 makes them means."""
    z_mean: tuple[float, ...] = ()
    """Mean of each head's log-odds over the calibration documents; empty where `evidence` was not fitted. [n]"""
    z_std: tuple[float, ...] = ()
    """Standard deviation of each head's log-odds. [n]"""
    weights: tuple[float, ...] = ()
    """Weights of the standardised log-odds; empty: every head counts the same. [n]"""
    platt: tuple[float, float] | None = None
    """a and b of `P(relevant) = sigmoid(a z + b)` for the combined log-odds z."""
    response_tokens: int | None = None
    """Longest answer that the response view writes."""
    reweighting: tuple[Reweighting, ...] = ()
    """What is done to the attention on tokens before it is summed over a document; `calibrated` does without."""
    dev_metrics: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Fusion:
    """Other voters beside a head set, their weights fitted on the calibration samples."""

    name: str
    """`fusion.<view>.<layout>`."""
    head_set: str
    """Whose combined log-odds are the first feature."""
    voters: tuple[str, ...]
    """The other features in order: `bm25`, `dense`."""
    dense_model: str
    """Which model's cosines were the feature `dense`; empty without it."""
    mean: tuple[float, ...]
    """Of each feature over the calibration documents. [1 + voters]"""
    std: tuple[float, ...]
    weights: tuple[float, ...]
    """Of the standardised features. [1 + voters]"""
    platt: tuple[float, float]
    dev_metrics: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadVote:
    """How one head voted: its attention per document and the rank it gives each (1 is best)."""

    head: HeadId
    mass: tuple[float, ...]
    """Attention on each document, summed over its tokens, averaged over the source rows; for a set ranked in windows,
    over the attention on the prompt's fixed parts. [D]"""
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
    layout: Layout | None = None
    """None: what the bank names as the default of the view."""
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
    raw_scores: tuple[float, ...] | None = None
    """What `scores` were made of, on an open scale: log-odds z, BM25's sums; None where they are the same."""
    input_tokens: int = 0
    cut: tuple[int, ...] = ()
    votes: tuple[HeadVote, ...] = ()
    snippets: tuple[Snippet, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """Time split in seconds: `tokenise`, `forward`, `vote`."""
