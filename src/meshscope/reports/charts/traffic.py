"""Traffic: the device-to-device matrix, the load of the torus links, the volume and the sizes of collectives."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from meshscope.analysis.catalog import MetricInputs
from meshscope.analysis.volume import LINK, traffic_matrix
from meshscope.events.enums import Phase, Source
from meshscope.hardware.topology import Topology
from meshscope.interconnect.fabric import fabric_of
from meshscope.reports.charts.spec import (
    CARD,
    HEAT,
    INK,
    SOFT,
    TIP,
    WIDTH,
    BarRow,
    Chart,
    Layer,
    axis,
    choice,
    color_by,
    columnar,
    flattened,
    layered,
    log_ticks,
    name_of,
    number_text,
    stacked_bars,
    text_mark,
)
from meshscope.reports.model import UNKNOWN_AXIS_LABEL, UNKNOWN_PHASE_LABEL, Unit
from meshscope.units import format_bytes, format_seconds

MAX_SIDE = 128  # rows and columns; larger matrices are folded
MAX_CHIPS = 1024  # of a chart of links
MAX_DESCRIBED = 12  # marks that the description of a chart lists
RINGS = "All-reduce, all-gather and reduce-scatter follow a ring in the order of the group; all-to-all is direct."
LINKS_NOTE = "Squares are chips with their device ids; each link is drawn once per direction."
ALL_AXES = "all axes"
_LABELS = (
    pl.col("phase").fill_null(UNKNOWN_PHASE_LABEL),
    pl.col("axis").fill_null(UNKNOWN_AXIS_LABEL),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficMatrix:
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
    return tuple(
        _matrix(rows, phase=phase.value, axis=axis, n_devices=n_devices)
        for phase in Phase
        for axis, rows in _by_axis(table.filter(pl.col("phase") == phase.value)).items()
    )


def _by_axis(table: pl.DataFrame) -> dict[str, pl.DataFrame]:
    axes = {
        UNKNOWN_AXIS_LABEL if axis is None else str(axis): rows
        for (axis,), rows in table.group_by("axis", maintain_order=True)
    }
    return {ALL_AXES: table, **axes} if len(axes) > 1 else axes


def _matrix(table: pl.DataFrame, *, phase: str, axis: str, n_devices: int) -> TrafficMatrix:
    fold = -(-n_devices // MAX_SIDE)
    folded = (
        table.with_columns(pl.col("from_device") // fold, pl.col("to_device") // fold)
        .group_by("from_device", "to_device", maintain_order=True)
        .agg(pl.col("wire_bytes").sum())
    )
    cells = folded.select("from_device", "to_device", "wire_bytes").iter_rows()
    return TrafficMatrix(phase=phase, axis=axis, n_devices=n_devices, fold=fold, cells=tuple(cells))


Coordinates = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
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

    `chips` are (slice, x, y, z, devices on the chip); `wraps` says which of x, y and z wrap around.
    """

    phase: str
    sizes: Coordinates
    wraps: tuple[bool, bool, bool]
    n_slices: int
    chips: tuple[tuple[int, int, int, int, str], ...]
    links: tuple[Link, ...]


def tori(link_traffic: pl.DataFrame, topology: Topology, source: Source) -> tuple[Torus, ...]:
    """One torus for each phase, from the metric `link_traffic` summed over the axes."""
    rows = link_traffic.filter(pl.col("source") == source.value)
    sums = rows.group_by("phase", *LINK, maintain_order=True).agg(
        pl.col("load_bytes").sum(), pl.col("link_s").sum()
    )
    fabric = fabric_of(topology)
    return tuple(
        Torus(
            phase=str(phase),
            sizes=fabric.sizes,
            wraps=fabric.wraps,
            n_slices=topology.n_slices,
            chips=_chips(topology),
            links=tuple(
                _link(row, has_peak=topology.chip.link_bytes_per_s is not None)
                for row in links.iter_rows(named=True)
            ),
        )
        for (phase,), links in sums.group_by("phase", maintain_order=True)
    )


def _link(row: dict[str, Any], *, has_peak: bool) -> Link:
    return Link(
        slice_index=row["slice_index"],
        source=_coordinates(row["from_chip"]),
        target=_coordinates(row["to_chip"]),
        is_wrap=row["is_wrap"],
        load_bytes=row["load_bytes"],
        link_s=row["link_s"] if has_peak else None,
    )


def _coordinates(text: str) -> Coordinates:
    x, y, z = map(int, text.split(","))
    return x, y, z


