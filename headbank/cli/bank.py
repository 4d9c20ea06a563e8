"""`headrank bank`: look at a head bank, check it, draw it, compare two."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headbank.errors import BankError, InputError
from headbank.types import LAYOUTS, Fusion, HeadId, HeadSet, ModelInfo, View

if TYPE_CHECKING:
    from headbank.bank import Bank, Difference

SHOWN = 8
"""Heads of a set and values of a list that are printed; of more only the number is."""

# Commands import what they need: `headrank --help` loads neither torch nor matplotlib.
bank_app = typer.Typer(help="Show, verify, plot and compare head banks.", no_args_is_help=True)

Folder = Annotated[
    Path, typer.Argument(help="The bank's folder, or a root folder that holds exactly one bank.")
]


@bank_app.command()
def show(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as it is on disk.")] = False,
) -> None:
    """Print whose bank it is, which heads vote by default and why, every head set, and how the bank was made."""
    from headbank import bank as banks

    place = banks.locate(folder)
    bank = banks.read(place)
    if as_json:
        typer.echo((place / banks.MANIFEST).read_text(encoding="utf-8"), nl=False)
        return
    console = Console()
    console.print(_identity(place, bank.info))
    console.print(_defaults_table(bank))
    for view in sorted(bank.defaults):
        rows = _choice(bank.training, view)
        if rows:
            console.print(_choice_table(view, rows))
    console.print(_sets_table(bank))
    if bank.fusions:
        console.print(_fusions_table(bank.fusions))
    for _, name in sorted(bank.defaults.items()):
        heads = bank.head_sets[name]
        console.print(_voters_table(heads, bank))
        console.print(_layer_table(heads, bank))
        console.print(_pairs(f"{name}: dev metrics", heads.dev_metrics))
    console.print(_pairs("Training record", {k: v for k, v in bank.training.items() if k != "choice"}))


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
    out: Annotated[Path, typer.Option(help="PNG file to write.", dir_okay=False)],
    view: Annotated[View | None, typer.Option(help="Mark the expert heads of this view.")] = None,
    name: Annotated[
        str | None, typer.Option("--set", help="Mark the voters of this head set, instead of --view.")
    ] = None,
) -> None:
    """Draw the heads' scores as heat maps, with the voters marked."""
    from headbank import bank as banks
    from headbank.jobs.plots import head_map

    if (view is None) == (name is None):
        raise InputError("set", "give either --view or --set")
    bank = banks.read(banks.locate(folder))
    head_map(bank, _drawn(bank, view) if view else _named(bank, name), out)
    typer.echo(f"wrote {out}")


