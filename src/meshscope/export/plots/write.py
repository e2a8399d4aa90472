"""Writes every plot that a run can have; what it cannot have says why."""

from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl

from meshscope.export.plots import times, traffic
from meshscope.export.plots.style import STYLE, Drawn, Plotted, save
from meshscope.metrics.catalogue import metrics_of
from meshscope.metrics.of_run import subject_of
from meshscope.rundir.run import Run

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


def write_plots(run: Run, folder: Path) -> list[Drawn]:
    """Writes NAME.png and NAME.svg into the folder; all plots, those that were not drawn with their reasons."""
    with mpl.rc_context(STYLE):
        found = list(plots_of(run))
        for drawn in found:
            if drawn.figure is not None:
                save(drawn.figure, folder / drawn.name)
    return found


def plots_of(run: Run) -> Iterator[Drawn]:
    """Every plot of the run."""
    subject = subject_of(run)
    plotted = Plotted(run=run, subject=subject, metrics=metrics_of(subject))
    for draw in DRAW:
        yield from draw(plotted)
