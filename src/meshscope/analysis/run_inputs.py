"""A run as metrics see it: its event table with what its manifest and figures tell."""

import polars as pl

from meshscope.analysis.latency import Latency, latency_of
from meshscope.analysis.metric_inputs import MetricInputs, StepDuration
from meshscope.analysis.request_time import basis_of
from meshscope.analysis.timeline import read_timeline
from meshscope.events.enums import Phase, Source
from meshscope.events.schema import table_of
from meshscope.spec.workload import Workload
from meshscope.store.read import read_events
from meshscope.store.run import RunRecord


def metric_inputs(run: RunRecord) -> MetricInputs:
    """What metrics need of a run; figures that it does not have stay unknown."""
    experiment = run.manifest.experiment
    latency = _latency(run, experiment.workload)
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
        steps=(*_modelled_steps(run), *_measured_steps(latency)),
        times=run.times,
        measured=run.measured,
        latency=latency,
    )


def events_of(run: RunRecord) -> pl.DataFrame:
    """The event table of a run, as its folder has it or as its rows make it."""
    return table_of(run.rows) if run.path is None else read_events(run.path)


def _latency(run: RunRecord, workload: Workload | None) -> Latency | None:
    if run.measured is None or workload is None or not run.measured.requests:
        return None
    return latency_of(run.measured.requests, batch=workload.batch, prompt=workload.prompt)


def _modelled_steps(run: RunRecord) -> list[StepDuration]:
    return [
        StepDuration(
            source=time.source,
            phase=time.phase,
            step_s=time.step.value_s,
            basis=basis_of([time]) or "not known",
        )
        for time in run.times
    ]


def _measured_steps(latency: Latency | None) -> list[StepDuration]:
    """Mean steps of the timed requests."""
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
