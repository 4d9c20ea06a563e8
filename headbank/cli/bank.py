"""`headrank bank`: look at a head bank, check it, draw it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headbank.errors import BankError
from headbank.types import HeadSet, ModelInfo, View

if TYPE_CHECKING:
    from headbank.bank import Bank

# Commands import what they need: `headrank --help` loads neither torch nor matplotlib.
bank_app = typer.Typer(help="Show, verify and plot head banks.", no_args_is_help=True)

Folder = Annotated[
    Path, typer.Argument(help="The bank's folder, or a root folder that holds exactly one bank.")
]


@bank_app.command()
def show(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as it is on disk.")] = False,
) -> None:
    """Print whose bank it is, how it was made and which heads vote."""
    from headbank import bank as banks

    place = banks.locate(folder)
    bank = banks.read(place)
    if as_json:
        typer.echo((place / banks.MANIFEST).read_text(encoding="utf-8"), nl=False)
        return
    console = Console()
    console.print(_identity(place, bank.info, bank.layout))
    console.print(_pairs("Training record", bank.training))
    for name, heads in sorted(bank.head_sets.items()):
        console.print(_heads_table(name, heads, bank))
        console.print(_pairs(f"{name}: dev metrics", heads.dev_metrics))
    for view in sorted({heads.view for heads in bank.head_sets.values()}):
        console.print(_layer_table(view, bank))


@bank_app.command()
def verify(
    folder: Folder,
    model: Annotated[
        str | None, typer.Option(help="Also load this model and check that the bank was made with it.")
    ] = None,
) -> None:
    """Check a bank's files, and with --model whose bank it is; exit status 0 or 1, one line that says why."""
    from headbank import bank as banks

    try:
        bank = banks.read(banks.locate(folder))
        if model is not None:
            from headbank.models.loading import load_runner

            banks.check(bank, load_runner(model).info)
    except BankError as error:
        typer.echo(f"bad: {error}")
        raise typer.Exit(1) from error
    fits = "" if model is None else ", fits the model"
    typer.echo(f"ok: {bank.info.model_id}, {len(bank.head_sets)} head sets, {len(bank.maps)} maps{fits}")


@bank_app.command()
def plot(
    folder: Folder,
    view: Annotated[View, typer.Option(help="Whose voters are marked.")],
    out: Annotated[Path, typer.Option(help="PNG file to write.", dir_okay=False)],
) -> None:
    """Draw the heads' scores as heat maps, with the voters marked."""
    from headbank import bank as banks
    from headbank.jobs.plots import head_map

    head_map(banks.read(banks.locate(folder)), view, out)
    typer.echo(f"wrote {out}")


def _identity(place: Path, info: ModelInfo, layout: str) -> Table:
    table = _plain_table(f"Head bank {place}")
    rows = {
        "model": info.model_id,
        "revision": info.revision,
        "layers": str(info.n_layers),
        "heads": f"{info.n_heads}, kv heads {info.n_kv_heads}",
        "width": str(info.d_model),
        "dtype": info.dtype,
        "layout": layout,
        "config hash": info.config_hash,
        "tokenizer hash": info.tokenizer_hash,
        "template hash": info.template_hash,
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _pairs(title: str, record: dict[str, Any]) -> Table:
    table = _plain_table(title)
    for name, value in sorted(record.items()):
        table.add_row(escape(name), escape(_brief(value)))
    return table


def _brief(value: object) -> str:
    """A value on one line: numbers to four digits, long lists, such as the sample ids, as their number."""
    if isinstance(value, list) and len(value) > 8:
        return f"{len(value)} entries"
    if isinstance(value, str):
        return value
    rounded = json.loads(json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.4g}"))
    return json.dumps(rounded, ensure_ascii=False)


def _heads_table(name: str, heads: HeadSet, bank: "Bank") -> Table:
    title = f"{name}: {heads.view} view, {heads.default_aggregation} by default"
    table = Table("head", "kind", title=escape(title), title_justify="left")
    quantities = [q for q in ("frequency", "strength", "soft") if f"expert.{heads.view}.{q}" in bank.maps]
    for quantity in quantities:
        table.add_column(f"worst {quantity}", justify="right")
    for i, head in enumerate(heads.heads):
        worst = [
            float(bank.maps[f"expert.{heads.view}.{q}"][..., head.layer, head.head].min()) for q in quantities
        ]
        kind = "strict expert" if i < heads.strict_experts else "soft fill"
        table.add_row(str(head), kind, *(f"{value:.4f}" for value in worst))
    return table


def _layer_table(view: View, bank: "Bank") -> Table:
    """One bar per layer: a full block per voter, a shaded one per other sensitive head."""
    table = Table(
        "layer", "heads", "voters █, other sensitive heads ░", title=f"{view} view", title_justify="left"
    )
    voters = {head for heads in bank.head_sets.values() if heads.view == view for head in heads.heads}
    sensitive = bank.maps.get(f"expert.{view}.sensitive")
    others = set() if sensitive is None else {(int(la), int(he)) for la, he in sensitive.nonzero()} - voters
    for layer in range(bank.info.n_layers):
        n_voters, n_others = (sum(head[0] == layer for head in group) for group in (voters, others))
        if n_voters + n_others:
            table.add_row(str(layer), str(n_voters + n_others), "█" * n_voters + "░" * n_others)
    return table


def _plain_table(title: str) -> Table:
    table = Table(title=escape(title), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table
