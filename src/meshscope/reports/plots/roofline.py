"""The roofline plot of one device."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import hypot

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from meshscope.analysis.roofline import Roofline, RooflinePoint, roofline_of
from meshscope.events.enums import Phase, Source
from meshscope.reports.plots.style import (
    BLUE,
    COLORS,
    Plot,
    PlotRun,
    finished,
    label_text,
    new_axes,
)

NO_ROOFLINE = "no part has FLOPs and a time, or the chip has no published peaks"
FONT_POINTS = 7
NEAR_POINTS = 14  # distance within which two points of a part share a label
# Offsets of a label from its point, in points, in order of preference.
_OFFSETS = tuple((x, y) for y in (-5, 4, -14, 13, -23) for x in (6, -6))


def roofline_plots(run: PlotRun) -> Iterator[Plot]:
    """Achieved FLOP/s of each part of the model over its arithmetic intensity."""
    chart = roofline_of(run.inputs)
    if chart is None:
        yield Plot(name="roofline", reason=NO_ROOFLINE)
        return
    axes = new_axes(3.2)
    draw_roofline(axes, chart)
    yield finished("roofline", axes, "Roofline of one device during compute")


def draw_roofline(axes: Axes, chart: Roofline) -> None:
    """Draws the roof, the points below it and their labels."""
    _draw_roof(axes, chart)
    for point in chart.points:
        _draw_point(axes, point)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte of HBM traffic")
    axes.set_ylabel("FLOP/s")
    _label_points(axes, chart.points)


def _draw_roof(axes: Axes, chart: Roofline) -> None:
    ridge = chart.peaks.flops_per_s / chart.peaks.hbm_bytes_per_s
    intensities = [ridge, *(point.flops_per_byte for point in chart.points)]
    low, high = min(intensities) / 3, max(intensities) * 6
    peaks = [low * chart.peaks.hbm_bytes_per_s, chart.peaks.flops_per_s, chart.peaks.flops_per_s]
    axes.plot([low, ridge, high], peaks, color="black")


def _draw_point(axes: Axes, point: RooflinePoint) -> None:
    is_prefill = point.phase is Phase.PREFILL
    axes.plot(
        [point.flops_per_byte],
        [point.flops_per_s],
        "o" if is_prefill else "^",
        color=BLUE if is_prefill else COLORS[1],
        markerfacecolor=None if point.source is Source.COMPILED else "none",
        label=f"{point.phase}, {point.source}",
    )


def _label_points(axes: Axes, points: Sequence[RooflinePoint]) -> None:
    """Labels each point at the first free position around it.

    A label without room is left out, and so is one beside the same label.
    """
    pixels_per_point = axes.figure.dpi / 72
    near = NEAR_POINTS * pixels_per_point
    height = 1.5 * FONT_POINTS * pixels_per_point  # with descenders
    centers = [axes.transData.transform((p.flops_per_byte, p.flops_per_s)) for p in points]
    occupied = [_box(x, y, 0, 0, pad=4 * pixels_per_point) for x, y in centers]
    occupied += _line_boxes(axes)
    labeled: list[tuple[str, float, float]] = []
    for point, (x, y) in zip(points, centers, strict=True):
        text = label_text(point.part)
        if any(t == text and hypot(x - u, y - v) < near for t, u, v in labeled):
            continue
        width = 0.6 * FONT_POINTS * len(text) * pixels_per_point
        for dx, dy in _OFFSETS:
            left = x + dx * pixels_per_point - (width if dx < 0 else 0)
            box = _box(left, y + dy * pixels_per_point, width, height)
            if _is_free(box, axes, occupied):
                occupied.append(box)
                labeled.append((text, x, y))
                axes.annotate(
                    text,
                    (point.flops_per_byte, point.flops_per_s),
                    (dx, dy),
                    textcoords="offset points",
                    ha="right" if dx < 0 else "left",
                    va="bottom",
                    fontsize=FONT_POINTS,
                )
                break


def _line_boxes(axes: Axes) -> Iterator[Bbox]:
    """Small boxes along the roof, which labels avoid."""
    corners = axes.transData.transform(axes.lines[0].get_xydata())
    for (x1, y1), (x2, y2) in pairwise(corners):
        for x, y in zip(np.linspace(x1, x2, 100), np.linspace(y1, y2, 100), strict=True):
            yield _box(x, y, 0, 0, pad=1)


def _box(x: float, y: float, width: float, height: float, *, pad: float = 0.0) -> Bbox:
    return Bbox.from_extents(x - pad, y - pad, x + width + pad, y + height + pad)


def _is_free(box: Bbox, axes: Axes, occupied: Iterable[Bbox]) -> bool:
    field = axes.get_window_extent()
    is_inside = field.x0 <= box.x0 and box.x1 <= field.x1 and field.y0 <= box.y0
    return is_inside and not any(box.overlaps(other) for other in occupied)
