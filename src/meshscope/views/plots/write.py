"""Writes every plot that a run, or several side by side, can have; what cannot be drawn says why."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib as mpl

from meshscope.analysis.catalog import metrics_of
from meshscope.analysis.run_inputs import metric_inputs
from meshscope.store.run import RunRecord
from meshscope.views.plots import several, times, traffic
from meshscope.views.plots.style import STYLE, Drawn, Plotted, save

# In the order of the report.
DRAW = (
    times.draw_cost,
    traffic.draw_volume,
    traffic.draw_sizes,
    traffic.draw_matrices,
    traffic.draw_tori,
    times.draw_timelines,
    times.draw_intervals,
    times.draw_roofline,
    times.draw_memory,
)


# Of several runs, in the order of the report.
DRAW_SEVERAL = (
    several.draw_costs,
    several.draw_scaling,
    several.draw_volumes,
    several.draw_memories,
)


def write_plots(runs: Sequence[RunRecord], folder: Path) -> list[Drawn]:
    """Writes NAME.png and NAME.svg into the folder; all plots, those that were not drawn with their reasons."""
    with mpl.rc_context(STYLE):
        found = list(plots_of(runs))
        for drawn in found:
            if drawn.figure is not None:
                save(drawn.figure, folder / drawn.name)
    return found


def plots_of(runs: Sequence[RunRecord]) -> Iterator[Drawn]:
    """Every plot of the only run, or of the runs side by side."""
    plotted = [_plotted(run) for run in runs]
    if len(plotted) > 1:
        for draw_several in DRAW_SEVERAL:
            yield from draw_several(plotted)
        return
    for draw in DRAW:
        yield from draw(plotted[0])


def _plotted(run: RunRecord) -> Plotted:
    subject = metric_inputs(run)
    return Plotted(run=run, subject=subject, metrics=metrics_of(subject))
