"""Times of the collectives of a deep program, from those of a shallow unrolled program."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshscope.cost.machine import LINK_LANE
from meshscope.cost.steps import TimedStep
from meshscope.events.collective import Collective
from meshscope.model.layers import ShallowLayers


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepRows:
    """The rows of a deep program; `names` are their HLO names by those of the shallow program.

    `n_untimed` rows have no counterpart in the shallow program.
    """

    rows: list[Collective]
    names: dict[str, str]
    n_untimed: int


def deep_rows(
    rows: Sequence[Collective],
    shallow_rows: Iterable[Collective],
    step: TimedStep,
    layers: ShallowLayers,
) -> DeepRows:
    """The rows with the times of the same collective of the layer that stands for theirs.

    `step` is the simulated step of the shallow program.
    """
    shallow = _Shallow(shallow_rows, step, layers)
    n_before: Counter[tuple[Any, ...]] = Counter()
    timed: list[Collective] = []
    names: dict[str, str] = {}
    for row in rows:
        key = _key(row, row.layer)
        same = shallow.counterpart(row, n_before[key])
        n_before[key] += 1
        timed.append(replace(row, dur_s=None) if same is None else _timed(row, same))
        if same is not None:
            names.setdefault(same.hlo_name or "", row.hlo_name or "")
    return DeepRows(rows=timed, names=names, n_untimed=sum(row.dur_s is None for row in timed))


class _Shallow:
    """The rows of a shallow program, and the repetitions of its schedule."""

    def __init__(self, rows: Iterable[Collective], step: TimedStep, layers: ShallowLayers) -> None:
        self._layers = layers
        self._rows: defaultdict[tuple[Any, ...], list[Collective]] = defaultdict(list)
        for row in rows:
            self._rows[_key(row, row.layer)].append(row)
        self._repeats = {  # times and period of a collective, by its first start
            span.start_s: span.repeats[0]
            for span in step.simulated.spans
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
    """What a collective has in common in both programs."""
    return layer, row.part, row.kind, row.axis, row.groups, row.dtype, row.shape, row.payload_bytes


def _timed(row: Collective, shallow: Collective) -> Collective:
    return replace(
        row,
        start_s=shallow.start_s,
        dur_s=shallow.dur_s,
        exposed_s=shallow.exposed_s,
        time_basis=shallow.time_basis,
    )
