"""The `parallel` layout: the order of documents does not matter, and no document changes another."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headbank.models.base import Capture, CaptureRequest
from headbank.models.graph import PromptGraph
from headbank.models.hf import HFRunner
from headbank.models.packed import KeptRows, KeyValues
from headbank.numerics.spans import span_mass, span_mean
from headbank.numerics.voting import share
from headbank.types import PromptLayout, PromptStyle
from tests.support.captures import BOTH, TOLERANCE, prompt, small_passes
from tests.support.reference import BARE, PARALLEL
from tests.support.tiny_models import FAMILIES, tiny_runner

FAR = PromptStyle("parallel", tail="total")
WORDS = [
    "the",
    "lamp",
    "was",
    "lit",
    "by",
    "Ada",
    "in",
    "1843",
    "and",
    "nobody",
    "wrote",
    "🙂",
    "book",
    "evening",
]


def random_documents(chance: random.Random) -> list[str]:
    """Up to seven documents, some empty, some there twice, of very different lengths."""
    documents = [" ".join(chance.choices(WORDS, k=chance.choice([0, 1, 4, 20]))) for _ in range(5)]
    return [*documents, *chance.sample(documents, chance.randint(0, 2))]


def means(capture: Capture, layout: PromptLayout, view: str = "query") -> Tensor:
    """Mean attention of every head on every document. [n, D]"""
    lengths = torch.tensor([span.length for span in layout.documents])
    return span_mean(span_mass(capture.mass[view], layout.documents), lengths)  # type: ignore[index]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_permuted_documents_permute_the_means_and_keep_the_scores(family: str, dtype: torch.dtype) -> None:
    runner, tolerance = tiny_runner(family, dtype), TOLERANCE[dtype]
    chance = random.Random(len(family))
    for turn, style in enumerate((PARALLEL, FAR, BARE)):
        documents = random_documents(chance)
        order = chance.sample(range(len(documents)), len(documents))
        layouts = [
            prompt(runner, documents, style=style),
            prompt(runner, [documents[i] for i in order], style=style),
        ]
        views = BOTH if turn == 0 else ("query",)
        straight, mixed = (runner.capture(CaptureRequest(layout, None, views, 2)) for layout in layouts)
        assert straight.response == mixed.response
        for view in views:
            expected, got = means(straight, layouts[0], view), means(mixed, layouts[1], view)
            # All of Mistral's layers have a window, so only the first words of the query see a document.
            assert expected.max() > 1e-3 or (family == "mistral" and (turn, view) != (0, "query"))
            torch.testing.assert_close(got, expected[:, order], atol=tolerance, rtol=0)
            torch.testing.assert_close(share(got), share(expected)[order], atol=tolerance, rtol=0)


def test_order_matters_in_joint() -> None:
    """So that the test above means something."""
    runner = tiny_runner("llama", torch.float64)
    layouts = [prompt(runner, ["the lamp", "was lit by Ada", "in 1843"][::step]) for step in (1, -1)]
    a, b = (means(runner.capture(CaptureRequest(layout)), layout) for layout in layouts)
    assert (a - b.flip(1)).abs().max() > 0.02


@pytest.mark.parametrize("tokens", [10, 40])
def test_the_order_does_not_matter_over_several_passes(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_runner("gemma3_text", torch.float64)
    small_passes(monkeypatch, tokens)
    chance = random.Random(tokens)
    documents = random_documents(chance)
    base = prompt(runner, documents, style=PARALLEL)
    expected = means(runner.capture(CaptureRequest(base)), base)
    for _ in range(3):
        order = chance.sample(range(len(documents)), len(documents))
        layout = prompt(runner, [documents[i] for i in order], style=PARALLEL)
        got = means(runner.capture(CaptureRequest(layout)), layout)
        torch.testing.assert_close(got, expected[:, order], atol=1e-12, rtol=0)


def key_values(runner: HFRunner, documents: Sequence[str], style: PromptStyle) -> list[KeyValues]:
    """Keys and values of the last node of every document."""
    graph = PromptGraph(None, runner.info.n_layers)
    last = graph.add(prompt(runner, documents, style=style), {}, KeptRows(), writes=True)
    with torch.inference_mode():
        runner._run(graph.nodes, None)
    found = [node.computed for node in last.context[1:]]
    assert len(found) == len(documents)
    return [kept for kept in found if kept is not None]


@pytest.mark.parametrize("style", [PARALLEL, BARE], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_document_changes_no_keys_and_values(family: str, style: PromptStyle) -> None:
    runner = tiny_runner(family, torch.float64)
    few = ["the lamp was lit by Ada", "nobody", "the evening book"]
    alone = key_values(runner, few, style)
    more = key_values(runner, [few[0], "x y z " * 9, few[1], "", few[2], "nobody wrote"], style)
    for mine, theirs in zip(alone, [more[0], more[2], more[4]], strict=True):
        assert torch.equal(mine.positions, theirs.positions)
        for a, b in zip(mine.layers, theirs.layers, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_another_document_changes_keys_and_values_in_joint() -> None:
    runner = tiny_runner("llama", torch.float64)
    alone = key_values(runner, ["the lamp", "nobody"], PromptStyle(label=False))
    more = key_values(runner, ["the lamp", "in 1843", "nobody"], PromptStyle(label=False))
    torch.testing.assert_close(alone[0].layers[2], more[0].layers[2], atol=1e-12, rtol=0)
    assert (alone[1].layers[2] - more[2].layers[2]).abs().max() > 0.05


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_duplicates_read_alike(family: str) -> None:
    runner = tiny_runner(family, torch.float64)
    layout = prompt(runner, ["the lamp", "nobody wrote", "the lamp", "book", "the lamp"], style=PARALLEL)
    capture = runner.capture(CaptureRequest(layout, None, BOTH, 2))
    for view in BOTH:
        rows = [capture.mass[view][:, slice(*block)] for block in layout.blocks]
        for other in (rows[2], rows[4]):
            torch.testing.assert_close(other, rows[0], atol=1e-14, rtol=0)
        # They are all there: the rest of the prompt shares what three copies leave over.
        sums = capture.mass["query"].sum(1)
        torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-12, rtol=0)
