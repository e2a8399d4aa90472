"""Volume, counts and sizes of collectives.

Every function maps the event table (`meshscope.events.schema`) to a table. Figures are those of one
device in one step of the phase; columns with the prefix `request_` cover all steps of one request.
"""

from collections.abc import Sequence

import polars as pl

WHERE = ("source", "phase")  # the keys of every metric
BY = ("axis", "kind", "part")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

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


def size_distribution(events: pl.DataFrame, by: Sequence[str] = ("axis", "kind")) -> pl.DataFrame:
    """Number of collectives of each payload size in one step, the smallest first; null is unknown.

    Source: "Characterizing Communication Patterns in Distributed Large Language Model Inference" (arXiv
    2507.14392), Tables III to VI, lists message sizes by collective likewise.
    """
    keys = (*WHERE, *by)
    return (
        collectives(events)
        .group_by(*keys, "payload_bytes", maintain_order=True)
        .agg(_COUNT.sum().alias("count"))
        .sort(*keys, "payload_bytes", maintain_order=True, nulls_last=True)
    )


def size_summary(events: pl.DataFrame, by: Sequence[str] = ("axis", "kind")) -> pl.DataFrame:
    """Minimum, median, 90th and 99th percentile and maximum payload over all operations of a step.

    A percentile is the smallest occurring size that at least this fraction of the operations does not
    exceed. Operations of unknown size are excluded.

    Source: Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996), definition 1: the inverse
    of the empirical distribution.
    """
    sized = collectives(events).filter(_IS_SIZED)
    repeated = sized.select(
        *WHERE, *by, pl.col("payload_bytes").repeat_by(_COUNT).alias("payload_bytes")
    ).explode("payload_bytes")
    size = pl.col("payload_bytes")
    quantiles = [_nearest_rank(q).alias(f"{name}_bytes") for name, q in QUANTILES.items()]
    return (
        repeated.drop_nulls("payload_bytes")
        .group_by(*WHERE, *by, maintain_order=True)
        .agg(
            size.len().cast(pl.Int64).alias("count"),
            size.min().alias("min_bytes"),
            *quantiles,
            size.max().alias("max_bytes"),
        )
    )


def _nearest_rank(fraction: float) -> pl.Expr:
    size = pl.col("payload_bytes")
    rank = (pl.lit(fraction) * size.len()).ceil().cast(pl.Int64) - 1
    return size.sort().get(rank.clip(0))
