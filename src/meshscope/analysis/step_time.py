"""Modeled step times, their parts and the request latency as tables."""

from collections.abc import Iterable

import polars as pl

from meshscope.analysis.overlap import ratio
from meshscope.analysis.request import basis_of, modeled_request_time
from meshscope.events.enums import Source
from meshscope.events.step_time import StepTime

_WHERE = dict.fromkeys(("source", "phase"), pl.String)
_PARTS = (
    *("compute_s", "collective_s", "exposed_s", "idle_s", "bubble_s"),
    *("unestimated_frac", "is_extrapolated"),
)


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
    rows = [
        {
            **{name: getattr(time, name) for name in _PARTS},
            "source": time.source.value,
            "phase": time.phase.value,
            "step_s": time.step.value_s,
            "low_s": time.step.low_s,
            "high_s": time.step.high_s,
            "time_basis": basis_of([time]),
        }
        for time in times
    ]
    schema = _WHERE | dict.fromkeys(("step_s", "low_s", "high_s", *_PARTS), pl.Float64)
    schema |= {"is_extrapolated": pl.Boolean, "time_basis": pl.String}
    hidden = (pl.col("collective_s") - pl.col("exposed_s")).clip(lower_bound=0)
    return pl.DataFrame(rows, schema=schema).with_columns(
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
        (time.source.value, time.phase.value, axis, seconds)
        for time in times
        for axis, seconds in time.exposed_by_axis_s.items()
    ]
    schema = {**_WHERE, "axis": pl.String, "exposed_s": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def part_costs(times: Iterable[StepTime]) -> pl.DataFrame:
    """Modeled cost of each part of the model in one step.

    Seconds of compute, of all collectives and of exposed communication; FLOPs, HBM bytes and wire bytes.

    Source: simulation of the compiled schedule, as `step_time`; FLOPs and HBM bytes follow from the shapes
    of the operations.
    """
    names = ("compute_s", "collective_s", "exposed_s", "flops", "hbm_bytes", "wire_bytes")
    rows = [
        (time.source.value, time.phase.value, part.part, *(getattr(part, n) for n in names))
        for time in times
        for part in time.parts
    ]
    schema = {**_WHERE, "part": pl.String, **dict.fromkeys(names, pl.Float64)}
    return pl.DataFrame(rows, schema=schema, orient="row")


def modeled_latency(times: Iterable[StepTime], *, n_decode_steps: int | None) -> pl.DataFrame:
    """Modeled TTFT, TPOT and end-to-end time of a request, with their bounds.

    `ttft` = prefill step, `tpot` = decode step, `e2e` = prefill step + all decode steps. Device time only,
    without host, queueing and tokenization; all sequences start together, and all decode steps take the
    same time. `latency` is the measured counterpart.

    Source: the steps of `step_time`; TTFT and TPOT as defined by `latency`.
    """
    steps = list(times)
    rows = [
        (source.value, name, seconds.value_s, seconds.low_s, seconds.high_s, request.basis)
        for source in Source
        if (source_times := [time for time in steps if time.source is source])
        for request in [modeled_request_time(source_times, n_decode_steps=n_decode_steps)]
        for name, seconds in (("ttft", request.ttft), ("tpot", request.tpot), ("e2e", request.e2e))
        if seconds is not None
    ]
    schema = dict.fromkeys(("source", "latency"), pl.String)
    schema |= dict.fromkeys(("mean_s", "low_s", "high_s"), pl.Float64)
    return pl.DataFrame(rows, schema={**schema, "time_basis": pl.String}, orient="row")
