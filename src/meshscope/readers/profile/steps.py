"""Steps and phases: which annotations, modules and devices mark them, and which ops they contain.

A step is a `StepTraceAnnotation` on the host (it has `step_num`) or an event of a device's `Steps`
line. Annotations and modules (`jit_prefill`, `jit_decode`) name phases.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from meshscope.readers.profile.nesting import Ints, innermost
from meshscope.readers.profile.ops import PS, Ops, lines_named, module_runs
from meshscope.readers.profile.plane import Plane
from meshscope.readers.profile.session import Profile
from meshscope.readers.traces.annotations import StepMark, distinct_steps, phase_of, read_annotation
from meshscope.readers.traces.trace import STEPS_SCHEMA

MARKS_SCHEMA: dict[str, Any] = {
    "host": pl.UInt16,
    "plane": pl.UInt16,
    "on_device": pl.Boolean,  # applies to the ops of this plane only
    "name": pl.String,
    "phase": pl.String,
    "step": pl.Int64,
    "start_s": pl.Float64,
    "dur_s": pl.Float64,
}


def steps_of(profile: Profile) -> pl.DataFrame:
    """All steps and annotated phases, by MARKS_SCHEMA, on the clock of the ops."""
    parts = [pl.DataFrame(schema=MARKS_SCHEMA)]
    for host, index, plane, base_s in profile.planes():
        marks = _marks(plane).with_columns(
            pl.lit(host).alias("host"),
            pl.lit(index).alias("plane"),
            pl.lit(plane.name.startswith("/device:")).alias("on_device"),
            (pl.col("start_ps") * PS + base_s).alias("start_s"),
            (pl.col("dur_ps") * PS).alias("dur_s"),
        )
        parts.append(marks.select(pl.col(n).cast(t) for n, t in MARKS_SCHEMA.items()))
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
    result = pl.Series([None], dtype=MARKS_SCHEMA[column]).new_from_index(0, len(events))
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


_NS = 1e9


def annotated_steps(profile: Profile) -> pl.DataFrame:
    """The steps that the program annotated, on hosts or devices; empty if there are none.

    Annotations of servers that tell prefill and decode come first, then numbered steps, then
    annotations and modules named after a phase.
    """
    marks = _marks_of_devices(profile)
    candidates = (
        _served(profile, tells_phase=True),
        marks.filter(pl.col("step").is_not_null()),
        marks.filter(pl.col("phase").is_not_null()),
        _served(profile, tells_phase=False),
        _phase_runs(profile),
    )
    chosen = next((c for c in candidates if not c.is_empty()), marks.head(0))
    records = [
        {
            **_tokens(mark.name, phase_of(mark.name)),
            "step": index,
            "device": device,
            "name": mark.name,
            "start_ns": mark.start_ns,
            "dur_ns": mark.dur_ns,
        }
        for index, (mark, device) in enumerate(_distinct(chosen))
    ]
    return pl.DataFrame(records, schema=STEPS_SCHEMA)


def _distinct(marks: pl.DataFrame) -> Iterator[tuple[StepMark, int | None]]:
    """The steps that the marks of each host or device stand for, with the device."""
    for of_place in marks.partition_by("host", "device", maintain_order=True):
        rows = of_place.select("name", "start_s", "dur_s", "line").iter_rows()
        read = [StepMark(n, round(at * _NS), round(dur * _NS), line) for n, at, dur, line in rows]
        for mark in distinct_steps(read):
            yield mark, of_place["device"][0]


def _tokens(name: str, phase: str | None) -> Mapping[str, Any]:
    annotation = read_annotation(name)
    if annotation is None or annotation.kind is None:
        return {"kind": phase}
    return {
        "kind": annotation.kind,
        "prefill_tokens": annotation.prefill_tokens,
        "decode_tokens": annotation.decode_tokens,
    }


def _marks_of_devices(profile: Profile) -> pl.DataFrame:
    """Numbered steps and annotations named after a phase; `device` is null for those of hosts."""
    devices = _devices(profile)
    marks = steps_of(profile).join(devices, on=["host", "plane"], how="left", maintain_order="left")
    return marks.with_columns(pl.when("on_device").then("device").alias("device")).select(
        "host",
        pl.lit(0, pl.UInt32).alias("line"),
        "name",
        "phase",
        "step",
        "start_s",
        "dur_s",
        "device",
    )


def _devices(profile: Profile) -> pl.DataFrame:
    """The device of each plane with ops: host, plane, device."""
    planes = profile.ops.events.select("host", "plane", "device")
    return planes.unique(["host", "plane"], maintain_order=True)


def _served(profile: Profile, *, tells_phase: bool) -> pl.DataFrame:
    """Annotations of serving engines on the hosts, those that tell prefill from decode or the others."""
    parts = [_marks_of_devices(profile).head(0)]
    for host, _, plane, base_s in profile.planes():
        if not plane.name.startswith("/host:"):
            continue
        names = plane.kinds.select("kind", "name")
        known = [
            (a := read_annotation(n)) is not None and (a.kind is not None) is tells_phase
            for n in names["name"]
        ]
        marks = plane.events.join(names.filter(pl.Series(known, dtype=pl.Boolean)), on="kind")
        parts.append(_placed(marks, base_s, host=host, device=None))
    return pl.concat(parts).sort("start_s", maintain_order=True)


def _phase_runs(profile: Profile) -> pl.DataFrame:
    """Executions of modules named after a phase, such as `jit_decode`, on each device."""
    devices = {(host, plane): device for host, plane, device in _devices(profile).iter_rows()}
    parts = [_marks_of_devices(profile).head(0)]
    for host, index, plane, base_s in profile.planes():
        if plane.name.startswith("/device:TPU") and (host, index) in devices:
            runs = module_runs(plane).with_columns(
                pl.col("module").fill_null("").alias("name"),
                (pl.col("end_ps") - pl.col("start_ps")).alias("dur_ps"),
            )
            parts.append(_placed(runs, base_s, host=host, device=devices[host, index]))
    runs = pl.concat(parts).sort("start_s", maintain_order=True)
    return runs.filter(pl.col("phase").is_not_null())


def _placed(marks: pl.DataFrame, base_s: float, *, host: int, device: int | None) -> pl.DataFrame:
    """Named events of a plane as marks."""
    return marks.select(
        pl.lit(host, pl.UInt16).alias("host"),
        pl.col("line") if "line" in marks.columns else pl.lit(0, pl.UInt32).alias("line"),
        "name",
        pl.Series("phase", [phase_of(name) for name in marks["name"]], pl.String),
        pl.lit(None, pl.Int64).alias("step"),
        (pl.col("start_ps") * PS + base_s).alias("start_s"),
        (pl.col("dur_ps") * PS).alias("dur_s"),
        pl.lit(device, pl.Int32).alias("device"),
    )


def step_of_events(
    profile: Profile, steps: pl.DataFrame, events: pl.DataFrame
) -> NDArray[np.int64]:
    """The step of each event [n]; -1 outside of steps.

    A step of a host contains the ops of the runs that it launched; one of a device, what ran in it.
    """
    run_start = pl.col("start_s").min().over("device", "run_id")
    at_s = events.select(pl.when(pl.col("run_id").is_null()).then("start_s").otherwise(run_start))
    step = np.full(len(events), -1, np.int64)
    device = events["device"].to_numpy()
    for of_device in steps.partition_by("device", maintain_order=True):
        number = of_device["device"][0]
        at = _launched_s(profile, events, at_s.to_series()) if number is None else at_s.to_series()
        start = of_device["start_ns"].to_numpy()
        inner = innermost(
            start,
            start + of_device["dur_ns"].to_numpy(),
            at=(at * _NS).round().cast(pl.Int64).to_numpy(),
        )
        is_in = (inner >= 0) & ((device == number) if number is not None else True)
        step[is_in] = of_device["step"].to_numpy()[inner[is_in]]
    return step


def _launched_s(profile: Profile, events: pl.DataFrame, at_s: pl.Series) -> pl.Series:
    """When the host launched the run of each event, if it recorded that; else the given time."""
    keys = ["device", "run_id"]
    parts: list[pl.DataFrame] = []
    for _, _, plane, base_s in profile.planes():
        stats = ("stat.device_ordinal", "stat.run_id")
        if plane.name.startswith("/host:") and set(stats) <= set(plane.events.columns):
            launches = plane.events.select(
                pl.col(stats[0]).cast(pl.Int32, strict=False).alias("device"),
                pl.col(stats[1]).cast(pl.Int64, strict=False).alias("run_id"),
                (pl.col("start_ps") * PS + base_s).alias("launch_s"),
            )
            parts.append(launches.drop_nulls(keys).group_by(keys).agg(pl.col("launch_s").min()))
    if not parts:
        return at_s
    launches = pl.concat(parts).group_by(keys).agg(pl.col("launch_s").min())
    joined = events.select(keys).with_columns(at_s.alias("at_s")).join(
        launches, on=keys, how="left", maintain_order="left"
    )  # fmt: skip
    return joined.select(pl.min_horizontal("launch_s", "at_s")).to_series()
