"""The logical traffic matrix of one step: bytes from device to device, regardless of the links in between.

A collective's wire bytes come from its row; the algorithm only determines the receivers.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import polars as pl

from meshscope.analysis.join import POINT_TO_POINT
from meshscope.analysis.volume import WHERE, collectives, merged_groups
from meshscope.events.enums import Kind

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
