"""Traffic: the device-to-device matrix, the load of the torus links, the volume and the sizes of collectives."""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import polars as pl

from meshscope.analysis.catalog import MetricInputs
from meshscope.analysis.volume import LINK, traffic_matrix
from meshscope.events.enums import Phase, Source
from meshscope.hardware.interconnect.fabric import Fabric, fabric_of
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


def volume_chart(volume: pl.DataFrame, source: Source) -> spec.Chart | None:
    """Bytes that one device sends per request, from the metric `volume`: a bar per phase, by kind and axis.

    None if no size is known.
    """
    rows = volume.filter(pl.col("source") == source.value, pl.col("wire_bytes").is_not_null())
    sums = rows.group_by("phase", "axis", "kind", maintain_order=True).agg(
        pl.col("request_wire_bytes").sum()
    )
    segments: dict[str, list[tuple[str, float]]] = {}
    for phase, over, kind, n_bytes in sums.with_columns(_LABELS).iter_rows():
        segments.setdefault(phase, []).append((f"{kind} over {over}", n_bytes))
    bars = [
        spec.Bar(phase, of_phase, format_bytes(sum(n for _, n in of_phase)))
        for phase, of_phase in segments.items()
    ]
    title = "Bytes sent by one device per request"
    return spec.bars_chart("volume", title, bars, Unit.BYTES) if bars else None


