"""Requests of every kind over one model, and what it takes for two captures to be the same."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from headbank.models import graph, hf
from headbank.models.base import Capture, CaptureRequest
from headbank.models.hf import HFRunner
from headbank.models.packed import passes
from headbank.types import JOINT, HeadId, PromptLayout, PromptStyle, View
from tests.support.reference import BARE, PARALLEL

BOTH: tuple[View, ...] = ("query", "response")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
QUERY = "Who wrote it?"
DOCUMENTS = ("The lamp was lit by Ada.", "Nobody wrote it 🙂.", "Ada wrote the book in 1843.")


def prompt(
    runner: HFRunner,
    documents: Sequence[str] = DOCUMENTS,
    query: str = QUERY,
    style: PromptStyle = JOINT,
) -> PromptLayout:
    """A prompt of a runner."""
    return runner.prompts.build(query, documents, style=style)


def assert_same(a: Capture, b: Capture, tolerance: float) -> None:
    """The same heads, source rows and answer, and all masses equal within the tolerance."""
    assert (a.heads, a.source, a.response) == (b.heads, b.source, b.response)
    assert set(a.mass) == set(b.mass)
    close: Any = partial(torch.testing.assert_close, atol=tolerance, rtol=0)
    for view in a.mass:
        close(a.mass[view], b.mass[view])
    assert (a.steps is None) == (b.steps is None)
    if a.steps is not None:
        close(a.steps, b.steps)


def mixed_requests(runner: HFRunner) -> list[CaptureRequest]:
    """Prompts that share much, little, everything and nothing with the one before, read in all ways."""
    a, b, c = DOCUMENTS
    long = " ".join(DOCUMENTS * 3)
    some, one = (HeadId(1, 3), HeadId(0, 0)), (HeadId(2, 1),)
    far = PromptStyle("parallel", tail="total")
    return [
        CaptureRequest(prompt(runner), None, BOTH, 3),
        CaptureRequest(prompt(runner), some),
        CaptureRequest(prompt(runner, [a, b]), one, ("response",), 1),
        CaptureRequest(prompt(runner, style=PARALLEL), None, BOTH, 2),
        CaptureRequest(prompt(runner, [c, long, a, "", a], style=PARALLEL), some),
        CaptureRequest(prompt(runner, [a, c, b], "When?"), one),
        CaptureRequest(prompt(runner, [b], "Who lit the lamp, and when was the book written?", far), None),
        CaptureRequest(prompt(runner, [c, b, a], style=BARE), some, BOTH, 4),
        CaptureRequest(prompt(runner, []), None, BOTH, 2),
        CaptureRequest(prompt(runner, [], style=PARALLEL), one),
        CaptureRequest(prompt(runner, [long, c], "", PARALLEL), some, BOTH, 3),
        CaptureRequest(prompt(runner, [c, b, a], "", BARE), None),
    ]


def small_passes(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Bound nodes and passes to a few tokens."""
    monkeypatch.setattr(graph, "PASS_TOKENS", tokens)
    monkeypatch.setattr(hf, "passes", partial(passes, budget=tokens))
