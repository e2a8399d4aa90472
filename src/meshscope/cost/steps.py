"""Time of a compiled step from its simulated schedule, with an interval.

The interval covers the errors of published steps, of the step's kernels, and of its collectives, which are taken as
independent. The errors of all kernels have a common cause and add up, and so do those of all collectives.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import hypot
from typing import Any

from meshscope.cost.expert_load import ExpertLoad
from meshscope.cost.machine import COPY_LANE, CORE_LANE, LINK_LANE, Key
from meshscope.cost.op_cost import OpCostModel
from meshscope.cost.rates import rates_of
from meshscope.cost.row_times import timed_rows
from meshscope.cost.scheduled_collectives import CollectiveEstimator
from meshscope.cost.shallow import folded_schedules
from meshscope.cost.simulator import BUBBLE, ScheduleSimulator, SimulatedStep
from meshscope.events.collective import Collective, OtherOperation
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import (
    Activity,
    ActivityTime,
    PartCost,
    StepTime,
    TimeBasis,
    TimeEstimate,
    UnestimatedWork,
)
from meshscope.hardware.compiler_facts import SPREAD
from meshscope.hardware.topology import Topology
from meshscope.interconnect.profile import ChipProfile
from meshscope.model.layers import ShallowLayers
from meshscope.plans.workload import SequenceLengths
from meshscope.readers.hlo.collectives import ModuleCollectives
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.operations import Operation

NO_AXIS = "unknown"
NO_MEASURED_BASIS = "no measured basis"
_SPARSE_CORE = 'async_execution_thread="sparsecore"'
_Timed = tuple[float, TimeEstimate]  # seconds in the step, and the estimate of one execution


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """The time of a compiled step, with its simulation and the mesh axis of each collective.

    `row_names` are the HLO names of rows that come from another program, by collective; `layers` are those
    of a shallow program. The program starts at `start_s` of its phase; `repeats` are the (times, period in s) of loops around it.
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
        return self.module_collectives.others(self.time.phase)


def timed_step(  # noqa: PLR0913  a module, its hardware and its profiles
    module: HloModule,
    module_collectives: ModuleCollectives,
    *,
    phase: Phase,
    topology: Topology,
    chip_profile: ChipProfile | None = None,
    cycle_profile: Mapping[str, int] | None = None,
    experts: ExpertLoad | None = None,
    layers: ShallowLayers | None = None,
    lengths: Sequence[SequenceLengths] = (),
    notes: tuple[str, ...] = (),
) -> TimedStep:
    """One step of a compiled module on one device; SpecError for a chip without published figures.

    `cycle_profile` maps instructions to cycles that replace the compiler's estimates, except for
    kernels. `experts` is the expected load of the experts, below the size of their buffers, and
    `lengths` the sequences for kernels that read the present tokens; without them, both are assumed from
    the operands and noted. `layers` are those of a shallow program, whose step is that of the whole
    model. `notes` precede the simulation's own.
    """
    rates = rates_of(topology.chip, chip_profile)
    op_costs = OpCostModel(module_collectives.flow, rates, cycle_profile, experts, lengths)
    constants = None if chip_profile is None else chip_profile.constants
    exchange_load = 1.0 if experts is None else experts.exchange
    estimator = CollectiveEstimator(topology, constants, exchange_load=exchange_load)
    schedule = ScheduleSimulator(module, module_collectives, op_costs, estimator)
    folds = () if layers is None else folded_schedules(schedule, layers.folds)
    simulated = schedule.simulate(folds)
    axes = {
        c.name: _axis(module_collectives, c.operations[0]) for c in schedule.collectives.values()
    }
    time = _step_time(phase, step_estimate(simulated), simulated, axes)
    return TimedStep(
        time=replace(
            time,
            notes=(
                *notes,
                *op_costs.notes,
                *_sparse_core_notes(module_collectives.flow),
                *time.notes,
            ),
        ),
        simulated=simulated,
        module_collectives=module_collectives,
        axes=axes,
        layers=layers,
    )


def _sparse_core_notes(flow: Dataflow) -> Iterable[str]:
    """A note on gathers and scatters that libtpu offloads to SparseCores."""
    offloaded = [
        called
        for computation in flow.module.computations.values()
        for start in computation.instructions
        if start.opcode.endswith("-start") and _SPARSE_CORE in start.attributes
        for name in chain.from_iterable(start.called.values())
        if (called := flow.module.computations.get(name)) is not None
    ]
    n = sum(
        any(i.opcode in {"gather", "scatter"} for _, i in flow.inner(called))
        for called in offloaded
    )
    if n:
        yield f"times of gathers and scatters on SparseCores, {n} here, have {NO_MEASURED_BASIS}"


def _axis(module_collectives: ModuleCollectives, operation: Operation) -> str:
    devices = module_collectives.devices
    axis, _ = devices.axis_of(operation.groups, is_pairs=operation.is_pairs)
    return axis or NO_AXIS


