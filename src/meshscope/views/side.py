"""One side of a comparison, and in what it differs from the other in what was asked."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshscope.events.enums import Phase, Source
from meshscope.store.run import RunRecord

DTYPES = {"weight_dtype": "weights", "activation_dtype": "activations", "cache_dtype": "cache"}
PROGRAM = ("frontend", "partitioner", "context", "kernels", "dispatch", "capacity_factor")
COMPILERS = ("jax", "libtpu", "torch_xla")  # whose versions decide what is compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: its name in the text, the run, and which of its sources."""

    name: str
    run: RunRecord
    source: Source

    def has_phase(self, phase: Phase | None) -> bool:
        """Whether the side says anything of the phase, that it sends nothing included."""
        known = {row.phase for row in self.run.rows_of(self.source)}
        return phase in known or phase in self.run.manifest.phases


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that was asked of one side in one way and of the other in another; null is not known.

    `is_work`: it decides what has to be computed, so that both sides do not do the same.
    """

    name: str
    left: str | None
    right: str | None
    is_work: bool = False


def asked_differences(left: Side, right: Side) -> list[Difference]:
    """What was not asked alike: model, request, slice, plan, program, and versions that both sides have."""
    ours, theirs = (dict(_asked(side.run)) for side in (left, right))
    return [
        Difference(
            name=name,
            left=ours.get(name, (None,))[0],
            right=theirs.get(name, (None,))[0],
            is_work=(ours.get(name) or theirs[name])[1],
        )
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
        and (name not in COMPILERS or name in ours.keys() & theirs)
    ]


def _asked(run: RunRecord) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Names, with the value and whether it decides what has to be computed."""
    experiment = run.manifest.experiment
    if experiment.model is not None:
        yield "model", (str(experiment.model_name), True)
        yield "layers", (str(experiment.n_layers), True)
    for name in ("batch", "prompt", "output"):
        yield from _known(experiment.workload, name, name, is_work=True)
    for name, label in DTYPES.items():
        yield from _known(experiment.workload, name, label, is_work=True)
    yield from _known(experiment.topology, "name", "slice")
    yield from _known(experiment, "plan", "plan")
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
    value = getattr(record, name, None)
    if value is not None:
        yield label, (str(value), is_work)
