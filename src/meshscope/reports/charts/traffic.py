"""Traffic: the device-to-device matrix, the load of the torus links, the volume and the sizes of collectives."""

from dataclasses import dataclass
from typing import Any

import polars as pl

from meshscope.analysis.matrix import LINK, traffic_matrix
from meshscope.analysis.metric_inputs import MetricInputs
from meshscope.events.enums import Phase, Source
from meshscope.hardware.topology import Topology
from meshscope.interconnect.fabric import fabric_of
from meshscope.reports.model import UNKNOWN_AXIS_LABEL, UNKNOWN_PHASE_LABEL

MAX_SIDE = 128  # rows and columns; larger matrices are folded
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
