"""Kinds of layers, and their repeating patterns: loop bodies and the layers they cover."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MAX_PERIOD = 4  # layers per loop body; models alternate between two kinds


class AttentionKind(StrEnum):
    """The attention pattern of a layer."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    LINEAR = "linear"  # a state of fixed size instead of a cache
    SHARED = "shared"  # the positions that the indexer of an earlier layer chose
    COMPRESSED_SPARSE = "compressed_sparse"
    HEAVILY_COMPRESSED = "heavily_compressed"


class MlpKind(StrEnum):
    """The feed-forward block of a layer."""

    DENSE = "dense"
    MOE = "moe"
    DENSE_AND_MOE = "dense_and_moe"  # an MLP beside experts, each with a norm after it (Gemma 4)
    HASH_MOE = "hash_moe"  # experts are looked up by token id in a table


SHARED_CACHE = "/shared_cache"  # the end of the names of kinds that share caches


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The kind of a layer; layers of one kind share program and weight shapes.

    A layer that `shares_cache` has no keys and values: it reads the cache of an earlier layer.
    """

    attention: AttentionKind = AttentionKind.FULL
    mlp: MlpKind = MlpKind.DENSE
    shares_cache: bool = False

    @property
    def has_mlp(self) -> bool:
        """Whether the layer has an MLP that all tokens pass, beside that of shared experts."""
        return self.mlp in {MlpKind.DENSE, MlpKind.DENSE_AND_MOE}

    @property
    def has_experts(self) -> bool:
        """Whether the layer has routed experts."""
        return self.mlp is not MlpKind.DENSE

    @property
    def name(self) -> str:
        """Key of the kind in weight trees, e.g. `full/moe`."""
        return f"{self.attention}/{self.mlp}" + SHARED_CACHE * self.shares_cache


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
