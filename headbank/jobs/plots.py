"""Pictures of a head bank. Figures are built as objects: nothing here touches pyplot's global state."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from headbank.bank import Bank
from headbank.errors import BankError
from headbank.types import LAYOUTS, VIEWS, HeadId, HeadSet, View

DPI = 125
EXPERT, FILL = "strict expert", "soft fill"
CURVE_METRIC = "MAP"
"""What `curve_plot` draws."""

_WIDTH_INCHES, _MIN_HEIGHT_INCHES = 12.8, 7.2
# Rows below this height would let the names of neighbouring layers overlap.
_ROW_INCHES, _MARGINS_INCHES = 0.15, 1.8
_CURVES_INCHES = 5.6

_MARKS: dict[str, dict[str, Any]] = {
    EXPERT: {"marker": "o", "facecolors": "white", "edgecolors": "black"},
    FILL: {"marker": "D", "facecolors": "black", "edgecolors": "white"},
}


def head_map(bank: Bank, heads: HeadSet, path_png: Path) -> Figure:
    """Draw where a bank's heads sit, write it as PNG and return the figure.

    The picture is 1600 x 900 pixels, higher for models of more than 36 layers.
    Two heat maps [L, H] show the score of each head in its worst placement (activation frequency f, and mean
    average precision) in the view and layout of `heads`, with its voters marked; bars count sensitive heads and
    voters per layer. Raises BankError when the bank has no maps of that view and layout.
    """
    maps = f"expert.{heads.view}.{heads.style.layout}"
    height = max(_MIN_HEIGHT_INCHES, _MARGINS_INCHES + _ROW_INCHES * bank.info.n_layers)
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=DPI, layout=ConstrainedLayoutEngine(h_pad=0.08))
    figure.suptitle(
        f"{bank.info.model_id}: heads that vote in the {heads.view} view ({heads.name})", fontsize=14
    )
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=(4, 4, 1.6))
    panels = (
        (left, "frequency", "activation frequency, worst placement"),
        (middle, "soft", "mean average precision, worst placement"),
    )
    for axes, quantity, title in panels:
        worst = _map(bank, f"{maps}.{quantity}").amin(dim=0)
        image = axes.imshow(worst.numpy(), cmap="viridis", vmin=0, vmax=1, aspect="auto", origin="lower")
        figure.colorbar(image, ax=axes, location="bottom", shrink=0.8, aspect=40, label=title)
        axes.set_xlabel("head")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        _mark(axes, heads)
        _name(axes, heads, bank.info.n_heads)
    left.set_ylabel("layer (0 is next to the input)")
    left.yaxis.set_major_locator(MaxNLocator(nbins=14, integer=True, min_n_ticks=1))
    _layer_bars(right, _map(bank, f"{maps}.sensitive"), heads)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower right", title="voters", facecolor="0.85", borderaxespad=0.8)
    path_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path_png, format="png")
    return figure


def curve_plot(bank: Bank, path_png: Path) -> Figure:
    """Draw what quality costs: held-out MAP with 95 % intervals over the share of layers that have to be computed, one
    panel per view, and over the number of written tokens, where the bank measured that.

    A star is the view's default head set, at the layer that it needs. The picture is written as PNG and returned.
    Raises BankError when the bank's training record has no curves.
    """
    recorded: Mapping[str, Any] = bank.training.get("curves") or {}
    panels = [
        (kind, view)
        for kind in ("layers", "tokens")
        for view in VIEWS
        if any(f"{kind}.{view}.{layout}" in recorded for layout in LAYOUTS)
    ]
    if not panels:
        raise BankError("the bank has no curves; calibrate without --no-curves")
    figure = Figure(
        figsize=(_WIDTH_INCHES, _CURVES_INCHES), dpi=DPI, layout=ConstrainedLayoutEngine(h_pad=0.08)
    )
    figure.suptitle(f"{bank.info.model_id}: what quality costs", fontsize=14)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (kind, view) in zip(row, panels, strict=True):
        for number, layout in enumerate(LAYOUTS):
            _curves(axes, recorded.get(f"{kind}.{view}.{layout}", []), kind, layout, number)
        axes.set_title(f"{view} view")
        if kind == "layers":
            axes.set_xlabel("share of the layers")
            axes.set_xlim(0, 1.02)
            _mark_default(axes, bank, view)
        else:
            axes.set_xlabel("written tokens")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8)
    row[0].set_ylabel(f"{CURVE_METRIC} on held-out samples")
    path_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path_png, format="png")
    return figure


def _curves(axes: Any, rows: Sequence[Mapping[str, Any]], kind: str, layout: str, number: int) -> None:
    """One line with its band for every detector of a curve; layouts differ in style, detectors in colour."""
    detectors = [name for name in rows[0] if isinstance(rows[0][name], dict)] if rows else []
    x = [row["share" if kind == "layers" else "tokens"] for row in rows]
    for colour, detector in enumerate(detectors):
        values = [row[detector][CURVE_METRIC] for row in rows]
        style = {"color": f"C{colour}", "linestyle": ("-", "--")[number], "marker": "os"[number]}
        axes.plot(x, [v["mean"] for v in values], label=f"{detector}, {layout}", markersize=4, **style)
        bounds = ([v["low"] for v in values], [v["high"] for v in values])
        axes.fill_between(x, *bounds, color=f"C{colour}", alpha=0.12, linewidth=0)


def _mark_default(axes: Any, bank: Bank, view: View) -> None:
    heads = bank.head_sets.get(bank.defaults.get(view, ""))
    rows: Sequence[Mapping[str, Any]] = bank.training.get("choice", {}).get(view, [])
    measured = [row for row in rows if heads is not None and row["name"] == heads.name]
    if heads is None or not measured:
        return
    share = (1 + max(head.layer for head in heads.heads)) / bank.info.n_layers
    label = f"default: {heads.name}"
    axes.scatter(
        [share], [measured[0][CURVE_METRIC]["mean"]], marker="*", s=160, color="black", zorder=4, label=label
    )


def _map(bank: Bank, name: str) -> torch.Tensor:
    if name not in bank.maps:
        raise BankError(f"the bank has no map {name}")
    return bank.maps[name]


def _mark(axes: Any, heads: HeadSet) -> None:
    """Mark the voters; the first `strict_experts` of them are the experts."""
    groups = {EXPERT: heads.heads[: heads.strict_experts], FILL: heads.heads[heads.strict_experts :]}
    for label, members in groups.items():
        if members:
            x, y = [h.head for h in members], [h.layer for h in members]
            axes.scatter(
                x, y, s=45, linewidths=1.3, zorder=3, label=f"{label} ({len(members)})", **_MARKS[label]
            )


def _name(axes: Any, heads: HeadSet, n_heads: int) -> None:
    """Write the voters' names: neighbours in a layer share one text, which points into the panel."""
    runs: list[list[HeadId]] = []
    for head in sorted(heads.heads):
        near = runs and runs[-1][-1].layer == head.layer and head.head - runs[-1][-1].head < 0.3 * n_heads
        if near:
            runs[-1].append(head)
        else:
            runs.append([head])
    for run in runs:
        rightwards = run[-1].head < 0.62 * n_heads
        anchor = run[-1] if rightwards else run[0]
        axes.annotate(
            " ".join(map(str, run)),
            (anchor.head, anchor.layer),
            xytext=(8 if rightwards else -8, 0),
            textcoords="offset points",
            ha="left" if rightwards else "right",
            va="center_baseline",
            fontsize=9,
            color="white",
            path_effects=[withStroke(linewidth=2.5, foreground="black")],
        )


def _layer_bars(axes: Any, sensitive: torch.Tensor, heads: HeadSet) -> None:
    layers = np.arange(len(sensitive))
    voters = np.bincount([head.layer for head in heads.heads], minlength=len(layers))
    axes.barh(layers, sensitive.sum(dim=1).numpy(), height=0.85, color="0.75", label="sensitive")
    axes.barh(layers, voters, height=0.45, color="black", label="voters")
    axes.set_xlabel("heads in the layer")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
    axes.legend(loc="best", fontsize=9)