def _step_time(
    phase: Phase, step: TimeEstimate, simulated: SimulatedStep, axes: Mapping[str, str]
) -> StepTime:
    tally = simulated.machine.tally
    core = _tallied(tally, "compute")
    exposed = {str(key[1]): value for key, value in _tallied(tally, "exposed").items()}
    idle = _tallied(tally, "idle")
    by_axis: defaultdict[str, float] = defaultdict(float)
    for name, value in exposed.items():
        by_axis[axes[name]] += value
    by_basis: defaultdict[str, float] = defaultdict(float)
    for key, value in core.items():
        by_basis[str(key[3])] += value
    by_basis[TimeBasis.INTERCONNECT_MODEL] += sum(exposed.values())
    estimates = [c.estimate for c in simulated.collectives.values()]
    return StepTime(
        source=Source.COMPILED,
        phase=phase,
        step=step,
        compute_s=sum(core.values()),
        exposed_s=sum(exposed.values()),
        idle_s=sum(idle.values()),
        bubble_s=idle.get(BUBBLE, 0.0),
        collective_s=sum(_collective_durations(tally).values()),
        exposed_by_axis_s=dict(by_axis),
        by_basis_s={basis: value for basis, value in by_basis.items() if value},
        parts=_parts(simulated, exposed),
        activities=tuple(_activities(simulated, axes)),
        unestimated=_unestimated(simulated),
        is_extrapolated=any(e is not None and e.is_extrapolated for e in estimates),
        notes=(*simulated.notes, *_unestimated_notes(simulated), *_interval_notes(step)),
    )


def _interval_notes(step: TimeEstimate) -> Iterable[str]:
    if step.low_s is None:
        yield "no interval: the error of the time of some collectives or kernels is unknown"


def _unestimated_notes(simulated: SimulatedStep) -> Iterable[str]:
    if simulated.unestimated:
        names = ", ".join(simulated.unestimated[:4])
        yield (
            f"{len(simulated.unestimated)} collectives with unknown bytes or devices are not in the "
            f"times ({names})"
        )


def _tallied(tally: Mapping[Key, float], quantity: str) -> dict[Any, float]:
    """The entries of one quantity of the tally, by their own key."""
    return {key[1]: float(value) for key, value in tally.items() if key[0] == quantity}


def _collective_durations(tally: Mapping[Key, float]) -> dict[str, float]:
    """Seconds of collectives by name."""
    durations = _tallied(tally, "dur")
    return {str(key[1]): value for key, value in durations.items() if key[0] == LINK_LANE}


_PART_FIGURES = ("compute_s", "collective_s", "exposed_s", "flops", "hbm_bytes", "wire_bytes")
_ACTIVITY_FIGURES = ("seconds", "hbm_busy_s", "flops", "padding_flops", "wire_bytes")


