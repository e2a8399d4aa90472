"""The plots of docs/evidence/study.md, drawn from its dataset: `python experiments/study_plots.py`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from plot_style import COLORS, STYLE, unit_axis

from meshscope.reports.model import Unit

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "evidence" / "study"
sys.path.insert(0, str(ROOT / "docs"))
# ruff: noqa: E402

from study_claims import database

MODEL = "Qwen/Qwen3-32B"
MARKERS = "os^Dv"

EXPOSED = f"""
    select chip, n_devices, decode_exposed_s / decode_s, prefill_exposed_s / prefill_s from points
    where model = '{MODEL}' and strategy = 'tensor' and batch = 16 and prompt = 1024 and refused is null
      and n_devices <= 64 order by chip, n_devices
"""
VOLUME = f"""
    select strategy, batch, decode_wire_bytes, prefill_wire_bytes from points
    where model = '{MODEL}' and topology = 'v6e:4x4' and prompt = 1024 and refused is null
      and strategy in ('tensor', 'data, tensor 4', 'pipeline 4, tensor', 'sharded weights')
    order by strategy, batch
"""
SCALING = """
    select model, n_chips, max(tokens_per_s_per_chip) filter (batch = 4 * n_chips),
           max(tokens_per_s_per_chip) filter (batch = 16)
    from points where chip = 'v6e' and prompt = 1024 and fits group by all order by model, n_chips
"""


def lines(axes: Axes, rows: Sequence[tuple[Any, ...]], column: int) -> None:
    """A line for each value of the first column, over the second; unknown values are left out."""
    for i, name in enumerate(dict.fromkeys(row[0] for row in rows)):
        known = [row for row in rows if row[0] == name and row[column] is not None]
        axes.plot(
            [row[1] for row in known],
            [row[column] for row in known],
            marker=MARKERS[i % len(MARKERS)],
            color=COLORS[i % len(COLORS)],
            label=str(name).rpartition("/")[2],
        )
    ticks = sorted({row[1] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def panels(query: str, titles: tuple[str, str], across: str) -> tuple[Figure, Sequence[Axes]]:
    """The last two columns of the query side by side."""
    rows = database().execute(query).fetchall()
    figure = Figure(figsize=(6.6, 3.1), layout="constrained")
    both = figure.subplots(1, 2, squeeze=False)[0]
    for column, (axes, title) in enumerate(zip(both, titles, strict=True), start=2):
        lines(axes, rows, column)
        axes.set_title(title)
        axes.set_xlabel(across)
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure, both


def exposed() -> Figure:
    """Share of exposed communication over tp, by chip."""
    figure, both = panels(EXPOSED, ("decode", "prefill"), "tp")
    for axes in both:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    return figure


def volume() -> Figure:
    """Bytes that a device sends in a step over the batch, by strategy."""
    figure, both = panels(VOLUME, ("sent in a decode step", "sent in prefill"), "batch")
    for axes in both:
        axes.set_yscale("log")
        unit_axis(axes.yaxis, Unit.BYTES)
    return figure


def scaling() -> Figure:
    """Tokens per second and chip of the best plan over chips, by model."""
    titles = ("tokens/s/chip, 4 sequences a chip", "tokens/s/chip, batch 16")
    figure, both = panels(SCALING, titles, "chips")
    for axes in both:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    return figure


PLOTS = {"exposed": exposed, "volume": volume, "scaling": scaling}


def write(folder: Path) -> None:
    """Every plot as NAME.svg, the same for the same data."""
    with mpl.rc_context(STYLE):
        for name, draw in PLOTS.items():
            draw().savefig(folder / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    write(OUT)