def _chips(topology: Topology) -> tuple[tuple[int, int, int, int, str], ...]:
    placement = fabric_of(topology).placement
    devices: dict[tuple[int, int, int, int], list[int]] = {}
    for device, (slice_index, (x, y, z)) in enumerate(
        zip(placement.slice_index.tolist(), placement.coordinates.tolist(), strict=True)
    ):
        devices.setdefault((slice_index, x, y, z), []).append(device)
    return tuple((*place, ",".join(map(str, ids))) for place, ids in sorted(devices.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeBar:
    """Wire bytes and operations of one kind over one axis, in all steps of a phase."""

    phase: str
    axis: str
    kind: str
    request_wire_bytes: float
    request_count: int


def volume_bars(volume: pl.DataFrame, source: Source) -> tuple[VolumeBar, ...]:
    """The metric `volume` of one source, summed over the parts, without unknown sizes."""
    rows = volume.filter(pl.col("source") == source.value, pl.col("wire_bytes").is_not_null())
    sums = rows.group_by("phase", "axis", "kind", maintain_order=True).agg(
        pl.col("request_wire_bytes").sum(), pl.col("request_count").sum()
    )
    return tuple(VolumeBar(**row) for row in sums.with_columns(_LABELS).iter_rows(named=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCount:
    """The collectives of one kind, axis and payload size in one step of the phase."""

    phase: str
    axis: str
    kind: str
    payload_bytes: int
    count: int


def size_counts(distribution: pl.DataFrame, source: Source) -> tuple[SizeCount, ...]:
    """The metric `size_distribution` of one source, without unknown sizes."""
    rows = distribution.filter(
        pl.col("source") == source.value, pl.col("payload_bytes").is_not_null()
    ).with_columns(_LABELS)
    return tuple(SizeCount(**row) for row in rows.drop("source").iter_rows(named=True))


def _loads(title: str) -> Layer:
    """The opacity of marks by their bytes, on a scale from 0."""
    return {
        "field": "load",
        "type": "quantitative",
        "scale": {"zero": True, "nice": False, "range": [0.12, 1]},
        "legend": {
            "title": title, "orient": "bottom", "tickCount": 4, "symbolFillColor": HEAT, "symbolStrokeColor": HEAT,
            "symbolType": "square", "labelExpr": number_text("datum.value", Unit.BYTES, digits=3),
        },
    }  # fmt: skip


def matrix_chart(all_matrices: Sequence[TrafficMatrix]) -> Chart:
    """Bytes from each device to each other device, in a matrix to choose from."""
    first = all_matrices[0]
    fold, n = first.fold, -(-first.n_devices // first.fold)
    side = min(440, max(120, 40 * n))
    total = sum(n_bytes for *_, n_bytes in first.cells)
    names = "source target load"
    items = [f"{matrix.phase}, {name_of(matrix.axis)}" for matrix in all_matrices]
    data = [
        columnar(names, matrix.cells, item=item)
        for item, matrix in zip(items, all_matrices, strict=True)
    ]

    def devices(field: str) -> str:
        last = f"min({first.n_devices},(datum.{field}+1)*{fold})-1"
        return f"datum.{field}*{fold}" + (f"+' to '+{last}" if fold > 1 else "")

    def place(field: str, title: str, orient: str) -> Layer:
        every = max(1, -(-26 * n // side))
        return {
            "field": field, "type": "ordinal", "scale": {"domain": list(range(n)), "padding": 0},
            "axis": {
                "title": title, "orient": orient, "values": list(range(0, n, every)), "labelAngle": 0,
                "labelExpr": f"datum.value*{fold}", "ticks": False, "domain": False, "labelOverlap": False,
            },
        }  # fmt: skip

    cells: Layer = {
        "mark": {"type": "rect", "fill": HEAT, "stroke": CARD, "strokeWidth": 1 if side > 8 * n else 0},
        "encoding": {
            "x": place("target", "to device", "top"), "y": place("source", "from device", "left"),
            "opacity": _loads("bytes per step"), "tooltip": TIP,
        },
    }  # fmt: skip
    each = f" Each row is {fold} devices." if fold > 1 else ""
    tip = f"'device '+{devices('source')}+' to device '+{devices('target')}+'\\n'+{number_text('datum.load', Unit.BYTES, digits=3)}+' per step'"
    return Chart(
        kind="matrix",
        name=f"matrix-{first.phase}",
        title="Traffic matrix",
        description=f"{first.n_devices} devices; {len(first.cells)} pairs exchange {total:,.0f} bytes in one {first.phase} step",
        spec=layered(
            cells,
            height=side,
            width=side,
            is_fixed=True,
            view={"stroke": "var(--line)"},
            data={"values": data},
            transform=[
                {"filter": "datum.item===shown"},
                flattened(names),
                {"calculate": tip, "as": "tip"},
            ],
            params=[choice("shown", "show", items)],
        ),
        note=f"{RINGS}{each}",
        is_zoomed=True,
    )


Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planes:
    """Places of the chips of a torus in pixels: its planes side by side, as many as fit in a row.

    The longer dimension of a plane runs from left to right.
    """

    torus: Torus

    @property
    def is_tall(self) -> bool:
        return self.torus.sizes[1] > self.torus.sizes[0]

    @property
    def sides(self) -> tuple[int, int]:
        x, y, _ = self.torus.sizes
        return (y, x) if self.is_tall else (x, y)

    @property
    def n(self) -> int:
        return self.torus.sizes[2] * self.torus.n_slices

    @property
    def columns(self) -> int:
        return max(1, min(self.n, int(1.3 * WIDTH / (self.sides[0] * 34 + 30))))

    @property
    def pitch(self) -> float:
        return max(24.0, min(110.0, WIDTH / self.columns / (self.sides[0] + 0.4)))

    @property
    def plane(self) -> Point:
        """Pixels of a plane with its margins and the line of its name."""
        across, down = (side * self.pitch + 0.3 * self.pitch for side in self.sides)
        return across, down + (16 if self.n > 1 else 0)

    @property
    def size(self) -> Point:
        """Pixels of the drawing."""
        width, height = self.plane
        return width * self.columns, height * -(-self.n // self.columns)

    def at(self, slice_index: int, chip: Coordinates) -> Point:
        """The center of a chip."""
        x, y, z = chip
        plane = slice_index * self.torus.sizes[2] + z
        across, down = (y, x) if self.is_tall else (x, y)
        width, height = self.plane
        return (
            round(plane % self.columns * width + (across + 0.65) * self.pitch, 1),
            round(
                (plane // self.columns + 1) * height - (self.sides[1] - down - 0.35) * self.pitch, 1
            ),
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


def torus_chart(by_phase: Sequence[Torus], name: str) -> Chart:
    """The chips of the slice `name` and the load of both directions of every link, by phase."""
    first = by_phase[0]
    planes = _Planes(torus=first)
    chips = {(index, (x, y, z)): devices for index, x, y, z, devices in first.chips}
    sent: dict[tuple[str, int, Coordinates], float] = {}
    links: list[Layer] = []
    names = "x y x2 y2 load tip"
    for torus in by_phase:
        rows: list[tuple[Any, ...]] = []
        for link in torus.links:
            key = (torus.phase, link.slice_index, link.source)
            sent[key] = sent.get(key, 0.0) + link.load_bytes
            source, target = (chips[link.slice_index, chip] for chip in (link.source, link.target))
            wrap = " (wraparound)" if link.is_wrap else ""
            peak = (
                ""
                if link.link_s is None
                else f", {format_seconds(link.link_s)} at peak link bandwidth"
            )
            tip = f"link from device {source} to device {target}{wrap}\n{format_bytes(link.load_bytes)} per step{peak}"
            rows += [
                (*(round(v, 1) for v in (*start, *end)), link.load_bytes, tip)
                for start, end in planes.lines(link)
            ]
        links.append(columnar(names, rows, phase=torus.phase))
    size = min(44.0, 0.46 * planes.pitch)
    longest = max(len(devices) for devices in chips.values())
    font = min(14.0, 1.1 * size / max(1.6, 0.62 * longest))
    squares = [
        {
            "phase": torus.phase, "x": x, "y": y, "devices": devices,
            "tip": f"device {devices}, chip {','.join(map(str, chip))}{f' of slice {index}' if first.n_slices > 1 else ''}\n"
            f"sends {format_bytes(sent.get((torus.phase, index, chip), 0.0))} per step over its links",
        }
        for torus in by_phase
        for (index, chip), devices in chips.items()
        for x, y in [planes.at(index, chip)]
    ]  # fmt: skip
    is_chosen = [{"filter": "datum.phase===shown"}]
    at: Layer = {
        field: {"field": field, "type": "quantitative", "scale": None, "axis": None}
        for field in "xy"
    }
    lines: Layer = {
        "data": {"values": links},
        "transform": [*is_chosen, flattened(names)],
        "mark": {"type": "rule", "stroke": HEAT, "strokeWidth": 2 + min(4.0, 0.05 * planes.pitch)},
        "encoding": {**at, "x2": {"field": "x2"}, "y2": {"field": "y2"}, "opacity": _loads("bytes per step over one link"), "tooltip": TIP},
    }  # fmt: skip
    chip_marks: Layer = {
        "data": {"values": squares},
        "transform": is_chosen,
        "mark": {"type": "square", "size": size**2, "fill": CARD, "stroke": SOFT, "opacity": 1},
        "encoding": {**at, "tooltip": TIP},
    }
    labels = text_mark({"field": "devices"}, fontSize=font, fill=SOFT, align="center")
    labels |= {"data": {"values": squares}, "transform": is_chosen}
    labels["encoding"] |= {**at, "tooltip": TIP}
    plane_names = [
        {"x": x, "y": y - 0.5 * planes.pitch - 10, "text": ", ".join(text)}
        for slice_index in range(first.n_slices)
        for z in range(first.sizes[2])
        for x, y in [planes.at(slice_index, (0, 0, z))]
        if (text := [f"slice {slice_index}"] * (first.n_slices > 1) + [f"z = {z}"] * (first.sizes[2] > 1))
    ]  # fmt: skip
    heads = text_mark({"field": "text"}, fill=SOFT, align="left") | {
        "data": {"values": plane_names}
    }
    heads["encoding"] |= at
    width, height = planes.size
    rings = [letter for letter, is_ring in zip("xyz", first.wraps, strict=True) if is_ring]
    wrap = f" Wraparound links in {', '.join(rings)} are stubs at the edges of the grid." if rings else ""  # fmt: skip
    has_names = font >= 6
    return Chart(
        kind="torus",
        name=f"torus-{first.phase}",
        title="Link loads",
        description=f"{name}; {len(first.links)} links carry traffic in one {first.phase} step",
        spec=layered(
            lines,
            chip_marks,
            *([labels] if has_names else []),
            *([heads] if plane_names else []),
            width=round(width),
            height=round(height),
            is_fixed=True,
            params=[choice("shown", "show", [torus.phase for torus in by_phase])],
        ),
        note=f"{LINKS_NOTE}{wrap}",
        is_zoomed=True,
    )


def size_chart(counts: Sequence[SizeCount]) -> Chart:
    """How often each payload size occurs in a step of the chosen phase."""
    phases = sorted({size.phase for size in counts}, reverse=True)
    described = [f"{c.count} {c.kind} of {c.payload_bytes:,} bytes in {c.phase}" for c in counts]
    rows: list[Layer] = [
        {
            "phase": c.phase, "name": f"{c.kind} over {name_of(c.axis)}", "size": max(1, c.payload_bytes), "n": c.count,
            "tip": f"{c.count:,} x {format_bytes(c.payload_bytes)}\n{c.kind} over {name_of(c.axis)}",
        }
        for c in counts
    ]  # fmt: skip
    sizes = [row["size"] for row in rows]
    x: Layer = {
        "field": "size", "type": "quantitative", "scale": {"type": "log", "nice": False, "padding": 24},
        "axis": axis(Unit.BYTES, "payload per collective", values=log_ticks(sizes)),
    }  # fmt: skip
    y: Layer = {
        "field": "n", "type": "quantitative", "scale": {"type": "log", "domain": [0.5, 2 * max(row["n"] for row in rows)], "nice": False},
        "axis": axis(Unit.NUMBER, "count per step (log scale)", values=log_ticks(row["n"] for row in rows)),
    }  # fmt: skip
    color = color_by("name", [row["name"] for row in rows])
    return Chart(
        kind="sizes",
        name="sizes",
        title="Payload sizes",
        description="; ".join(described[:MAX_DESCRIBED]),
        spec=layered(
            {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": {"x": x, "y": y, "y2": {"datum": 0.5}, "color": {**color, "legend": None}}},
            {"mark": {"type": "point", "filled": True, "opacity": 1, "size": 80}, "encoding": {"x": x, "y": y, "color": color, "tooltip": TIP}},
            {"mark": {"type": "text", "dy": -11, "fill": INK}, "encoding": {"x": x, "y": y, "text": {"field": "n", "format": ","}}},
            height=200,
            data={"values": rows},
            transform=[{"filter": "datum.phase===shown"}],
            params=[choice("shown", "show", phases)],
        ),
    )  # fmt: skip


def volume_chart(
    rows: Sequence[tuple[str, Sequence[VolumeBar]]], name: str, where: str = ""
) -> Chart:
    """Bytes that one device sends per request: a bar per row, with a segment for each kind and axis."""
    bars = [
        BarRow(
            name=name_of(label),
            segments=[(f"{bar.kind} over {bar.axis}", bar.request_wire_bytes) for bar in bars],
            end_text=format_bytes(sum(bar.request_wire_bytes for bar in bars)),
        )
        for label, bars in rows
    ]
    return Chart(
        kind="bars",
        name=name,
        title=f"Bytes sent by one device per request{where}",
        description="; ".join(f"{bar.name} {bar.end_text}" for bar in bars),
        spec=stacked_bars(bars, Unit.BYTES),
    )