def matrix_chart(inputs: MetricInputs, source: Source) -> spec.Chart | None:
    """Bytes from each device to each other device in a step of a phase, over all axes and over each of several.

    A row and a column of a large matrix cover consecutive devices. None without traffic, or if
    the number of devices is unknown.
    """
    n_devices = inputs.experiment.n_devices
    if n_devices is None:
        return None
    fold = -(-n_devices // MAX_SIDE)
    table = traffic_matrix(inputs.events.filter(pl.col("source") == source.value))
    ends = [pl.col(name) // fold for name in ("from_device", "to_device")]
    matrices: dict[str, list[tuple[int, int, float]]] = {}
    for phase in Phase:
        rows = table.filter(phase=phase.value)
        by_axis = {
            UNKNOWN_AXIS_LABEL if axis is None else str(axis): of_axis
            for (axis,), of_axis in rows.group_by("axis", maintain_order=True)
        }
        for name, one in (({ALL_AXES: rows} if len(by_axis) > 1 else {}) | by_axis).items():
            folded = one.group_by(*ends, maintain_order=True).agg(pl.col("wire_bytes").sum())
            matrices[f"{phase.value}, {spec.name_of(name)}"] = list(folded.iter_rows())
    if not matrices:
        return None
    n = -(-n_devices // fold)
    side = min(440, max(120, 40 * n))
    item, first = next(iter(matrices.items()))
    total = sum(n_bytes for *_, n_bytes in first)
    places = (
        f"datum.{end}*{fold}"
        + (f"+' to '+min({n_devices},(datum.{end}+1)*{fold})-1" if fold > 1 else "")
        for end in ("source", "target")
    )
    load = spec.number_text("datum.load", Unit.BYTES, digits=3)
    return spec.chart(
        "matrix",
        f"{n_devices} devices; {len(first)} pairs exchange {total:,.0f} bytes in one step of {item}",
        name="matrix",
        each=f" Each row is {fold} devices." if fold > 1 else "",
        side=side,
        gap=1 if side > 8 * n else 0,
        fold=fold,
        places=list(range(n)),
        ends=list(range(0, n, max(1, -(-26 * n // side)))),
        tip="'device '+{}+' to device '+{}+'\\n'+{}+' per step'".format(*places, load),
        rows=[spec.columnar("source target load", of, item=item) for item, of in matrices.items()],
        params=[spec.choice("shown", "show", list(matrices))],
    )


Coordinates = tuple[int, int, int]
Point = tuple[float, float]


class TorusPlanes:
    """Places of the chips of a torus in pixels: its planes side by side, as many as fit in a row.

    The longer dimension of a plane runs from left to right.
    """

    def __init__(self, sizes: Coordinates, n_slices: int, *, width: float = spec.WIDTH) -> None:
        x, y, self.depth = sizes
        self.n_slices = n_slices
        self.is_tall = y > x
        across, self.down = (y, x) if self.is_tall else (x, y)
        n = self.depth * n_slices
        most = max(1, min(n, int(1.3 * width / (across * 34 + 30))))
        self.columns = -(-n // -(-n // most))  # rows of equal length, as far as that goes
        self.pitch = max(24.0, min(110.0, width / self.columns / (across + 0.4)))
        # Pixels of a plane with its margins and the line of its name, and of the drawing.
        self.width = across * self.pitch + 0.3 * self.pitch
        self.height = self.down * self.pitch + 0.3 * self.pitch + (16 if n > 1 else 0)
        self.size = (self.width * self.columns, self.height * -(-n // self.columns))

    def heads(self) -> Iterator[tuple[float, float, str]]:
        """The place and the name of each plane; none for a single one."""
        for index, z in product(range(self.n_slices), range(self.depth)):
            words = {f"slice {index}": self.n_slices > 1, f"z = {z}": self.depth > 1}
            x, y = self.at(index, (0, 0, z))
            if any(words.values()):
                shown = ", ".join(word for word, is_shown in words.items() if is_shown)
                yield x, y - 0.5 * self.pitch - 10, shown

    def sizes_of(self, names: Iterable[str]) -> tuple[float, float]:
        """The side of a chip and the size of its name in pixels."""
        side = min(44.0, 0.46 * self.pitch)
        return side, min(14.0, 0.95 * side / max(1.4, 0.62 * max(map(len, names))))

    def at(self, slice_index: int, chip: Coordinates) -> Point:
        """The center of a chip."""
        x, y, z = chip
        row, column = divmod(slice_index * self.depth + z, self.columns)
        across, down = (y, x) if self.is_tall else (x, y)
        return (
            round(column * self.width + (across + 0.65) * self.pitch, 1),
            round((row + 1) * self.height - (self.down - down - 0.35) * self.pitch, 1),
        )

    def lines(
        self, slice_index: int, source: Coordinates, target: Coordinates, *, is_wrap: bool
    ) -> Iterator[tuple[Point, Point]]:
        """One line between neighbors, two stubs for a wraparound link, a slanted stub along z."""
        (x1, y1), (x2, y2) = (self.at(slice_index, chip) for chip in (source, target))
        pitch = self.pitch
        if source[2] != target[2]:
            is_up = (target[2] > source[2]) is not is_wrap
            slant = (0.34 if is_up else -0.34) * pitch
            yield (x1, y1), (x1 + slant, y1 - slant)
            return
        dx, dy = (float(b > a) - float(b < a) for a, b in ((x1, x2), (y1, y2)))
        off = min(5.0, 0.08 * pitch)  # separates the two directions
        if not is_wrap:
            yield (x1 + off * dy, y1 + off * dx), (x2 + off * dy, y2 + off * dx)
            return
        stub = min(32.0, 0.55 * pitch)
        for x, y, sign in ((x1, y1, -1), (x2, y2, 1)):
            start = (x - off * dy, y - off * dx)
            yield start, (start[0] + sign * dx * stub, start[1] + sign * dy * stub)


def torus_chart(links: pl.DataFrame, topology: Topology, source: Source) -> spec.Chart | None:
    """The chips of the slice and the load of both directions of every link, by phase.

    From the metric `link_traffic`, summed over the axes. None for a slice of more than MAX_CHIPS.
    """
    rows = links.filter(pl.col("source") == source.value)
    if topology.n_chips > MAX_CHIPS or rows.is_empty():
        return None
    fabric, devices = fabric_of(topology), dict[tuple[int, Coordinates], list[str]]()
    places = zip(fabric.slice_index.tolist(), fabric.coordinates.tolist(), strict=True)
    for device, (at, (x, y, z)) in enumerate(places):
        devices.setdefault((at, (x, y, z)), []).append(str(device))
    named = {chip: ",".join(ids) for chip, ids in sorted(devices.items())}
    planes = TorusPlanes(fabric.sizes, topology.n_slices)
    has_peak = topology.chip.link_bytes_per_s is not None
    sums = rows.group_by("phase", *LINK, maintain_order=True).agg(
        pl.col("load_bytes").sum(), link_s=pl.col("link_s").sum() if has_peak else pl.lit(None)
    )
    lines: dict[str, list[tuple[Any, ...]]] = {}
    chips: list[spec.Layer] = []
    for (phase,), of_phase in sums.group_by("phase", maintain_order=True):
        sent = dict.fromkeys(named, 0.0)
        for link in of_phase.iter_rows(named=True):
            at, load = link["slice_index"], link["load_bytes"]
            (x, y, z), (x2, y2, z2) = (
                map(int, link[end].split(",")) for end in ("from_chip", "to_chip")
            )
            ends = ((x, y, z), (x2, y2, z2))
            sent[at, ends[0]] += load
            tip = "link from device {} to device {}".format(*(named[at, end] for end in ends))
            tip += f"{' (wraparound)' * link['is_wrap']}\n{format_bytes(load)} per step"
            if link["link_s"] is not None:
                tip += f", {format_seconds(link['link_s'])} at peak link bandwidth"
            for start, end in planes.lines(at, *ends, is_wrap=link["is_wrap"]):
                line = (*(round(v, 1) for v in (*start, *end)), load, tip)
                lines.setdefault(str(phase), []).append(line)
        for (at, chip), ids in named.items():
            x, y = planes.at(at, chip)
            of_slice = f" of slice {at}" if topology.n_slices > 1 else ""
            tip = f"device {ids}, chip {','.join(map(str, chip))}{of_slice}\nsends {format_bytes(sent[at, chip])} per step over its links"
            chips.append({"phase": phase, "x": x, "y": y, "devices": ids, "tip": tip})
    size, font = planes.sizes_of(named.values())
    return spec.chart(
        "torus",
        f"{topology.name}; {len(sums)} links carry traffic in one step of {' or '.join(lines)}",
        name="torus",
        wraps=wraps_note(fabric),
        width=round(planes.size[0]),
        height=round(planes.size[1]),
        links=[spec.columnar("x y x2 y2 load tip", of, phase=n) for n, of in lines.items()],
        link_width=2 + min(4.0, 0.05 * planes.pitch),
        chips=chips,
        square=size**2,
        font=font if font >= 6 else None,
        heads=[{"x": x, "y": y, "text": text} for x, y, text in planes.heads()],
        params=[spec.choice("shown", "show", list(lines))],
    )


def wraps_note(fabric: Fabric) -> str:
    """The dimensions of a torus that close into rings, as a note on its drawing; empty without any."""
    rings = [letter for letter, is_ring in zip("xyz", fabric.wraps, strict=True) if is_ring]
    note = f" Wraparound links in {', '.join(rings)} are stubs at the edges of the grid."
    return note if rings else ""


def size_chart(distribution: pl.DataFrame, source: Source) -> spec.Chart | None:
    """How often each payload size occurs in a step of the chosen phase; None if no size is known."""
    is_known = pl.col("payload_bytes").is_not_null()
    counts = distribution.filter(pl.col("source") == source.value, is_known).with_columns(_LABELS)
    if counts.is_empty():
        return None
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
