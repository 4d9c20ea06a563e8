"""The commands, end to end on the fake engine: files in, tables and JSON out, errors in one line."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from headbank.cli import app, main
from headbank.cli.rerank import print_ranking, shared_ranks
from headbank.data.demo import load_demo
from headbank.data.requests import RankRequest
from headbank.errors import BankError, DataError, HeadRankError, InputError
from headbank.types import AGGREGATIONS, LAYOUTS, HeadId, HeadVote, Ranking
from tests.cli.commands import run

QUERY = "Where does the falcon nest?"
DOCUMENTS = [
    "Rivers carry cold water to the sea.",
    "The falcon nests on the granite tower.",
    "Bread is baked in the morning.",
]


@pytest.mark.parametrize("method", ["heads", "bm25", "icr", "llm"])
def test_rerank_lines_of_standard_input(method: str) -> None:
    out = run(
        "rerank", "-q", QUERY, "--model", "fake", "--method", method, "--json", stdin="\n".join(DOCUMENTS)
    )
    answer = json.loads(out)
    assert answer["method"] == method
    assert answer["results"][0]["index"] == 1
    assert answer["results"][0]["document"]["text"] == DOCUMENTS[1]
    assert sorted(r["index"] for r in answer["results"]) == [0, 1, 2]


def test_rerank_documents_as_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(json.dumps({"title": "T", "text": text}) for text in DOCUMENTS))
    answer = json.loads(run("rerank", str(path), "-q", QUERY, "--model", "fake", "--json", "--top-n", "1"))
    assert [r["index"] for r in answer["results"]] == [1]
    assert answer["results"][0]["document"]["text"] == f"T\n{DOCUMENTS[1]}"


def test_rerank_whole_requests(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    requests = [{"query": QUERY, "documents": DOCUMENTS}, {"query": QUERY, "documents": DOCUMENTS[::-1]}]
    path.write_text("\n".join(map(json.dumps, requests)))
    lines = run("rerank", str(path), "--model", "fake", "--json").splitlines()
    assert [json.loads(line)["results"][0]["index"] for line in lines] == [1, 1]


def test_rerank_table_shows_votes_and_evidence() -> None:
    out = run("rerank", "-q", QUERY, "--model", "fake", "--explain", stdin="\n".join(DOCUMENTS))
    assert "L2H1" in out
    assert "granite" in out


def test_rerank_prints_documents_that_look_like_markup() -> None:
    out = run("rerank", "-q", "falcon [bold]", "--model", "fake", stdin="a [red]falcon[/red] [/]\nb\n")
    assert "[red]falcon[/red] [/]" in out
    assert "falcon [bold]  [heads, " in out


def test_a_byte_order_mark_is_no_part_of_the_first_document(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text("\ufeff" + json.dumps({"text": DOCUMENTS[1]}))
    from_file = json.loads(run("rerank", str(path), "-q", QUERY, "--model", "fake", "--json"))
    from_pipe = json.loads(run("rerank", "-q", QUERY, "--model", "fake", "--json", stdin=path.read_text()))
    assert [a["results"][0]["document"]["text"] for a in (from_file, from_pipe)] == [DOCUMENTS[1]] * 2


def test_rerank_dump_has_the_documented_arrays(tmp_path: Path) -> None:
    path = tmp_path / "vote.npz"
    run("rerank", "-q", QUERY, "--model", "fake", "--dump", str(path), stdin="\n".join(DOCUMENTS))
    with np.load(path) as dump:
        assert {"ids", "prompt_tokens", "spans", "source", "heads", "mass", "scores"} <= set(dump.files)
        assert dump["spans"].shape == (3, 2)
        assert dump["mass"].shape == (1, 3)
        assert dump["order"][0] == 1


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rerank_by_every_rule_in_both_layouts(aggregation: str, layout: str) -> None:
    arguments = ["--aggregation", aggregation, "--layout", layout, "--json"]
    answer = json.loads(run("rerank", "-q", QUERY, "--model", "fake", *arguments, stdin="\n".join(DOCUMENTS)))
    assert answer["results"][0]["index"] == 1
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    if aggregation == "evidence":
        raw = answer["raw_scores"]
        # The fake bank's scale is the sigmoid itself.
        assert scores == pytest.approx([1 / (1 + math.exp(-raw[r["index"]])) for r in answer["results"]])
    else:
        assert answer["raw_scores"] is None


def test_the_layout_is_the_prompts() -> None:
    tokens = {
        layout: json.loads(run("rerank", "-q", QUERY, "--model", "fake", "--layout", layout, "--json",
                               stdin="\n".join(DOCUMENTS)))["input_tokens"]
        for layout in LAYOUTS
    }  # fmt: skip
    # "Document 1 :" against "Document :", three times.
    assert tokens["joint"] - tokens["parallel"] == 3


def test_raw_scores_are_in_the_order_of_the_documents() -> None:
    out = run(
        "rerank", "-q", "falcon", "--method", "bm25", "--json", "--top-n", "1", stdin="\n".join(DOCUMENTS)
    )
    answer = json.loads(out)
    assert [score > 0 for score in answer["raw_scores"]] == [False, True, False]
    assert len(answer["results"]) == 1


def test_fusion_needs_a_bank_that_has_one() -> None:
    with pytest.raises(BankError, match=r"the bank has no fusion\.query\.joint"):
        run("rerank", "-q", "x", "--model", "fake", "--method", "fusion", stdin="a\n")


def test_tied_documents_share_the_mean_of_their_ranks() -> None:
    vote = HeadVote(HeadId(0, 0), (), (0.2, 0.5, 0.2, 0.9, 0.2, 0.5), (5, 2, 4, 1, 6, 3))
    assert shared_ranks(vote) == [5.0, 2.5, 5.0, 1.0, 5.0, 2.5]
    assert shared_ranks(HeadVote(HeadId(0, 0), (), (0.1, 0.3, 0.2), (3, 1, 2))) == [3, 1, 2]


def test_copies_of_a_document_have_one_rank() -> None:
    stdin = "\n".join([DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[0]])
    arguments = ["rerank", "-q", QUERY, "--model", "fake", "--explain"]
    answer = json.loads(run(*arguments, "--json", stdin=stdin))
    assert answer["votes"][0]["ranks"] == [2.5, 1, 2.5]
    assert run(*arguments, stdin=stdin).count(" 2.5 ") == 2


def test_a_large_panel_shows_the_heads_that_count_most(capsys: pytest.CaptureFixture[str]) -> None:
    votes = tuple(HeadVote(HeadId(layer, 0), (1.0, 2.0), (1.0, 2.0), (2, 1)) for layer in range(20))
    ranking = Ranking((0.1, 0.9), (1, 0), "heads", votes=votes)
    print_ranking(Console(width=200), ranking, RankRequest("q", ("a", "b")), None)
    out = capsys.readouterr().out
    assert "rank by head: L0H0 L1H0 L2H0 L3H0 L4H0 L5H0 L6H0 L7H0 and 12 more" in out
    assert "L8H0" not in out


def test_demo_ranks_by_the_banks_defaults() -> None:
    out = run("demo", "--model", "fake")
    assert "answer documents ranked first, on fake by attention heads alone" in out
    assert out.count("rank by head: L2H1") == len(load_demo())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["rerank", "-q", "x", "--view", "both"], "view: must be one of query, response"),
        (
            ["rerank", "-q", "x", "--aggregation", "mean"],
            "aggregation: must be one of borda, rrf, share, evidence, calibrated",
        ),
        (
            ["rerank", "-q", "x", "--method", "magic"],
            "method: must be one of heads, fusion, icr, llm, bm25, dense",
        ),
        (["rerank", "-q", "x", "--layout", "both"], "layout: must be one of joint, parallel"),
        (
            ["rerank", "-q", "x", "--method", "icr", "--view", "response"],
            "view: the method icr has the query view",
        ),
        (["rerank"], "query: is needed"),
        (["rerank", "-q", "x", "--method", "bm25", "--dump", "x.npz"], "dump: needs the method heads"),
        (["evaluate", "--data", "no", "--methods", "x"], "methods: must name at least one"),
        (["evaluate", "--data", "no", "--json", "no/folder/x.json"], "json: must name a file in a folder"),
        (
            ["rerank", "-q", "x", "--model", "fake", "--dump", "no/x.npz"],
            "dump: must name a file in a folder",
        ),
    ],
)
def test_bad_input_names_the_field(arguments: list[str], error: str) -> None:
    with pytest.raises((InputError, DataError)) as caught:
        CliRunner().invoke(app, arguments, input="a document\n", catch_exceptions=False)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    "line", ["{not json", '{"text": 3}', '{"title": "no text"}', '{"text":' + "[" * 100_000]
)
def test_bad_lines_are_named_by_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + line)
    with pytest.raises(DataError) as caught:
        run("rerank", str(path), "-q", QUERY, "--model", "fake")
    assert "line 2" in str(caught.value)
    assert "not json" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "query", "error"),
    [
        ("a\n", "", "query: must not be empty"),
        ("a\n", " ", "query: must not be empty"),
        ("", "x", "documents: must not be empty"),
        ("\n \n", "x", "documents: must not be empty"),
        ('{"query": "", "documents": ["a"]}', None, "query: must not be empty"),
        ('{"query": "x", "documents": []}', None, "documents: must not be empty"),
        ("", None, "documents: must not be empty"),
        ('{"query": "x", "documents": ["a"], "top_n": 1}', None, "line 1: top_n: "),
    ],
)
def test_empty_input_and_unknown_keys_are_errors(text: str, query: str | None, error: str) -> None:
    arguments = ["rerank", "--model", "fake", *(["-q", query] if query is not None else [])]
    with pytest.raises((InputError, DataError)) as caught:
        CliRunner().invoke(app, arguments, input=text, catch_exceptions=False)
    assert error in str(caught.value)


def test_an_error_is_one_line_and_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headrank", "rerank", "missing.txt", "-q", "x", "--model", "fake"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert capsys.readouterr().err.strip() == "error: missing.txt: cannot be read: No such file or directory"


def test_a_model_without_a_bank_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(HeadRankError, match="headrank calibrate --model"):
        run("rerank", "-q", "x", "--model", "fake", "--bank", str(tmp_path), stdin="a\n")
