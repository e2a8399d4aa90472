"""The timeline of a run as rows of the event table: one row for each execution, compute and copies too.

A run on live devices keeps what every device did in each profiled step. Of a compiled run a folder keeps
one device's modelled step, folded: where a loop repeats a span, `repeats` and `periods_s` say how often and
how far apart, the outermost loop first, and `lane` says whether it is compute (`core`), a collective or
a copy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.errors import RunError
from meshscope.events.schema import POLARS_SCHEMA

TIMELINE = "timeline.parquet"
OPS = Path("trace") / "ops.parquet"
COPY = "copy"
TIMELINE_SCHEMA: dict[str, Any] = {**POLARS_SCHEMA, "step": pl.Int64}

_OF_EVENT = (
    "layer",
    "opcode",
    "group_size",
    "n_groups",
    "groups",
    "dtype",
    "shape",
    "payload_bytes",
)
_OF_EVENT_TOO = ("wire_bytes", "stage", "n_steps", "is_async", "algorithm", "inserted_by")
_KEYS = ("source", "phase", "hlo_name")


def read_timeline(folder: Path, events: pl.DataFrame) -> pl.DataFrame | None:
    """The timelines of the run in this folder, modelled and measured; None where it has none.

    Columns: those of the event table, and `step`, the index of the step in its phase.
    """
    found: list[pl.DataFrame] = []
    if (folder / TIMELINE).is_file():
        found.append(timeline_of(read_table(folder / TIMELINE), events))
    if (folder / OPS).is_file():
        found.append(_measured(read_table(folder / OPS), events))
    return pl.concat(found) if found else None


def read_table(path: Path) -> pl.DataFrame:
    """A Parquet file of a run folder; RunError with the remedy where it is damaged."""
    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise RunError(
            f"cannot read '{path}': {error}. Make the run again, with --force."
        ) from error


def _measured(ops: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """What devices did, steps numbered from 0 in each phase; what runs beside steps is left out."""
    known = ops.filter(pl.col("step").is_not_null(), pl.col("phase").is_not_null())
    numbered = known.with_columns(
        (pl.col("step").rank("dense").over("phase") - 1).alias("step"), pl.lit(1).alias("count")
    )
    # A profile holds a few steps; how many the request has the events know.
    full = _with_phase_steps(numbered, events).with_columns(
        pl.coalesce("phase_steps", "n_steps").alias("n_steps")
    )
    return full.select(_column(name, full.columns) for name in TIMELINE_SCHEMA)


def _with_phase_steps(rows: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """The rows with the steps that a request has of their phase."""
    steps = events.group_by("source", "phase").agg(pl.col("n_steps").first().alias("phase_steps"))
    keys = ["source", "phase"]
    return rows.join(steps, on=keys, how="left", nulls_equal=True, maintain_order="left")


def last_step(timeline: pl.DataFrame) -> pl.DataFrame:
    """Of several recorded steps of a phase the last, which is the warmest."""
    return timeline.filter(pl.col("step") == pl.col("step").max().over("source", "phase"))


def timeline_of(folded: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Every execution of a folded timeline, with what `events` tells of each collective instruction."""
    single = unfolded(folded)
    collectives = events.filter(pl.col("kind").is_not_null(), pl.col("hlo_name").is_not_null())
    first = pl.col("layer").first()
    is_first = pl.col("layer").eq_missing(first)
    told = collectives.group_by(_KEYS, maintain_order=True).agg(
        *(
            pl.col(name).first()
            for name in (*_OF_EVENT, *_OF_EVENT_TOO)
            if not name.endswith("_bytes")
        ),
        *(pl.col(name).filter(is_first).sum() for name in ("payload_bytes", "wire_bytes")),
        (pl.col("layer").n_unique() == 1).alias("is_one_layer"),
    )
    joined = single.join(told, on=list(_KEYS), how="left", nulls_equal=True, maintain_order="left")
    is_copy = pl.col("lane") == COPY
    opcode = pl.when(is_copy).then(pl.lit(COPY)).otherwise(pl.col("opcode")).alias("opcode")
    layer = pl.when(pl.col("is_one_layer")).then(pl.col("layer"))
    full = _with_phase_steps(joined, events).with_columns(
        opcode,
        layer,
        pl.lit(1).alias("count"),
        pl.lit(0).alias("step"),
        pl.col("n_steps").fill_null(pl.col("phase_steps")),
    )
    return full.select(_column(name, full.columns) for name in TIMELINE_SCHEMA)


def _column(name: str, known: Sequence[str]) -> pl.Expr:
    dtype = TIMELINE_SCHEMA[name]
    found = pl.col(name) if name in known else pl.lit(None)
    return found.cast(dtype).alias(name)


def unfolded(folded: pl.DataFrame) -> pl.DataFrame:
    """The spans with every repetition as a row of its own, by start."""
    numbered = folded.with_row_index("span")
    starts = [
        (index, start_s)
        for index, first_s, repeats, periods_s in numbered.select(
            "span", "start_s", "repeats", "periods_s"
        ).iter_rows()
        for start_s in _starts(first_s, repeats, periods_s)
    ]
    schema = {"span": numbered.schema["span"], "start_s": pl.Float64}
    each = pl.DataFrame(starts, schema=schema, orient="row")
    rows = each.join(
        numbered.drop("start_s", "repeats", "periods_s"), on="span", maintain_order="left"
    )
    return rows.drop("span").sort("source", "phase", "start_s", maintain_order=True)


def _starts(first_s: float, repeats: Sequence[int], periods_s: Sequence[float]) -> list[float]:
    starts = [first_s]
    for times, period_s in reversed(list(zip(repeats, periods_s, strict=True))):
        starts = [start + k * period_s for k in range(times) for start in starts]
    return starts
