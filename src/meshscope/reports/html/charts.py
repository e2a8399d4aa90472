"""The data of the charts as compact JSON for the script of the page."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshscope.analysis.roofline import Roofline
from meshscope.planner.search import Choice, PlanSearch
from meshscope.reports.charts.cost import Breakdown, CostBar
from meshscope.reports.charts.serving import ServingChart
from meshscope.reports.charts.timeline import Bursts, StepTimeline, TimeSpan, without_stage
from meshscope.reports.charts.traffic import SizeCount, Torus, TrafficMatrix
from meshscope.reports.plain import short
from meshscope.reports.plan import choice_name

# Lane, start, duration, label, name that decides the color, and (times, period) of its loops.
LaneSpan = tuple[str, float, float, str, str, Sequence[tuple[int, float]]]

MAX_NAME = 80  # characters of a name in a chart
WINNER, ON_FRONT, OTHER_PLANS = "winner", "Pareto front", "best of another plan"
CLOSEST, FASTEST = "closest", "least latency"
MAX_CHIPS = 1024  # of a torus chart


def _name(text: object) -> str:
    return short(text, MAX_NAME)


def cost_data(bars: Sequence[tuple[str, CostBar]]) -> dict[str, Any]:
    """Bars of steps; a step without a breakdown is one segment."""
    return {
        "unit": "s",
        "bars": [
            {
                "name": name,
                "total": bar.step_s,
                "low": bar.low_s,
                "high": bar.high_s,
                "segments": [[_name(label), seconds] for label, seconds in bar.segments]
                or [["no breakdown", bar.step_s]],
            }
            for name, bar in bars
        ],
    }


def waterfall_data(
    names: Sequence[str], spans: Mapping[str, Sequence[Breakdown]]
) -> dict[str, Any]:
    """The breakdown of every run, the best first, for each span to choose: request or step."""
    runs = [_name(name) for name in names]
    return {
        "unit": "s",
        "selects": [
            {"label": "time of", "options": list(spans), "at": 0},
            {"label": "baseline", "options": runs, "at": 0},
            {"label": "compared", "options": runs, "at": 1},
        ],
        "spans": [
            [{_name(part): seconds for part, seconds in of_run.items()} for of_run in breakdowns]
            for breakdowns in spans.values()
        ],
    }


def front_data(
    search: PlanSearch, shown: Sequence[Choice], others: Sequence[Choice]
) -> dict[str, Any]:
    """Choices as points (plan, details, TTFT, TPOT, request tokens/s per chip, group), the best first."""
    objective = search.objective
    measures = ["TTFT", "TPOT", "request tokens/s per chip"]
    names = (WINNER, ON_FRONT) if search.front else (CLOSEST, FASTEST)
    groups = [(names[0], shown[:1]), (names[1], shown[1:]), (OTHER_PLANS, others)]
    return {
        "measures": [[name, unit] for name, unit in zip(measures, ("s", "s", ""), strict=True)],
        "best": names[0],
        "limits": [objective.ttft_s, objective.tpot_s, None],
        "selects": [
            {"label": "across", "options": measures, "at": 0},
            {"label": "up", "options": measures, "at": 2},
        ],
        "points": [
            [
                _name(choice.experiment.plan),
                _name(choice_name(choice)),
                [choice.ttft_s, choice.tpot_s, choice.tokens_per_s_per_chip],
                group,
            ]
            for group, choices in groups
            for choice in choices
        ],
    }


def matrix_data(matrices: Iterable[TrafficMatrix]) -> dict[str, Any]:
    """Traffic matrices to choose from; equal values are written once."""
    return {"items": [_matrix(matrix) for matrix in matrices]}


def _matrix(matrix: TrafficMatrix) -> dict[str, Any]:
    values: dict[float, int] = {}
    cells = [
        number
        for source, target, n_bytes in matrix.cells
        for number in (source, target, values.setdefault(n_bytes, len(values)))
    ]
    return {
        "name": f"{matrix.phase}, {_name(matrix.axis)}",
        "n": -(-matrix.n_devices // matrix.fold),
        "devices": matrix.n_devices,
        "fold": matrix.fold,
        "values": list(values),
        "cells": cells,
    }


def torus_data(tori: Iterable[Torus]) -> dict[str, Any]:
    """Tori to choose from, one per phase."""
    return {
        "items": [
            {
                "name": torus.phase,
                "sizes": torus.sizes,
                "wraps": torus.wraps,
                "slices": torus.n_slices,
                "chips": torus.chips,
                "links": [
                    [n.slice_index, n.source, n.target, int(n.is_wrap), n.load_bytes, n.link_s]
                    for n in torus.links
                ],
            }
            for torus in tori
        ]
    }


def timeline_data(
    timeline: StepTimeline, bounds: tuple[float, float] | None = None
) -> dict[str, Any]:
    """Spans on lanes, the core first; `bounds` is the range shown first."""
    spans = ((s.lane, s.start_s, s.dur_s, s.label, _color(s), s.repeats) for s in timeline.spans)
    return _lane_chart("s", timeline.end_s, timeline.lanes, spans) | {
        "range": list(bounds or (0, timeline.end_s))
    }


def _color(span: TimeSpan) -> str:
    """The name that decides the color: the part on the core lane, the axis of a collective."""
    lane = without_stage(span.lane)
    return span.label.partition(",")[0] if lane == "core" else lane


def bursts_data(bursts: Bursts) -> dict[str, Any]:
    """The bursts of each axis as spans on its own lane."""
    spans = (
        (axis, begin, end - begin, f"{_name(axis)}: {n_bytes:,.0f} B", axis, ())
        for axis, begin, end, n_bytes in bursts.bursts
    )
    return _lane_chart("s" if bursts.unit == "s" else "", bursts.end, bursts.axes, spans)


def _lane_chart(
    unit: str, end: float, lanes: Sequence[str], spans: Iterable[LaneSpan]
) -> dict[str, Any]:
    """Spans as [lane, start, duration, label, [times, period]...], with lanes and labels by index."""
    labels: dict[tuple[str, str], int] = {}
    rows = [
        [
            *(lanes.index(lane), _brief(start), _brief(duration)),
            labels.setdefault((short(label, 2 * MAX_NAME), _name(color)), len(labels)),
            *([n, _brief(period)] for n, period in repeats),
        ]
        for lane, start, duration, label, color, repeats in spans
    ]
    return {
        "unit": unit,
        "end": end,
        "whole": [0, end],
        "range": [0, end],
        "lanes": list(map(_name, lanes)),
        "spans": rows,
        "labels": [label for label, _ in labels],
        "colors": [color for _, color in labels],
    }


def _brief(value: float) -> float:
    """The value with seven digits, which is finer than any chart shows."""
    return float(f"{value:.7g}")


def sizes_data(counts: Iterable[SizeCount]) -> dict[str, Any]:
    """Payload sizes of each phase to choose from."""
    by_phase: dict[str, list[list[Any]]] = {}
    for size in counts:
        point = [_name(size.axis), size.kind, size.payload_bytes, size.count]
        by_phase.setdefault(size.phase, []).append(point)
    items = [{"name": phase, "points": points} for phase, points in by_phase.items()]
    return {"items": sorted(items, key=lambda item: item["name"], reverse=True)}


def series_data(chart: ServingChart) -> dict[str, Any]:
    """Values over time that hold until the next."""
    return {
        "unit": chart.unit,
        "end": chart.end_s,
        "lines": [
            {"name": one.name, "points": [[_brief(t), _brief(v)] for t, v in one.points]}
            for one in chart.series
        ],
    }


def roofline_data(roofline: Roofline) -> dict[str, Any]:
    """The peaks and the points."""
    return {
        "peak": roofline.peaks.flops_per_s,
        "hbm": roofline.peaks.hbm_bytes_per_s,
        "points": [
            [p.source, p.phase, _name(p.part), p.flops_per_byte, p.flops_per_s, p.compute_s]
            for p in roofline.points
        ],
    }
