"""The one look of all plots: colours, axes with units, legends, and how they are written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meshscope.analysis.catalog import Result
from meshscope.analysis.metric_inputs import MetricInputs
from meshscope.events.enums import Source
from meshscope.readers.profile.timeline import safe
from meshscope.store.run import RunRecord
from meshscope.units import format_bytes, format_seconds
from meshscope.views.charts.cost import COMPUTE, IDLE, MEMORY, STAGES

# Okabe and Ito's colours, which readers with any colour vision tell apart.
COLOURS = ("#D55E00", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
BLUE, SKY, PINK, GREY = "#0072B2", "#56B4E9", "#CC79A7", "#999999"
FIXED = {COMPUTE: BLUE, MEMORY: SKY, STAGES: PINK, IDLE: GREY, "copy": GREY}
PARTS = {"attn": BLUE, "mlp": SKY, "moe.experts": SKY, "lm_head": PINK, "embed": "#F0E442"}

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
    "svg.hashsalt": "meshscope",  # the same file each time
}
WIDTH = 6.6  # inches, two columns of a paper
MAX_NAME = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Plotted:
    """A run that is drawn: with what metrics need of it, the metrics, and its strongest source."""

    run: RunRecord
    subject: MetricInputs
    metrics: Mapping[str, Result]

    @property
    def source(self) -> Source:
        """The strongest source that the run has."""
        return self.run.manifest.source


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A plot by its name, or why it cannot be drawn."""

    name: str
    figure: Figure | None = None
    reason: str = ""


def save(figure: Figure, stem: Path) -> None:
    """The figure as `stem`.png and `stem`.svg, without a date in them."""
    figure.savefig(
        stem.with_name(f"{stem.name}.png"), bbox_inches="tight", metadata={"Software": None}
    )
    figure.savefig(stem.with_name(f"{stem.name}.svg"), bbox_inches="tight", metadata={"Date": None})


def name_of(text: object) -> str:
    """A text from outside: cut, without what steers, and with no sign that matplotlib takes for a formula."""
    return safe(str(text)[:MAX_NAME]).replace("$", r"\$")


def new_axes(height: float = 2.6, *, width: float = WIDTH) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes."""
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def seconds_axis(axis: Any) -> None:
    """Ticks as `1.5 ms`."""
    axis.set_major_formatter(lambda value, _: "0" if value == 0 else format_seconds(value))


def bytes_axis(axis: Any) -> None:
    """Ticks as `20 MB`."""
    axis.set_major_formatter(lambda value, _: "0" if value == 0 else format_bytes(value))


def gib_axis(axes: Axes, limit: float | None) -> None:
    """The x axis in GiB, up to the limit or to what is drawn."""
    most = max(limit or 0, axes.get_xlim()[1], 1)
    step = 2.0 ** np.ceil(np.log2(most / 6))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 2**30:g} GiB")
    axes.set_xticks([float(tick) for tick in np.arange(0, most + step / 2, step)])


def colour_of(names: Sequence[str]) -> Callable[[str], str]:
    """A colour for each name: compute, waiting and copies always the same, the others in order."""
    others = [name for name in names if name not in FIXED]
    return lambda name: FIXED.get(name) or COLOURS[others.index(name) % len(COLOURS)]


def stacked(axes: Axes, bars: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> None:
    """Horizontal bars, one below the other, of segments with a legend."""
    names = list(dict.fromkeys(name for _, segments in bars for name, _ in segments))
    colour = colour_of(names)
    for row, (_, segments) in enumerate(bars):
        left = 0.0
        for name, value in segments:
            axes.barh(row, value, left=left, height=0.62, color=colour(name), label=name_of(name))
            left += value
    axes.set_yticks(range(len(bars)), [name_of(label) for label, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)


def legend_below(axes: Axes, *, n_columns: int = 4) -> None:
    """A legend under the axes and their label, each name once."""
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    if not once:
        return
    inches = axes.get_window_extent().height / axes.figure.dpi
    room = 0.48 if axes.get_xlabel() else 0.28  # inches for ticks, and for a label
    place = (0, -room / inches)
    axes.legend(once.values(), once.keys(), loc="upper left", bbox_to_anchor=place, ncols=n_columns)
