"""`headrank calibrate`: find the heads of a model that rank documents best, and store them in a bank."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from headbank.cli.common import (
    DenseModelOption,
    DeviceOption,
    DTypeOption,
    ModelOption,
    ThreadsOption,
    parse_choice,
    parse_names,
    parse_views,
    sample_progress,
)
from headbank.data.readers import data_hash, read_samples
from headbank.data.synthetic import SYNTHETIC, generate, synthetic_hash
from headbank.errors import InputError
from headbank.models.catalogue import DEFAULT_EMBEDDING
from headbank.types import LAYOUTS, REWEIGHTINGS, PromptStyle, RankOptions, Sample

if TYPE_CHECKING:
    from headbank.jobs.calibrate import CalibrateConfig, Calibration, Voter
    from headbank.models.base import HeadRunner

DETECTORS = ("expert", "weighted", "greedy", "contrastive", "qr", "icr")
VOTERS = ("bm25", "dense")
TAILS = ("longest", "total")
SYNTHETIC_SAMPLES = 100
SYNTHETIC_DOCUMENTS = 10


@dataclass(frozen=True)
class CalibrationData:
    """Labelled questions, and what the bank notes about where they come from."""

    samples: list[Sample]
    name: str
    sha256: str


def calibrate_command(
    model: ModelOption,
    bank: Annotated[Path, typer.Option("--bank", help="Folder of head banks to write into.")],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            help="HotpotQA, 2Wiki or MuSiQue as published, JSONL with gold documents, or `synthetic`: questions "
            "made up here, where there are no labelled ones. Several are pooled.",
        ),
    ],
    methods: Annotated[
        str, typer.Option(help=f"Detectors to compare, of: {', '.join(DETECTORS)}.")
    ] = ",".join(DETECTORS),
    layout: Annotated[str, typer.Option(help=f"Prompts to compare: {', '.join(LAYOUTS)}, or both.")] = "both",
    view: Annotated[str, typer.Option(help="Source rows: query, response, or both.")] = "both",
    limit: Annotated[
        int | None,
        typer.Option(
            help=f"Use the first N samples of each file; of synthetic data {SYNTHETIC_SAMPLES} if not given.",
            min=1,
        ),
    ] = None,
    placements: Annotated[
        str,
        typer.Option(
            help="Places of the gold block among the distractors in joint prompts: a number, or all."
        ),
    ] = "all",
    voters: Annotated[
        str, typer.Option(help=f"Rankers that fusion puts beside the heads: {', '.join(VOTERS)}, or none.")
    ] = "bm25",
    dense_model: DenseModelOption = DEFAULT_EMBEDDING,
    reweight: Annotated[
        str,
        typer.Option(
            help=f"ReAttn's weights of tokens in the query view: {', '.join(REWEIGHTINGS)}, or none."
        ),
    ] = "none",
    max_layer: Annotated[
        float, typer.Option(help="Take heads from this share of the layers only: a faster model.", max=1)
    ] = 1.0,
    heads: Annotated[int, typer.Option(help="Voting heads of the detector expert.", min=1)] = 5,
    tau_f: Annotated[
        float, typer.Option(help="Least activation frequency of an expert.", min=0, max=1)
    ] = 0.6,
    tau_p: Annotated[float, typer.Option(help="Strength quantile of an expert.", min=0, max=1)] = 0.9,
    response_tokens: Annotated[int, typer.Option(help="Longest answer the response view reads.", min=1)] = 16,
    label: Annotated[bool, typer.Option("--label/--no-label", help="A line before each document.")] = True,
    query_first: Annotated[
        bool, typer.Option("--query-first", help="The question also stands before the documents.")
    ] = False,
    tail: Annotated[
        str, typer.Option(help=f"Where the question stands in parallel prompts: {' or '.join(TAILS)}.")
    ] = "longest",
    seed: Annotated[
        int,
        typer.Option(help="Seeds synthetic data, the order of distractors, folds and intervals.", min=0),
    ] = 0,
    captures: Annotated[
        Path | None, typer.Option(help="Folder of captured samples; beside the bank if not given.")
    ] = None,
    curves: Annotated[
        bool,
        typer.Option("--curves/--no-curves", help="Measure how layers and written tokens matter."),
    ] = True,
    dtype: DTypeOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Find the heads that rank gold documents best, compare detectors and prompts on held-out questions, and write the
    model's bank.

    Captured samples are kept: a stopped run continues, and other thresholds take seconds.
    """
    views = parse_views(view)
    detectors = parse_names("methods", methods, DETECTORS)
    if detectors == ("icr",):
        raise InputError("methods", "icr is compared with others, it selects no heads; name another")
    names = () if voters == "none" else parse_names("voters", voters, VOTERS)
    if not 0 < max_layer <= 1:
        raise InputError("max_layer", "must be over 0 and at most 1", 1)
    styles = _styles(layout, label, query_first, tail)
    count = _placements(placements)
    source = read_data(data, limit, seed)
    from headbank.jobs.calibrate import CalibrateConfig, check_samples
    from headbank.jobs.detect import SelectConfig

    reweighting = () if reweight == "none" else parse_names("reweight", reweight, REWEIGHTINGS)
    selection = SelectConfig(
        count=heads, tau_f=tau_f, tau_p=tau_p, max_layer=max_layer, reweighting=reweighting, seed=seed
    )
    config = CalibrateConfig(styles, views, count, detectors, seed, response_tokens, selection, curves)
    check_samples(source.samples, source.name, config)
    opened = open_voters(names, dense_model, device)
    from headbank.cli.calibrate_report import Usage, print_pictures, print_report
    from headbank.models.loading import load_runner

    runner = load_runner(model, dtype=dtype, device=device, threads=threads)
    usage = Usage()
    result, reused = run_calibration(
        runner,
        source,
        bank,
        config,
        voters=opened,
        dense_model=dense_model if "dense" in names else "",
        captures=captures,
    )
    console = Console()
    print_report(console, result.bank)
    print_pictures(console, result)
    console.print(usage.summary(result, reused), soft_wrap=True)


