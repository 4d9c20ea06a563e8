"""The transformers engine: captures equal eager attention, and what prompts share is computed once."""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headbank.errors import InputError
from headbank.models import hf
from headbank.models.base import Capture
from headbank.models.hf import HFRunner
from headbank.types import HeadId, PromptLayout, Span, View
from tests.support.tiny_models import (
    FAMILIES,
    eager,
    eager_rows,
    tiny_model,
    tiny_runner,
    tiny_tokenizer,
)

BOTH: tuple[View, ...] = ("query", "response")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
DOCUMENTS = ["The lamp was lit by Ada.", "Nobody wrote it 🙂.", "Ada wrote the book in 1843."]
ALL = tuple(HeadId(layer, head) for layer in range(3) for head in range(4))


def prompt(
    runner: HFRunner, documents: Sequence[str] = DOCUMENTS, query: str = "Who wrote it?"
) -> PromptLayout:
    return runner.prompts.build(query, documents)


def expected_mean(rows: list[Tensor], span: Span, n_tokens: int) -> Tensor:
    """Rows of layers [1, H, T, T] -> mean over a span of source rows, [L * H, n_tokens]."""
    return torch.cat([layer[0, :, span.start : span.end, :n_tokens].mean(1) for layer in rows])


def greedy(model: Any, ids: Sequence[int], limit: int) -> tuple[int, ...]:
    """What transformers writes on its own: eager attention, greedy, at least one token, stop tokens left out."""
    prompt_ids = torch.tensor([list(ids)])
    with eager(model), torch.no_grad():
        out = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            do_sample=False,
            max_new_tokens=limit,
            min_new_tokens=1,
            pad_token_id=0,
        )
    written = out[0, len(ids) :].tolist()
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    return tuple(written[:-1] if written[-1] in stops else written)


@pytest.mark.parametrize("family", FAMILIES)
def test_query_view_is_the_mean_of_the_query_rows(family: str) -> None:
    for dtype, tolerance in TOLERANCE.items():
        runner = tiny_runner(family, dtype)
        layout = prompt(runner)
        capture = runner.capture(layout)
        rows, _ = eager_rows(tiny_model(family, dtype), torch.tensor([layout.ids]))
        assert capture.heads == tuple(HeadId(layer, head) for layer in range(len(rows)) for head in range(4))
        assert capture.source == {"query": tuple(range(layout.query.start, layout.query.end))}
        assert set(capture.mass) == {"query"}
        assert capture.response == ()
        assert capture.mass["query"].dtype == dtype
        assert capture.mass["query"].shape == (len(capture.heads), layout.length)
        expected = expected_mean(rows, layout.query, layout.length)
        torch.testing.assert_close(capture.mass["query"], expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_response_view_is_what_the_model_writes_fed_back(family: str) -> None:
    for dtype, tolerance in TOLERANCE.items():
        runner, model = tiny_runner(family, dtype), tiny_model(family, dtype)
        layout = prompt(runner)
        capture = runner.capture(layout, views=BOTH, max_new_tokens=5)
        assert capture.response == greedy(model, layout.ids, 5)
        end = layout.length + len(capture.response)
        assert capture.source["response"] == tuple(range(layout.length, end))
        rows, _ = eager_rows(model, torch.tensor([[*layout.ids, *capture.response]]))
        expected = expected_mean(rows, Span(layout.length, end), layout.length)
        torch.testing.assert_close(capture.mass["response"], expected, atol=tolerance, rtol=0)
        query = expected_mean(rows, layout.query, layout.length)
        torch.testing.assert_close(capture.mass["query"], query, atol=tolerance, rtol=0)


def test_the_response_view_alone_equals_both_views() -> None:
    runner = tiny_runner("llama", torch.float64)
    alone = runner.capture(prompt(runner), views=("response",), max_new_tokens=3)
    both = runner.capture(prompt(runner), views=BOTH, max_new_tokens=3)
    assert set(alone.mass) == set(alone.source) == {"response"}
    assert alone.response == both.response
    assert torch.equal(alone.mass["response"], both.mass["response"])


@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_writing_stops_at_a_stop_token_but_not_before_one_token(stop_after: int) -> None:
    model = copy.deepcopy(tiny_model("llama", torch.float64))
    layout = prompt(tiny_runner("llama", torch.float64))
    free = greedy(model, layout.ids, 5)
    assert len(set(free)) == 5
    model.generation_config.eos_token_id = [2, free[stop_after]]
    runner = HFRunner(model, tiny_tokenizer(), model_id="stops")
    capture = runner.capture(layout, views=BOTH, max_new_tokens=5)
    assert capture.response == greedy(model, layout.ids, 5)
    if stop_after == 0:
        assert capture.response[0] not in (2, free[0])
    else:
        assert capture.response == free[:stop_after]
    ids = torch.tensor([[*layout.ids, *capture.response]])
    span = Span(layout.length, ids.shape[1])
    expected = expected_mean(eager_rows(model, ids)[0], span, layout.length)
    torch.testing.assert_close(capture.mass["response"], expected, atol=1e-12, rtol=0)


def test_one_new_token_is_enough() -> None:
    runner = tiny_runner("llama", torch.float64)
    layout = prompt(runner)
    one = runner.capture(layout, views=BOTH, max_new_tokens=1)
    five = runner.capture(layout, views=BOTH, max_new_tokens=5)
    assert one.response == five.response[:1]
    assert one.source["response"] == (layout.length,)


def test_rows_are_weights_that_sum_to_one_over_what_was_seen() -> None:
    runner = tiny_runner("llama", torch.float64)
    layout = prompt(runner)
    capture = runner.capture(layout, views=BOTH, max_new_tokens=3)
    sums = capture.mass["query"].sum(1)
    torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-12, rtol=0)
    # Tokens after the question are invisible to it.
    assert torch.all(capture.mass["query"][:, layout.query.end :] == 0)
    # The rows of the answer also look at the answer, whose columns are left out.
    assert torch.all(capture.mass["response"].sum(1) < 1)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3_text"])
