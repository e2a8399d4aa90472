"""A simulated server over time: sequences, queue, cache, and tokens of a step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshscope.serving.outcome import ServingOutcome
from meshscope.serving.results import EngineRole, PoolFigures, TimelineSample

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


def _name(pool: PoolFigures, name: str) -> str:
    return name if pool.role is EngineRole.BOTH else f"{pool.role}: {name}"


def _points(pool: PoolFigures, value: Value) -> tuple[Point, ...]:
    """The samples at which the value changes."""
    points: list[Point] = []
    for sample in pool.timeline:
        if not points or points[-1][1] != value(sample):
            points.append((sample.time_s, float(value(sample))))
    return tuple(points)
