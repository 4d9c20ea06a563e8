"""The bench's contestants do what they claim, and say what they take."""

from collections.abc import Iterator

import pytest
import torch

from headbank.jobs.bench import bench
from headbank.jobs.bench_contestants import (
    CONTESTANTS,
    PARALLEL,
    Case,
    Stage,
    kept_bytes,
    layer_bytes,
)
from headbank.models.base import CaptureRequest
from headbank.models.baseline import PLAIN_ATTENTION
from headbank.models.packed import Pass
from headbank.types import JOINT, PromptStyle
from tests.jobs.bench_cases import HEADS, a_case, run, small, stage_of
from tests.support.tiny_models import FAMILIES, eager_rows


def test_the_same_procedure_gives_the_same_scores_whichever_way_it_is_run() -> None:
    case = a_case(stage_of())
    scores = {name: run(name, case).scores for name in CONTESTANTS}
    torch.testing.assert_close(scores["eager"], scores["heads_joint_cold"])
    torch.testing.assert_close(scores["heads_parallel_warm"], scores["heads_parallel_cold"])
    torch.testing.assert_close(scores["icr"], scores["icr_two_pass"], rtol=1e-4, atol=1e-6)
    distinct = ("heads_joint_cold", "heads_parallel_cold", "heads_response", "icr", "pointwise")
    for i, a in enumerate(distinct):
        for b in distinct[i + 1 :]:
            assert not torch.allclose(scores[a].double(), scores[b].double()), (a, b)


def test_eager_reads_the_rows_that_the_tap_reads() -> None:
    stage = stage_of()
    layout = a_case(stage).layout(JOINT)
    with stage.plain.attention("eager"):
        rows = stage.plain.attentions(layout.ids, HEADS, layout.query)
    tapped = stage.runner.capture(CaptureRequest(layout, HEADS)).mass["query"]
    torch.testing.assert_close(rows, tapped, rtol=1e-4, atol=1e-6)


def test_icr_computes_the_documents_once_or_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[int] = []
    plain_finish = Pass.finish

    def finish(self: Pass) -> None:
        tokens.append(self.tokens.shape[1])
        plain_finish(self)

    monkeypatch.setattr(Pass, "finish", finish)
    case = a_case(stage_of())
    layout, null = case.layout(JOINT), case.layout(JOINT, query="N/A")
    run("icr", case)
    assert tokens == [layout.length + null.length - layout.tail_start]
    tokens.clear()
    run("icr_two_pass", case)
    assert tokens == [layout.length, null.length]


@pytest.fixture
def layer_calls() -> Iterator[tuple[Stage, list[str]]]:
    """A stage, and the layers whose projections and whose part after attention have run."""
    stage, seen, hooks = stage_of(), [], []
    for number, layer in enumerate(stage.runner._model.base_model.layers):
        for name, part in (("keys", layer.self_attn.k_proj), ("after", layer.self_attn.o_proj)):
            hooks.append(
                part.register_forward_hook(lambda *_, at=f"{name} {number}": seen.append(at))  # type: ignore[misc]
            )
    yield stage, seen
    for hook in hooks:
        hook.remove()


def test_the_floor_ends_where_the_heads_do(layer_calls: tuple[Stage, list[str]]) -> None:
    stage, seen = layer_calls
    case = a_case(stage)
    run("heads_joint_cold", case)
    ours = list(seen)
    seen.clear()
    run("floor", case)
    assert ours == seen == ["keys 0", "after 0", "keys 1"]


