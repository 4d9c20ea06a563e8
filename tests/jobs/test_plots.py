"""The picture of a bank, read back from the figure's artists."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from headbank.bank import Bank
from headbank.errors import BankError
from headbank.jobs.plots import EXPERT, FILL, curve_plot, head_map
from headbank.types import VIEWS, HeadId, HeadSet, PromptStyle, View
from tests.bank.sample_bank import model_info, sample_bank

JOINT = sample_bank().head_sets["expert.query.joint"]


def panels(figure: Figure) -> list[Axes]:
    """The heat maps and the bars, without the colour bars."""
    return figure.axes[:3]


def marks(axes: Axes) -> dict[str, list[tuple[int, int]]]:
    """(layer, head) of every marker, by the first words of its legend entry."""
    found = [artist for artist in axes.collections if isinstance(artist, PathCollection)]
    return {
        str(artist.get_label()).rsplit(" ", 1)[0]: [
            (int(y), int(x)) for x, y in np.asarray(artist.get_offsets())
        ]
        for artist in found
    }


def png_size(path: Path) -> tuple[int, int]:
    raw = path.read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", raw[16:24])
    return width, height


@pytest.mark.parametrize("view", VIEWS)
def test_the_voters_are_marked_and_named(tmp_path: Path, view: View) -> None:
    bank = sample_bank()
    figure = head_map(bank, bank.head_sets[f"expert.{view}.joint"], tmp_path / "heads.png")
    assert png_size(tmp_path / "heads.png") == (1600, 900)
    for axes in panels(figure)[:2]:
        assert marks(axes) == {EXPERT: [(4, 1), (2, 3)], FILL: [(5, 0)]}
        assert sorted(text.get_text() for text in axes.texts) == ["L2H3", "L4H1", "L5H0"]
    assert f"{view} view" in figure.get_suptitle()


def test_the_colours_are_the_worst_placement(tmp_path: Path) -> None:
    bank = sample_bank()
    figure = head_map(bank, JOINT, tmp_path / "heads.png")
    frequency, soft = (axes.images[0].get_array() for axes in panels(figure)[:2])
    # In the sample bank f rises and the average precision falls from placement to placement.
    assert np.array_equal(np.asarray(frequency), bank.maps["expert.query.joint.frequency"][0].numpy())
    assert np.array_equal(np.asarray(soft), bank.maps["expert.query.joint.soft"][2].numpy())
    for axes in panels(figure)[:2]:
        assert axes.images[0].get_cmap().name == "viridis"
        assert axes.get_ylim()[0] < axes.get_ylim()[1], "layer 0 is at the bottom"


def test_the_bars_count_sensitive_heads_and_voters(tmp_path: Path) -> None:
    bars = panels(head_map(sample_bank(), JOINT, tmp_path / "heads.png"))[2]
    widths = [bar.get_width() for bar in bars.patches]
    assert widths[:6] == [0, 0, 4, 0, 1, 0]
    assert widths[6:] == [0, 0, 1, 0, 1, 1]


def _wide(heads: tuple[HeadId, ...], layers: int, strict: int) -> tuple[Bank, HeadSet]:
    maps = {f"expert.query.joint.{name}": torch.zeros(2, layers, 32) for name in ("frequency", "soft")}
    maps["expert.query.joint.sensitive"] = torch.zeros(layers, 32, dtype=torch.uint8)
    chosen = HeadSet("expert.query.joint", "expert", "query", heads, "borda", strict_experts=strict)
    bank = sample_bank(
        info=model_info(n_layers=layers, n_heads=32), maps=maps, head_sets={chosen.name: chosen}
    )
    return bank, chosen


def test_names_of_one_layer_never_overlap_and_stay_in_the_panel(tmp_path: Path) -> None:
    heads = tuple(
        HeadId(layer, head) for layer, head in [(5, 16), (5, 17), (5, 18), (5, 0), (5, 31), (6, 15), (4, 17)]
    )
    figure = head_map(*_wide(heads, 36, 0), tmp_path / "heads.png")
    for axes in panels(figure)[:2]:
        assert marks(axes) == {FILL: [tuple(head) for head in heads]}
        assert " ".join(text.get_text() for text in axes.texts).split() == [
            str(head) for head in sorted(heads)
        ]
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == 5
        assert not [1 for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
        assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 for box in boxes)


def test_a_deep_model_gets_a_higher_picture(tmp_path: Path) -> None:
    figure = head_map(*_wide((HeadId(70, 3),), 80, 1), tmp_path / "heads.png")
    assert png_size(tmp_path / "heads.png") == (1600, 1725)
    assert marks(panels(figure)[0]) == {EXPERT: [(70, 3)]}


def test_maps_are_of_the_sets_layout_and_missing_ones_are_named(tmp_path: Path) -> None:
    parallel = replace(JOINT, name="expert.query.parallel", style=PromptStyle("parallel"))
    bank = sample_bank()
    with pytest.raises(BankError, match=r"no map expert.query.parallel.frequency"):
        head_map(bank, parallel, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
    maps = {name.replace("joint", "parallel"): 1 - values.double() for name, values in bank.maps.items()}
    figure = head_map(sample_bank(maps=bank.maps | maps), parallel, tmp_path / "heads.png")
    frequency = panels(figure)[0].images[0].get_array()
    assert np.array_equal(np.asarray(frequency), maps["expert.query.parallel.frequency"].amin(0).numpy())


def curve(kind: str, steps: int, base: float) -> list[dict[str, Any]]:
    """Rows whose MAP rises by 0.1 a step, within 0.05."""
    rows = []
    for i in range(1, steps + 1):
        mean = base + 0.1 * i
        value = {"MAP": {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}}
        at: dict[str, Any] = {"layers": i, "share": i / 4} if kind == "layers" else {"tokens": 2**i}
        rows.append(at | {"expert": value, "greedy": value})
    return rows


def with_curves(**curves: list[dict[str, Any]]) -> Bank:
    named = {name.replace("_", "."): rows for name, rows in curves.items()}
    choice = {"query": [{"name": "weighted.query.parallel", "MAP": {"mean": 0.62, "low": 0.5, "high": 0.7}}]}
    return sample_bank(training={"curves": named, "choice": choice})


def test_curves_are_drawn_with_their_intervals(tmp_path: Path) -> None:
    bank = with_curves(
        layers_query_joint=curve("layers", 4, 0.1),
        layers_query_parallel=curve("layers", 3, 0.2),
        tokens_response_joint=curve("tokens", 5, 0.3),
    )
    figure = curve_plot(bank, tmp_path / "new" / "curves.png")
    assert png_size(tmp_path / "new" / "curves.png") == (1600, 700)
    layers, tokens = figure.axes
    assert (layers.get_title(), tokens.get_title()) == ("query view", "response view")
    assert (layers.get_xlabel(), tokens.get_xlabel()) == ("share of the layers", "written tokens")
    lines = {str(line.get_label()): line for line in layers.lines}
    assert set(lines) == {f"{d}, {la}" for d in ("expert", "greedy") for la in ("joint", "parallel")}
    assert np.allclose(lines["greedy, joint"].get_xdata(), [0.25, 0.5, 0.75, 1.0])
    assert np.allclose(lines["greedy, joint"].get_ydata(), [0.2, 0.3, 0.4, 0.5])
    assert np.allclose(lines["expert, parallel"].get_ydata(), [0.3, 0.4, 0.5])
    joint, parallel = lines["expert, joint"], lines["expert, parallel"]
    assert joint.get_color() == parallel.get_color() != lines["greedy, joint"].get_color()
    assert joint.get_linestyle() != parallel.get_linestyle()
    band = layers.collections[0].get_paths()[0].vertices
    assert np.asarray(band)[:, 1].min() == pytest.approx(0.15)
    assert np.asarray(band)[:, 1].max() == pytest.approx(0.55)
    assert [float(x) for x in tokens.lines[0].get_xdata()] == [2, 4, 8, 16, 32]  # type: ignore[union-attr]


def test_the_default_is_marked_at_the_layer_that_it_needs(tmp_path: Path) -> None:
    layers = curve_plot(with_curves(layers_query_joint=curve("layers", 4, 0.1)), tmp_path / "c.png").axes[0]
    stars = [artist for artist in layers.collections if isinstance(artist, PathCollection)]
    assert [str(star.get_label()) for star in stars] == ["default: weighted.query.parallel"]
    # Its deepest head is in the fifth of six layers.
    assert np.allclose(np.asarray(stars[0].get_offsets()), [[5 / 6, 0.62]])


def test_a_view_without_a_default_has_no_mark(tmp_path: Path) -> None:
    figure = curve_plot(with_curves(layers_response_joint=curve("layers", 2, 0.1)), tmp_path / "c.png")
    assert not [artist for artist in figure.axes[0].collections if isinstance(artist, PathCollection)]


@pytest.mark.parametrize("training", [{}, {"curves": {}}])
def test_a_bank_without_curves_says_so(tmp_path: Path, training: dict[str, Any]) -> None:
    with pytest.raises(BankError, match="no curves"):
        curve_plot(sample_bank(training=training), tmp_path / "c.png")
    assert list(tmp_path.iterdir()) == []