def test_prefill_steps_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_runner(family, torch.float64)
    whole = runner.capture(prompt(runner), views=BOTH, max_new_tokens=3)
    monkeypatch.setattr(hf, "PREFILL_TOKENS", 7)
    stepped = runner.capture(prompt(runner), views=BOTH, max_new_tokens=3)
    assert_same(stepped, whole, 1e-12)


def assert_same(a: Capture, b: Capture, tolerance: float) -> None:
    assert (a.heads, a.source, a.response) == (b.heads, b.source, b.response)
    assert set(a.mass) == set(b.mass)
    for view in a.mass:
        torch.testing.assert_close(a.mass[view], b.mass[view], atol=tolerance, rtol=0)


def related(runner: HFRunner) -> list[PromptLayout]:
    """Prompts that share much, little, everything, and nothing with the one before."""
    a, b, c = DOCUMENTS
    return [
        prompt(runner, [a, b, c]),
        prompt(runner, [a, b, c]),
        prompt(runner, [a, b]),
        prompt(runner, [a, c, b]),
        prompt(runner, [a, b, c], "Who lit the lamp, and when was the book written?"),
        prompt(runner, [b]),
        prompt(runner, []),
        prompt(runner, [c, b, a]),
        prompt(runner, [c, b, a], ""),
    ]


@pytest.mark.parametrize("views", [("query",), BOTH])
@pytest.mark.parametrize("heads", [None, (HeadId(0, 1),), (HeadId(1, 3), HeadId(0, 0))])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_prompts_in_a_row_equal_prompts_alone(
    dtype: torch.dtype, tolerance: float, heads: tuple[HeadId, ...] | None, views: tuple[View, ...]
) -> None:
    """Also where the pass stops below the top layer, so that upper layers hold less than lower ones."""
    runner = tiny_runner("llama", dtype)
    layouts = related(runner)
    together = runner.capture_many(layouts, heads=heads, views=views, max_new_tokens=3)
    assert len(together) == len(layouts)
    for capture, layout in zip(together, layouts, strict=True):
        alone = runner.capture(layout, heads=heads, views=views, max_new_tokens=3)
        assert_same(capture, alone, tolerance)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "qwen2"])
