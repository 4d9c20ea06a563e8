"""`headrank evaluate`: compare methods on labelled questions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headbank.cli.common import (
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
from headbank.types import Sample

if TYPE_CHECKING:
    from headbank.jobs.evaluate import Method

EVALUATED = (
    "heads",
    "expert",
    "weighted",
    "greedy",
    "contrastive",
    "qr",
    "icr",
    "fusion",
    "llm",
    "bm25",
    "dense",
)
"""`heads` is the bank's default set, `expert` the papers' unweighted vote; detectors name their sets in the bank."""


def evaluate_command(
    data: Annotated[
        list[Path],
        typer.Option(
            "--data", help="Questions with relevance labels (formats of `calibrate`); several are pooled."
        ),
    ],
    model: ModelOption = DEFAULT_MODEL,
    bank: BankOption = None,
    methods: Annotated[
        str, typer.Option(help=f"Comma-separated, of: {', '.join(EVALUATED)}.")
    ] = "heads,expert,icr,bm25,dense",
    limit: Annotated[int | None, typer.Option(help="Use the first N questions of each file.", min=1)] = None,
    k: Annotated[int, typer.Option("--k", help="Depth of P@k, NDCG@k and R@k.", min=1)] = 2,
    view: Annotated[str, typer.Option(help="Views of head sets: query, response, or both.")] = "both",
    response_tokens: ResponseTokensOption = 16,
    captures: Annotated[
        Path, typer.Option(help="Folder of captured forward passes; a later run with it takes seconds.")
    ] = Path(".headrank-captures"),
    latency_questions: Annotated[
        int, typer.Option(help="Questions ranked once more, method by method, to time whole calls.", min=0)
    ] = 5,
    stability: Annotated[
        int,
        typer.Option(
            help="Questions whose first 16 documents are also ranked in two halves, to see how many pairs flip.",
            min=0,
        ),
    ] = 0,
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
    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    unknown = [name for name in names if name not in EVALUATED]
    if unknown or not names:
        raise InputError("methods", f"must name at least one of {', '.join(EVALUATED)}")
    views = parse_views(view)
    if json_out is not None:
        check_output("json", json_out)
    files = [(path, read_samples(path, limit)) for path in data]
    from headbank.cli.methods import build_methods
    from headbank.jobs.evaluate import evaluate, paired, pooled

    built = build_methods(
        names,
        views,
        model=model,
        bank=bank,
        dense_model=dense_model,
        dtype=dtype,
        device=device,
        threads=threads,
        response_tokens=response_tokens,
    )
    console = Console()
    content: dict[str, Any] = {"k": k, "seed": seed, **built.described, "data": {}}
    results = []
    for path, samples in files:
        with sample_progress() as progress:
            task = progress.add_task(f"ranking {path.stem}", total=len(samples))
            result = evaluate(
                built.methods,
                samples,
                runner=built.runner,
                captures=captures,
                response_tokens=response_tokens,
                k=k,
                latency_questions=latency_questions,
                on_sample=lambda *_: progress.advance(task),  # noqa: B023 (called before the next turn)
            )
        results.append(result)
        found = {"data_sha256": data_hash(path), **result.to_json(seed)}
        if stability:
            found["stability"] = _stability(built.methods, samples, stability, seed)
        content["data"][path.name] = found
        _print(console, path.name, found)
    if len(results) > 1:
        tests = paired(pooled(results), seed)
        content["pooled_p_values"] = tests
        _print_tests(console, f"all {sum(r.questions for r in results)} questions pooled", tests)
    if json_out is not None:
        json_out.write_text(json.dumps(content, indent=1) + "\n")


def _stability(
    methods: Sequence["Method"], samples: Sequence[Sample], count: int, seed: int
) -> dict[str, Any]:
    """Share of pairs that flip when 16 documents are ranked in two halves, for the bank's default sets; empty where no
    question has so many."""
    from headbank.jobs.stability import split_stability, splittable
    from headbank.rerankers.heads import HeadReranker

    found: dict[str, Any] = {}
    for method in methods if splittable(samples) else ():
        if method.label.startswith("heads") and isinstance(method.reranker, HeadReranker):
            result = split_stability(method.reranker, samples, method.options, count, seed)
            found[method.label] = {"questions": result.questions, **result.flipped}
    return found


def _print(console: Console, name: str, content: dict[str, Any]) -> None:
    metrics: dict[str, dict[str, dict[str, float]]] = content["metrics"]
    columns = list(next(iter(metrics.values())))
    table = Table(
        title=f"{name}: {content['questions']} questions, mean [95 % interval]", title_justify="left"
    )
    for column in ("method", *columns, "ECE", "median s/call"):
        table.add_column(column, no_wrap=column == "method")
    for label, values in metrics.items():
        latency = content["latency_s"].get(label)
        error = content["calibration_error"].get(label)
        cells = [
            f"{values[c]['mean']:.3f} [{values[c]['low']:.3f}, {values[c]['high']:.3f}]" for c in columns
        ]
        cells.append("-" if error is None else f"{error:.3f}")
        table.add_row(label, *cells, f"{latency['median']:.3f}" if latency else "-")
    console.print(table)
    _print_tests(console, name, content["p_values"])
    for label, flips in content.get("stability", {}).items():
        console.print(
            f"{label}: {flips['mean']:.2%} [{flips['low']:.2%}, {flips['high']:.2%}] of pairs flip when 16 documents "
            f"are split in two ({flips['questions']} questions)",
            soft_wrap=True,
        )
    for reason, ids in content["skipped"].items():
        console.print(f"left out, {reason}: {len(ids)}")


def _print_tests(console: Console, name: str, p_values: dict[str, dict[str, float]]) -> None:
    if not p_values:
        return
    columns = list(next(iter(p_values.values())))
    tests = Table(title=f"{name}: paired permutation tests, two-sided p", title_justify="left")
    for column in ("pair", *columns):
        tests.add_column(column)
    for pair, values in p_values.items():
        tests.add_row(pair, *(f"{values[c]:.3f}" for c in columns))
    console.print(tests)
