"""The plot of a simulated server over time."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from meshscope.reports.charts.serving import serving_charts
from meshscope.reports.plots.style import (
    BLUE,
    COLORS,
    MAX_TITLE,
    STYLE,
    WIDTH,
    label_text,
    write_figure,
)
from meshscope.reports.serving import serving_title
from meshscope.serving.outcome import ServingOutcome

HEIGHT = 1.7  # inches of a chart


def write_serving_plot(outcome: ServingOutcome, path: Path, *, to: str) -> None:
    """Writes the charts one below the other as PNG or SVG."""
    charts = list(serving_charts(outcome))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT * len(charts)), layout="constrained")
        panels = figure.subplots(len(charts), sharex=True, squeeze=False)
        for axes, chart in zip(panels[:, 0], charts, strict=True):
            for number, series in enumerate(chart.series):
                times, values = zip(
                    *series.points, (chart.end_s, series.points[-1][1]), strict=True
                )
                color = (BLUE, *COLORS)[number]
                axes.step(times, values, where="post", color=color, label=label_text(series.name))
            axes.set_title(
                label_text(f"{chart.title}, {chart.unit}" if chart.unit else chart.title)
            )
            axes.set_ylim(bottom=0)
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderpad=0)
        panels[-1, 0].set_xlabel("seconds since the start")
        figure.suptitle(label_text(serving_title(outcome), MAX_TITLE))
        write_figure(figure, path, to=to)
