"""How many bytes, how often and in which sizes: sums over the rows of an event table.

Every function takes the event table (`meshscope.events.schema`) and returns a table. Figures are those
of one device in one step of the phase, and with `request_` those of all steps of one request.
"""

from collections.abc import Sequence

import polars as pl

WHERE = ("source", "phase")  # what every metric is told apart by
BY = ("axis", "kind", "part")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

_IS_SIZED = pl.col("payload_bytes").is_not_null() & pl.col("wire_bytes").is_not_null()
_COUNT = pl.col("count").cast(pl.Int64)


def collectives(events: pl.DataFrame) -> pl.DataFrame:
    """The rows that are collectives; compute, copies and idle spans have no kind."""
    return events.filter(pl.col("kind").is_not_null())


def volume(events: pl.DataFrame, by: Sequence[str] = BY) -> pl.DataFrame:
    """Operations, payload bytes and wire bytes by source, phase and the columns `by`.

    `payload_bytes` is the logical array (all-gather: output; reduce-scatter: input), `wire_bytes` what
    one device sends for it. `n_unsized` operations have no known size and are in `count` alone; where no
    operation has a size, the bytes are null. Parts sum to the whole, whatever `by` is. With a pipeline the
    figures are those of one device of every stage together.

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
    """The sum of the sized rows; null without one."""
    total = (pl.col(column) * times).filter(_IS_SIZED).sum()
    return pl.when(_IS_SIZED.any()).then(total)


def size_distribution(events: pl.DataFrame, by: Sequence[str] = ("axis", "kind")) -> pl.DataFrame:
    """How often each payload size occurs in one step, the smallest first; null is an unknown size.

    Source: message sizes by collective as "Characterizing Communication Patterns in Distributed Large
    Language Model Inference" (arXiv 2507.14392), Tables III to VI, lists them.
    """
    keys = (*WHERE, *by)
    return (
        collectives(events)
        .group_by(*keys, "payload_bytes", maintain_order=True)
        .agg(_COUNT.sum().alias("count"))
        .sort(*keys, "payload_bytes", maintain_order=True, nulls_last=True)
    )


def size_summary(events: pl.DataFrame, by: Sequence[str] = ("axis", "kind")) -> pl.DataFrame:
    """Smallest, median, 90th and 99th percentile and largest payload, every operation of a step counted.

    A percentile is a size that occurs (the smallest that at least this share of the operations does not
    exceed). Operations of unknown size are left out; a group of them alone is not in the table.

    Source: Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996), definition 1: the inverse
    of the empirical distribution.
    """
    sized = collectives(events).filter(_IS_SIZED)
    repeated = sized.select(
        *WHERE, *by, pl.col("payload_bytes").repeat_by(_COUNT).alias("payload_bytes")
    ).explode("payload_bytes")
    size = pl.col("payload_bytes")
    shares = [_nearest_rank(share).alias(f"{name}_bytes") for name, share in QUANTILES.items()]
    return (
        repeated.drop_nulls("payload_bytes")
        .group_by(*WHERE, *by, maintain_order=True)
        .agg(
            size.len().cast(pl.Int64).alias("count"),
            size.min().alias("min_bytes"),
            *shares,
            size.max().alias("max_bytes"),
        )
    )


def _nearest_rank(share: float) -> pl.Expr:
    size = pl.col("payload_bytes")
    rank = (pl.lit(share) * size.len()).ceil().cast(pl.Int64) - 1
    return size.sort().get(rank.clip(0))
