"""The tap by itself: the row formula, chunking, the early stop, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headbank.errors import UnsupportedModel
from headbank.models import tap
from headbank.models.arch import layer_windows
from headbank.models.packed import KeptRows, Node, Pass, Read, TokenMass
from headbank.models.tap import attention_rows, tapped_attention, tapping
from tests.support.tiny_models import FAMILIES, Work, eager_rows, random_ids, tiny_model

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
    chosen, source = [5, 0, 2], [n_new - 1, 0, n_new - 1]
    rows = attention_rows(
        query, key, None, heads=torch.tensor(chosen), source=torch.tensor(source), scaling=0.3
    )
    assert rows.shape == (B, 3, 3, T)
    for mate in range(B):
        for place, head in enumerate(chosen):
            for s, row in enumerate(source):
                expected = one_row(query, key, mate=mate, head=head, key_head=head // 3, row=row)
                torch.testing.assert_close(rows[mate, place, s], expected, atol=1e-14, rtol=0)


def test_head_h_reads_the_keys_of_its_group() -> None:
    """Six heads on two key heads: 0-2 read key head 0 and 3-5 read key head 1, not in turn."""
    query, key = states()
    rows = attention_rows(query, key, None, heads=torch.arange(H), source=torch.tensor([T - 1]), scaling=0.3)
    for head in range(H):
        grouped = one_row(query, key, mate=0, head=head, key_head=head // 3, row=T - 1)
        in_turn = one_row(query, key, mate=0, head=head, key_head=head % 2, row=T - 1)
        torch.testing.assert_close(rows[0, head, 0], grouped, atol=1e-14, rtol=0)
        if head // 3 != head % 2:
            assert (rows[0, head, 0] - in_turn).abs().max() > 0.05


def test_soft_cap() -> None:
    query, key = states()
    rows = attention_rows(
        query, key, None, heads=torch.tensor([4]), source=torch.tensor([T - 1]), scaling=0.3, softcap=0.7
    )
    expected = one_row(
        query, key, mate=1, head=4, key_head=1, row=T - 1, bend=lambda s: 0.7 * torch.tanh(s / 0.7)
    )
    torch.testing.assert_close(rows[1, 0, 0], expected, atol=1e-14, rtol=0)


def test_a_mask_hides_keys_and_the_others_share_their_weight() -> None:
    query, key = states(3)
    options: dict[str, Any] = {"heads": torch.tensor([1, 3]), "source": torch.tensor([0, 2]), "scaling": 0.3}
    plain = attention_rows(query, key, None, **options)
    causal = torch.ones(3, T, dtype=torch.bool).tril(T - 3)
    torch.testing.assert_close(attention_rows(query, key, causal, **options), plain, atol=0, rtol=0)

    mask = causal.clone()
    mask[2, :2] = False
    rows = attention_rows(query, key, mask, **options)
    torch.testing.assert_close(rows[:, :, 0], plain[:, :, 0], atol=0, rtol=0)
    assert torch.all(rows[:, :, 1, :2] == 0)
    left = plain[:, :, 1, 2:]
    torch.testing.assert_close(rows[:, :, 1, 2:], left / left.sum(-1, keepdim=True), atol=1e-14, rtol=0)


def test_a_key_after_the_query_in_the_row_is_seen_where_the_mask_says_so() -> None:
    """Rows are in the order of the context, positions need not be."""
    query, key = states(2)
    mask = torch.ones(2, T, dtype=torch.bool)
    rows = attention_rows(query, key, mask, heads=torch.tensor([0]), source=torch.tensor([0]), scaling=0.3)
    weights = torch.exp(0.3 * (query[0, 0, 0] * key[0, 0]).sum(-1))
    torch.testing.assert_close(rows[0, 0, 0], weights / weights.sum(), atol=1e-14, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_float32_even_for_half_precision_states(dtype: torch.dtype) -> None:
    query, key = (state.to(dtype) for state in states())
    options: dict[str, Any] = {"heads": torch.tensor([0, 5]), "source": torch.tensor([6, 3]), "scaling": 0.3}
    rows = attention_rows(query, key, None, **options)
    assert rows.dtype == torch.float32
    exact = attention_rows(query.double(), key.double(), None, **options)
    # The products are taken in float32: no error of the size of the half-precision step (4e-3).
    torch.testing.assert_close(rows.double(), exact, atol=1e-6, rtol=0)


def run(model: Any, nodes: list[Node], stop_at: int | None = None) -> bool:
    """One pass over nodes; whether the model came to its end."""
    packed = Pass(nodes, [], stop_at, model.device)
    with torch.no_grad(), tapping(packed, layer_windows(model.config)):
        model(input_ids=packed.tokens, position_ids=packed.positions, use_cache=False)
        return True
    return False


def whole(ids: Tensor, read: Read | None = None) -> list[Node]:
    return [Node(tuple(ids[0].tolist()), 0, read=read)]


@pytest.mark.parametrize("room", [1, 40 * 4, 40 * 4 * 2 + 1, 1 << 25])
def test_rows_come_in_chunks_of_bounded_size(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Spy(TokenMass):
        def add(self, layer: int, rows: Tensor) -> None:
            sizes.append(rows.numel())
            super().add(layer, rows)

    monkeypatch.setattr(tap, "_MAX_ROW_ELEMENTS", room)
    model, ids = tiny_model("llama"), random_ids(1, 40)
    spy = Spy(40)
    run(model, whole(ids, Read({1: torch.arange(4)}, torch.arange(30, 37), spy)))
    row = 4 * 40
    assert max(sizes) <= max(room, row)
    assert len(sizes) == -(-7 // max(1, room // row))
    reference, _ = eager_rows(model, ids)
    torch.testing.assert_close(spy.totals[1], reference[1][0, :, 30:37].sum(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_rows_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the output of soft-capped layers is computed in chunks."""
    model, ids = tiny_model(family, torch.float64), random_ids(1, 40)
    layers = range(model.config.num_hidden_layers)
    source = torch.tensor([0, 1, 11, 12, 26, 39])
    found = [KeptRows(), KeptRows()]
    for kept, rows_at_once in zip(found, (40, 4), strict=True):
        # Four heads, forty keys: the last chunk of six rows is short.
        monkeypatch.setattr(tap, "_MAX_ROW_ELEMENTS", 4 * 40 * rows_at_once + 7)
        run(model, whole(ids, Read({layer: torch.arange(4) for layer in layers}, source, kept)))
    for layer in layers:
        assert [len(kept.chunks[layer]) for kept in found] == [1, 2]
        torch.testing.assert_close(found[1].rows(layer), found[0].rows(layer), atol=1e-12, rtol=0)


