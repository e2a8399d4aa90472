"""What every attention mechanism declares: weights, cache, collectives over cp, work, temporaries and limits.

A mechanism is a dataclass of global sizes with these methods, in a file with its config keys. Everything else asks
the mechanism. Letters: T tokens, S keys, N query heads, K key and value heads, H width of a head.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

from meshscope.events.enums import Kind
from meshscope.model.arrays import CacheArray, Dim, Weight, WeightBuilder, letters
from meshscope.model.families import FamilyTraits
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.reader import ConfigReader, Rope

T = TypeVar("T", bound="LayerAttention")


# Passes over activations around attention, each a read or a write of the whole array: queries, keys and values are
# rotated, some also normalized. Counted in simulated prefills of meshscope's Llama-3.1-8B, Qwen3-8B and Qwen3-32B on
# v6e, and of Llama-3.1-8B in vLLM 0.12 (libtpu 0.0.42.1).
HEAD_PASSES = 2
NORM_PASSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """A scale of queries that grows with their position p (arXiv 2501.19399): strength log(1 + floor((p + offset) / floor)) + 1.

    If it `is_ratio`, log(p) / log(floor), and at least 1 (Grok).
    """

    floor: int
    strength: float
    offset: float = 1.0
    is_ratio: bool = False


def with_rope(reader: ConfigReader, row: FamilyTraits) -> ConfigReader:
    """The config with the default positions of layers that attend to all positions."""
    stated = {key: value for key, value in reader.config.items() if value or key not in row.rope}
    return reader.over({**row.rope, **stated})


LLAMA_4_BETA = 0.1  # of Ministral3Config


def read_temperature(reader: ConfigReader, rope: Rope) -> Temperature:
    """The scale of queries beyond the original context, from `rope_parameters`."""
    beta = ConfigReader(reader.mapping("rope_parameters"), reader.source)
    strength = beta.number("llama_4_scaling_beta", LLAMA_4_BETA)
    reader.used.add("rope.llama_4_scaling_beta")
    return Temperature(floor=rope.original_max_position, strength=strength, offset=0.0)


class Mechanism(StrEnum):
    """The attention mechanisms, by which programs choose their implementation."""

    GROUPED = "grouped-query attention"
    LINEAR = "linear attention"
    STATE_SPACE = "state spaces"
    KIMI_DELTA = "Kimi delta attention"
    LATENT = "latent attention"
    COMPRESSED = "compressed attention"
    REUSED = "attention to shared entries"
    NONE = "no attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """A step of one layer on one device of `tp` and `cp`, for the sequences of a micro-batch or chunk."""

    is_prefill: bool
    is_cut: bool  # a chunk of a prompt
    tp: int
    cp: int
    n_sequences: int
    n_prompt: int
    n_positions: int  # tokens of a sequence in the step
    n_local: int  # the share of this device under cp
    n_keys: int  # that queries see at once
    n_slots: int  # of the cache
    act_bytes: float
    n_ring_sends: int | None = None  # that move keys around a ring; None if they are gathered

    @property
    def n_tokens(self) -> int:
        """Tokens of this device."""
        return self.n_sequences * self.n_local


@dataclass(frozen=True, slots=True)
class ContextExchange:
    """A collective over cp: `count` times, of an array [n_sequences, ...] in `dtype` or the activation dtype."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: str | None = None
    count: int = 1


Exchanges = Iterator[ContextExchange]


