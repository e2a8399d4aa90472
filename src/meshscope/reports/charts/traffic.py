"""Traffic: the device-to-device matrix, the load of the torus links, the volume and the sizes of collectives."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import polars as pl

from meshscope.analysis.catalog import MetricInputs
from meshscope.analysis.volume import LINK, traffic_matrix
from meshscope.events.enums import Phase, Source
from meshscope.hardware.interconnect.fabric import fabric_of
from meshscope.hardware.topology import Topology
from meshscope.reports.charts import spec
from meshscope.reports.model import UNKNOWN_AXIS_LABEL, UNKNOWN_PHASE_LABEL, Unit
from meshscope.units import format_bytes, format_seconds

MAX_SIDE = 128  # rows and columns; larger matrices are folded
MAX_CHIPS = 1024  # of a chart of links
MAX_DESCRIBED = 12  # marks that the description of a chart lists
ALL_AXES = "all axes"
_LABELS = (
    pl.col("phase").fill_null(UNKNOWN_PHASE_LABEL),
    pl.col("axis").fill_null(UNKNOWN_AXIS_LABEL),
)


class TrafficMatrix(NamedTuple):
    """Bytes from device to device in one step: `cells` are (from, to, bytes) of pairs with traffic.

    Each row and column covers `fold` consecutive devices.
    """

    phase: str
    axis: str
    n_devices: int
    fold: int
    cells: tuple[tuple[int, int, float], ...]


def matrices(inputs: MetricInputs, source: Source) -> tuple[TrafficMatrix, ...]:
    """The matrix of all axes for each phase, followed by one for each axis if there are several."""
    n_devices = inputs.n_devices
    if n_devices is None:
        return ()
    table = traffic_matrix(inputs.events.filter(pl.col("source") == source.value))
    fold, of_axes = -(-n_devices // MAX_SIDE), list[TrafficMatrix]()
    ends = [pl.col(name) // fold for name in ("from_device", "to_device")]
    for phase in Phase:
        rows = table.filter(phase=phase.value)
        by_axis = {
            UNKNOWN_AXIS_LABEL if axis is None else str(axis): of_axis
            for (axis,), of_axis in rows.group_by("axis", maintain_order=True)
        }
        every = {ALL_AXES: rows, **by_axis} if len(by_axis) > 1 else by_axis
        for name, one in every.items():
            folded = one.group_by(*ends, maintain_order=True).agg(pl.col("wire_bytes").sum())
            cells = tuple(folded.iter_rows())
            of_axes.append(TrafficMatrix(phase.value, name, n_devices, fold, cells))
    return tuple(of_axes)


Coordinates = tuple[int, int, int]
Chip = tuple[int, Coordinates]  # slice and place in it


class Link(NamedTuple):
    """Bytes over one link in one direction in one step, and their seconds at the peak of the link."""

    slice_index: int
    source: Coordinates
    target: Coordinates
    is_wrap: bool
    load_bytes: float
    link_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Torus:
    """The chips of a slice and the load of every link with traffic in a step of the phase.

    `chips` has the devices of each by (slice, coordinates); `wraps` says which of x, y and z wrap around.
    """

    phase: str
    sizes: Coordinates
    wraps: tuple[bool, bool, bool]
    n_slices: int
    chips: Mapping[Chip, str]
    links: tuple[Link, ...]


def tori(link_traffic: pl.DataFrame, topology: Topology, source: Source) -> tuple[Torus, ...]:
    """One torus for each phase, from the metric `link_traffic` summed over the axes."""
    rows = link_traffic.filter(pl.col("source") == source.value)
    has_peak = topology.chip.link_bytes_per_s is not None
    sums = rows.group_by("phase", *LINK, maintain_order=True).agg(
        pl.col("load_bytes").sum(), link_s=pl.col("link_s").sum() if has_peak else pl.lit(None)
    )
    fields = ("slice_index", "from_chip", "to_chip", "is_wrap", "load_bytes", "link_s")
    fabric, devices = fabric_of(topology), dict[Chip, list[int]]()
    coordinates = zip(fabric.slice_index.tolist(), fabric.coordinates.tolist(), strict=True)
    for device, (slice_index, (x, y, z)) in enumerate(coordinates):
        devices.setdefault((slice_index, (x, y, z)), []).append(device)
    return tuple(
        Torus(
            phase=str(phase),
            sizes=fabric.sizes,
            wraps=fabric.wraps,
            n_slices=topology.n_slices,
            chips={chip: ",".join(map(str, ids)) for chip, ids in sorted(devices.items())},
            links=tuple(
                Link(at, _coordinates(source), _coordinates(target), *rest)
                for at, source, target, *rest in links.select(fields).iter_rows()
            ),
        )
        for (phase,), links in sums.group_by("phase", maintain_order=True)
    )


def _coordinates(text: str) -> Coordinates:
    x, y, z = map(int, text.split(","))
    return x, y, z


def volume_segments(volume: pl.DataFrame, source: Source) -> dict[str, list[tuple[str, float]]]:
    """For each phase of the metric `volume`, the wire bytes of a request by kind and axis, without unknown sizes."""
    rows = volume.filter(pl.col("source") == source.value, pl.col("wire_bytes").is_not_null())
    sums = rows.group_by("phase", "axis", "kind", maintain_order=True).agg(
        pl.col("request_wire_bytes").sum()
    )
    segments: dict[str, list[tuple[str, float]]] = {}
    for phase, over, kind, n_bytes in sums.with_columns(_LABELS).iter_rows():
        segments.setdefault(phase, []).append((f"{kind} over {over}", n_bytes))
    return segments


def size_counts(distribution: pl.DataFrame, source: Source) -> pl.DataFrame:
    """The metric `size_distribution` of one source, without unknown sizes."""
    is_known = pl.col("payload_bytes").is_not_null()
    return distribution.filter(pl.col("source") == source.value, is_known).with_columns(_LABELS)


def matrix_chart(all_matrices: Sequence[TrafficMatrix]) -> spec.Chart:
    """Bytes from each device to each other device, in a matrix to choose from."""
    first = all_matrices[0]
    fold, n = first.fold, -(-first.n_devices // first.fold)
    side = min(440, max(120, 40 * n))
    total = sum(n_bytes for *_, n_bytes in first.cells)
    items = [f"{matrix.phase}, {spec.name_of(matrix.axis)}" for matrix in all_matrices]
    source, target = (
        f"datum.{end}*{fold}"
        + (f"+' to '+min({first.n_devices},(datum.{end}+1)*{fold})-1" if fold > 1 else "")
        for end in ("source", "target")
    )
    load = spec.number_text("datum.load", Unit.BYTES, digits=3)
    return spec.chart(
        "matrix",
        f"{first.n_devices} devices; {len(first.cells)} pairs exchange {total:,.0f} bytes in one {first.phase} step",
        name=f"matrix-{first.phase}",
        each=f" Each row is {fold} devices." if fold > 1 else "",
        side=side,
        gap=1 if side > 8 * n else 0,
        fold=fold,
        places=list(range(n)),
        ends=list(range(0, n, max(1, -(-26 * n // side)))),
        tip=f"'device '+{source}+' to device '+{target}+'\\n'+{load}+' per step'",
        rows=[
            spec.columnar("source target load", matrix.cells, item=item)
            for item, matrix in zip(items, all_matrices, strict=True)
        ],
        params=[spec.choice("shown", "show", items)],
    )


Point = tuple[float, float]


class _Planes:
    """Places of the chips of a torus in pixels: its planes side by side, as many as fit in a row.

    The longer dimension of a plane runs from left to right.
    """

    def __init__(self, torus: Torus) -> None:
        x, y, self.depth = torus.sizes
        self.is_tall = y > x
        across, self.down = (y, x) if self.is_tall else (x, y)
        n = self.depth * torus.n_slices
        self.columns = max(1, min(n, int(1.3 * spec.WIDTH / (across * 34 + 30))))
        self.pitch = max(24.0, min(110.0, spec.WIDTH / self.columns / (across + 0.4)))
        # Pixels of a plane with its margins and the line of its name, and of the drawing.
        self.width = across * self.pitch + 0.3 * self.pitch
        self.height = self.down * self.pitch + 0.3 * self.pitch + (16 if n > 1 else 0)
        self.size = (self.width * self.columns, self.height * -(-n // self.columns))

    def at(self, slice_index: int, chip: Coordinates) -> Point:
        """The center of a chip."""
        x, y, z = chip
        row, column = divmod(slice_index * self.depth + z, self.columns)
        across, down = (y, x) if self.is_tall else (x, y)
        return (
            round(column * self.width + (across + 0.65) * self.pitch, 1),
            round((row + 1) * self.height - (self.down - down - 0.35) * self.pitch, 1),
        )

    def lines(self, link: Link) -> Iterator[tuple[Point, Point]]:
        """One line between neighbors, two stubs for a wraparound link, a slanted stub along z."""
        (x1, y1), (x2, y2) = (
            self.at(link.slice_index, chip) for chip in (link.source, link.target)
        )
        pitch = self.pitch
        if link.source[2] != link.target[2]:
            is_up = (link.target[2] > link.source[2]) is not link.is_wrap
            slant = (0.34 if is_up else -0.34) * pitch
            yield (x1, y1), (x1 + slant, y1 - slant)
            return
        dx, dy = (float(b > a) - float(b < a) for a, b in ((x1, x2), (y1, y2)))
        off = min(5.0, 0.08 * pitch)  # separates the two directions
        if not link.is_wrap:
            yield (x1 + off * dy, y1 + off * dx), (x2 + off * dy, y2 + off * dx)
            return
        stub = min(32.0, 0.55 * pitch)
        for x, y, sign in ((x1, y1, -1), (x2, y2, 1)):
            start = (x - off * dy, y - off * dx)
            yield start, (start[0] + sign * dx * stub, start[1] + sign * dy * stub)


def _link_rows(torus: Torus, planes: _Planes) -> Iterator[tuple[Any, ...]]:
    for link in torus.links:
        ends = (torus.chips[link.slice_index, chip] for chip in (link.source, link.target))
        wrap = " (wraparound)" if link.is_wrap else ""
        peak = (
            "" if link.link_s is None else f", {format_seconds(link.link_s)} at peak link bandwidth"
        )
        tip = "link from device {} to device {}".format(*ends)
        tip += f"{wrap}\n{format_bytes(link.load_bytes)} per step{peak}"
        for start, end in planes.lines(link):
            yield (*(round(v, 1) for v in (*start, *end)), link.load_bytes, tip)


def _chip_rows(torus: Torus, planes: _Planes) -> Iterator[spec.Layer]:
    sent: dict[Chip, float] = {}
    for link in torus.links:
        chip = link.slice_index, link.source
        sent[chip] = sent.get(chip, 0.0) + link.load_bytes
    for chip, devices in torus.chips.items():
        x, y = planes.at(*chip)
        place = ",".join(map(str, chip[1])) + (f" of slice {chip[0]}" if torus.n_slices > 1 else "")
        load = format_bytes(sent.get(chip, 0.0))
        tip = f"device {devices}, chip {place}\nsends {load} per step over its links"
        yield {"phase": torus.phase, "x": x, "y": y, "devices": devices, "tip": tip}


def torus_chart(by_phase: Sequence[Torus], name: str) -> spec.Chart:
    """The chips of the slice `name` and the load of both directions of every link, by phase."""
    first = by_phase[0]
    planes, names = _Planes(first), "x y x2 y2 load tip"
    size = min(44.0, 0.46 * planes.pitch)
    font = min(14.0, 1.1 * size / max(1.6, 0.62 * max(map(len, first.chips.values()))))
    heads: list[spec.Layer] = []
    for index, z in product(range(first.n_slices), range(first.sizes[2])):
        words = [f"slice {index}"] * (first.n_slices > 1) + [f"z = {z}"] * (first.sizes[2] > 1)
        x, y = planes.at(index, (0, 0, z))
        if words:
            heads.append({"x": x, "y": y - 0.5 * planes.pitch - 10, "text": ", ".join(words)})
    rings = [letter for letter, is_ring in zip("xyz", first.wraps, strict=True) if is_ring]
    wraps = f" Wraparound links in {', '.join(rings)} are stubs at the edges of the grid."
    return spec.chart(
        "torus",
        f"{name}; {len(first.links)} links carry traffic in one {first.phase} step",
        name=f"torus-{first.phase}",
        wraps=wraps if rings else "",
        width=round(planes.size[0]),
        height=round(planes.size[1]),
        links=[spec.columnar(names, _link_rows(t, planes), phase=t.phase) for t in by_phase],
        link_width=2 + min(4.0, 0.05 * planes.pitch),
        chips=[row for torus in by_phase for row in _chip_rows(torus, planes)],
        square=size**2,
        font=font if font >= 6 else None,
        heads=heads,
        params=[spec.choice("shown", "show", [torus.phase for torus in by_phase])],
    )


def size_chart(counts: pl.DataFrame) -> spec.Chart:
    """How often each payload size occurs in a step of the chosen phase."""
    columns = counts.select("phase", "kind", "axis", "payload_bytes", "count").iter_rows()
    rows: list[spec.Layer] = []
    described: list[str] = []
    for phase, kind, axis, n_bytes, n in columns:
        name = f"{kind} over {spec.name_of(axis)}"
        tip = f"{n:,} x {format_bytes(n_bytes)}\n{name}"
        rows.append({"phase": phase, "name": name, "size": max(1, n_bytes), "n": n, "tip": tip})
        described.append(f"{n} {kind} of {n_bytes:,} bytes in {phase}")
    return spec.chart(
        "sizes",
        "; ".join(described[:MAX_DESCRIBED]),
        name="sizes",
        rows=rows,
        size_ticks=spec.log_ticks(row["size"] for row in rows),
        n_ticks=spec.log_ticks(row["n"] for row in rows),
        most=2 * max(row["n"] for row in rows),
        color=spec.color_by("name", [row["name"] for row in rows]),
        params=[spec.choice("shown", "show", sorted(set(counts["phase"]), reverse=True))],
    )


def volume_chart(
    rows: Iterable[tuple[str, Sequence[tuple[str, float]]]], name: str, where: str = ""
) -> spec.Chart:
    """Bytes that one device sends per request: a bar per row, with a segment for each kind and axis."""
    bars = [
        spec.Bar(label, segments, format_bytes(sum(n for _, n in segments)))
        for label, segments in rows
    ]
    return spec.bars_chart(name, f"Bytes sent by one device per request{where}", bars, Unit.BYTES)
