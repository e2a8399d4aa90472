"""Figures 1 and 4 to 10 of Xu et al. (docs/evidence/paper.md) for their H100s and a TPU slice: `make figures`.

Each figure is FIGURE.png, FIGURE.svg and FIGURE.csv in docs/evidence/figures. All bars but the printed ones are
predictions (`meshscope predict`): those of the slice with the intervals of the time model, those of H100s with the
profile of their nodes (tools/fit_nodes.py). Nothing was measured on a TPU. Values that the paper prints in its
tables and text are drawn beside them; values that it only draws are left out.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from plot_style import (
    BLUE,
    COLORS,
    GRAY,
    STYLE,
    save,
    stacked,
    unit_axis,
)

from meshscope.analysis.request import basis_of, modeled_request_time
from meshscope.analysis.totals import request_totals
from meshscope.api.records import predicted_record
from meshscope.events.collective import Collective
from meshscope.events.enums import REQUEST_PHASES, Kind, Phase
from meshscope.hardware.interconnect.profile import load_profile
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.experiment import experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Engine
from meshscope.plans.workload import Workload
from meshscope.reports.charts.cost import segments_of
from meshscope.reports.model import Unit
from meshscope.store.run import RunRecord

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from fit_nodes import PROFILE as PROFILE_FILE
from fit_nodes import ROOT, experiment, published, request_s

OUT = ROOT / "docs" / "evidence" / "figures"
PROFILE = load_profile(PROFILE_FILE)

SMALL, MIDDLE, LARGE = (
    "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-2-13b",
)
FOUR = ("tp=4", "tp=2,pp=2", "pp=4")
SLICES = {2: "v6e:1x2", 4: "v6e:2x2", 8: "v6e:2x4"}
PROMPT = OUTPUT = 128

OURS, THEIRS = "predicted, our program on v6e", "predicted, vLLM's conventions"
NODES = "predicted, vLLM on nodes of four H100"
PRINTED = "printed in the paper (vLLM on H100)"
LOOKS = {OURS: BLUE, THEIRS: COLORS[1], NODES: COLORS[1], PRINTED: GRAY}

# Values printed in the paper's tables III to V; tools/published_requests.csv has those of the text on figures 8 to 10.
TABLE_III = {SMALL: (57, 7239, 786_432, 6_144), MIDDLE: (65, 8255, 1_048_576, 8_192), LARGE: (81, 10_287, 1_310_720, 10_240)}  # fmt: skip
TABLE_V = {"pp=2": (2, 254), "pp=4": (6, 762)}  # sends in prefill and decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of a figure, as a row of its CSV file; `low` and `high` bound its interval, if it has one."""

    figure: int
    panel: str
    model: str
    plan: str
    slice: str
    series: str
    x: str
    value: float
    low: float | None = None
    high: float | None = None
    unit: str
    basis: str


def run_of(
    model: str, plan: str, *, engine: Engine = Engine.MESHSCOPE, output: int = OUTPUT
) -> RunRecord:
    """The prediction of one request in the paper's conditions: batch 1, prompt 128, bf16."""
    parsed = parse_plan(plan)
    n = parsed.n_devices
    topology = SLICES[n] if engine is Engine.MESHSCOPE else f"h100:{n}"
    experiment = experiment_of(
        model=read_model(model),
        plan=parsed,
        topology=parse_topology(topology),
        workload=Workload(batch=1, prompt=PROMPT, output=output),
        engine=engine,
    )
    return predicted_record(experiment, ("meshscope", "predict"))


def figure_1() -> Iterator[Point]:
    """Compute and communication of a request, Llama-3.1-8B, by plan, on H100s and on a slice."""
    for panel, engine in (("vLLM on H100", Engine.VLLM), ("our program on v6e", Engine.MESHSCOPE)):
        for plan in ("tp=2", "pp=2", *FOUR):
            run = run_of(MIDDLE, plan, engine=engine)
            total: dict[str, float] = {}
            for time in run.times:
                n_steps = 1 if time.phase is Phase.PREFILL else OUTPUT - 1
                for name, seconds in segments_of(time):
                    total[name] = total.get(name, 0.0) + seconds * n_steps
            whole = sum(total.values())
            for name, seconds in total.items():
                yield _point(1, panel, MIDDLE, run, name, plan, seconds / whole, "share")


def figure_4() -> Iterator[Point]:
    """All-reduces with tp=4: counts in prefill and decode, and payload per request."""
    for model, (n_prefill, n_decode, prefill_bytes, decode_bytes) in TABLE_III.items():
        sides = ((OURS, Engine.MESHSCOPE), (THEIRS, Engine.VLLM))
        for series, engine in sides:
            run = run_of(model, "tp=4", engine=engine)
            rows = [row for row in run.rows if row.kind is Kind.ALL_REDUCE]
            counts = request_totals(rows)
            for phase in REQUEST_PHASES:
                panel = f"all-reduces in {phase}"
                yield _point(
                    4, panel, model, run, series, _short(model), counts[phase].count, "count"
                )
            size = sum(total.payload_bytes for total in counts.values())
            yield _point(4, "payload of a request", model, run, series, _short(model), size, "B")
        printed = (("all-reduces in prefill", n_prefill), ("all-reduces in decode", n_decode))
        for panel, count in printed:
            yield _printed(
                4, panel, model, "tp=4", _short(model), count, "count", "tables III and IV"
            )
        size = n_prefill * prefill_bytes + n_decode * decode_bytes
        yield _printed(4, "payload of a request", model, "tp=4", _short(model), size, "B", "table IV: count x size")  # fmt: skip


