"""Overlapped, exposed and idle time, traffic intervals, and modeled step times, as tables.

Times are unions of intervals; integers make parts sum exactly to the whole. The functions of a timeline take
rows of the event table with `start_s` and `dur_s`, one for each execution. A row without `kind` is compute
unless its `opcode` is in NO_COMPUTE. In a modeled pipeline, the rows of a stage and the rows without stage are
the work of one device of this stage.

Traffic intervals are bursts of an axis, the gaps between them, and windows between axes. A phase whose
collectives all have times is measured in seconds. Otherwise the collectives are placed by their order in the
schedule, and the column `unit` says `operations` instead of `s`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from meshscope.analysis.request import basis_of
from meshscope.analysis.volume import WHERE, collectives
from meshscope.events.enums import Part
from meshscope.events.intervals import CoveredTime, Ints
from meshscope.events.step_time import StepTime
from meshscope.serialize import picked

PS_PER_S = 1e12


def _covered(rows: pl.DataFrame) -> CoveredTime:
    """The union of the intervals [start_s, start_s + dur_s) of the rows, in ps."""
    return CoveredTime.of(_ps(rows, "start_s"), _ps(rows, pl.col("start_s") + pl.col("dur_s")))


def _ps(rows: pl.DataFrame, seconds: str | pl.Expr) -> Ints:
    return np.rint(rows.select(seconds).to_series().to_numpy() * PS_PER_S).astype(np.int64)


# Opcodes of rows without kind that are not compute: containers, transfers and idle time.
NO_COMPUTE = frozenset(
    {"idle", "while", "call", "conditional", "copy", "copy-start", "copy-done", "async-start"}
    | {"async-update", "async-done", "send", "send-done", "recv", "recv-done", "infeed", "outfeed"}
)
PLACE = (*WHERE, "device")


def timed(events: pl.DataFrame) -> pl.DataFrame:
    """The rows with a start and a duration."""
    return events.filter(pl.col("start_s").is_not_null(), pl.col("dur_s").is_not_null())


def is_compute() -> pl.Expr:
    """Whether a row of a timeline is compute."""
    opcode = pl.col("opcode").fill_null("")
    return pl.col("kind").is_null() & ~opcode.is_in(sorted(NO_COMPUTE))


def ratio(above: str | pl.Expr, below: str) -> pl.Expr:
    """The quotient of two columns; null if the divisor is 0."""
    dividend = pl.col(above) if isinstance(above, str) else above
    return pl.when(pl.col(below) > 0).then(dividend / pl.col(below))


def overlap(timeline: pl.DataFrame) -> pl.DataFrame:
    """Seconds of each device's step in collectives, in compute, in both, and in neither.

    `hidden_s` is the time with both collectives and compute, `exposed_s` the time with collectives only
    (asynchronous or not), `idle_s` the time with neither, between the first start and the last end on
    any device in the phase. All durations are unions of intervals on one device, so concurrent
    collectives count once: collective = exposed + hidden, and step = hidden + exposed + compute only +
    idle. `overlap_frac` = hidden / collective, `collective_compute_ratio` = collective / compute,
    `idle_frac` = idle / step; a ratio is null if its divisor is 0. Figures are means over the recorded steps,
    and over the stages of a modeled pipeline.

    Source: TraceLens and nsys-jax define exposed communication by union of intervals. A sum of durations
    overstates it (marin-community/marin issue 8053: 3.17 s became 1.02 s).
    """
    rows: list[tuple[object, ...]] = []
    for step in _device_steps(timeline):
        collective, compute = _covered(step.collectives), _covered(step.compute)
        n_ps = {"step_s": step.n_ps, "collective_s": collective.total()}
        n_ps["compute_s"] = compute.total()
        busy = _covered(pl.concat([step.collectives, step.compute])).total()
        n_ps["hidden_s"] = n_ps["collective_s"] + n_ps["compute_s"] - busy
        n_ps["exposed_s"] = n_ps["collective_s"] - n_ps["hidden_s"]
        n_ps["idle_s"] = step.n_ps - busy
        bases = "+".join(sorted(step.rows["time_basis"].drop_nulls().unique()))
        seconds = (n / PS_PER_S for n in n_ps.values())
        rows.append((*step.place, bases or None, step.n_stages, *seconds))
    times = ("step_s", "collective_s", "compute_s", "hidden_s", "exposed_s", "idle_s")
    types: dict[str, Any] = {name: timeline.schema[name] for name in (*PLACE, "time_basis")}
    types |= {"n_stages": pl.Int64} | dict.fromkeys(times, pl.Float64)
    steps = pl.DataFrame(rows, schema=types, orient="row")
    table = steps.group_by(PLACE, maintain_order=True).agg(
        (pl.len() // pl.col("n_stages").first()).cast(pl.Int64).alias("n_steps_seen"),
        pl.col("time_basis").first(),
        *(pl.col(name).mean() for name in times),
    )
    return table.sort("device", maintain_order=True).with_columns(
        ratio("hidden_s", "collective_s").alias("overlap_frac"),
        ratio("collective_s", "compute_s").alias("collective_compute_ratio"),
        ratio("idle_s", "step_s").alias("idle_frac"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceStep:
    """The rows of one device in a step of `n_ps` over all devices, or of one of `n_stages` modeled stages."""

    rows: pl.DataFrame
    n_ps: int
    n_stages: int

    @property
    def place(self) -> tuple[object, ...]:
        return self.rows.select(PLACE).row(0)

    @property
    def collectives(self) -> pl.DataFrame:
        return self.rows.filter(pl.col("kind").is_not_null())

    @property
    def compute(self) -> pl.DataFrame:
        return self.rows.filter(is_compute())


def _device_steps(timeline: pl.DataFrame) -> Iterator[_DeviceStep]:
    steps = [*WHERE, *(["step"] if "step" in timeline.columns else [])]
    for of_phase in timed(timeline).partition_by(steps, maintain_order=True):
        covered = _covered(of_phase)
        if not len(covered.starts):
            continue
        n_ps = int(covered.ends[-1] - covered.starts[0])
        for rows in of_phase.partition_by("device", maintain_order=True):
            last = rows["stage"].max() if rows["device"].null_count() else None
            of_stages = [rows]
            if isinstance(last, int):  # each stage, with what the previous stage sends it
                stage, is_sent = pl.col("stage"), pl.col("part") == Part.STAGE.value
                of_stages = [
                    rows.filter(stage.is_null() | (stage == n) | (is_sent & (stage == n - 1)))
                    for n in range(last + 1)
                ]
            for of_stage in of_stages:
                yield _DeviceStep(rows=of_stage, n_ps=n_ps, n_stages=len(of_stages))


def exposed_by(timeline: pl.DataFrame) -> pl.DataFrame:
    """Exposed seconds of each device's step by axis; they sum to `exposed_s`.

    If collectives of several axes are exposed at the same time, each axis gets an equal share of it.

    Source: `overlap`; the equal shares are a convention, so that the parts sum to the whole.
    """
    shares: list[tuple[object, ...]] = []
    for step in _device_steps(timeline):
        groups = step.collectives.group_by("axis", maintain_order=True)
        parts = {key[0]: _covered(part) for key, part in groups}
        for axis, exposed_ps in _shared_ps(parts, _covered(step.compute)):
            shares.append((*step.place, axis, exposed_ps / PS_PER_S / step.n_stages))
    types = {name: timeline.schema[name] for name in (*PLACE, "axis")}
    table = pl.DataFrame(shares, schema={**types, "exposed_s": pl.Float64}, orient="row")
    n_steps = pl.col("step").n_unique() if "step" in timeline.columns else pl.lit(1)
    counts = timed(timeline).group_by(PLACE).agg(n_steps.alias("n_steps_seen"))
    sums = table.group_by([*PLACE, "axis"], maintain_order=True).agg(pl.col("exposed_s").sum())
    joined = sums.join(counts, on=PLACE, how="left", nulls_equal=True, maintain_order="left")
    mean = (pl.col("exposed_s") / pl.col("n_steps_seen")).alias("exposed_s")
    return joined.select(*PLACE, "axis", mean)


def _shared_ps(
    parts: Mapping[object, CoveredTime], compute: CoveredTime
) -> Iterator[tuple[object, float]]:
    """Picoseconds of each part outside compute; k concurrent parts get 1/k each."""
    every = (compute, *parts.values())
    edges = np.unique(np.concatenate([bound for c in every for bound in (c.starts, c.ends)]))
    if parts and len(edges) > 1:
        is_computing, *covers = (c.within(edges[:-1], edges[1:]) > 0 for c in every)
        n = np.sum(covers, axis=0)
        is_exposed = (n > 0) & ~is_computing
        weight = np.where(is_exposed, np.diff(edges) / np.maximum(n, 1), 0.0)
        yield from zip(parts, (np.array(covers) * weight).sum(axis=1).tolist(), strict=True)


_WHERE = dict.fromkeys(("source", "phase"), pl.String)


def step_time(times: Iterable[StepTime]) -> pl.DataFrame:
    """Modeled seconds of one step on one device: compute, exposed communication, idle time and bubble.

    step = compute + exposed + idle; the pipeline bubble is part of idle. Figures of a pipeline are means over
    its stages. `low_s` and `high_s` bound the
    estimated step time. `collective_s` is the sum of all collectives, hidden or not. `exposed_frac` =
    exposed / step, `overlap_frac` = 1 - exposed / collective, `collective_compute_ratio` = collective /
    compute. `unestimated_frac` is the fraction of the step without a compiler estimate.

    Source: simulation of the compiled schedule (`meshscope.cost`) or its closed form. Exposed
    communication is a union of intervals, including synchronous collectives, as in `overlap`.
    """
    parts = ("compute_s", "collective_s", "exposed_s", "idle_s", "bubble_s", "unestimated_frac")
    rows = [
        (
            *(*_where(time), *picked(time.step, "value_s", "low_s", "high_s").values()),
            *(*picked(time, *parts, "is_extrapolated").values(), basis_of([time])),
        )
        for time in times
    ]
    schema = _WHERE | dict.fromkeys(("step_s", "low_s", "high_s", *parts), pl.Float64)
    schema |= {"is_extrapolated": pl.Boolean, "time_basis": pl.String}
    hidden = (pl.col("collective_s") - pl.col("exposed_s")).clip(lower_bound=0)
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(
        ratio("exposed_s", "step_s").alias("exposed_frac"),
        ratio(hidden, "collective_s").alias("overlap_frac"),
        ratio("collective_s", "compute_s").alias("collective_compute_ratio"),
    )


def exposed_by_axis(times: Iterable[StepTime]) -> pl.DataFrame:
    """Modeled exposed seconds of one step by the axis of the collective that the core waits for.

    The axes sum to the exposed time of the step.

    Source: simulation of the compiled schedule or its closed form, as `step_time`.
    """
    rows = [
        (*_where(time), *exposed) for time in times for exposed in time.exposed_by_axis_s.items()
    ]
    schema = {**_WHERE, "axis": pl.String, "exposed_s": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _where(time: StepTime) -> tuple[str, str]:
    return time.source.value, time.phase.value


def part_costs(times: Iterable[StepTime]) -> pl.DataFrame:
    """Modeled cost of each part of the model in one step.

    Seconds of compute, of all collectives and of exposed communication; FLOPs, HBM bytes and wire bytes.

    Source: simulation of the compiled schedule, as `step_time`; FLOPs and HBM bytes follow from the shapes
    of the operations.
    """
    names = ("compute_s", "collective_s", "exposed_s", "flops", "hbm_bytes", "wire_bytes")
    rows = [
        (*_where(time), *picked(part, "part", *names).values())
        for time in times
        for part in time.parts
    ]
    schema = {**_WHERE, "part": pl.String, **dict.fromkeys(names, pl.Float64)}
    return pl.DataFrame(rows, schema=schema, orient="row")


SECONDS = "s"
OPERATIONS = "operations"
OF_STAGE = (*WHERE, "stage", "device")
PLACED = (*OF_STAGE, "unit")

_SPREAD = ("min", "mean", "max")


def placed(events: pl.DataFrame) -> pl.DataFrame:
    """Every execution of a collective with `begin` and `end`, in seconds or in operations.

    In operations, the i-th collective of the step occupies [i, i+1), and a collective that runs several
    times has one row for each execution. The body of a loop over layers is repeated layer by layer.
    """
    rows = collectives(events).with_row_index("position")
    is_timed = (
        pl.col("start_s").is_not_null() & pl.col("dur_s").is_not_null() & (pl.col("count") == 1)
    )
    known = rows.with_columns(is_timed.all().over(OF_STAGE).alias("is_timed"))
    once = known.filter("is_timed").with_columns(
        pl.col("start_s").alias("begin"),
        (pl.col("start_s") + pl.col("dur_s")).alias("end"),
        pl.lit(SECONDS).alias("unit"),
    )
    order = in_schedule_order(known.filter(~pl.col("is_timed"))).select(
        pl.all().repeat_by("count").explode()
    )
    index = pl.int_range(pl.len()).over(OF_STAGE).cast(pl.Float64)
    counted = order.with_columns(
        index.alias("begin"), (index + 1).alias("end"), pl.lit(OPERATIONS).alias("unit")
    )
    together = pl.concat([once, counted.select(once.columns)])
    return together.sort(*OF_STAGE, "begin", "position", maintain_order=True, nulls_last=True)


def in_schedule_order(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows in the order in which a device runs them; `position` is their order in the table.

    A compiled program without loops is already in schedule order. In a loop over layers and in a
    prediction, the rows before the first layer come first, then each layer's rows, then the rest.
    """
    place = [*WHERE, "stage"]
    in_layers = pl.col("layer").is_not_null()
    first = pl.col("position").filter(in_layers).min().over(place)
    is_behind = ~in_layers & (pl.col("position") > first).fill_null(value=False)
    block = pl.when(in_layers).then(1).when(is_behind).then(2).otherwise(0)
    is_named_once = pl.col("hlo_name").is_not_null() & (pl.len().over([*place, "hlo_name"]) == 1)
    is_unrolled = is_named_once.all().over(place)
    key = pl.when(is_unrolled).then(0).otherwise(block)
    layer = pl.when(is_unrolled).then(0).otherwise(pl.col("layer").fill_null(-1))
    return rows.sort(*WHERE, key, layer, "position", maintain_order=True, nulls_last=True)


