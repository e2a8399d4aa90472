"""The catalog of metrics, in the order of reports and of `docs/metrics.md`."""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import polars as pl

from meshscope.analysis import intervals, matrix, overlap, roofline, utilization, volume
from meshscope.analysis.metric_inputs import MetricInputs, StepDuration, executions
from meshscope.analysis.request import latency_of
from meshscope.analysis.utilization import bubble_frac, mbu, mfu, model_flops
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Measured
from meshscope.events.step_time import StepTime
from meshscope.hardware.chips import Chip
from meshscope.hardware.topology import Topology
from meshscope.plans.memory import Memory

T = TypeVar("T")

NO_COLLECTIVES = "the run has no collectives"
NO_TIMES = "no collective has a duration: the run is neither timed nor modeled"
NO_TIMELINE = "the run has no timeline of single executions"
NO_STEP = "no step has a duration: the run is neither timed nor modeled"
NO_MODELED_STEP = "no step of the run is modeled"
NO_PROFILE = "only runs on live devices have a profile"
NO_DEVICES = "the number of devices is unknown"
NO_CHIP = "the chip is unknown"
NO_MODEL = "the model or the request is unknown"
NO_LINKS = "no traffic crosses torus links: the slice is one chip or not a TPU"
NO_PIPELINE = "the plan has no pipeline"
NO_MEMORY = "the run has no memory figures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """The reason why a run lacks a metric. A metric that cannot be computed is never 0."""

    reason: str


Result = pl.DataFrame | Unavailable


class _MissingInputError(Exception):
    """The run lacks an input of a metric; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric: `function` defines it on tables and peaks, `table` applies it to a run.

    `unit` lists the units of the columns. Definition and source come from the docstring of `function`.
    """

    name: str
    title: str
    unit: str
    function: Callable[..., Any]
    table: Callable[[MetricInputs], pl.DataFrame]

    def compute(self, inputs: MetricInputs) -> Result:
        """The table of a run, or the reason why the run lacks the metric."""
        try:
            return self.table(inputs)
        except _MissingInputError as error:
            return Unavailable(reason=str(error))

    @property
    def definition(self) -> str:
        """The docstring of the function, up to its sources."""
        return self._docstring()[0]

    @property
    def source(self) -> str:
        """The sources that the docstring cites."""
        return self._docstring()[2]

    def _docstring(self) -> list[str]:
        """Definition, `Source:` and sources, with each paragraph on one line."""
        texts = inspect.cleandoc(self.function.__doc__ or "").partition("Source:")
        paragraphs = (re.split(r"\n\s*\n", text.strip()) for text in texts)
        return ["\n\n".join(" ".join(p.split()) for p in text) for text in paragraphs]


def _need(value: T | None, reason: str) -> T:
    if value is None:
        raise _MissingInputError(reason)
    return value


def _filled(table: pl.DataFrame, reason: str) -> pl.DataFrame:
    return _need(None if table.is_empty() else table, reason)


def _events(inputs: MetricInputs) -> pl.DataFrame:
    _filled(volume.collectives(inputs.events), _no_collectives(inputs))
    return inputs.events


def _no_collectives(inputs: MetricInputs) -> str:
    if not inputs.open_operations:
        return NO_COLLECTIVES
    return f"no collective is known: {', '.join(map(str, inputs.open_operations))}"


def _executions(inputs: MetricInputs) -> pl.DataFrame:
    return _filled(executions(inputs), _no_collectives(inputs))


def _timeline(inputs: MetricInputs) -> pl.DataFrame:
    timeline = _need(inputs.timeline, NO_TIMELINE)
    _filled(overlap.timed(timeline), NO_TIMELINE)
    return timeline


def _measured(inputs: MetricInputs) -> Measured:
    return _need(inputs.measured, NO_PROFILE)


def _times(inputs: MetricInputs) -> tuple[StepTime, ...]:
    return _need(inputs.times or None, NO_MODELED_STEP)


def _topology(inputs: MetricInputs) -> Topology:
    return _need(inputs.topology, NO_CHIP)


def _imbalance(inputs: MetricInputs) -> pl.DataFrame:
    n_devices = _need(inputs.n_devices, NO_DEVICES)
    return matrix.traffic_imbalance(_events(inputs), n_devices)


def _link_traffic(inputs: MetricInputs) -> pl.DataFrame:
    topology = _topology(inputs)
    return _filled(matrix.link_traffic(_events(inputs), topology), NO_LINKS)


def _bandwidth(inputs: MetricInputs) -> pl.DataFrame:
    trace = None if inputs.measured is None else inputs.measured.trace
    transfers = () if trace is None else trace.transfers
    return _filled(volume.bandwidth(inputs.events, _chip(inputs), transfers), NO_TIMES)


def _measured_bandwidth(inputs: MetricInputs) -> pl.DataFrame:
    times = _measured(inputs).times
    table = volume.measured_bandwidth(inputs.events, times, _chip(inputs))
    return _filled(table, _no_collectives(inputs))


def _chip(inputs: MetricInputs) -> Chip | None:
    return None if inputs.topology is None else inputs.topology.chip


def _modeled_latency(inputs: MetricInputs) -> pl.DataFrame:
    n_decode_steps = None if inputs.workload is None else inputs.workload.n_decode_steps
    return overlap.modeled_latency(_times(inputs), n_decode_steps=n_decode_steps)


def _bubble(inputs: MetricInputs) -> pl.DataFrame:
    n_stages = _need(inputs.n_stages if inputs.n_stages > 1 else None, NO_PIPELINE)
    rows = [
        (phase.value, n_stages, n, bubble_frac(n_stages, n))
        for phase, n in inputs.n_microbatches.items()
    ]
    names = ("phase", "n_stages", "n_microbatches", "bubble_frac")
    return pl.DataFrame(rows, schema=names, orient="row")


def _mfu(inputs: MetricInputs) -> pl.DataFrame:
    topology = _topology(inputs)
    model, workload = _need(inputs.model, NO_MODEL), _need(inputs.workload, NO_MODEL)
    rows: list[tuple[Any, ...]] = []
    for step in inputs.steps:
        flops = model_flops(model, workload, step.phase)
        fraction = mfu(flops, step.step_s, topology.n_chips, topology.chip, workload.weight_dtype)
        rows.append((*_step_cells(step), flops, fraction))
    return _step_rows(rows, "model_flops", "mfu_frac")


def _mbu(inputs: MetricInputs) -> pl.DataFrame:
    chip = _topology(inputs).chip
    strongest = next((source for source in reversed(Source) if source in inputs.memory), None)
    memory = inputs.memory[_need(strongest, NO_MEMORY)]
    _need(memory.weights_bytes, NO_MODEL)
    read_bytes = memory.known_bytes
    rows = [
        (*_step_cells(step), read_bytes, mbu(memory, step.step_s, chip))
        for step in inputs.steps
        if step.phase is Phase.DECODE
    ]
    return _step_rows(rows, "read_bytes", "mbu_frac")


def _step_cells(step: StepDuration) -> tuple[str, str, float, str]:
    return step.source.value, step.phase.value, step.step_s, step.basis


def _step_rows(rows: Iterable[tuple[Any, ...]], *figures: str) -> pl.DataFrame:
    types = dict.fromkeys(("source", "phase"), pl.String) | {"step_s": pl.Float64}
    types |= {"time_basis": pl.String} | dict.fromkeys(figures, pl.Float64)
    return _filled(pl.DataFrame(list(rows), schema=types, orient="row"), NO_STEP)


def _roofline(inputs: MetricInputs) -> pl.DataFrame:
    chip, costs = _topology(inputs).chip, _need(_measured(inputs).costs or None, NO_PROFILE)
    steps = roofline.step_rooflines(costs, inputs.measured_step_s, chip)
    records = [asdict(step) for step in steps] or None
    return _table(_need(records, f"no peaks of {chip.name} are published"))


def _memory(inputs: MetricInputs) -> pl.DataFrame:
    memory = _need(inputs.memory or None, NO_MEMORY)
    return _table([hbm(source, figures) for source, figures in memory.items()])


def _table(records: list[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame(records, infer_schema_length=None)


def hbm(source: Source, memory: Memory) -> dict[str, Any]:
    """Bytes of weights, KV cache and temporaries on one device, and the fraction of its HBM in use.

    `total_bytes` is the peak memory of a step. Predictions estimate the temporaries, with an interval;
    without formulas for them, they are null, and so is the total. `hbm_frac` = total bytes / HBM of the
    device that programs may use; a step above 1 does not fit.

    Source: the compiler's memory analysis for compiled and measured runs; shapes of weights and cache,
    and docs/memory.md, for predictions; HBM capacity: `meshscope.hardware.chips`.
    """
    total, capacity = memory.total_bytes, memory.hbm_bytes
    fraction = None if total is None or capacity is None else total / capacity
    return {"source": source.value, **asdict(memory), "hbm_frac": fraction}


def _latency(inputs: MetricInputs) -> pl.DataFrame:
    spreads = asdict(_need(inputs.latency, NO_PROFILE))
    names = ("ttft", "itl", "tpot", "e2e")
    return _table([{"latency": name, **spreads[name]} for name in names if spreads[name]])


# (name, title, unit, the function that defines the metric, its table for a run)
_ROWS: tuple[tuple[str, str, str, Callable[..., Any], Callable[[MetricInputs], pl.DataFrame]], ...] = (
    ("volume", "Volume", "count in operations, bytes",
     volume.volume, lambda run: volume.volume(_events(run))),
    ("volume_by_layer", "Volume by layer", "count in operations, bytes",
     volume.volume, lambda run: volume.volume(_events(run), ("layer",))),
    ("size_distribution", "Size distribution", "bytes, count in operations",
     volume.size_distribution, lambda run: volume.size_distribution(_events(run))),
    ("size_summary", "Sizes", "bytes, count in operations",
     volume.size_summary, lambda run: volume.size_summary(_events(run))),
    ("traffic_matrix", "Traffic matrix", "bytes in one step",
     matrix.traffic_matrix, lambda run: matrix.traffic_matrix(_events(run))),
    ("link_traffic", "Traffic over torus links", "bytes in one step, s",
     matrix.link_traffic, _link_traffic),
    ("traffic_imbalance", "Traffic imbalance", "bytes; 1 is balanced",
     matrix.traffic_imbalance, _imbalance),
    ("traffic_intervals", "Traffic intervals of an axis",
     "the column `unit` says: s, or operations of the schedule",
     intervals.traffic_intervals, lambda run: intervals.traffic_intervals(_executions(run))),
    ("axis_windows", "Windows between axes", "n in changes, s",
     intervals.axis_windows, lambda run: intervals.axis_windows(_executions(run))),
    ("period", "Period", "operations, bytes, s",
     intervals.period, lambda run: intervals.period(_executions(run))),
    ("bandwidth", "Bandwidth", "bytes/s; fractions of 1",
     volume.bandwidth, _bandwidth),
    ("measured_bandwidth", "Measured bandwidth", "bytes/s; fractions of 1",
     volume.measured_bandwidth, _measured_bandwidth),
    ("step_time", "Modeled step time", "s; fractions of 1",
     overlap.step_time, lambda run: overlap.step_time(_times(run))),
    ("exposed_by_axis", "Modeled exposed time by axis", "s",
     overlap.exposed_by_axis, lambda run: overlap.exposed_by_axis(_times(run))),
    ("part_costs", "Modeled cost of each part", "s, FLOPs, bytes in one step",
     overlap.part_costs, lambda run: overlap.part_costs(_times(run))),
    ("overlap", "Overlap, exposed and idle time", "s; fractions of 1",
     overlap.overlap, lambda run: overlap.overlap(_timeline(run))),
    ("exposed_by", "Exposed time by axis, from the timeline", "s",
     overlap.exposed_by, lambda run: overlap.exposed_by(_timeline(run))),
    ("bubble", "Pipeline bubble", "fraction of 1",
     bubble_frac, _bubble),
    ("device_idle", "Load and idle time of devices", "s; fractions of 1",
     utilization.device_idle, lambda run: utilization.device_idle(_measured(run).loads)),
    ("load_imbalance", "Load imbalance", "1 is balanced",
     utilization.load_imbalance, lambda run: utilization.load_imbalance(_measured(run).loads)),
    ("waiting", "Wait and wire time", "s; fractions of 1",
     utilization.waiting, lambda run: utilization.waiting(_measured(run).times)),
    ("mfu", "MFU", "FLOPs; fraction of 1",
     mfu, _mfu),
    ("mbu", "MBU", "bytes; fraction of 1",
     mbu, _mbu),
    ("roofline", "Roofline", "s, bytes, FLOPs; fractions of 1",
     roofline.step_roofline, _roofline),
    ("hbm", "Memory", "bytes; fraction of 1",
     hbm, _memory),
    ("modeled_latency", "Modeled latency of a request", "s",
     overlap.modeled_latency, _modeled_latency),
    ("latency", "Latency of requests", "s, n in requests or steps",
     latency_of, _latency),
)  # fmt: skip

METRICS: tuple[Metric, ...] = tuple(
    Metric(name=name, title=title, unit=unit, function=function, table=table)
    for name, title, unit, function, table in _ROWS
)

# Former names of metrics. JSON documents and `meshscope.open(...).metrics()` accept both.
ALIASES = {"modelled_latency": "modeled_latency"}


def metrics_of(inputs: MetricInputs) -> dict[str, Result]:
    """Every metric of a run by its name, or the reason why the run lacks it."""
    return {metric.name: metric.compute(inputs) for metric in METRICS}
