"""Plots of the memory of one device against its HBM."""

from collections.abc import Iterator, Sequence

from meshscope.analysis.catalog import NO_MEMORY
from meshscope.events.enums import Source
from meshscope.spec.plan.memory import Memory
from meshscope.views.plots.style import (
    Plot,
    PlotRun,
    gib_axis,
    legend_below,
    new_axes,
    stacked,
    title,
)
from meshscope.views.run_label import distinct_labels


def memory_plots(run: PlotRun) -> Iterator[Plot]:
    """One bar per source."""
    yield _memory_plot([(source.value, memory) for source, memory in run.run.memory.items()])


def memory_plots_by_run(runs: Sequence[PlotRun]) -> Iterator[Plot]:
    """One bar per run: its strongest source, or the compiled one."""
    labels = distinct_labels([run.run for run in runs])
    bars: list[tuple[str, Memory]] = []
    for label, run in zip(labels, runs, strict=True):
        memory = run.run.memory.get(run.source) or run.run.memory.get(Source.COMPILED)
        if memory is not None:
            bars.append((label, memory))
    yield _memory_plot(bars)


def _memory_plot(bars: Sequence[tuple[str, Memory]]) -> Plot:
    if not bars:
        return Plot(name="memory", reason=NO_MEMORY.reason)
    figure, axes = new_axes(0.8 + 0.45 * len(bars))
    stacked(axes, [(label, memory_segments(memory)) for label, memory in bars])
    capacities = {memory.hbm_bytes for _, memory in bars}
    capacity = capacities.pop() if len(capacities) == 1 else None
    if capacity is not None:
        axes.axvline(capacity, color="black", linestyle="--", linewidth=1, label="HBM capacity")
    gib_axis(axes, capacity)
    title(axes, "Memory of one device")
    legend_below(axes)
    return Plot(name="memory", figure=figure)


def memory_segments(memory: Memory) -> list[tuple[str, float]]:
    """Weights, KV cache and temporaries in bytes; unknown temporaries are not drawn."""
    return [
        ("weights", memory.weights_bytes),
        ("KV cache", memory.kv_cache_bytes),
        ("temporaries", memory.temp_bytes or 0),
    ]