def figure_5() -> Iterator[Point]:
    """Stage sends with pp=2 and pp=4: count and payload per request."""
    for plan, (n_prefill, n_decode) in TABLE_V.items():
        for series, engine in ((OURS, Engine.MESHSCOPE), (THEIRS, Engine.VLLM)):
            run = run_of(MIDDLE, plan, engine=engine)
            rows = [row for row in run.rows if row.kind in {Kind.SEND, Kind.PERMUTE}]
            totals = request_totals(rows).values()
            yield _point(5, "sends in a request", MIDDLE, run, series, plan, sum(t.count for t in totals), "count")  # fmt: skip
            size = sum(t.payload_bytes for t in totals)
            yield _point(5, "payload of a request", MIDDLE, run, series, plan, size, "B")
        yield _printed(5, "sends in a request", MIDDLE, plan, plan, n_prefill + n_decode, "count", "table V")  # fmt: skip
        size = (n_prefill * PROMPT + n_decode) * 4096 * 2
        yield _printed(5, "payload of a request", MIDDLE, plan, plan, size, "B", "table V: count x shape x 2 bytes")  # fmt: skip


def figure_6() -> Iterator[Point]:
    """Volume of a request on four devices, by model and plan."""
    for model in (SMALL, MIDDLE, LARGE):
        for plan in FOUR:
            for series, engine in ((OURS, Engine.MESHSCOPE), (THEIRS, Engine.VLLM)):
                run = run_of(model, plan, engine=engine)
                yield _point(6, _short(model), model, run, series, plan, _volume(run.rows), "B")


def figure_7() -> Iterator[Point]:
    """Volume of a request on four devices against its output tokens."""
    for model in (SMALL, MIDDLE, LARGE):
        for plan in FOUR:
            for output in (128, 256, 512):
                run = run_of(model, plan, output=output)
                yield _point(
                    7, _short(model), model, run, plan, str(output), _volume(run.rows), "B"
                )


def figure_8() -> Iterator[Point]:
    """Latency of a request, Llama-3.2-3B, by tensor parallelism."""
    yield from _latencies(8, SMALL, ("tp=2", "tp=4", "tp=8"))


def figure_9() -> Iterator[Point]:
    """Latency of a request, Llama-3.2-3B, by pipeline parallelism."""
    yield from _latencies(9, SMALL, ("pp=2", "pp=4", "pp=8"))


def figure_10() -> Iterator[Point]:
    """Latency of a request, Llama-2-13B on eight devices, by plan."""
    yield from _latencies(10, LARGE, ("tp=8", "tp=4,pp=2", "tp=2,pp=4", "pp=8"))


def _latencies(figure: int, model: str, plans: Sequence[str]) -> Iterator[Point]:
    for plan in plans:
        run = run_of(model, plan)
        request = modeled_request_time(run.times, n_decode_steps=OUTPUT - 1)
        for panel, seconds in (
            ("e2e", request.e2e),
            ("TTFT", request.ttft),
            ("TPOT", request.tpot),
        ):
            assert seconds is not None
            yield _point(
                figure, panel, model, run, OURS, plan, seconds.value_s, "s",
                low=seconds.low_s, high=seconds.high_s,
            )  # fmt: skip
        asked = experiment(model, plan)
        nodes = predicted_record(asked, ("meshscope", "predict"), PROFILE)
        for panel, value_s in request_s(asked, PROFILE).items():
            yield _point(figure, panel, model, nodes, NODES, plan, value_s, "s")
        for row in published():
            if (row["figure"], row["plan"]) == (str(figure), plan):
                yield _printed(
                    figure, row["metric"], model, plan, plan, float(row["published_s"]), "s",
                    f"text on figure {figure}",
                )  # fmt: skip


def _volume(rows: Sequence[Collective]) -> float:
    """Wire bytes of a request on one device, or summed over one device of every pipeline stage."""
    return float(sum(total.wire_bytes for total in request_totals(rows).values()))


def _short(model: str) -> str:
    return model.rpartition("/")[2]


def _point(  # noqa: PLR0913, PLR0917  a row has many columns
    figure: int, panel: str, model: str, run: RunRecord, series: str, x: str, value: float, unit: str,
    *, low: float | None = None, high: float | None = None,
) -> Point:  # fmt: skip
    experiment = run.manifest.experiment
    assert experiment.topology is not None
    basis = basis_of(run.times) if unit in {"s", "share"} else None
    return Point(
        figure=figure, panel=panel, model=_short(model), plan=str(experiment.plan), slice=experiment.topology.name,
        series=series, x=x, value=value, low=low, high=high, unit=unit,
        basis=f"predicted{f': {basis}' if basis else ''}",
    )  # fmt: skip


