"""Time of a compiled step from its simulated schedule, with an interval, of a prefill in chunks, and its timeline.

The interval covers the errors of published steps, of the step's kernels, and of its collectives, which are taken as
independent. Errors of kernels have a common cause and add up; so do errors of collectives. The timeline is folded, of
one device, or one of each stage. Lanes are `core` (compute, by part), `collective` and `copy`; each step starts at 0.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from math import hypot
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl

from meshscope.cost.expert_load import ExpertLoad
from meshscope.cost.machine import COPY_LANE, LINK_LANE, Key, Span
from meshscope.cost.op_cost import OpCostModel
from meshscope.cost.rates import rates_of
from meshscope.cost.row_times import folded_schedules, timed_rows
from meshscope.cost.simulator import BUBBLE, Schedule, SimulatedStep, scheduled_collective
from meshscope.events.collective import Collective, OtherOperation
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import (
    NO_INTERVAL,
    NO_TIME,
    Activity,
    ActivityTime,
    PartCost,
    StepTime,
    TimeBasis,
    TimeEstimate,
    UnestimatedWork,
)
from meshscope.events.timeline import FOLDED_SCHEMA, TIMELINE, repetition_starts
from meshscope.hardware.compiler_facts import OPERATIONS
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.hardware.topology import Topology
from meshscope.model.layers import ShallowLayers
from meshscope.plans.chunks import PrefillChunks
from meshscope.plans.mesh import NO_AXIS
from meshscope.plans.workload import SequenceLengths
from meshscope.readers.hlo.attribution import Scope, plain_name, scope_of
from meshscope.readers.hlo.collectives import ModuleCollectives, with_stage_send
from meshscope.readers.hlo.communication import other_operations
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.operations import source_ops_of
from meshscope.readers.hlo.semantics import op_class
from meshscope.units import counted

NO_MEASURED_BASIS = "no measured basis"
_SPARSE_CORE = 'async_execution_thread="sparsecore"'
_Timed = tuple[float, TimeEstimate]  # seconds in the step, and the estimate of one execution
R = TypeVar("R", StepTime, PartCost, ActivityTime, UnestimatedWork)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """The time of a compiled step, with its simulation and the mesh axis of each collective.

    `row_names` are the HLO names of rows from another program, by collective; `layers` belong to a shallow
    program. The program starts at `start_s` of its phase; `repeats` are the (times, period in s) of loops
    around it.
    """

    time: StepTime
    simulated: SimulatedStep
    module_collectives: ModuleCollectives
    axes: Mapping[str, str]
    row_names: Mapping[str, str] = field(default_factory=dict[str, str])
    layers: ShallowLayers | None = None
    start_s: float = 0.0
    repeats: tuple[tuple[int, float], ...] = ()

    def rows(self, rows: Iterable[Collective]) -> list[Collective]:
        """The rows with the times of their scheduled instructions."""
        return timed_rows(list(rows), self.module_collectives, self.simulated)

    @property
    def others(self) -> tuple[OtherOperation, ...]:
        """The operations of the program without rows that may communicate, and host transfers."""
        return other_operations(self.module_collectives.flow.module, self.time.phase)


def timed_step(  # noqa: PLR0913  a module, its hardware and its profiles
    module: HloModule,
    module_collectives: ModuleCollectives,
    *,
    phase: Phase,
    topology: Topology,
    chip_profile: ChipProfile | None = None,
    experts: ExpertLoad | None = None,
    layers: ShallowLayers | None = None,
    lengths: Sequence[SequenceLengths] = (),
    notes: tuple[str, ...] = (),
) -> TimedStep:
    """One step of a compiled module on one device; SpecError for a chip without published figures.

    `experts` is the expected load of the experts, below the size of their buffers, and
    `lengths` the sequences for kernels that read the present tokens; without them, both are assumed from
    the operands and noted. `layers` are the layers of a shallow program; its step stands for the whole
    model. `notes` precede the simulation's own.
    """
    rates = rates_of(topology.chip, chip_profile)
    op_costs = OpCostModel(module_collectives.flow, rates, experts, lengths)
    constants = None if chip_profile is None else chip_profile.constants
    collective_of = partial(
        scheduled_collective,
        topology=topology,
        constants=constants,
        exchange_load=1.0 if experts is None else experts.exchange,
    )
    schedule = Schedule(module, module_collectives, op_costs, collective_of)
    folds = () if layers is None else folded_schedules(schedule, layers.folds)
    simulated = SimulatedStep(schedule, folds)
    devices, axes = module_collectives.devices, dict[str, str]()
    for collective in schedule.collectives.values():
        first = collective.operations[0]
        axis, _ = devices.axis_of(first.groups, is_pairs=first.is_pairs)
        axes[collective.name] = axis or NO_AXIS
    time = _step_time(phase, simulated, axes)
    more = (*notes, *op_costs.notes, *_sparse_core_notes(module_collectives.flow))
    return TimedStep(
        time=replace(time, notes=(*more, *time.notes)),
        simulated=simulated,
        module_collectives=module_collectives,
        axes=axes,
        layers=layers,
    )


def _sparse_core_notes(flow: Dataflow) -> Iterator[str]:
    module = flow.module
    n = sum(
        any(i.opcode in {"gather", "scatter"} for _, i in flow.inner(called))
        for computation in module.computations.values()
        for start in computation.instructions
        if start.opcode.endswith("-start") and _SPARSE_CORE in start.attributes
        for name in chain.from_iterable(start.called.values())
        if (called := module.computations.get(name)) is not None
    )
    if n:
        yield f"times of gathers and scatters on SparseCores, {n} here, have {NO_MEASURED_BASIS}"


def _step_time(phase: Phase, simulated: SimulatedStep, axes: Mapping[str, str]) -> StepTime:
    tally = simulated.machine.tally
    core, exposed, idle, counts, durations = (
        _tallied(tally, quantity) for quantity in ("compute", "exposed", "idle", "n", "dur")
    )
    sent_s = {str(key[1]): s for key, s in durations.items() if key[0] == LINK_LANE}
    by_axis, by_basis = defaultdict[str, float](float), defaultdict[str, float](float)
    for key, seconds in core.items():
        by_basis[str(key[3])] += seconds
    work = [(key, s, counts[key], simulated.op_costs[str(key[1])]) for key, s in core.items()]
    unstated = [(key, s, n, cost) for key, s, n, cost in work if not cost.is_estimated]
    kernels = [(s, c.time.seconds) for _, s, _, c in unstated if c.time.seconds.value_s > 0]
    parts = [
        _part(key[2], compute_s=s, flops=n * cost.flops, hbm_bytes=n * cost.hbm_bytes)
        for key, s, n, cost in work
    ]
    activities = [
        ActivityTime(
            activity=cost.activity,
            seconds=s,
            hbm_busy_s=tally["hbm", "compute", key],
            flops=n * cost.flops,
            padding_flops=n * cost.padding_flops,
        )
        for key, s, n, cost in work
    ]
    unestimated = [
        UnestimatedWork(
            opcode=str(key[1]).split(".", 1)[0].rstrip("0123456789").rstrip("_-"),
            count=round(n),
            seconds=cost.time.seconds * n,
            is_known=cost.is_known,
        )
        for key, _, n, cost in unstated
        if n
    ]
    for key in durations:
        if key[0] == COPY_LANE:
            copied_bytes = simulated.copied_bytes[str(key[1])]
            parts.append(_part(key[2], hbm_bytes=counts[key] * copied_bytes))
    collectives, waiting = list[_Timed](), partial(ActivityTime, activity=Activity.EXPOSED)
    for key, seconds in exposed.items():
        axis, estimate = axes[str(key[1])], simulated.collectives[str(key[1])].seconds
        by_axis[axis] += seconds
        hbm_s = tally["hbm", "exposed", key]
        activities.append(waiting(axis=axis, seconds=seconds, hbm_busy_s=hbm_s))
        if estimate is not None and estimate.value_s > 0:
            collectives.append((seconds, estimate))
    for name, seconds in sent_s.items():
        key, collective = (LINK_LANE, name), simulated.collectives[name]
        operations, is_timed = collective.operations, collective.seconds is not None
        # Of the operations whose bytes are known; what the step lacks does not raise its floor.
        wire_bytes = float(counts[key] * sum(one.wire_bytes or 0 for one in operations) * is_timed)
        times = {"collective_s": seconds, "exposed_s": exposed.get(key, 0.0)}
        parts.append(_part(operations[0].scope.part, **times, wire_bytes=wire_bytes))
        sent = waiting(axis=axes[name], seconds=0.0, hbm_busy_s=0.0, wire_bytes=wire_bytes)
        activities.append(sent)
    for reason, seconds in idle.items():
        activity = Activity.BUBBLE if reason == BUBBLE else Activity.COPY
        hbm_s = tally["hbm", "idle", reason]
        activities.append(ActivityTime(activity=activity, seconds=seconds, hbm_busy_s=hbm_s))
    by_basis[TimeBasis.INTERCONNECT_MODEL] += sum(exposed.values())
    step = _step_estimate(simulated.machine.now_s, kernels, collectives)
    step, notes = _with_notes(step, simulated)
    time = StepTime(
        source=Source.COMPILED,
        phase=phase,
        step=step,
        compute_s=sum(core.values()),
        exposed_s=sum(exposed.values()),
        idle_s=sum(idle.values()),
        bubble_s=idle.get(BUBBLE, 0.0),
        collective_s=sum(sent_s.values()),
        exposed_by_axis_s=dict(by_axis),
        by_basis_s={basis: value for basis, value in by_basis.items() if value},
        parts=tuple(parts),
        activities=tuple(activities),
        unestimated=tuple(unestimated),
        is_extrapolated=any(c.is_extrapolated for c in simulated.collectives.values()),
        notes=notes,
    )
    return _merged(time, [time])


def _with_notes(
    step: TimeEstimate, simulated: SimulatedStep
) -> tuple[TimeEstimate, tuple[str, ...]]:
    """The step and its notes; it has no bounds if the trips of a loop or the bytes of a collective are unknown."""
    notes, unknown = [*dict.fromkeys(simulated.notes)], simulated.unestimated
    if unknown:
        names = ", ".join(unknown[:4])
        notes.append(
            f"{NO_INTERVAL}the times lack {counted(len(unknown), 'collective')} of unknown bytes or devices ({names})"
        )
    if any(note.startswith(NO_INTERVAL) for note in notes):
        step = replace(step, low_s=None, high_s=None)
    elif step.low_s is None:
        notes.append(
            f"{NO_INTERVAL}the error of the time of some collectives or kernels is unknown"
        )
    return step, tuple(notes)


def _tallied(tally: Mapping[Key, float], quantity: str) -> dict[Any, float]:
    return {key[1]: float(value) for key, value in tally.items() if key[0] == quantity}


def _part(name: Any, **figures: float) -> PartCost:
    quantities = ("compute_s", "collective_s", "exposed_s", "flops", "hbm_bytes", "wire_bytes")
    return PartCost(
        part=None if name is None else str(name), **dict.fromkeys(quantities, 0.0) | figures
    )


def _step_estimate(
    step_s: float, kernels: Sequence[_Timed], collectives: Sequence[_Timed]
) -> TimeEstimate:
    groups, spread = (kernels, collectives), OPERATIONS.spread
    if any(time.low_s is None or time.high_s is None for group in groups for _, time in group):
        return TimeEstimate(value_s=step_s, low_s=None, high_s=None)
    rest_s = step_s - sum(seconds for group in groups for seconds, _ in group)
    below = [sum(s * (1 - time.lower_s / time.value_s) for s, time in group) for group in groups]
    above = [sum(s * (time.upper_s / time.value_s - 1) for s, time in group) for group in groups]
    return TimeEstimate(
        value_s=step_s,
        low_s=max(0.0, step_s - hypot(rest_s * (1 - 1 / spread), *below)),
        high_s=step_s + hypot(rest_s * (spread - 1), *above),
    )


def prefill_time(
    chunk_times: Sequence[StepTime], chunks: PrefillChunks, *, ends_alike: bool = True
) -> StepTime:
    """The time of all chunks; `chunk_times` has the first and last chunk of a prompt.

    It has one if all chunks run the same program. Each chunk of a prompt attends to more positions than the
    one before; times are interpolated between the first and last chunk, unless the last one alone has all layers:
    then the others have the time of the first.
    """
    if chunks.count == 1:
        return chunk_times[0]
    n_programs, n_sequences = len(chunk_times), chunks.n_sequences
    sequences = "sequence" if n_sequences == 1 else "sequences"
    sizes = f"{n_sequences} {sequences} x {chunks.n_positions} tokens"
    notes = [f"prefill is the sum of {chunks.count} chunks of {sizes}"]
    if n_programs > 1 and chunks.n_position_chunks > n_programs:
        notes.append(
            f"{n_programs} of the {chunks.n_position_chunks} programs of a prompt were compiled, the first "
            f"and the last; the others {'are interpolated' if ends_alike else 'count like the first'}"
        )
    if ends_alike or n_programs == 1:
        total = _weighted_sum(chunk_times, chunks.count / n_programs)
    else:
        before = _weighted_sum(chunk_times[:1], chunks.n_position_chunks - 1)
        total = _weighted_sum((before, chunk_times[-1]), chunks.n_sequence_chunks)
    return replace(total, notes=(*notes, *total.notes))


def summed_time(times: Sequence[StepTime]) -> StepTime:
    """The time of a step whose programs run one after the other."""
    notes = dict.fromkeys(note for time in times for note in time.notes)
    return times[0] if len(times) == 1 else replace(_weighted_sum(times), notes=tuple(notes))


def placed_chunks(
    steps: Sequence[TimedStep], chunks: PrefillChunks, *, ends_alike: bool = True
) -> tuple[TimedStep, ...]:
    """The programs at their times on the timeline of the whole prefill.

    In a prompt of more than two chunks, the first program stands for the first half of them and the
    last program for the second; unless the last one alone has all layers, and stands for itself.
    """
    n_last = chunks.n_position_chunks // 2 if ends_alike else 1
    n_last = n_last if len(steps) > 1 else 0
    counts = (chunks.n_position_chunks - n_last, n_last)[: len(steps)]
    prompt_s = sum(n * step.time.step.value_s for n, step in zip(counts, steps, strict=True))
    placed: list[TimedStep] = []
    start_s = 0.0
    for n, step in zip(counts, steps, strict=True):
        chunk_s = step.time.step.value_s
        loops = ((chunks.n_sequence_chunks, prompt_s), (n, chunk_s))
        repeats = tuple((times, period_s) for times, period_s in loops if times > 1)
        placed.append(replace(step, start_s=start_s, repeats=repeats))
        start_s += n * chunk_s
    return tuple(placed)


def _weighted_sum(times: Sequence[StepTime], weight: float = 1.0) -> StepTime:
    """Every duration, cost and count added up and multiplied; notes and facts of the last."""
    (summed,) = _summed(times, (), weight)
    is_extrapolated = any(time.is_extrapolated for time in times)
    return replace(_merged(summed, times, weight), is_extrapolated=is_extrapolated)


def _merged(summed: StepTime, times: Sequence[StepTime], weight: float = 1.0) -> StepTime:
    """The step with the parts, activities and works of the others, added up where they are of one kind."""
    parts = _summed((part for time in times for part in time.parts), ("part",), weight)
    spent = (one for time in times for one in time.activities)
    activities = _summed(spent, ("activity", "axis"), weight)
    works = _summed((w for t in times for w in t.unestimated), ("opcode", "is_known"), weight)
    works = [replace(work, count=round(work.count)) for work in works]
    return replace(
        summed,
        parts=tuple(sorted(parts, key=lambda cost: -(cost.compute_s + cost.exposed_s))),
        activities=tuple(sorted(activities, key=lambda time: -time.seconds)),
        unestimated=tuple(sorted(works, key=lambda work: -work.seconds.value_s)),
    )


def _summed(records: Iterable[R], keys: Sequence[str], weight: float) -> list[R]:
    """The weighted sum of the records with equal keys, field by field; None for one with an unknown value.

    Fields that cannot be added keep the last value.
    """
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for record in records:
        groups.setdefault(tuple(getattr(record, key) for key in keys), []).append(record)
    sums: list[R] = []
    for same in groups.values():
        names = [field.name for field in fields(same[0]) if field.name not in keys]
        values = {name: [getattr(record, name) for record in same] for name in names}
        sums.append(replace(same[-1], **{n: _sum_of(of, weight) for n, of in values.items()}))
    return sums


def _sum_of(values: Sequence[Any], weight: float) -> Any:
    """The weighted sum of numbers, estimates or mappings of numbers; the last of anything else."""
    first = values[0]
    if any(value is None for value in values):
        return None
    if isinstance(first, TimeEstimate):
        return sum(values, start=NO_TIME) * weight
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: weight * sum(value.get(name, 0.0) for value in values) for name in names}
    return weight * sum(values) if type(first) in {int, float} else values[-1]


def timeline_table(steps: Iterable[TimedStep]) -> pl.DataFrame:
    """One row per span and pipeline stage, by FOLDED_SCHEMA."""
    records = [record for step in steps for record in _StepSpans(step).records()]
    return pl.DataFrame(records, schema=FOLDED_SCHEMA, orient="row")


def write_timeline(folder: Path, steps: Iterable[TimedStep]) -> None:
    """Writes `timeline.parquet` into a run folder."""
    timeline_table(steps).write_parquet(folder / TIMELINE)


class _StepSpans:
    def __init__(self, step: TimedStep) -> None:
        self.step = step
        devices = step.module_collectives.devices
        self.n_stages = devices.mesh.size("pp")
        computations = devices.module.computations.values()
        self.places = {i.name: (c, i) for c in computations for i in c.instructions}
        self.exposed_s, self.flow = _mean_exposed_s(step), step.simulated.schedule.flow

    def records(self) -> Iterator[tuple[Any, ...]]:
        same: defaultdict[tuple[Any, ...], list[Span]] = defaultdict(list)
        placed: list[tuple[Span, Scope, int | None]] = []
        for span in self.step.simulated.machine.spans:
            scope = self._scope(span)
            of_all = scope.stages or () if span.task.lane == LINK_LANE else ()
            for stage in span.stages or tuple(of_all) or (None,):
                placed.append((span, scope, stage))
                same[self._same(span, stage)].append(span)
        layers: dict[tuple[Any, ...], list[list[int]]] = {}
        for span, scope, stage in placed:
            key = self._same(span, stage)
            if key not in layers:
                layers[key] = self._layers(same[key], scope, stage)[::-1]
            yield self._record(span, scope, stage, layers[key].pop())

    def _same(self, span: Span, stage: int | None) -> tuple[Any, ...]:
        """What executions of one operation in all layers of a stage have in common."""
        op_name = plain_name(self.places[span.task.name][1].op_name)
        return span.task.lane, op_name or span.task.name, stage

    def _scope(self, span: Span) -> Scope:
        name, collectives = span.task.name, self.step.simulated.collectives
        if span.task.lane != LINK_LANE:
            computation, instruction = self.places[name]
            scope = scope_of(instruction.op_name)
            if scope.part is not None:
                return scope
            # An operation without a name, such as a copy, belongs to what uses its result.
            return self.step.simulated.schedule.consumer_scope(computation, instruction)
        first, mesh = collectives[name].operations[0], self.step.module_collectives.devices.mesh
        scope = with_stage_send(first.scope, first.kind, self.step.axes[name], mesh)
        is_known = scope.stages is None or scope.stages[-1] < self.n_stages
        return scope if is_known else replace(scope, stages=None)

    def _layers(self, spans: Sequence[Span], scope: Scope, stage: int | None) -> list[list[int]]:
        """The layers of each span, whose repetitions have them in turn; [] if unknown."""
        if not scope.layers:
            return [[] for _ in spans]
        if self.step.layers is not None:
            (first, *_), layers = scope.layers, self.step.layers
            times = [span.repeats[0][0] if span.repeats else 1 for span in spans]
            return [layers.layers_of(first, n) for n in times]
        number = stage - scope.stages[0] if scope.stages and stage is not None else 0
        of_stage = np.array(scope.layers) + number * scope.stage_layers
        if len(of_stage) == 1:
            return [of_stage.tolist() for _ in spans]
        starts = [repetition_starts(span.start_s, span.repeats) for span in spans]
        n_executions = sum(map(len, starts))
        n_each, rest = divmod(n_executions, len(of_stage) * scope.n_microbatches)
        if rest:
            return [[] for _ in spans]
        ranks = np.empty(n_executions, int)
        ranks[np.argsort(np.concatenate(starts), kind="stable")] = np.arange(n_executions)
        executed = of_stage[ranks // n_each % len(of_stage)]
        parts = np.split(executed, np.cumsum([len(of_span) for of_span in starts])[:-1])
        return [part[:1].tolist() if (part == part[0]).all() else part.tolist() for part in parts]

    def _record(
        self, span: Span, scope: Scope, stage: int | None, layers: list[int]
    ) -> tuple[Any, ...]:
        name, step = span.task.name, self.step
        is_collective = span.task.lane == LINK_LANE
        part, basis = (scope.part, "interconnect_model") if is_collective else span.task.key[2:]
        cost = None if is_collective else step.simulated.op_costs.get(name)
        hbm_bytes = step.simulated.copied_bytes.get(name) if cost is None else cost.hbm_bytes
        part = part or scope.part
        repeats = (*step.repeats, *span.repeats)
        return (
            Source.COMPILED.value,
            Phase(step.time.phase).value,
            stage,
            span.task.lane,
            None if part is None else str(part),
            step.simulated.collectives[name].operations[0].kind.value if is_collective else None,
            step.axes[name] if is_collective else None,
            step.start_s + span.start_s,
            span.dur_s,
            self.exposed_s.get(name) if is_collective else None,
            layers or None,
            [times for times, _ in repeats],
            [period for _, period in repeats],
            str(basis),
            step.row_names.get(name, name),
            None if cost is None else cost.activity.value,
            None if is_collective else op_class(self.flow, *self.places[name]).value,
            None if cost is None else cost.flops,
            None if hbm_bytes is None else round(hbm_bytes),
        )


def _mean_exposed_s(step: TimedStep) -> dict[str, float]:
    """Exposed seconds of one execution of each collective; equal for collectives in one row."""
    tally, means = step.simulated.machine.tally, dict[str, float]()
    merged = [source_ops_of([operation]) for operation in step.module_collectives.merged]
    for names in [*((name,) for name in step.simulated.collectives), *merged]:
        n, exposed_s = (
            sum(tally.get((what, (LINK_LANE, name)), 0.0) for name in names)
            for what in ("n", "exposed")
        )
        means |= dict.fromkeys(names, exposed_s / n) if n else {}
    return means
