"""Compares two sources of a run, such as prediction and compiled program, or two runs: what differs, and why.

Every change is right minus left, in one step of the phase on one device (with a pipeline: one device of
every stage).
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from itertools import combinations

from meshscope.analysis.join import Comparison, compare
from meshscope.analysis.request import basis_of, measured_step_s
from meshscope.analysis.totals import Total, step_total
from meshscope.errors import read_only
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.hardware.chips import ChipKind
from meshscope.plans.experiment_record import LayerForm
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


def _settings(run: RunRecord) -> Iterator[tuple[str, str]]:
    experiment, workload = run.manifest.experiment, run.manifest.experiment.workload
    if run.manifest.timed_layers is not None:
        experiment = replace(experiment, layers_are=LayerForm.UNROLLED)
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
    has_parts = any(row.part is not None for row in run.rows_of(Source.MEASURED))
    return () if run.is_trace and not has_parts else run.sources


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


def _changed_forms(
    left: Side, right: Side, differences: Iterable[ExperimentDifference]
) -> Mapping[Form, tuple[int, int]] | None:
    names = {difference.name for difference in differences}
    is_compiled = left.source is right.source is Source.COMPILED
    if not is_compiled or not names or not names <= set(COMPILERS):
        return None
    of_sides = Counter[Form](), Counter[Form]()
    for forms, side in zip(of_sides, (left, right), strict=True):
        for row in side.run.rows_of(side.source):
            fields = picked(row, "phase", "axis", "opcode", "is_async", "algorithm")
            forms[Form(kind=row.kind.value, **fields)] += row.count
    before, after = of_sides
    every = dict.fromkeys((*before, *after))
    return {form: (before[form], after[form]) for form in every if before[form] != after[form]}


UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceTraffic(Total):
    """The collectives of one part over one axis in one step, and (kind, count) of each kind."""

    kinds: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceChange:
    """The traffic of one part of the model over one axis on both sides."""

    axis: str
    part: str
    left: PlaceTraffic
    right: PlaceTraffic

    @property
    def wire_change(self) -> Fraction:
        """Wire bytes of the right side minus the left side."""
        return self.right.wire_bytes - self.left.wire_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Seconds of one step and their parts. Parts are null if only the whole step is known.

    `low_s` and `high_s` bound the step if the time model provides an interval.
    """

    step_s: float
    low_s: float | None = None
    high_s: float | None = None
    compute_s: float | None = None
    exposed_s: float | None = None
    idle_s: float | None = None
    exposed_by_axis_s: Mapping[str, float] = field(default_factory=dict[str, float])
    by_part_s: Mapping[str, tuple[float, float]] = field(  # (compute, exposed) of each part
        default_factory=dict[str, tuple[float, float]]
    )
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChange:
    """One phase on both sides. A side's cost is null if its step is neither timed nor modeled."""

    phase: Phase | None
    n_steps: tuple[int, int]
    places: tuple[PlaceChange, ...]
    costs: tuple[StepBreakdown | None, StepBreakdown | None]

    @property
    def wire_bytes(self) -> tuple[Fraction, Fraction]:
        """Wire bytes of a step on the left and on the right side."""
        left = sum((place.left.wire_bytes for place in self.places), start=Fraction(0))
        return left, sum((place.right.wire_bytes for place in self.places), start=Fraction(0))

    @property
    def count(self) -> tuple[int, int]:
        """Number of collectives of a step on the left and on the right side."""
        left = sum(place.left.count for place in self.places)
        return left, sum(place.right.count for place in self.places)

    @property
    def request_s(self) -> tuple[float | None, float | None]:
        """Time of all steps of the left and of the right side; null if unknown."""
        left, right = (
            None if cost is None else cost.step_s * n
            for cost, n in zip(self.costs, self.n_steps, strict=True)
        )
        return left, right


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """How two experiments differ, and what that changes in each phase.

    `forms` is null unless compiled programs differ in the versions of the compiler alone: executions in one step
    on the left and on the right side, of each form whose number changes.
    """

    left: Side
    right: Side
    differences: tuple[ExperimentDifference, ...]
    changes: tuple[PhaseChange, ...]
    forms: Mapping[Form, tuple[int, int]] | None = None

    @property
    def shared_changes(self) -> tuple[PhaseChange, ...]:
        """The phases that both sides have."""
        sides = (self.left, self.right)
        return tuple(c for c in self.changes if all(side.has_phase(c.phase) for side in sides))

    def request_s(self, side: int) -> float | None:
        """Seconds of all steps of side 0 (left) or 1 (right); null if a step is unknown."""
        seconds = [change.request_s[side] for change in self.changes]
        known = [one for one in seconds if one is not None]
        return sum(known) if known and len(known) == len(seconds) else None


