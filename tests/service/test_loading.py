"""From settings to an engine: which options reach the model, how much of it is loaded, the warm-up."""

import copy
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from headbank import bank as banks
from headbank.errors import BankMismatch, InputError
from headbank.models.fake import FAKE_HEAD_SETS, FakeRunner
from headbank.types import Fusion, HeadId, HeadSet, PromptStyle, RankOptions
from service.loading import load_engine
from service.methods import deepest_layer
from service.settings import Settings
from tests.support.banks import bank_of_sets


def fake_bank(root, sets=FAKE_HEAD_SETS, **changes):
    """Writes the fake model's bank; gives its folder."""
    return banks.write(bank_of_sets(replace(FakeRunner().info, **changes), sets), root)


@pytest.fixture
def asked(monkeypatch):
    """Options with which models are asked for; the fake model is what comes, a model of 4 layers."""
    options = []

    def load_runner(model, **given):
        options.append((model, given))
        if given["max_layers"] is not None and given["max_layers"] > 4:
            raise InputError("max_layers", "must be from 1 to 4, the layers of this model", 4)
        return FakeRunner()

    stub = SimpleNamespace(load_runner=load_runner, default_device=lambda: "cuda")
    monkeypatch.setitem(sys.modules, "headbank.models.loading", stub)
    return options


def test_real_models_are_loaded_as_the_settings_say(asked, tmp_path):
    fake_bank(tmp_path)
    settings = Settings(
        model="some/model",
        bank=tmp_path,
        dtype="bfloat16",
        device="auto",
        threads=3,
        document_cache_bytes=7,
        host_cache_bytes=5,
    )
    engine = load_engine(settings)
    options = {"dtype": "bfloat16", "device": "auto", "threads": 3, "cache_bytes": 7, "host_cache_bytes": 5}
    assert asked == [("some/model", options | {"max_layers": None})]
    assert engine.info.device == "gpu"
    assert engine.info.defaults == {"query": "expert.query.joint", "response": "expert.response.joint"}
    assert [s.name for s in engine.info.head_sets] == [
        "expert.query.joint",
        "expert.query.parallel",
        "expert.response.joint",
        "expert.response.parallel",
    ]
    assert load_engine(settings.model_copy(update={"device": "cpu"})).info.device == "cpu"


def layers_asked(asked, **settings):
    load_engine(Settings(views="query", warm_up=False, **settings))
    return [options["max_layers"] for _, options in asked]


def test_query_view_alone_loads_the_layers_that_its_heads_need(asked, tmp_path):
    # The fake's heads are in layer 2, the third. The folder of banks has one that goes by the model's name.
    fake_bank(tmp_path, model_id="mine")
    assert layers_asked(asked, model="some/Mine", bank=tmp_path) == [3]
    assert layers_asked(asked, model="/folder/Mine.gguf", bank=tmp_path) == [3, 3]
    # Or the bank itself is named.
    assert layers_asked(asked, model="another", bank=tmp_path / "mine") == [3, 3, 3]


def test_whole_model_is_loaded_where_no_bank_goes_by_its_name(asked, tmp_path, caplog):
    fake_bank(tmp_path, model_id="other")
    assert layers_asked(asked, model="mine", bank=tmp_path) == [None]
    assert "all layers are loaded" in caplog.text


def test_bank_of_a_deeper_model_is_refused_as_a_bank_of_another_model(asked, tmp_path):
    deep = replace(FAKE_HEAD_SETS[0], heads=(HeadId(8, 0),))
    fake_bank(tmp_path, [deep], n_layers=9)
    with pytest.raises(BankMismatch, match="n_layers is 4, the bank has 9"):
        layers_asked(asked, model="fake-deep", bank=tmp_path / "fake")


