"""The timeline of a run as rows of the event table: one row per execution, compute and copies included.

A measured run stores what every device executed in each profiled step, and so does an imported trace
(`trace_timeline.py`). A compiled run stores the modeled step of one device, or of one device of each
pipeline stage, folded; `lane` says whether a span is compute (`core`), a collective or a copy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.analysis.trace_timeline import has_executions, last_executions
from meshscope.errors import RunError
from meshscope.events.schema import POLARS_SCHEMA
from meshscope.events.timeline import FOLDED_SCHEMA, TIMELINE, unfolded

OPS = Path("trace") / "ops.parquet"
COPY = "copy"
TIMELINE_SCHEMA: dict[str, Any] = {
    **POLARS_SCHEMA,
    "step": pl.Int64,
    "stream": pl.Int64,
    "step_class": pl.String,
    "activity": pl.String,
}

_COLLECTIVE_FACTS = (
    "parallelism",
    "opcode",
    "group_size",
    "n_groups",
    "groups",
    "dtype",
    "shape",
    "n_steps",
    "is_async",
    "algorithm",
    "inserted_by",
)
_KEYS = ("source", "phase", "stage", "hlo_name")


def read_timeline(folder: Path, events: pl.DataFrame) -> pl.DataFrame | None:
    """The modeled and measured timelines of the run in this folder; None if it stores none.

    Columns: those of the event table; `step`, the index of the step in its phase; for traces `stream`,
    the lane of the device, and `step_class`, the class of the step; for modeled compute its `activity`. A long trace has only its last steps here.
    """
    timelines: list[pl.DataFrame] = []
    if (folder / TIMELINE).is_file():
        timelines.append(modeled_timeline(read_folded(folder), events))
    if (folder / OPS).is_file():
        timelines.append(_measured(read_table(folder / OPS), events))
    if has_executions(folder):
        timelines.append(_in_schema(last_executions(folder)))
    return pl.concat(timelines) if timelines else None


def read_table(path: Path) -> pl.DataFrame:
    """A Parquet file of a run folder; RunError with the remedy if it is damaged."""
    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise RunError(
            f"cannot read '{path}': {error}. Make the run again, with --force."
        ) from error


def read_folded(folder: Path) -> pl.DataFrame:
    """The folded timeline of a run; columns that an older version did not write are null."""
    stored = read_table(folder / TIMELINE)
    return pl.concat([pl.DataFrame(schema=FOLDED_SCHEMA), stored], how="diagonal")


def _measured(ops: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Measured executions with steps numbered from 0 in each phase; drops ops outside of steps."""
    in_steps = ops.filter(pl.col("step").is_not_null(), pl.col("phase").is_not_null())
    numbered = in_steps.with_columns(
        (pl.col("step").rank("dense").over("phase") - 1).alias("step"), pl.lit(1).alias("count")
    )
    # A profile covers a few steps; the event table has the number of steps in the request.
    rows = _with_phase_steps(numbered, events).with_columns(
        pl.coalesce("phase_steps", "n_steps").alias("n_steps")
    )
    keys = [name for name in _KEYS if name != "stage"]  # a stage also receives what another sends
    facts = _collective_facts(events).select(*keys, "parallelism").unique(keys)
    rows = rows.drop("parallelism", strict=False).join(
        facts, on=keys, how="left", nulls_equal=True, maintain_order="left"
    )
    return _in_schema(rows)


def _with_phase_steps(rows: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """The rows with `phase_steps`, the number of steps of their phase in a request."""
    steps = events.group_by("source", "phase").agg(pl.col("n_steps").first().alias("phase_steps"))
    keys = ["source", "phase"]
    return rows.join(steps, on=keys, how="left", nulls_equal=True, maintain_order="left")


def last_step(timeline: pl.DataFrame) -> pl.DataFrame:
    """The last recorded step of each phase, which is the warmest."""
    return timeline.filter(pl.col("step") == pl.col("step").max().over("source", "phase"))


def modeled_timeline(folded: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Every execution of a folded timeline, with the collective columns taken from `events`."""
    # Spans and rows may come from different programs, in which names of other operations coincide.
    name = pl.when(pl.col("kind").is_not_null()).then(pl.col("hlo_name")).alias("collective")
    joined = (
        unfolded(folded)
        .with_columns(name)
        .join(
            _collective_facts(events),
            left_on=[*_KEYS[:-1], "collective"],
            right_on=list(_KEYS),
            how="left",
            nulls_equal=True,
            maintain_order="left",
        )
    )
    is_copy = pl.col("lane") == COPY
    opcode = pl.when(is_copy).then(pl.lit(COPY)).otherwise(pl.col("opcode")).alias("opcode")
    rows = _with_phase_steps(joined, events).with_columns(
        opcode,
        pl.lit(1).alias("count"),
        pl.lit(0).alias("step"),
        pl.col("n_steps").fill_null(pl.col("phase_steps")),
    )
    return _in_schema(rows)


def _collective_facts(events: pl.DataFrame) -> pl.DataFrame:
    """One row per collective instruction; bytes are summed over the arrays of its first layer."""
    collectives = events.filter(pl.col("kind").is_not_null(), pl.col("hlo_name").is_not_null())
    in_first_layer = pl.col("layer").eq_missing(pl.col("layer").first())
    return collectives.group_by(_KEYS, maintain_order=True).agg(
        *(pl.col(name).first() for name in _COLLECTIVE_FACTS),
        *(pl.col(name).filter(in_first_layer).sum() for name in ("payload_bytes", "wire_bytes")),
    )


def _in_schema(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.select(_column(name, rows.columns) for name in TIMELINE_SCHEMA)


def _column(name: str, present: Sequence[str]) -> pl.Expr:
    column = pl.col(name) if name in present else pl.lit(None)
    return column.cast(TIMELINE_SCHEMA[name]).alias(name)
