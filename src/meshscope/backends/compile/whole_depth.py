"""The whole model's rows and schedule from a program of a few of its layers.

The last layers of the program that are alike stand for those that it lacks.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from meshscope.errors import SpecError
from meshscope.events.collective import Collective
from meshscope.readers.hlo.attribution import OUTSIDE_LAYERS, scope_of
from meshscope.readers.hlo.module import HloModule
from meshscope.spec.model.repeats import MAX_PERIOD
from meshscope.spec.model.shallow import FOLDED_LAYERS, Fold, ShallowLayers


def whole_depth(
    module: HloModule, rows: Sequence[Collective], n_layers: int
) -> ShallowLayers | None:
    """The layers of the program, with those that repeat until there are `n_layers`; None if it has no layers.

    SpecError if the program has more layers, or none that show how they repeat.
    """
    if n_looped := _check_loops(module, n_layers):
        return ShallowLayers(layers=tuple(range(n_looped)), folds=())
    kinds = _layer_kinds(module, rows)
    if not kinds:
        return None
    n_missing = n_layers - len(kinds)
    if n_missing < 0:
        raise SpecError(
            f"--layers {n_layers}: the program has {len(kinds)} layers. Give the number of all layers of "
            "the model, or leave the option out."
        )
    indices = tuple(range(len(kinds)))
    if not n_missing:
        return ShallowLayers(layers=indices, folds=())
    for period in range(1, MAX_PERIOD + 1):
        times = _n_repeats(kinds, period)
        if times > 1 and n_missing % period == 0:
            fold = _fold(len(kinds), period, times, n_missing)
            return ShallowLayers(layers=indices, folds=(fold,))
    raise SpecError(
        f"--layers {n_layers}: the last of the program's {len(kinds)} layers are not alike, so the time of "
        "a layer is unknown. Compile at least two layers of each kind at its end."
    )


def _check_loops(module: HloModule, n_layers: int) -> int:
    """Layers up to the last one in a loop, 0 without loops; SpecError if the model has more."""
    assert module.entry is not None
    loops = [
        (scope.layers[-1] + 1, instruction)
        for instruction in module.entry.instructions
        if (scope := scope_of(instruction.op_name)).layers is not None and len(scope.layers) > 1
    ]
    if not loops:
        return 0
    n_looped, loop = max(loops, key=lambda pair: pair[0])
    if n_looped != n_layers:
        raise SpecError(
            f"{module.where(loop)}: '{loop.name}' runs layers up to {n_looped - 1} in a loop, so the program "
            f"does not stand for {n_layers} layers. Leave --layers and --model out."
        )
    return n_looped


def _layer_kinds(module: HloModule, rows: Sequence[Collective]) -> list[Hashable]:
    """What each layer of the entry computation consists of: parts, kernels and collectives."""
    assert module.entry is not None
    kinds: dict[int, Counter[Hashable]] = {}
    for instruction in module.entry.instructions:
        scope = scope_of(instruction.op_name)
        if scope.layers is None or scope.part in OUTSIDE_LAYERS:
            continue
        kind = kinds.setdefault(scope.layers[0], Counter())
        if scope.part is not None:
            kind[scope.part] = 1
        if instruction.custom_call_target == "tpu_custom_call":
            kind[instruction.name.rstrip("0123456789.")] += 1
    for row in rows:
        if row.layer is not None:
            kinds.setdefault(row.layer, Counter())[row.part, row.kind, row.shape] += 1
    return [
        frozenset(kinds.get(layer, Counter()).items())
        for layer in range(max(kinds, default=-1) + 1)
    ]


def _n_repeats(kinds: Sequence[Hashable], period: int) -> int:
    """How often the last `period` layers are repeated at the end of the program."""
    body = kinds[-period:]
    times = 0
    while len(kinds) >= (times + 1) * period:
        end = len(kinds) - times * period
        if kinds[end - period : end] != body:
            break
        times += 1
    return times


def _fold(n_layers: int, period: int, times: int, n_missing: int) -> Fold:
    """The layers in the middle of those that are alike; the first and the last have schedules of their own."""
    n_around = min(2, (times - 1) // 2)
    n_most = min(max(1, FOLDED_LAYERS // period), times - n_around - max(1, n_around))
    n_bodies = next(n for n in range(n_most, 0, -1) if n_missing // period % n == 0)
    return Fold(
        first=n_layers - (times - n_around) * period,
        n_layers=n_bodies * period,
        times=1 + n_missing // (n_bodies * period),
    )


def rows_of_all_layers(rows: Sequence[Collective], layers: ShallowLayers) -> list[Collective]:
    """The rows of every layer of the model, those of a missing layer from the layer that stands for it."""
    n_layers = len(layers.layers) + sum(f.n_layers * (f.times - 1) for f in layers.folds)
    inside = [row for row in rows if row.layer is not None]
    first = rows.index(inside[0]) if inside else len(rows)
    before = [row for row in rows[:first] if row.layer is None]
    behind = [row for row in rows[first:] if row.layer is None]
    repeated = [
        replace(row, layer=layer)
        for layer in range(n_layers)
        for row in inside
        if row.layer == layers.place_of(layer)[0]
    ]
    return [*before, *repeated, *behind]


def depth_note(layers: ShallowLayers) -> str | None:
    """Which layers of the program stand for others."""
    n_layers = len(layers.layers) + sum(f.n_layers * (f.times - 1) for f in layers.folds)
    folds = " and ".join(
        f"layers {fold.first} to {fold.behind - 1} repeat {fold.times} times"
        if fold.n_layers > 1
        else f"layer {fold.first} repeats {fold.times} times"
        for fold in layers.folds
    )
    if not folds:
        return None
    return f"time of {n_layers} layers from a program of {len(layers.layers)}: {folds}"
