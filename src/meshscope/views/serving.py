"""A simulated load as text."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from meshscope.serving.results import Percentiles, ServiceLimits, ServingFigures
from meshscope.serving.simulation import SimulatedLoad
from meshscope.units import format_seconds
from meshscope.views.tables import new_table

_TIMES = ("ttft", "tpot", "itl", "e2e")
_LABELS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "request"}


def serving_text(
    result: SimulatedLoad, objective: ServiceLimits, *, n_chips: int, conditions: tuple[str, ...]
) -> Iterator[RenderableType]:
    """Conditions, the verdict on the rate, percentiles, rates and the engine's utilization."""
    figures = result.figures
    for line in conditions:
        yield Text(line)
    yield Text("")
    yield Text(rate_verdict(result), "" if result.is_stable is not False else "bold red")
    yield Text("")
    table = new_table("", "mean", "p50", "p90", "p99")
    for name in _TIMES:
        values: Percentiles | None = getattr(figures, name)
        if values is not None:
            cells = (values.mean_s, values.p50_s, values.p90_s, values.p99_s)
            table.add_row(_LABELS[name], *map(format_seconds, cells))
    yield table
    yield Text("")
    yield from map(Text, _rates(result, objective, n_chips))
    yield Text(_engine(figures))


def rate_verdict(result: SimulatedLoad) -> str:
    """Whether the queue stays bounded, and up to which rate."""
    limit = f"{result.saturated_per_s:.3g} requests/s"
    if result.offered_per_s is None:
        return f"rate      served as fast as possible: {limit}"
    offered = f"{result.offered_per_s:.3g} requests/s"
    if result.is_stable:
        return f"rate      {offered} arrive; the queue stays bounded up to {limit}"
    return (
        f"rate      NOT STABLE: {offered} arrive and at most {limit} can be served. The queue grows, "
        "and times grow with the number of requests."
    )


def _rates(result: SimulatedLoad, objective: ServiceLimits, n_chips: int) -> Iterator[str]:
    figures, n = result.figures, result.n_ranks
    tokens = n * figures.output_tokens_per_s
    yield (
        f"served    {n * figures.requests_per_s:.3g} requests/s, {tokens:,.0f} output tokens/s, "
        f"{tokens / n_chips:,.0f} per chip"
    )
    limits = {"TTFT": objective.ttft_s, "TPOT": objective.tpot_s}
    named = [
        f"{name} {format_seconds(limit)}" for name, limit in limits.items() if limit is not None
    ]
    if named:
        yield (
            f"goodput   {figures.goodput_frac:.1%} of requests within {' and '.join(named)}: "
            f"{n * figures.goodput_per_s:.3g} requests/s"
        )


def _engine(figures: ServingFigures) -> str:
    preempted = f"{figures.n_preemptions:,} preemption{'s' * (figures.n_preemptions != 1)}"
    return (
        f"engine    busy {figures.busy_frac:.0%} of the time, {figures.mean_running:.3g} sequences on "
        f"average, at most {figures.peak_waiting:,} waiting; cache {figures.mean_cache_frac:.0%} used, "
        f"at most {figures.peak_cache_frac:.0%}; {preempted}"
    )
