"""Options and helpers that several commands share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from headbank.errors import InputError
from headbank.types import VIEWS, View

METHODS = ("heads", "fusion", "icr", "llm", "bm25", "dense")
"""What ranks single requests."""

_Choice = TypeVar("_Choice", bound=str)

ModelOption = Annotated[
    str,
    typer.Option("--model", help="Catalogue name, hub id, folder, GGUF file, or `fake`.", show_default=True),
]
BankOption = Annotated[
    Path | None,
    typer.Option("--bank", help="Folder of head banks; the banks shipped with the package if not given."),
]
ViewOption = Annotated[str, typer.Option(help=f"Source rows of the heads: {', '.join(VIEWS)}.")]
DTypeOption = Annotated[
    str, typer.Option(help="auto takes bfloat16 where the device multiplies it natively, else float32.")
]
DeviceOption = Annotated[str, typer.Option(help="auto takes cuda where there is one, else cpu.")]
ResponseTokensOption = Annotated[
    int, typer.Option(help="Longest answer the response view writes; what the bank was made with.", min=1)
]
ThreadsOption = Annotated[
    int | None, typer.Option(help="CPU threads of the model; all cores if not given.", min=1)
]
DenseModelOption = Annotated[
    str,
    typer.Option(
        "--dense-model", help="Embedding model of the method `dense`: catalogue name, hub id or folder."
    ),
]


def check_output(field: str, path: Path) -> None:
    """Refuse a file that cannot be written before the work is done. Raises InputError naming the field."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(field, "must name a file in a folder that exists")


def parse_views(value: str) -> tuple[View, ...]:
    """`query`, `response` or `both`. Raises InputError for anything else."""
    if value == "both":
        return VIEWS
    for view in VIEWS:
        if value == view:
            return (view,)
    raise InputError("view", f"must be one of {', '.join(VIEWS)}, both")


def parse_choice(field: str, value: str | None, choices: Sequence[_Choice]) -> _Choice | None:
    """`value` as one of `choices`, None as it is. Raises InputError naming the field and the choices."""
    for choice in choices:
        if value == choice:
            return choice
    if value is None:
        return None
    raise InputError(field, f"must be one of {', '.join(choices)}")


def parse_names(field: str, value: str, choices: Sequence[_Choice]) -> tuple[_Choice, ...]:
    """Names separated by commas, each once, in the order given. Raises InputError naming the field and the choices."""
    known: dict[str, _Choice] = {choice: choice for choice in choices}
    names = dict.fromkeys(name.strip() for name in value.split(",") if name.strip())
    if not names or not set(names) <= set(known):
        raise InputError(field, f"must name at least one of {', '.join(choices)}")
    return tuple(known[name] for name in names)


def sample_progress() -> Progress:
    """A progress bar over samples with elapsed and remaining time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        speed_estimate_period=600,
    )
