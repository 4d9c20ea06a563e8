"""What `headrank bench` times: this engine, and other ways to the same documents' order on the same weights.

A contestant's call goes from token ids to scores; prompts are tokenised before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headbank.errors import InputError
from headbank.models.base import NULL_QUERY, CaptureRequest, HeadRunner, User
from headbank.models.baseline import PLAIN_ATTENTION, PlainModel, with_documents
from headbank.models.cache import DocumentCache
from headbank.models.graph import PromptGraph
from headbank.models.hf import HFRunner
from headbank.models.packed import TokenMass, passes
from headbank.numerics.icr import icr_scores
from headbank.numerics.spans import span_mass, span_mean
from headbank.numerics.voting import vote_order
from headbank.types import JOINT, HeadId, ModelInfo, PromptLayout, PromptStyle, View

PARALLEL = PromptStyle(layout="parallel")
QUERY: tuple[View, ...] = ("query",)


class Skip(Exception):
    """A contestant sits out a case; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """What a call found."""

    scores: Tensor
    """[D]; of the floor, which reads nothing, [0]."""
    response_tokens: int = 0
    """Tokens that the model wrote."""
    hits: int = 0
    """Documents (and prefixes) found in the cache."""
    misses: int = 0


@dataclass(frozen=True)
class Prepared:
    """A call that is ready to be timed."""

    run: Callable[[], Outcome]
    kv_bytes: int = 0
    """Keys and values that the call itself keeps between its passes."""


@dataclass(eq=False)
class Stage:
    """One model, with and without a document cache and without the tap; the weights are there once."""

    runner: HFRunner
    heads: tuple[HeadId, ...]
    response_tokens: int
    max_bytes: int
    """Contestants that would hold more attention matrices, or more keys and values, sit out."""
    filled: int = 0
    """How many documents of the run are in the cache; every case has the first few of the same documents."""
    cache: DocumentCache = field(init=False)
    cached: HFRunner = field(init=False)
    plain: PlainModel = field(init=False)

    def __post_init__(self) -> None:
        self.cache = DocumentCache(self.max_bytes)
        self.cached = with_documents(self.runner, self.cache)
        self.plain = PlainModel(self.runner)

    @property
    def deepest(self) -> int:
        """The deepest layer with a voting head."""
        return max(head.layer for head in self.heads)

    def synchronize(self) -> None:
        """Wait for the device, which works behind the clock's back on CUDA."""
        if self.plain.device.type == "cuda":
            torch.cuda.synchronize(self.plain.device)


@dataclass(frozen=True)
class Case:
    """One prompt for every contestant."""

    stage: Stage
    query: str
    documents: tuple[str, ...]

    def layout(self, style: PromptStyle, *, query: str | None = None, reserve: int = 0) -> PromptLayout:
        """The prompt in a style, or that of another query. Raises InputTooLong."""
        prompts = self.stage.runner.prompts
        return prompts.build(query or self.query, self.documents, style=style, reserve_tokens=reserve)

    def allow(self, n_bytes: int, what: str) -> None:
        """Raises Skip when more bytes are needed than the stage allows."""
        if n_bytes > self.stage.max_bytes:
            raise Skip(f"{what} take {_gib(n_bytes)}, the limit is {_gib(self.stage.max_bytes)}")


@dataclass(frozen=True)
class Contestant:
    """One way to scores."""

    prepare: Callable[[Case], Prepared]
    """Builds the call of a case. Raises Skip or InputTooLong when there is none."""
    attention: str | None = None
    """The attention implementation that the model needs; None: the tap."""


def open_stage(runner: HeadRunner, heads: Sequence[HeadId], *, response_tokens: int, max_bytes: int) -> Stage:
    """Set up a model. Raises InputError for an engine without weights and for heads that the model lacks."""
    if not isinstance(runner, HFRunner):
        raise InputError("model", "must be one with weights, there is nothing to measure on the others")
    info = runner.info
    if not heads:
        raise InputError("heads", "needs at least one head", 1)
    for head in heads:
        if not (0 <= head.layer < info.n_layers and 0 <= head.head < info.n_heads):
            raise InputError("heads", f"{head} is outside {info.n_layers} x {info.n_heads} heads")
    return Stage(runner, tuple(heads), response_tokens, max_bytes)