def _printed(  # noqa: PLR0913, PLR0917  a row has many columns
    figure: int, panel: str, model: str, plan: str, x: str, value: float, unit: str, where: str
) -> Point:
    return Point(
        figure=figure, panel=panel, model=_short(model), plan=str(parse_plan(plan)), slice="H100, 4 a node",
        series=PRINTED, x=x, value=value, unit=unit, basis=f"the paper, {where}",
    )  # fmt: skip


FIGURES: dict[int, Callable[[], Iterator[Point]]] = {
    1: figure_1, 4: figure_4, 5: figure_5, 6: figure_6, 7: figure_7, 8: figure_8, 9: figure_9,
    10: figure_10,
}  # fmt: skip


def draw(points: Sequence[Point]) -> Figure:
    """The panels of a figure side by side."""
    panels = list(dict.fromkeys(point.panel for point in points))
    number = points[0].figure
    figure = Figure(
        figsize=(3.1 * len(panels) if len(panels) > 1 else 6.4, 2.9), layout="constrained"
    )
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(every, panels, strict=True):
        of_panel = [point for point in points if point.panel == panel]
        drawer = DRAWERS.get(number, _draw_bars)
        drawer(axes, of_panel)
        axes.set_title(panel)
    handles, labels = every[0].get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(once.values(), once.keys(), loc="outside lower left", ncols=3)
    return figure


def _draw_shares(axes: Axes, points: Sequence[Point]) -> None:
    plans = list(dict.fromkeys(point.x for point in points))
    bars = [(plan, [(p.series, p.value) for p in points if p.x == plan]) for plan in plans]
    stacked(axes, bars)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlim(0, 1)


def _draw_lines(axes: Axes, points: Sequence[Point]) -> None:
    for i, plan in enumerate(dict.fromkeys(point.series for point in points)):
        line = [point for point in points if point.series == plan]
        axes.plot([int(p.x) for p in line], [p.value for p in line], "os^"[i] + "-", color=COLORS[i], label=plan)  # fmt: skip
    axes.set_xticks([128, 256, 512])
    axes.set_xlabel("output tokens")
    axes.set_ylim(0)
    unit_axis(axes.yaxis, Unit.BYTES)


def _draw_bars(axes: Axes, points: Sequence[Point]) -> None:
    places = list(dict.fromkeys(point.x for point in points))
    series = [name for name in LOOKS if any(point.series == name for point in points)]
    width = 0.8 / len(series)
    for i, name in enumerate(series):
        for point in (p for p in points if p.series == name):
            at = places.index(point.x) - 0.4 + (i + 0.5) * width
            hatch = "//" if name == PRINTED else None
            axes.bar(at, point.value, width * 0.92, color=LOOKS[name], label=name, hatch=hatch)
    axes.set_xticks(
        range(len(places)), [place.replace(",", "\n").removeprefix("Llama-") for place in places]
    )
    if points[0].unit == "B":
        unit_axis(axes.yaxis, Unit.BYTES)
    else:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_latencies(axes: Axes, points: Sequence[Point]) -> None:
    """Points instead of bars, because a logarithmic scale has no zero; lines are the intervals."""
    places = list(dict.fromkeys(point.x for point in points))
    for name, aside, marker in ((OURS, -0.16, "o"), (NODES, 0.0, "s"), (PRINTED, 0.16, "D")):
        for point in (p for p in points if p.series == name):
            at = places.index(point.x) + aside
            if point.low is not None and point.high is not None:
                axes.plot([at, at], [point.low, point.high], color=LOOKS[name], linewidth=1.4)
            axes.plot([at], [point.value], marker, linestyle="", color=LOOKS[name], label=name)
    axes.set_xticks(range(len(places)), [place.replace(",", "\n") for place in places])
    axes.set_xlim(-0.6, len(places) - 0.4)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    unit_axis(axes.yaxis, Unit.SECONDS)


DRAWERS = {
    1: _draw_shares, 7: _draw_lines, 8: _draw_latencies, 9: _draw_latencies, 10: _draw_latencies,
}  # fmt: skip


def write(number: int, folder: Path) -> None:
    """The figure as PNG, SVG and CSV."""
    points = list(FIGURES[number]())
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"figure-{number}"
    with stem.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Point)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, points))
    save_drawing(points, stem)


def read_points(path: Path) -> list[Point]:
    """The points of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row |= {name: float(row[name]) if row[name] else None for name in ("value", "low", "high")}
        row["figure"] = int(row["figure"])
    return [Point(**row) for row in rows]


def save_drawing(points: Sequence[Point], stem: Path) -> None:
    """The points as `stem`.png and `stem`.svg."""
    settings: dict[Any, Any] = {**STYLE, "figure.dpi": 110}
    with mpl.rc_context(settings):
        save(draw(points), stem)


def main() -> None:
    """Draws one figure, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--figure", type=int, choices=sorted(FIGURES), help="the number of one figure; default: all"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="output folder")
    asked = parser.parse_args()
    for number in FIGURES if asked.figure is None else (asked.figure,):
        write(number, asked.out)


if __name__ == "__main__":
    main()
