"""The transformers engine: captures equal eager attention, what it writes equals eager writing, errors are named."""

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headbank.errors import InputError, UnsupportedModel
from headbank.models import tap
from headbank.models.base import CaptureRequest
from headbank.models.hf import HFRunner
from headbank.types import HeadId, Span, View
from tests.support.captures import BOTH, TOLERANCE, assert_same, mixed_requests, prompt, small_passes
from tests.support.reference import PARALLEL, STYLES, assert_greedy, eager_prompt
from tests.support.tiny_models import FAMILIES, Work, eager, tiny_model, tiny_runner, tiny_tokenizer

ALL = tuple(HeadId(layer, head) for layer in range(3) for head in range(4))
DOUBLE = torch.float64


def expected_mean(rows: list[Tensor], span: Span, n_tokens: int) -> Tensor:
    """Rows of layers [H, T, T] -> mean over a span of source rows, [L * H, n_tokens]."""
    return torch.cat([layer[:, span.start : span.end, :n_tokens].mean(1) for layer in rows])


def greedy(model: Any, ids: Sequence[int], limit: int, *, least: int = 1) -> tuple[int, ...]:
    """What transformers writes on its own: eager attention, greedy, stop tokens left out."""
    prompt_ids = torch.tensor([list(ids)])
    with eager(model), torch.no_grad():
        out = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            do_sample=False,
            max_new_tokens=limit,
            min_new_tokens=least,
            pad_token_id=0,
        )
    written = out[0, len(ids) :].tolist()
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    return tuple(written[:-1] if written and written[-1] in stops else written)


