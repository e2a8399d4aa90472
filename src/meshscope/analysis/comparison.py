"""Comparisons of sources: the prediction with the compiled program of one run, or two runs, and how they differ."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from meshscope.analysis.join import Comparison, compare
from meshscope.errors import read_only
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.hardware.chips import ChipKind
from meshscope.plans.mesh import Mesh
from meshscope.plans.plan import MESH_AXES
from meshscope.serialize import picked
from meshscope.store.run import RunRecord
from meshscope.units import DTYPE_BITS


def with_axes_of(run: RunRecord, other: RunRecord) -> RunRecord:
    """The run with rows and times of equal axes under the other run's names; other axes keep theirs.

    Axes of two plans keep their names: fsdp means something else than the pp and tp of the same devices.
    """
    mesh, known = (Mesh(axes=tuple(one.manifest.experiment.mesh.items())) for one in (run, other))
    is_alike = mesh.n_devices == known.n_devices
    if mesh.names == known.names or not mesh.axes or not known.axes or not is_alike:
        return run
    labels = {row.axis for row in run.rows}
    for time in run.times:
        labels |= {*time.exposed_by_axis_s, *(spent.axis for spent in time.activities)}
    names: dict[str | None, str] = {}
    for label in labels - {None}:
        axes = (label or "").split("+")  # such as data+model
        if set(axes) <= set(mesh.names):
            name = known.axis_of_groups(mesh.groups(*axes))
            if name is not None and not {*axes, *name.split("+")} <= set(MESH_AXES):
                names[label] = name
    if all(label == name for label, name in names.items()):
        return run
    times = (
        replace(
            time,
            exposed_by_axis_s={names.get(a, a): s for a, s in time.exposed_by_axis_s.items()},
            activities=tuple(
                replace(spent, axis=names.get(spent.axis, spent.axis)) for spent in time.activities
            ),
        )
        for time in run.times
    )
    rows = (replace(row, axis=names.get(row.axis, row.axis)) for row in run.rows)
    return replace(run, rows=tuple(rows), times=tuple(times))


NARROW = frozenset({"bf16", "f16"})
WIDE = "f32"
_DTYPES = {"weight_dtype": "weights", "activation_dtype": "activations", "cache_dtype": "cache"}
# The settings that change the work itself.
_WORK = frozenset({"model", "layers", "batch", "prompt", "output", *_DTYPES.values()})
_PROGRAM = ("frontend", "partitioner", "context", "kernels", "dispatch", "capacity_factor")
COMPILERS = ("jax", "libtpu", "torch_xla")  # the versions that determine the compiled program


@read_only
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
            name=name, left=ours.get(name), right=theirs.get(name), is_work=name in _WORK
        )
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
        and (name not in COMPILERS or name in ours.keys() & theirs)
    ]


def _settings(run: RunRecord) -> Iterator[tuple[str, str]]:
    experiment, workload = run.manifest.experiment, run.manifest.experiment.workload
    if experiment.model is not None:
        yield "model", str(experiment.model_name)
        yield "layers", str(experiment.n_layers)
    fields: list[tuple[object, dict[str, str]]] = [
        (workload, {"batch": "batch", "prompt": "prompt", "output": "output"}),
        (workload, _DTYPES),
        (experiment.topology, {"name": "slice"}),
        (experiment, {"layout": "plan", "engine": "engine"}),
        (experiment.program, {name: name.replace("_", " ") for name in _PROGRAM}),
        (experiment, {"layers_are": "layers are"}),
    ]
    for record, labels in fields:
        for name, label in labels.items():
            if (value := getattr(record, name, None)) is not None:
                yield label, str(value)
    yield from ((n, run.manifest.versions[n]) for n in COMPILERS if n in run.manifest.versions)


def compare_sides(left: Side, right: Side) -> Comparison:
    """The full outer join of the collectives of two sides.

    The CPU backend promotes 16-bit collectives to float32. The left side is widened likewise, so that
    the promotion is not a difference.
    """
    rows, other_rows = (side.run.rows_of(side.source) for side in (left, right))
    if runs_on_cpu(left.run) and right.source is not Source.PREDICTED:
        rows, _ = promoted(rows, other_rows)
    return compare(rows, other_rows)


def source_side(run: RunRecord, source: Source) -> Side:
    """A source of a run, named after the source."""
    return Side(name=source.value, run=run, source=source)


def compare_sources(
    run: RunRecord, source: Source | None = None, *, left: Source = Source.PREDICTED
) -> Comparison | None:
    """`left`, by default the prediction, compared with `source`, by default the strongest source.

    None if the run lacks one of them, or is a trace that names no parts of the model.
    """
    source = source or run.manifest.source
    if source is left or not {left, source} <= set(_comparable_sources(run)):
        return None
    return compare_sides(source_side(run, left), source_side(run, source))


def compare_all_sources(run: RunRecord) -> dict[tuple[Source, Source], Comparison]:
    """The comparison of every pair of the run's sources, (weaker, stronger)."""
    return {
        (a, b): compare_sides(source_side(run, a), source_side(run, b))
        for a, b in combinations(_comparable_sources(run), 2)
    }


