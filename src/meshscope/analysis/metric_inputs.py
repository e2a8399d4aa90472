"""The inputs of all metrics: the event table of one run and everything else known about it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import polars as pl

from meshscope.analysis.overlap import timed
from meshscope.analysis.request import Latency, basis_of, measured_step_s, request_latency
from meshscope.analysis.timeline import last_step, read_timeline, sampling_notes
from meshscope.analysis.volume import WHERE, collectives
from meshscope.events.collective import OtherOperation
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Measured
from meshscope.events.schema import table_of
from meshscope.events.step_time import StepTime
from meshscope.hardware.topology import Topology
from meshscope.model.model import Model
from meshscope.plans.memory import Memory
from meshscope.plans.workload import Workload
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
    `n_microbatches` maps the phases of a pipelined plan to their number of microbatches.
    """

    events: pl.DataFrame
    timeline: pl.DataFrame | None = None
    sampled: tuple[str, ...] = ()
    topology: Topology | None = None
    n_devices: int | None = None
    n_stages: int = 1
    n_microbatches: Mapping[Phase, int] = field(default_factory=dict[Phase, int])
    model: Model | None = None
    workload: Workload | None = None
    memory: Mapping[Source, Memory] = field(default_factory=dict[Source, Memory])
    steps: tuple[StepDuration, ...] = ()
    times: tuple[StepTime, ...] = ()
    measured: Measured | None = None
    latency: Latency | None = None
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
    experiment = run.manifest.experiment
    latency = request_latency(run)
    events = events_of(run)
    timeline = None if run.path is None else read_timeline(run.path, events)
    return MetricInputs(
        events=events,
        timeline=timeline,
        sampled=tuple(sampling_notes(run.measured, timeline)),
        topology=experiment.topology,
        n_devices=experiment.n_devices,
        n_stages=1 if experiment.plan is None else experiment.plan.pp,
        n_microbatches=dict(experiment.microbatches),
        model=experiment.architecture,
        workload=experiment.workload,
        memory=run.memory,
        steps=tuple(_steps(run)),
        times=run.times,
        measured=run.measured,
        latency=latency,
        open_operations=run.open_operations,
    )


def events_of(run: RunRecord) -> pl.DataFrame:
    """The event table of a run, read from its folder or made from its rows."""
    return table_of(run.rows) if run.path is None else read_events(run.path)


def _steps(run: RunRecord) -> Iterator[StepDuration]:
    """Modeled steps, then the mean steps of the timed requests."""
    for time in run.times:
        basis = basis_of([time]) or "unknown"
        yield StepDuration(
            source=time.source, phase=time.phase, step_s=time.step.value_s, basis=basis
        )
    measured = Source.MEASURED
    for phase, step_s in measured_step_s(run).items():
        yield StepDuration(source=measured, phase=phase, step_s=step_s, basis=measured.value)
