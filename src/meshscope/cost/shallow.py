"""The schedule of a deep model and the times of its collectives, from an unrolled program of a few of its layers.

The shallow program is simulated with some of its layers repeated. After the heaviest operation of a
layer, the device is in the same state as after its counterpart in each later layer of the same kind.
Operations that the compiler moves out of the layers, such as relayouts and gathers of weights before the
first one, are repeated where they are.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshscope.cost.machine import CORE_LANE, LINK_LANE
from meshscope.cost.simulator import FoldedSchedule, ScheduleSimulator, SimulatedStep
from meshscope.errors import ParseError
from meshscope.events.collective import Collective
from meshscope.model.layers import Fold, ShallowLayers
from meshscope.readers.hlo.attribution import plain_name
from meshscope.serialize import picked

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


def folded_schedules(
    schedule: ScheduleSimulator, folds: Sequence[Fold]
) -> tuple[FoldedSchedule, ...]:
    """The stretches of the schedule that execute the folded layers; ParseError if it names no layers."""
    operations = tuple(_operations(schedule))
    return tuple(folded for fold in folds for folded in _folded(fold, operations))


def _operations(schedule: ScheduleSimulator) -> Iterator[_Operation]:
    assert schedule.module.entry is not None
    spans = schedule.simulate().spans
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
    """The stretch from the heaviest operation of the first layer to that of the layer after the fold."""
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
            for span in step.spans
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