def _comparable_sources(run: RunRecord) -> tuple[Source, ...]:
    """() for a trace whose rows have no part of the model, which a row by row join needs."""
    is_trace = run.measured is not None and run.measured.trace is not None
    has_parts = any(row.part is not None for row in run.rows_of(Source.MEASURED))
    return () if is_trace and not has_parts else run.sources


def n_promoted_collectives(run: RunRecord) -> int:
    """Number of 16-bit collectives in one step that the CPU backend performs in float32."""
    if not runs_on_cpu(run):
        return 0
    return promoted(run.rows_of(Source.PREDICTED), run.rows_of(Source.COMPILED))[1]


def runs_on_cpu(run: RunRecord) -> bool:
    """Whether the run's devices are virtual CPU devices."""
    chip = run.manifest.experiment.chip
    return chip is not None and chip.kind is ChipKind.CPU


def promoted(
    predicted: Iterable[Collective], compiled: Iterable[Collective]
) -> tuple[tuple[Collective, ...], int]:
    """The predicted rows as the backend performs them, and how many operations of one step are promoted.

    A row is in float32 if `compiled` has the same collective in float32 only.
    """

    def identity(row: Collective) -> tuple[Hashable, ...]:
        return (row.phase, row.part, row.kind, row.axis, row.shape)

    dtypes: dict[tuple[Hashable, ...], set[str | None]] = {}
    for row in compiled:
        dtypes.setdefault(identity(row), set()).add(row.dtype)
    rows: list[Collective] = []
    count = 0
    for row in predicted:
        if row.dtype in NARROW and dtypes.get(identity(row)) == {WIDE}:
            factor = DTYPE_BITS[WIDE] // DTYPE_BITS[row.dtype]
            sizes = picked(row, "payload_bytes", "wire_bytes").items()
            wide = {name: None if size is None else size * factor for name, size in sizes}
            rows.append(replace(row, dtype=WIDE, **wide))
            count += row.count
        else:
            rows.append(row)
    return tuple(rows), count


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How collectives run: `kind` over `axis` as `opcode`, by `algorithm` (emitter and strategy)."""

    phase: Phase | None
    kind: str
    axis: str | None
    opcode: str
    is_async: bool | None
    algorithm: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormChange:
    """The executions in one step of a form that only one side has, or has more often."""

    form: Form
    left: int
    right: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerChange:
    """One program under two compilers. Bytes are (left, right) on one device; None if unknown."""

    total_bytes: tuple[int | None, int | None]
    temp_bytes: tuple[int | None, int | None]
    forms: tuple[FormChange, ...]


def compiler_change(
    left: Side, right: Side, differences: Iterable[ExperimentDifference]
) -> CompilerChange | None:
    """The change; None unless the sides are compiled and differ in the versions of the compiler alone."""
    names = {difference.name for difference in differences}
    is_compiled = left.source is right.source is Source.COMPILED
    if not is_compiled or not names or not names <= set(COMPILERS):
        return None
    memories = [side.run.memory.get(Source.COMPILED) for side in (left, right)]
    total, temp = (
        tuple(None if memory is None else getattr(memory, name) for memory in memories)
        for name in ("total_bytes", "temp_bytes")
    )
    before, after = (_forms(side.run.rows_of(side.source)) for side in (left, right))
    forms = (
        FormChange(form=form, left=before[form], right=after[form])
        for form in dict.fromkeys((*before, *after))
        if before[form] != after[form]
    )
    return CompilerChange(
        total_bytes=(total[0], total[1]), temp_bytes=(temp[0], temp[1]), forms=tuple(forms)
    )


def _forms(rows: Iterable[Collective]) -> Counter[Form]:
    forms: Counter[Form] = Counter()
    for row in rows:
        names = ("phase", "axis", "opcode", "is_async", "algorithm")
        forms[Form(kind=row.kind.value, **picked(row, *names))] += row.count
    return forms