def test_the_floor_is_the_model_up_to_there() -> None:
    # What enters layer 2 of a pass that stops there is what a whole eager pass hands to it.
    stage = stage_of()
    ids = a_case(stage).layout(JOINT).ids
    inputs: list[torch.Tensor] = []
    layer = stage.runner._model.base_model.layers[2]
    hook = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        with stage.plain.attention(PLAIN_ATTENTION):
            stage.plain.prefill(ids, 2)
        eager_rows(stage.runner._model, torch.tensor([ids]))
    finally:
        hook.remove()
    torch.testing.assert_close(inputs[0], inputs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_every_contestant(family: str) -> None:
    case = a_case(stage_of(family))
    for name in CONTESTANTS:
        assert bool(run(name, case).scores.isfinite().all()), name


def test_pointwise_is_the_difference_of_two_logits_whatever_shares_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = stage_of()
    tokenizer, model = stage.runner._tokenizer, stage.runner._model
    prompts = [stage.runner.prompts.chat([text]) for text in ("a", "Was it here?", "And this one is longer")]
    yes, no = (tokenizer(word)["input_ids"][-1] for word in (" yes", " no"))
    expected = []
    for ids in prompts:
        logits = eager_rows(model, torch.tensor([ids]))[1][0, -1]
        expected.append(float(logits[yes] - logits[no]))
    for budget in (1, 2 * max(map(len, prompts)), 2048):
        monkeypatch.setattr("headbank.models.baseline.PASS_TOKENS", budget)
        with stage.plain.attention(PLAIN_ATTENTION):
            found = stage.plain.yes_minus_no(prompts)
        assert found.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert len({round(value, 3) for value in expected}) == 3


@pytest.mark.parametrize(("style", "n"), [(JOINT, 4), (PARALLEL, 4), (PARALLEL, 200)])
def test_kept_bytes_are_what_passes_leave(
    monkeypatch: pytest.MonkeyPatch, style: PromptStyle, n: int
) -> None:
    left = [0]
    plain_finish = Pass.finish

    def finish(self: Pass) -> None:
        plain_finish(self)
        left[0] += sum(node.computed.n_bytes for node in self._kept if node.computed is not None)

    monkeypatch.setattr(Pass, "finish", finish)
    stage = stage_of()
    layout = a_case(stage, n).layout(style)
    request = CaptureRequest(layout, HEADS)
    stage.runner.capture(request)
    assert left == [kept_bytes(stage, [request])]
    # One pass keeps nothing; several keep at least the documents of the earlier ones.
    assert (left[0] > 0) == (layout.length > 2048) == (n == 200)


def test_an_answer_keeps_the_whole_prompt_in_all_layers() -> None:
    stage = stage_of()
    layout = a_case(stage).layout(PARALLEL)
    assert layer_bytes(stage) == 2 * 2 * 8 * 4
    request = CaptureRequest(layout, HEADS, ("response",), 3)
    assert kept_bytes(stage, [request]) == layout.length * 3 * layer_bytes(stage)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("eager", "attention matrices"),
        ("heads_parallel_warm", "keys and values of the documents"),
        ("heads_response", "keys and values"),
    ],
)
def test_what_would_take_too_much_memory_sits_out(name: str, what: str) -> None:
    result = bench(stage_of(max_bytes=1000), small(4, contestants=(name, "floor")))
    assert result.cases[0].skipped == {name: f"{what} take 0.0 GiB, the limit is 0.0 GiB"}


def test_a_prompt_beyond_the_context_is_no_case_for_joint_contestants() -> None:
    result = bench(stage_of(), small(120, rounds=1, contestants=("floor", "heads_parallel_cold")))
    assert set(result.cases[0].seconds) == {"heads_parallel_cold"}
    assert result.cases[0].skipped["floor"].startswith("documents: 120 documents and the query take")


def test_the_cache_is_filled_before_the_clock_starts() -> None:
    stage = stage_of()
    few, many = a_case(stage, 2), a_case(stage, 5)
    prepared = CONTESTANTS["heads_parallel_warm"].prepare(few)
    assert stage.cache.counts.documents == 3
    assert prepared.kv_bytes == 0
    outcome = prepared.run()
    assert (outcome.hits, outcome.misses) == (2, 0)
    CONTESTANTS["heads_parallel_warm"].prepare(
        Case(stage, "another one", (*few.documents, *many.documents[:1]))
    )
    assert stage.filled == 3
