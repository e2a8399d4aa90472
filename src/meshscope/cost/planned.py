"""Types of the prediction: a step is a list of planned collectives, which become event-table rows."""

from dataclasses import dataclass, replace
from math import inf

from meshscope.events.collective import Collective, Groups, predicted_collective
from meshscope.events.enums import Kind, Part, Phase
from meshscope.plans.experiment import Experiment
from meshscope.serialize import picked
from meshscope.units import array_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One step of a phase: `n_tokens` new tokens per sequence, repeated `n_steps` times per request.

    In decode, each token counts as a separate sequence. A prefill step in chunks has the
    tokens of one chunk, and collectives that run once per chunk; `is_cut` if a chunk is a part of a prompt.
    """

    phase: Phase
    n_tokens: int
    n_steps: int
    is_cut: bool = False


def planned_steps(experiment: Experiment) -> tuple[PlannedStep, ...]:
    """The steps of the experiment's phases: one prefill over the whole prompt, then the decode steps."""
    n_tokens = experiment.n_positions(Phase.PREFILL)
    prefill = PlannedStep(
        phase=Phase.PREFILL, n_tokens=n_tokens, n_steps=1, is_cut=experiment.has_cut_prompts
    )
    n_decode_steps = experiment.workload.n_decode_steps
    decode = PlannedStep(phase=Phase.DECODE, n_tokens=1, n_steps=n_decode_steps)
    return tuple(step for step in (prefill, decode) if step.phase in experiment.phases)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedFor:
    """Numbers of sequences on a device at which the compiler uses an all-reduce instead.

    Numbers up to `n_sequences` with a payload of more than `over_bytes`, and numbers that `multiple` does not
    divide.
    """

    n_sequences: float
    over_bytes: float = 0
    multiple: int = 1


NEVER_REDUCED, ALWAYS_REDUCED = ReducedFor(n_sequences=0), ReducedFor(n_sequences=inf)
REDUCED_FOR_ONE = ReducedFor(n_sequences=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """One collective of the program: its kind, device groups and payload (`shape`, `dtype`).

    A device has `n_sequences` in it; at some counts it becomes an all-reduce (`reduced_for`).
    """

    part: Part
    kind: Kind
    axis: str
    groups: Groups  # of positions in the mesh; of devices in a row
    shape: tuple[int, ...]
    dtype: str
    count: int = 1
    n_sequences: int = 1
    reduced_for: ReducedFor = NEVER_REDUCED

    @property
    def payload_bytes(self) -> int:
        """Bytes of the logical array."""
        return array_bytes(self.dtype, self.shape)

    @property
    def executed_as(self) -> Kind | None:
        """The kind that the compiler turns it into, if different."""
        rule = self.reduced_for
        is_small = self.n_sequences <= rule.n_sequences and self.payload_bytes > rule.over_bytes
        return Kind.ALL_REDUCE if is_small or self.n_sequences % rule.multiple else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """The collectives of one pipeline stage in one step, in program order.

    `layers` pairs each layer index of the stage with its collectives. `index` is None without a
    pipeline, and for collectives that all stages share.
    """

    before: tuple[PlannedCollective, ...]
    layers: tuple[tuple[int, tuple[PlannedCollective, ...]], ...]
    after: tuple[PlannedCollective, ...]
    index: int | None = None


def repeated(stage: PlannedStage, n_times: int) -> PlannedStage:
    """The stage with every collective `n_times` as often; layers of one kind share their tuple."""
    shared: dict[int, tuple[PlannedCollective, ...]] = {}

    def times(collectives: tuple[PlannedCollective, ...]) -> tuple[PlannedCollective, ...]:
        if id(collectives) not in shared:
            more = (replace(one, count=one.count * n_times) for one in collectives)
            shared[id(collectives)] = tuple(more)
        return shared[id(collectives)]

    layers = tuple((index, times(collectives)) for index, collectives in stage.layers)
    return replace(stage, before=times(stage.before), layers=layers, after=times(stage.after))


def stage_rows(stage: PlannedStage, step: PlannedStep, experiment: Experiment) -> list[Collective]:
    """Event-table rows of one stage in program order."""
    mesh = experiment.mesh
    placed: dict[int, Groups] = {}  # by the identity of the groups of positions

    def on_devices(groups: Groups) -> Groups:
        if mesh.order is None:
            return groups
        if id(groups) not in placed:
            placed[id(groups)] = mesh.devices_at(groups)
        return placed[id(groups)]

    def row(planned: PlannedCollective, layer: int | None) -> Collective:
        groups = on_devices(planned.groups)
        return predicted_collective(
            phase=step.phase,
            layer=layer,
            groups=groups,
            **picked(planned, "part", "kind", "axis", "dtype", "shape", "count", "executed_as"),
            n_steps=step.n_steps,
            stage=stage.index,
            crosses_slices=experiment.crosses_slices(groups),
        )

    parts = ((None, stage.before), *stage.layers, (None, stage.after))
    return [row(planned, layer) for layer, collectives in parts for planned in collectives]
