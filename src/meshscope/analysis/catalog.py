"""The catalog of metrics, in the order of reports and of `docs/metrics.md`."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import polars as pl

from meshscope.analysis import bandwidth as bandwidths
from meshscope.analysis import devices, intervals, matrix, overlap, roofline, routed, volume
from meshscope.analysis import step_time as step_times
from meshscope.analysis.executions import executions
from meshscope.analysis.latency import Latency, latency_of
from meshscope.analysis.metric import Metric, Unavailable
from meshscope.analysis.metric_inputs import MetricInputs, StepDuration
from meshscope.analysis.utilization import bubble_frac, mbu, mfu, model_flops
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Measured
from meshscope.events.step_time import StepTime
from meshscope.spec.hardware.chips import Chip
from meshscope.spec.plan.memory import Memory

Result = pl.DataFrame | Unavailable
Compute = Callable[[MetricInputs], Result]

NO_COLLECTIVES = Unavailable(reason="the run has no collectives")
NO_TIMES = Unavailable(reason="no collective has a duration: the run is neither timed nor modeled")
NO_TIMELINE = Unavailable(reason="the run has no timeline of single executions")
NO_STEP = Unavailable(reason="no step has a duration: the run is neither timed nor modeled")
NO_MODELED_STEP = Unavailable(reason="no step of the run is modeled")
NO_PROFILE = Unavailable(reason="only runs on live devices have a profile")
NO_DEVICES = Unavailable(reason="the number of devices is unknown")
NO_CHIP = Unavailable(reason="the chip is unknown")
NO_MODEL = Unavailable(reason="the model or the request is unknown")
NO_LINKS = Unavailable(reason="no traffic crosses torus links: the slice is one chip or not a TPU")
NO_PIPELINE = Unavailable(reason="the plan has no pipeline")
NO_MEMORY = Unavailable(reason="the run has no memory figures")


def _from_events(function: Callable[[pl.DataFrame], pl.DataFrame]) -> Compute:
    def compute(inputs: MetricInputs) -> Result:
        is_empty = volume.collectives(inputs.events).is_empty()
        return NO_COLLECTIVES if is_empty else function(inputs.events)

    return compute


def _from_executions(function: Callable[[pl.DataFrame], pl.DataFrame]) -> Compute:
    def compute(inputs: MetricInputs) -> Result:
        rows = executions(inputs)
        return NO_COLLECTIVES if rows.is_empty() else function(rows)

    return compute


def _from_timeline(function: Callable[[pl.DataFrame], pl.DataFrame]) -> Compute:
    def compute(inputs: MetricInputs) -> Result:
        if inputs.timeline is None or overlap.timed(inputs.timeline).is_empty():
            return NO_TIMELINE
        return function(inputs.timeline)

    return compute


def _from_profile(function: Callable[[Measured], pl.DataFrame]) -> Compute:
    return lambda inputs: NO_PROFILE if inputs.measured is None else function(inputs.measured)


def _from_times(function: Callable[[Iterable[StepTime]], pl.DataFrame]) -> Compute:
    return lambda inputs: function(inputs.times) if inputs.times else NO_MODELED_STEP


def _volume_by(*columns: str) -> Compute:
    return _from_events(lambda events: volume.volume(events, columns))


def _imbalance(inputs: MetricInputs) -> Result:
    n_devices = inputs.n_devices
    if n_devices is None:
        return NO_DEVICES
    return _from_events(lambda events: matrix.traffic_imbalance(events, n_devices))(inputs)


def _link_traffic(inputs: MetricInputs) -> Result:
    topology = inputs.topology
    if topology is None:
        return NO_CHIP
    table = _from_events(lambda events: routed.link_traffic(events, topology))(inputs)
    is_without_links = isinstance(table, pl.DataFrame) and table.is_empty()
    return NO_LINKS if is_without_links else table


def _bandwidth(inputs: MetricInputs) -> Result:
    table = bandwidths.bandwidth(inputs.events, _chip(inputs))
    return NO_TIMES if table.is_empty() else table


def _measured_bandwidth(inputs: MetricInputs) -> Result:
    if inputs.measured is None:
        return NO_PROFILE
    table = bandwidths.measured_bandwidth(inputs.events, inputs.measured.times, _chip(inputs))
    return NO_COLLECTIVES if table.is_empty() else table


def _chip(inputs: MetricInputs) -> Chip | None:
    return None if inputs.topology is None else inputs.topology.chip


def _modeled_latency(inputs: MetricInputs) -> Result:
    if not inputs.times:
        return NO_MODELED_STEP
    n_decode_steps = None if inputs.workload is None else inputs.workload.n_decode_steps
    return step_times.modeled_latency(inputs.times, n_decode_steps=n_decode_steps)


def _bubble(inputs: MetricInputs) -> Result:
    if inputs.n_stages < 2:
        return NO_PIPELINE
    rows = [
        (phase.value, inputs.n_stages, n, bubble_frac(inputs.n_stages, n))
        for phase, n in inputs.n_microbatches.items()
    ]
    names = ("phase", "n_stages", "n_microbatches", "bubble_frac")
    return pl.DataFrame(rows, schema=names, orient="row")


def _mfu(inputs: MetricInputs) -> Result:
    if inputs.topology is None:
        return NO_CHIP
    if inputs.model is None or inputs.workload is None:
        return NO_MODEL
    topology = inputs.topology
    rows: list[tuple[Any, ...]] = []
    for step in inputs.steps:
        flops = model_flops(inputs.model, inputs.workload, step.phase)
        fraction = mfu(flops, step.step_s, topology.n_chips, topology.chip)
        rows.append((*_step_cells(step), flops, fraction))
    return _step_rows(rows, "model_flops", "mfu_frac")


def _mbu(inputs: MetricInputs) -> Result:
    if inputs.topology is None:
        return NO_CHIP
    memory = _strongest_memory(inputs)
    if memory is None:
        return NO_MEMORY
    read_bytes = memory.weights_bytes + memory.kv_cache_bytes
    chip = inputs.topology.chip
    rows = [
        (*_step_cells(step), read_bytes, mbu(memory, step.step_s, chip))
        for step in inputs.steps
        if step.phase is Phase.DECODE
    ]
    return _step_rows(rows, "read_bytes", "mbu_frac")


def _strongest_memory(inputs: MetricInputs) -> Memory | None:
    source = next((source for source in reversed(Source) if source in inputs.memory), None)
    return None if source is None else inputs.memory[source]


def _step_cells(step: StepDuration) -> tuple[str, str, float, str]:
    return step.source.value, step.phase.value, step.step_s, step.basis


def _step_rows(rows: Iterable[tuple[Any, ...]], *figures: str) -> Result:
    types = dict.fromkeys(("source", "phase"), pl.String) | {"step_s": pl.Float64}
    types |= {"time_basis": pl.String} | dict.fromkeys(figures, pl.Float64)
    table = pl.DataFrame(list(rows), schema=types, orient="row")
    return NO_STEP if table.is_empty() else table


def _roofline(inputs: MetricInputs) -> Result:
    if inputs.topology is None:
        return NO_CHIP
    if inputs.measured is None or not inputs.measured.costs:
        return NO_PROFILE
    chip = inputs.topology.chip
    steps = roofline.step_rooflines(inputs.measured.costs, inputs.measured_step_s, chip)
    if not steps:
        return Unavailable(reason=f"no peaks of {chip.name} are published")
    return pl.DataFrame([asdict(step) for step in steps], infer_schema_length=None)


def _memory(inputs: MetricInputs) -> Result:
    if not inputs.memory:
        return NO_MEMORY
    rows = [hbm(source, memory) for source, memory in inputs.memory.items()]
    return pl.DataFrame(rows, infer_schema_length=None)


def hbm(source: Source, memory: Memory) -> dict[str, Any]:
    """Bytes of weights, KV cache and temporaries on one device, and the fraction of its HBM in use.

    `total_bytes` is the peak memory of a step. It is null for predictions, because only the compiler
    knows the temporaries. `hbm_frac` = total bytes / HBM capacity of the device.

    Source: the compiler's memory analysis for compiled and measured runs; shapes of weights and cache
    for predictions; HBM capacity: `meshscope.spec.hardware.chips`.
    """
    total, capacity = memory.total_bytes, memory.hbm_bytes
    fraction = None if total is None or capacity is None else total / capacity
    return {"source": source.value, **asdict(memory), "hbm_frac": fraction}


def _latency(inputs: MetricInputs) -> Result:
    return NO_PROFILE if inputs.latency is None else latency_table(inputs.latency)


def latency_table(latency: Latency) -> pl.DataFrame:
    """TTFT, ITL, TPOT and end-to-end time of the timed requests: mean, percentiles and count.

    Source: `meshscope.analysis.latency.latency_of`.
    """
    spreads = {name: getattr(latency, name) for name in ("ttft", "itl", "tpot", "e2e")}
    rows = [{"latency": name, **asdict(spread)} for name, spread in spreads.items() if spread]
    return pl.DataFrame(rows, infer_schema_length=None)


# (name, title, unit, the function that defines the metric, how a run computes it)
_ROWS: tuple[tuple[str, str, str, Callable[..., Any], Compute], ...] = (
    ("volume", "Volume", "count in operations, bytes",
     volume.volume, _volume_by(*volume.BY)),
    ("volume_by_layer", "Volume by layer", "count in operations, bytes",
     volume.volume, _volume_by("layer")),
    ("size_distribution", "Size distribution", "bytes, count in operations",
     volume.size_distribution, _from_events(volume.size_distribution)),
    ("size_summary", "Sizes", "bytes, count in operations",
     volume.size_summary, _from_events(volume.size_summary)),
    ("traffic_matrix", "Traffic matrix", "bytes in one step",
     matrix.traffic_matrix, _from_events(matrix.traffic_matrix)),
    ("link_traffic", "Traffic over torus links", "bytes in one step, s",
     routed.link_traffic, _link_traffic),
    ("traffic_imbalance", "Traffic imbalance", "bytes; 1 is balanced",
     matrix.traffic_imbalance, _imbalance),
    ("traffic_intervals", "Traffic intervals of an axis",
     "the column `unit` says: s, or operations of the schedule",
     intervals.traffic_intervals, _from_executions(intervals.traffic_intervals)),
    ("axis_windows", "Windows between axes", "n in changes, s",
     intervals.axis_windows, _from_executions(intervals.axis_windows)),
    ("period", "Period", "operations, bytes, s",
     intervals.period, _from_executions(intervals.period)),
    ("bandwidth", "Bandwidth", "bytes/s; fractions of 1",
     bandwidths.bandwidth, _bandwidth),
    ("measured_bandwidth", "Measured bandwidth", "bytes/s; fractions of 1",
     bandwidths.measured_bandwidth, _measured_bandwidth),
    ("step_time", "Modeled step time", "s; fractions of 1",
     step_times.step_time, _from_times(step_times.step_time)),
    ("exposed_by_axis", "Modeled exposed time by axis", "s",
     step_times.exposed_by_axis, _from_times(step_times.exposed_by_axis)),
    ("part_costs", "Modeled cost of each part", "s, FLOPs, bytes in one step",
     step_times.part_costs, _from_times(step_times.part_costs)),
    ("overlap", "Overlap, exposed and idle time", "s; fractions of 1",
     overlap.overlap, _from_timeline(overlap.overlap)),
    ("exposed_by", "Exposed time by axis, from the timeline", "s",
     overlap.exposed_by, _from_timeline(overlap.exposed_by)),
    ("bubble", "Pipeline bubble", "fraction of 1",
     bubble_frac, _bubble),
    ("device_idle", "Load and idle time of devices", "s; fractions of 1",
     devices.device_idle, _from_profile(lambda measured: devices.device_idle(measured.loads))),
    ("load_imbalance", "Load imbalance", "1 is balanced",
     devices.load_imbalance, _from_profile(lambda measured: devices.load_imbalance(measured.loads))),
    ("waiting", "Wait and wire time", "s; fractions of 1",
     devices.waiting, _from_profile(lambda measured: devices.waiting(measured.times))),
    ("mfu", "MFU", "FLOPs; fraction of 1",
     mfu, _mfu),
    ("mbu", "MBU", "bytes; fraction of 1",
     mbu, _mbu),
    ("roofline", "Roofline", "s, bytes, FLOPs; fractions of 1",
     roofline.step_roofline, _roofline),
    ("hbm", "Memory", "bytes; fraction of 1",
     hbm, _memory),
    ("modeled_latency", "Modeled latency of a request", "s",
     step_times.modeled_latency, _modeled_latency),
    ("latency", "Latency of requests", "s, n in requests or steps",
     latency_of, _latency),
)  # fmt: skip

METRICS: tuple[Metric, ...] = tuple(
    Metric(name=name, title=title, unit=unit, function=function, compute=compute)
    for name, title, unit, function, compute in _ROWS
)

# Former names of metrics. JSON documents and `meshscope.open(...).metrics()` accept both.
ALIASES = {"modelled_latency": "modeled_latency"}


def metrics_of(inputs: MetricInputs) -> dict[str, Result]:
    """Every metric of a run by its name, or the reason why the run lacks it."""
    return {metric.name: metric.compute(inputs) for metric in METRICS}


def metrics_page() -> str:
    """All metrics with unit, definition and source, as Markdown."""
    sections = (
        f"## {metric.title}\n\n`{metric.name}`, unit: {metric.unit}.\n\n{metric.definition}\n\n"
        f"*Source*: {metric.source}\n"
        for metric in METRICS
    )
    return "\n".join(sections)