def bursts(placed_rows: pl.DataFrame) -> pl.DataFrame:
    """Intervals with traffic on an axis and no pause.

    Source: the up phases of network demand in Rajasekaran et al., "CASSINI" (NSDI 2024), applied to each
    axis of the plan.
    """
    records: list[tuple[object, ...]] = []
    keys = [*PLACED, "axis"]
    for rows in placed_rows.partition_by(keys, maintain_order=True):
        begin, end = _ps(rows, "begin"), _ps(rows, "end")
        end = np.maximum(end, begin + 1)  # an instant lasts 1 ps
        merged = CoveredTime.of(begin, end)
        at, n = np.searchsorted(merged.starts, begin, side="right") - 1, len(merged.starts)
        bytes_of = np.bincount(at, rows["wire_bytes"].fill_null(0.0).to_numpy(), n)
        bounds = (merged.starts / PS_PER_S, merged.ends / PS_PER_S)
        columns = (np.bincount(at, minlength=n), bytes_of, *bounds)
        place = rows.select(keys).row(0)
        records += [(*place, *burst) for burst in zip(*(c.tolist() for c in columns), strict=True)]
    schema = {**{key: placed_rows.schema[key] for key in keys}, "n_collectives": pl.Int64}
    schema |= dict.fromkeys(("wire_bytes", "begin", "end"), pl.Float64)
    return pl.DataFrame(records, schema=schema, orient="row").sort(
        *PLACED, "begin", maintain_order=True, nulls_last=True
    )


