"""The style of all plots: colors, axes with units, legends, and reproducible files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meshscope.analysis.catalog import Result, Unavailable
from meshscope.analysis.metric_inputs import MetricInputs
from meshscope.events.enums import Source
from meshscope.reports.charts.cost import COMPUTE, IDLE, MEMORY, STAGES
from meshscope.reports.model import Unit, format_cell
from meshscope.reports.plain import plain
from meshscope.store.run import RunRecord

# The Okabe-Ito palette, safe for color-blind readers.
COLORS = ("#D55E00", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
BLUE, SKY, PINK, GRAY = "#0072B2", "#56B4E9", "#CC79A7", "#999999"
FIXED = {
    COMPUTE: BLUE, MEMORY: SKY, STAGES: PINK, IDLE: GRAY, "copy": GRAY,
    "weights": BLUE, "KV cache": "#E69F00", "temporaries": PINK, "other": GRAY,
}  # fmt: skip
PARTS = {"attn": BLUE, "mlp": SKY, "moe.experts": SKY, "lm_head": PINK, "embed": "#F0E442"}
MARKERS = "os^Dv"

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
_DATED = {"png": "Software", "svg": "Date", "pdf": "CreationDate"}  # metadata that is left out
WIDTH = 6.6  # inches, two columns of a paper
MAX_LABEL, MAX_TITLE = 40, 90  # characters
MIN_VISIBLE_FRAC = 0.003  # of the axis; the legend leaves out what is narrower


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotRun:
    """A run to plot, with its metrics."""

    run: RunRecord
    inputs: MetricInputs
    metrics: Mapping[str, Result]

    @property
    def source(self) -> Source:
        """The strongest source of the run."""
        return self.run.manifest.source

    def reason(self, metric: str) -> str:
        """Why a metric has nothing to draw."""
        result = self.metrics[metric]
        unknown = "the devices, bytes or times of the collectives are unknown"
        return result.reason if isinstance(result, Unavailable) else unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot by name; without a figure, `reason` says why it is missing."""

    name: str
    figure: Figure | None = None
    reason: str = ""


def save(figure: Figure, stem: Path) -> None:
    """Writes `stem`.png and `stem`.svg without timestamps."""
    for to in ("png", "svg"):
        write_figure(figure, stem.with_name(f"{stem.name}.{to}"), to=to, bbox_inches="tight")


def write_figure(figure: Figure, path: Path, *, to: str, **layout: Any) -> None:
    """Writes a figure in the format `to`, png, svg or pdf, without what differs from run to run."""
    figure.savefig(path, format=to, metadata={_DATED[to]: None}, **layout)


def label_text(text: object, limit: int = MAX_LABEL) -> str:
    """Text from a run made safe for matplotlib: cut, without control characters or math mode."""
    return plain(str(text)[:limit]).replace("$", r"\$")


def finished(name: str, axes: Axes, heading: str, *, n_columns: int = 4) -> Plot:
    """The plot of these axes, with its title and a legend below."""
    axes.set_title(label_text(heading, MAX_TITLE))
    legend_below(axes, n_columns=n_columns)
    return Plot(name=name, figure=axes.figure)  # type: ignore[arg-type]  no subfigures


def new_axes(height: float = 2.6, *, width: float = WIDTH) -> Axes:
    """The axes of an empty figure; sizes in inches."""
    return Figure(figsize=(width, height)).subplots()


def unit_axis(axis: Any, unit: Unit) -> None:
    """Formats ticks like the cells of a table: `1.5 ms`, `20 MB`."""
    axis.set_major_formatter(lambda value, _: "0" if value == 0 else format_cell(value, unit))


def gib_axis(axes: Axes, limit: float | None) -> None:
    """Formats the x axis in GiB; it reaches to `limit` or to the longest bar."""
    highest = max(limit or 0, axes.get_xlim()[1], 1)
    step = 2.0 ** np.ceil(np.log2(highest / 6))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 2**30:g} GiB")
    axes.set_xticks([float(tick) for tick in np.arange(0, highest + step / 2, step)])


def lane_axis(axes: Axes, lanes: Sequence[str]) -> None:
    """Labels one row per lane, the first at the top."""
    axes.set_yticks(range(len(lanes)), [label_text(lane) for lane in lanes])
    axes.invert_yaxis()


def color_map(names: Sequence[str]) -> Callable[[str], str]:
    """A color for each name: fixed for compute, waiting and copies; the others in order."""
    others = [name for name in names if name not in FIXED]
    return lambda name: FIXED.get(name) or COLORS[others.index(name) % len(COLORS)]


def stacked(axes: Axes, bars: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> None:
    """Draws one horizontal bar per row out of named segments."""
    color = color_map(list(dict.fromkeys(name for _, segments in bars for name, _ in segments)))
    longest = max(sum(value for _, value in segments) for _, segments in bars)
    for row, (_, segments) in enumerate(bars):
        left = 0.0
        for name, value in segments:
            label = label_text(name) if value >= MIN_VISIBLE_FRAC * longest else None
            axes.barh(row, value, left=left, height=0.62, color=color(name), label=label)
            left += value
    axes.set_yticks(range(len(bars)), [label_text(label) for label, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)


def intervals(axes: Axes, rows: Iterable[tuple[float | None, float | None]]) -> None:
    """Draws a whisker from low to high over each row that has both."""
    for row, (low, high) in enumerate(rows):
        if low is not None and high is not None:
            axes.plot([low, high], [row, row], color="black", marker="|", linewidth=1)


def legend_below(axes: Axes, *, n_columns: int = 4) -> None:
    """Puts the legend under the axes, each name once."""
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    if not once:
        return
    height_in = axes.get_window_extent().height / axes.figure.dpi
    offset_in = 0.48 if axes.get_xlabel() else 0.28  # room for ticks, and for an axis label
    anchor = (0, -offset_in / height_in)
    axes.legend(
        once.values(), once.keys(), loc="upper left", bbox_to_anchor=anchor, ncols=n_columns
    )