def _parts(simulated: SimulatedStep, exposed: Mapping[str, float]) -> tuple[PartCost, ...]:
    """Compute, traffic and stalls of each model part, the costliest first."""
    costs: dict[str | None, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for part, name, value in (
        *_compute_costs(simulated),
        *_copy_costs(simulated),
        *_collective_costs(simulated, exposed),
    ):
        costs[part][name] += value
    parts = [
        PartCost(part=part, **{name: cost[name] for name in _PART_FIGURES})
        for part, cost in costs.items()
    ]
    return tuple(sorted(parts, key=lambda cost: -(cost.compute_s + cost.exposed_s)))


def _activities(simulated: SimulatedStep, axes: Mapping[str, str]) -> Iterable[ActivityTime]:
    """What the core does in the step, the longest first."""
    totals: dict[tuple[Activity, str | None], defaultdict[str, float]] = {}
    for activity, axis, name, value in (
        *_core_activities(simulated),
        *_waits(simulated, axes),
    ):
        totals.setdefault((activity, axis), defaultdict(float))[name] += value
    times = [
        ActivityTime(
            activity=activity, axis=axis, **{name: total[name] for name in _ACTIVITY_FIGURES}
        )
        for (activity, axis), total in totals.items()
    ]
    return sorted(times, key=lambda time: -time.seconds)


_ActivityValue = tuple[Activity, str | None, str, float]  # activity, axis, field, value


def _core_activities(simulated: SimulatedStep) -> Iterable[_ActivityValue]:
    tally = simulated.machine.tally
    counts = _tallied(tally, "n")
    for key, seconds in _tallied(tally, "compute").items():
        cost, n = simulated.op_costs[str(key[1])], counts[key]
        yield cost.activity, None, "seconds", seconds
        yield cost.activity, None, "hbm_busy_s", tally["hbm", "compute", key]
        yield cost.activity, None, "flops", n * cost.flops
        yield cost.activity, None, "padding_flops", n * cost.padding_flops


def _waits(simulated: SimulatedStep, axes: Mapping[str, str]) -> Iterable[_ActivityValue]:
    tally = simulated.machine.tally
    for key, seconds in _tallied(tally, "exposed").items():
        axis = axes[str(key[1])]
        yield Activity.EXPOSED, axis, "seconds", seconds
        yield Activity.EXPOSED, axis, "hbm_busy_s", tally["hbm", "exposed", key]
    for name in _collective_durations(tally):
        wire_bytes = _wire_bytes(simulated, name)
        yield Activity.EXPOSED, axes[name], "wire_bytes", wire_bytes
    for reason, seconds in _tallied(tally, "idle").items():
        activity = Activity.BUBBLE if reason == BUBBLE else Activity.COPY
        yield activity, None, "seconds", seconds
        yield activity, None, "hbm_busy_s", tally["hbm", "idle", reason]


_PartValue = tuple[str | None, str, float]  # part, field of PartCost, value


def _compute_costs(simulated: SimulatedStep) -> Iterable[_PartValue]:
    tally = simulated.machine.tally
    counts = _tallied(tally, "n")
    for key, seconds in _tallied(tally, "compute").items():
        cost, n = simulated.op_costs[str(key[1])], counts[key]
        yield key[2], "compute_s", seconds
        yield key[2], "flops", n * cost.flops
        yield key[2], "hbm_bytes", n * cost.hbm_bytes


def _copy_costs(simulated: SimulatedStep) -> Iterable[_PartValue]:
    """HBM bytes of copies, which the core then reads from VMEM."""
    tally = simulated.machine.tally
    counts = _tallied(tally, "n")
    for key in _tallied(tally, "dur"):
        if key[0] == COPY_LANE:
            yield key[2], "hbm_bytes", counts[key] * simulated.copied_bytes[str(key[1])]


def _collective_costs(
    simulated: SimulatedStep, exposed: Mapping[str, float]
) -> Iterable[_PartValue]:
    for name, seconds in _collective_durations(simulated.machine.tally).items():
        operations = simulated.collectives[name].operations
        scope_part = operations[0].scope.part
        part = None if scope_part is None else scope_part.value
        yield part, "collective_s", seconds
        yield part, "exposed_s", exposed.get(name, 0.0)
        yield part, "wire_bytes", _wire_bytes(simulated, name)


def _wire_bytes(simulated: SimulatedStep, name: str) -> float:
    """Bytes that the device sends in all executions of a collective, without unknown ones."""
    n = simulated.machine.tally["n", (LINK_LANE, name)]
    operations = simulated.collectives[name].operations
    return float(n * sum(operation.wire_bytes or 0 for operation in operations))


def _unestimated(simulated: SimulatedStep) -> tuple[UnestimatedWork, ...]:
    """Work without a compiler estimate, by opcode, the longest first."""
    tally = simulated.machine.tally
    counts = _tallied(tally, "n")
    seconds: dict[tuple[str, bool], TimeEstimate] = {}
    n_runs: Counter[tuple[str, bool]] = Counter()
    for key in _tallied(tally, "compute"):
        cost, n = simulated.op_costs[str(key[1])], counts[key]
        if cost.is_estimated or not n:
            continue
        group = (_base_name(str(key[1])), cost.is_known)
        total = cost.time.seconds * n
        seconds[group] = total + seconds[group] if group in seconds else total
        n_runs[group] += round(n)
    work = [
        UnestimatedWork(opcode=opcode, count=n_runs[opcode, known], seconds=s, is_known=known)
        for (opcode, known), s in seconds.items()
    ]
    return tuple(sorted(work, key=lambda entry: -entry.seconds.value_s))


def _base_name(name: str) -> str:
    """The name of an instruction without its number."""
    return name.split(".", 1)[0].rstrip("0123456789").rstrip("_-")


def step_estimate(simulated: SimulatedStep) -> TimeEstimate:
    """The simulated step with its interval; without one if a collective has none."""
    step_s, spread = simulated.machine.now_s, SPREAD.value
    groups = (list(_kernels(simulated)), list(_collectives(simulated)))
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


def _kernels(simulated: SimulatedStep) -> Iterable[_Timed]:
    """Work on the core without a compiler estimate."""
    for key, seconds in simulated.machine.tally.items():
        if key[0] == "compute" and isinstance(key[1], tuple) and key[1][0] == CORE_LANE:
            cost = simulated.op_costs[str(key[1][1])]
            if not cost.is_estimated and cost.time.seconds.value_s > 0:
                yield seconds, cost.time.seconds


def _collectives(simulated: SimulatedStep) -> Iterable[_Timed]:
    """Exposed seconds of each collective."""
    for key, seconds in simulated.machine.tally.items():
        if key[0] == "exposed" and isinstance(key[1], tuple) and key[1][0] == LINK_LANE:
            estimate = simulated.collectives[str(key[1][1])].estimate
            if estimate is not None and estimate.seconds.value_s > 0:
                yield seconds, estimate.seconds
