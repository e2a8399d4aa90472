"""Puts together what commands made: a run with its manifest, from an experiment and its rows."""

import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

from meshscope import __version__
from meshscope.cost.predicted import predicted_times, timed_predictions
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Measured
from meshscope.events.step_time import StepTime
from meshscope.interconnect.profile import ChipProfile
from meshscope.prediction import predict
from meshscope.prediction.memory import predicted_memory
from meshscope.spec.experiment import Experiment
from meshscope.spec.experiment_record import ExperimentRecord
from meshscope.spec.plan.memory import Memory
from meshscope.store.run import Manifest, RunRecord

# Environment variables that change what the compiler makes of a program.
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION")


def predicted_run(experiment: Experiment, profile: ChipProfile | None = None) -> RunRecord:
    """The prediction as a run in memory, with times by a measured chip profile or published figures."""
    return RunRecord(
        path=None,
        manifest=new_manifest(Source.PREDICTED, experiment.record, phases=experiment.phases),
        rows=tuple(timed_predictions(predict(experiment), experiment, profile)),
        memory={Source.PREDICTED: predicted_memory(experiment)},
        times=predicted_times(experiment, profile),
    )


class Outcome(Protocol):
    """What the compiler gave, or live devices: `rows` are compiled ones, and perhaps measured ones."""

    @property
    def rows(self) -> Sequence[Collective]: ...  # noqa: D102

    @property
    def memory(self) -> Memory: ...  # noqa: D102  by the compiler's account

    @property
    def versions(self) -> Mapping[str, str]: ...  # noqa: D102

    @property
    def seconds(self) -> Mapping[str, float]: ...  # noqa: D102

    @property
    def flags(self) -> Mapping[str, str]: ...  # noqa: D102


def run_of(
    experiment: Experiment,
    predicted: RunRecord,
    outcome: Outcome,
    *,
    measured: Measured | None = None,
    times: Iterable[StepTime] = (),
) -> RunRecord:
    """The prediction and what came of it as a run in memory; `times` are of the compiled steps."""
    return RunRecord(
        path=None,
        manifest=new_manifest(
            Source.COMPILED if measured is None else Source.MEASURED,
            experiment.record,
            phases=experiment.phases,
            versions=outcome.versions,
            seconds=outcome.seconds,
            flags=outcome.flags,
        ),
        rows=(*predicted.rows, *outcome.rows),
        memory={**predicted.memory, Source.COMPILED: outcome.memory},
        measured=measured,
        times=(*predicted.times, *times),
    )


def new_manifest(  # noqa: PLR0913  what a manifest holds
    source: Source,
    experiment: ExperimentRecord,
    *,
    phases: Iterable[Phase],
    versions: Mapping[str, str] | None = None,
    seconds: Mapping[str, float] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Manifest:
    """How this process makes the run, now; `versions` and `flags` are those of the compiler."""
    return Manifest(
        source=source,
        experiment=experiment,
        phases=tuple(phases),
        command=("meshscope", *sys.argv[1:]),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={
            "meshscope": __version__,
            "python": platform.python_version(),
            **(versions or {}),
        },
        flags={name: os.environ[name] for name in FLAGS if name in os.environ} | dict(flags or {}),
        seconds=seconds or {},
    )
