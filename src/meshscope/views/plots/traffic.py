"""Plots of bytes: volume, sizes, who sends to whom, and the load of every link."""

from collections.abc import Iterator

import matplotlib as mpl
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from meshscope.analysis.catalog import NO_COLLECTIVES
from meshscope.analysis.metric import Unavailable
from meshscope.views.charts.sizes import size_counts
from meshscope.views.charts.traffic import Matrix, Torus, matrices, tori
from meshscope.views.charts.volume import volume_bars
from meshscope.views.plots.style import (
    COLOURS,
    Drawn,
    Plotted,
    bytes_axis,
    legend_below,
    name_of,
    new_axes,
    stacked,
)

HEAT = "Blues"  # of one hue: read alike by everybody
LABELLED_CHIPS = 300  # beyond so many chips, no ids are written into them

Line = tuple[tuple[float, float], tuple[float, float]]


def draw_volume(it: Plotted) -> Iterator[Drawn]:
    """Bytes that one device sends in a request, by phase, axis and kind."""
    volume = it.metrics["volume"]
    if isinstance(volume, Unavailable):
        yield Drawn(name="volume", reason=volume.reason)
        return
    bars = volume_bars(volume, it.source)
    phases = list(dict.fromkeys(bar.phase for bar in bars))
    figure, axes = new_axes(0.9 + 0.42 * len(phases))
    segments = [
        (
            phase,
            [(f"{b.kind} over {b.axis}", b.request_wire_bytes) for b in bars if b.phase == phase],
        )
        for phase in phases
    ]
    stacked(axes, segments)
    bytes_axis(axes.xaxis)
    axes.set_title("Sent by one device in a request")
    legend_below(axes, n_columns=3)
    yield Drawn(name="volume", figure=figure)


