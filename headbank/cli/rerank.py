"""`headrank rerank`: rank documents of a file or of standard input, offline."""

import json
import sys
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headbank.cli.common import (
    METHODS,
    BankOption,
    DenseModelOption,
    DeviceOption,
    DTypeOption,
    ModelOption,
    ThreadsOption,
    ViewOption,
    check_output,
    parse_choice,
)
from headbank.data.requests import RankRequest, read_requests
from headbank.errors import DataError, InputError
from headbank.models.catalogue import DEFAULT_EMBEDDING, DEFAULT_MODEL
from headbank.rerankers.base import Reranker
from headbank.types import AGGREGATIONS, LAYOUTS, VIEWS, HeadVote, Ranking, RankOptions

if TYPE_CHECKING:
    from headbank.bank import Bank
    from headbank.rerankers.heads import HeadReranker

SHOWN_VOTERS = 8
"""Heads whose ranks fit a table; a head set begins with those that count most."""


def rerank_command(
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="Documents or requests; - is standard input.")
    ] = "-",
    query: Annotated[
        str | None, typer.Option("--query", "-q", help="The query; without it FILE holds requests.")
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    bank: BankOption = None,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "heads",
    view: ViewOption = "query",
    layout: Annotated[
        str | None, typer.Option(help=f"{' or '.join(LAYOUTS)} prompts; the bank's choice if not given.")
    ] = None,
    aggregation: Annotated[
        str | None, typer.Option(help=f"{', '.join(AGGREGATIONS)}; the bank's choice if not given.")
    ] = None,
    top_n: Annotated[int | None, typer.Option(help="Print the best N documents.", min=1)] = None,
    max_tokens_per_doc: Annotated[int | None, typer.Option(help="Cut longer documents.", min=1)] = None,
    response_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longest answer the response view writes; what the heads were calibrated with if not given.",
            min=1,
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show each head's vote and the evidence.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per request.")] = False,
    dump: Annotated[
        Path | None,
        typer.Option(
            help="Write token ids, spans, source rows, heads and their masses of one request to FILE.npz."
        ),
    ] = None,
    dense_model: DenseModelOption = DEFAULT_EMBEDDING,
    dtype: DTypeOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Rank documents: a line each, JSONL `{text, title?}`, or JSONL requests `{query, documents}`."""
    options = RankOptions(
        view=parse_choice("view", view, VIEWS) or "query",
        aggregation=parse_choice("aggregation", aggregation, AGGREGATIONS),
        layout=parse_choice("layout", layout, LAYOUTS),
        max_tokens_per_doc=max_tokens_per_doc,
        explain=explain,
    )
    if method not in METHODS:
        raise InputError("method", f"must be one of {', '.join(METHODS)}")
    if method == "icr" and options.view != "query":
        raise InputError("view", "the method icr has the query view only")
    requests = _read(source, query)
    if not all(request.query.strip() for request in requests):
        raise InputError("query", "must not be empty")
    if not requests or not all(request.documents for request in requests):
        raise InputError("documents", "must not be empty")
    if dump is not None and (method != "heads" or len(requests) != 1 or not requests[0].documents):
        raise InputError("dump", "needs the method heads and one request with documents")
    if dump is not None:
        check_output("dump", dump)
    reranker = open_reranker(
        method,
        model,
        bank,
        dense_model,
        options,
        response_tokens=response_tokens,
        dtype=dtype,
        device=device,
        threads=threads,
    )
    for request in requests:
        ranking = reranker.rank(request.query, request.documents, options)
        if as_json:
            typer.echo(json.dumps(to_json(ranking, request, top_n), ensure_ascii=False))
        else:
            print_ranking(Console(), ranking, request, top_n)
    if dump is not None:
        from headbank.jobs.dump import dump_ranking
        from headbank.rerankers.heads import HeadReranker

        assert isinstance(reranker, HeadReranker)
        dump_ranking(reranker, requests[0].query, requests[0].documents, options, dump)


def open_reranker(
    method: str,
    model: str,
    bank: Path | None,
    dense_model: str,
    options: RankOptions,
    *,
    response_tokens: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
) -> Reranker:
    """Load what a method needs for these options, and nothing else; `response_tokens` None: the head set's own.

    Raises ModelError and BankError for what is not there, InputError for an option out of its range.
    """
    if method in ("bm25", "dense"):
        return open_baseline(method, dense_model, device)
    from headbank.models.loading import load_runner
    from headbank.rerankers.heads import HeadReranker, open_bank

    runner = load_runner(model, dtype=dtype, device=device, threads=threads)
    if method == "llm":
        from headbank.rerankers.llm import ListwiseLLM

        return ListwiseLLM(runner)
    if method == "icr":
        return HeadReranker(runner, None, detector="icr", name="icr")
    loaded = open_bank(bank, runner.info)
    heads = HeadReranker(runner, loaded, response_tokens=response_tokens)
    return heads if method == "heads" else _open_fusion(heads, loaded, options, device)


def open_baseline(method: str, dense_model: str, device: str) -> Reranker:
    """`bm25` or `dense`, which need no language model. Raises ModelError when the embedding model cannot be loaded."""
    if method == "bm25":
        from headbank.rerankers.bm25 import BM25

        return BM25()
    from headbank.rerankers.dense import Dense

    return Dense(dense_model, device=None if device == "auto" else device)


def _open_fusion(heads: "HeadReranker", bank: "Bank", options: RankOptions, device: str) -> Reranker:
    """Voters are those of the bank's fusion: its weights are for that dense model and no other."""
    from headbank.rerankers.fusion import FusionReranker

    fusion = bank.fusion(options.view, options.layout)
    voters = {name: open_baseline(name, fusion.dense_model, device) for name in fusion.voters}
    return FusionReranker(heads, bank, voters)


def to_json(ranking: Ranking, request: RankRequest, top_n: int | None) -> dict[str, Any]:
    """The ranking as the HTTP service would shape it, with votes and evidence when they were asked for.

    `raw_scores` and the numbers of votes are in the order of the request's documents.
    """
    content: dict[str, Any] = {
        "query": request.query,
        "method": ranking.method,
        "results": [
            {"index": i, "relevance_score": ranking.scores[i], "document": {"text": request.documents[i]}}
            for i in ranking.order[:top_n]
        ],
        "raw_scores": ranking.raw_scores,
        "input_tokens": ranking.input_tokens,
        "cut": list(ranking.cut),
        "seconds": ranking.seconds,
    }
    if ranking.votes:
        content["votes"] = [
            {"head": str(v.head), "mass": v.mass, "mean": v.mean, "ranks": shared_ranks(v)}
            for v in ranking.votes
        ]
        content["evidence"] = [
            {"index": s.document, "start": s.start, "end": s.end, "text": s.text, "weight": s.weight}
            for s in ranking.snippets
        ]
    return content


def shared_ranks(vote: HeadVote) -> list[float]:
    """The ranks that a head gives, 1 for the best; equal documents share the mean of their ranks. [D]"""
    ascending = sorted(vote.mean)
    places = [(bisect_left(ascending, mean), bisect_right(ascending, mean)) for mean in vote.mean]
    return [len(ascending) - (left + right - 1) / 2 for left, right in places]


def print_ranking(console: Console, ranking: Ranking, request: RankRequest, top_n: int | None) -> None:
    """The ranking as a table: place, score, per-head ranks, the start of the document or its evidence."""
    title = f"{request.query}  [{ranking.method}, {sum(ranking.seconds.values()):.2f} s]"
    # Text, not str: a document may hold what looks like markup.
    table = Table(title=Text(title), title_justify="left")
    for name in ("#", "doc", "score"):
        table.add_column(name, justify="right")
    shown = ranking.votes[:SHOWN_VOTERS]
    ranks = [shared_ranks(vote) for vote in shown]
    if shown:
        more = f" and {len(ranking.votes) - len(shown)} more" if len(ranking.votes) > len(shown) else ""
        table.add_column("rank by head: " + " ".join(str(v.head) for v in shown) + more)
    table.add_column("evidence" if ranking.snippets else "document")
    evidence = {s.document: s.text for s in reversed(ranking.snippets)}
    for place, index in enumerate(ranking.order[:top_n], 1):
        votes = [" ".join(f"{r[index]:>{len(str(v.head))}g}" for v, r in zip(shown, ranks, strict=True))]
        text = evidence.get(index, request.documents[index][:120])
        table.add_row(
            str(place),
            str(index),
            f"{ranking.scores[index]:.4f}",
            *(votes if shown else ()),
            Text(" ".join(text.split())),
        )
    console.print(table)
    if ranking.cut:
        console.print(f"cut to the token limit: {', '.join(map(str, ranking.cut))}")


def _read(source: str, query: str | None) -> list[RankRequest]:
    if source == "-":
        return read_requests(sys.stdin, query, "standard input")
    try:
        with Path(source).open(encoding="utf-8-sig", errors="replace") as file:
            return read_requests(file, query, source)
    except OSError as error:
        raise DataError(source, f"cannot be read: {error.strerror}") from error
