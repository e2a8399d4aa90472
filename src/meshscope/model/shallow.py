"""The few layers of an unrolled program that stand for all layers of a deep model."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshscope.model.layers import Layer, Repeat, repeats_of

# libtpu schedules the layers of a deep program in groups of up to four: a decode step of Llama-3.1-70B
# (80 layers, v5e:4x4, tp=16) repeats the times 115.3, 132.0, 114.2 and 118.0 us from its third layer on.
FOLDED_LAYERS = 4
# The first layers are scheduled in their own way, and the last one has no weights to fetch ahead. With
# fewer than eight layers in all, the schedule is another one: six layers take 77 us each in a decode step
# of Qwen3-8B (v6e-4, tp=4), while those of eight and of 36 layers take 95.4 us.
_LAYERS_AROUND = 2  # before the folded layers, and behind them


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """`n_layers` layers of a program from `first` on, executed `times` times in the whole model."""

    first: int
    n_layers: int
    times: int

    @property
    def behind(self) -> int:
        """The layer of the program behind those of the fold."""
        return self.first + self.n_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ShallowLayers:
    """The layers of a shallow program, as indices in the model, and those that stand for others."""

    layers: tuple[int, ...]
    folds: tuple[Fold, ...]

    def place_of(self, layer: int) -> tuple[int, int]:
        """The layer of the program that stands for this layer of the model, and its repetition."""
        before = 0  # layers of the model before those of the program, less the latter
        for fold in self.folds:
            position = layer - before - fold.first
            if position < 0:
                break
            if position < fold.n_layers * fold.times:
                return fold.first + position % fold.n_layers, position // fold.n_layers
            before += fold.n_layers * (fold.times - 1)
        return layer - before, 0

    def layers_of(self, place: int, n_times: int) -> list[int]:
        """The layers of the model for which a layer of the program stands, if it runs `n_times`."""
        before = 0
        for fold in self.folds:
            # The stretch that repeats ends in the layer behind those of the fold.
            if place <= fold.behind and n_times == fold.times:
                return [place + before + n * fold.n_layers for n in range(n_times)]
            before += fold.n_layers * (fold.times - 1) if place >= fold.behind else 0
        return [place + before]


def shallow_layers(layers: Sequence[Layer]) -> ShallowLayers:
    """The layers that show the schedule of all: the first and the last, and some between that repeat."""
    kept: list[int] = []
    folds: list[Fold] = []
    for repeat in repeats_of(layers):
        indices = range(repeat.first, repeat.first + repeat.n_layers)
        fold = _fold(repeat, len(kept))
        if fold is not None:
            n_first = fold.behind - len(kept)
            n_last = repeat.n_layers - n_first - fold.n_layers * (fold.times - 1)
            folds.append(fold)
            indices = (*indices[:n_first], *indices[-n_last:])
        kept += indices
    return ShallowLayers(layers=tuple(kept), folds=tuple(folds))


def _fold(repeat: Repeat, n_kept: int) -> Fold | None:
    """The fold of a loop's middle, between its first and last bodies; None if the loop is short."""
    period = len(repeat.body)
    n_folded = max(1, FOLDED_LAYERS // period)
    n_around = -(-_LAYERS_AROUND // period)
    times, n_more = divmod(repeat.times - 2 * n_around, n_folded)
    if times <= 1:
        return None
    first = n_kept + (n_around + n_more) * period
    return Fold(first=first, n_layers=n_folded * period, times=times)
