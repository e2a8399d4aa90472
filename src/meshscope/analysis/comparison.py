"""Comparisons of sources: the prediction with the compiled program of one run, or two runs, and how they differ."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

from meshscope.analysis.join import Comparison, compare
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.hardware.chips import ChipKind
from meshscope.store.run import RunRecord
from meshscope.units import DTYPE_BITS

NARROW = frozenset({"bf16", "f16"})
WIDE = "f32"
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


def compare_sides(left: Side, right: Side) -> Comparison:
    """The full outer join of the collectives of two sides.

    The CPU backend promotes 16-bit collectives to float32. The left side is widened likewise, so that
    the promotion is not a difference.
    """
    rows, other_rows = (side.run.rows_of(side.source) for side in (left, right))
    if runs_on_cpu(left.run) and right.source is not Source.PREDICTED:
        rows = promotion_of(rows, other_rows).rows
    return compare(rows, other_rows)


def compare_sources(
    run: RunRecord, source: Source | None = None, *, left: Source = Source.PREDICTED
) -> Comparison | None:
    """`left`, by default the prediction, compared with `source`, by default the strongest source.

    None if the run lacks one of them, or is a trace that names no parts of the model.
    """
    source = source or run.manifest.source
    if source is left or not {left, source} <= set(run.sources) or is_without_parts(run):
        return None
    return compare_sides(source_side(run, left), source_side(run, source))


def compare_all_sources(run: RunRecord) -> dict[tuple[Source, Source], Comparison]:
    """The comparison of every pair of the run's sources, (weaker, stronger)."""
    if is_without_parts(run):
        return {}
    pairs = [(a, b) for i, a in enumerate(run.sources) for b in run.sources[i + 1 :]]
    return {(a, b): compare_sides(source_side(run, a), source_side(run, b)) for a, b in pairs}


def is_without_parts(run: RunRecord) -> bool:
    """Whether the run is a trace whose rows have no part of the model, which a row by row join needs."""
    is_trace = run.measured is not None and run.measured.trace is not None
    return is_trace and all(row.part is None for row in run.rows_of(Source.MEASURED))


def n_promoted_collectives(run: RunRecord) -> int:
    """Number of 16-bit collectives in one step that the CPU backend performs in float32."""
    if not runs_on_cpu(run):
        return 0
    return promotion_of(run.rows_of(Source.PREDICTED), run.rows_of(Source.COMPILED)).count


def runs_on_cpu(run: RunRecord) -> bool:
    """Whether the run's devices are virtual CPU devices."""
    chip = run.manifest.experiment.chip
    return chip is not None and chip.kind is ChipKind.CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """The predicted rows as the backend performs them; `count` operations of one step are promoted."""

    rows: tuple[Collective, ...]
    count: int


def promotion_of(predicted: Iterable[Collective], compiled: Iterable[Collective]) -> Promotion:
    """The predicted rows, in float32 if `compiled` has the same collective in float32 only."""
    dtypes: dict[tuple[Hashable, ...], set[str | None]] = {}
    for row in compiled:
        dtypes.setdefault(_identity(row), set()).add(row.dtype)
    rows: list[Collective] = []
    count = 0
    for row in predicted:
        is_wide = row.dtype in NARROW and dtypes.get(_identity(row)) == {WIDE}
        rows.append(_widened(row) if is_wide else row)
        count += row.count * is_wide
    return Promotion(rows=tuple(rows), count=count)


def _identity(row: Collective) -> tuple[Hashable, ...]:
    return (row.phase, row.part, row.kind, row.axis, row.shape)


def _widened(row: Collective) -> Collective:
    assert row.dtype is not None
    factor = DTYPE_BITS[WIDE] // DTYPE_BITS[row.dtype]
    return replace(
        row,
        dtype=WIDE,
        payload_bytes=None if row.payload_bytes is None else row.payload_bytes * factor,
        wire_bytes=None if row.wire_bytes is None else row.wire_bytes * factor,
    )
