"""The traffic of a step between devices, as a matrix, and over the links of the torus."""

from dataclasses import dataclass

import polars as pl

from meshscope.analysis.matrix import traffic_matrix
from meshscope.analysis.metric_inputs import MetricInputs
from meshscope.analysis.routed import LINK
from meshscope.events.enums import Phase, Source
from meshscope.interconnect.fabric import fabric_of
from meshscope.spec.hardware.topology import Topology

MAX_SIDE = 128  # rows and columns that are drawn; larger matrices are folded
ALL_AXES = "all axes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Bytes from device to device in one step: `cells` are (from, to, bytes), silent pairs absent.

    Rows and columns stand for `fold` devices each, which follow each other.
    """

    phase: str
    axis: str
    n_devices: int
    fold: int
    cells: tuple[tuple[int, int, float], ...]


def matrices(subject: MetricInputs, source: Source) -> tuple[Matrix, ...]:
    """For each phase the matrix of all axes, then of each axis where there are several."""
    if subject.n_devices is None:
        return ()
    own = subject.events.filter(pl.col("source") == source.value)
    table = traffic_matrix(own)
    if table.is_empty():
        return ()
    found: list[Matrix] = []
    for phase in Phase:
        of_phase = table.filter(pl.col("phase") == phase.value)
        if of_phase.is_empty():
            continue
        parts = {
            "no axis" if axis is None else str(axis): part
            for (axis,), part in of_phase.group_by("axis", maintain_order=True)
        }
        named = {ALL_AXES: of_phase, **parts} if len(parts) > 1 else parts
        found += [
            _matrix(part, phase=phase.value, axis=axis, n_devices=subject.n_devices)
            for axis, part in named.items()
        ]
    return tuple(found)


def _matrix(table: pl.DataFrame, *, phase: str, axis: str, n_devices: int) -> Matrix:
    fold = -(-n_devices // MAX_SIDE)
    folded = (
        table.with_columns(pl.col("from_device") // fold, pl.col("to_device") // fold)
        .group_by("from_device", "to_device", maintain_order=True)
        .agg(pl.col("wire_bytes").sum())
    )
    cells = folded.select("from_device", "to_device", "wire_bytes").iter_rows()
    return Matrix(phase=phase, axis=axis, n_devices=n_devices, fold=fold, cells=tuple(cells))


Place = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Bytes over one link in one direction in one step, and how long they take at the link's peak."""

    slice_index: int
    source: Place
    target: Place
    is_wrap: bool
    load_bytes: float
    link_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Torus:
    """The chips of a slice with the load of every link that carries something in a step of the phase.

    `chips` are (slice, x, y, z, devices on it); `wraps` says which of x, y, z close into a ring.
    """

    phase: str
    sizes: Place
    wraps: tuple[bool, bool, bool]
    n_slices: int
    chips: tuple[tuple[int, int, int, int, str], ...]
    links: tuple[Link, ...]


def tori(link_traffic: pl.DataFrame, topology: Topology, source: Source) -> tuple[Torus, ...]:
    """One torus a phase, from the metric `link_traffic`; all axes together."""
    own = link_traffic.filter(pl.col("source") == source.value)
    sums = own.group_by("phase", *LINK, maintain_order=True).agg(
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
                for row in part.iter_rows(named=True)
            ),
        )
        for (phase,), part in sums.group_by("phase", maintain_order=True)
    )


def _link(row: dict[str, object], *, has_peak: bool) -> Link:
    load_bytes, link_s = row["load_bytes"], row["link_s"]
    assert isinstance(load_bytes, float)
    assert isinstance(link_s, float)
    return Link(
        slice_index=int(str(row["slice_index"])),
        source=_place(row["from_chip"]),
        target=_place(row["to_chip"]),
        is_wrap=bool(row["is_wrap"]),
        load_bytes=load_bytes,
        link_s=link_s if has_peak else None,
    )


def _place(text: object) -> Place:
    x, y, z = (int(number) for number in str(text).split(","))
    return x, y, z


def _chips(topology: Topology) -> tuple[tuple[int, int, int, int, str], ...]:
    placement = fabric_of(topology).placement
    devices: dict[tuple[int, int, int, int], list[int]] = {}
    for device, (at_slice, (x, y, z)) in enumerate(
        zip(placement.slice_index.tolist(), placement.coordinates.tolist(), strict=True)
    ):
        devices.setdefault((at_slice, x, y, z), []).append(device)
    return tuple((*place, ",".join(map(str, ids))) for place, ids in sorted(devices.items()))
