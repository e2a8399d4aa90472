"""Plots of bytes: volume, payload sizes, the traffic matrix, link loads, and memory."""

from collections.abc import Iterator, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from meshscope.analysis.catalog import NO_COLLECTIVES, NO_MEMORY, Unavailable
from meshscope.events.enums import Source
from meshscope.plans.memory import Memory
from meshscope.reports.charts.traffic import (
    SizeCount,
    Torus,
    TrafficMatrix,
    VolumeBar,
    matrices,
    size_counts,
    tori,
    volume_bars,
)
from meshscope.reports.model import Unit
from meshscope.reports.plots.style import (
    COLORS,
    MARKERS,
    Plot,
    PlotRun,
    finished,
    gib_axis,
    label_text,
    new_axes,
    stacked,
    unit_axis,
)
from meshscope.reports.run_label import distinct_labels
from meshscope.reports.summary import memory_segments

HEAT = "Blues"  # a single-hue colormap, safe for color-blind readers
MAX_LABELED_CHIPS = 300

Line = tuple[tuple[float, float], tuple[float, float]]  # xs, ys
Place = tuple[int, int, int]


def volume_plots(run: PlotRun) -> Iterator[Plot]:
    """Wire bytes of one device per request, one bar per phase."""
    volume = run.metrics["volume"]
    if isinstance(volume, Unavailable):
        yield Plot(name="volume", reason=volume.reason)
        return
    bars = volume_bars(volume, run.source)
    phases = dict.fromkeys(bar.phase for bar in bars)
    rows = [(phase, [bar for bar in bars if bar.phase == phase]) for phase in phases]
    yield _volume_plot("volume", rows, "Bytes sent by one device per request")


def volume_plots_by_run(runs: Sequence[PlotRun]) -> Iterator[Plot]:
    """Wire bytes of one device per request, one plot per phase with one bar per run."""
    labels = distinct_labels([run.run for run in runs])
    bars_by_run = [_volume_bars(run) for run in runs]
    if not any(bars_by_run):
        yield Plot(name="volume", reason=NO_COLLECTIVES)
    for phase in dict.fromkeys(bar.phase for bars in bars_by_run for bar in bars):
        rows = [
            (label, [bar for bar in bars if bar.phase == phase])
            for label, bars in zip(labels, bars_by_run, strict=True)
        ]
        name = label_text(phase)
        heading = f"Bytes sent by one device per request, {name}"
        yield _volume_plot(f"volume-{name.replace(' ', '-')}", rows, heading)


def _volume_bars(run: PlotRun) -> tuple[VolumeBar, ...]:
    volume = run.metrics["volume"]
    return () if isinstance(volume, Unavailable) else volume_bars(volume, run.source)


def _volume_plot(name: str, rows: Sequence[tuple[str, Sequence[VolumeBar]]], heading: str) -> Plot:
    """One bar per row, with a segment for each kind and axis."""
    axes = new_axes(0.9 + 0.42 * len(rows))
    stacked(
        axes,
        [
            (label, [(f"{bar.kind} over {bar.axis}", bar.request_wire_bytes) for bar in bars])
            for label, bars in rows
        ],
    )
    unit_axis(axes.xaxis, Unit.BYTES)
    return finished(name, axes, heading, n_columns=3)


def size_plots(run: PlotRun) -> Iterator[Plot]:
    """Counts of payload sizes in one step."""
    distribution = run.metrics["size_distribution"]
    counts = () if isinstance(distribution, Unavailable) else size_counts(distribution, run.source)
    if not counts:
        yield Plot(name="sizes", reason=run.reason("size_distribution"))
        return
    axes = new_axes()
    series: dict[str, list[SizeCount]] = {}
    for count in counts:
        series.setdefault(f"{count.phase}: {count.kind} over {count.axis}", []).append(count)
    for i, (name, points) in enumerate(series.items()):
        color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
        sizes, n_each = [p.payload_bytes for p in points], [p.count for p in points]
        axes.vlines(sizes, 0.5, n_each, color=color, linewidth=1.2)
        axes.plot(sizes, n_each, marker, color=color, label=label_text(name))
    _log_axes(axes)
    axes.set_xlabel("payload per collective")
    axes.set_ylabel("count per step")
    yield finished("sizes", axes, "Payload sizes", n_columns=2)


