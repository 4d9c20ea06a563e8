"""`headrank pull`: fetch a model of the catalogue."""

from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub.utils.tqdm import disable_progress_bars
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from headbank.models.catalogue import CATALOGUE, DEFAULT_MODEL
from headbank.models.pull import pull


def pull_command(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(CATALOGUE)}.")] = DEFAULT_MODEL,
    to: Annotated[
        Path | None,
        typer.Option(
            help="Folder that holds models; default HEADRANK_MODELS_DIR or ~/.cache/headrank/models."
        ),
    ] = None,
) -> None:
    """Fetch a model from the hub, or from its mirror where there is one; print the folder it lies in."""
    disable_progress_bars()  # one bar for the whole model instead of the hub's one per file
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # On stderr, so that the path alone can be piped.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=None)
        folder = pull(name, to, lambda done, total: progress.update(task, completed=done, total=total))
    from headbank.models.gguf import gguf_file, unpacked

    file = gguf_file(folder)
    if file is not None:
        with Console(stderr=True).status(f"unpacking {file.name} (once)"):
            unpacked(file)
    typer.echo(str(folder))
