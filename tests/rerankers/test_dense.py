"""The dense baseline on a planted model, and on a small real one."""

import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headbank.data.demo import load_demo
from headbank.errors import InputTooLong, ModelError, NonFiniteScore
from headbank.models.catalogue import is_finished, models_dir
from headbank.rerankers import dense
from headbank.rerankers.base import Reranker
from headbank.rerankers.dense import BGE_INSTRUCTION, Dense, default_instruction
from headbank.types import RankOptions

VECTORS = {"north": (0.0, 1.0), "east": (1.0, 0.0), "south": (0.0, -1.0), "void": (math.nan, 0.0)}


class WordTokenizer:
    """One token a word, two special tokens a text."""

    model_max_length = 50

    def num_special_tokens_to_add(self) -> int:
        return 2

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[tuple[int, int]]]]:
        assert options["truncation"] is False and options["add_special_tokens"] is False
        return {"offset_mapping": [[m.span() for m in re.finditer(r"\S+", text)] for text in texts]}


class PlantedModel:
    """Stands in for `SentenceTransformer`: a text's vector is that of its last word."""

    def __init__(self, place: str = "", **options: Any) -> None:
        self.place, self.options = place, options
        self.prompts: dict[str, str] = {}
        self.max_seq_length: int | None = 6
        self.tokenizer = WordTokenizer()
        self.seen: list[tuple[str, list[str]]] = []

    def _encode(self, texts: list[str], prompt: str) -> npt.NDArray[np.float32]:
        self.seen.append((prompt, texts))
        words = [(text.split() or ["east"])[-1] for text in texts]
        return np.array([VECTORS[word] for word in words], np.float32)

    def encode_query(self, texts: list[str], prompt: str, **_: Any) -> npt.NDArray[np.float32]:
        return self._encode(texts, prompt)

    def encode_document(self, texts: list[str], prompt: str, **_: Any) -> npt.NDArray[np.float32]:
        return self._encode(texts, prompt)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> PlantedModel:
    planted = PlantedModel()
    monkeypatch.setattr(dense, "_load", lambda model, device, local_files_only: planted)
    return planted


def test_scores_are_shifted_cosines(model: PlantedModel) -> None:
    method: Reranker = Dense("any")
    ranking = method.rank("go north", ["south", "go east", "north", ""], RankOptions())
    assert ranking.scores == (0.0, 0.5, 1.0, 0.5)
    assert ranking.order == (2, 1, 3, 0)
    assert ranking.method == method.name == "dense"
    assert ranking.input_tokens == (2 + 2) + (1 + 2) + (2 + 2) + (1 + 2) + (0 + 2)
    assert ranking.cut == ()
    assert set(ranking.seconds) == {"tokenise", "forward", "vote"}


def test_no_documents(model: PlantedModel) -> None:
    ranking = Dense("any").rank("north", [], RankOptions())
    assert (ranking.scores, ranking.order, model.seen) == ((), (), [])


def test_long_documents_are_cut_at_the_end_and_reported(model: PlantedModel) -> None:
    documents = ["a b c north east", "a b c north", "north"]
    ranking = Dense("any").rank("north", documents, RankOptions())
    assert ranking.cut == (0,)  # 6 tokens, two of them special
    assert ranking.scores == (1.0, 1.0, 1.0)
    assert ranking.input_tokens == (1 + 2) + (4 + 2) + (4 + 2) + (1 + 2)

    ranking = Dense("any").rank("north", ["north east", "east"], RankOptions(max_tokens_per_doc=1))
    assert (ranking.cut, ranking.scores) == ((0,), (1.0, 0.5))


def test_prompts_count_towards_the_length(model: PlantedModel) -> None:
    model.prompts = {"query": "find this: ", "passage": "text: "}
    ranking = Dense("any").rank("go north", ["a b north east", "a b north"], RankOptions())
    assert ranking.cut == (0,)
    assert model.seen == [("find this: ", ["go north"]), ("text: ", ["a b north ", "a b north"])]
    with pytest.raises(InputTooLong) as caught:
        Dense("any").rank("now go north", ["north"], RankOptions())
    assert (caught.value.field, caught.value.limit) == ("query", 4)
    assert "north" not in str(caught.value)


def test_a_model_without_a_length_of_its_own(model: PlantedModel) -> None:
    model.max_seq_length = None
    documents = [" ".join(["a"] * n + ["north"]) for n in (47, 48)]
    assert Dense("any").rank("north", documents[:1], RankOptions()).cut == ()
    with pytest.raises(KeyError):  # cut to 48 words, the last of which has no vector
        Dense("any").rank("north", documents[1:], RankOptions())


