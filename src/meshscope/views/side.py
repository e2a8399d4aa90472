"""One side of a comparison, and in what it differs from the other in what was asked."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
    asked = run.manifest.experiment
    model, workload = asked.get("model"), asked.get("workload") or {}
    if model is not None:
        yield "model", (str(model.get("name")), True)
        yield "layers", (str(model.get("n_layers")), True)
    for name in ("batch", "prompt", "output"):
        yield from _told(workload, name, name, is_work=True)
    for name, words in DTYPES.items():
        yield from _told(workload, name, words, is_work=True)
    for name, words in (("topology", "slice"), ("plan", "plan"), ("engine", "engine")):
        yield from _told(asked, name, words)
    program = asked.get("program") or {}
    for name in PROGRAM:
        yield from _told(program, name, name.replace("_", " "))
    yield from _told(asked, "layers_are", "layers are")
    for name in COMPILERS:
        yield from _told(run.manifest.versions, name, name)


def _told(
    values: Mapping[str, Any], name: str, words: str, *, is_work: bool = False
) -> Iterator[tuple[str, tuple[str, bool]]]:
    if values.get(name) is not None:
        yield words, (str(values[name]), is_work)