@pytest.mark.parametrize("stop_at", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_runs_after_the_queries_and_keys_of_the_last_layer(family: str, stop_at: int) -> None:
    model, ids = tiny_model(family), random_ids(1, 40)
    projection = "qkv_proj" if family == "phi3" else "k_proj"
    heads = {layer: torch.tensor([0, 3]) for layer in range(stop_at + 1)}
    source = torch.tensor([0, 20, 39])
    long, short = KeptRows(), KeptRows()
    assert run(model, whole(ids, Read(heads, source, long)))
    with Work(model) as work:
        assert not run(model, whole(ids, Read(heads, source, short)), stop_at)
    for layer in range(model.config.num_hidden_layers):
        begins, ends = (1 if layer <= stop_at else 0), (1 if layer < stop_at else 0)
        name = f"model.layers.{layer}"
        counts = {
            part: work.calls[f"{name}.{part}"]
            for part in (f"self_attn.{projection}", "self_attn.o_proj", "mlp")
        }
        assert counts == {f"self_attn.{projection}": begins, "self_attn.o_proj": ends, "mlp": ends}, name
    assert work.calls["model.norm"] == work.calls["lm_head"] == 0
    assert set(short.chunks) == set(heads)
    for layer in heads:
        assert torch.equal(short.rows(layer), long.rows(layer))


def test_the_last_layer_computes_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[int] = []
    honest = tap._sdpa

    def spy(query: Tensor, *rest: Any) -> Tensor:
        outputs.append(query.shape[2])
        return honest(query, *rest)

    monkeypatch.setattr(tap, "_sdpa", spy)
    run(
        tiny_model("llama"),
        whole(random_ids(1, 9), Read({2: torch.tensor([0])}, torch.tensor([8]), KeptRows())),
        2,
    )
    assert outputs == [9, 9]


def test_a_pass_may_stop_without_reading() -> None:
    model = tiny_model("llama")
    with Work(model) as work:
        assert not run(model, whole(random_ids(1, 9)), 1)
    assert work.calls["model.layers.1.self_attn.k_proj"] == 1
    assert work.calls["model.layers.2"] == 0


def test_the_model_answers_the_same_after_a_stopped_pass() -> None:
    """A stopped pass leaves no state behind, also where outputs were being collected."""
    model, ids = tiny_model("llama"), random_ids(1, 9)
    packed = Pass(whole(ids), [], 1, model.device)
    before, _ = eager_rows(model, ids, output_hidden_states=True)
    with torch.no_grad(), tapping(packed, (None,) * 3):
        model(input_ids=ids, use_cache=False, output_hidden_states=True)
    after, _ = eager_rows(model, ids, output_hidden_states=True)
    assert len(after) == len(before) == 3
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_the_tap_is_active_inside_its_block_only() -> None:
    model, ids = tiny_model("llama"), random_ids(1, 9)
    run(model, whole(ids), 0)
    assert tap._active.get() is None
    with pytest.raises(ZeroDivisionError), tapping(Pass(whole(ids), [], None, model.device), (None,) * 3):
        assert tap._active.get() is not None
        raise ZeroDivisionError
    assert tap._active.get() is None
    with torch.no_grad(), pytest.raises(UnsupportedModel, match="inside a packed pass only"):
        model(input_ids=ids, use_cache=False)


@pytest.mark.parametrize(
    ("mask", "extra", "message"),
    [
        (None, {"s_aux": torch.zeros(H)}, "attention sinks"),
        (torch.zeros(B, 1, T, T), {}, "mask of the model's own"),
    ],
)
def test_what_the_formula_does_not_cover_is_refused(
    mask: Tensor | None, extra: dict[str, Tensor], message: str
) -> None:
    query, key = states()
    with pytest.raises(UnsupportedModel, match=message):
        tapped_attention(torch.nn.Module(), query, key, key, mask, scaling=0.3, **extra)
