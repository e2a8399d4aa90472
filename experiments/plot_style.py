"""The style of the plots of `experiments` and `docs`, drawn by matplotlib: colors, axes and reproducible files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meshscope.reports.model import Unit, format_cell

# The Okabe-Ito palette, safe for color-blind readers.
COLORS = ("#D55E00", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
BLUE, GRAY = "#0072B2", "#999999"
FIXED = {
    "compute": BLUE, "waiting for memory": "#56B4E9", "waiting for stages": "#CC79A7", "idle": GRAY,
    "copy": GRAY, "weights": BLUE, "KV cache": "#E69F00", "temporaries": "#CC79A7", "other": GRAY,
}  # fmt: skip

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.dpi": 160,
    "svg.fonttype": "none",
    "svg.hashsalt": "meshscope",  # makes the SVG files reproducible
}
MIN_VISIBLE_FRAC = 0.003  # of the axis; the legend leaves out what is narrower


def save(figure: Figure, stem: Path) -> None:
    """Writes `stem`.png and `stem`.svg without what differs from run to run."""
    for to, dated in (("png", "Software"), ("svg", "Date")):
        path = stem.with_name(f"{stem.name}.{to}")
        figure.savefig(path, format=to, metadata={dated: None}, bbox_inches="tight")


def unit_axis(axis: Any, unit: Unit) -> None:
    """Formats ticks like the cells of a table: `1.5 ms`, `20 MB`."""
    axis.set_major_formatter(lambda value, _: "0" if value == 0 else format_cell(value, unit))


def stacked(axes: Axes, bars: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> None:
    """Draws one horizontal bar per row out of named segments."""
    others = [name for _, segments in bars for name, _ in segments if name not in FIXED]
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(dict.fromkeys(others))} | FIXED
    longest = max(sum(value for _, value in segments) for _, segments in bars)
    for row, (_, segments) in enumerate(bars):
        left = 0.0
        for name, value in segments:
            label = name if value >= MIN_VISIBLE_FRAC * longest else None
            axes.barh(row, value, left=left, height=0.62, color=colors[name], label=label)
            left += value
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
