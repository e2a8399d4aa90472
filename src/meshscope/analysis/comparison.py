"""Comparisons of sources: the prediction with the compiled program of one run, or two runs, and how they differ."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from meshscope.analysis.join import Comparison, compare
from meshscope.errors import read_only
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import StepTime
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
    mesh, known = _mesh(run), _mesh(other)
    if mesh.names == known.names or not mesh.axes or not known.axes:
        return run
    labels = {row.axis for row in run.rows} | {
        axis
        for time in run.times
        for axis in (
            *time.exposed_by_axis_s,
            *(spent.axis for spent in time.activities if spent.axis is not None),
        )
    }
    names = {
        label: name
        for label in labels
        if label is not None and (name := _name_in(known, mesh, label)) is not None
    }
    if all(label == name for label, name in names.items()):
        return run
    return replace(
        run,
        rows=tuple(replace(row, axis=names.get(row.axis or "", row.axis)) for row in run.rows),
        times=tuple(_renamed(time, names) for time in run.times),
    )


def _mesh(run: RunRecord) -> Mesh:
    return Mesh(axes=tuple(run.manifest.experiment.mesh.items()))


def _name_in(known: Mesh, mesh: Mesh, label: str) -> str | None:
    """The other mesh's axes with the same groups of positions as `label`, such as `data+model`."""
    axes = label.split("+")
    if mesh.n_devices != known.n_devices or not set(axes) <= set(mesh.names):
        return None
    name = known.axis_of_groups(mesh.groups(*axes))
    is_of_plans = {*axes, *(name or "").split("+")} <= set(MESH_AXES)
    return None if is_of_plans else name


def _renamed(time: StepTime, names: Mapping[str, str]) -> StepTime:
    return replace(
        time,
        exposed_by_axis_s={names.get(a, a): s for a, s in time.exposed_by_axis_s.items()},
        activities=tuple(
            replace(spent, axis=names.get(spent.axis or "", spent.axis))
            for spent in time.activities
        ),
    )


NARROW = frozenset({"bf16", "f16"})
WIDE = "f32"
DTYPES = {"weight_dtype": "weights", "activation_dtype": "activations", "cache_dtype": "cache"}
PROGRAM = ("frontend", "partitioner", "context", "kernels", "dispatch", "capacity_factor")
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


MEMORY_FIELDS = ("total_bytes", "temp_bytes")


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
    values = [
        dict.fromkeys(MEMORY_FIELDS) if memory is None else picked(memory, *MEMORY_FIELDS)
        for memory in memories
    ]
    return CompilerChange(
        **{name: (values[0][name], values[1][name]) for name in MEMORY_FIELDS},
        forms=form_changes(left.run.rows_of(left.source), right.run.rows_of(right.source)),
    )


def form_changes(left: Iterable[Collective], right: Iterable[Collective]) -> tuple[FormChange, ...]:
    """The forms whose number of executions in a step differs."""
    before, after = _forms(left), _forms(right)
    return tuple(
        FormChange(form=form, left=before[form], right=after[form])
        for form in dict.fromkeys((*before, *after))
        if before[form] != after[form]
    )


def _forms(rows: Iterable[Collective]) -> Counter[Form]:
    forms: Counter[Form] = Counter()
    for row in rows:
        names = ("phase", "axis", "opcode", "is_async", "algorithm")
        forms[Form(kind=row.kind.value, **picked(row, *names))] += row.count
    return forms
