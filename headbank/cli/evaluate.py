"""`headrank evaluate`: compare methods on labelled questions."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headbank.cli.common import (
    METHODS,
    BankOption,
    DenseModelOption,
    DeviceOption,
    DTypeOption,
    ModelOption,
    ResponseTokensOption,
    ThreadsOption,
    check_output,
    parse_views,
    sample_progress,
)
from headbank.data.readers import data_hash, read_samples
from headbank.errors import InputError
from headbank.models.catalogue import DEFAULT_EMBEDDING, DEFAULT_MODEL
from headbank.types import RankOptions


def evaluate_command(
    data: Annotated[
        Path, typer.Option("--data", help="Questions with relevance labels (formats of `calibrate`).")
    ],
    model: ModelOption = DEFAULT_MODEL,
    bank: BankOption = None,
    methods: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(METHODS)}.")] = ",".join(
        METHODS
    ),
    limit: Annotated[int | None, typer.Option(help="Use the first N questions of the file.", min=1)] = None,
    k: Annotated[int, typer.Option("--k", help="Depth of P@k, NDCG@k and R@k.", min=1)] = 2,
    view: Annotated[str, typer.Option(help="Views of the method heads: query, response, or both.")] = "both",
    response_tokens: ResponseTokensOption = 16,
    latency_questions: Annotated[
        int, typer.Option(help="Questions ranked once more, method by method, to time whole calls.", min=0)
    ] = 5,
    seed: Annotated[int, typer.Option(help="Seeds the intervals and the tests.")] = 0,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write everything as JSON to this file.")
    ] = None,
    dense_model: DenseModelOption = DEFAULT_EMBEDDING,
    dtype: DTypeOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Print P@k, NDCG@k, MAP, MRR and R@k of each method with 95 % intervals, paired tests and latency."""
    names = [name.strip() for name in methods.split(",") if name.strip()]
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise InputError("methods", f"must name at least one of {', '.join(METHODS)}")
    views = parse_views(view)
    if json_out is not None:
        check_output("json", json_out)
    samples = read_samples(data, limit)
    from headbank.jobs.evaluate import Method, evaluate, head_methods
    from headbank.rerankers.bm25 import BM25
    from headbank.rerankers.dense import Dense

    rows: list[Method] = []
    described: dict[str, Any] = {"data": data.name, "data_sha256": data_hash(data), "k": k, "seed": seed}
    if "heads" in names:
        from headbank.models.loading import load_runner
        from headbank.rerankers.heads import HeadReranker, open_bank

        runner = load_runner(model, dtype=dtype, device=device, threads=threads)
        loaded = open_bank(bank, runner.info)
        reranker = HeadReranker(runner, loaded, response_tokens=response_tokens)
        rows += head_methods(reranker, views)
        described |= {"model": runner.info.model_id, "dtype": runner.info.dtype}
        described["heads"] = {v: [str(head) for head in reranker.head_set(v).heads] for v in views}
    if "bm25" in names:
        rows.append(Method("bm25", BM25(), RankOptions()))
    if "dense" in names:
        rows.append(
            Method("dense", Dense(dense_model, device=None if device == "auto" else device), RankOptions())
        )
        described["dense_model"] = dense_model
    with sample_progress() as progress:
        task = progress.add_task("ranking", total=len(samples))
        result = evaluate(
            rows,
            samples,
            k=k,
            seed=seed,
            latency_questions=latency_questions,
            on_sample=lambda _: progress.advance(task),
        )
    content = described | result.to_json()
    _print(Console(), content)
    if json_out is not None:
        json_out.write_text(json.dumps(content, indent=1) + "\n")


def _print(console: Console, content: dict[str, Any]) -> None:
    metrics: dict[str, dict[str, dict[str, float]]] = content["metrics"]
    columns = list(next(iter(metrics.values())))
    table = Table(
        title=f"{content['data']}: {content['questions']} questions, mean [95 % interval]",
        title_justify="left",
    )
    for name in ("method", *columns, "median s/call"):
        table.add_column(name, no_wrap=name == "method")
    for label, values in metrics.items():
        latency = content["latency_s"].get(label)
        cells = [
            f"{values[c]['mean']:.3f} [{values[c]['low']:.3f}, {values[c]['high']:.3f}]" for c in columns
        ]
        table.add_row(label, *cells, f"{latency['median']:.3f}" if latency else "-")
    console.print(table)
    tests = Table(title="paired permutation tests, two-sided p", title_justify="left")
    for name in ("pair", *columns):
        tests.add_column(name)
    for pair, values in content["p_values"].items():
        tests.add_row(pair, *(f"{values[c]:.3f}" for c in columns))
    if content["p_values"]:
        console.print(tests)
    for reason, ids in content["skipped"].items():
        console.print(f"left out, {reason}: {len(ids)}")
