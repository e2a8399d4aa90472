"""Writes all plots of one run, or of several runs side by side."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib as mpl

from meshscope.analysis.catalog import metrics_of
from meshscope.analysis.metric_inputs import metric_inputs
from meshscope.reports.plots import roofline, times, traffic
from meshscope.reports.plots.style import STYLE, Plot, PlotRun, save
from meshscope.store.run import RunRecord

# In the order of the report.
ONE_RUN = (
    times.cost_plots,
    traffic.volume_plots,
    traffic.size_plots,
    traffic.matrix_plots,
    traffic.torus_plots,
    times.timeline_plots,
    times.burst_plots,
    roofline.roofline_plots,
    traffic.memory_plots,
)
SEVERAL_RUNS = (
    times.cost_plots_by_run,
    times.scaling_plots,
    traffic.volume_plots_by_run,
    traffic.memory_plots_by_run,
)


def write_plots(runs: Sequence[RunRecord], folder: Path) -> list[Plot]:
    """Writes NAME.png and NAME.svg into the folder; plots without data carry the reason instead."""
    with mpl.rc_context(STYLE):
        plots = list(plots_of(runs))
        for plot in plots:
            if plot.figure is not None:
                save(plot.figure, folder / plot.name)
    return plots


def plots_of(runs: Sequence[RunRecord]) -> Iterator[Plot]:
    """All plots of a single run, or the comparison plots of several runs."""
    plot_runs = [_plot_run(run) for run in runs]
    if len(plot_runs) > 1:
        for compare in SEVERAL_RUNS:
            yield from compare(plot_runs)
        return
    for draw in ONE_RUN:
        yield from draw(plot_runs[0])


def _plot_run(run: RunRecord) -> PlotRun:
    inputs = metric_inputs(run)
    return PlotRun(run=run, inputs=inputs, metrics=metrics_of(inputs))