def spread_heads(info: ModelInfo, deepest: int | None = None, count: int = 5) -> tuple[HeadId, ...]:
    """`count` heads in layers evenly spread up to `deepest`, one of them in it.

    None: the last layer of the first two thirds, where retrieval heads are found. Raises InputError for a layer that
    the model does not have.
    """
    end = max(0, 2 * info.n_layers // 3 - 1) if deepest is None else deepest
    if not 0 <= end < info.n_layers:
        raise InputError("deepest", f"must be below the model's {info.n_layers} layers", info.n_layers)
    heads = [HeadId(end * (i + 1) // count, i % info.n_heads) for i in range(count)]
    return tuple(dict.fromkeys(heads))


def layer_bytes(stage: Stage) -> int:
    """Keys and values of one token in one layer."""
    info = stage.runner.info
    return 2 * info.n_kv_heads * info.d_head * stage.plain.element_size


def kept_bytes(
    stage: Stage, requests: Sequence[CaptureRequest], documents: DocumentCache | None = None
) -> int:
    """Keys and values that the engine holds between the passes of some requests; kept documents are not counted."""
    n_layers = stage.runner.info.n_layers
    depth = 0
    for request in requests:
        reads_all = "response" in request.views or request.heads is None
        depth = max(depth, n_layers if reads_all else stage.deepest + 1)
    graph = PromptGraph(documents, depth)
    for request in requests:
        graph.add(request.layout, {}, TokenMass(0), "response" in request.views)
    tokens = sum(len(node.ids) for _, kept, _ in passes(graph.nodes) for node in kept)
    return tokens * depth * layer_bytes(stage)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"


def _voted(mass: Tensor, layout: PromptLayout) -> Tensor:
    """Scores [D] of the heads' vote; `mass` is [n, T]."""
    lengths = torch.tensor([span.length for span in layout.documents])
    return vote_order(span_mean(span_mass(mass, layout.documents), lengths), "borda")[0]


def _floor(case: Case) -> Prepared:
    ids = case.layout(JOINT).ids

    def run() -> Outcome:
        case.stage.plain.prefill(ids, case.stage.deepest)
        return Outcome(torch.zeros(0))

    return Prepared(run)


def _heads(style: PromptStyle) -> Callable[[Case], Prepared]:
    def prepare(case: Case) -> Prepared:
        layout = case.layout(style)
        request = CaptureRequest(layout, case.stage.heads)
        kept = kept_bytes(case.stage, [request])
        case.allow(kept, "keys and values")
        return Prepared(
            lambda: Outcome(_voted(case.stage.runner.capture(request).mass["query"], layout)), kept
        )

    return prepare


def _heads_warm(case: Case) -> Prepared:
    """Documents that are not in the cache yet are computed while preparing, untimed."""
    stage = case.stage
    layout = case.layout(PARALLEL)
    request = CaptureRequest(layout, stage.heads)
    documents = layout.tail_start * (stage.deepest + 1) * layer_bytes(stage)
    case.allow(documents, "keys and values of the documents")
    if stage.filled < len(case.documents):
        stage.cached.capture(request)
        stage.filled = len(case.documents)

    def run() -> Outcome:
        before = stage.cache.counts
        mass = stage.cached.capture(request).mass["query"]
        after = stage.cache.counts
        return Outcome(
            _voted(mass, layout), hits=after.hits - before.hits, misses=after.misses - before.misses
        )

    return Prepared(run, kept_bytes(stage, [request], stage.cache))


def _heads_response(case: Case) -> Prepared:
    stage = case.stage
    layout = case.layout(PARALLEL, reserve=stage.response_tokens)
    request = CaptureRequest(layout, stage.heads, ("response",), stage.response_tokens)
    kept = kept_bytes(stage, [request])
    case.allow(kept, "keys and values")

    def run() -> Outcome:
        capture = stage.runner.capture(request)
        return Outcome(_voted(capture.mass["response"], layout), len(capture.response))

    return Prepared(run, kept)


def _icr(*, shared: bool) -> Callable[[Case], Prepared]:
    """In-Context Re-ranking (arXiv 2410.02642): all heads of all layers, for the query and for a content-free one.

    The authors' code runs the model on "N/A" first, cuts the kept keys and values back to the documents, and runs
    the real query on top: the variant with `shared` documents. Both variants read rows with the tap and stop after
    the last layer's queries and keys, where the authors' code goes on to the logits of every token.
    """

    def prepare(case: Case) -> Prepared:
        layout, null = case.layout(JOINT), case.layout(JOINT, query=NULL_QUERY)
        requests = [CaptureRequest(layout, None), CaptureRequest(null, None)]
        together = [requests] if shared else [[request] for request in requests]
        kept = max(kept_bytes(case.stage, group) for group in together)
        case.allow(kept, "keys and values")

        def run() -> Outcome:
            found = [capture for group in together for capture in case.stage.runner.capture_many(group)]
            query, content_free = (capture.mass["query"][:, : layout.tail_start] for capture in found)
            return Outcome(icr_scores(query, content_free, layout.documents))

        return Prepared(run, kept)

    return prepare


def _eager(case: Case) -> Prepared:
    """The same heads read from `output_attentions=True`, which builds every matrix of every layer."""
    stage, info = case.stage, case.stage.runner.info
    layout = case.layout(JOINT)
    # Besides the matrices that are returned, the layer at work holds its scores and its float32 softmax.
    per_entry = info.n_layers * stage.plain.element_size + 8
    case.allow(info.n_heads * layout.length**2 * per_entry, "attention matrices")

    def run() -> Outcome:
        return Outcome(_voted(stage.plain.attentions(layout.ids, stage.heads, layout.query), layout))

    return Prepared(run)


def _pointwise(case: Case) -> Prepared:
    """Every document alone with the query: does it help, yes or no?"""
    question = ("\n\nQuestion:\n", User(case.query), "\n\nDoes the passage help to answer it? Say yes or no.")
    prompts = [
        case.stage.runner.prompts.chat(["Passage:\n", User(text), *question]) for text in case.documents
    ]
    return Prepared(lambda: Outcome(case.stage.plain.yes_minus_no(prompts)))


CONTESTANTS: Mapping[str, Contestant] = {
    "floor": Contestant(_floor, PLAIN_ATTENTION),
    "heads_joint_cold": Contestant(_heads(JOINT)),
    "heads_parallel_cold": Contestant(_heads(PARALLEL)),
    "heads_parallel_warm": Contestant(_heads_warm),
    "heads_response": Contestant(_heads_response),
    "icr": Contestant(_icr(shared=True)),
    "icr_two_pass": Contestant(_icr(shared=False)),
    "eager": Contestant(_eager, "eager"),
    "pointwise": Contestant(_pointwise, PLAIN_ATTENTION),
}
"""By name, in the order of a round."""
