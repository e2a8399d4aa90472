"""Repeating patterns of layers: loop bodies and the layers they cover."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshscope.model.model import Layer

MAX_PERIOD = 4  # layers per loop body; models alternate between two kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Layers from `first` on: the kinds in `body`, repeated `times` times."""

    first: int
    body: tuple[Layer, ...]
    times: int

    @property
    def n_layers(self) -> int:
        """Layers covered by the loop."""
        return len(self.body) * self.times

    def layers_at(self, position: int) -> range:
        """Indices of the layers at this position of the body."""
        return range(self.first + position, self.first + self.n_layers, len(self.body))


def repeats_of(layers: Sequence[Layer], *, first: int = 0) -> tuple[Repeat, ...]:
    """Partition the layers into loops, each as long as its pattern repeats.

    A layer without repetition is a loop of one. If two patterns cover equally many layers, the
    shorter body wins.
    """
    repeats: list[Repeat] = []
    start = 0
    while start < len(layers):
        best = max(
            (_repeat(layers, start, period) for period in range(1, MAX_PERIOD + 1)),
            key=lambda repeat: (repeat.n_layers, -len(repeat.body)),
        )
        repeats.append(Repeat(first=first + start, body=best.body, times=best.times))
        start += best.n_layers
    return tuple(repeats)


def unrolled(layers: Sequence[Layer], *, first: int = 0) -> tuple[Repeat, ...]:
    """Each layer as a loop of one."""
    return tuple(
        Repeat(first=first + index, body=(layer,), times=1) for index, layer in enumerate(layers)
    )


def _repeat(layers: Sequence[Layer], start: int, period: int) -> Repeat:
    """The loop of `period` layers at `start`; a single layer if the pattern does not repeat."""
    body = tuple(layers[start : start + period])
    times = 1
    while tuple(layers[start + times * period : start + (times + 1) * period]) == body:
        times += 1
    if times == 1 or len(body) < period:
        return Repeat(first=start, body=body[:1], times=1)
    return Repeat(first=start, body=body, times=times)
