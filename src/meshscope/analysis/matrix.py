"""The traffic of one step: bytes from device to device, and over each physical link of a torus.

A collective's wire bytes come from its row; the algorithm only determines the receivers.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import polars as pl

from meshscope.analysis.join import POINT_TO_POINT
from meshscope.analysis.volume import WHERE, collectives, merged_groups
from meshscope.events.enums import Kind
from meshscope.hardware.topology import Topology
from meshscope.interconnect.lines import link_loads

SENT = {"from_device": pl.Int32, "to_device": pl.Int32, "wire_bytes": pl.Float64}


def traffic_matrix(events: pl.DataFrame, by: Sequence[str] = ("axis",)) -> pl.DataFrame:
    """Bytes that each device sends to each other device in one step, by source, phase and axis.

    All-reduce, all-gather and reduce-scatter follow a ring in the order of the group: each member sends all
    its wire bytes to the next member. All-to-all is direct: each member sends an equal share to every other
    member. Permute and send transfer from source to target; a receive sends nothing. Broadcast and gather
    follow a chain: every member except the last sends to the next. Pairs without traffic are omitted. The
    bytes of each sender sum to its wire bytes (`volume`), except for chains.

    Source: ring and direct algorithms: Chan et al., "Collective communication: theory, practice, and
    experience" (2007); the matrix: the traffic heatmaps of Wang et al., "TopoOpt" (NSDI 2023). libtpu also
    uses bidirectional and multiple rings, which changes the neighbors but not the sums.
    """
    keys = [*WHERE, *by]
    wire_bytes = (pl.col("wire_bytes") * pl.col("count")).sum()
    sized = collectives(events).filter(pl.col("wire_bytes").is_not_null())
    shared = merged_groups(sized, (*keys, "kind"), wire_bytes)
    sent = [
        (*(row[key] for key in keys), source, target, row["wire_bytes"] * fraction)
        for row in shared.iter_rows(named=True)
        for group in row["groups"]
        for source, target, fraction in _edges(Kind(row["kind"]), group)
    ]
    schema = {**{key: events.schema[key] for key in keys}, **SENT}
    pair = ("from_device", "to_device")
    return (
        pl.DataFrame(sent, schema=schema, orient="row")
        .group_by(*keys, *pair, maintain_order=True)
        .agg(pl.col("wire_bytes").sum())
        .filter(pl.col("wire_bytes") > 0)
        .sort(*keys, *pair, maintain_order=True, nulls_last=True)
    )


def _edges(kind: Kind, group: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """(source, target, fraction of the source's wire bytes) of one operation in one group."""
    n = len(group)
    if kind in POINT_TO_POINT:
        if kind is not Kind.RECV and n == 2 and group[0] != group[1]:
            yield group[0], group[1], 1.0
        return
    if kind is Kind.REDUCE:
        yield from ((source, target, 1.0) for target, source in pairwise(group))
    elif kind in {Kind.BROADCAST, Kind.GATHER, Kind.SCATTER}:
        yield from ((source, target, 1.0) for source, target in pairwise(group))
    elif kind is Kind.ALL_TO_ALL:
        yield from ((a, b, 1 / (n - 1)) for a in group for b in group if a != b)
    elif n > 1:
        yield from ((group[i], group[(i + 1) % n], 1.0) for i in range(n))


def sent_by_device(matrix: pl.DataFrame, n_devices: int) -> pl.DataFrame:
    """Bytes that each device sends in one step, by source and phase; 0 for a device that sends nothing.

    Source: row sums of `traffic_matrix`.
    """
    devices = pl.DataFrame({"device": range(n_devices)}, schema={"device": pl.Int32})
    phases = matrix.select(*WHERE).unique(maintain_order=True)
    sums = matrix.group_by(*WHERE, pl.col("from_device").alias("device")).agg(
        pl.col("wire_bytes").sum().alias("sent_bytes")
    )
    joined = phases.join(devices, how="cross").join(
        sums, on=[*WHERE, "device"], how="left", nulls_equal=True, maintain_order="left"
    )
    return joined.with_columns(pl.col("sent_bytes").fill_null(0.0))


def traffic_imbalance(events: pl.DataFrame, n_devices: int) -> pl.DataFrame:
    """Traffic imbalance of a step: bytes that the busiest device sends over the mean of all devices.

    1 is balanced. `load_imbalance` is the same ratio for busy time.

    Source: Pearce et al., "Quantifying the Effectiveness of Load Balance Algorithms" (ICS 2012), whose
    load imbalance metric subtracts 1.
    """
    sent = sent_by_device(traffic_matrix(events, by=()), n_devices)
    return (
        sent.group_by(*WHERE, maintain_order=True)
        .agg(
            pl.col("sent_bytes").max().alias("max_sent_bytes"),
            pl.col("sent_bytes").mean().alias("mean_sent_bytes"),
        )
        .with_columns((pl.col("max_sent_bytes") / pl.col("mean_sent_bytes")).alias("imbalance"))
    )


LINK = ("slice_index", "from_chip", "to_chip", "dim", "is_wrap")
_SCHEMA = {
    "slice_index": pl.Int64,
    "from_chip": pl.String,
    "to_chip": pl.String,
    "dim": pl.String,
    "is_wrap": pl.Boolean,
    "load_bytes": pl.Float64,
}


def link_traffic(
    events: pl.DataFrame, topology: Topology, by: Sequence[str] = ("axis",)
) -> pl.DataFrame:
    """Bytes over each ICI link and direction in one step, by source, phase and axis.

    Chips are identified by x,y,z. A collective is routed by the fastest strategy of the interconnect model
    for its kind, groups and payload. Idle links are omitted, and bytes between slices (DCN) cross no ICI
    link. `link_s` = bytes / peak bandwidth of one link; the value of the busiest link is a lower bound of
    the communication time of the step.

    Source: routes and strategies of `meshscope.interconnect` (scaling book, "sharding": rings on a
    torus); link peaks: `meshscope.hardware.chips`. libtpu may choose other routes.
    """
    keys = (*WHERE, *by)
    sized = collectives(events).filter(pl.col("payload_bytes").is_not_null())
    count = pl.col("count").cast(pl.Int64).sum()
    shared = merged_groups(sized, (*keys, "kind", "payload_bytes"), count)
    loads = [
        record for row in shared.iter_rows(named=True) for record in _links(row, keys, topology)
    ]
    schema = {**{key: events.schema[key] for key in keys}, **_SCHEMA}
    peak = topology.chip.link_bytes_per_s
    table = pl.DataFrame(loads, schema=schema, orient="row")
    sums = table.group_by(*keys, *LINK, maintain_order=True).agg(pl.col("load_bytes").sum())
    seconds = pl.lit(None, pl.Float64) if peak is None else pl.col("load_bytes") / peak
    return sums.sort(*keys, *LINK, nulls_last=True).with_columns(seconds.alias("link_s"))


def _links(row: dict[str, Any], keys: Sequence[str], topology: Topology) -> list[tuple[Any, ...]]:
    if topology.chip.link_bytes_per_s is None:
        return []
    loads = link_loads(
        Kind(row["kind"]),
        groups=tuple(tuple(group) for group in row["groups"]),
        payload_bytes=row["payload_bytes"],
        topology=topology,
    )
    place = tuple(row[key] for key in keys)
    return [
        (
            *place,
            load.slice_index,
            ",".join(map(str, load.source)),
            ",".join(map(str, load.target)),
            load.dim,
            load.is_wrap,
            load.load_bytes * row["count"],
        )
        for load in loads
    ]
