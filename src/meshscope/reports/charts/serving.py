"""A simulated server over time: sequences, queue, cache, and tokens of a step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshscope.reports.charts.spec import (
    TIP,
    Chart,
    Layer,
    axis,
    color_by,
    columnar,
    flattened,
    layered,
    name_of,
)
from meshscope.reports.model import Unit
from meshscope.serving.results import EngineRole, PoolFigures, TimelineSample
from meshscope.serving.simulation import ServingOutcome
from meshscope.units import format_seconds

Point = tuple[float, float]
Value = Callable[[TimelineSample], float]

# Title, unit, and the lines of an engine with their values.
_CHARTS: tuple[tuple[str, str, dict[str, Value]], ...] = (
    (
        "Sequences in an engine",
        "",
        {"in the engine": lambda s: s.n_running, "waiting": lambda s: s.n_waiting},
    ),
    ("Cache in use", "%", {"cache": lambda s: 100 * s.cache_frac}),
    (
        "Tokens of a step",
        "",
        {"prompt": lambda s: s.n_prompt_tokens, "decoded": lambda s: s.n_decode_tokens},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeries:
    """A named value over time, in seconds; each holds until the next."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingChart:
    """Values of one unit over time; `unit` is empty for counts."""

    title: str
    unit: str
    end_s: float
    series: tuple[TimeSeries, ...]


def serving_charts(outcome: ServingOutcome) -> Iterator[ServingChart]:
    """The charts of a simulated server, one engine of each role."""
    pools = outcome.result.pools
    end_s = max((pool.timeline[-1].time_s for pool in pools if pool.timeline), default=0.0)
    for title, unit, values in _CHARTS:
        series = (
            TimeSeries(name=_name(pool, name), points=_points(pool, value))
            for pool in pools
            for name, value in values.items()
        )
        used = tuple(one for one in series if any(v for _, v in one.points))
        yield ServingChart(title=title, unit=unit, end_s=end_s, series=used)


def series_chart(chart: ServingChart) -> Chart:
    """The lines of a chart, with marks at the highest value of each and at its last change."""
    names = [name_of(one.name) for one in chart.series]
    ends = [(*one.points, (chart.end_s, one.points[-1][1])) for one in chart.series]
    marks = [
        {"name": name, "t": t, "v": v, "tip": f"{name}, {what}: {v:,.4g}{chart.unit}\nat {format_seconds(t)}"}
        for name, one in zip(names, chart.series, strict=True)
        for what, (t, v) in (("highest", max(one.points, key=lambda p: p[1])), ("last change", one.points[-1]))
    ]  # fmt: skip
    x: Layer = {"field": "t", "type": "quantitative", "axis": axis(Unit.SECONDS), "scale": {"domain": [0, chart.end_s or 1], "nice": False}}  # fmt: skip
    y: Layer = {"field": "v", "type": "quantitative", "axis": axis(title=chart.unit or None)}
    color = color_by("name", names)
    lines: Layer = {
        "data": {"values": [columnar("t v", points, name=n) for n, points in zip(names, ends, strict=True)]},
        "transform": [flattened("t v")],
        "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2},
        "encoding": {"x": x, "y": y, "color": color},
    }  # fmt: skip
    dots: Layer = {
        "data": {"values": marks},
        "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
        "encoding": {"x": x, "y": y, "color": {**color, "legend": None}, "tooltip": TIP},
    }
    highest = (f"{s.name} up to {max(v for _, v in s.points):,.4g}" for s in chart.series)
    return Chart(
        kind="series",
        title=chart.title,
        description="; ".join(highest) or "nothing",
        spec=layered(lines, dots, height=180),
    )


def _name(pool: PoolFigures, name: str) -> str:
    return name if pool.role is EngineRole.BOTH else f"{pool.role}: {name}"


def _points(pool: PoolFigures, value: Value) -> tuple[Point, ...]:
    """The samples at which the value changes."""
    points: list[Point] = []
    for sample in pool.timeline:
        if not points or points[-1][1] != value(sample):
            points.append((sample.time_s, float(value(sample))))
    return tuple(points)
