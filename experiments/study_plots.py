"""The plots of docs/evidence/study.md, drawn from its dataset: `python experiments/study_plots.py`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from plot_style import COLORS, STYLE, stacked, unit_axis

from meshscope.reports.model import Unit

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "evidence" / "study"
sys.path.insert(0, str(ROOT / "docs"))
# ruff: noqa: E402

from study_claims import claims, database, rows_of

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
NEAREST = f"""
    select n_chips, plan, e2e_s, e2e_low_s, e2e_high_s, row_number() over (partition by n_chips order by e2e_s) as place
    from points where model = '{MODEL}' and chip = 'v6e' and batch = 16 and prompt = 1024 and fits and n_chips <= 64
    qualify place <= 3 order by n_chips, place
"""
OUTPUTS = f"""
    with t as (
      select plan, batch, n.n_out, prefill_s + (n.n_out - 1) * decode_s as request_s
      from points, (select unnest([1, 128, 1024, 8192]) as n_out) n
      where model = '{MODEL}' and topology = 'v6e:4x4' and prompt = 1024 and fits and batch in (16, 256)
    ), r as (select *, request_s / min(request_s) over (partition by batch, n_out) as x from t)
    select plan, n_out, max(x) filter (batch = 16), max(x) filter (batch = 256) from r
    where plan in ('tp=16', 'dp=2,tp=8', 'dp=4,tp=4', 'tp=16,sp') group by all order by plan, n_out
"""
PRICES = f"""
    with t as (
      select chip, e2e_s, dollars * n_chips * e2e_s / 3600 / (batch * output) * 1e6 as dollars
      from points join prices using (chip) where model = '{MODEL}' and prompt = 1024 and fits
    )
    select chip, e2e_s, dollars from t
    qualify dollars <= min(dollars) over (partition by chip order by e2e_s) order by chip, e2e_s
"""
RATES = """
    select distinct p.chip, c.payload_bytes, c.wire_bytes / c.dur_s / 1e9 from collectives c join points p using (point)
    where p.plan = 'tp=8' and c.kind = 'all_reduce' and c.axis = 'tp' and c.group_size = 8 order by 1, 2
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


def _rows(name: str) -> list[dict[str, Any]]:
    return rows_of(claims()[name])


def _figure(n: int = 1, height: float = 3.2) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(6.6, height), layout="constrained")
    return figure, figure.subplots(1, n, squeeze=False)[0]


def intervals() -> Figure:
    """The three fastest plans of each slice with their intervals, Qwen3-32B, batch 16."""
    figure, (axes,) = _figure(height=4.2)
    rows = database().execute(NEAREST).fetchall()
    for at, (chips, _, seconds, low, high, place) in enumerate(rows):
        axes.plot([low, high], [at, at], color=COLORS[place - 1], linewidth=4, alpha=0.5)
        axes.plot(
            [seconds],
            [at],
            "o",
            color=COLORS[place - 1],
            label=f"place {place}" if not chips - 4 else None,
        )
    axes.set_yticks(range(len(rows)), [f"{chips} chips, {plan}" for chips, plan, *_ in rows])
    axes.invert_yaxis()
    unit_axis(axes.xaxis, Unit.SECONDS)
    axes.set_title("request and its interval, batch 16")
    axes.legend(loc="lower right")
    return figure


def parts() -> Figure:
    """Compute, exposed communication and waiting for stages of the fastest plan, and of tp over all chips."""
    figure, (axes,) = _figure(height=4.2)
    bars: list[tuple[str, list[tuple[str, float]]]] = []
    for row in (row for row in _rows("why-winners") if row["batch"] <= 16):
        spent = {
            "compute": row["compute_s"],
            "exposed": row["exposed_s"],
            "waiting for stages": row["bubble_s"],
        }
        alone = {"compute": row["tp_compute_s"], "exposed": row["tp_exposed_s"]}
        head = f"{row['n_chips']} chips, batch {row['batch']}"
        bars += [
            (f"{head}: {row['plan']}", [*spent.items()]),
            (f"tp={row['n_chips']}", [*alone.items()]),
        ]
    stacked(axes, bars)
    unit_axis(axes.xaxis, Unit.SECONDS)
    axes.set_title("parts of a request")
    handles, labels = axes.get_legend_handles_labels()
    known = dict(zip(labels, handles, strict=True))
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=3)
    return figure


