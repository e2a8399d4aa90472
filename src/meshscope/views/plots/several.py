"""Plots of several runs side by side: step times, bytes, memory, and step times against devices."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshscope.analysis.catalog import NO_COLLECTIVES, NO_MEMORY, NO_STEP
from meshscope.analysis.metric import Unavailable
from meshscope.events.enums import Phase, Source
from meshscope.spec.program import Frontend, Partitioner
from meshscope.views.charts.cost import CostBar, cost_bars
from meshscope.views.charts.volume import volume_bars
from meshscope.views.plots.style import (
    BLUE,
    COLOURS,
    GREY,
    Drawn,
    Plotted,
    bytes_axis,
    gib_axis,
    legend_below,
    name_of,
    new_axes,
    seconds_axis,
    stacked,
)
from meshscope.views.plots.times import memory_segments

NO_SCALING = "the runs use equally many devices, or have no times"


def run_labels(runs: Sequence[Plotted]) -> list[str]:
    """What tells the runs apart: plan, and model, slice and source where they differ; else their number."""
    asked = [run.run.manifest.experiment for run in runs]
    columns = [
        [str((one.get("model") or {}).get("name", "imported")).rpartition("/")[2] for one in asked],
        [str(one.get("plan", "")) for one in asked],
        [str(one.get("topology", "")) for one in asked],
        [_unusual(one, "partitioner", Partitioner.MANUAL) for one in asked],
        [_unusual(one, "frontend", Frontend.JAX) for one in asked],
        [run.source.value for run in runs],
    ]
    kept = [column for column in columns if len(set(column)) > 1] or [columns[1]]
    labels = [" ".join(filter(None, words)) for words in zip(*kept, strict=True)]
    return [
        label if labels.count(label) == 1 else f"{label} ({number})"
        for number, label in enumerate(labels, start=1)
    ]


def _unusual(asked: Mapping[str, Any], name: str, usual: str) -> str:
    """What the program was asked to be, where it is not the usual one."""
    value = (asked.get("program") or {}).get(name)
    return "" if value in {None, usual} else str(value)


def draw_costs(runs: Sequence[Plotted]) -> Iterator[Drawn]:
    """A step of each phase, a bar for each run: compute, exposed communication by axis, waiting."""
    labels, costs = run_labels(runs), [_strongest(run) for run in runs]
    if not any(costs):
        yield Drawn(name="cost", reason=NO_STEP.reason)
    for phase in Phase:
        found = [(n, own[phase]) for n, own in zip(labels, costs, strict=True) if phase in own]
        if not found:
            continue
        figure, axes = new_axes(0.7 + 0.42 * len(found))
        stacked(axes, [(n, bar.segments or [("step", bar.step_s)]) for n, bar in found])
        for row, (_, bar) in enumerate(found):
            if bar.low_s is not None and bar.high_s is not None:
                ends = [bar.low_s, bar.high_s]
                axes.plot(ends, [row, row], color="black", marker="|", linewidth=1)
        seconds_axis(axes.xaxis)
        axes.set_title(f"One {phase} step of one device")
        legend_below(axes)
        yield Drawn(name=f"cost-{phase}", figure=figure)


def _strongest(run: Plotted) -> Mapping[Phase, CostBar]:
    """The step of each phase by the strongest source that has one."""
    return {bar.phase: bar for bar in cost_bars(run.subject)}  # weaker sources come first


def draw_volumes(runs: Sequence[Plotted]) -> Iterator[Drawn]:
    """What one device sends in a request, a bar for each run, by kind and axis; a plot for each phase."""
    labels = run_labels(runs)
    found = [
        ()
        if isinstance(volume := run.metrics["volume"], Unavailable)
        else volume_bars(volume, run.source)
        for run in runs
    ]
    if not any(found):
        yield Drawn(name="volume", reason=NO_COLLECTIVES.reason)
    for phase in dict.fromkeys(bar.phase for bars in found for bar in bars):
        figure, axes = new_axes(0.9 + 0.42 * len(runs))
        segments = [
            (
                n,
                [
                    (f"{b.kind} over {b.axis}", b.request_wire_bytes)
                    for b in bars
                    if b.phase == phase
                ],
            )
            for n, bars in zip(labels, found, strict=True)
        ]
        stacked(axes, segments)
        bytes_axis(axes.xaxis)
        axes.set_title(f"Sent by one device in the {name_of(phase)} of a request")
        legend_below(axes, n_columns=3)
        yield Drawn(name=f"volume-{name_of(phase).replace(' ', '-')}", figure=figure)


def draw_memories(runs: Sequence[Plotted]) -> Iterator[Drawn]:
    """What one device holds, a bar for each run, against the HBM where all have the same."""
    found = [
        (label, run.run.memory[run.source if run.source in run.run.memory else Source.COMPILED])
        for label, run in zip(run_labels(runs), runs, strict=True)
        if {run.source, Source.COMPILED} & run.run.memory.keys()
    ]
    if not found:
        yield Drawn(name="memory", reason=NO_MEMORY.reason)
        return
    figure, axes = new_axes(0.8 + 0.42 * len(found))
    stacked(axes, [(label, memory_segments(memory)) for label, memory in found])
    limits = {memory.hbm_bytes for _, memory in found}
    limit = limits.pop() if len(limits) == 1 else None
    if limit is not None:
        axes.axvline(limit, color="black", linestyle="--", linewidth=1, label="HBM of one device")
    gib_axis(axes, limit)
    axes.set_title("Memory of one device")
    legend_below(axes)
    yield Drawn(name="memory", figure=figure)


def draw_scaling(runs: Sequence[Plotted]) -> Iterator[Drawn]:
    """Step times against devices: every run a point, the fastest of each size joined, the ideal dashed."""
    labels, costs = run_labels(runs), [_strongest(run) for run in runs]
    sizes = [run.subject.n_devices for run in runs]
    is_drawn = False
    for phase in Phase:
        points = sorted(
            (n, own[phase].step_s, label)
            for n, own, label in zip(sizes, costs, labels, strict=True)
            if n and phase in own
        )
        if len({n for n, _, _ in points}) < 2:
            continue
        is_drawn = True
        figure, axes = new_axes(3.0)
        best = {n: min(s for m, s, _ in points if m == n) for n, _, _ in points}
        (first, first_s), *_ = best.items()
        axes.plot([*best], [first_s * first / n for n in best], "--", color=GREY, label="ideal")
        axes.plot([*best], [*best.values()], color=BLUE, label="fastest of each size")
        for i, (n, seconds, label) in enumerate(points):
            axes.plot(
                [n],
                [seconds],
                "os^Dv"[i % 5],
                color=COLOURS[i % len(COLOURS)],
                label=name_of(label),
            )
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xticks([*best], [str(n) for n in best])
        axes.minorticks_off()
        seconds_axis(axes.yaxis)
        axes.set_xlabel("devices")
        axes.set_title(f"One {phase} step against devices")
        legend_below(axes, n_columns=3)
        yield Drawn(name=f"scaling-{phase}", figure=figure)
    if not is_drawn:
        yield Drawn(name="scaling", reason=NO_SCALING)
