"""Puts together what commands made: a run with its manifest, from an experiment and its rows."""

import os
import platform
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from meshscope import __version__
from meshscope.plan.experiment import Experiment
from meshscope.plan.memory import Memory
from meshscope.predict import predict
from meshscope.predict.memory import predicted_memory
from meshscope.rundir.run import Manifest, Run
from meshscope.table.kinds import Phase, Source

# Environment variables that change what the compiler makes of a program.
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION")


def predicted_run(experiment: Experiment) -> Run:
    """The prediction as a run in memory."""
    return Run(
        path=None,
        manifest=new_manifest(Source.PREDICTED, experiment.as_dict(), phases=phases_of(experiment)),
        rows=tuple(predict(experiment)),
        memory={Source.PREDICTED: memory_of(predicted_memory(experiment))},
    )


def phases_of(experiment: Experiment) -> tuple[Phase, ...]:
    """Prefill, and decode when the request makes more than one token."""
    has_decode = experiment.workload.n_decode_steps > 0
    return (Phase.PREFILL, Phase.DECODE) if has_decode else (Phase.PREFILL,)


def memory_of(figures: Any) -> Memory:
    """Memory from any object with its fields."""
    return Memory(**{name: getattr(figures, name) for name in Memory.__slots__})


def new_manifest(
    source: Source,
    experiment: Mapping[str, Any],
    *,
    phases: Iterable[Phase],
    versions: Mapping[str, str] | None = None,
    seconds: Mapping[str, float] | None = None,
) -> Manifest:
    """How this process makes the run, now; `versions` are those of the compiler."""
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
        flags={name: os.environ[name] for name in FLAGS if name in os.environ},
        seconds=seconds or {},
    )