def draw_sizes(it: Plotted) -> Iterator[Drawn]:
    """How often each payload occurs in a step."""
    found = it.metrics["size_distribution"]
    counts = () if isinstance(found, Unavailable) else size_counts(found, it.source)
    if not counts:
        yield Drawn(name="sizes", reason=NO_COLLECTIVES.reason)
        return
    figure, axes = new_axes()
    sorts = list(dict.fromkeys((c.phase, f"{c.kind} over {c.axis}") for c in counts))
    for i, (phase, name) in enumerate(sorts):
        points = [c for c in counts if (c.phase, f"{c.kind} over {c.axis}") == (phase, name)]
        sizes, times = [c.payload_bytes for c in points], [c.count for c in points]
        axes.vlines(sizes, 0.5, times, color=COLOURS[i % len(COLOURS)], linewidth=1.2)
        axes.plot(
            sizes, times, "os^Dv"[i % 5], color=COLOURS[i % len(COLOURS)], label=f"{phase}: {name_of(name)}"
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    bytes_axis(axes.xaxis)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("payload of one operation")
    axes.set_ylabel("count in one step")
    axes.set_title("Sizes of collectives")
    legend_below(axes, n_columns=2)
    yield Drawn(name="sizes", figure=figure)


def draw_matrices(it: Plotted) -> Iterator[Drawn]:
    """Bytes from device to device in a step of each phase."""
    found = matrices(it.subject, it.source)
    if not found:
        yield Drawn(name="matrix", reason=NO_COLLECTIVES.reason)
    firsts = {matrix.phase: matrix for matrix in reversed(found)}  # all axes together come first
    for phase, matrix in reversed(firsts.items()):
        yield Drawn(name=f"matrix-{phase}", figure=_matrix_figure(matrix))


def _matrix_figure(matrix: Matrix) -> Figure:
    side = -(-matrix.n_devices // matrix.fold)
    grid = np.full((side, side), np.nan)
    for source, target, n_bytes in matrix.cells:
        grid[source, target] = n_bytes
    figure, axes = new_axes(3.4, width=4.2)
    end = side * matrix.fold - 0.5
    image = axes.imshow(
        grid, cmap=HEAT, vmin=0, extent=(-0.5, end, end, -0.5), interpolation="nearest"
    )
    axes.set_xlabel("to device")
    axes.set_ylabel("from device")
    axes.set_title(f"Bytes of one {matrix.phase} step")
    axes.spines[:].set_visible(True)
    bar = figure.colorbar(image, ax=axes, shrink=0.85)
    bytes_axis(bar.ax.yaxis)
    return figure


def draw_tori(it: Plotted) -> Iterator[Drawn]:
    """The load of every link in a step of each phase."""
    found = it.metrics["link_traffic"]
    if isinstance(found, Unavailable) or it.subject.topology is None:
        reason = found.reason if isinstance(found, Unavailable) else "the run has no slice"
        yield Drawn(name="torus", reason=reason)
        return
    for torus in tori(found, it.subject.topology, it.source):
        yield Drawn(name=f"torus-{torus.phase}", figure=_torus_figure(torus))


def _torus_figure(torus: Torus) -> Figure:
    """Planes of chips side by side; each link twice, once in each direction."""
    width, depth, height = torus.sizes
    n_planes = height * torus.n_slices
    figure = Figure(
        figsize=(max(2.6, min(12.0, 0.55 * (width + 1) * n_planes)), max(2.4, 0.55 * depth + 1.2))
    )
    planes = np.atleast_1d(figure.subplots(1, n_planes, squeeze=False)[0])
    most = max((link.load_bytes for link in torus.links), default=1.0)
    colours = mpl.colormaps[HEAT]
    for i, axes in enumerate(planes):
        axes.set_aspect("equal")
        axes.set_axis_off()
        axes.set_xlim(-0.9, width - 0.1)
        axes.set_ylim(depth - 0.1, -0.9)
        named = [f"slice {i // height}"] if torus.n_slices > 1 else []
        axes.set_title(
            ", ".join([*named, *([f"z = {i % height}"] if height > 1 else [])]), fontsize=8
        )
    for link in torus.links:
        axes = planes[link.slice_index * height + link.source[2]]
        share = link.load_bytes / most
        for line in _link_lines(link.source, link.target, is_wrap=link.is_wrap):
            axes.plot(
                *line, color=colours(0.25 + 0.75 * share), linewidth=0.8 + 2.2 * share, zorder=1
            )
    for at_slice, x, y, z, devices in torus.chips:
        axes = planes[at_slice * height + z]
        axes.plot([x], [y], "s", color="white", markeredgecolor="black", markersize=11, zorder=2)
        if len(torus.chips) <= LABELLED_CHIPS:
            axes.text(x, y, devices, ha="center", va="center", fontsize=6, zorder=3)
    scale = ScalarMappable(cmap=colours, norm=Normalize(0, most))
    bar = figure.colorbar(
        scale, ax=list(planes), shrink=0.8, label=f"over one link in a {torus.phase} step"
    )
    bytes_axis(bar.ax.yaxis)
    return figure


def _link_lines(
    source: tuple[int, int, int], target: tuple[int, int, int], *, is_wrap: bool
) -> Iterator[Line]:
    """Lines as (xs, ys): one between neighbours, two stubs around the torus, a slanting stub along z."""
    (x1, y1, z1), (x2, y2, z2) = source, target
    if z1 != z2:
        way = 0.3 if (z2 > z1) is not is_wrap else -0.3
        yield (x1, x1 + way), (y1, y1 - way)
        return
    dx, dy = np.sign(x2 - x1), np.sign(y2 - y1)
    aside_x, aside_y = 0.08 * dy, 0.08 * dx  # the two directions lie beside each other
    if not is_wrap:
        yield (x1 + aside_x, x2 + aside_x), (y1 + aside_y, y2 + aside_y)
        return
    out = (x1 - aside_x, x1 - aside_x - 0.55 * dx), (y1 - aside_y, y1 - aside_y - 0.55 * dy)
    yield out
    yield (x2 - aside_x + 0.55 * dx, x2 - aside_x), (y2 - aside_y + 0.55 * dy, y2 - aside_y)
