"""`headrank bench`: times of this engine and of other ways to the same order, as ratios measured in one run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headbank.cli.common import (
    BankOption,
    DeviceOption,
    DTypeOption,
    ModelOption,
    ResponseTokensOption,
    ThreadsOption,
    check_output,
    sample_progress,
)
from headbank.errors import InputError
from headbank.models.catalogue import DEFAULT_MODEL
from headbank.types import HeadId, RankOptions

if TYPE_CHECKING:
    from headbank.jobs.bench import BenchConfig, BenchResult
    from headbank.jobs.bench_contestants import Stage
    from headbank.models.base import HeadRunner

_GIB = 2**30
_HEAD = re.compile(r"L(\d{1,4})H(\d{1,4})")


def bench_command(
    model: ModelOption = DEFAULT_MODEL,
    documents: Annotated[str, typer.Option(help="Numbers of documents, comma-separated.")] = "10,20,100,1000",
    document_tokens: Annotated[
        int, typer.Option(help="Mean length of a document; from half to one and a half of it.", min=1)
    ] = 140,
    query_tokens: Annotated[int, typer.Option(help="Length of a query.", min=1)] = 20,
    rounds: Annotated[int, typer.Option(help="Timed calls of each contestant.", min=1)] = 5,
    contestants: Annotated[
        str | None, typer.Option(help="Comma-separated, all if not given; an unknown name lists them.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Voting heads, as L3H1,L7H0; spread over the layers if not given.")
    ] = None,
    layers_from_bank: Annotated[
        bool, typer.Option("--layers-from-bank", help="Take the heads of the model's bank (query view).")
    ] = False,
    deepest: Annotated[
        int | None,
        typer.Option(help="Deepest layer of the spread heads; the end of two thirds if not given.", min=0),
    ] = None,
    bank: BankOption = None,
    response_tokens: ResponseTokensOption = 16,
    max_seconds_per_call: Annotated[
        float, typer.Option(help="Leave out a contestant where a call is expected to take longer.", min=0)
    ] = 60.0,
    max_gib: Annotated[
        float,
        typer.Option(help="Leave out a contestant with more attention matrices or keys and values.", min=0),
    ] = 8.0,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also measure peak memory, one fresh process per call.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seeds the documents and queries.")] = 0,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the results as JSON to this file too.")
    ] = None,
    dtype: DTypeOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Print seconds per call and their ratios, contestants interleaved; the last line is one JSON object.

    Times go from token ids to scores. Medians over rounds, with quartiles; ratios are taken within a round.
    """
    if sum([heads is not None, layers_from_bank, deepest is not None]) > 1:
        raise InputError("heads", "is one of three choices: --heads, --layers-from-bank, --deepest")
    if json_out is not None:
        check_output("json", json_out)
    sizes = _sizes(documents)
    named = _heads(heads) if heads is not None else None
    from headbank.jobs.bench import BenchConfig, bench, calls, check_config
    from headbank.jobs.bench_contestants import CONTESTANTS, open_stage, spread_heads
    from headbank.models.loading import load_runner

    config = BenchConfig(
        documents=sizes,
        document_tokens=document_tokens,
        query_tokens=query_tokens,
        rounds=rounds,
        contestants=tuple(CONTESTANTS) if contestants is None else _words(contestants),
        seed=seed,
        max_seconds_per_call=max_seconds_per_call,
    )
    check_config(config)
    runner = load_runner(model, dtype=dtype, device=device, threads=threads)
    if named is None:
        named = _bank_heads(runner, bank) if layers_from_bank else spread_heads(runner.info, deepest)
    max_bytes = int(max_gib * _GIB)
    stage = open_stage(runner, named, response_tokens=response_tokens, max_bytes=max_bytes)
    with sample_progress() as progress:
        task = progress.add_task(f"timing {runner.info.model_id}", total=calls(config))
        result = bench(stage, config, on_call=lambda: progress.advance(task))
    content = _described(stage, config) | result.to_json()
    if memory:
        content["memory"] = list(
            _memory(stage, config, result, {"model": model, "dtype": dtype, "device": device}, threads)
        )
    _print(Console(), content)
    if json_out is not None:
        json_out.write_text(json.dumps(content, indent=1) + "\n")
    typer.echo(json.dumps(content, separators=(",", ":")))


def _words(value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in value.split(",") if word.strip()))


def _sizes(value: str) -> tuple[int, ...]:
    words = _words(value)
    if not words or not all(word.isdecimal() and 0 < int(word) <= 100_000 for word in words):
        raise InputError("documents", "must be whole numbers from 1 to 100000, comma-separated", 100_000)
    return tuple(int(word) for word in words)


