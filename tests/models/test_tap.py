"""The tap by itself: the row formula, the reducers, chunking, and the early stop."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headbank.errors import UnsupportedModel
from headbank.models import tap
from headbank.models.tap import RowStore, Tap, TokenMass, attention_rows, tapped_attention, tapping
from tests.support.tiny_models import FAMILIES, eager_rows, random_ids, tiny_model

B, H, K, T, D = 2, 6, 2, 7, 4


def states(n_new: int = T) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(B, H, n_new, D, generator=generator, dtype=torch.float64) * 2
    key = torch.randn(B, K, T, D, generator=generator, dtype=torch.float64) * 2
    return query, key


def one_row(
    query: Tensor,
    key: Tensor,
    *,
    mate: int,
    head: int,
    key_head: int,
    row: int,
    bend: Callable[[Tensor], Tensor] = lambda scores: scores,
) -> Tensor:
    """A causal softmax row written out, one dot product at a time. [T]"""
    position = row + T - query.shape[2]
    scores = torch.stack(
        [0.3 * (query[mate, head, row] * key[mate, key_head, j]).sum() for j in range(position + 1)]
    )
    weights = torch.exp(bend(scores))
    return torch.cat([weights / weights.sum(), torch.zeros(T - position - 1, dtype=torch.float64)])


@pytest.mark.parametrize("n_new", [T, 3, 1])
def test_causal_rows(n_new: int) -> None:
    query, key = states(n_new)
    heads = torch.tensor([5, 0, 2])
    source = torch.tensor([[0, n_new - 1], [n_new - 1, n_new - 1]])
    rows = attention_rows(query, key, None, heads=heads, source=source, scaling=0.3)
    assert rows.shape == (B, 3, 2, T)
    for mate in range(B):
        for place, head in enumerate([5, 0, 2]):
            for s in range(2):
                expected = one_row(
                    query, key, mate=mate, head=head, key_head=head // 3, row=int(source[mate, s])
                )
                torch.testing.assert_close(rows[mate, place, s], expected, atol=1e-14, rtol=0)


def test_head_h_reads_the_keys_of_its_group() -> None:
    """Six heads on two key heads: 0-2 read key head 0 and 3-5 read key head 1, not in turn."""
    query, key = states()
    rows = attention_rows(
        query, key, None, heads=torch.arange(H), source=torch.full((B, 1), T - 1), scaling=0.3
    )
    for head in range(H):
        grouped = one_row(query, key, mate=0, head=head, key_head=head // 3, row=T - 1)
        in_turn = one_row(query, key, mate=0, head=head, key_head=head % 2, row=T - 1)
        torch.testing.assert_close(rows[0, head, 0], grouped, atol=1e-14, rtol=0)
        if head // 3 != head % 2:
            assert (rows[0, head, 0] - in_turn).abs().max() > 0.05


def test_soft_cap() -> None:
    query, key = states()
    source = torch.full((B, 1), T - 1)
    rows = attention_rows(query, key, None, heads=torch.tensor([4]), source=source, scaling=0.3, softcap=0.7)
    expected = one_row(
        query, key, mate=1, head=4, key_head=1, row=T - 1, bend=lambda s: 0.7 * torch.tanh(s / 0.7)
    )
    torch.testing.assert_close(rows[1, 0, 0], expected, atol=1e-14, rtol=0)


def test_masks_bool_additive_and_per_head() -> None:
    query, key = states()
    heads, source = torch.tensor([1, 3]), torch.tensor([[2, 6], [6, 5]])
    options: dict[str, Any] = {"heads": heads, "source": source, "scaling": 0.3}
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    seen = causal.expand(B, 1, T, T).clone()
    seen[1, :, :, :2] = False
    additive = torch.zeros(B, 1, T, T, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)

    plain = attention_rows(query, key, None, **options)
    torch.testing.assert_close(
        attention_rows(query, key, causal[None, None], **options), plain, atol=0, rtol=0
    )

    rows = attention_rows(query, key, seen, **options)
    torch.testing.assert_close(rows[0], plain[0], atol=0, rtol=0)
    assert torch.all(rows[1, :, :, :2] == 0)
    left = plain[1, :, :, 2:]
    torch.testing.assert_close(rows[1, :, :, 2:], left / left.sum(-1, keepdim=True), atol=1e-14, rtol=0)
    torch.testing.assert_close(attention_rows(query, key, additive, **options), rows, atol=1e-14, rtol=0)

    per_head = seen.expand(B, H, T, T).clone()
    per_head[:, 3] = causal
    mixed = attention_rows(query, key, per_head, **options)
    torch.testing.assert_close(mixed[:, 0], rows[:, 0], atol=0, rtol=0)
    torch.testing.assert_close(mixed[:, 1], plain[:, 1], atol=0, rtol=0)


def test_a_mask_wider_than_the_keys_is_cut() -> None:
    query, key = states()
    options: dict[str, Any] = {"heads": torch.tensor([0]), "source": torch.tensor([[6], [6]]), "scaling": 0.3}
    wide = torch.ones(1, 1, T, T + 5, dtype=torch.bool).tril()
    plain = attention_rows(query, key, None, **options)
    torch.testing.assert_close(attention_rows(query, key, wide, **options), plain, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_float32_even_for_half_precision_states(dtype: torch.dtype) -> None:
    query, key = (state.to(dtype) for state in states())
    options: dict[str, Any] = {
        "heads": torch.tensor([0, 5]),
        "source": torch.tensor([[6], [3]]),
        "scaling": 0.3,
    }
    rows = attention_rows(query, key, None, **options)
    assert rows.dtype == torch.float32
    exact = attention_rows(query.double(), key.double(), None, **options)
    # The products are taken in float32: no error of the size of the half-precision step (4e-3).
    torch.testing.assert_close(rows.double(), exact, atol=1e-6, rtol=0)


def test_token_mass_sums_chunks_and_drops_later_columns() -> None:
    rows = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    total, store = TokenMass(n_tokens=3), RowStore()
    for reducer in (total, store):
        reducer.add(1, rows[:, :, :3])
        reducer.add(1, rows[:, :, 3:])
        reducer.add(0, rows[:, :, :1])
    torch.testing.assert_close(total.totals[1], rows.sum(2)[..., :3], atol=0, rtol=0)
    torch.testing.assert_close(total.totals[0], rows[:, :, 0, :3], atol=0, rtol=0)
    torch.testing.assert_close(store.rows(1), rows, atol=0, rtol=0)


@pytest.mark.parametrize("room", [1, 40 * 4, 40 * 4 * 2 + 1, 1 << 25])
def test_rows_come_in_chunks_of_bounded_size(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Spy(TokenMass):
        def add(self, layer: int, rows: Tensor) -> None:
            sizes.append(rows.numel())
            super().add(layer, rows)

    monkeypatch.setattr(tap, "_MAX_ROW_ELEMENTS", room)
    model, ids = tiny_model("llama"), random_ids(1, 40)
    spy, source = Spy(40), torch.arange(30, 37)
    with torch.no_grad(), tapping(Tap({1: torch.arange(4)}, source, spy)):
        model(input_ids=ids, use_cache=False)
    row = 4 * 40
    assert max(sizes) <= max(room, row)
    assert len(sizes) == -(-7 // max(1, room // row))
    reference, _ = eager_rows(model, ids)
    torch.testing.assert_close(spy.totals[1], reference[1][:, :, 30:37].sum(2), atol=1e-5, rtol=0)


class Calls:
    """Counts which parts of a model run."""

    def __init__(self, model: Any) -> None:
        self.seen: Counter[str] = Counter()
        self._handles = [
            module.register_forward_pre_hook(self._counter(name))
            for name, module in model.named_modules()
            if name
        ]

    def _counter(self, name: str) -> Callable[..., None]:
        def count(module: Any, inputs: Any) -> None:
            self.seen[name] += 1

        return count

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


@pytest.mark.parametrize("stop_at", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_runs_after_the_queries_and_keys_of_the_last_layer(family: str, stop_at: int) -> None:
    model, ids = tiny_model(family), random_ids(1, 40)
    projection = "qkv_proj" if family == "phi3" else "k_proj"
    source = torch.tensor([0, 20, 39])
    heads = {layer: torch.tensor([0, 3]) for layer in range(stop_at + 1)}
    whole, short = RowStore(), RowStore()
    with torch.no_grad(), tapping(Tap(heads, source, whole)):
        model(input_ids=ids, use_cache=False)
    calls = Calls(model)
    reached_the_end = False
    try:
        with torch.no_grad(), tapping(Tap(heads, source, short, stop_at=stop_at)):
            model(input_ids=ids, use_cache=False)
            reached_the_end = True
    finally:
        calls.close()
    assert not reached_the_end
    for layer in range(model.config.num_hidden_layers):
        begins, ends = (1 if layer <= stop_at else 0), (1 if layer < stop_at else 0)
        name = f"model.layers.{layer}"
        counts = {
            part: calls.seen[f"{name}.{part}"]
            for part in (f"self_attn.{projection}", "self_attn.o_proj", "mlp")
        }
        assert counts == {f"self_attn.{projection}": begins, "self_attn.o_proj": ends, "mlp": ends}, name
    assert calls.seen["model.norm"] == calls.seen["lm_head"] == 0
    assert set(short.chunks) == set(heads)
    for layer in heads:
        assert torch.equal(short.rows(layer), whole.rows(layer))


def test_a_pass_may_stop_without_reading() -> None:
    model, store = tiny_model("llama"), RowStore()
    calls = Calls(model)
    with torch.no_grad(), tapping(Tap({}, torch.tensor([], dtype=torch.long), store, stop_at=1)):
        model(input_ids=random_ids(1, 9), use_cache=False)
    calls.close()
    assert not store.chunks
    assert calls.seen["model.layers.1.self_attn.k_proj"] == 1
    assert calls.seen["model.layers.2"] == 0


def test_the_tap_is_off_outside_its_block() -> None:
    model, ids, store = tiny_model("llama"), random_ids(1, 9), RowStore()
    with torch.no_grad():
        with tapping(Tap({0: torch.tensor([0])}, torch.tensor([8]), store, stop_at=0)):
            model(input_ids=ids, use_cache=False)
        with pytest.raises(ZeroDivisionError), tapping(Tap({0: torch.tensor([0])}, torch.tensor([8]), store)):
            raise ZeroDivisionError
        out = model(input_ids=ids, use_cache=False)
    assert out.logits.shape == (1, 9, 512)
    assert len(store.chunks[0]) == 1


def test_the_model_answers_the_same_after_a_stopped_pass() -> None:
    """A stopped pass leaves no state behind, also where outputs were being collected."""
    model, ids = tiny_model("llama"), random_ids(1, 9)
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False, output_hidden_states=True)
        with tapping(Tap({}, torch.tensor([0]), RowStore(), stop_at=1)):
            model(input_ids=ids, use_cache=False, output_hidden_states=True)
        after = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    assert len(after.hidden_states) == len(before.hidden_states) == 4
    assert torch.equal(after.logits, before.logits)


def test_attention_sinks_are_refused() -> None:
    query, key = states()
    with pytest.raises(UnsupportedModel, match="attention sinks"):
        tapped_attention(torch.nn.Module(), query, key, key, None, scaling=0.3, s_aux=torch.zeros(H))
