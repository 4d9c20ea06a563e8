"""What `headrank calibrate` prints: tables of the head sets, the choice, and the pictures."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from headbank.bank import Bank
from headbank.jobs.calibrate import Calibration
from headbank.jobs.plots import CURVE_METRIC, curve_plot, head_map
from headbank.types import VIEWS, View


def _peak_bytes() -> int:
    """Largest resident size of this process so far; 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class Usage:
    """Time and memory, from when the model was loaded."""

    started: float = field(default_factory=time.perf_counter)
    loaded_bytes: int = field(default_factory=_peak_bytes)

    def summary(self, result: Calibration, reused: int) -> str:
        """Where the bank lies, how many samples made it, and what that cost."""
        rejected = ", ".join(f"{reason} {len(ids)}" for reason, ids in sorted(result.rejected.items()))
        styles = len(result.bank.training["styles"])
        return (
            f"bank: {result.folder}\n{result.used} samples used in {styles} prompt styles "
            f"({reused} captured earlier), rejected: {rejected or 'none'}\n"
            f"{time.perf_counter() - self.started:.0f} s after loading; peak memory {_peak_bytes() / 2**30:.2f} GiB, "
            f"{(_peak_bytes() - self.loaded_bytes) / 2**30:.2f} GiB over the peak of loading"
        )


def print_report(console: Console, bank: Bank) -> None:
    """All that was found, view by view: head sets with the choice, experts, fusions, curves."""
    for view in VIEWS:
        if view not in bank.defaults:
            continue
        console.print(_sets(bank, view))
        console.print(why(bank, view), soft_wrap=True)
    for table in (_experts(bank), _fusions(bank)):
        if table.row_count:
            console.print(table)
    for name, rows in sorted(bank.training.get("curves", {}).items()):
        console.print(_curve(name, rows))


def print_pictures(console: Console, result: Calibration) -> None:
    """Draw the expert maps of every default and the curves beside the bank, and print their paths."""
    bank = result.bank
    for view, name in sorted(bank.defaults.items()):
        heads = bank.head_sets.get(f"expert.{view}.{bank.head_sets[name].style.layout}")
        if heads is not None:
            path = result.folder.parent / f"{result.folder.name}.{view}.png"
            head_map(bank, heads, path)
            console.print(f"head map: {path}", soft_wrap=True)
    if bank.training.get("curves"):
        path = result.folder.parent / f"{result.folder.name}.curves.png"
        curve_plot(bank, path)
        console.print(f"curves: {path}", soft_wrap=True)


def why(bank: Bank, view: View) -> str:
    """One sentence on the default of a view."""
    name = bank.defaults[view]
    rows = {row["name"]: row[CURVE_METRIC] for row in bank.training["choice"][view]}
    others = [each for each in rows if each != name and each in bank.head_sets]
    best = _value(rows[name])
    text = f"default of the {view} view: {name}, the highest {CURVE_METRIC} on held-out questions ({best})"
    if not others:
        return text
    second = max(others, key=lambda each: rows[each]["mean"])
    near = "inside" if rows[second]["mean"] >= rows[name]["low"] else "outside"
    return f"{text}; next is {second} with {rows[second]['mean']:.3f}, {near} its interval"


def _sets(bank: Bank, view: View) -> Table:
    rows: Sequence[Mapping[str, Any]] = bank.training["choice"][view]
    metrics = [key for key, value in rows[0].items() if isinstance(value, dict)]
    table = Table(
        title=f"{bank.info.model_id}, {view} view: head sets on held-out questions, mean [95 % interval]",
        title_justify="left",
    )
    for column in ("", "head set", "prompt", "heads", "rule", *metrics, "ECE"):
        table.add_column(column, no_wrap=column == "head set")
    for row in sorted(rows, key=lambda row: -row[CURVE_METRIC]["mean"]):
        heads = bank.head_sets.get(row["name"])
        described = ("all", "-", "-")
        if heads is not None:
            error = f"{heads.dev_metrics['calibration_error']:.3f}"
            described = (str(len(heads.heads)), heads.default_aggregation, error)
        mark = "*" if row["name"] == bank.defaults[view] else ""
        cells = [_value(row[metric]) for metric in metrics]
        table.add_row(mark, row["name"], row["style"], *described[:2], *cells, described[2])
    return table


def _experts(bank: Bank) -> Table:
    table = Table(title="heads that find the golds wherever these stand", title_justify="left")
    for column in ("head set", "experts", "sensitive", "best worst-placement frequency", "voting heads"):
        table.add_column(column)
    for name, counts in sorted(bank.training.get("counts", {}).items()):
        heads = bank.head_sets[name]
        voting = f"{' '.join(map(str, heads.heads))} ({heads.strict_experts} strict)"
        frequency = f"{counts['best_worst_placement_frequency']:.2f}"
        table.add_row(name, str(counts["experts"]), str(counts["sensitive"]), frequency, voting)
    return table


def _fusions(bank: Bank) -> Table:
    table = Table(title="fusions", title_justify="left")
    for column in ("fusion", "weights", CURVE_METRIC, "ECE"):
        table.add_column(column)
    for name, fusion in sorted(bank.fusions.items()):
        features = zip((fusion.head_set, *fusion.voters), fusion.weights, strict=True)
        weights = ", ".join(f"{feature} {weight:.2f}" for feature, weight in features)
        metrics: Mapping[str, Any] = fusion.dev_metrics
        table.add_row(name, weights, _value(metrics[CURVE_METRIC]), f"{metrics['calibration_error']:.3f}")
    return table


def _curve(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A curve of the training record: a column for what was varied, and one for every detector."""
    table = Table(title=f"{name}: {CURVE_METRIC} on held-out questions", title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        cells = []
        for value in row.values():
            if isinstance(value, dict):
                cells.append(_value(value[CURVE_METRIC]))
            else:
                cells.append(f"{value:.2f}" if isinstance(value, float) else str(value))
        table.add_row(*cells)
    return table


def _value(metric: Mapping[str, float]) -> str:
    return f"{metric['mean']:.3f} [{metric['low']:.3f}, {metric['high']:.3f}]"
