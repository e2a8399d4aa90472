"""The two sides of a comparison and how their experiments differ."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshscope.events.enums import Phase, Source
from meshscope.store.run import RunRecord

DTYPES = {"weight_dtype": "weights", "activation_dtype": "activations", "cache_dtype": "cache"}
PROGRAM = ("frontend", "partitioner", "context", "kernels", "dispatch", "capacity_factor")
COMPILERS = ("jax", "libtpu", "torch_xla")  # the versions that determine the compiled program


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: a source of a run, and the name that the text gives it."""

    name: str
    run: RunRecord
    source: Source

    def has_phase(self, phase: Phase | None) -> bool:
        """Whether the side covers the phase, with or without collectives."""
        phases = {row.phase for row in self.run.rows_of(self.source)}
        return phase in phases or phase in self.run.manifest.phases


def source_side(run: RunRecord, source: Source) -> Side:
    """A source of a run, named after the source."""
    return Side(name=source.value, run=run, source=source)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentDifference:
    """A setting in which two experiments differ; null is unknown.

    `is_work`: the setting changes the work itself (model, request, dtypes), so that times of the two sides
    are not comparable.
    """

    name: str
    left: str | None
    right: str | None
    is_work: bool = False


def experiment_differences(left: Side, right: Side) -> list[ExperimentDifference]:
    """Differences in model, request, slice, plan and program, and in versions that both sides know."""
    ours, theirs = (dict(_settings(side.run)) for side in (left, right))
    return [
        ExperimentDifference(
            name=name,
            left=ours.get(name, (None,))[0],
            right=theirs.get(name, (None,))[0],
            is_work=(ours.get(name) or theirs[name])[1],
        )
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
        and (name not in COMPILERS or name in ours.keys() & theirs)
    ]


def _settings(run: RunRecord) -> Iterator[tuple[str, tuple[str, bool]]]:
    """(name, (value, whether it changes the work)) of every known setting."""
    experiment = run.manifest.experiment
    if experiment.model is not None:
        yield "model", (str(experiment.model_name), True)
        yield "layers", (str(experiment.n_layers), True)
    for name in ("batch", "prompt", "output"):
        yield from _known(experiment.workload, name, name, is_work=True)
    for name, label in DTYPES.items():
        yield from _known(experiment.workload, name, label, is_work=True)
    yield from _known(experiment.topology, "name", "slice")
    yield from _known(experiment, "layout", "plan")
    yield from _known(experiment, "engine", "engine")
    for name in PROGRAM:
        yield from _known(experiment.program, name, name.replace("_", " "))
    yield from _known(experiment, "layers_are", "layers are")
    for name in COMPILERS:
        if name in run.manifest.versions:
            yield name, (run.manifest.versions[name], False)


def _known(
    record: object, name: str, label: str, *, is_work: bool = False
) -> Iterator[tuple[str, tuple[str, bool]]]:
    """The setting, if the record has a value for it."""
    value = getattr(record, name, None)
    if value is not None:
        yield label, (str(value), is_work)