def _log_axes(axes: Axes) -> None:
    """Bytes over counts, both logarithmic."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    unit_axis(axes.xaxis, Unit.BYTES)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def matrix_plots(run: PlotRun) -> Iterator[Plot]:
    """The traffic matrix of each phase, all axes together."""
    all_matrices = matrices(run.inputs, run.source)
    if not all_matrices:
        yield Plot(name="matrix", reason=run.reason("traffic_matrix"))
    by_phase: dict[str, TrafficMatrix] = {}
    for matrix in all_matrices:  # the matrix of all axes comes first
        by_phase.setdefault(matrix.phase, matrix)
    for matrix in by_phase.values():
        yield _matrix_plot(matrix)


def _matrix_plot(matrix: TrafficMatrix) -> Plot:
    side = -(-matrix.n_devices // matrix.fold)
    grid = np.full((side, side), np.nan)
    for source, target, n_bytes in matrix.cells:
        grid[source, target] = n_bytes
    axes = new_axes(3.4, width=4.2)
    end = side * matrix.fold - 0.5
    image = axes.imshow(
        grid, cmap=HEAT, vmin=0, extent=(-0.5, end, end, -0.5), interpolation="nearest"
    )
    axes.set_xlabel("to device")
    axes.set_ylabel("from device")
    axes.spines[:].set_visible(True)
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.85)
    unit_axis(bar.ax.yaxis, Unit.BYTES)
    heading = f"Traffic matrix of one {matrix.phase} step"
    return finished(f"matrix-{matrix.phase}", axes, heading)


def torus_plots(run: PlotRun) -> Iterator[Plot]:
    """The load of every ICI link in one step of each phase."""
    links = run.metrics["link_traffic"]
    topology = run.inputs.topology
    if isinstance(links, Unavailable) or topology is None:
        reason = links.reason if isinstance(links, Unavailable) else "the run has no slice"
        yield Plot(name="torus", reason=reason)
        return
    for torus in tori(links, topology, run.source):
        yield Plot(name=f"torus-{torus.phase}", figure=_torus_figure(torus))


def _torus_figure(torus: Torus) -> Figure:
    """Planes of chips side by side; each link is drawn once per direction."""
    width, depth, height = torus.sizes
    n_planes = height * torus.n_slices
    size = (max(2.6, min(12.0, 0.55 * (width + 1) * n_planes)), max(2.4, 0.55 * depth + 1.2))
    figure = Figure(figsize=size)
    planes = list(figure.subplots(1, n_planes, squeeze=False)[0])
    for i, axes in enumerate(planes):
        _prepare_plane(axes, torus, i)
    highest = max((link.load_bytes for link in torus.links), default=1.0)
    _draw_links(planes, torus, highest)
    _draw_chips(planes, torus)
    scale = ScalarMappable(cmap=mpl.colormaps[HEAT], norm=Normalize(0, highest))
    label = f"bytes per link in one {torus.phase} step"
    bar = figure.colorbar(scale, ax=planes, shrink=0.8, label=label)
    unit_axis(bar.ax.yaxis, Unit.BYTES)
    return figure


def _prepare_plane(axes: Axes, torus: Torus, index: int) -> None:
    width, depth, height = torus.sizes
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_xlim(-0.9, width - 0.1)
    axes.set_ylim(depth - 0.1, -0.9)
    names = [f"slice {index // height}"] if torus.n_slices > 1 else []
    names += [f"z = {index % height}"] if height > 1 else []
    axes.set_title(", ".join(names), fontsize=8)


def _draw_links(planes: Sequence[Axes], torus: Torus, highest: float) -> None:
    """Darker and thicker lines carry more bytes."""
    height, colors = torus.sizes[2], mpl.colormaps[HEAT]
    for link in torus.links:
        axes = planes[link.slice_index * height + link.source[2]]
        frac = link.load_bytes / highest
        color, linewidth = colors(0.25 + 0.75 * frac), 0.8 + 2.2 * frac
        for line in _link_lines(link.source, link.target, is_wrap=link.is_wrap):
            axes.plot(*line, color=color, linewidth=linewidth, zorder=1)


def _draw_chips(planes: Sequence[Axes], torus: Torus) -> None:
    for slice_index, x, y, z, devices in torus.chips:
        axes = planes[slice_index * torus.sizes[2] + z]
        axes.plot([x], [y], "s", color="white", markeredgecolor="black", markersize=11, zorder=2)
        if len(torus.chips) <= MAX_LABELED_CHIPS:
            axes.text(x, y, devices, ha="center", va="center", fontsize=6, zorder=3)


def _link_lines(source: Place, target: Place, *, is_wrap: bool) -> Iterator[Line]:
    """One line between neighbors, two stubs for a wraparound link, a slanted stub along z."""
    (x1, y1, z1), (x2, y2, z2) = source, target
    if z1 != z2:
        slant = 0.3 if (z2 > z1) is not is_wrap else -0.3
        yield (x1, x1 + slant), (y1, y1 - slant)
        return
    dx, dy = np.sign(x2 - x1), np.sign(y2 - y1)
    offset_x, offset_y = 0.08 * dy, 0.08 * dx  # separates the two directions
    if not is_wrap:
        yield (x1 + offset_x, x2 + offset_x), (y1 + offset_y, y2 + offset_y)
        return
    x, y = x1 - offset_x, y1 - offset_y
    yield (x, x - 0.55 * dx), (y, y - 0.55 * dy)
    x, y = x2 - offset_x, y2 - offset_y
    yield (x + 0.55 * dx, x), (y + 0.55 * dy, y)


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
        return Plot(name="memory", reason=NO_MEMORY)
    axes = new_axes(0.8 + 0.45 * len(bars))
    stacked(axes, [(label, memory_segments(memory)) for label, memory in bars])
    capacities = {memory.hbm_bytes for _, memory in bars}
    capacity = capacities.pop() if len(capacities) == 1 else None
    if capacity is not None:
        axes.axvline(capacity, color="black", linestyle="--", linewidth=1, label="HBM capacity")
    gib_axis(axes, capacity)
    return finished("memory", axes, "Memory of one device")
