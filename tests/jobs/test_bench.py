"""The bench: whose turn it is, what is divided by what, and who sits out."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headbank.errors import InputError, InputTooLong, NonFiniteScore
from headbank.jobs.bench import BenchConfig, bench, calls, make_texts, spread
from headbank.jobs.bench_contestants import (
    CONTESTANTS,
    Case,
    Contestant,
    Outcome,
    Prepared,
    Skip,
    open_stage,
    spread_heads,
)
from headbank.models.fake import FakeRunner
from headbank.models.tap import ATTENTION_NAME
from headbank.types import HeadId
from tests.jobs.bench_cases import HEADS, small, stage_of
from tests.support.tiny_models import tiny_runner


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
