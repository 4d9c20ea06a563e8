"""`headrank calibrate`: find a model's expert heads and store them in a bank."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headbank.cli.common import (
    DeviceOption,
    DTypeOption,
    ModelOption,
    ThreadsOption,
    parse_views,
    sample_progress,
)
from headbank.data.readers import data_hash, read_samples
from headbank.errors import InputError
from headbank.types import AGGREGATIONS, Sample, View


def calibrate_command(
    model: ModelOption,
    bank: Annotated[Path, typer.Option("--bank", help="Folder of head banks to write into.")],
    data: Annotated[
        Path,
        typer.Option("--data", help="HotpotQA, 2Wiki or MuSiQue as published, or JSONL with gold documents."),
    ],
    methods: Annotated[str, typer.Option(help="Detectors to run: expert.")] = "expert",
    limit: Annotated[int | None, typer.Option(help="Use the first N samples of the file.", min=1)] = None,
    placements: Annotated[
        str, typer.Option(help="Places of the gold block among the distractors: a number, or all.")
    ] = "all",
    view: Annotated[str, typer.Option(help="Source rows: query, response, or both.")] = "both",
    seed: Annotated[
        int, typer.Option(help="Seeds the order of distractors, the folds and the intervals.")
    ] = 0,
    heads: Annotated[int, typer.Option(help="Voting heads per view.", min=1)] = 5,
    tau_f: Annotated[
        float, typer.Option(help="Least activation frequency of an expert.", min=0, max=1)
    ] = 0.6,
    tau_p: Annotated[float, typer.Option(help="Strength quantile of an expert.", min=0, max=1)] = 0.9,
    response_tokens: Annotated[int, typer.Option(help="Longest answer the response view reads.", min=1)] = 16,
    dtype: DTypeOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Find the heads that look at the gold documents wherever these stand, and write the model's bank.

    Captured samples are kept beside the bank: a stopped run continues, and other thresholds take seconds.
    """
    if methods != "expert":
        raise InputError("methods", "must be: expert")
    views = parse_views(view)
    count = _placements(placements)
    samples = read_samples(data, limit)
    console = Console()
    from headbank.jobs.calibrate import calibrate
    from headbank.jobs.plots import head_map
    from headbank.jobs.select import SelectConfig
    from headbank.models.loading import load_runner

    runner = load_runner(model, dtype=dtype, device=device, threads=threads)
    loaded_bytes = _peak_bytes()
    started = time.perf_counter()
    reused = 0
    with sample_progress() as progress:
        task = progress.add_task(f"capturing {runner.info.model_id}", total=len(samples))

        def on_sample(_: Sample, was_there: bool) -> None:
            nonlocal reused
            reused += was_there
            progress.advance(task)

        result = calibrate(
            runner,
            samples,
            bank,
            data_name=data.name,
            data_hash=data_hash(data),
            placements=count,
            views=views,
            seed=seed,
            response_tokens=response_tokens,
            selection=SelectConfig(count=heads, tau_f=tau_f, tau_p=tau_p, seed=seed),
            on_sample=on_sample,
        )
    _report(console, result.bank, views)
    for name in views:
        picture = result.folder.parent / f"{result.folder.name}.{name}.png"
        head_map(result.bank, name, picture)
        console.print(f"head map: {picture}", soft_wrap=True)
    rejected = ", ".join(f"{reason} {len(ids)}" for reason, ids in sorted(result.rejected.items())) or "none"
    console.print(
        f"bank: {result.folder}\n{result.used} samples used ({reused} captured earlier), rejected: {rejected}\n"
        f"{time.perf_counter() - started:.0f} s after loading; peak memory {_peak_bytes() / 2**30:.2f} GiB, "
        f"{(_peak_bytes() - loaded_bytes) / 2**30:.2f} GiB over the peak of loading",
        soft_wrap=True,
    )


def _placements(value: str) -> int | None:
    if value == "all":
        return None
    if value.isdigit() and int(value) >= 1:
        return int(value)
    raise InputError("placements", "must be `all` or a whole number of at least 1", 1)


def _peak_bytes() -> int:
    """Largest resident size of this process so far; 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _report(console: Console, bank: Any, views: tuple[View, ...]) -> None:
    for view in views:
        heads = bank.head_sets[f"expert.{view}"]
        counts = bank.training["counts"][view]
        table = Table(title=f"{bank.info.model_id}, {view} view", title_justify="left")
        table.add_column("quantity")
        table.add_column("value")
        table.add_row("experts (every placement)", str(counts["experts"]))
        table.add_row("sensitive (some placement)", str(counts["sensitive"]))
        table.add_row("best worst-placement frequency", f"{counts['best_worst_placement_frequency']:.2f}")
        table.add_row(
            "voting heads",
            f"{' '.join(map(str, heads.heads))} ({heads.strict_experts} strict, the rest soft fill)",
        )
        layers = [f"{layer}:{n}" for layer, n in enumerate(counts["sensitive_per_layer"]) if n]
        table.add_row("sensitive heads per layer", " ".join(layers) or "none")
        table.add_row("default aggregation", heads.default_aggregation)
        table.add_section()
        table.add_row("metrics on held-out samples", str(heads.dev_metrics["protocol"]))
        for rule in AGGREGATIONS:
            for metric, value in heads.dev_metrics.get("aggregations", {}).get(rule, {}).items():
                table.add_row(
                    f"{rule} {metric}", f"{value['mean']:.3f}  [{value['low']:.3f}, {value['high']:.3f}]"
                )
        console.print(table)
