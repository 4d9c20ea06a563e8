"""The dump of a ranking, recomputed with nothing of this project's forward pass and vote."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headbank.errors import InputError, InputTooLong
from headbank.jobs.dump import dump_ranking
from headbank.models.hf import HFRunner
from headbank.rerankers.heads import HeadReranker
from headbank.types import JOINT, Aggregation, PromptStyle, RankOptions, View
from tests.rerankers.helpers import BARE, DOCUMENTS, PARALLEL, QUERY, VOTERS, fitted, small_runner
from tests.support import oracles
from tests.support.banks import bank_of_sets
from tests.support.recompute import Dump, attentions, masses
from tests.support.tiny_models import tiny_runner


def dump_of(
    runner: HFRunner,
    path: Path,
    options: RankOptions,
    style: PromptStyle = JOINT,
    weighted: bool = True,
    documents: tuple[str, ...] = (*DOCUMENTS, "", DOCUMENTS[0]),
) -> Dump:
    """The file of one request, whose order and scores are those of the reranker."""
    heads = fitted(view=options.view, style=style, weighted=weighted)
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [heads]))
    dump_ranking(reranker, QUERY, documents, options, path)
    with np.load(path) as file:
        dump = {name: file[name] for name in file.files}
    ranking = reranker.rank(QUERY, documents, options)
    assert tuple(dump["scores"]) == ranking.scores
    assert tuple(dump["order"]) == ranking.order
    return dump


def lengths(dump: Dump) -> np.ndarray[Any, Any]:
    return np.asarray(dump["spans"][:, 1] - dump["spans"][:, 0])


@pytest.mark.parametrize("view", ["query", "response"])
@pytest.mark.parametrize("style", [JOINT, PARALLEL, BARE], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_evidence_can_be_recomputed(tmp_path: Path, family: str, style: PromptStyle, view: View) -> None:
    runner = tiny_runner(family)
    dump = dump_of(runner, tmp_path / "vote.npz", RankOptions(view), style, weighted=family != "gemma2")
    if family != "llama":
        assert 0 < len(dump["heads"]) < len(VOTERS)
    mass, reference = masses(runner._model, dump)
    np.testing.assert_allclose(mass, dump["mass"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(reference, dump["reference"], atol=1e-5, rtol=0)
    assert str(dump["aggregation"]) == "evidence"
    odds = np.log(np.maximum(mass, 1e-9)) - dump["exponent"] * np.log(np.maximum(lengths(dump), 1))
    odds -= np.log(reference)[:, None]
    z = dump["weights"] @ ((odds - dump["z_mean"][:, None]) / dump["z_std"][:, None])
    np.testing.assert_allclose(z, dump["raw_scores"], atol=1e-3, rtol=0)
    a, b = dump["platt"]
    np.testing.assert_allclose(1 / (1 + np.exp(-a * z - b)), dump["scores"], atol=1e-3)
    assert tuple(dump["order"]) == tuple(oracles.by_score(dump["raw_scores"].tolist()))
    written = len(dump["ids"]) - int(dump["prompt_tokens"])
    asked = len(runner._tokenizer(QUERY)["input_ids"])
    assert (len(dump["source"]), written > 0) == ((written, True) if view == "response" else (asked, False))


@pytest.mark.parametrize("rule", ["borda", "share", "rrf"])
@pytest.mark.parametrize("style", [JOINT, PARALLEL], ids=str)
def test_votes_can_be_recomputed(tmp_path: Path, style: PromptStyle, rule: Aggregation) -> None:
    runner = tiny_runner("llama")
    documents = (*DOCUMENTS, "A short one.")
    dump = dump_of(runner, tmp_path / "vote.npz", RankOptions(aggregation=rule), style, documents=documents)
    assert str(dump["aggregation"]) == rule
    mass, _ = masses(runner._model, dump)
    means = (np.array(mass) / lengths(dump)).tolist()
    expected = {"borda": oracles.borda, "share": oracles.share, "rrf": lambda m: oracles.rrf(m, 60)}[rule]
    np.testing.assert_allclose(expected(means), dump["scores"], atol=1e-5, rtol=0)
    assert not {"raw_scores", "z_mean", "null_ids"} & set(dump)


@pytest.mark.parametrize("style", [JOINT, PARALLEL, BARE], ids=str)
def test_calibrated_can_be_recomputed(tmp_path: Path, style: PromptStyle) -> None:
    runner = tiny_runner("llama")
    dump = dump_of(runner, tmp_path / "vote.npz", RankOptions(aggregation="calibrated"), style)
    pair = []
    for prefix in ("", "null_"):
        rows = attentions(runner._model, dump, prefix)
        source = dump[prefix + "source"]
        means = torch.stack([rows[layer][head, source].mean(0) for layer, head in dump["heads"]])
        total = means.sum(0).numpy()
        pair.append([total[start:end] for start, end in dump[prefix + "spans"]])
    expected = []
    for asked, null in zip(*pair, strict=True):
        token = asked - null
        if len(token) > 1:
            token = token[token >= token.mean() - 2 * token.std(ddof=1)]
        expected.append(token.sum())
    np.testing.assert_allclose(expected, dump["scores"], atol=1e-5, rtol=0)


def test_more_than_one_prompt_and_no_documents_are_refused(tmp_path: Path) -> None:
    runner = small_runner(320)
    reranker = HeadReranker(runner, bank_of_sets(runner.info, [fitted()]))
    path = tmp_path / "vote.npz"
    with pytest.raises(InputTooLong, match="one prompt of 320 tokens"):
        dump_ranking(reranker, QUERY, DOCUMENTS * 8, RankOptions(), path)
    with pytest.raises(InputError, match=r"^documents: must not be empty"):
        dump_ranking(reranker, QUERY, (), RankOptions(), path)
    assert not path.exists()
