"""Head sets, runners and plain loops that the tests of the head rerankers share."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from headbank.models.base import Capture, CaptureRequest, HeadRunner, Prompts
from headbank.models.fake import FakeRunner
from headbank.models.hf import HFRunner
from headbank.types import JOINT, HeadId, HeadSet, ModelInfo, PromptLayout, PromptStyle, Ranking, View
from tests.support.tiny_models import from_config, tiny_config, tiny_tokenizer

QUERY = "Where does the falcon nest?"
DOCUMENTS = (
    "Rivers carry cold water to the sea.",
    "The falcon nests on the granite tower, high above the old harbour.",
    "Bread is baked in the morning.",
)
PARALLEL = PromptStyle("parallel")
BARE = PromptStyle("parallel", label=False, query_first=True, tail="total")
VOTERS = (HeadId(1, 2), HeadId(0, 0), HeadId(2, 3), HeadId(1, 0))
"""Heads of any tiny model, in no order."""


def fitted(
    heads: Sequence[HeadId] = VOTERS,
    *,
    detector: str = "expert",
    view: View = "query",
    style: PromptStyle = JOINT,
    weighted: bool = False,
    **changes: Any,
) -> HeadSet:
    """A head set in which every head has other moments (and weights), as a calibration would fit them."""
    chance = random.Random(len(heads))
    return HeadSet(
        f"{detector}.{view}.{style.layout}",
        detector,
        view,
        tuple(heads),
        **{
            "default_aggregation": "evidence",
            "style": style,
            "exponent": 0.5,
            "z_mean": tuple(chance.uniform(-6, -2) for _ in heads),
            "z_std": tuple(chance.uniform(0.5, 2) for _ in heads),
            "weights": tuple(chance.uniform(-1, 1) for _ in heads) if weighted else (),
            "platt": (1.5, -0.25),
            "response_tokens": 3,
            **changes,
        },
    )


def sums(rows: Any, layout: PromptLayout) -> tuple[list[list[float]], list[float], list[int]]:
    """Mass per head and document, mass per head on the prefix and the tail, tokens per document: plain loops."""
    lengths = [end - start for start, end in layout.documents]
    masses, references = [], []
    for row in rows.tolist():
        masses.append([math.fsum(row[start:end]) for start, end in layout.documents])
        outside = [m for j, m in enumerate(row) if j < layout.prefix_end or j >= layout.tail_start]
        references.append(math.fsum(outside))
    return masses, references, lengths


def evidence_by_hand(
    masses: Sequence[Sequence[float]],
    references: Sequence[float],
    lengths: Sequence[int],
    heads: HeadSet,
    voters: Sequence[HeadId],
) -> list[float]:
    """Combined log-odds of every document, by the definition."""
    scores = []
    present = sum(abs(heads.weights[heads.heads.index(head)]) for head in voters) if heads.weights else 1.0
    scale = sum(map(abs, heads.weights)) / present if heads.weights else 1.0
    for i, length in enumerate(lengths):
        total = 0.0
        for row, head in enumerate(voters):
            at = heads.heads.index(head)
            odds = math.log(max(masses[row][i], 1e-9) / max(length, 1) ** heads.exponent)
            odds -= math.log(max(references[row], 1e-9))
            z = (odds - heads.z_mean[at]) / heads.z_std[at]
            total += heads.weights[at] * scale * z if heads.weights else z / len(voters)
        scores.append(total)
    return scores


def sigmoid(z: float, a: float = 1.0, b: float = 0.0) -> float:
    """`1 / (1 + exp(-a z - b))`."""
    return 1 / (1 + math.exp(-a * z - b))


class Recording:
    """A runner that passes everything on and notes what it was asked for."""

    def __init__(self, inner: HeadRunner) -> None:
        self.inner = inner
        self.requests: list[CaptureRequest] = []
        self.captures: list[Capture] = []

    @property
    def info(self) -> ModelInfo:
        return self.inner.info

    @property
    def prompts(self) -> Prompts:
        return self.inner.prompts

    def capture(self, request: CaptureRequest) -> Capture:
        return self.capture_many([request])[0]

    def capture_many(self, requests: Sequence[CaptureRequest]) -> list[Capture]:
        found = self.inner.capture_many(requests)
        self.requests += requests
        self.captures += found
        return found

    def generate(self, ids: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
        return self.inner.generate(ids, max_new_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(ids)


class Windowed(FakeRunner):
    """The fake engine with sliding windows."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        super().__init__()
        self.windows = windows

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, windows=self.windows)


@lru_cache
def small_runner(context_tokens: int, family: str = "llama") -> HFRunner:
    """A tiny model with a small context."""
    model = from_config(tiny_config(family, max_position_embeddings=context_tokens))
    return HFRunner(model, tiny_tokenizer(), model_id=f"small-{family}")


def assert_alike(a: Ranking, b: Ranking, tolerance: float = 1e-5) -> None:
    """The same but for float noise and times; what lies closer than the noise may change places."""
    near = {"abs": tolerance, "rel": 0}
    assert a.scores == pytest.approx(b.scores, **near)
    assert (a.raw_scores is None) == (b.raw_scores is None)
    if a.raw_scores is not None and b.raw_scores is not None:
        assert a.raw_scores == pytest.approx(b.raw_scores, abs=1e-4, rel=0)
    assert [a.scores[i] for i in a.order] == pytest.approx([a.scores[i] for i in b.order], **near)
    assert (a.method, a.input_tokens, a.cut) == (b.method, b.input_tokens, b.cut)
    assert [vote.head for vote in a.votes] == [vote.head for vote in b.votes]
    for mine, other in zip(a.votes, b.votes, strict=True):
        assert mine.mass == pytest.approx(other.mass, **near)
    places = [(s.document, s.start, s.end, s.text) for s in a.snippets]
    assert places == [(s.document, s.start, s.end, s.text) for s in b.snippets]
