"""A compiled step's time: the schedule walked three times, with durations low, middle and high."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshscope.cost.kernel_cost import ExpertLoad
from meshscope.cost.machine import ON_COPIES, Key, Span
from meshscope.cost.op_cost import OpCosts
from meshscope.cost.rates import rates_of
from meshscope.cost.scheduled_collectives import CollectiveEstimates
from meshscope.cost.simulator import BUBBLE, SimulatedSchedule, Walked
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import PartCost, StepTime, TimeBasis, TimeEstimate, UnestimatedWork
from meshscope.events.timeline import repetition_starts
from meshscope.interconnect.profile import ChipProfile
from meshscope.readers.hlo.collectives import ModuleCollectives
from meshscope.readers.hlo.module import HloModule
from meshscope.readers.hlo.operations import Operation, source_ops_of
from meshscope.spec.hardware.topology import Topology

NO_AXIS = "unknown"
MAX_STARTS = 20_000  # occurrences of one instruction that are told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """The time of a compiled step, its spans, and what its rows take."""

    time: StepTime
    walked: Walked
    found: ModuleCollectives
    axes: Mapping[str, str]

    def rows(self, rows: Iterable[Collective]) -> list[Collective]:
        """The rows with the times of the instructions that carry them out."""
        return _timed_rows(list(rows), self.found, self.walked)


def timed_step(  # noqa: PLR0913  a module, where it runs, and what is known of it
    module: HloModule,
    found: ModuleCollectives,
    *,
    phase: Phase,
    topology: Topology,
    chip_profile: ChipProfile | None = None,
    cycle_profile: Mapping[str, int] | None = None,
    experts: ExpertLoad | None = None,
    notes: tuple[str, ...] = (),
) -> TimedStep:
    """One step of a compiled module on one device; SpecError for a chip without published figures.

    `cycle_profile` are cycles by instruction that count in place of the compiler's estimates, kernels
    left out; `experts` is what routing brings to a device's experts, of the rows that its buffers have
    room for; `notes` are told with the time.
    """
    prices = OpCosts(found.flow, rates_of(topology.chip, chip_profile), cycle_profile, experts)
    constants = None if chip_profile is None else chip_profile.constants
    schedule = SimulatedSchedule(module, found, prices, CollectiveEstimates(topology, constants))
    middle = schedule.walk(lambda seconds: seconds.value_s)
    low_s, high_s = _interval(schedule)
    axes = {c.name: _axis(found, c.operations[0]) for c in schedule.collectives.values()}
    step = TimeEstimate(value_s=middle.machine.now_s, low_s=low_s, high_s=high_s)
    time = _step_time(phase, step, middle, axes)
    time = replace(time, notes=(*notes, *time.notes))
    return TimedStep(time=time, walked=middle, found=found, axes=axes)


def _interval(schedule: SimulatedSchedule) -> tuple[float | None, float | None]:
    """The step with all durations at their low and at their high ends; None where one has no ends."""
    prices = [c.price for c in schedule.collectives.values() if c.price is not None]
    if any(price.seconds.low_s is None for price in prices):
        return None, None
    ends = (schedule.walk(lambda e: e.lower_s), schedule.walk(lambda e: e.upper_s))
    low_s, high_s = (walked.machine.now_s for walked in ends)
    return low_s, high_s


def _axis(found: ModuleCollectives, operation: Operation) -> str:
    axis, _ = found.devices.axis_of(operation.groups, is_pairs=operation.is_pairs)
    return axis or NO_AXIS


def _step_time(
    phase: Phase, step: TimeEstimate, walked: Walked, axes: Mapping[str, str]
) -> StepTime:
    tally = walked.machine.tally
    core = _of(tally, "compute")
    exposed = {str(key[1]): value for key, value in _of(tally, "exposed").items()}
    idle = {str(why): value for (_, why), value in _items(tally, "idle")}
    by_axis: defaultdict[str, float] = defaultdict(float)
    for name, value in exposed.items():
        by_axis[axes[name]] += value
    by_basis: defaultdict[str, float] = defaultdict(float)
    for key, value in core.items():
        by_basis[str(key[3])] += value
    by_basis[TimeBasis.INTERCONNECT_MODEL] += sum(exposed.values())
    return StepTime(
        source=Source.COMPILED,
        phase=phase,
        step=step,
        compute_s=sum(core.values()),
        exposed_s=sum(exposed.values()),
        idle_s=sum(idle.values()),
        bubble_s=idle.get(BUBBLE, 0.0),
        collective_s=sum(_durations(tally).values()),
        exposed_by_axis_s=dict(by_axis),
        by_basis_s={basis: value for basis, value in by_basis.items() if value},
        parts=_parts(walked, exposed),
        unestimated=_unestimated(walked),
        is_extrapolated=any(
            c.price and c.price.is_extrapolated for c in walked.collectives.values()
        ),
        notes=(*walked.notes, *_unpriced_notes(walked)),
    )


def _unpriced_notes(walked: Walked) -> Iterable[str]:
    if walked.unpriced:
        names = ", ".join(walked.unpriced[:4])
        yield (
            f"{len(walked.unpriced)} collectives without known bytes or devices are not in the "
            f"times ({names})"
        )


def _items(tally: Mapping[Key, float], what: str) -> list[tuple[Key, float]]:
    return [(key, float(value)) for key, value in tally.items() if key[0] == what]


def _of(tally: Mapping[Key, float], what: str) -> dict[Any, float]:
    """The entries of one sort, by their own key."""
    return {key[1]: value for key, value in _items(tally, what)}


def _durations(tally: Mapping[Key, float]) -> dict[str, float]:
    """Seconds of collectives by name."""
    return {str(key[1]): v for key, v in _of(tally, "dur").items() if key[0] == "collective"}


def _parts(walked: Walked, exposed: Mapping[str, float]) -> tuple[PartCost, ...]:
    """What each part of the model computes, moves and waits for; the dearest first."""
    tally = walked.machine.tally
    costs: dict[str | None, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    times = _of(tally, "n")
    for key, seconds in _of(tally, "compute").items():
        work, n = walked.works[str(key[1])], times[key]
        costs[key[2]]["compute_s"] += seconds
        costs[key[2]]["flops"] += n * work.flops
        costs[key[2]]["hbm_bytes"] += n * work.hbm_bytes
    for key in _of(tally, "dur"):
        if key[0] == ON_COPIES:  # what is copied ahead, the core does not read from HBM
            costs[key[2]]["hbm_bytes"] += times[key] * walked.copied_bytes[str(key[1])]
    for name, seconds in _durations(tally).items():
        first = walked.collectives[name].operations[0]
        part = None if first.scope.part is None else first.scope.part.value
        costs[part]["collective_s"] += seconds
        costs[part]["exposed_s"] += exposed.get(name, 0.0)
        wire = sum(o.wire_bytes or 0 for o in walked.collectives[name].operations)
        costs[part]["wire_bytes"] += float(times["collective", name] * wire)
    found = [
        PartCost(
            part=part,
            compute_s=cost["compute_s"],
            collective_s=cost["collective_s"],
            exposed_s=cost["exposed_s"],
            flops=cost["flops"],
            hbm_bytes=cost["hbm_bytes"],
            wire_bytes=cost["wire_bytes"],
        )
        for part, cost in costs.items()
    ]
    return tuple(sorted(found, key=lambda cost: -(cost.compute_s + cost.exposed_s)))


def _unestimated(walked: Walked) -> tuple[UnestimatedWork, ...]:
    """What the core does without an estimate of the compiler, by opcode; the longest first."""
    tally = walked.machine.tally
    times = _of(tally, "n")
    seconds: dict[tuple[str, bool], TimeEstimate] = {}
    counts: Counter[tuple[str, bool]] = Counter()
    for key in _of(tally, "compute"):
        work, n = walked.works[str(key[1])], times[key]
        if work.is_estimated or not n:
            continue
        what = (_sort_of(str(key[1])), work.is_known)
        own = work.price.seconds * n
        seconds[what] = own + seconds[what] if what in seconds else own
        counts[what] += round(n)
    found = [
        UnestimatedWork(opcode=what, count=counts[what, known], seconds=s, is_known=known)
        for (what, known), s in seconds.items()
    ]
    return tuple(sorted(found, key=lambda u: -u.seconds.value_s))


def _sort_of(name: str) -> str:
    """The name of an instruction without its number: what it is."""
    return name.split(".", 1)[0].rstrip("0123456789").rstrip("_-")


def _timed_rows(
    rows: Sequence[Collective], found: ModuleCollectives, walked: Walked
) -> list[Collective]:
    told: dict[str, list[Operation]] = defaultdict(list)
    for operation in found.merged:
        told[operation.scheduled_op.instruction.name].append(operation)
    n_seen: Counter[str] = Counter()
    timed: list[Collective] = []
    starts: dict[str, list[float]] = {}
    for row in rows:
        operations = told.get(row.hlo_name or "")
        if not operations:
            timed.append(row)
            continue
        name = row.hlo_name or ""
        if name not in starts:
            starts[name] = _starts(walked.spans, source_ops_of(operations)[0])
        timed.append(_timed(row, operations, walked, starts[name], n_seen[name] // len(operations)))
        n_seen[name] += row.count
    return timed


def _timed(
    row: Collective,
    operations: Sequence[Operation],
    walked: Walked,
    starts: Sequence[float],
    at: int,
) -> Collective:
    """The row with means over the executions of what carries it out; arrays that travel together share."""
    once = _once(operations, walked)
    if once is None:
        return row
    dur_s, exposed_s = once
    sizes = [o.payload_bytes for o in operations]
    share = 1.0
    if len(operations) > 1 and row.payload_bytes is not None and None not in sizes:
        share = row.payload_bytes / max(1, sum(size or 0 for size in sizes))
    return replace(
        row,
        start_s=starts[at] if at < len(starts) else None,
        dur_s=dur_s * share,
        exposed_s=None if exposed_s is None else exposed_s * share,
        time_basis=TimeBasis.INTERCONNECT_MODEL.value,
    )


def _once(operations: Sequence[Operation], walked: Walked) -> tuple[float, float | None] | None:
    """Seconds of one execution, and of it what is exposed; None where there is no price."""
    names = [name for name in source_ops_of(operations) if name in walked.collectives]
    if not names or any(walked.collectives[name].price is None for name in names):
        return None
    tally = walked.machine.tally
    dur_s = sum(tally.get(("dur", ("collective", name)), 0.0) for name in names)
    exposed_s = sum(tally.get(("exposed", ("collective", name)), 0.0) for name in names)
    n = tally.get(("n", ("collective", names[0])), 0.0)
    if len(names) > 1:
        n = operations[0].count
    if not dur_s or not n:  # in a branch that the walk did not take
        price = walked.collectives[names[0]].price
        assert price is not None
        is_async = operations[0].is_async
        return (
            (price.seconds.value_s, None if is_async else price.seconds.value_s)
            if len(names) == 1
            else None
        )
    return dur_s / n, exposed_s / n


def _starts(spans: Iterable[Span], name: str) -> list[float]:
    """When each execution of an instruction starts, in order."""
    found: list[float] = []
    for span in spans:
        if span.task.name == name and len(found) < MAX_STARTS:
            starts = repetition_starts(span.start_s, span.repeats)
            found += starts[: MAX_STARTS - len(found)].tolist()
    return sorted(found)
