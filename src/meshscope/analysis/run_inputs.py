"""Reads the metric inputs of a run from its rows, manifest and folder."""

import polars as pl

from meshscope.analysis.latency import Latency
from meshscope.analysis.metric_inputs import MetricInputs, StepDuration
from meshscope.analysis.request import basis_of, request_latency
from meshscope.analysis.timeline import read_timeline
from meshscope.events.enums import Phase, Source
from meshscope.events.schema import table_of
from meshscope.store.read import read_events
from meshscope.store.run import RunRecord


def metric_inputs(run: RunRecord) -> MetricInputs:
    """The metric inputs of a run; what the run does not have stays unknown."""
    experiment = run.manifest.experiment
    latency = request_latency(run)
    events = events_of(run)
    return MetricInputs(
        events=events,
        timeline=None if run.path is None else read_timeline(run.path, events),
        topology=experiment.topology,
        n_devices=experiment.n_devices,
        n_stages=experiment.mesh.get("pp", 1),
        n_microbatches=dict(experiment.microbatches),
        model=experiment.architecture,
        workload=experiment.workload,
        memory=run.memory,
        steps=(*_modeled_steps(run), *_measured_steps(latency)),
        times=run.times,
        measured=run.measured,
        latency=latency,
    )


def events_of(run: RunRecord) -> pl.DataFrame:
    """The event table of a run, read from its folder or made from its rows."""
    return table_of(run.rows) if run.path is None else read_events(run.path)


def _modeled_steps(run: RunRecord) -> list[StepDuration]:
    return [
        StepDuration(
            source=time.source,
            phase=time.phase,
            step_s=time.step.value_s,
            basis=basis_of([time]) or "unknown",
        )
        for time in run.times
    ]


def _measured_steps(latency: Latency | None) -> list[StepDuration]:
    """Mean steps of the timed requests, by phase."""
    if latency is None:
        return []
    seconds = {Phase.PREFILL: latency.ttft.mean_s}
    if latency.itl is not None:
        seconds[Phase.DECODE] = latency.itl.mean_s
    basis = Source.MEASURED.value
    return [
        StepDuration(source=Source.MEASURED, phase=phase, step_s=step_s, basis=basis)
        for phase, step_s in seconds.items()
    ]
