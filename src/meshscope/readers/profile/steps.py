"""Which phase and which step every op belongs to, by annotations and by names of modules.

A step is a `StepTraceAnnotation` of the host (it carries `step_num`) or an event of a device's
`Steps` line; a phase is named by an annotation or by a module (`jit_prefill`, `jit_decode`).
"""

import re
from typing import Any

import numpy as np
import polars as pl

from meshscope.events.enums import Phase
from meshscope.readers.profile.nesting import Ints, innermost
from meshscope.readers.profile.ops import PS, Ops, lines_named, zero_ns
from meshscope.readers.profile.plane import Plane
from meshscope.readers.profile.session import Profile

PHASE_PATTERN = r"(?i)(?:^|[^a-z])(" + "|".join(Phase) + r")(?:$|[^a-z])"
STEPS_SCHEMA: dict[str, Any] = {
    "host": pl.UInt16,
    "plane": pl.UInt16,
    "on_device": pl.Boolean,  # holds for the ops of this plane alone
    "name": pl.String,
    "phase": pl.String,
    "step": pl.Int64,
    "start_s": pl.Float64,
    "dur_s": pl.Float64,
}


def phase_of(name: str) -> str | None:
    """The phase that a name tells: `jit_decode` -> `decode`; None where it tells none or both."""
    found = {phase.lower() for phase in re.findall(PHASE_PATTERN, name)}
    return found.pop() if len(found) == 1 else None


def steps_of(profile: Profile) -> pl.DataFrame:
    """All steps and annotated phases, by STEPS_SCHEMA, on the clock of the ops."""
    found = [pl.DataFrame(schema=STEPS_SCHEMA)]
    offsets = profile.hosts["offset_s"].to_list()
    for host, space in enumerate(profile.spaces):
        zero = zero_ns(space)
        for index, plane in enumerate(space.planes):
            base_s = (plane.origin_ns - zero) * 1e-9 + offsets[host]
            marks = _marks(plane).with_columns(
                pl.lit(host).alias("host"),
                pl.lit(index).alias("plane"),
                pl.lit(plane.name.startswith("/device:")).alias("on_device"),
                (pl.col("start_ps") * PS + base_s).alias("start_s"),
                (pl.col("dur_ps") * PS).alias("dur_s"),
            )
            found.append(marks.select(pl.col(n).cast(t) for n, t in STEPS_SCHEMA.items()))
    return pl.concat(found).sort("start_s", maintain_order=True)


def ops_in_steps(profile: Profile) -> Ops:
    """The ops with columns `phase` and `step`; null where nothing tells.

    The name of the module tells the phase first. An op of a CPU backend is in the step in which
    its run was launched; one of another device in the step during which its run started there.
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
    """Events of a plane that are steps, or are named after a phase."""
    names = plane.kinds.select(
        "kind", "name", pl.Series("phase", [phase_of(n) for n in plane.kinds["name"]], pl.String)
    )
    if plane.name.startswith("/device:"):
        chosen = plane.events.filter(pl.col("line").is_in(lines_named(plane, "Steps")))
        marks = chosen.join(names, on="kind", how="left", maintain_order="left")
        return marks.with_columns(pl.col("name").cast(pl.Int64, strict=False).alias("step"))
    step = pl.col("stat.step_num") if "stat.step_num" in plane.events else pl.lit(None)
    # Python's own calls ($file.py:12 decode) and runtime's (Execute (jit_decode)) are no annotations.
    named = names.filter(
        pl.col("phase").is_not_null() & ~pl.col("name").str.contains(r"^\$|\(|::|\bjit_")
    )
    is_op = (
        pl.col("stat.hlo_op").is_not_null()
        if "stat.hlo_op" in plane.events
        else pl.lit(value=False)
    )
    wanted = (pl.col("kind").is_in(named["kind"].implode()) | step.is_not_null()) & ~is_op
    chosen = plane.events.filter(wanted)
    marks = chosen.join(names, on="kind", how="left", maintain_order="left")
    return marks.with_columns(step.cast(pl.Int64, strict=False).alias("step"))


def _launch_s(profile: Profile) -> Ints:
    """For each op event, when its run was launched or began, in ps on the clock of the ops."""
    events = profile.ops.events
    own = events.with_columns(pl.col("run_id").fill_null(-1))
    begun = pl.col("start_s").min().over("host", "device", "run_id")
    start_s = pl.when(pl.col("run_id") < 0).then("start_s").otherwise(begun)
    launched = _launches(profile)
    found = own.select("host", "plane", "run_id", start_s.alias("start_s")).join(
        launched, on=["host", "plane", "run_id"], how="left", maintain_order="left"
    )
    return _ps(found.select(pl.coalesce("launch_s", "start_s")).to_series())


def _launches(profile: Profile) -> pl.DataFrame:
    """When each run was first mentioned on its host, for backends whose ops are on the host plane."""
    parts = [
        pl.DataFrame(
            schema={
                "host": pl.UInt16,
                "plane": pl.UInt16,
                "run_id": pl.Int64,
                "launch_s": pl.Float64,
            }
        )
    ]
    for host, space in enumerate(profile.spaces):
        zero, offset_s = zero_ns(space), float(profile.hosts["offset_s"][host])
        for index, plane in enumerate(space.planes):
            if plane.name.startswith("/device:") or "stat.run_id" not in plane.events:
                continue
            base_s = (plane.origin_ns - zero) * 1e-9 + offset_s
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
    """The column of the innermost step of the op's own device, else of its host, that holds the time."""
    found = pl.Series([None], dtype=STEPS_SCHEMA[column]).new_from_index(0, len(events))
    telling = steps.filter(pl.col(column).is_not_null()).sort("on_device", maintain_order=True)
    for marks in telling.partition_by("host", "plane", maintain_order=True):
        start = _ps(marks["start_s"])
        at = innermost(start, start + _ps(marks["dur_s"]), at=at_ps)
        told = marks[column].gather(pl.Series(at).replace(-1, None))
        applies = events["host"] == marks["host"][0]
        if marks["on_device"][0]:
            applies &= events["plane"] == marks["plane"][0]
        found = told.zip_with(applies & told.is_not_null(), found)
    return found


def _ps(seconds: pl.Series) -> Ints:
    return np.rint(seconds.to_numpy() * 1e12).astype(np.int64)