def outputs() -> Figure:
    """The request of four plans on 16 chips over the output, against the fastest."""
    figure, both = panels(OUTPUTS, ("batch 16", "batch 256"), "output tokens")
    for axes in both:
        axes.set_ylim(bottom=1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} x")
    return figure


def price() -> Figure:
    """Dollars per million output tokens against the time of a request: the frontier of each generation."""
    figure, (axes,) = _figure()
    rows = database().execute(PRICES).fetchall()
    for i, chip in enumerate(dict.fromkeys(row[0] for row in rows)):
        of_chip = [row for row in rows if row[0] == chip]
        times, dollars = [row[1] for row in of_chip], [row[2] for row in of_chip]
        axes.plot(times, dollars, marker=MARKERS[i], color=COLORS[i], label=chip)
    axes.set_xscale("log")
    axes.set_yscale("log")
    unit_axis(axes.xaxis, Unit.SECONDS)
    axes.yaxis.set_major_formatter(lambda value, _: f"${value:g}")
    axes.set_xlabel("request")
    axes.set_title("per million output tokens, list prices")
    axes.legend()
    return figure


def _by_class(columns: Sequence[tuple[str, str]]) -> tuple[Figure, Sequence[Axes]]:
    """Points of every class and model, one panel for each (column, title)."""
    rows, (figure, both) = _rows("classes"), _figure(len(columns))
    classes = ("dp", "pp", "cp", "ep", "tp", "sp", "fsdp")
    for axes, (column, title) in zip(both, columns, strict=True):
        for i, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
            points = [
                (row["class"], row[column]) for row in rows if row["model"] == model and row[column]
            ]
            axes.plot(
                [classes.index(name) for name, _ in points],
                [value for _, value in points],
                MARKERS[i], color=COLORS[i], label=model.rpartition("/")[2],
            )  # fmt: skip
        axes.set_xticks(range(len(classes)), classes)
        axes.set_yscale("log")
        axes.set_title(title)
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure, both


def classes() -> Figure:
    """Bytes that a device sends in a step, by class and model."""
    figure, both = _by_class(
        (("decode_bytes", "sent in a decode step"), ("prefill_bytes", "sent in prefill"))
    )
    for axes in both:
        unit_axis(axes.yaxis, Unit.BYTES)
    return figure


def class_times() -> Figure:
    """Seconds of the collectives of a class in a step, hidden or not."""
    figure, both = _by_class(
        (("decode_s", "collectives of a decode step"), ("prefill_s", "of prefill"))
    )
    for axes in both:
        unit_axis(axes.yaxis, Unit.SECONDS)
    return figure


def rates() -> Figure:
    """What a device sends per second in an all-reduce of tp=8, by its payload and chip."""
    figure, (axes,) = _figure()
    rows = database().execute(RATES).fetchall()
    for i, chip in enumerate(dict.fromkeys(row[0] for row in rows)):
        of_chip = [row for row in rows if row[0] == chip]
        sizes, rate = [row[1] for row in of_chip], [row[2] for row in of_chip]
        axes.plot(sizes, rate, marker=MARKERS[i], color=COLORS[i], label=chip)
    axes.set_xscale("log")
    axes.set_yscale("log")
    unit_axis(axes.xaxis, Unit.BYTES)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} GB/s")
    axes.set_xlabel("payload")
    axes.set_title("sent by a device in an all-reduce of tp=8")
    axes.legend()
    return figure


PLOTS = {
    "exposed": exposed, "volume": volume, "scaling": scaling, "intervals": intervals, "parts": parts,
    "outputs": outputs, "price": price, "classes": classes, "class-times": class_times, "rates": rates,
}  # fmt: skip


def write(folder: Path) -> None:
    """Every plot as NAME.svg, the same for the same data."""
    with mpl.rc_context(STYLE):
        for name, draw in PLOTS.items():
            draw().savefig(folder / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    write(OUT)
