"""Steps and phases: which annotations, modules and devices mark them, and which ops they contain.

A step is a `StepTraceAnnotation` on the host (it has `step_num`) or an event of a device's `Steps`
line. Annotations and modules (`jit_prefill`, `jit_decode`) name phases.
"""

from collections.abc import Callable

import numpy as np
import polars as pl
from numpy.typing import NDArray

from meshscope.events.intervals import innermost
from meshscope.events.schema import in_schema, schema_of
from meshscope.readers.profile.ops import PS, module_runs, stat_of
from meshscope.readers.profile.plane import Plane
from meshscope.readers.profile.xplane import Profile
from meshscope.readers.traces.servers import StepMark, distinct_steps, phase_of, read_annotation
from meshscope.readers.traces.trace import steps_table

MARKS_SCHEMA = schema_of("profile_marks")
_NS = 1e9  # in one second


def steps_of(profile: Profile) -> pl.DataFrame:
    """All steps and annotated phases, by MARKS_SCHEMA, on the clock of the ops."""
    return _marks(profile, _numbered_or_named)


def _marks(profile: Profile, marks_of: Callable[[Plane], pl.DataFrame | None]) -> pl.DataFrame:
    """The marks of all planes: `marks_of` has name, start_ps, dur_ps, and line and step if known."""
    parts = [pl.DataFrame(schema=MARKS_SCHEMA)]
    for host, index, plane, base_s in profile.planes():
        marks = marks_of(plane)
        if marks is not None:
            placed = marks.with_columns(
                pl.lit(host).alias("host"),
                pl.lit(index).alias("plane"),
                pl.lit(plane.name.startswith("/device:")).alias("on_device"),
                pl.Series("phase", [phase_of(name) for name in marks["name"]], pl.String),
                (pl.col("start_ps") * PS + base_s).alias("start_s"),
                (pl.col("dur_ps") * PS).alias("dur_s"),
            )
            parts.append(in_schema(placed, MARKS_SCHEMA))
    return pl.concat(parts).sort("start_s", maintain_order=True)


def _numbered_or_named(plane: Plane) -> pl.DataFrame:
    """Events of a plane that are steps or are named after a phase."""
    if plane.name.startswith("/device:"):
        steps = plane.events.filter(pl.col("line").is_in(plane.lines_named("Steps")))
        number = pl.col("name").cast(pl.Int64, strict=False)
        return plane.with_names(steps).drop("line").with_columns(step=number)
    # Python calls ($file.py:12 decode) and runtime calls (Execute (jit_decode)) are not annotations.
    phases = pl.Series([phase_of(name) for name in plane.kinds["name"]], dtype=pl.String)
    is_call = pl.col("name").str.contains(r"^\$|\(|::|\bjit_")
    named = plane.kinds.filter(phases.is_not_null(), ~is_call)["kind"]
    step = stat_of(plane.events, "step_num", pl.Int64)
    is_mark = pl.col("kind").is_in(named.implode()) | step.is_not_null()
    is_op = stat_of(plane.events, "hlo_op").is_not_null()
    marks = plane.events.filter(is_mark, ~is_op).with_columns(step.alias("step"))
    return plane.with_names(marks).drop("line")


def _served(plane: Plane, *, tells_phase: bool) -> pl.DataFrame | None:
    """Annotations of serving engines on a host that tell prefill from decode, or all others."""
    if not plane.name.startswith("/host:"):
        return None
    read = [read_annotation(name) for name in plane.kinds["name"]]
    known = [a is not None and (a.kind is not None) is tells_phase for a in read]
    kinds = plane.kinds.filter(pl.Series(known, dtype=pl.Boolean))["kind"]
    return plane.with_names(plane.events.filter(pl.col("kind").is_in(kinds.implode())))


def _phase_runs(plane: Plane) -> pl.DataFrame | None:
    name, dur_ps = pl.col("module").fill_null(""), pl.col("end_ps") - pl.col("start_ps")
    is_tpu = plane.name.startswith("/device:TPU")
    return module_runs(plane).select("start_ps", name=name, dur_ps=dur_ps) if is_tpu else None


def _started_s(events: pl.DataFrame) -> pl.Series:
    """When the run of each op started on its device; the start of the op if it has no run."""
    of_run = [name for name in ("host", "device", "run_id") if name in events]
    at_s = pl.when(pl.col("run_id").is_null()).then("start_s")
    return events.select(at_s.otherwise(pl.col("start_s").min().over(of_run))).to_series()


