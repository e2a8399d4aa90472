"""How the layers of a model repeat: what can be one loop body, and which layers it stands for."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshscope.spec.model.model import Layer

MAX_PERIOD = 4  # layers of one loop body; models alternate between two kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Layers from `first` on: a body of the kinds in `body`, `times` over."""

    first: int
    body: tuple[Layer, ...]
    times: int

    @property
    def n_layers(self) -> int:
        """Layers that this stands for."""
        return len(self.body) * self.times

    def layers_at(self, position: int) -> range:
        """The layers that this position of the body stands for."""
        return range(self.first + position, self.first + self.n_layers, len(self.body))


def repeats_of(layers: Sequence[Layer], *, first: int = 0) -> tuple[Repeat, ...]:
    """The layers as loops, each as long as its pattern holds; a lone layer is a loop of one.

    Where two patterns hold equally long the shorter body wins.
    """
    found: list[Repeat] = []
    start = 0
    while start < len(layers):
        best = max(
            (_repeat(layers, start, period) for period in range(1, MAX_PERIOD + 1)),
            key=lambda repeat: (repeat.n_layers, -len(repeat.body)),
        )
        found.append(Repeat(first=first + start, body=best.body, times=best.times))
        start += best.n_layers
    return tuple(found)


def unrolled(layers: Sequence[Layer], *, first: int = 0) -> tuple[Repeat, ...]:
    """The layers one after the other."""
    return tuple(
        Repeat(first=first + index, body=(layer,), times=1) for index, layer in enumerate(layers)
    )


def _repeat(layers: Sequence[Layer], start: int, period: int) -> Repeat:
    """The body of this length at `start`; a single layer where it does not repeat."""
    body = tuple(layers[start : start + period])
    times = 1
    while tuple(layers[start + times * period : start + (times + 1) * period]) == body:
        times += 1
    if times == 1 or len(body) < period:
        return Repeat(first=start, body=body[:1], times=1)
    return Repeat(first=start, body=body, times=times)
