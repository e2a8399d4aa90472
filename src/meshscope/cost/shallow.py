"""The schedule of a deep model, from an unrolled program of a few of its layers.

The shallow program is simulated with some of its layers repeated. Behind the heaviest operation of a
layer, the device is in the same state as behind its counterpart in each later layer of the same kind.
Operations that the compiler moves out of the layers, such as relayouts and gathers of weights before the
first one, are repeated where they are.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshscope.cost.machine import CORE_LANE
from meshscope.cost.simulator import FoldedSchedule, ScheduleSimulator
from meshscope.errors import ParseError
from meshscope.model.layers import Fold
from meshscope.readers.hlo.attribution import plain_name

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
    """The work and the collectives of the entry computation that name one layer."""
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
    """The stretch from the heaviest operation of the first layer to that of the layer behind."""
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
