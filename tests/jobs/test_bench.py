"""The bench: whose turn it is, what is divided by what, who sits out, and that contestants do what they claim."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headbank.errors import InputError, InputTooLong, NonFiniteScore
from headbank.jobs.bench import BenchConfig, bench, calls, make_texts, spread
from headbank.jobs.bench_contestants import (
    CONTESTANTS,
    PARALLEL,
    Case,
    Contestant,
    Outcome,
    Prepared,
    Skip,
    Stage,
    kept_bytes,
    layer_bytes,
    open_stage,
    spread_heads,
)
from headbank.models.base import CaptureRequest
from headbank.models.baseline import PLAIN_ATTENTION
from headbank.models.fake import FakeRunner
from headbank.models.packed import Pass
from headbank.models.tap import ATTENTION_NAME
from headbank.types import JOINT, HeadId, PromptStyle
from tests.support.tiny_models import FAMILIES, eager_rows, tiny_runner

HEADS = (HeadId(0, 1), HeadId(1, 3))


def stage_of(family: str = "llama", max_bytes: int = 1 << 30) -> Stage:
    return open_stage(tiny_runner(family), HEADS, response_tokens=3, max_bytes=max_bytes)


def small(*documents: int, **changes: Any) -> BenchConfig:
    return BenchConfig(documents, **{"document_tokens": 10, "query_tokens": 5, "rounds": 2, **changes})


def a_case(stage: Stage, n: int = 4) -> Case:
    documents, queries = make_texts(stage.runner.prompts, small(n))
    return Case(stage, queries[0], tuple(documents))


def run(name: str, case: Case) -> Outcome:
    contestant = CONTESTANTS[name]
    prepared = contestant.prepare(case)
    with case.stage.plain.attention(contestant.attention):
        return prepared.run()


class Script:
    """Contestants whose calls take the seconds they are told to, by a clock of their own."""

    def __init__(self, seconds: dict[str, Callable[[int, int], float]]) -> None:
        """Seconds are a function of D and of the turn, 0 for the warm-up."""
        self.now = 0.0
        self.log: list[tuple[str, int, str]] = []
        self.turns: dict[tuple[str, int], int] = {}
        self.contestants = {name: Contestant(self._prepare(name, f)) for name, f in seconds.items()}

    def clock(self) -> float:
        return self.now

    def _prepare(self, name: str, seconds: Callable[[int, int], float]) -> Callable[[Case], Prepared]:
        def prepare(case: Case) -> Prepared:
            n = len(case.documents)
            self.now += 1000.0  # What is done before the call must not count.

            def call() -> Outcome:
                turn = self.turns.get((name, n), 0)
                self.turns[name, n] = turn + 1
                self.log.append((name, n, case.query))
                self.now += seconds(n, turn)
                return Outcome(torch.zeros(n))

            return Prepared(call)

        return prepare

    def bench(self, config: BenchConfig) -> Any:
        return bench(stage_of(), config, contestants=self.contestants, clock=self.clock)


def test_contestants_take_turns_with_a_new_query_in_every_round() -> None:
    script = Script({"floor": lambda n, turn: 1.0, "eager": lambda n, turn: 1.0})
    script.bench(small(3, 2, 3, contestants=("floor", "eager")))
    one_round = [("floor", 2), ("eager", 2), ("floor", 3), ("eager", 3)]
    assert [(name, n) for name, n, _ in script.log] == one_round * 3
    queries = [query for _, _, query in script.log]
    assert [len(set(queries[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1]
    assert len(set(queries)) == 3


def test_every_turn_is_announced() -> None:
    script = Script({"floor": lambda n, turn: 1.0, "eager": lambda n, turn: 100.0 * n})
    config = small(1, 2, 3, contestants=("floor", "eager"), max_seconds_per_call=150.0)
    announced: list[int] = []
    bench(
        stage_of(),
        config,
        contestants=script.contestants,
        clock=script.clock,
        on_call=lambda: announced.append(1),
    )
    assert len(announced) == calls(config) == 18


def test_ratios_are_taken_within_rounds_so_that_a_slow_machine_cancels() -> None:
    drift = [9.0, 1.0, 10.0, 3.0]  # the warm-up, then three rounds
    times = {
        "floor": lambda n, turn: 2.0 * drift[turn],
        "heads_joint_cold": lambda n, turn: 2.5 * drift[turn],
        "heads_parallel_cold": lambda n, turn: 2.0 * drift[turn],
        "heads_parallel_warm": lambda n, turn: 0.5 * drift[turn],
        "icr": lambda n, turn: (2.5, 5.0, 7.5, 10.0)[turn] * drift[turn],
    }
    case = Script(times).bench(small(4, rounds=3, contestants=tuple(times))).cases[0]
    # The warm-up is no value.
    assert case.seconds["floor"] == [2.0, 20.0, 6.0]
    ratios = case.ratios()
    assert ratios["tap_overhead"] == pytest.approx({"median": 0.25, "low": 0.25, "high": 0.25})
    # 2, 3 and 4 round by round, where the ratio of the medians would be 20 / 7.5.
    assert ratios["icr / heads_joint_cold"] == pytest.approx({"median": 3.0, "low": 2.5, "high": 3.5})
    assert ratios["heads_parallel_cold / heads_parallel_warm"]["median"] == pytest.approx(4.0)
    assert set(ratios) == {
        "tap_overhead",
        "icr / heads_joint_cold",
        "icr / heads_parallel_cold",
        "icr / heads_parallel_warm",
        "heads_parallel_cold / heads_parallel_warm",
    }


def test_growth_is_that_from_100_to_1000_documents() -> None:
    seconds = {"floor": lambda n, turn: n * (turn + 1.0), "pointwise": lambda n, turn: n**2 / 100}
    config = small(100, 1000, rounds=2, contestants=("floor", "pointwise"), document_tokens=1)
    result = Script(seconds).bench(config)
    assert result.growth()["floor"]["median"] == pytest.approx(10.0)
    assert result.growth()["pointwise"]["median"] == pytest.approx(100.0)
    without = Script(seconds).bench(small(5, 100, contestants=("floor",), document_tokens=1))
    assert without.growth() == {}
    assert without.to_json()["growth"] == {"1000 / 100": {}}


def test_spread_is_the_median_and_the_quartiles() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 9.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}


def test_a_contestant_that_would_take_too_long_sits_out_with_a_reason() -> None:
    script = Script({"floor": lambda n, turn: 1.0, "eager": lambda n, turn: 10.0 * n})
    config = small(2, 4, 8, contestants=("floor", "eager"), max_seconds_per_call=45.0)
    first, second, third = script.bench(config).cases
    assert set(first.seconds) == set(second.seconds) == {"floor", "eager"}
    assert third.skipped == {"eager": "a call would take 80 s or more, the limit is 45 s"}
    assert set(third.seconds) == {"floor"}
    assert ("eager", 8) not in [(name, n) for name, n, _ in script.log]
    assert third.to_json()["skipped"] == third.skipped


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Skip("no room"), "no room"),
        (InputTooLong("documents", "take 9 tokens", 8), "documents: take 9 tokens"),
        (torch.OutOfMemoryError("CUDA out of memory"), "the device's memory is too small"),
    ],
)
def test_a_contestant_that_cannot_do_a_case_sits_it_out(error: Exception, reason: str) -> None:
    def refuse(case: Case) -> Prepared:
        raise error

    script = Script({"floor": lambda n, turn: 1.0})
    contestants = {**script.contestants, "icr": Contestant(refuse)}
    result = bench(
        stage_of(), small(2, contestants=("icr", "floor")), contestants=contestants, clock=script.clock
    )
    assert result.cases[0].skipped == {"icr": reason}
    assert result.cases[0].seconds == {"floor": [1.0, 1.0]}


def test_broken_scores_are_refused_and_the_tap_is_put_back() -> None:
    stage = stage_of()

    def broken(case: Case) -> Prepared:
        return Prepared(lambda: Outcome(torch.tensor([1.0, float("nan")])))

    with pytest.raises(NonFiniteScore, match="eager"):
        bench(stage, small(2, contestants=("eager",)), contestants={"eager": Contestant(broken, "eager")})
    with pytest.raises(ZeroDivisionError), stage.plain.attention("eager"):
        assert stage.runner._model.config._attn_implementation == "eager"
        raise ZeroDivisionError
    assert stage.runner._model.config._attn_implementation == ATTENTION_NAME


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"contestants": ("floor", "nobody")}, "contestants"),
        ({"contestants": ()}, "contestants"),
        ({"documents": ()}, "documents"),
        ({"documents": (3, 0)}, "documents"),
        ({"rounds": 0}, "rounds"),
        ({"document_tokens": 0}, "document_tokens"),
        ({"query_tokens": 0}, "query_tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        bench(stage_of(), BenchConfig(**{"documents": (2,), **changes}))
    assert caught.value.field == field


def test_a_stage_needs_weights_and_heads_that_exist() -> None:
    for runner, heads, field in (
        (FakeRunner(), HEADS, "model"),
        (tiny_runner(), (), "heads"),
        (tiny_runner(), (HeadId(3, 0),), "heads"),
        (tiny_runner(), (HeadId(0, 4),), "heads"),
    ):
        with pytest.raises(InputError) as caught:
            open_stage(runner, heads, response_tokens=3, max_bytes=1)
        assert caught.value.field == field


def test_heads_are_spread_up_to_two_thirds_of_the_layers() -> None:
    shape = SimpleNamespace(n_layers=30, n_heads=9)
    heads = spread_heads(shape)  # type: ignore[arg-type]
    assert [head.layer for head in heads] == [3, 7, 11, 15, 19]
    assert [head.layer for head in spread_heads(shape, 29)] == [5, 11, 17, 23, 29]  # type: ignore[arg-type]
    # One layer of two heads has no five.
    assert spread_heads(SimpleNamespace(n_layers=1, n_heads=2)) == (HeadId(0, 0), HeadId(0, 1))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="deepest"):
        spread_heads(shape, 30)  # type: ignore[arg-type]


def test_texts_are_those_of_the_seed_and_as_long_as_asked() -> None:
    prompts = tiny_runner().prompts
    documents, queries = make_texts(prompts, small(60, document_tokens=40, query_tokens=7))
    assert make_texts(prompts, small(60, document_tokens=40, query_tokens=7)) == (documents, queries)
    assert make_texts(prompts, small(60, document_tokens=40, query_tokens=7, seed=1)) != (documents, queries)
    layout = prompts.build(queries[0], documents[:20])
    assert abs(layout.query.length - 7) <= 2 and len(queries) == 3
    lengths = [len(prompts.offsets(text, 1000)) for text in documents]
    assert len(documents) == 60 and 18 <= min(lengths) < 25 and 55 < max(lengths) <= 62


def test_every_contestant_has_a_time_a_finite_score_and_no_reason() -> None:
    result = bench(stage_of(), small(2, 3))
    content = result.to_json()
    for case, n in zip(content["results"], (2, 3), strict=True):
        assert case["documents"] == n
        assert set(case["seconds"]) == set(CONTESTANTS) and case["skipped"] == {}
        assert len(case["ratios"]) == 14
        # n documents in each of two rounds.
        assert case["cache"] == {"hits": 2 * n, "misses": 0}
        assert 1 <= case["response_tokens"] <= 3
    for case in result.cases:
        for name, outcomes in case.outcomes.items():
            assert len(outcomes) == len(case.seconds[name]) == 2
            for outcome in outcomes:
                assert outcome.scores.shape == (0 if name == "floor" else case.documents,)
                assert bool(outcome.scores.isfinite().all())


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
