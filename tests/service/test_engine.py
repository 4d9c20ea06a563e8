"""What lives in the child process, in this process."""

import sys
from types import SimpleNamespace

import pytest

from headbank import bank as banks
from headbank.errors import ModelError, NonFiniteScore
from headbank.models.fake import FAKE_HEAD_SETS, FakeRunner
from headbank.types import Ranking, RankOptions
from service.engine import Job, RerankEngine, answer, load_engine
from service.settings import Settings
from tests.service.engines import INFO


def job(method):
    return Job("id", method, "q", ("a",), RankOptions())


class Fixed:
    name = "fixed"

    def __init__(self, *scores):
        self._scores = scores

    def rank(self, query, documents, options):
        return Ranking(self._scores, tuple(range(len(self._scores))), "heads")


def test_real_models_are_loaded_as_the_settings_say(monkeypatch, tmp_path):
    asked = []

    def load_runner(model, **options):
        asked.append((model, options))
        return FakeRunner()

    stub = SimpleNamespace(load_runner=load_runner, default_device=lambda: "cuda")
    monkeypatch.setitem(sys.modules, "headbank.models.loading", stub)
    banks.write(banks.Bank(FakeRunner().info, "joint", {s.name: s for s in FAKE_HEAD_SETS}, {}, {}), tmp_path)
    settings = Settings(model="some/model", bank=tmp_path, dtype="bfloat16", device="auto", threads=3)
    engine = load_engine(settings)
    assert asked == [("some/model", {"dtype": "bfloat16", "device": "auto", "threads": 3})]
    assert engine.info.device == "gpu"
    assert [s.name for s in engine.info.head_sets] == ["expert.query", "expert.response"]
    assert load_engine(settings.model_copy(update={"device": "cpu"})).info.device == "cpu"


def test_response_tokens_reach_the_model(monkeypatch):
    seen = []
    capture = FakeRunner.capture

    def watched(self, layout, **options):
        seen.append(options["max_new_tokens"])
        return capture(self, layout, **options)

    monkeypatch.setattr(FakeRunner, "capture", watched)
    load_engine(Settings(model="fake", response_tokens=5, warm_up=False))
    assert seen == []
    load_engine(Settings(model="fake", response_tokens=5))
    assert seen == [5, 5]


def test_warm_up_warns_when_the_known_answer_is_not_first(monkeypatch, caplog):
    load_engine(Settings(model="fake"))
    assert caplog.text == ""
    monkeypatch.setattr("service.engine._EXAMPLE_QUERY", "Bananas grow where?")
    load_engine(Settings(model="fake"))
    assert "view query ranks document 2 of the warm-up example first, not 1" in caplog.text
    assert "view response" in caplog.text


def test_dense_is_loaded_once_at_first_use():
    loads = []

    def load():
        loads.append(1)
        return Fixed(0.25)

    engine = RerankEngine(INFO, {"heads": Fixed(0.75)}, load)
    assert engine.rank(job("heads")).scores == (0.75,)
    assert loads == []
    assert [engine.rank(job("dense")).scores for _ in range(3)] == [(0.25,)] * 3
    assert loads == [1]


def test_dense_that_cannot_be_loaded_fails_its_requests_only_and_fast(monkeypatch):
    loads = []

    def load():
        loads.append(1)
        raise ModelError("the embedding model cannot be loaded")

    engine = RerankEngine(INFO, {"heads": Fixed(0.75)}, load)
    for _ in range(3):
        with pytest.raises(ModelError, match="cannot be loaded"):
            engine.rank(job("dense"))
    assert loads == [1]
    assert engine.rank(job("heads")).scores == (0.75,)
    monkeypatch.setattr("service.engine.DENSE_RETRY_S", 0.0)
    with pytest.raises(ModelError):
        engine.rank(job("dense"))
    assert loads == [1, 1]


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_score_that_is_no_number_is_an_error(score):
    result = answer(RerankEngine(INFO, {"heads": Fixed(0.5, score)}, lambda: None), job("heads"))
    assert isinstance(result, NonFiniteScore)
