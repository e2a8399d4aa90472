"""Traffic over the physical links of a torus: bytes on each link in one step."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from meshscope.analysis.volume import WHERE, collectives, merged_groups
from meshscope.events.enums import Kind
from meshscope.hardware.topology import Topology
from meshscope.interconnect.loads import link_loads

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