def test_prompts_in_a_row_equal_prompts_alone_with_sliding_layers(family: str) -> None:
    runner = tiny_runner(family, torch.float64)
    layouts = related(runner)[::-1]
    together = runner.capture_many(layouts, heads=[HeadId(1, 2)], views=BOTH, max_new_tokens=3)
    for capture, layout in zip(together, layouts, strict=True):
        alone = runner.capture(layout, heads=[HeadId(1, 2)], views=BOTH, max_new_tokens=3)
        assert_same(capture, alone, 1e-12)


def test_a_prompt_that_continues_the_last_answer() -> None:
    """The next prompt may begin with everything that was in the cache, the model's own answer included."""
    runner = tiny_runner("llama", torch.float64)
    first = prompt(runner)
    answer = runner.capture(first, views=("response",), max_new_tokens=4).response
    ids = (*first.ids, *answer, *first.ids[-12:])
    longer = PromptLayout(
        ids, first.prefix_end, first.documents, len(ids) - 8, Span(len(ids) - 6, len(ids) - 2)
    )
    for heads in ([HeadId(0, 2)], None):
        options: dict[str, Any] = {"heads": heads, "views": BOTH, "max_new_tokens": 4}
        _, second = runner.capture_many([first, longer], **options)
        assert_same(second, runner.capture(longer, **options), 1e-12)


class Work:
    """Counts calls of modules, and the tokens that are embedded."""

    def __init__(self, model: Any) -> None:
        self.calls: Counter[str] = Counter()
        self.tokens: list[int] = []
        self._handles = [m.register_forward_pre_hook(self._hook(n)) for n, m in model.named_modules() if n]

    def _hook(self, name: str) -> Any:
        def count(module: Any, inputs: Any) -> None:
            self.calls[name] += 1
            if name == "model.embed_tokens":
                self.tokens.append(inputs[0].shape[1])

        return count

    def __enter__(self) -> "Work":
        return self

    def __exit__(self, *reason: object) -> None:
        for handle in self._handles:
            handle.remove()


def test_what_prompts_share_is_computed_once() -> None:
    runner = tiny_runner("llama", torch.float64)
    a, b, c = DOCUMENTS
    layouts = [prompt(runner, [a, b, c]), prompt(runner, [a, b, c]), prompt(runner, [a, c])]
    with Work(tiny_model("llama", torch.float64)) as work:
        runner.capture_many(layouts)
    first, _, third = layouts
    tail = first.length - first.tail_start
    # The third shares the first document and all of the label of its second.
    shared = third.documents[1].start
    assert first.ids[shared] != third.ids[shared]
    assert work.tokens == [first.tail_start, tail, tail, third.tail_start - shared, tail]


def test_the_query_view_computes_nothing_above_its_deepest_head() -> None:
    runner = tiny_runner("llama", torch.float64)
    heads = [HeadId(1, 3), HeadId(0, 2)]
    with Work(tiny_model("llama", torch.float64)) as work:
        capture = runner.capture(prompt(runner), heads=heads)
    assert work.calls["model.layers.1.self_attn.k_proj"] == 2
    for name in ("layers.1.self_attn.o_proj", "layers.1.mlp", "layers.2", "norm"):
        assert work.calls[f"model.{name}"] == 0
    assert work.calls["lm_head"] == 0
    whole = runner.capture(prompt(runner), views=BOTH, max_new_tokens=1)
    rows = [ALL.index(head) for head in heads]
    torch.testing.assert_close(capture.mass["query"], whole.mass["query"][rows], atol=1e-12, rtol=0)


