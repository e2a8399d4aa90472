"""What the time of a step is made of, where it was modelled: rows of StepTime as tables."""

from collections.abc import Iterable

import polars as pl

from meshscope.analysis.request import basis_of, modeled_request_time
from meshscope.events.enums import Source
from meshscope.events.step_time import StepTime

_WHERE = dict.fromkeys(("source", "phase"), pl.String)
_SECONDS = (
    "step_s",
    "low_s",
    "high_s",
    "compute_s",
    "collective_s",
    "exposed_s",
    "idle_s",
    "bubble_s",
)


def step_time(times: Iterable[StepTime]) -> pl.DataFrame:
    """Seconds of one step on one device: compute, exposed communication, idle, and a bubble within idle.

    step = compute + exposed + idle. `collective_s` adds up all collectives, hidden or not; `low_s` and
    `high_s` are between what the step is taken to lie. `exposed_frac` is exposed over step,
    `overlap_frac` the share of `collective_s` that is not exposed, `collective_compute_ratio`
    collectives over compute, `unestimated_frac` the share that no estimate of the compiler covers.

    Source: the walk of the compiled schedule (`meshscope.cost`) or its closed form; exposed
    communication by union of intervals, synchronous collectives included, as `overlap`.
    """
    rows = [
        (
            time.source.value,
            time.phase.value,
            time.step.value_s,
            time.step.low_s,
            time.step.high_s,
            time.compute_s,
            time.collective_s,
            time.exposed_s,
            time.idle_s,
            time.bubble_s,
            time.unestimated_frac,
            time.is_extrapolated,
            basis_of([time]),
        )
        for time in times
    ]
    schema = _WHERE | dict.fromkeys((*_SECONDS, "unestimated_frac"), pl.Float64)
    schema |= {"is_extrapolated": pl.Boolean, "time_basis": pl.String}
    table = pl.DataFrame(rows, schema=schema, orient="row")
    hidden = (pl.col("collective_s") - pl.col("exposed_s")).clip(lower_bound=0)
    return table.with_columns(
        pl.when(pl.col("step_s") > 0)
        .then(pl.col("exposed_s") / pl.col("step_s"))
        .alias("exposed_frac"),
        pl.when(pl.col("collective_s") > 0)
        .then(hidden / pl.col("collective_s"))
        .alias("overlap_frac"),
        pl.when(pl.col("compute_s") > 0)
        .then(pl.col("collective_s") / pl.col("compute_s"))
        .alias("collective_compute_ratio"),
    )


def exposed_by_axis(times: Iterable[StepTime]) -> pl.DataFrame:
    """Exposed seconds of one step by the axis of the collective that is waited for.

    The axes sum to the exposed time of the step.

    Source: the walk of the compiled schedule or its closed form, as `step_time`.
    """
    rows = [
        (time.source.value, time.phase.value, axis, seconds)
        for time in times
        for axis, seconds in time.exposed_by_axis_s.items()
    ]
    schema = {**_WHERE, "axis": pl.String, "exposed_s": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def part_costs(times: Iterable[StepTime]) -> pl.DataFrame:
    """What each part of the model costs in one step: compute, collectives, exposed, FLOPs, bytes.

    Source: the walk of the compiled schedule, as `step_time`; FLOPs and HBM bytes as the shapes of the operations say.
    """
    rows = [
        (time.source.value, time.phase.value, part.part, part.compute_s, part.collective_s,
         part.exposed_s, part.flops, part.hbm_bytes, part.wire_bytes)
        for time in times
        for part in time.parts
    ]  # fmt: skip
    names = ("compute_s", "collective_s", "exposed_s", "flops", "hbm_bytes", "wire_bytes")
    schema = {**_WHERE, "part": pl.String, **dict.fromkeys(names, pl.Float64)}
    return pl.DataFrame(rows, schema=schema, orient="row")


def modeled_latency(times: Iterable[StepTime], *, n_decode_steps: int | None) -> pl.DataFrame:
    """TTFT, TPOT and end-to-end time of a request whose steps take the modelled time, with their intervals.

    `ttft` is the prefill step, `tpot` a decode step, `e2e` prefill and all decode steps: the device alone, no
    host, no queue, no tokenizer; all sequences start together and every decode step takes the same time.
    What was timed on live devices is `latency`.

    Source: the steps of `step_time`; TTFT and TPOT as `latency` defines them.
    """
    every = list(times)
    rows = [
        (source.value, name, seconds.value_s, seconds.low_s, seconds.high_s, request.basis)
        for source in Source
        if (own := [time for time in every if time.source is source])
        for request in [modeled_request_time(own, n_decode_steps=n_decode_steps)]
        for name, seconds in (("ttft", request.ttft), ("tpot", request.tpot), ("e2e", request.e2e))
        if seconds is not None
    ]
    schema = dict.fromkeys(("source", "latency"), pl.String)
    schema |= dict.fromkeys(("mean_s", "low_s", "high_s"), pl.Float64)
    return pl.DataFrame(rows, schema={**schema, "time_basis": pl.String}, orient="row")
