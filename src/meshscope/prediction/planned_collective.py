"""Meeting points: where devices of a plan meet in one step, and the rows of the event table that follow."""

from dataclasses import dataclass

from meshscope.events.collective import Collective, predicted_collective
from meshscope.events.enums import Kind, Part, Phase
from meshscope.spec.experiment import Experiment
from meshscope.spec.plan.mesh import Groups
from meshscope.spec.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One step of a phase: `n_tokens` new tokens of every sequence; the request takes `n_steps` of them."""

    phase: Phase
    n_tokens: int
    n_steps: int


def steps_of(workload: Workload) -> tuple[PlannedStep, ...]:
    """Prefill reads the whole prompt; decode, absent when one token is asked for, makes one token a step."""
    prefill = PlannedStep(phase=Phase.PREFILL, n_tokens=workload.prompt, n_steps=1)
    decode = PlannedStep(phase=Phase.DECODE, n_tokens=1, n_steps=workload.n_decode_steps)
    return (prefill, decode) if decode.n_steps else (prefill,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """A point of the program where the devices of each group meet: what they do, and with which array."""

    part: Part
    kind: Kind
    axis: str
    groups: Groups
    shape: tuple[int, ...]
    dtype: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The meetings of one pipeline stage in one step, in program order; `index` is None without a pipeline.

    `layers` holds each layer of the stage with its meetings.
    """

    before: tuple[PlannedCollective, ...]
    layers: tuple[tuple[int, tuple[PlannedCollective, ...]], ...]
    after: tuple[PlannedCollective, ...]
    index: int | None = None


def rows_of(stage: Stage, step: PlannedStep, experiment: Experiment) -> list[Collective]:
    """The stage's meetings as rows of the event table, in program order."""

    def rows(meetings: tuple[PlannedCollective, ...], layer: int | None) -> list[Collective]:
        return [_row(meeting, layer, stage.index, step, experiment) for meeting in meetings]

    of_layers = [row for layer, meetings in stage.layers for row in rows(meetings, layer)]
    return [*rows(stage.before, None), *of_layers, *rows(stage.after, None)]


def _row(
    meeting: PlannedCollective,
    layer: int | None,
    stage: int | None,
    step: PlannedStep,
    experiment: Experiment,
) -> Collective:
    return predicted_collective(
        phase=step.phase,
        layer=layer,
        part=meeting.part,
        kind=meeting.kind,
        axis=meeting.axis,
        groups=meeting.groups,
        dtype=meeting.dtype,
        shape=meeting.shape,
        count=meeting.count,
        n_steps=step.n_steps,
        stage=stage,
        crosses_slices=experiment.crosses_slices(meeting.groups),
    )