def test_equal_documents_are_embedded_once(model: PlantedModel) -> None:
    ranking = Dense("any").rank("north", ["east", "north", "east"], RankOptions())
    assert model.seen[1] == ("", ["east", "north"])
    assert ranking.order == (1, 0, 2)


def test_a_score_that_is_not_a_number_is_an_error(model: PlantedModel) -> None:
    with pytest.raises(NonFiniteScore):
        Dense("any").rank("north", ["void"], RankOptions())


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("bge-base", BGE_INSTRUCTION),
        ("BAAI/bge-base-en-v1.5", BGE_INSTRUCTION),
        ("/models/bge-small-en/", BGE_INSTRUCTION),
        ("BAAI/bge-base-zh-v1.5", None),
        ("BAAI/bge-m3", None),
        ("all-minilm-l6-v2", None),
    ],
)
def test_the_instruction_goes_with_the_name(name: str, instruction: str | None) -> None:
    assert default_instruction(name) == instruction


@pytest.mark.parametrize(("given", "used"), [(None, BGE_INSTRUCTION), ("", ""), ("query: ", "query: ")])
def test_the_instruction_goes_before_the_query_only(
    model: PlantedModel, given: str | None, used: str
) -> None:
    model.max_seq_length = 100
    Dense("bge-base", query_instruction=given).rank("north", ["east"], RankOptions())
    assert model.seen == [(used, ["north"]), ("", ["east"])]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[PlantedModel]:
    module = ModuleType("sentence_transformers")
    module.SentenceTransformer = PlantedModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    return PlantedModel


def test_a_local_folder_is_loaded_without_foreign_code(library: type[PlantedModel], tmp_path: Path) -> None:
    loaded = Dense(str(tmp_path), device="cpu")._model
    assert loaded.place == str(tmp_path)
    assert loaded.options == {
        "device": "cpu",
        "local_files_only": True,
        "trust_remote_code": False,
        "model_kwargs": {"use_safetensors": True},
    }


def test_a_hub_id_in_the_cache_needs_no_network(
    library: type[PlantedModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRANK_MODELS_DIR", str(tmp_path))
    loaded = Dense("bge-base")._model
    assert loaded.place == "BAAI/bge-base-en-v1.5"
    assert loaded.options["local_files_only"] is True


def test_a_missing_model_says_how_to_get_one(
    library: type[PlantedModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[str] = []

    class Missing:
        def __init__(self, place: str, **options: Any) -> None:
            tried.append("local" if options.get("local_files_only") else "hub")
            raise OSError("no such model")

    def unreachable(repo_id: str) -> None:
        raise ModelError(f"{repo_id}: no route\nto the hub")

    monkeypatch.setenv("HEADRANK_MODELS_DIR", str(tmp_path))
    monkeypatch.setattr(sys.modules["sentence_transformers"], "SentenceTransformer", Missing)
    monkeypatch.setattr(dense, "require_on_hub", unreachable)
    with pytest.raises(ModelError) as caught:
        Dense()
    message = str(caught.value)
    assert "no route)" in message
    assert "`headrank pull all-minilm-l6-v2`" in message and "`--dense-model all-minilm-l6-v2`" in message
    assert tried == ["local"]  # the slow way was not taken
    with pytest.raises(ModelError, match="OSError: no such model"):
        Dense(str(tmp_path))
    tried.clear()
    with pytest.raises(ModelError, match="OSError: no such model"):
        Dense(local_files_only=True)
    assert tried == ["local"]


@pytest.mark.real
def test_a_real_model_finds_the_demo_evidence() -> None:
    if not is_finished(models_dir() / "all-minilm-l6-v2"):
        pytest.skip("all-minilm-l6-v2 is not here: headrank pull all-minilm-l6-v2")
    method = Dense("all-minilm-l6-v2", device="cpu")
    lookup, chain, comparison = (method.rank(q.query, q.documents, RankOptions()) for q in load_demo())
    assert lookup.order[0] == 3
    assert chain.order[0] == 5
    assert comparison.order[0] == 0
    assert lookup.cut == ()

    long = method.rank("battery", ["word " * 400, "word " * 200, "battery life"], RankOptions())
    assert long.cut == (0,)
    assert long.order[0] == 2
    assert long.input_tokens == 3 + 256 + 202 + 4