def traffic_intervals(events: pl.DataFrame) -> pl.DataFrame:
    """Bursts of traffic on each axis, the gaps between them, and the fraction of the step with traffic.

    A burst is an interval with traffic and no pause; a gap is the pause between two bursts. `window` is the time from the first to the last collective of any axis in the step, `up` the
    total length of the bursts, `down` = window - up, `up_frac` = up / window. Lengths are in `unit`:
    seconds, or operations of the schedule if the collectives have no times. Gaps are null with a single
    burst. The last recorded step counts.

    Source: the traffic interval within one parallelism of Cornell's course project on CCL-Bench; up and
    down phases of Rajasekaran et al., "CASSINI" (NSDI 2024).
    """
    rows = placed(events)
    merged = bursts(rows)
    window = rows.group_by(PLACED).agg(
        (pl.col("end").max() - pl.col("begin").min()).alias("window")
    )
    gap = pl.col("begin").shift(-1) - pl.col("end")
    up = pl.col("end") - pl.col("begin")
    table = merged.group_by(*PLACED, "axis", maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("n_bursts"),
        pl.col("n_collectives").sum(),
        *_spread(up, "burst"),
        *_spread(gap, "gap"),
        pl.col("wire_bytes").mean().alias("mean_burst_wire_bytes"),
        pl.col("wire_bytes").max().alias("max_burst_wire_bytes"),
        up.sum().alias("up"),
    )
    joined = table.join(window, on=PLACED, how="left", nulls_equal=True, maintain_order="left")
    down = (pl.col("window") - pl.col("up")).alias("down")
    return joined.with_columns(down, ratio("up", "window").alias("up_frac"))


