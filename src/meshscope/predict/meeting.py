"""Meeting points: where devices of a plan meet in one step, and the rows of the event table that follow."""

from dataclasses import dataclass

from meshscope.plan.experiment import Experiment
from meshscope.plan.mesh import Groups
from meshscope.plan.workload import Workload
from meshscope.table.collective import Collective, predicted_collective
from meshscope.table.kinds import Kind, Part, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a phase: `n_tokens` new tokens of every sequence; the request takes `n_steps` of them."""

    phase: Phase
    n_tokens: int
    n_steps: int


def steps_of(workload: Workload) -> tuple[Step, ...]:
    """Prefill reads the whole prompt; decode, absent when one token is asked for, makes one token a step."""
    prefill = Step(phase=Phase.PREFILL, n_tokens=workload.prompt, n_steps=1)
    decode = Step(phase=Phase.DECODE, n_tokens=1, n_steps=workload.n_decode_steps)
    return (prefill, decode) if decode.n_steps else (prefill,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
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

    before: tuple[Meeting, ...]
    layers: tuple[tuple[int, tuple[Meeting, ...]], ...]
    after: tuple[Meeting, ...]
    index: int | None = None


def rows_of(stage: Stage, step: Step, experiment: Experiment) -> list[Collective]:
    """The stage's meetings as rows of the event table, in program order."""

    def rows(meetings: tuple[Meeting, ...], layer: int | None) -> list[Collective]:
        return [_row(meeting, layer, stage.index, step, experiment) for meeting in meetings]

    of_layers = [row for layer, meetings in stage.layers for row in rows(meetings, layer)]
    return [*rows(stage.before, None), *of_layers, *rows(stage.after, None)]


def _row(
    meeting: Meeting,
    layer: int | None,
    stage: int | None,
    step: Step,
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