def gather_over_cp(shape: tuple[int, ...], dtype: str | None = None) -> ContextExchange:
    """An all-gather over cp of an array [n_sequences, ...]."""
    return ContextExchange(Kind.ALL_GATHER, shape, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWork:
    """FLOPs and elements of all heads over a prompt, by what they grow with."""

    rate: int = 1  # keys of an entry; a pair is a query with a key or an entry
    pair_flops: float = 0.0
    pair_scores: float = 0.0  # that plain attention writes
    token_flops: float = 0.0
    split_flops: float = 0.0  # per token, if cp splits the prompt
    sequence_flops: float = 0.0
    chosen_flops: float = 0.0  # of one query with one chosen entry
    index_flops: float = 0.0  # of one query with one entry that an indexer scores
    index_f32: float = 0.0  # float32 elements that the choice reads and writes for each
    token_f32: float = 0.0  # float32 elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """The lightning indexer of sparse attention, which selects `top_k` positions per query."""

    n_heads: int
    head_dim: int
    top_k: int
    is_interleaved: bool = False  # as in `Rope`


class LayerAttention(ABC):
    """The attention of a layer. Methods take the layer's kind where layers of one model differ."""

    __slots__ = ()
    mechanism: ClassVar[Mechanism]
    n_small_ops: ClassVar[int]  # besides products and scores, in decode programs of libtpu 0.0.42.1
    # Weights whose stack over layers scanned programs copy into another layout.
    copied_stacks: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def weights(self, hidden: int, tp: int, layer: Layer, *, is_fused: bool) -> Iterator[Weight]:
        """The weights of a layer without norms around it; `is_fused` joins projections as some families do."""

    @abstractmethod
    def cache(self, kind: AttentionKind, tp: int, n_tokens: int = 1) -> Iterator[CacheArray]:
        """The arrays that a layer caches; a decode step has `n_tokens`, and only the first is certain."""

    @abstractmethod
    def over_cp(self, kind: AttentionKind, step: AttentionStep) -> Iterator[ContextExchange]:
        """The collectives over cp, in program order."""

    @abstractmethod
    def flops(self, kind: AttentionKind, n: int) -> float:
        """FLOPs of the first `n` queries of a sequence under a causal mask, all heads, indexer included.

        Two for each multiplication with a key that a query may see, or its value; linear attention counts the recurrence.
        """

    # Weights that all tokens of a prompt need in layers that only its last tokens pass through.
    prompt_weights: ClassVar[frozenset[str]] = frozenset()

    def n_replayed(self, kind: AttentionKind, n_prompt: int) -> int | None:
        """The last tokens of a prompt, if only they pass through layers of this kind."""
        return None

    def replay_flops(self, kind: AttentionKind, n_prompt: int) -> float:
        """FLOPs of those tokens, all heads, indexer included."""
        return 0.0

    def shared_arrays(self, kind: AttentionKind) -> Iterator[CacheArray]:
        """Arrays that other layers cache, of which decode reads the chosen entries and the keys of candidates."""
        return iter(())

    @abstractmethod
    def prompt_work(self, kind: AttentionKind, n_blocks: int) -> PromptWork:
        """The work of a prompt that cp splits into `n_blocks` blocks."""

    @abstractmethod
    def passed_elements(self, tp: int, *, is_prefill: bool, is_served: bool) -> float:
        """Elements per token that passes between projections and attention read or write on one device."""

    @abstractmethod
    def step_bytes(self, step: AttentionStep) -> float:
        """Bytes of queries, keys, values and outputs of a layer on one device."""

    def page_elements(
        self, kind: AttentionKind, tp: int, packing: int, *, has_half_rows: bool
    ) -> int | None:
        """Elements of a position in pages of a serving engine, `packing` in a word; None without pages."""
        return None  # with `has_half_rows`, key and value of 64 channels share a row

    def window_of(self, kind: AttentionKind) -> int | None:
        """The window of a layer in positions; None if it attends to the whole context. A chunk counts as a window of its size."""
        return None

    def chosen_by(self, kind: AttentionKind) -> tuple[Indexer, int] | None:
        """The indexer that a layer has, and the positions of an entry that it scores."""
        return None


class Attention(LayerAttention):
    """The attention of a model; `of` gives a layer's attention."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]  # so that `replace` takes any mechanism
    why_no_ring: ClassVar[str | None] = None  # the reason why keys cannot move around a ring
    why_few_axes: ClassVar[str | None] = None  # the reason why few axes and programs have it
    has_whole_caches: ClassVar[bool] = False  # all devices of cp have the same, and decode alike
    n_heads: int
    rope: Rope

    @property
    @abstractmethod
    def head_widths(self) -> tuple[int, int]:
        """Widths of a query and of a value head."""

    @abstractmethod
    def check(self, source: str) -> None:
        """Raise SpecError unless the sizes fit each other."""

    @abstractmethod
    def attended_pairs(self, kind: AttentionKind, n: int) -> int:
        """Pairs of the first `n` queries of a sequence with the keys or entries that each attends to."""

    def of(self, kind: AttentionKind) -> LayerAttention:
        """The attention of layers of this kind."""
        return self

    def kv_heads(self, kind: AttentionKind) -> int:
        """Key and value heads of layers of this kind; 0 where all heads share them."""
        return 0

    def query_heads(self, kind: AttentionKind) -> int:
        """Query heads of layers of this kind."""
        return self.n_heads

    def cached_widths(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """Shapes cached per position on one device: [K,H] for keys and values, or a latent."""
        raise AssertionError(f"the cached shapes of {self.mechanism} depend on the layer")

    @property
    def n_token_sums(self) -> int:
        """Float32 sums of each token over tp, of squares for norms over all heads."""
        return 0

    @property
    def chosen_positions(self) -> int | None:
        """Positions in the choice of an indexer, entries with all that they compress; None without an indexer."""
        return None

    @property
    def chosen_rate(self) -> int:
        """Positions of an entry in `chosen_positions`."""
        return 1

    @property
    def candidate_positions(self) -> int | None:
        """Positions among which some layers choose; None if all choose among all."""
        return None

    def prompt_work(self, kind: AttentionKind, n_blocks: int) -> PromptWork:
        """Scores and weighted values; an indexer saves nothing here: its layers count as full attention."""
        rate = self.entry_rate(kind)
        return PromptWork(rate=rate, pair_flops=self.pair_flops(), pair_scores=self.n_heads)

    def entry_rate(self, kind: AttentionKind) -> int:
        """Positions of an entry that queries attend to."""
        return 1

    def pair_flops(self) -> float:
        """FLOPs of one query with one key and its value, all heads."""
        return 2.0 * self.n_heads * sum(self.head_widths)

    def flops(self, kind: AttentionKind, n: int) -> float:
        flops = self.pair_flops() * self.attended_pairs(kind, n)
        choice = None if kind is AttentionKind.SHARED else self.chosen_by(kind)
        if choice is not None:
            indexer, rate = choice
            flops += 2.0 * indexer.n_heads * (indexer.head_dim + 1) * seen_pairs(n, rate=rate)
        return flops

    def over_cp(self, kind: AttentionKind, step: AttentionStep) -> Iterator[ContextExchange]:
        """A merge of partial softmaxes in decode, the queries of chunks, or the keys of whole prompts."""
        n, n_heads = step.n_sequences, self.n_heads // step.tp
        width, value_width = self.head_widths
        if step.is_prefill and not step.is_cut:
            yield from self.shared_prompt(kind, step)
        elif (
            step.is_prefill
        ):  # the queries of all blocks, then each device's outputs and sums for their owners
            of_device = (step.cp, n, step.n_local)
            yield ContextExchange(Kind.ALL_GATHER, (n, step.n_positions, n_heads, width))
            yield ContextExchange(Kind.ALL_TO_ALL, (*of_device, n_heads * value_width))
            yield ContextExchange(Kind.ALL_TO_ALL, (*of_device, n_heads), "f32")
        else:  # indexer scores [b,s,n] that each device proposes; maxima [b,s,N], then sums [b,s,N(H+1)]
            choice = self.chosen_by(kind)
            arrays = (array for array in self.cache(kind, step.tp) if array.name in INDEX_ARRAYS)
            if choice is not None and (array := next(arrays, None)) is not None:
                n_candidates = step.cp * min(choice[0].top_k, array.n_slots(step.n_slots))
                if choice[1] > self.chosen_rate:  # other devices have the positions of an entry
                    n_candidates *= 2  # with the numbers of the entries
                yield ContextExchange(Kind.ALL_GATHER, (n, step.n_positions, n_candidates), "f32")
            for size in (n_heads, n_heads * (value_width + 1)):
                yield ContextExchange(Kind.ALL_REDUCE, (n, step.n_positions, size), "f32")

    def shared_prompt(self, kind: AttentionKind, step: AttentionStep) -> Iterator[ContextExchange]:
        """Keys and values (or latents) of the other blocks, by ring permutes or an all-gather."""
        for widths in self.cached_widths(step.tp):
            if step.n_ring_sends is None:
                shape = (step.n_sequences, step.n_positions, *widths)
                yield ContextExchange(Kind.ALL_GATHER, shape)
            elif step.n_ring_sends:
                shape = (step.n_sequences, step.n_local, *widths)
                yield ContextExchange(Kind.PERMUTE, shape, count=step.n_ring_sends)

    def score_keys(self, step: AttentionStep) -> float:
        """Keys of a query whose scores plain attention has at once, masked ones included."""
        return step.n_keys

    def paged_window(self, kind: AttentionKind) -> int | None:
        """The positions beyond which an engine frees the pages of a layer; None if it keeps all."""
        return None

    def unused_weights(self, n_prompt: int) -> frozenset[str]:
        """Weights that a prompt of this length does not need."""
        return frozenset()

    @property
    def tp_sizes(self) -> Mapping[str, int]:
        """The sizes that tp divides, by name."""
        return {"n_heads": self.n_heads}

    @property
    def replicated_heads(self) -> tuple[int, ...]:
        """Numbers of heads that tp divides, or replicates up to a multiple."""
        return ()

    @property
    def joint_positions(self) -> int:
        """The positions of a prompt that layers compress together; a chunk has a multiple of them."""
        return 1

    def why_whole_prompts(self, name: str) -> str | None:
        """The reason why cp cannot split the chunks of a prompt of model `name`; None if it can."""
        return None


class NoAttention(LayerAttention):
    """The attention of a layer that is a feed-forward block alone."""

    mechanism = Mechanism.NONE
    n_small_ops = 0

    def weights(self, hidden: int, tp: int, layer: Layer, *, is_fused: bool) -> Iterator[Weight]:
        return iter(())

    def cache(self, kind: AttentionKind, tp: int, n_tokens: int = 1) -> Iterator[CacheArray]:
        return iter(())

    def over_cp(self, kind: AttentionKind, step: AttentionStep) -> Exchanges:
        return iter(())

    def flops(self, kind: AttentionKind, n: int) -> float:
        return 0.0

    def prompt_work(self, kind: AttentionKind, n_blocks: int) -> PromptWork:
        return PromptWork()

    def passed_elements(self, tp: int, *, is_prefill: bool, is_served: bool) -> float:
        return 0.0

    def step_bytes(self, step: AttentionStep) -> float:
        return 0.0


NO_ATTENTION = NoAttention()


def narrowed(attention: LayerAttention, kind: type[T]) -> T:
    """The attention of a layer that is known to be of this kind."""
    assert isinstance(attention, kind)
    return attention


INDEX_ARRAYS = frozenset({"index_k", "index", "index_scale"})  # cached keys of indexers


def seen_pairs(n: int, *, rate: int = 1, most: int | None = None) -> int:
    """The sum of `min(i // rate, most)` for i = 1 to n: entries of `rate` positions that n queries see."""
    n_growing = n if most is None else min(n, most * rate)
    n_whole, rest = divmod(n_growing, rate)
    growing = rate * n_whole * (n_whole - 1) // 2 + n_whole * (rest + 1)
    return growing + (n - n_growing) * (most or 0)


def n_open_windows(rate: int, n_tokens: int) -> int:
    """The most windows of `rate` positions that `n_tokens` successive positions touch."""
    return (n_tokens - 1 + rate - 1) // rate + 1


def aligned(n: int, multiple: int) -> int:
    """The next multiple."""
    return -(-n // multiple) * multiple


def index_projections(
    d: int, q_rank: int, indexer: Indexer, base: str, *between: Weight
) -> Iterator[Weight]:
    """Queries of an indexer and the weights of its heads, small and replicated: all heads share its selection."""
    dims = letters(Dim.NORM, n=indexer.n_heads, h=indexer.head_dim)
    builder = WeightBuilder(base, letters(Dim.HIDDEN, D=d, q=q_rank) | dims)
    yield builder.matrix("index_wq", "qnh", "wq_b.weight")
    yield from between
    yield builder.matrix("index_weights", "Dn", "weights_proj.weight", inputs=())


def window_blocks(window: Any, block: Any) -> Any:
    """Key blocks that one block of queries touches under a window. The arguments may be arrays."""
    return -(-(window - 1) // block) + 1


def causal_blocks(n_rows: Any, width: Any) -> Any:
    """Blocks of a causal band of `n_rows` block rows, each at most `width` <= `n_rows` blocks wide. Arguments may be arrays."""
    return width * (width + 1) / 2 + (n_rows - width) * width
