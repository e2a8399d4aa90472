"""The catalog of metrics, in the order of reports and of `docs/metrics.md`."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar

import polars as pl

from meshscope.analysis import overlap, request, utilization, volume
from meshscope.analysis.overlap import timed
from meshscope.analysis.timeline import last_step, read_timeline, sampling_notes
from meshscope.analysis.utilization import bubble_frac, mbu, mfu, model_flops
from meshscope.analysis.volume import WHERE, collectives
from meshscope.events.collective import OtherOperation
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Measured
from meshscope.events.schema import table_of
from meshscope.events.step_time import StepTime
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.memory import Memory
from meshscope.store.read import read_events
from meshscope.store.run import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDuration:
    """Seconds of one step of a phase, by one source, with the basis of the time."""

    source: Source
    phase: Phase
    step_s: float
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInputs:
    """A run as metrics read it; null or empty means unknown.

    `events` and `timeline` have the columns of the event table. A row of `timeline` is one execution of
    a collective, a compute op or a copy; `sampled` says what it leaves out of a long trace.
    """

    events: pl.DataFrame
    experiment: ExperimentRecord = field(default_factory=ExperimentRecord)
    timeline: pl.DataFrame | None = None
    sampled: tuple[str, ...] = ()
    memory: Mapping[Source, Memory] = field(default_factory=dict[Source, Memory])
    steps: tuple[StepDuration, ...] = ()
    times: tuple[StepTime, ...] = ()
    measured: Measured | None = None
    latency: request.Latency | None = None
    open_operations: tuple[OtherOperation, ...] = ()

    @property
    def measured_step_s(self) -> dict[Phase, float]:
        """Measured seconds of a step of each phase."""
        return {s.phase: s.step_s for s in self.steps if s.source is Source.MEASURED}


def executions(inputs: MetricInputs) -> pl.DataFrame:
    """The collectives of the last step in the timeline; rows of the event table for other phases."""
    rows = collectives(inputs.events)
    if inputs.timeline is None:
        return rows
    single = collectives(last_step(timed(inputs.timeline))).select(rows.columns)
    phases = single.select(WHERE).unique()
    return pl.concat([rows.join(phases, on=WHERE, how="anti", nulls_equal=True), single])


def metric_inputs(run: RunRecord) -> MetricInputs:
    """The metric inputs of a run; what the run does not have stays unknown."""
    events = events_of(run)
    steps = [
        (time.source, time.phase, time.step.value_s, request.basis_of([time])) for time in run.times
    ]
    steps += [
        (Source.MEASURED, phase, step_s, Source.MEASURED.value)
        for phase, step_s in request.measured_step_s(run).items()
    ]
    timeline = None if run.path is None else read_timeline(run.path, events)
    return MetricInputs(
        events=events,
        experiment=run.manifest.experiment,
        timeline=timeline,
        sampled=tuple(sampling_notes(run.measured, timeline)),
        memory=run.memory,
        steps=tuple(
            StepDuration(source=source, phase=phase, step_s=step_s, basis=basis or "unknown")
            for source, phase, step_s, basis in steps
        ),
        times=run.times,
        measured=run.measured,
        latency=request.request_latency(run),
        open_operations=run.open_operations,
    )


def events_of(run: RunRecord) -> pl.DataFrame:
    """The event table of a run, read from its folder or made from its rows."""
    return table_of(run.rows) if run.path is None else read_events(run.path)


T = TypeVar("T")

NO_COLLECTIVES = "the run has no collectives"
NO_TIMELINE = "the run has no timeline of single executions"
NO_STEP = "no step has a duration: the run is neither timed nor modeled"
NO_PROFILE = "only runs on live devices have a profile"
NO_MODEL = "the model or the request is unknown"
NO_MEMORY = "the run has no memory figures"
NO_CHIP = "the chip is unknown"
NOT_MODELED = "no step of the run is modeled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """The reason why a run lacks a metric. A metric that cannot be computed is never 0."""

    reason: str


Result = pl.DataFrame | Unavailable


class _MissingInputError(Exception):
    """The run lacks an input of a metric; the message is the reason."""


class Metric(NamedTuple):
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


def _no_collectives(inputs: MetricInputs) -> str:
    known = f"no collective is known: {', '.join(map(str, inputs.open_operations))}"
    return known if inputs.open_operations else NO_COLLECTIVES


def _events(inputs: MetricInputs) -> pl.DataFrame:
    _filled(collectives(inputs.events), _no_collectives(inputs))
    return inputs.events


def _executions(inputs: MetricInputs) -> pl.DataFrame:
    return _filled(executions(inputs), _no_collectives(inputs))


def _timeline(inputs: MetricInputs) -> pl.DataFrame:
    timeline = _need(inputs.timeline, NO_TIMELINE)
    _filled(timed(timeline), NO_TIMELINE)
    return timeline


def _link_traffic(inputs: MetricInputs) -> pl.DataFrame:
    topology = _need(inputs.experiment.topology, NO_CHIP)
    no_links = "no traffic crosses torus links: the slice is one chip or not a TPU"
    return _filled(volume.link_traffic(_events(inputs), topology), no_links)


def _bandwidth(inputs: MetricInputs) -> pl.DataFrame:
    trace = None if inputs.measured is None else inputs.measured.trace
    chip = inputs.experiment.chip
    no_times = "no collective has a duration: the run is neither timed nor modeled"
    return _filled(
        volume.bandwidth(inputs.events, chip, trace.transfers if trace else ()), no_times
    )


def _bubble(inputs: MetricInputs) -> pl.DataFrame:
    plan, n_microbatches = inputs.experiment.plan, inputs.experiment.microbatches
    n = _need(plan.pp if plan and plan.pp > 1 else None, "the plan has no pipeline")
    rows = [(p.value, n, m, bubble_frac(n, m)) for p, m in n_microbatches.items()]
    names = ("phase", "n_stages", "n_microbatches", "bubble_frac")
    return pl.DataFrame(rows, schema=names, orient="row")


def _mfu(inputs: MetricInputs) -> pl.DataFrame:
    experiment = inputs.experiment
    topology, workload = _need(experiment.topology, NO_CHIP), _need(experiment.workload, NO_MODEL)
    model = _need(experiment.architecture, NO_MODEL)
    machine = (topology.n_chips, topology.chip, workload.weight_dtype)
    flops = {step.phase: model_flops(model, workload, step.phase) for step in inputs.steps}
    figures = ((s, flops[s.phase], mfu(flops[s.phase], s.step_s, *machine)) for s in inputs.steps)
    return _step_rows(figures, "model_flops", "mfu_frac")


def _mbu(inputs: MetricInputs) -> pl.DataFrame:
    chip = _need(inputs.experiment.chip, NO_CHIP)
    times = (time for time in inputs.times if time.phase is Phase.DECODE and time.hbm_bytes)
    read = {time.source: time.hbm_bytes for time in times}
    strongest = _need(
        next((s for s in reversed(Source) if s in read), None),
        "no source knows what a decode step reads",
    )

    decode = (step for step in inputs.steps if step.phase is Phase.DECODE)
    known = ((step, read.get(step.source, read[strongest])) for step in decode)
    figures = ((step, n_bytes, mbu(n_bytes, step.step_s, chip)) for step, n_bytes in known)
    return _step_rows(figures, "read_bytes", "mbu_frac")


def _step_rows(
    figures: Iterable[tuple[StepDuration, float, float | None]], *names: str
) -> pl.DataFrame:
    rows = [(s.source.value, s.phase.value, s.step_s, s.basis, *values) for s, *values in figures]
    types = dict.fromkeys(("source", "phase"), pl.String) | {"step_s": pl.Float64}
    types |= {"time_basis": pl.String} | dict.fromkeys(names, pl.Float64)
    return _filled(pl.DataFrame(rows, schema=types, orient="row"), NO_STEP)


def _memory(inputs: MetricInputs) -> pl.DataFrame:
    memory = _need(inputs.memory or None, NO_MEMORY)
    records = [hbm(source, figures) for source, figures in memory.items()]
    return pl.DataFrame(records, infer_schema_length=None)


def _latency(inputs: MetricInputs) -> pl.DataFrame:
    spreads = asdict(_need(inputs.latency, NO_PROFILE))
    names = ("ttft", "itl", "tpot", "e2e")
    records = [{"latency": name, **spreads[name]} for name in names if spreads[name]]
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


METRICS: tuple[Metric, ...] = (
    Metric("volume", "Volume", "count in operations, bytes",
     volume.volume, lambda run: volume.volume(_events(run))),
    Metric("volume_by_layer", "Volume by layer", "count in operations, bytes",
     volume.volume, lambda run: volume.volume(_events(run), ("layer",))),
    Metric("size_distribution", "Size distribution", "bytes, count in operations",
     volume.size_distribution, lambda run: volume.size_distribution(_events(run))),
    Metric("traffic_matrix", "Traffic matrix", "bytes in one step",
     volume.traffic_matrix, lambda run: volume.traffic_matrix(_events(run))),
    Metric("link_traffic", "Traffic over torus links", "bytes in one step, s",
     volume.link_traffic, _link_traffic),
    Metric("traffic_intervals", "Traffic intervals of an axis",
     "the column `unit` says: s, or operations of the schedule",
     overlap.traffic_intervals, lambda run: overlap.traffic_intervals(_executions(run))),
    Metric("axis_windows", "Windows between axes", "n in changes, s",
     overlap.axis_windows, lambda run: overlap.axis_windows(_executions(run))),
    Metric("bandwidth", "Bandwidth", "bytes/s; fractions of 1",
     volume.bandwidth, _bandwidth),
    Metric("step_time", "Modeled step time", "s; fractions of 1",
     overlap.step_time, lambda run: overlap.step_time(_need(run.times or None, NOT_MODELED))),
    Metric("exposed_by_axis", "Modeled exposed time by axis", "s",
     overlap.exposed_by_axis, lambda run: overlap.exposed_by_axis(_need(run.times or None, NOT_MODELED))),
    Metric("part_costs", "Modeled cost of each part", "s, FLOPs, bytes in one step",
     overlap.part_costs, lambda run: overlap.part_costs(_need(run.times or None, NOT_MODELED))),
    Metric("overlap", "Overlap, exposed and idle time", "s; fractions of 1",
     overlap.overlap, lambda run: overlap.overlap(_timeline(run))),
    Metric("exposed_by", "Exposed time by axis, from the timeline", "s",
     overlap.exposed_by, lambda run: overlap.exposed_by(_timeline(run))),
    Metric("bubble", "Pipeline bubble", "fraction of 1",
     bubble_frac, _bubble),
    Metric("device_idle", "Load and idle time of devices", "s; fractions of 1",
     utilization.device_idle, lambda run: utilization.device_idle(_need(run.measured, NO_PROFILE).loads)),
    Metric("load_imbalance", "Load imbalance", "1 is balanced",
     utilization.load_imbalance, lambda run: utilization.load_imbalance(_need(run.measured, NO_PROFILE).loads)),
    Metric("waiting", "Wait and wire time", "s; fractions of 1",
     utilization.waiting, lambda run: utilization.waiting(_need(run.measured, NO_PROFILE).times)),
    Metric("mfu", "MFU", "FLOPs; fraction of 1",
     mfu, _mfu),
    Metric("mbu", "MBU", "bytes; fraction of 1",
     mbu, _mbu),
    Metric("hbm", "Memory", "bytes; fraction of 1",
     hbm, _memory),
    Metric("latency", "Latency of requests", "s, n in requests or steps",
     request.latency_of, _latency),
)  # fmt: skip


def metrics_of(inputs: MetricInputs) -> dict[str, Result]:
    """Every metric of a run by its name, or the reason why the run lacks it."""
    return {metric.name: metric.compute(inputs) for metric in METRICS}