def _heads(value: str) -> tuple[HeadId, ...]:
    found = [_HEAD.fullmatch(word) for word in _words(value)]
    heads = tuple(HeadId(int(match[1]), int(match[2])) for match in found if match)
    if not heads or len(heads) < len(found):
        raise InputError("heads", "must look like L3H1,L7H0")
    return heads


def _bank_heads(runner: "HeadRunner", bank: Path | None) -> tuple[HeadId, ...]:
    from headbank.rerankers.heads import HeadReranker, open_bank

    return HeadReranker(runner, open_bank(bank, runner.info)).head_set(RankOptions()).heads


def _described(stage: "Stage", config: "BenchConfig") -> dict[str, Any]:
    import torch

    info = stage.runner.info
    return {
        "model": info.model_id,
        "dtype": info.dtype,
        "device": str(stage.plain.device),
        "threads": torch.get_num_threads(),
        "layers": info.n_layers,
        "deepest_layer": stage.deepest,
        "heads": [str(head) for head in stage.heads],
        "document_tokens": config.document_tokens,
        "query_tokens": config.query_tokens,
        "max_response_tokens": stage.response_tokens,
        "rounds": config.rounds,
        "seed": config.seed,
    }


def _memory(
    stage: "Stage", config: "BenchConfig", result: "BenchResult", source: dict[str, str], threads: int | None
) -> Iterator[dict[str, Any]]:
    """Peak memory of every contestant that took part, case by case."""
    from headbank.jobs.bench_memory import MemoryTask, measure_apart

    for case in result.cases:
        for name in case.seconds:
            yield measure_apart(
                MemoryTask(
                    **source,
                    threads=threads,
                    heads=stage.heads,
                    response_tokens=stage.response_tokens,
                    max_bytes=stage.max_bytes,
                    config=config,
                    contestant=name,
                    documents=case.documents,
                )
            )


def _print(console: Console, content: dict[str, Any]) -> None:
    results: list[dict[str, Any]] = content["results"]
    of_documents = [f"{case['documents']} documents" for case in results]
    console.print(
        f"{content['model']}, {content['dtype']} on {content['device']}, {content['threads']} threads, "
        f"heads {' '.join(content['heads'])}",
        markup=False,
        soft_wrap=True,
    )
    _table(console, "seconds per call, median \\[quartiles]", of_documents, results, "seconds", ".3f")
    _table(console, "ratios, median \\[quartiles] over rounds", of_documents, results, "ratios", ".2f")
    for label, growth in content["growth"].items():
        if growth:
            _table(
                console, f"growth with documents, {label}", ["times"], [{"growth": growth}], "growth", ".2f"
            )
    for case in results:
        if "cache" in case:
            counts = case["cache"]
            console.print(
                f"{case['documents']} documents: cache hits {counts['hits']}, misses {counts['misses']}"
            )
        if "response_tokens" in case:
            console.print(f"{case['documents']} documents: {case['response_tokens']:.0f} tokens written")
        for name, reason in case["skipped"].items():
            console.print(
                f"{case['documents']} documents: {name} left out: {reason}", markup=False, soft_wrap=True
            )
    _print_memory(console, content.get("memory", []))


def _table(
    console: Console, title: str, columns: list[str], results: list[dict[str, Any]], key: str, form: str
) -> None:
    """One row per name found under `key` in any of the results, one column per result."""
    table = Table(title=title, title_justify="left")
    table.add_column(key, no_wrap=True)
    for column in columns:
        table.add_column(column)
    for name in dict.fromkeys(name for case in results for name in case[key]):
        spreads = [case[key].get(name) for case in results]
        table.add_row(
            name,
            *(
                f"{s['median']:{form}} \\[{s['low']:{form}}, {s['high']:{form}}]" if s else "-"
                for s in spreads
            ),
        )
    if table.row_count:
        console.print(table)


def _print_memory(console: Console, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    table = Table(title="memory of one call, MiB", title_justify="left")
    for column in ("documents", "contestant", "peak, extra", "keys and values", "without them"):
        table.add_column(column)
    for row in rows:
        cells = [row.get(key) for key in ("peak_extra_bytes", "kv_bytes", "without_kv_bytes")]
        shown = ["-" if cell is None else f"{cell / 2**20:.0f}" for cell in cells]
        table.add_row(str(row["documents"]), row["contestant"], *shown)
    console.print(table)
    for row in rows:
        if "skipped" in row:
            console.print(
                f"{row['documents']} documents: memory of {row['contestant']} not measured: {row['skipped']}",
                markup=False,
                soft_wrap=True,
            )
