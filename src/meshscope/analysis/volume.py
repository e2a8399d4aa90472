"""Volume, counts, sizes and bandwidths of collectives.

Every function maps the event table (`meshscope.events.schema`) to a table. Figures are for one
device in one step of the phase; columns with the prefix `request_` cover all steps of one request.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import polars as pl

from meshscope.analysis.join import POINT_TO_POINT
from meshscope.events.enums import Kind, Source
from meshscope.events.measured import TransferTime
from meshscope.hardware.chips import Chip
from meshscope.hardware.interconnect.lines import link_loads
from meshscope.hardware.topology import Topology

WHERE = ("source", "phase")  # the keys of every metric
BY = ("axis", "kind", "part")

_IS_SIZED = pl.col("payload_bytes").is_not_null() & pl.col("wire_bytes").is_not_null()
_COUNT = pl.col("count").cast(pl.Int64)


def collectives(events: pl.DataFrame) -> pl.DataFrame:
    """The rows that are collectives; compute, copies and idle time have no kind."""
    return events.filter(pl.col("kind").is_not_null())


def merged_groups(rows: pl.DataFrame, keys: Sequence[str], *totals: pl.Expr) -> pl.DataFrame:
    """One row for equal `keys` and equal device groups, with `totals` and the column `groups`."""
    lists = pl.col("groups").cast(pl.List(pl.List(pl.String)))
    key = lists.list.eval(pl.element().list.join(",")).list.join(";").alias("group_key")
    grouped = rows.with_columns(key).group_by(*keys, "group_key", maintain_order=True)
    return grouped.agg(*totals, pl.col("groups").first())


def volume(events: pl.DataFrame, by: Sequence[str] = BY) -> pl.DataFrame:
    """Number of collectives, payload bytes and wire bytes by source, phase, axis, kind and part.

    `payload_bytes` is the size of the logical array (all-gather: output; reduce-scatter: input),
    `wire_bytes` the bytes that one device sends for it. `n_unsized` operations have no known size and
    contribute to `count` only; the bytes are null if no operation has a size. With a pipeline, the figures
    are sums over one device of every stage.

    Source: size rule and factors of nccl-tests doc/PERFORMANCE.md, "Bandwidth" and "Bus bandwidth".
    """
    steps = _COUNT * pl.col("n_steps")
    return (
        collectives(events)
        .group_by(*WHERE, *by, maintain_order=True)
        .agg(
            _COUNT.sum().alias("count"),
            _sum("payload_bytes", _COUNT).alias("payload_bytes"),
            _sum("wire_bytes", _COUNT).alias("wire_bytes"),
            _COUNT.filter(~_IS_SIZED).sum().alias("n_unsized"),
            steps.sum().alias("request_count"),
            _sum("payload_bytes", steps).alias("request_payload_bytes"),
            _sum("wire_bytes", steps).alias("request_wire_bytes"),
        )
    )


def _sum(column: str, times: pl.Expr) -> pl.Expr:
    """The sum over the sized rows; null without sized rows."""
    total = (pl.col(column) * times).filter(_IS_SIZED).sum()
    return pl.when(_IS_SIZED.any()).then(total)


def size_distribution(events: pl.DataFrame) -> pl.DataFrame:
    """Number of collectives of each payload size in one step, the smallest first; null is unknown.

    Source: "Characterizing Communication Patterns in Distributed Large Language Model Inference" (arXiv
    2507.14392), Tables III to VI, lists message sizes by collective likewise.
    """
    keys = (*WHERE, "axis", "kind")
    return (
        collectives(events)
        .group_by(*keys, "payload_bytes", maintain_order=True)
        .agg(_COUNT.sum().alias("count"))
        .sort(*keys, "payload_bytes", maintain_order=True, nulls_last=True)
    )


GROUP_KEYS = ("axis", "kind", "group_size", "payload_bytes")
_TRANSFERS_SCHEMA = {
    **dict.fromkeys(("source", "phase", "kind", "axis"), pl.String),
    "payload_bytes": pl.Int64,
    "wire_s": pl.Float64,
}
# What crosses the links in the time of a row: a receiver sends nothing, but waits for the array.
_MOVED = (
    pl.when(pl.col("kind") == Kind.RECV.value)
    .then("payload_bytes")
    .otherwise("wire_bytes")
    .alias("wire_bytes")
)


def bandwidth(
    events: pl.DataFrame, chip: Chip | None = None, transfers: Sequence[TransferTime] = ()
) -> pl.DataFrame:
    """Mean duration and bandwidth of collectives that are equal in axis, kind, group size and payload.

    `algbw_bytes_per_s` = payload / duration. `busbw_bytes_per_s` = wire bytes / duration, where the wire
    bytes of the executed opcode are the payload times 2(n-1)/n for all-reduce, (n-1)/n for all-gather,
    reduce-scatter and all-to-all, and 1 for point to point, at either end. `link_frac` = busbw / peak of all
    links of the chip in one direction. Collectives without durations are excluded. Durations include waiting (see `waiting`), except in traces of all ranks of a
    group: there algbw and busbw are of the rank that comes last, which does not wait.

    Source: nccl-tests doc/PERFORMANCE.md, "Bandwidth"; link peaks: `meshscope.hardware.chips`.
    """
    rows = collectives(events).filter(pl.col("dur_s") > 0, pl.col("wire_bytes").is_not_null())
    rows = rows.with_columns(_MOVED)
    times = pl.col("count").cast(pl.Int64)
    keys = ["source", "phase", "kind", "axis", "payload_bytes"]
    known = pl.DataFrame(
        [
            (Source.MEASURED.value, t.label.phase, t.kind, t.axis, t.payload_bytes, t.wire_s)
            for t in transfers
        ],
        schema=_TRANSFERS_SCHEMA,
        orient="row",
    )
    known = known.group_by(keys).agg(pl.col("wire_s").mean())
    rows = rows.join(known, on=keys, how="left", nulls_equal=True, maintain_order="left")
    mean_s, sent_s = (
        (seconds * times).sum() / times.sum()
        for seconds in (pl.col("dur_s"), pl.coalesce("wire_s", "dur_s"))
    )
    table = rows.group_by(*WHERE, *GROUP_KEYS, maintain_order=True).agg(
        times.sum().alias("count"),
        mean_s.alias("mean_dur_s"),
        (pl.col("payload_bytes").first() / sent_s).alias("algbw_bytes_per_s"),
        ((pl.col("wire_bytes") * times).sum() / times.sum() / sent_s).alias("busbw_bytes_per_s"),
        pl.col("time_basis").first(),
    )
    peak = None if chip is None else chip.all_links_bytes_per_s
    fraction = pl.lit(None, pl.Float64) if peak is None else pl.col("busbw_bytes_per_s") / peak
    return table.with_columns(fraction.alias("link_frac"))


SENT = {"from_device": pl.Int32, "to_device": pl.Int32, "wire_bytes": pl.Float64}


def traffic_matrix(events: pl.DataFrame) -> pl.DataFrame:
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
    keys = [*WHERE, "axis"]
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


LINK: dict[str, Any] = {
    "slice_index": pl.Int64,
    **dict.fromkeys(("from_chip", "to_chip", "dim"), pl.String),
    "is_wrap": pl.Boolean,
}


def link_traffic(events: pl.DataFrame, topology: Topology) -> pl.DataFrame:
    """Bytes over each ICI link and direction in one step, by source, phase and axis.

    Chips are identified by x,y,z. A collective is routed by the fastest strategy of the interconnect model
    for its kind, groups and payload, and omitted if its groups or payload are unknown. Idle links are omitted, and
    bytes between slices (DCN) cross no ICI link. `link_s` = bytes / peak bandwidth of one link; the value of the
    busiest link is a lower bound of the communication time of the step.

    Source: routes and strategies of `meshscope.hardware.interconnect` (scaling book, "sharding": rings on a
    torus); link peaks: `meshscope.hardware.chips`. libtpu may choose other routes.
    """
    keys = (*WHERE, "axis")
    is_routed = pl.col("payload_bytes").is_not_null() & (pl.col("groups").list.len() > 0)
    sized = collectives(events).filter(is_routed)
    count = pl.col("count").cast(pl.Int64).sum()
    shared = merged_groups(sized, (*keys, "kind", "payload_bytes"), count)
    peak = topology.chip.link_bytes_per_s
    loads: list[tuple[Any, ...]] = []
    for row in shared.iter_rows(named=True) if peak is not None else ():
        groups = tuple(map(tuple, row["groups"]))
        for load in link_loads(
            Kind(row["kind"]), groups=groups, payload_bytes=row["payload_bytes"], topology=topology
        ):
            ends = (",".join(map(str, chip)) for chip in (load.source, load.target))
            link = (load.slice_index, *ends, load.dim, load.is_wrap)
            loads.append((*(row[key] for key in keys), *link, load.load_bytes * row["count"]))
    schema = {key: events.schema[key] for key in keys} | LINK | {"load_bytes": pl.Float64}
    table = pl.DataFrame(loads, schema=schema, orient="row")
    sums = table.group_by(*keys, *LINK, maintain_order=True).agg(pl.col("load_bytes").sum())
    seconds = pl.lit(None, pl.Float64) if peak is None else pl.col("load_bytes") / peak
    return sums.sort(*keys, *LINK, nulls_last=True).with_columns(seconds.alias("link_s"))