def _launched_s(profile: Profile, events: pl.DataFrame) -> pl.Series:
    """When the run of each op was launched, as far as the host recorded that, else started.

    A launch is of one device, or of all devices of its host if it names none.
    """
    keys = ["host", "device", "run_id"]
    schema = {name: events.schema[name] for name in keys} | {"launch_s": pl.Float64}
    parts = [pl.DataFrame(schema=schema)]
    for host, _, plane, base_s in profile.planes():
        if plane.name.startswith("/host:") and "stat.run_id" in plane.events:
            number = stat_of(plane.events, "device_ordinal", pl.Int32).alias("device")
            launches = plane.events.select(
                number.replace(profile.positions[host]),
                stat_of(plane.events, "run_id", pl.Int64),
                host=pl.lit(host, pl.UInt16),
                launch_s=pl.col("start_ps") * PS + base_s,
            )
            parts.append(launches.drop_nulls("run_id").select(list(schema)))
    launches, at_s = pl.concat(parts), [_started_s(events)]
    for one, by in (
        (launches.drop_nulls("device"), keys),
        (launches.filter(pl.col("device").is_null()).drop("device"), ["host", "run_id"]),
    ):
        first = one.group_by(by).agg(pl.col("launch_s").min())
        at_s.append(events.join(first, on=by, how="left", maintain_order="left")["launch_s"])
    return pl.select(pl.min_horizontal(at_s)).to_series()


def annotated_steps(profile: Profile) -> pl.DataFrame:
    """The steps that the program annotated, with their `host`; empty if there are none.

    Annotations of servers that tell prefill and decode come first, then numbered steps, then
    annotations and modules named after a phase.
    """
    devices = profile.ops.events.select("host", "plane", "device")
    devices = devices.unique(["host", "plane"], maintain_order=True)
    marks, runs = steps_of(profile), _marks(profile, _phase_runs)
    candidates = (
        _marks(profile, lambda plane: _served(plane, tells_phase=True)),
        marks.drop_nulls("step"),
        marks.drop_nulls("phase"),
        _marks(profile, lambda plane: _served(plane, tells_phase=False)),
        runs.drop_nulls("phase").join(
            devices, on=["host", "plane"], how="semi", maintain_order="left"
        ),
    )
    chosen = next((c for c in candidates if not c.is_empty()), marks.head(0))
    chosen = chosen.join(devices, on=["host", "plane"], how="left", maintain_order="left")
    chosen = chosen.with_columns(pl.when("on_device").then("device").alias("device"))
    steps: list[StepMark] = []
    places: list[tuple[int, int | None]] = []
    for of_place in chosen.partition_by("host", "device", maintain_order=True):
        rows = of_place.select("name", "start_s", "dur_s", pl.col("line").fill_null(0)).iter_rows()
        read = [StepMark(n, round(at * _NS), round(dur * _NS), line) for n, at, dur, line in rows]
        distinct = distinct_steps(read)
        steps += distinct
        places += [(of_place["host"][0], of_place["device"][0])] * len(distinct)
    hosts, devices = ([place[at] for place in places] for at in (0, 1))
    return steps_table(steps, devices).with_columns(pl.Series("host", hosts, dtype=pl.UInt16))


def step_of_events(
    profile: Profile, steps: pl.DataFrame, events: pl.DataFrame
) -> NDArray[np.int64]:
    """The row of the step of each event [n]; -1 outside of steps.

    A step of a host contains the ops of the runs that it launched; one of a device, what ran in it.
    """
    step = np.full(len(events), -1, np.int64)
    host, device = events["host"].to_numpy(), events["device"].to_numpy()
    for of_place in steps.partition_by("host", "device", maintain_order=True):
        number = of_place["device"][0]
        at_s = _started_s(events) if number is not None else _launched_s(profile, events)
        start = of_place["start_ns"].to_numpy()
        at_ns = np.rint(at_s.to_numpy() * _NS).astype(np.int64)
        inner = innermost(start, start + of_place["dur_ns"].to_numpy(), at=at_ns)
        applies = host == of_place["host"][0] if number is None else device == number
        is_in = (inner >= 0) & applies
        step[is_in] = of_place["step"].to_numpy()[inner[is_in]]
    return step
