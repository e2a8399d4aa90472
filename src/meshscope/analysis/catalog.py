"""Every metric once: in the order in which reports show them, and `docs/metrics.md` tells them."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import polars as pl

from meshscope.analysis import bandwidth as bandwidths
from meshscope.analysis import devices, intervals, matrix, roofline, routed, step_time
from meshscope.analysis import overlap as overlaps
from meshscope.analysis import utilization as utilisation
from meshscope.analysis import volume as volumes
from meshscope.analysis.latency import Latency, latency_of
from meshscope.analysis.metric import Metric, Unavailable
from meshscope.analysis.metric_inputs import MetricInputs, StepDuration
from meshscope.analysis.timeline import last_step
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Measured
from meshscope.events.step_time import StepTime
from meshscope.spec.plan.memory import Memory

Result = pl.DataFrame | Unavailable

NO_COLLECTIVES = Unavailable(reason="the run has no collectives")
NO_TIMES = Unavailable(reason="no row has a duration: nothing was timed and no time was modelled")
NO_TIMELINE = Unavailable(
    reason="the run has no timeline of single executions, so that nothing says what runs together"
)
NO_STEP = Unavailable(reason="no step has a duration: nothing was timed and no time was modelled")
NO_MODEL_OF_TIME = Unavailable(reason="no time of a step was modelled for this run")
NO_PROFILE = Unavailable(reason="nothing was measured: only a run on live devices has a profile")
NO_DEVICES = Unavailable(reason="the run does not say how many devices it has")
NO_CHIP = Unavailable(reason="the run does not say which chips it is for")
NO_MODEL = Unavailable(reason="the run does not name its model and request")
NO_LINKS = Unavailable(reason="no traffic crosses the links of a torus: one chip, or no TPU")
NO_PIPELINE = Unavailable(reason="the plan has no pipeline")
NO_MEMORY = Unavailable(reason="the run has no figures of memory")


def _of_events(
    function: Callable[[pl.DataFrame], pl.DataFrame],
) -> Callable[[MetricInputs], Result]:
    def of(subject: MetricInputs) -> Result:
        is_empty = volumes.collectives(subject.events).is_empty()
        return NO_COLLECTIVES if is_empty else function(subject.events)

    return of


def _of_executions(
    function: Callable[[pl.DataFrame], pl.DataFrame],
) -> Callable[[MetricInputs], Result]:
    """By the timeline (its last step) where a phase has one, by the rows of the table where not."""

    def of(subject: MetricInputs) -> Result:
        if subject.timeline is None:
            return _of_events(function)(subject)
        timed = last_step(overlaps.timed(subject.timeline)).drop("step")
        single = volumes.collectives(timed)
        others = subject.events.join(
            single.select(volumes.WHERE).unique(), on=volumes.WHERE, how="anti", nulls_equal=True
        )
        return function(pl.concat([others, single]))

    return of


def _volume_by(*by: str) -> Callable[[MetricInputs], Result]:
    return _of_events(lambda events: volumes.volume(events, by))


def _imbalance(subject: MetricInputs) -> Result:
    n_devices = subject.n_devices
    if n_devices is None:
        return NO_DEVICES
    return _of_events(lambda events: matrix.traffic_imbalance(events, n_devices))(subject)


def _link_traffic(subject: MetricInputs) -> Result:
    topology = subject.topology
    if topology is None:
        return NO_CHIP
    found = _of_events(lambda events: routed.link_traffic(events, topology))(subject)
    is_without = isinstance(found, pl.DataFrame) and found.is_empty()
    return NO_LINKS if is_without else found


def _bandwidth(subject: MetricInputs) -> Result:
    chip = None if subject.topology is None else subject.topology.chip
    found = bandwidths.bandwidth(subject.events, chip)
    return NO_TIMES if found.is_empty() else found


def _measured_bandwidth(subject: MetricInputs) -> Result:
    chip = None if subject.topology is None else subject.topology.chip
    if subject.measured is None:
        return NO_PROFILE
    found = bandwidths.measured_bandwidth(subject.events, subject.measured.times, chip)
    return NO_COLLECTIVES if found.is_empty() else found


def _of_timeline(
    function: Callable[[pl.DataFrame], pl.DataFrame],
) -> Callable[[MetricInputs], Result]:
    def of(subject: MetricInputs) -> Result:
        if subject.timeline is None or overlaps.timed(subject.timeline).is_empty():
            return NO_TIMELINE
        return function(subject.timeline)

    return of


def _of_profile(function: Callable[[Measured], pl.DataFrame]) -> Callable[[MetricInputs], Result]:
    return lambda subject: NO_PROFILE if subject.measured is None else function(subject.measured)


def _request_time(subject: MetricInputs) -> Result:
    if not subject.times:
        return NO_MODEL_OF_TIME
    n_decode_steps = None if subject.workload is None else subject.workload.n_decode_steps
    return step_time.modelled_latency(subject.times, n_decode_steps=n_decode_steps)


def _of_times(
    function: Callable[[Iterable[StepTime]], pl.DataFrame],
) -> Callable[[MetricInputs], Result]:
    return lambda subject: function(subject.times) if subject.times else NO_MODEL_OF_TIME


def _bubble(subject: MetricInputs) -> Result:
    if subject.n_stages < 2:
        return NO_PIPELINE
    rows = [
        (phase.value, subject.n_stages, n, utilisation.bubble_frac(subject.n_stages, n))
        for phase, n in subject.n_microbatches.items()
    ]
    names = ("phase", "n_stages", "n_microbatches", "bubble_frac")
    return pl.DataFrame(rows, schema=names, orient="row")


def _mfu(subject: MetricInputs) -> Result:
    if subject.topology is None:
        return NO_CHIP
    if subject.model is None or subject.workload is None:
        return NO_MODEL
    topology = subject.topology
    rows: list[tuple[Any, ...]] = []
    for step in subject.steps:
        flops = utilisation.model_flops(subject.model, subject.workload, step.phase)
        share = utilisation.mfu(flops, step.step_s, topology.n_chips, topology.chip)
        rows.append((*_told(step), flops, share))
    return _steps_table(rows, "model_flops", "mfu_frac")


def _mbu(subject: MetricInputs) -> Result:
    if subject.topology is None:
        return NO_CHIP
    memory = _strongest_memory(subject)
    if memory is None:
        return NO_MEMORY
    chip = subject.topology.chip
    rows = [
        (*_told(step), memory.weights_bytes + memory.kv_cache_bytes, share)
        for step in subject.steps
        if step.phase is Phase.DECODE
        for share in [utilisation.mbu(memory, step.step_s, chip)]
    ]
    return _steps_table(rows, "read_bytes", "mbu_frac")


def _strongest_memory(subject: MetricInputs) -> Memory | None:
    found = [subject.memory[source] for source in Source if source in subject.memory]
    return found[-1] if found else None


def _told(step: StepDuration) -> tuple[str, str, float, str]:
    return step.source.value, step.phase.value, step.step_s, step.basis


def _steps_table(rows: Iterable[tuple[Any, ...]], *figures: str) -> Result:
    types = dict.fromkeys(("source", "phase"), pl.String) | {"step_s": pl.Float64}
    types |= {"time_basis": pl.String} | dict.fromkeys(figures, pl.Float64)
    table = pl.DataFrame(list(rows), schema=types, orient="row")
    return NO_STEP if table.is_empty() else table


def _roofline(subject: MetricInputs) -> Result:
    if subject.topology is None:
        return NO_CHIP
    if subject.measured is None or not subject.measured.costs:
        return NO_PROFILE
    seconds = {s.phase: s.step_s for s in subject.steps if s.source is Source.MEASURED}
    found = roofline.rooflines(subject.measured.costs, seconds, subject.topology.chip)
    if not found:
        return Unavailable(reason=f"no peaks of {subject.topology.chip.name} are published")
    return pl.DataFrame([asdict(one) for one in found], infer_schema_length=None)


def _memory(subject: MetricInputs) -> Result:
    if not subject.memory:
        return NO_MEMORY
    rows = [hbm(source, memory) for source, memory in subject.memory.items()]
    return pl.DataFrame(rows, infer_schema_length=None)


def hbm(source: Source, memory: Memory) -> dict[str, Any]:
    """Bytes of weights, KV cache and temporaries on one device, and their share of its HBM.

    `total_bytes` holds everything that lives at the peak of a step; predicted totals are null, since
    temporaries are the compiler's. `hbm_frac` is the total over the HBM of the device.

    Source: the compiler's memory analysis for compiled and measured runs; shapes of weights and cache
    for predicted ones; HBM: `meshscope.spec.hardware.chips`.
    """
    total, whole = memory.total_bytes, memory.hbm_bytes
    share = None if total is None or whole is None else total / whole
    return {"source": source.value, **asdict(memory), "hbm_frac": share}


def _latency(subject: MetricInputs) -> Result:
    return NO_PROFILE if subject.latency is None else latency_table(subject.latency)


def latency_table(latency: Latency) -> pl.DataFrame:
    """TTFT, ITL, TPOT and e2e of the timed requests: mean, percentiles, and how many were timed.

    Source: `meshscope.analysis.latency.latency_of`.
    """
    spreads = {name: getattr(latency, name) for name in ("ttft", "itl", "tpot", "e2e")}
    rows = [{"latency": name, **asdict(spread)} for name, spread in spreads.items() if spread]
    return pl.DataFrame(rows, infer_schema_length=None)


METRICS: tuple[Metric, ...] = (
    Metric(
        name="volume", title="Volume", unit="count in operations, bytes",
        function=volumes.volume, of=_volume_by(*volumes.BY),
    ),
    Metric(
        name="volume_by_layer", title="Volume by layer", unit="count in operations, bytes",
        function=volumes.volume, of=_volume_by("layer"),
    ),
    Metric(
        name="size_distribution", title="Size distribution", unit="bytes, count in operations",
        function=volumes.size_distribution, of=_of_events(volumes.size_distribution),
    ),
    Metric(
        name="size_summary", title="Sizes", unit="bytes, count in operations",
        function=volumes.size_summary, of=_of_events(volumes.size_summary),
    ),
    Metric(
        name="traffic_matrix", title="Traffic matrix, logical", unit="bytes in one step",
        function=matrix.traffic_matrix, of=_of_events(matrix.traffic_matrix),
    ),
    Metric(
        name="link_traffic", title="Traffic over torus links", unit="bytes in one step, s",
        function=routed.link_traffic, of=_link_traffic,
    ),
    Metric(
        name="traffic_imbalance", title="Imbalance of traffic", unit="bytes; 1 is balanced",
        function=matrix.traffic_imbalance, of=_imbalance,
    ),
    Metric(
        name="traffic_intervals", title="Traffic intervals of an axis",
        unit="the column `unit` says: s, or operations of the schedule",
        function=intervals.traffic_intervals, of=_of_executions(intervals.traffic_intervals),
    ),
    Metric(
        name="axis_windows", title="Windows between axes", unit="n in changes, s",
        function=intervals.axis_windows, of=_of_executions(intervals.axis_windows),
    ),
    Metric(
        name="period", title="Period", unit="operations, bytes, s",
        function=intervals.period, of=_of_executions(intervals.period),
    ),
    Metric(
        name="bandwidth", title="Bandwidth", unit="bytes a second; shares of 1",
        function=bandwidths.bandwidth, of=_bandwidth,
    ),
    Metric(
        name="measured_bandwidth", title="Bandwidth measured", unit="bytes a second; shares of 1",
        function=bandwidths.measured_bandwidth, of=_measured_bandwidth,
    ),
    Metric(
        name="step_time", title="Time of a step, modelled", unit="s; shares of 1",
        function=step_time.step_time, of=_of_times(step_time.step_time),
    ),
    Metric(
        name="exposed_by_axis", title="Exposed time by axis, modelled", unit="s",
        function=step_time.exposed_by_axis, of=_of_times(step_time.exposed_by_axis),
    ),
    Metric(
        name="part_costs", title="Cost of each part, modelled", unit="s, FLOPs, bytes in one step",
        function=step_time.part_costs, of=_of_times(step_time.part_costs),
    ),
    Metric(
        name="overlap", title="Overlap, exposed and idle time", unit="s; shares of 1",
        function=overlaps.overlap, of=_of_timeline(overlaps.overlap),
    ),
    Metric(
        name="exposed_by", title="Exposed time by axis, from the timeline", unit="s",
        function=overlaps.exposed_by, of=_of_timeline(overlaps.exposed_by),
    ),
    Metric(
        name="bubble", title="Bubble of the pipeline", unit="share of 1",
        function=utilisation.bubble_frac, of=_bubble,
    ),
    Metric(
        name="device_idle", title="Load and idle time of devices", unit="s; shares of 1",
        function=devices.device_idle, of=_of_profile(lambda m: devices.device_idle(m.loads)),
    ),
    Metric(
        name="load_imbalance", title="Imbalance of load", unit="1 is balanced",
        function=devices.load_imbalance, of=_of_profile(lambda m: devices.load_imbalance(m.loads)),
    ),
    Metric(
        name="waiting", title="Waiting against wire", unit="s; shares of 1",
        function=devices.waiting, of=_of_profile(lambda m: devices.waiting(m.times)),
    ),
    Metric(
        name="mfu", title="MFU", unit="FLOPs; share of 1", function=utilisation.mfu, of=_mfu,
    ),
    Metric(
        name="mbu", title="MBU", unit="bytes; share of 1", function=utilisation.mbu, of=_mbu,
    ),
    Metric(
        name="roofline", title="Roofline", unit="s, bytes, FLOPs; shares of 1",
        function=roofline.roofline_of, of=_roofline,
    ),
    Metric(
        name="hbm", title="Memory", unit="bytes; share of 1", function=hbm, of=_memory,
    ),
    Metric(
        name="modelled_latency", title="Latency of a request, modelled", unit="s",
        function=step_time.modelled_latency, of=_request_time,
    ),
    Metric(
        name="latency", title="Latency of requests", unit="s, n in requests or steps",
        function=latency_of, of=_latency,
    ),
)  # fmt: skip


def metrics_of(subject: MetricInputs) -> dict[str, Result]:
    """Every metric of the run by its name; what it cannot have says why."""
    return {metric.name: metric.of(subject) for metric in METRICS}


def metrics_page() -> str:
    """All metrics with unit, definition and source, as Markdown."""
    told = (
        f"## {metric.title}\n\n`{metric.name}`, unit: {metric.unit}.\n\n{metric.definition}\n\n"
        f"*Source*: {metric.source}\n"
        for metric in METRICS
    )
    return "\n".join(told)