def run_calibration(
    runner: "HeadRunner",
    source: CalibrationData,
    root: Path,
    config: "CalibrateConfig",
    *,
    voters: Mapping[str, "Voter"] | None = None,
    dense_model: str = "",
    captures: Path | None = None,
) -> tuple["Calibration", int]:
    """`headbank.jobs.calibrate.calibrate` under a progress bar, and how many captures of an earlier run were used."""
    from headbank.jobs.calibrate import calibrate

    reused = 0
    with sample_progress() as progress:
        total = len(source.samples) * len(config.styles)
        task = progress.add_task(f"capturing {runner.info.model_id}", total=total)

        def on_sample(_: Sample, was_there: bool) -> None:
            nonlocal reused
            reused += was_there
            progress.advance(task)
            if progress.finished:
                progress.update(task, description="selecting heads")

        result = calibrate(
            runner,
            source.samples,
            root,
            data_name=source.name,
            data_hash=source.sha256,
            config=config,
            voters=voters,
            dense_model=dense_model,
            captures=captures,
            on_sample=on_sample,
        )
    return result, reused


def read_data(sources: Sequence[str], limit: int | None, seed: int) -> CalibrationData:
    """The samples of all sources after one another, under ids that differ.

    Raises InputError for a source named twice, DataError for a file that cannot be read.
    """
    if len(set(sources)) < len(sources):
        raise InputError("data", "names a source twice")
    samples: list[Sample] = []
    names, hashes = [], []
    taken: set[str] = set()
    for source in sources:
        if source == SYNTHETIC:
            n = limit or SYNTHETIC_SAMPLES
            found = generate(n, seed=seed, n_documents=SYNTHETIC_DOCUMENTS)
            digest = synthetic_hash(n, seed, SYNTHETIC_DOCUMENTS)
        else:
            found, digest = read_samples(source, limit), data_hash(source)
        names.append(Path(source).name)
        hashes.append(digest)
        for sample in found:
            name = sample.id
            while name in taken:
                name = f"{names[-1]}/{name}"
            taken.add(name)
            samples.append(replace(sample, id=name))
    sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return CalibrationData(samples, "+".join(names), sha256)


def open_voters(names: Sequence[str], dense_model: str, device: str) -> dict[str, "Voter"]:
    """The rankers beside the heads, by name. Raises ModelError when the dense model cannot be loaded."""
    from headbank.cli.rerank import open_baseline
    from headbank.rerankers.base import Reranker
    from headbank.rerankers.fusion import raw_scores

    def voter(reranker: Reranker) -> "Voter":
        return lambda sample: raw_scores(
            reranker.rank(sample.question, [document.content for document in sample.documents], RankOptions())
        )

    return {name: voter(open_baseline(name, dense_model, device)) for name in names}


def _styles(layout: str, label: bool, query_first: bool, tail: str) -> tuple[PromptStyle, ...]:
    layouts = LAYOUTS if layout == "both" else (parse_choice("layout", layout, (*LAYOUTS, "both")),)
    place = parse_choice("tail", tail, TAILS)
    if place == "total" and "parallel" not in layouts:
        raise InputError("tail", "is a choice of the layout parallel")
    return tuple(
        PromptStyle(
            each, label, query_first, "total" if each == "parallel" and place == "total" else "longest"
        )
        for each in LAYOUTS
        if each in layouts
    )


def _placements(value: str) -> int | None:
    if value == "all":
        return None
    if value.isdigit() and int(value) >= 1:
        return int(value)
    raise InputError("placements", "must be `all` or a whole number of at least 1", 1)
