"""Kinds of layers, and their repeating patterns: loop bodies and the layers they cover."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MAX_PERIOD = 4  # layers per loop body; models alternate between two kinds
MAX_BLOCKS = 16  # of models whose layers are blocks of attention or of experts


class AttentionKind(StrEnum):
    """The attention pattern of a layer."""

    FULL = "full"
    NOPE = "nope"  # full, without positional encoding
    SLIDING = "sliding"
    CHUNKED = "chunked"
    LINEAR = "linear"  # a state of fixed size instead of a cache
    NGRAM_LINEAR = "ngram_linear"  # the same, after rows of a table of n-grams enter the streams
    KEY_BLOCKS = "key_blocks"  # blocks of keys that an indexer chooses
    SHARED = "shared"  # the positions that the indexer of an earlier layer chose
    COMPRESSED_SPARSE = "compressed_sparse"
    HEAVILY_COMPRESSED = "heavily_compressed"
    # Layers that share entries: full ones make and choose them, others choose again, or reuse both.
    ENCODER_FULL = "encoder_full"
    ENCODER_REUSE = "encoder_reuse"
    DECODER_FULL = "decoder_full"
    DECODER_REINDEX = "decoder_reindex"
    DECODER_REUSE = "decoder_reuse"
    NONE = "none"  # a feed-forward block alone

    @property
    def is_linear(self) -> bool:
        """Whether a layer has a state of fixed size."""
        return self in {AttentionKind.LINEAR, AttentionKind.NGRAM_LINEAR}


class MlpKind(StrEnum):
    """The feed-forward block of a layer."""

    DENSE = "dense"
    MOE = "moe"
    DENSE_AND_MOE = "dense_and_moe"  # an MLP in parallel with experts, each with a norm (Gemma 4)
    HASH_MOE = "hash_moe"  # experts are looked up by token id in a table
    NONE = "none"  # attention alone


LIMITS = ("limit", "mlp_limit")  # in the names of kinds, of routed experts and of other MLPs
SHARED_CACHE = "/shared_cache"  # the end of the names of kinds that share caches


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The kind of a layer; layers of one kind share program and weight shapes."""

    attention: AttentionKind = AttentionKind.FULL
    mlp: MlpKind = MlpKind.DENSE
    shares_cache: bool = False  # reads the cache of an earlier layer and has no keys and values
    # Modules that the checkpoint stores in another weight dtype than most, such as ("mlp.down_proj", "bf16").
    formats: tuple[tuple[str, str], ...] = ()
    # The largest magnitudes of gates and up projections, by `LIMITS` (Step-3.5).
    limits: tuple[float | None, float | None] = (None, None)

    @property
    def has_attention(self) -> bool:
        """Whether the layer has attention."""
        return self.attention is not AttentionKind.NONE

    @property
    def has_mlp(self) -> bool:
        """Whether the layer has an MLP for all tokens, not counting shared experts."""
        return self.mlp in {MlpKind.DENSE, MlpKind.DENSE_AND_MOE}

    @property
    def has_experts(self) -> bool:
        """Whether the layer has routed experts."""
        return self.mlp not in {MlpKind.DENSE, MlpKind.NONE}

    @property
    def name(self) -> str:
        """Key of the kind in weight trees, e.g. `full/moe`."""
        kind = f"{self.attention}/{self.mlp}" + SHARED_CACHE * self.shares_cache
        limits = zip(LIMITS, self.limits, strict=True)
        parts = (*self.formats, *((name, f"{n:g}") for name, n in limits if n is not None))
        return "/".join((kind, *(f"{name}={value}" for name, value in parts)))


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
    """Partition the layers into loops, each as long as its pattern repeats; the shorter of two that cover as many layers."""
    repeats: list[Repeat] = []
    start, most = 0, MAX_PERIOD
    if any(layer.mlp is MlpKind.NONE for layer in layers):
        most = MAX_BLOCKS
    while start < len(layers):
        best = Repeat(first=first + start, body=(layers[start],), times=1)
        for period in range(1, most + 1):
            body, times = tuple(layers[start : start + period]), 1
            while tuple(layers[start + times * period : start + (times + 1) * period]) == body:
                times += 1
            if times > 1 and times * period > best.n_layers:
                best = Repeat(first=first + start, body=body, times=times)
        repeats.append(best)
        start += best.n_layers
    return tuple(repeats)


def unrolled(layers: Sequence[Layer], *, first: int = 0) -> tuple[Repeat, ...]:
    """Each layer as a loop of one."""
    return tuple(Repeat(first=at, body=(one,), times=1) for at, one in enumerate(layers, first))


# libtpu schedules the layers of a deep program in groups of up to four: a decode step of Llama-3.1-70B
# (80 layers, v5e:4x4, tp=16) repeats the times 115.3, 132.0, 114.2 and 118.0 us from its third layer on.
FOLDED_LAYERS = 4
# The first layers are scheduled differently, and the last one has no weights to fetch ahead. With
# fewer than eight layers in all, the schedule differs: in a decode step of Qwen3-8B (v6e-4, tp=4), each of
# six layers takes 77 us, and each of eight or 36 layers 95.4 us.
_LAYERS_AROUND = 2  # before and after the folded layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """`n_layers` layers of a program from `first` on, executed `times` times in the whole model."""

    first: int
    n_layers: int
    times: int

    @property
    def behind(self) -> int:
        """The layer of the program after the fold."""
        return self.first + self.n_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ShallowLayers:
    """The layers of a shallow program, as indices in the model, and those that stand for others."""

    layers: tuple[int, ...]
    folds: tuple[Fold, ...]

    def place_of(self, layer: int) -> tuple[int, int]:
        """The layer of the program that stands for this layer of the model, and its repetition."""
        before = 0  # layers of the model minus layers of the program so far
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
            # The stretch that repeats ends in the layer after the fold.
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
        period = len(repeat.body)
        n_folded, n_around = max(1, FOLDED_LAYERS // period), -(-_LAYERS_AROUND // period)
        times, n_more = divmod(repeat.times - 2 * n_around, n_folded)
        if times > 1:  # the middle of a long loop, between its first and last bodies
            n_before, n_each = (n_around + n_more) * period, n_folded * period
            folds.append(Fold(first=len(kept) + n_before, n_layers=n_each, times=times))
            n_last = repeat.n_layers - n_before - n_each * times
            indices = (*indices[: n_before + n_each], *indices[-n_last:])
        kept += indices
    return ShallowLayers(layers=tuple(kept), folds=tuple(folds))