@bank_app.command()
def diff(
    left: Annotated[Path, typer.Argument(metavar="A", help="A bank, as for `show`.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="The bank to compare it with.")],
) -> None:
    """Print what makes two banks fit other models or rank otherwise; maps, metrics and records are not compared."""
    from headbank import bank as banks

    found = banks.diff(*(banks.read(banks.locate(folder)) for folder in (left, right)))
    if not found:
        typer.echo("no difference in model, defaults, head sets and fusions")
        return
    table = Table("what", "A", "B", "note", title="Differences", title_justify="left")
    for difference in found:
        table.add_row(escape(difference.part), *map(escape, _sides(difference)))
    Console().print(table)


def _drawn(bank: "Bank", view: View) -> HeadSet:
    """The expert set of a view: in the view's default layout, or another one, the first whose maps the bank has."""
    default = bank.head_sets.get(bank.defaults.get(view, ""))
    preferred = sorted(LAYOUTS, key=lambda layout: default is None or layout != default.style.layout)
    names = [f"expert.{view}.{layout}" for layout in preferred]
    for name in names:
        if name in bank.head_sets and f"{name}.frequency" in bank.maps:
            return bank.head_sets[name]
    raise BankError(f"the bank has no maps of {' or '.join(names)}; name a head set with --set")


def _named(bank: "Bank", name: str | None) -> HeadSet:
    if name not in bank.head_sets:
        raise BankError(f"the bank has no such head set; it has: {', '.join(sorted(bank.head_sets))}")
    return bank.head_sets[name]


def _identity(place: Path, info: ModelInfo) -> Table:
    table = _plain_table(f"Head bank {place}")
    rows = {
        "model": info.model_id,
        "revision": info.revision,
        "layers": str(info.n_layers),
        "heads": f"{info.n_heads}, kv heads {info.n_kv_heads}",
        "width": str(info.d_model),
        "dtype": info.dtype,
        "config hash": info.config_hash,
        "tokenizer hash": info.tokenizer_hash,
        "template hash": info.template_hash,
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _defaults_table(bank: "Bank") -> Table:
    table = Table("view", "head set", "prompt", "aggregation", title="Defaults", title_justify="left")
    for view, name in sorted(bank.defaults.items()):
        heads = bank.head_sets[name]
        table.add_row(view, escape(name), str(heads.style), heads.default_aggregation)
    return table


def _choice(training: Mapping[str, Any], view: View) -> list[dict[str, Any]]:
    """The rows that the default of a view was chosen from, where the record has them."""
    choice = training.get("choice")
    rows = choice.get(view) if isinstance(choice, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _choice_table(view: View, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = sorted({key for row in rows for key in row}, key=lambda key: (key != "name", key))
    table = Table(*map(escape, columns), title=f"{view} view: chosen from", title_justify="left")
    for row in rows:
        table.add_row(*(escape(_measured(row[key])) if key in row else "" for key in columns))
    return table


def _measured(value: object) -> str:
    """A mean with its interval, or any other value."""
    if isinstance(value, dict) and value.keys() >= {"mean", "low", "high"}:
        return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    return _brief(value)


def _sets_table(bank: "Bank") -> Table:
    columns = ("name", "heads", "strict", "aggregation", "exponent", "weights", "platt")
    table = Table(*columns, title="Head sets", title_justify="left")
    for name, heads in sorted(bank.head_sets.items()):
        table.add_row(
            escape(name),
            _heads(heads.heads),
            f"{heads.strict_experts} of {len(heads.heads)}" if heads.detector == "expert" else "",
            heads.default_aggregation,
            f"{heads.exponent:.4g}",
            "yes" if heads.weights else "no",
            _platt(heads.platt),
        )
    return table


def _fusions_table(fusions: Mapping[str, Fusion]) -> Table:
    table = Table("name", "weights", "dense model", "platt", title="Fusions", title_justify="left")
    for name, fusion in sorted(fusions.items()):
        features = zip((fusion.head_set, *fusion.voters), fusion.weights, strict=True)
        weights = ", ".join(f"{feature} {weight:.4g}" for feature, weight in features)
        table.add_row(escape(name), escape(weights), escape(fusion.dense_model), _platt(fusion.platt))
    return table


def _heads(heads: Sequence[HeadId]) -> str:
    more = f" and {len(heads) - SHOWN} more" if len(heads) > SHOWN else ""
    return " ".join(map(str, heads[:SHOWN])) + more


def _platt(fitted: tuple[float, float] | None) -> str:
    return "no" if fitted is None else f"{fitted[0]:.4g}, {fitted[1]:.4g}"


def _voters_table(heads: HeadSet, bank: "Bank") -> Table:
    """The first heads of a set with what the bank's expert maps say of each in its worst placement."""
    maps = f"expert.{heads.view}.{heads.style.layout}"
    quantities = [q for q in ("frequency", "strength", "soft") if f"{maps}.{q}" in bank.maps]
    table = Table("head", "strict expert", "weight", title=escape(heads.name), title_justify="left")
    for quantity in quantities:
        table.add_column(f"worst {quantity}", justify="right")
    for i, head in enumerate(heads.heads[:SHOWN]):
        worst = [float(bank.maps[f"{maps}.{q}"][..., head.layer, head.head].min()) for q in quantities]
        weight = f"{heads.weights[i]:.4f}" if heads.weights else "1"
        strict = "yes" if i < heads.strict_experts else "no"
        table.add_row(str(head), strict, weight, *(f"{value:.4f}" for value in worst))
    return table


def _layer_table(heads: HeadSet, bank: "Bank") -> Table:
    """One bar per layer: a full block per voter, a shaded one per other sensitive head."""
    columns = ("layer", "heads", "voters █, other sensitive heads ░")
    table = Table(*columns, title=f"{escape(heads.name)} by layer", title_justify="left")
    voters = set(heads.heads)
    sensitive = bank.maps.get(f"expert.{heads.view}.{heads.style.layout}.sensitive")
    others = set() if sensitive is None else {(int(la), int(he)) for la, he in sensitive.nonzero()} - voters
    for layer in range(bank.info.n_layers):
        n_voters, n_others = (sum(head[0] == layer for head in group) for group in (voters, others))
        if n_voters + n_others:
            table.add_row(str(layer), str(n_voters + n_others), "█" * n_voters + "░" * n_others)
    return table


def _sides(difference: "Difference") -> tuple[str, str, str]:
    """How both sides of a difference are printed, with a note; of two long lists the first place that differs."""
    left, right = difference.left, difference.right
    if difference.jaccard is not None:
        return _side(left), _side(right), f"Jaccard {difference.jaccard:.2f}"
    if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right) > 2:
        places = [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b]
        note = f"{len(places)} of {len(left)} values differ, the first is number {places[0]} from 0"
        return _side(left[places[0]]), _side(right[places[0]]), note
    return _side(left), _side(right), ""


def _side(value: object) -> str:
    if isinstance(value, tuple) and value and all(isinstance(item, HeadId) for item in value):
        return _heads(value)
    if isinstance(value, str | int | float | list | tuple):
        return _brief(value)
    return "-" if value is None else str(value)


def _pairs(title: str, record: Mapping[str, Any]) -> Table:
    table = _plain_table(title)
    for name, value in sorted(record.items()):
        table.add_row(escape(name), escape(_brief(value)))
    return table


def _brief(value: object) -> str:
    """A value on one line: numbers to four digits, long lists, such as the sample ids, as their number."""
    if isinstance(value, list | tuple) and len(value) > SHOWN:
        return f"{len(value)} entries"
    if isinstance(value, str):
        return value
    rounded = json.loads(json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.4g}"))
    return json.dumps(rounded, ensure_ascii=False)


def _plain_table(title: str) -> Table:
    table = Table(title=escape(title), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table