@pytest.mark.parametrize("family", FAMILIES)
def test_query_view_is_the_mean_of_the_query_rows(family: str) -> None:
    for dtype, tolerance in TOLERANCE.items():
        runner = tiny_runner(family, dtype)
        layout = prompt(runner)
        capture = runner.capture(CaptureRequest(layout))
        rows, _ = eager_prompt(tiny_model(family, dtype), layout)
        assert capture.heads == tuple(HeadId(layer, head) for layer in range(len(rows)) for head in range(4))
        assert capture.source == {"query": tuple(range(layout.query.start, layout.query.end))}
        assert set(capture.mass) == {"query"}
        assert capture.response == ()
        assert capture.steps is None
        assert capture.mass["query"].dtype == dtype
        assert capture.mass["query"].shape == (len(capture.heads), layout.length)
        expected = expected_mean(rows, layout.query, layout.length)
        torch.testing.assert_close(capture.mass["query"], expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_response_view_is_what_the_model_writes_fed_back(family: str) -> None:
    for dtype, tolerance in TOLERANCE.items():
        runner, model = tiny_runner(family, dtype), tiny_model(family, dtype)
        layout = prompt(runner)
        capture = runner.capture(CaptureRequest(layout, None, BOTH, 5))
        assert capture.response == greedy(model, layout.ids, 5)
        end = layout.length + len(capture.response)
        assert capture.source["response"] == tuple(range(layout.length, end))
        rows, _ = eager_prompt(model, layout, capture.response)
        expected = expected_mean(rows, Span(layout.length, end), layout.length)
        torch.testing.assert_close(capture.mass["response"], expected, atol=tolerance, rtol=0)
        query = expected_mean(rows, layout.query, layout.length)
        torch.testing.assert_close(capture.mass["query"], query, atol=tolerance, rtol=0)
        assert capture.steps is not None
        assert capture.steps.shape == (len(capture.response), len(capture.heads), layout.length)
        assert torch.equal(capture.steps.mean(0), capture.mass["response"])


def test_the_response_view_alone_equals_both_views() -> None:
    runner = tiny_runner("llama", DOUBLE)
    alone = runner.capture(CaptureRequest(prompt(runner), None, ("response",), 3))
    both = runner.capture(CaptureRequest(prompt(runner), None, BOTH, 3))
    assert set(alone.mass) == set(alone.source) == {"response"}
    assert alone.response == both.response
    assert torch.equal(alone.mass["response"], both.mass["response"])


def stopping(model: Any, *stops: int) -> HFRunner:
    """A runner over a copy of the model that ends its answers at other tokens."""
    model = copy.deepcopy(model)
    model.generation_config.eos_token_id = [2, *stops]
    return HFRunner(model, tiny_tokenizer(), model_id="stops")


@pytest.mark.parametrize("style", STYLES[:2], ids=str)
@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_writing_stops_at_a_stop_token_but_not_before_one_token(stop_after: int, style: Any) -> None:
    plain = tiny_runner("llama", DOUBLE)
    layout = prompt(plain, style=style)
    free = plain.capture(CaptureRequest(layout, ALL[:1], ("response",), 5)).response
    assert len(set(free)) == 5
    runner = stopping(tiny_model("llama", DOUBLE), free[stop_after])
    capture = runner.capture(CaptureRequest(layout, None, BOTH, 5))
    rows, logits = eager_prompt(runner._model, layout, capture.response)
    assert_greedy(logits, layout.length, capture.response, 5, [2, free[stop_after]])
    if stop_after == 0:
        assert capture.response[0] not in (2, free[0])
    else:
        assert capture.response == free[:stop_after]
    expected = expected_mean(rows, Span(layout.length, layout.length + len(capture.response)), layout.length)
    torch.testing.assert_close(capture.mass["response"], expected, atol=1e-12, rtol=0)


def test_answers_of_different_lengths_are_written_together() -> None:
    plain = tiny_runner("llama", DOUBLE)
    layouts = [prompt(plain), prompt(plain, style=PARALLEL), prompt(plain, query="When?")]
    free = plain.capture(CaptureRequest(layouts[1], ALL[:1], ("response",), 5)).response
    runner = stopping(tiny_model("llama", DOUBLE), free[2])
    requests = [CaptureRequest(x, None, BOTH, n) for x, n in zip(layouts, (6, 6, 1), strict=True)]
    together = runner.capture_many(requests)
    assert together[1].response == free[:2]
    assert len({len(capture.response) for capture in together}) == 3
    for capture, request in zip(together, requests, strict=True):
        assert_same(capture, runner.capture(request), 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_writes_what_transformers_writes(family: str) -> None:
    runner, model = tiny_runner(family, DOUBLE), tiny_model(family, DOUBLE)
    ids = runner.prompts.chat(["Who wrote it?"])
    written = runner.generate(ids, 6)
    assert written == greedy(model, ids, 6)
    assert runner.generate(ids, 2) == written[:2]
    assert runner.generate(ids, 0) == ()


def test_generate_stops_at_a_stop_token_and_leaves_it_out() -> None:
    plain = tiny_runner("llama", DOUBLE)
    ids = plain.prompts.chat(["Who wrote it?"])
    free = plain.generate(ids, 5)
    assert len(set(free)) == 5
    for stop_after in (0, 1, 4):
        runner = stopping(tiny_model("llama", DOUBLE), free[stop_after])
        # Unlike an answer whose rows are read, it may be empty.
        assert runner.generate(ids, 5) == free[:stop_after] == greedy(runner._model, ids, 5, least=0)


def test_generate_in_small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_runner("gemma3_text", DOUBLE)
    ids = prompt(runner).ids
    whole = runner.generate(ids, 4)
    small_passes(monkeypatch, 11)
    with Work(runner._model) as work:
        assert runner.generate(ids, 4) == whole
    # The prompt once, then the written tokens; the last is not fed back.
    assert work.tokens == [11] * (len(ids) // 11) + [len(ids) % 11] * (len(ids) % 11 > 0) + [1] * 3


def test_one_new_token_is_enough() -> None:
    runner = tiny_runner("llama", DOUBLE)
    layout = prompt(runner)
    one = runner.capture(CaptureRequest(layout, None, BOTH, 1))
    five = runner.capture(CaptureRequest(layout, None, BOTH, 5))
    assert one.response == five.response[:1]
    assert one.source["response"] == (layout.length,)


def test_the_last_written_token_is_computed_as_far_as_its_heads() -> None:
    runner = tiny_runner("llama", DOUBLE)
    with Work(runner._model) as work:
        capture = runner.capture(CaptureRequest(prompt(runner), (HeadId(1, 0),), BOTH, 3))
    assert len(capture.response) == 3
    passes = len(work.tokens)
    assert passes == 4
    assert work.calls["model.layers.1.self_attn.k_proj"] == passes
    assert work.calls["model.layers.1.mlp"] == work.calls["lm_head"] == passes - 1


def test_the_last_tokens_of_mates_are_computed_as_far_as_the_deepest_of_them() -> None:
    runner = tiny_runner("llama", DOUBLE)
    requests = [
        CaptureRequest(prompt(runner), heads, BOTH, 3)
        for heads in ((HeadId(0, 1),), (HeadId(2, 0), HeadId(1, 1)))
    ]
    for capture, request in zip(runner.capture_many(requests), requests, strict=True):
        assert len(capture.response) == 3
        assert_same(capture, runner.capture(request), 1e-12)


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_rows_are_weights_that_sum_to_one_over_what_was_seen(style: Any) -> None:
    runner = tiny_runner("llama", DOUBLE)
    layout = prompt(runner, style=style)
    capture = runner.capture(CaptureRequest(layout, None, BOTH, 3))
    sums = capture.mass["query"].sum(1)
    torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-12, rtol=0)
    # Tokens after the question are invisible to it.
    assert torch.all(capture.mass["query"][:, layout.query.end :] == 0)
    # The rows of the answer also look at the answer, whose columns are left out.
    assert torch.all(capture.mass["response"].sum(1) < 1)


def test_the_query_view_computes_nothing_above_its_deepest_head() -> None:
    runner = tiny_runner("llama", DOUBLE)
    heads = (HeadId(1, 3), HeadId(0, 2))
    with Work(tiny_model("llama", DOUBLE)) as work:
        capture = runner.capture(CaptureRequest(prompt(runner), heads))
    assert work.calls["model.layers.1.self_attn.k_proj"] == 1
    for name in ("layers.1.self_attn.o_proj", "layers.1.mlp", "layers.2", "norm"):
        assert work.calls[f"model.{name}"] == 0
    assert work.calls["lm_head"] == 0
    whole = runner.capture(CaptureRequest(prompt(runner), None, BOTH, 1))
    rows = [ALL.index(head) for head in heads]
    torch.testing.assert_close(capture.mass["query"], whole.mass["query"][rows], atol=1e-12, rtol=0)


def test_chosen_heads_come_in_their_order_and_equal_the_same_rows_of_all() -> None:
    runner = tiny_runner("llama", DOUBLE)
    every = runner.capture(CaptureRequest(prompt(runner), None, BOTH, 3))
    assert every.heads == ALL
    picks = [(HeadId(2, 1),), (HeadId(2, 3), HeadId(0, 1), HeadId(2, 0), HeadId(1, 1)), (HeadId(1, 0),) * 2]
    for heads in picks:
        capture = runner.capture(CaptureRequest(prompt(runner), heads, BOTH, 3))
        assert capture.heads == heads
        for view in BOTH:
            expected = every.mass[view][[ALL.index(head) for head in heads]]
            torch.testing.assert_close(capture.mass[view], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("head", [HeadId(3, 0), HeadId(0, 4), HeadId(-1, 0), HeadId(0, -1)])
def test_a_head_that_is_not_there_is_an_error(head: HeadId) -> None:
    runner = tiny_runner()
    with pytest.raises(InputError, match="3 x 4 heads") as caught:
        runner.capture(CaptureRequest(prompt(runner), (HeadId(0, 0), head)))
    assert caught.value.field == "heads"


@pytest.mark.parametrize("views", [("query",), BOTH])
def test_no_head_at_all_is_an_error(views: tuple[View, ...]) -> None:
    runner = tiny_runner()
    with pytest.raises(InputError, match="at least one") as caught:
        runner.capture(CaptureRequest(prompt(runner), (), views))
    assert caught.value.field == "heads"


@pytest.mark.parametrize("limit", [0, -1])
def test_a_response_of_no_tokens_is_an_error_before_anything_runs(limit: int) -> None:
    runner = tiny_runner()
    request = CaptureRequest(prompt(runner), None, BOTH, limit)
    with Work(tiny_model("llama")) as work, pytest.raises(InputError) as caught:
        runner.capture_many([replace(request, max_new_tokens=1), request])
    assert (caught.value.field, caught.value.limit) == ("max_new_tokens", 1)
    assert not work.tokens
    # The query view writes nothing, so the limit does not matter to it.
    assert runner.capture(replace(request, views=("query",))).response == ()


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_an_empty_query_gives_zeros(dtype: torch.dtype, style: Any) -> None:
    runner = tiny_runner("llama", dtype)
    layout = prompt(runner, query="", style=style)
    capture = runner.capture(CaptureRequest(layout, ALL[:5], BOTH, 2))
    assert torch.equal(capture.mass["query"], torch.zeros(5, layout.length, dtype=dtype))
    assert capture.source["query"] == ()
    assert capture.mass["response"].sum() > 0


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_no_documents_and_empty_ones_are_legal(style: Any) -> None:
    runner = tiny_runner("llama", DOUBLE)
    for documents in ([], [""], ["", "", "Ada"]):
        layout = prompt(runner, documents, style=style)
        capture = runner.capture(CaptureRequest(layout))
        rows, _ = eager_prompt(tiny_model("llama", DOUBLE), layout)
        expected = expected_mean(rows, layout.query, layout.length)
        torch.testing.assert_close(capture.mass["query"], expected, atol=1e-12, rtol=0)


def test_no_prompts_give_no_captures() -> None:
    assert tiny_runner().capture_many([]) == []


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_same_request_gives_the_same_bytes(family: str) -> None:
    runner = tiny_runner(family)
    requests = mixed_requests(runner)[:6]
    runs = [runner.capture_many(requests) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert first.response == second.response
        for view in first.mass:
            assert first.mass[view].numpy().tobytes() == second.mass[view].numpy().tobytes()


def test_masses_are_plain_tensors_on_the_processor() -> None:
    """They travel between processes, so they must not be views into large buffers or carry gradients."""
    capture = tiny_runner().capture(CaptureRequest(prompt(tiny_runner()), None, BOTH, 3))
    assert capture.steps is not None
    for mass in (*capture.mass.values(), capture.steps):
        assert mass.device.type == "cpu"
        assert mass.is_contiguous()
        assert not mass.requires_grad
        assert mass.untyped_storage().nbytes() == mass.numel() * 4


@pytest.mark.parametrize("style", STYLES[:2], ids=str)
def test_half_precision_models_give_float32_rows_near_the_exact_ones(style: Any) -> None:
    exact = tiny_runner("llama", DOUBLE)
    model = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)
    runner = HFRunner(model, tiny_tokenizer(), model_id="half")
    heads = tuple(HeadId(0, h) for h in range(4))
    capture = runner.capture(CaptureRequest(prompt(runner, style=style), heads, BOTH, 2))
    assert capture.mass["query"].dtype == capture.mass["response"].dtype == torch.float32
    assert runner.info.dtype == "bfloat16"
    expected = exact.capture(CaptureRequest(prompt(exact, style=style), heads)).mass["query"]
    torch.testing.assert_close(capture.mass["query"].double(), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("style", STYLES[:2], ids=str)
def test_a_weight_that_is_not_a_number_shows(style: Any) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    runner = HFRunner(model, tiny_tokenizer(), model_id="broken")
    mass = runner.capture(CaptureRequest(prompt(runner, style=style))).mass["query"]
    assert torch.isfinite(mass[:4]).all()
    # Head 4 reads the broken key head; above it nothing is a number.
    assert torch.isnan(mass[4]).all()
    assert torch.isnan(mass[8:]).all()


def test_an_error_inside_a_pass_leaves_nothing_behind() -> None:
    runner, model = tiny_runner("llama", DOUBLE), tiny_model("llama", DOUBLE)
    request = CaptureRequest(prompt(runner), None, BOTH, 2)
    before = runner.capture(request)

    def fail(module: Any, inputs: Any) -> None:
        raise MemoryError

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        runner.capture(request)
    handle.remove()
    assert tap._active.get() is None
    with torch.no_grad(), pytest.raises(UnsupportedModel, match="inside a packed pass only"):
        model(input_ids=torch.tensor([[3, 4]]), use_cache=False)
    assert_same(runner.capture(request), before, 0)


def test_threads_do_not_see_each_other_s_passes() -> None:
    runner = tiny_runner("gemma2", DOUBLE)
    requests = mixed_requests(runner)
    expected = [runner.capture(request) for request in requests]
    wrong: list[BaseException] = []

    def work(turn: int) -> None:
        try:
            for i in range(len(requests)):
                place = (i + 4 * turn) % len(requests)
                assert_same(runner.capture(requests[place]), expected[place], 1e-12)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_decode_leaves_special_tokens_out() -> None:
    runner = tiny_runner()
    ids = tiny_tokenizer()("<|im_start|>Ada 🙂<|im_end|>")["input_ids"]
    assert ids[0] == 1
    assert ids[-1] == 2
    assert runner.decode(ids) == "Ada 🙂"