def test_deepest_layer_counts_what_votes_and_nothing_else():
    def heads(name, layer):
        detector, view, layout = name.split(".")
        return HeadSet(
            name, detector, view, (HeadId(0, 0), HeadId(layer, 1)), "borda", PromptStyle(layout),
            z_mean=(0.0,) * 2, z_std=(1.0,) * 2,
        )  # fmt: skip

    sets = [heads("expert.query.joint", 1), heads("qr.query.joint", 3), heads("expert.response.joint", 3)]
    bank = bank_of_sets(FakeRunner().info, sets)
    assert deepest_layer(bank, "query") == 1
    assert deepest_layer(bank, "response") == 3
    # In another layout, and beside other voters.
    other = replace(bank, head_sets=bank.head_sets | {"x": heads("expert.query.parallel", 2)})
    assert deepest_layer(other, "query") == 2
    fusion = Fusion("fusion.query.joint", "qr.query.joint", (), "", (0.0,), (1.0,), (1.0,), (1.0, 0.0))
    assert deepest_layer(replace(bank, fusions={fusion.name: fusion}), "query") == 3
    assert deepest_layer(replace(bank, defaults={}), "query") is None


def test_a_real_model_of_which_only_the_needed_layers_are_loaded_ranks_as_the_whole(tmp_path):
    from headbank.models.loading import load_runner
    from service.engine import Job
    from tests.support.banks import bank_of
    from tests.support.tiny_models import tiny_model, tiny_tokenizer

    folder = tmp_path / "Tiny-Llama"
    copy.deepcopy(tiny_model("llama")).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    info = load_runner(str(folder), dtype="float32", device="cpu").info
    styles = (PromptStyle("parallel"), PromptStyle("joint"))
    banks.write(bank_of(info, (HeadId(0, 1), HeadId(1, 2)), styles=styles), tmp_path / "banks")
    rankings = []
    for views in ("both", "query"):
        settings = Settings(
            model=str(folder),
            bank=tmp_path / "banks",
            dtype="float32",
            device="cpu",
            views=views,
            warm_up=False,
        )
        engine = load_engine(settings)
        options = RankOptions(aggregation="share")
        results = engine.rank_many(
            [Job("id", "heads", "Which is it?", ("This one.", "That.", "No."), options)] * 2
        )
        assert results[0].scores == pytest.approx(results[1].scores, abs=1e-6)
        rankings.append(results[0])
        assert (engine.cache.documents, engine.cache.hits, engine.cache.misses) == (4, 0, 3)
        engine.rank_many([Job("id", "heads", "And now?", ("This one.", "That.", "Never."), options)])
        # The prefix and two documents.
        assert (engine.cache.documents, engine.cache.hits, engine.cache.misses) == (5, 2, 4)
        assert engine.cache.device_bytes > 0
    assert rankings[0].scores == pytest.approx(rankings[1].scores, abs=1e-6)
    assert engine.info.methods == ("heads", "bm25", "dense")
    assert engine.info.defaults == {"query": "expert.query.parallel"}


def test_response_tokens_reach_the_model(monkeypatch, tmp_path):
    seen = []
    capture = FakeRunner.capture

    def watched(self, request):
        if "response" in request.views:
            seen.append(request.max_new_tokens)
        return capture(self, request)

    monkeypatch.setattr(FakeRunner, "capture", watched)
    load_engine(Settings(model="fake", response_tokens=5, warm_up=False))
    assert seen == []
    load_engine(Settings(model="fake", response_tokens=5))
    assert seen == [5]
    # Unset: what the heads were calibrated with.
    fake_bank(tmp_path, [replace(heads, response_tokens=9) for heads in FAKE_HEAD_SETS])
    load_engine(Settings(model="fake", bank=tmp_path))
    assert seen == [5, 9]


def test_warm_up_warns_when_the_known_answer_is_not_first(monkeypatch, caplog):
    load_engine(Settings(model="fake"))
    assert caplog.text == ""
    monkeypatch.setattr("service.loading._EXAMPLE_QUERY", "Bananas grow where?")
    load_engine(Settings(model="fake"))
    assert "view query ranks document 2 of the warm-up example first, not 1" in caplog.text
    assert "view response" in caplog.text


def test_default_method_that_the_bank_does_not_serve_is_refused_at_the_start():
    with pytest.raises(InputError) as refused:
        load_engine(Settings(model="fake", default_method="fusion"))
    assert (
        str(refused.value)
        == "default_method: the head bank does not serve it, only heads, icr, llm, bm25, dense"
    )


def test_what_is_served_of_the_query_view_alone():
    info = load_engine(Settings(model="fake", views="query")).info
    assert info.methods == ("heads", "bm25", "dense")
    assert info.defaults == {"query": "expert.query.parallel"}
    assert {heads.view for heads in info.head_sets} == {"query"}
