"""The timeline of a run, or of an imported trace, as rows of the event table.

Metrics, charts and exports read at most MAX_ROWS executions of MAX_DEVICE_STEPS steps (steps times
devices), whole steps where they fit. Sums over all steps are in the rows and loads of the run.

A measured run stores what every device executed in each profiled step, and so does an imported trace
(`trace_timeline.py`). A compiled run stores the modeled step of one device, or of one device of each
pipeline stage, folded; `lane` says whether a span is compute (`core`), a collective or a copy.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.errors import RunError
from meshscope.events import timeline as tables
from meshscope.events.enums import Source
from meshscope.events.measured import Measured, StepLabel
from meshscope.events.schema import POLARS_SCHEMA, in_schema

MAX_ROWS = 500_000
MAX_DEVICE_STEPS = 2_000
S = 1e-9
STEP = ("step_class", "step")
_OUTSIDE = tables.STEP_CLASSES.index(StepLabel.OUTSIDE.value)
_PHASES = [label.phase for label in StepLabel]
_TIMES = ("start", "dur", "exposed")


def has_executions(folder: Path) -> bool:
    """Whether the run in this folder keeps the executions of a trace."""
    return (folder / tables.EXECUTIONS).is_file()


@contextmanager
def _readable(file: Path) -> Generator[None]:
    try:
        yield
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        is_trace = file.name == tables.EXECUTIONS.name
        what = f"the timeline of '{file.parents[1]}'" if is_trace else f"'{file}'"
        remedy = "Import the trace again" if is_trace else "Make the run again"
        raise RunError(f"cannot read {what}: {error}. {remedy}, with --force.") from error


def last_executions(folder: Path, *, max_rows: int = MAX_ROWS) -> pl.DataFrame:
    """The executions of the last steps of each class that all devices recorded, with their facts.

    Columns of the event table, `step`, `stream` and `step_class`; RunError if a file is damaged.
    """
    with _readable(folder / tables.EXECUTIONS):
        chosen = _chosen(pl.scan_parquet(folder / tables.EXECUTIONS), max_rows=max_rows)
        ops = pl.read_parquet(folder / tables.DISTINCT_OPS)
        classes = chosen["step_class"]
        return chosen.join(ops, on="op", how="left", maintain_order="left").with_columns(
            pl.lit(Source.MEASURED.value).alias("source"),
            pl.lit(Source.MEASURED.value).alias("time_basis"),
            pl.lit(1).alias("count"),
            pl.Series(_PHASES, dtype=pl.String).gather(classes).alias("phase"),
            pl.Series(tables.STEP_CLASSES, dtype=pl.String).gather(classes).alias("step_class"),
            *((pl.col(f"{name}_ns") * S).alias(f"{name}_s") for name in _TIMES),
        )


def read_executions(folder: Path, *, max_rows: int) -> tuple[pl.DataFrame, pl.DataFrame, int]:
    """The last executions in EXECUTIONS_SCHEMA with `row`, the distinct ops, and the number of all executions.

    RunError if a file is damaged.
    """
    with _readable(folder / tables.EXECUTIONS):
        executions = pl.scan_parquet(folder / tables.EXECUTIONS)
        stored = pl.read_parquet(folder / tables.DISTINCT_OPS)
        ops = in_schema(stored, tables.DISTINCT_OPS_SCHEMA)
        n = int(executions.select(pl.len()).collect().item())
        if n > max_rows:
            first_ns = executions.select(pl.col("start_ns").top_k(max_rows).min()).collect().item()
            executions = executions.filter(pl.col("start_ns") >= first_ns)
        return executions.collect().with_row_index("row"), ops, n


def _chosen(executions: pl.LazyFrame, *, max_rows: int) -> pl.DataFrame:
    steps = (
        executions.filter(pl.col("step_class") != _OUTSIDE)
        .group_by(STEP)
        .agg(pl.len().alias("n"), pl.col("device").n_unique().alias("n_devices"))
        .collect()
    )
    n_steps = steps.group_by("step_class").agg(pl.len().cast(pl.Int32).alias("n_steps"))
    whole = steps.filter(pl.col("n_devices") == pl.col("n_devices").max().over("step_class"))
    budget = max_rows // max(1, len(n_steps))
    latest = whole.sort(STEP, descending=[False, True]).with_columns(
        pl.col("n").cum_sum().over("step_class").alias("n_until"),
        pl.int_range(pl.len()).over("step_class").alias("rank"),
    )
    is_kept = (pl.col("n_until") <= budget) & (
        pl.col("rank") * pl.col("n_devices") < MAX_DEVICE_STEPS
    )
    kept = latest.filter(is_kept | (pl.col("rank") == 0)).join(n_steps, on="step_class")
    rows = executions.join(
        kept.lazy().select(*STEP, "n_steps"), on=STEP, how="inner", maintain_order="left"
    )
    parts: list[pl.DataFrame] = []
    for number in kept["step_class"].unique().sort():
        table = rows.filter(pl.col("step_class") == number).collect()
        if len(table) > budget:  # the first ones of a step, on all devices
            last_ns = table["start_ns"].bottom_k(budget).max()
            table = table.filter(pl.col("start_ns") <= last_ns).head(budget)
        parts.append(table)
    return pl.concat(parts) if parts else rows.collect()


def sampling_notes(measured: Measured | None, timeline: pl.DataFrame | None) -> Iterator[str]:
    """What the timeline of a trace leaves out, if it leaves out anything."""
    if measured is None or measured.trace is None or timeline is None:
        return
    counts = timeline.group_by("step_class").agg(pl.col("step").n_unique(), pl.len().alias("n"))
    of_class = {name: (n_steps, n) for name, n_steps, n in counts.iter_rows()}
    for step in measured.trace.steps:
        label, (n_seen, n_rows) = step.label, of_class.get(step.label.value, (0, 0))
        words = "steps" if label is StepLabel.STEP else f"{label.value} steps"
        if label is StepLabel.TRACE:
            if n_rows < measured.trace.n_ops:
                yield f"the first {n_rows:,} of {measured.trace.n_ops:,} ops"
            continue
        if label is not StepLabel.OUTSIDE and n_seen < step.n_steps:
            yield f"the last {n_seen:,} of {step.n_steps:,} {words}"
        if n_seen == 1 and n_rows >= MAX_ROWS // len(of_class):
            yield f"the first {n_rows:,} ops of the last {words.removesuffix('s')}"


def sql_columns(schema: Mapping[str, Any]) -> str:
    """The columns of a timeline as SQL over `trace_executions e` and `trace_ops o`."""

    def case(texts: Sequence[str | None]) -> str:
        cases = " ".join(f"when {i} then '{text}'" for i, text in enumerate(texts) if text)
        return f"case e.step_class {cases} end"

    made = {
        "source": "'measured'",
        "time_basis": "'measured'",
        "phase": case([phase and phase.value for phase in _PHASES]),
        "step_class": case(tables.STEP_CLASSES),
        "count": "1",
        **{f"{name}_s": f"e.{name}_ns * 1e-9" for name in _TIMES},
        **{name: f"e.{name}" for name in ("device", "stream", "step", "run")},
    }
    facts = {name: f"o.{name}" for name in tables.DISTINCT_OPS_SCHEMA}
    return ", ".join(f"{made.get(n) or facts.get(n) or 'null'} as {n}" for n in (*schema, "run"))


OPS = Path("trace") / "ops.parquet"
COPY = "copy"
TIMELINE_SCHEMA: dict[str, Any] = {
    **POLARS_SCHEMA,
    "step": pl.Int64,
    "stream": pl.Int64,
    "step_class": pl.String,
    "activity": pl.String,
    "op_class": pl.String,
    "flops": pl.Float64,
    "hbm_bytes": pl.Int64,
}

_COLLECTIVE_FACTS = (
    *("parallelism", "opcode", "group_size", "n_groups", "groups", "dtype", "shape", "n_steps"),
    *("is_async", "algorithm", "inserted_by"),
)
_KEYS = ("source", "phase", "stage", "hlo_name")


def read_timeline(folder: Path, events: pl.DataFrame) -> pl.DataFrame | None:
    """The modeled and measured timelines of the run in this folder; None if it stores none.

    The columns are the event table's and `step`, the index of the step in its phase; traces add `stream`,
    the device lane, and `step_class`, the class of the step; modeled compute adds `activity`, and what is no
    collective `op_class`, `flops` and `hbm_bytes` where they are known. A long trace has only its last steps here.
    """
    timelines: list[pl.DataFrame] = []
    if (folder / tables.TIMELINE).is_file():
        timelines.append(modeled_timeline(read_folded(folder), events))
    if (folder / OPS).is_file():
        with _readable(folder / OPS):
            ops = pl.read_parquet(folder / OPS)
        timelines.append(_measured(ops, events))
    if has_executions(folder):
        timelines.append(in_schema(last_executions(folder), TIMELINE_SCHEMA))
    return pl.concat(timelines) if timelines else None


def read_folded(folder: Path) -> pl.DataFrame:
    """The folded timeline of a run; columns that an older version did not write are null."""
    with _readable(folder / tables.TIMELINE):
        stored = pl.read_parquet(folder / tables.TIMELINE)
    return pl.concat([pl.DataFrame(schema=tables.FOLDED_SCHEMA), stored], how="diagonal")


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
    return in_schema(rows, TIMELINE_SCHEMA)


def _with_phase_steps(rows: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
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
        tables.unfolded(folded)
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
    return in_schema(rows, TIMELINE_SCHEMA)


def _collective_facts(events: pl.DataFrame) -> pl.DataFrame:
    """One row per collective instruction; bytes are summed over the arrays of its first layer."""
    collectives = events.filter(pl.col("kind").is_not_null(), pl.col("hlo_name").is_not_null())
    in_first_layer = pl.col("layer").eq_missing(pl.col("layer").first())
    return collectives.group_by(_KEYS, maintain_order=True).agg(
        *(pl.col(name).first() for name in _COLLECTIVE_FACTS),
        *(pl.col(name).filter(in_first_layer).sum() for name in ("payload_bytes", "wire_bytes")),
    )