def explain(left: Side, right: Side) -> Explanation:
    """The differences between two sides in experiment, bytes and seconds."""
    ours, theirs = (dict(_settings(side.run)) for side in (left, right))
    differences = tuple(
        ExperimentDifference(
            name=name, left=ours.get(name), right=theirs.get(name), is_work=name in _WORK
        )
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
        and (name not in COMPILERS or name in ours.keys() & theirs)  # versions that both know
    )
    return Explanation(
        left=left,
        right=right,
        differences=differences,
        changes=phase_changes(
            left.run.rows_of(left.source),
            right.run.rows_of(right.source),
            left_costs=_step_breakdowns(left),
            right_costs=_step_breakdowns(right),
        ),
        forms=_changed_forms(left, right, differences),
    )


def _step_breakdowns(side: Side) -> dict[Phase, StepBreakdown]:
    if side.source is Source.MEASURED:
        return {
            phase: StepBreakdown(step_s=step_s, basis="measured")
            for phase, step_s in measured_step_s(side.run).items()
        }
    return {
        time.phase: StepBreakdown(
            step_s=time.step.value_s,
            by_part_s={p.part or UNKNOWN: (p.compute_s, p.exposed_s) for p in time.parts},
            **picked(time.step, "low_s", "high_s"),
            **picked(time, "compute_s", "exposed_s", "idle_s", "exposed_by_axis_s"),
            basis=basis_of([time]) or UNKNOWN,
        )
        for time in side.run.times_of(side.source)
    }


def phase_changes(
    left: Sequence[Collective],
    right: Sequence[Collective],
    *,
    left_costs: Mapping[Phase, StepBreakdown],
    right_costs: Mapping[Phase, StepBreakdown],
) -> tuple[PhaseChange, ...]:
    """The changes of each phase; within a phase, the place whose bytes change most comes first."""
    phases: set[Phase | None] = {*left_costs, *right_costs, *(row.phase for row in (*left, *right))}
    changes: list[PhaseChange] = []
    for phase in (*Phase, None):
        if phase in phases:
            ours, theirs = ([row for row in rows if row.phase is phase] for rows in (left, right))
            n_steps = (max((row.n_steps for row in rows), default=1) for rows in (ours, theirs))
            costs = (left_costs.get(phase), right_costs.get(phase)) if phase else (None, None)
            before, after = n_steps
            changes.append(
                PhaseChange(
                    phase=phase, n_steps=(before, after), places=_places(ours, theirs), costs=costs
                )
            )
    return tuple(changes)


def _places(left: Iterable[Collective], right: Iterable[Collective]) -> tuple[PlaceChange, ...]:
    sides: dict[tuple[str, str], tuple[list[Collective], list[Collective]]] = {}
    for side, rows in enumerate((left, right)):
        for row in rows:
            place = (row.axis or UNKNOWN, row.part or UNKNOWN)
            sides.setdefault(place, ([], []))[side].append(row)
    places: list[PlaceChange] = []
    for (axis, part), both in sides.items():
        kinds = [Counter[str](), Counter[str]()]
        for counts, rows in zip(kinds, both, strict=True):
            for row in rows:
                counts[row.kind.value] += row.count
        before, after = (
            PlaceTraffic(**asdict(step_total(rows)), kinds=tuple(sorted(counts.items())))
            for counts, rows in zip(kinds, both, strict=True)
        )
        places.append(PlaceChange(axis=axis, part=part, left=before, right=after))
    return tuple(sorted(places, key=lambda place: -abs(place.wire_change)))