def _spread(value: pl.Expr, name: str) -> list[pl.Expr]:
    return [getattr(value, how)().alias(f"{how}_{name}") for how in _SPREAD]


def axis_windows(events: pl.DataFrame) -> pl.DataFrame:
    """Windows between axes: time from the end of a burst of one axis to the next burst of another axis.

    `n` counts the changes from `from_axis` to `to_axis` in one step. A window is 0 if the bursts adjoin or
    overlap, and null if the collectives have no times.

    Source: windows between the traffic of different parallelisms, in which a network can be reconfigured:
    Ding et al., "Photonic Rails in ML Datacenters" (arXiv 2507.08119); the interval across parallelisms of
    Cornell's course project on CCL-Bench.
    """
    merged = bursts(placed(events))
    following = merged.with_columns(
        pl.col("axis", "begin").shift(-1).over(PLACED).name.prefix("next_"),
        (pl.int_range(pl.len()).over(PLACED) == pl.len().over(PLACED) - 1).alias("is_last"),
    ).filter(~pl.col("is_last"), pl.col("next_axis").ne_missing(pl.col("axis")))
    pause = (pl.col("next_begin") - pl.col("end")).clip(lower_bound=0)
    window = pl.when(pl.col("unit") == SECONDS).then(pause)
    return following.group_by(
        *PLACED,
        pl.col("axis").alias("from_axis"),
        pl.col("next_axis").alias("to_axis"),
        maintain_order=True,
    ).agg(
        pl.len().cast(pl.Int64).alias("n"),
        *(w.name.suffix("_s") for w in _spread(window, "window")),
    )
