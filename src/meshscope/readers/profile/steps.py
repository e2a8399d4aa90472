"""Assigns ops to phases and steps, by annotations and module names.

A step is a `StepTraceAnnotation` on the host (it has `step_num`) or an event of a device's `Steps`
line. Annotations and modules (`jit_prefill`, `jit_decode`) name phases.
"""

import re
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl

from meshscope.events.enums import REQUEST_PHASES
from meshscope.readers.profile.nesting import Ints, innermost
from meshscope.readers.profile.ops import PS, Ops, lines_named
from meshscope.readers.profile.plane import Plane
from meshscope.readers.profile.session import Profile

PHASE_PATTERN = r"(?i)(?:^|[^a-z])(" + "|".join(REQUEST_PHASES) + r")(?:$|[^a-z])"
STEPS_SCHEMA: dict[str, Any] = {
    "host": pl.UInt16,
    "plane": pl.UInt16,
    "on_device": pl.Boolean,  # applies to the ops of this plane only
    "name": pl.String,
    "phase": pl.String,
    "step": pl.Int64,
    "start_s": pl.Float64,
    "dur_s": pl.Float64,
}


@lru_cache(maxsize=1 << 16)
def phase_of(name: str) -> str | None:
    """The phase in a name: `jit_decode` -> `decode`; None if it contains none or both."""
    phases = {phase.lower() for phase in re.findall(PHASE_PATTERN, name)}
    return phases.pop() if len(phases) == 1 else None


def steps_of(profile: Profile) -> pl.DataFrame:
    """All steps and annotated phases, by STEPS_SCHEMA, on the clock of the ops."""
    parts = [pl.DataFrame(schema=STEPS_SCHEMA)]
    for host, index, plane, base_s in profile.planes():
        marks = _marks(plane).with_columns(
            pl.lit(host).alias("host"),
            pl.lit(index).alias("plane"),
            pl.lit(plane.name.startswith("/device:")).alias("on_device"),
            (pl.col("start_ps") * PS + base_s).alias("start_s"),
            (pl.col("dur_ps") * PS).alias("dur_s"),
        )
        parts.append(marks.select(pl.col(n).cast(t) for n, t in STEPS_SCHEMA.items()))
    return pl.concat(parts).sort("start_s", maintain_order=True)


def ops_in_steps(profile: Profile) -> Ops:
    """The ops with `phase` and `step`; null if unknown.

    A phase in the module name takes precedence over annotations. An op of the CPU backend belongs
    to the step that launched its run, an op of another device to the step in which its run started.
    """
    steps, ops = steps_of(profile), profile.ops
    phases = {
        op: phase_of(module or "")
        for op, module in ops.instructions.select("op", "module").iter_rows()
    }
    by_module = pl.Series([phases[op] for op in range(len(phases))], dtype=pl.String)
    at_s = _launch_s(profile)
    events = ops.events.with_columns(
        pl.coalesce(
            by_module.gather(ops.events["op"]), _within(steps, ops.events, at_s, "phase")
        ).alias("phase"),
        _within(steps, ops.events, at_s, "step").alias("step"),
    )
    return Ops(events=events, instructions=ops.instructions)


def _marks(plane: Plane) -> pl.DataFrame:
    """Events of a plane that are steps or are named after a phase."""
    names = plane.kinds.select(
        "kind", "name", pl.Series("phase", [phase_of(n) for n in plane.kinds["name"]], pl.String)
    )
    if plane.name.startswith("/device:"):
        events = plane.events.filter(pl.col("line").is_in(lines_named(plane, "Steps")))
        marks = events.join(names, on="kind", how="left", maintain_order="left")
        return marks.with_columns(pl.col("name").cast(pl.Int64, strict=False).alias("step"))
    step = pl.col("stat.step_num") if "stat.step_num" in plane.events else pl.lit(None)
    # Python calls ($file.py:12 decode) and runtime calls (Execute (jit_decode)) are not annotations.
    named = names.filter(
        pl.col("phase").is_not_null() & ~pl.col("name").str.contains(r"^\$|\(|::|\bjit_")
    )
    is_op = (
        pl.col("stat.hlo_op").is_not_null()
        if "stat.hlo_op" in plane.events
        else pl.lit(value=False)
    )
    is_mark = (pl.col("kind").is_in(named["kind"].implode()) | step.is_not_null()) & ~is_op
    marks = plane.events.filter(is_mark).join(names, on="kind", how="left", maintain_order="left")
    return marks.with_columns(step.cast(pl.Int64, strict=False).alias("step"))


def _launch_s(profile: Profile) -> Ints:
    """When the run of each op was launched, else started, in ps on the clock of the ops."""
    events = profile.ops.events
    runs = events.with_columns(pl.col("run_id").fill_null(-1))
    run_start = pl.col("start_s").min().over("host", "device", "run_id")
    start_s = pl.when(pl.col("run_id") < 0).then("start_s").otherwise(run_start)
    starts = runs.select("host", "plane", "run_id", start_s.alias("start_s")).join(
        _launches(profile), on=["host", "plane", "run_id"], how="left", maintain_order="left"
    )
    return _ps(starts.select(pl.coalesce("launch_s", "start_s")).to_series())


def _launches(profile: Profile) -> pl.DataFrame:
    """The first event of each run on its host, for backends whose ops are on the host plane."""
    names = {"host": pl.UInt16, "plane": pl.UInt16, "run_id": pl.Int64, "launch_s": pl.Float64}
    parts = [pl.DataFrame(schema=names)]
    for host, index, plane, base_s in profile.planes():
        if plane.name.startswith("/device:") or "stat.run_id" not in plane.events:
            continue
        run = pl.col("stat.run_id").cast(pl.Int64, strict=False).alias("run_id")
        runs = plane.events.select(run, "start_ps").drop_nulls()
        first = runs.group_by("run_id").agg(pl.col("start_ps").min())
        parts.append(
            first.select(
                pl.lit(host, pl.UInt16).alias("host"),
                pl.lit(index, pl.UInt16).alias("plane"),
                "run_id",
                (pl.col("start_ps") * PS + base_s).alias("launch_s"),
            )
        )
    return pl.concat(parts)


def _within(steps: pl.DataFrame, events: pl.DataFrame, at_ps: Ints, column: str) -> pl.Series:
    """The column, from the innermost step around each time on the device of the op, else on its host."""
    result = pl.Series([None], dtype=STEPS_SCHEMA[column]).new_from_index(0, len(events))
    known = steps.filter(pl.col(column).is_not_null()).sort("on_device", maintain_order=True)
    for marks in known.partition_by("host", "plane", maintain_order=True):
        start = _ps(marks["start_s"])
        at = innermost(start, start + _ps(marks["dur_s"]), at=at_ps)
        values = marks[column].gather(pl.Series(at).replace(-1, None))
        applies = events["host"] == marks["host"][0]
        if marks["on_device"][0]:
            applies &= events["plane"] == marks["plane"][0]
        result = values.zip_with(applies & values.is_not_null(), result)
    return result


def _ps(seconds: pl.Series) -> Ints:
    return np.rint(seconds.to_numpy() * 1e12).astype(np.int64)
