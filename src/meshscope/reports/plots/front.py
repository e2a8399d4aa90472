"""The Pareto front of a search as a picture: request tokens/s per chip over TTFT, colored by TPOT."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from meshscope.planner.search import Choice, PlanSearch
from meshscope.reports.model import Unit
from meshscope.reports.plots.style import (
    STYLE,
    WIDTH,
    label_text,
    legend_below,
    unit_axis,
    write_figure,
)

HEIGHT = 3.4  # inches
FINE = (1, 2, 5)
COLORS = "viridis"  # perceptually uniform, safe for color-blind readers
MARKERS = "os^Dv<>P"  # of plans; the last one is that of all others


def write_front_plot(search: PlanSearch, path: Path, *, to: str) -> None:
    """Draws the front of a search that has one into a file of the format `to`: png, svg or pdf."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        draw_front(search, figure.subplots())
        write_figure(figure, path, to=to, bbox_inches="tight")


def draw_front(search: PlanSearch, axes: Axes) -> None:
    """Draws the front with a marker for each plan, a ring around the winner, and the limit of TTFT."""
    first = search.front[0]
    tpots = [choice.tpot_s for choice in search.front]
    norm = Normalize(min(tpots), max(tpots))
    for (name, choices), marker in zip(_by_plan(search.front), MARKERS, strict=False):
        points = [(c.ttft_s, c.tokens_per_s_per_chip) for c in choices]
        colors = [c.tpot_s for c in choices]
        axes.scatter(
            *zip(*points, strict=True), c=colors, cmap=COLORS, norm=norm, marker=marker, s=30
        )
        axes.plot([], [], marker, color="gray", label=label_text(name))  # for the legend
    axes.scatter(
        [first.ttft_s],
        [first.tokens_per_s_per_chip],
        s=160,
        facecolors="none",
        edgecolors="black",
        label="winner",
    )
    if search.objective.ttft_s is not None:
        axes.axvline(search.objective.ttft_s, color="gray", linestyle="--", label="limit of TTFT")
    _scales(axes, search.front)
    mappable = ScalarMappable(cmap=COLORS, norm=norm)
    unit_axis(axes.figure.colorbar(mappable, ax=axes, label="TPOT").ax.yaxis, Unit.SECONDS)
    axes.set_title(label_text(f"{search.space.model.name} on {search.space.topology.name}", 90))
    legend_below(axes)


def _scales(axes: Axes, front: Sequence[Choice]) -> None:
    """Logarithmic scales with ticks at powers of ten, on a short scale also at 2 and 5 times them."""
    ttfts = [choice.ttft_s for choice in front]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=FINE if max(ttfts) < 100 * min(ttfts) else (1,)))
    axes.yaxis.set_major_locator(LogLocator(subs=FINE))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    unit_axis(axes.xaxis, Unit.SECONDS)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.set_xlabel("TTFT")
    axes.set_ylabel("request tokens/s per chip")


def _by_plan(choices: Sequence[Choice]) -> list[tuple[str, list[Choice]]]:
    """The choices of each plan, the plan of the winner first; plans beyond the markers as one group."""
    plans: dict[str, list[Choice]] = {}
    for choice in choices:
        plans.setdefault(str(choice.experiment.plan), []).append(choice)
    named = list(plans.items())
    if len(named) <= len(MARKERS):
        return named
    shown = named[: len(MARKERS) - 1]
    rest = [choice for _, of_plan in named[len(shown) :] for choice in of_plan]
    return [*shown, ("other plans", rest)]