def test_chosen_heads_come_in_their_order_and_equal_the_same_rows_of_all() -> None:
    runner = tiny_runner("llama", torch.float64)
    every = runner.capture(prompt(runner), views=BOTH, max_new_tokens=3)
    assert every.heads == ALL
    picks = [(HeadId(2, 1),), (HeadId(2, 3), HeadId(0, 1), HeadId(2, 0), HeadId(1, 1)), (HeadId(1, 0),) * 2]
    for heads in picks:
        capture = runner.capture(prompt(runner), heads=heads, views=BOTH, max_new_tokens=3)
        assert capture.heads == heads
        for view in BOTH:
            expected = every.mass[view][[ALL.index(head) for head in heads]]
            torch.testing.assert_close(capture.mass[view], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("head", [HeadId(3, 0), HeadId(0, 4), HeadId(-1, 0), HeadId(0, -1)])
def test_a_head_that_is_not_there_is_an_error(head: HeadId) -> None:
    runner = tiny_runner()
    with pytest.raises(InputError, match="3 x 4 heads") as caught:
        runner.capture(prompt(runner), heads=[HeadId(0, 0), head])
    assert caught.value.field == "heads"


@pytest.mark.parametrize("views", [("query",), BOTH])
def test_no_head_at_all_is_an_error(views: tuple[View, ...]) -> None:
    runner = tiny_runner()
    with pytest.raises(InputError, match="at least one") as caught:
        runner.capture(prompt(runner), heads=[], views=views)
    assert caught.value.field == "heads"


@pytest.mark.parametrize("limit", [0, -1])
def test_a_response_of_no_tokens_is_an_error_before_anything_runs(limit: int) -> None:
    runner = tiny_runner()
    with Work(tiny_model("llama")) as work, pytest.raises(InputError) as caught:
        runner.capture(prompt(runner), views=BOTH, max_new_tokens=limit)
    assert (caught.value.field, caught.value.limit) == ("max_new_tokens", 1)
    assert not work.tokens
    # The query view writes nothing, so the limit does not matter to it.
    assert runner.capture(prompt(runner), max_new_tokens=limit).response == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_empty_query_gives_zeros(dtype: torch.dtype) -> None:
    runner = tiny_runner("llama", dtype)
    layout = prompt(runner, query="")
    capture = runner.capture(layout, heads=ALL[:5], views=BOTH, max_new_tokens=2)
    assert torch.equal(capture.mass["query"], torch.zeros(5, layout.length, dtype=dtype))
    assert capture.source["query"] == ()
    assert capture.mass["response"].sum() > 0


def test_no_documents_are_legal() -> None:
    runner = tiny_runner("llama", torch.float64)
    layout = prompt(runner, [])
    capture = runner.capture(layout)
    rows, _ = eager_rows(tiny_model("llama", torch.float64), torch.tensor([layout.ids]))
    expected = expected_mean(rows, layout.query, layout.length)
    torch.testing.assert_close(capture.mass["query"], expected, atol=1e-12, rtol=0)


def test_no_prompts_give_no_captures() -> None:
    assert tiny_runner().capture_many([]) == []


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_same_request_gives_the_same_bytes(family: str) -> None:
    runner = tiny_runner(family)
    layouts = related(runner)[:4]
    runs = [runner.capture_many(layouts, views=BOTH, max_new_tokens=3) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert first.response == second.response
        for view in BOTH:
            assert first.mass[view].numpy().tobytes() == second.mass[view].numpy().tobytes()


def test_masses_are_plain_tensors_on_the_processor() -> None:
    """They travel between processes, so they must not be views into large buffers or carry gradients."""
    mass = tiny_runner().capture(prompt(tiny_runner())).mass["query"]
    assert mass.device.type == "cpu"
    assert mass.is_contiguous()
    assert not mass.requires_grad
    assert mass.untyped_storage().nbytes() == mass.numel() * 4


def test_half_precision_models_give_float32_rows_near_the_exact_ones() -> None:
    exact = tiny_runner("llama", torch.float64)
    model = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)
    runner = HFRunner(model, tiny_tokenizer(), model_id="half")
    capture = runner.capture(prompt(runner), heads=[HeadId(0, h) for h in range(4)])
    assert capture.mass["query"].dtype == torch.float32
    assert runner.info.dtype == "bfloat16"
    expected = exact.capture(prompt(exact)).mass["query"][:4]
    torch.testing.assert_close(capture.mass["query"].double(), expected, atol=0.02, rtol=0)


def test_decode_leaves_special_tokens_out() -> None:
    runner = tiny_runner()
    ids = tiny_tokenizer()("<|im_start|>Ada 🙂<|im_end|>")["input_ids"]
    assert ids[0] == 1
    assert ids[-1] == 2
    assert runner.decode(ids) == "Ada 🙂"
