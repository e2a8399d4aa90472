"""Times of collective rows from a simulated schedule, also for a deep model from a few of its layers.

A shallow, unrolled program is simulated with some of its layers repeated. After the heaviest operation of a
layer, the device is in the same state as after its counterpart in each later layer of the same kind.
Operations that the compiler moves out of the layers, such as relayouts and gathers of weights before the
first one, are repeated where they are.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshscope.cost.machine import CORE_LANE, LINK_LANE, Span
from meshscope.cost.simulator import FoldedSchedule, Schedule, SimulatedStep
from meshscope.errors import ParseError
from meshscope.events.collective import Collective
from meshscope.events.step_time import TimeBasis
from meshscope.events.timeline import repetition_starts
from meshscope.model.layers import Fold, ShallowLayers
from meshscope.readers.hlo.attribution import plain_name
from meshscope.readers.hlo.collectives import ModuleCollectives
from meshscope.readers.hlo.operations import Operation, source_ops_of
from meshscope.serialize import picked

MAX_STARTS = 20_000  # start times kept per instruction


def timed_rows(
    rows: Sequence[Collective], module_collectives: ModuleCollectives, simulated: SimulatedStep
) -> list[Collective]:
    """The rows with start, duration and exposed time of their scheduled instructions."""
    by_name: dict[str, list[Operation]] = defaultdict(list)
    for operation in module_collectives.merged:
        by_name[operation.scheduled_op.instruction.name].append(operation)
    n_before: Counter[tuple[str, int | None]] = Counter()  # executions in earlier layers
    timed: list[Collective] = []
    starts: dict[tuple[str, int | None], list[float]] = {}
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    for span in simulated.machine.spans:
        spans[span.task.name].append(span)
    for row in rows:
        name = row.hlo_name or ""
        operations = by_name.get(name)
        if not operations:
            timed.append(row)
            continue
        key = name, row.stage
        if key not in starts:
            of_name = spans[source_ops_of(operations)[0]]
            starts[key] = _starts(s for s in of_name if not s.stages or row.stage in s.stages)
        at = n_before[key] // len(operations)
        start_s = starts[key][at] if at < len(starts[key]) else None
        timed.append(_timed_row(row, operations, simulated, start_s))
        # A stage runs all of its layers before the next micro-batch.
        n_before[key] += row.count // operations[0].scope.n_microbatches
    return timed


def _timed_row(
    row: Collective,
    operations: Sequence[Operation],
    simulated: SimulatedStep,
    start_s: float | None,
) -> Collective:
    """The row with its mean time over all executions; arrays that travel together share it by payload."""
    times = _mean_times(operations, simulated)
    if times is None:
        return row
    dur_s, exposed_s = times
    sizes = [operation.payload_bytes for operation in operations]
    share = 1.0
    if len(operations) > 1 and row.payload_bytes is not None and None not in sizes:
        share = row.payload_bytes / max(1, sum(size or 0 for size in sizes))
    return replace(
        row,
        start_s=start_s,
        dur_s=dur_s * share,
        exposed_s=None if exposed_s is None else exposed_s * share,
        time_basis=TimeBasis.INTERCONNECT_MODEL.value,
    )


def _mean_times(
    operations: Sequence[Operation], simulated: SimulatedStep
) -> tuple[float, float | None] | None:
    """Duration and exposed seconds of one execution; None without an estimate."""
    names = [name for name in source_ops_of(operations) if name in simulated.collectives]
    estimates = [simulated.collectives[name].seconds for name in names]
    if not estimates or estimates[0] is None or None in estimates:
        return None
    tally = simulated.machine.tally
    dur_s, exposed_s = (
        sum(tally.get((quantity, (LINK_LANE, name)), 0.0) for name in names)
        for quantity in ("dur", "exposed")
    )
    n = operations[0].count if len(names) > 1 else tally.get(("n", (LINK_LANE, names[0])), 0.0)
    if dur_s and n:
        return dur_s / n, exposed_s / n
    if len(names) > 1:
        return None
    seconds = estimates[0].value_s  # in a branch that the simulation skipped
    return seconds, None if operations[0].is_async else seconds


def _starts(spans: Iterable[Span]) -> list[float]:
    starts: list[float] = []
    for span in spans:
        if len(starts) < MAX_STARTS:
            repetitions = repetition_starts(span.start_s, span.repeats)
            starts += repetitions[: MAX_STARTS - len(starts)].tolist()
    return sorted(starts)


# A scope such as `layer3`, or an argument such as `weights['layers'][3]['wk']` or `cache[3]['k']`.
_LAYER = re.compile(r"\blayer(\d+)\b|\blayers\\?'\]\[(\d+)\]|\bcache\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """An operation of one layer, or the end of an asynchronous one; `before` is what precedes it.

    `kind` is its op_name without the layer: the compiler may choose another opcode in another layer.
    `core_s` is its time on the core, None for a collective.
    """

    name: str
    before: str
    position: int
    kind: str
    layer: int
    core_s: float | None


def folded_schedules(schedule: Schedule, folds: Sequence[Fold]) -> tuple[FoldedSchedule, ...]:
    """The stretches of the schedule that execute the folded layers; ParseError if it names no layers."""
    operations = tuple(_operations(schedule))
    return tuple(folded for fold in folds for folded in _folded(fold, operations))


def _operations(schedule: Schedule) -> Iterator[_Operation]:
    spans = SimulatedStep(schedule).machine.spans
    core_s = {span.task.name: span.dur_s for span in spans if span.task.lane == CORE_LANE}
    before = ""
    for position, instruction in enumerate(schedule.module.entry.instructions):
        op_name = plain_name(instruction.op_name)
        layer = _LAYER.search(op_name)
        issued = schedule.issued.get(id(instruction), ())
        is_synchronous = any(not collective.operations[0].is_async for collective in issued)
        is_collective = is_synchronous or id(instruction) in schedule.awaited
        if layer is not None and (is_collective or instruction.name in core_s):
            yield _Operation(
                name=instruction.name,
                before=before,
                position=position,
                kind=_LAYER.sub("layer", op_name),
                layer=int(next(number for number in layer.groups() if number is not None)),
                core_s=core_s.get(instruction.name),
            )
        before = instruction.name


def _folded(fold: Fold, operations: Sequence[_Operation]) -> Iterator[FoldedSchedule]:
    """The stretch from the heaviest operation of the first layer to the heaviest of the layer after the fold."""
    first, behind = (
        {o.kind: o for o in reversed(operations) if o.layer == layer and o.core_s is not None}
        for layer in (fold.first, fold.behind)
    )
    both = [(first[kind], behind[kind]) for kind in first if kind in behind]
    if not both:
        raise ParseError(
            f"the program of unrolled layers names no operation of its layer {fold.first}, so its "
            "time cannot be extrapolated. Use --loop scan or --loop unroll."
        )
    start, end = max(both, key=lambda pair: min(o.core_s or 0.0 for o in pair))
    yield FoldedSchedule(after=start.name, last=end.name, times=fold.times)
    stretch = range(start.position + 1, end.position + 1)
    for operation in _outside(fold, operations, stretch):
        yield FoldedSchedule(after=operation.before, last=operation.name, times=fold.times)


def _outside(fold: Fold, operations: Sequence[_Operation], stretch: range) -> Iterator[_Operation]:
    """The operations of folded layers that neither they nor their counterparts execute in the stretch."""
    layers = range(fold.first, fold.behind)
    by_kind: defaultdict[str, list[_Operation]] = defaultdict(list)
    for operation in operations:
        by_kind[operation.kind].append(operation)
    for same in by_kind.values():
        n_expected = sum(o.layer in layers for o in same)
        n_inside = sum(o.position in stretch for o in same)
        outside = [o for o in same if o.layer in layers and o.position not in stretch]
        yield from outside[: max(0, n_expected - n_inside)]


def deep_rows(
    rows: Sequence[Collective],
    shallow_rows: Iterable[Collective],
    step: SimulatedStep,
    layers: ShallowLayers,
) -> tuple[list[Collective], dict[str, str]]:
    """The rows, timed by the same collective in the layer that stands for theirs, and a map of HLO names.

    The map leads from names in the shallow program, whose step is `step`, to names in the deep one. Rows without a
    counterpart in the shallow program have no duration.
    """
    shallow = _Shallow(shallow_rows, step, layers)
    n_before: Counter[tuple[Any, ...]] = Counter()
    timed: list[Collective] = []
    names: dict[str, str] = {}
    for row in rows:
        key = _key(row, row.layer)
        same = shallow.counterpart(row, n_before[key])
        n_before[key] += 1
        if same is None:
            timed.append(replace(row, dur_s=None))
            continue
        times = picked(same, "start_s", "dur_s", "exposed_s", "time_basis")
        timed.append(replace(row, **times))
        names.setdefault(same.hlo_name or "", row.hlo_name or "")
    return timed, names


class _Shallow:
    def __init__(
        self, rows: Iterable[Collective], step: SimulatedStep, layers: ShallowLayers
    ) -> None:
        self._layers = layers
        self._rows: defaultdict[tuple[Any, ...], list[Collective]] = defaultdict(list)
        for row in rows:
            self._rows[_key(row, row.layer)].append(row)
        self._repeats = {  # times and period of a collective, by its first start
            span.start_s: span.repeats[0]
            for span in step.machine.spans
            if span.task.lane == LINK_LANE and span.repeats
        }

    def counterpart(self, row: Collective, number: int) -> Collective | None:
        """The collective of the shallow program with this number among equals, at its repetition."""
        if row.layer is None:
            return self._row(row, None, number)
        place, repetition = self._layers.place_of(row.layer)
        same = self._row(row, place, number)
        if same is None:
            return None
        # The stretch that repeats begins within a layer, and ends at the same point of a later one.
        fold = next((f for f in self._layers.folds if f.first <= place < f.behind), None)
        is_repeated = same.start_s in self._repeats
        if fold is None and is_repeated:
            return self._repeated(same, self._repeats[same.start_s or 0.0][0] - 1)
        if fold is not None and repetition and not is_repeated:
            same, repetition = self._row(row, place + fold.n_layers, number), repetition - 1
        return None if same is None else self._repeated(same, repetition)

    def _row(self, row: Collective, layer: int | None, number: int) -> Collective | None:
        rows = self._rows.get(_key(row, layer), [])
        return rows[number] if number < len(rows) else None

    def _repeated(self, row: Collective, repetition: int) -> Collective:
        if not repetition:
            return row
        repeats = None if row.start_s is None else self._repeats.get(row.start_s)
        if row.start_s is None or repeats is None:
            return replace(row, start_s=None)
        return replace(row, start_s=row.start_s + repetition * repeats[1])


def _key(row: Collective, layer: int | None) -> tuple[Any, ...]:
    return layer, row.part, row.kind, row.axis, row.groups, row.dtype, row.shape, row.payload_bytes
