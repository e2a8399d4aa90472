"""Model architecture: global sizes, independent of mesh and plan."""

from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from itertools import pairwise

from meshscope.errors import SpecError
from meshscope.model.families import Family
from meshscope.model.layers import AttentionKind, Layer, Repeat, repeats_of
from meshscope.model.mechanisms.attention import LayerAttention
from meshscope.model.mechanisms.compressed import CompressedAttention
from meshscope.model.mechanisms.drafts import DraftBlocks, DraftHead, ImageTower
from meshscope.model.mechanisms.grouped import GroupedAttention
from meshscope.model.mechanisms.key_blocks import KeyBlockAttention, PooledKeyAttention
from meshscope.model.mechanisms.latent import LatentAttention
from meshscope.model.mechanisms.mixture import Activation, MixtureOfExperts
from meshscope.model.mechanisms.ngrams import Engram
from meshscope.model.mechanisms.reused import FULL, ReusedAttention
from meshscope.model.mechanisms.streams import LayerInputs, Streams
from meshscope.model.quantization import UNQUANTIZED_DTYPE, quantization_of
from meshscope.model.reader import MAX_SIZE, RopeType


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only transformer."""

    name: str
    family: Family
    layers: tuple[Layer, ...]  # the kind of each, in order
    hidden: int  # width of the residual stream
    ffn: int | None  # width of the gated MLP in dense layers; None without
    vocab: int
    attention: (
        GroupedAttention
        | KeyBlockAttention
        | PooledKeyAttention
        | LatentAttention
        | CompressedAttention
        | ReusedAttention
    )
    norm_eps: float
    has_tied_embeddings: bool
    has_mlp_bias: bool
    max_position: int | None
    source: str  # file, URL or catalog source of the config
    moe: MixtureOfExperts | None = None
    hyper: Streams | None = None
    layer_inputs: LayerInputs | None = None
    activation: Activation = Activation.SWIGLU  # of the MLP in dense layers
    norm_offset: float = 0.0  # norms multiply by it plus their scale
    has_input_norms: bool = True  # before each block
    has_post_norms: bool = False  # after each block
    has_mean_norms: bool = False  # norms subtract the mean
    is_parallel: bool = False  # attention and MLP take the same normed input
    has_layer_scale: bool = False  # a number scales the output of each layer
    has_wide_mlps: bool = False  # twice as wide in layers that share a cache
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what a block adds
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # the largest magnitude of logits
    draft_head: DraftHead | DraftBlocks | None = None  # takes hidden states of the drafted model
    engram: Engram | None = None
    # Parts of the checkpoint that no step of the model itself reads.
    drafts: DraftBlocks | None = None
    images: ImageTower | None = None
    # The `model_type` of the multimodal config that this is the text part of.
    text_part_of: str | None = field(default=None, compare=False)
    # Keys of the config with their values that nothing was read from, and that seem to change nothing counted.
    unread_keys: tuple[str, ...] = field(default=(), compare=False)
    # Layers for multi-token prediction in the checkpoint, which only speculative decoding uses.
    n_mtp_layers: int | None = field(default=None, compare=False)
    # How the config says that the checkpoint stores weights, and the weight dtype that counts its bytes; if there
    # is none, the nearest. The KV cache for which it has scales.
    stored_as: str | None = field(default=None, compare=False)
    stored_dtype: str | None = field(default=None, compare=False)
    nearest_dtype: str | None = field(default=None, compare=False)
    stored_cache: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Check that sizes are positive and consistent."""
        parts = (getattr(self.attention, name, None) for name in ("linear", "full_heads"))
        parts = (*parts, self.moe, self.hyper, self.layer_inputs, self.drafts, self.images)
        for part in (self, self.attention, *parts):
            for one in fields(part) if is_dataclass(part) else ():
                value = getattr(part, one.name)
                least = 0 if one.name == "rope_dim" else 1
                if isinstance(value, int) and not isinstance(value, bool) and value < least:
                    raise SpecError(f"{self.source}: {one.name}={value} must be positive.")
        if not self.layers:
            raise SpecError(f"{self.source}: the model has no layers. It needs at least one.")
        self.attention.check(self.source)
        kinds = list(self.layers)
        n_before = next((i for i, layer in enumerate(kinds) if layer.shares_cache), len(kinds))
        for layer in kinds[n_before:]:
            if not layer.shares_cache or self.cache_layer(layer) not in kinds[:n_before]:
                raise SpecError(
                    f"{self.source}: the last {len(kinds) - n_before} layers share caches, but no layer of kind "
                    f"'{layer.attention}' before them has one. Correct num_kv_shared_layers."
                )
        if self.moe is not None:
            self.moe.check(self.source)

    def __hash__(self) -> int:
        """A hash that skips the layers: the key of many small caches."""
        return hash((self.name, self.source, self.hidden, self.n_layers))

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def attention_of(self, layer: Layer) -> LayerAttention:
        """The attention of a layer."""
        return self.attention.of(layer.attention)

    def has(self, kind: AttentionKind) -> bool:
        """Whether any layer has this attention."""
        return kind in _attention_kinds(self)

    @property
    def has_final_norm(self) -> bool:
        """Whether a norm follows the last layer; gates of streams have one of their own."""
        return self.hyper is None or not self.hyper.is_gated

    @property
    def why_explicit(self) -> str | None:
        """What its layers do that only our programs with explicit collectives have; None for most models."""
        of_tables = None if self.engram is None else "layers read tables of n-grams"
        return self.attention.why_few_axes or of_tables

    @property
    def tables(self) -> tuple[int, ...]:
        """The layers that tables of n-grams precede."""
        before = () if self.engram is None else self.engram.layers
        return tuple(layer for layer in before if layer < self.n_layers)

    def repeats(self, of: range | None = None) -> tuple[Repeat, ...]:
        """These layers or all in loops; those that make what later ones share, or that a table of n-grams precedes, alone."""
        of = of or range(self.n_layers)
        alone = [at for at in of if self.layers[at].attention in FULL or at in self.tables]
        edges = sorted({of.start, of.stop, *alone, *(at + 1 for at in alone)})
        parts = (repeats_of(self.layers[a:b], first=a) for a, b in pairwise(edges))
        return tuple(repeat for part in parts for repeat in part)

    @property
    def row_width(self) -> int:
        """Channels of a row that experts take and return."""
        return self.hidden if self.moe is None else self.moe.row_width(self.hidden)

    def cache_layer(self, layer: Layer) -> Layer:
        """The kind whose last layer writes the cache that a layer of this kind shares."""
        return replace(layer, shares_cache=False)

    def ffn_of(self, layer: Layer) -> int:
        """The width of the MLP of a layer that has one."""
        assert self.ffn is not None
        return self.ffn * (2 if self.has_wide_mlps and layer.shares_cache else 1)

    @property
    def default_weight_dtype(self) -> str:
        """The weight dtype unless one is named: the checkpoint's quantized format or the nearest, else bf16, as TPU servers load."""
        stored = self.stored_dtype or self.nearest_dtype
        if stored is None or quantization_of(stored) is None:
            return UNQUANTIZED_DTYPE
        return stored

    @property
    def n_replayed(self) -> int | None:
        """The most last tokens of a prompt that alone pass through some layers; None if all pass through all."""
        return _n_replayed(self)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what is not counted, and on what the config leaves open."""
        of, unread = self.text_part_of, ", ".join(self.unread_keys)
        n_end = self.n_replayed
        ends = (self.attention_of(x).n_replayed(x.attention, MAX_SIZE) for x in self.layers)
        first = next((at for at, n in enumerate(ends) if n is not None), 0)
        notes = {
            f"in prefill, layers {first} to {self.n_layers - 1} have the last {n_end} tokens of each prompt, as "
            "published; servers that lack this take all tokens through all layers": n_end
            is not None,
            f"only the text part of this multimodal model ({of}) is counted": of is not None,
            f"not read from the config: {unread}": unread,
            "the config has no max_position_embeddings: the longest context is unknown": (
                self.max_position is None
            ),
        }
        return tuple(note for note, is_so in notes.items() if is_so)

    @property
    def assumed_dtype(self) -> str | None:
        """The weight dtype that stands for a stored format without an equal, and may be larger; None without."""
        is_plain = self.nearest_dtype is not None and quantization_of(self.nearest_dtype) is None
        if self.stored_as is None or self.stored_dtype is not None or is_plain:
            return None
        return self.default_weight_dtype

    def for_context(self, n_positions: int) -> "Model":
        """The model with the factors of LongRoPE for sequences of this length, which servers fix at start."""
        attention = self.attention
        if attention.rope.rope_type is not RopeType.LONGROPE:
            return self
        rope = replace(attention.rope, is_long=n_positions > attention.rope.original_max_position)
        return replace(self, attention=replace(attention, rope=rope))

    def first(self, n_layers: int) -> "Model":
        """The model truncated to its first `n_layers` layers."""
        return replace(self, layers=self.layers[:n_layers])


@lru_cache(maxsize=64)
def _n_replayed(model: Model) -> int | None:
    ends = (model.attention_of(x).n_replayed(x.attention, MAX_SIZE) for x in set(model.layers))
    return next((n for n in ends if n is not None), None)


@lru_cache(maxsize=64)
def _attention_kinds(model: Model) -> frozenset[AttentionKind]:
    return frozenset(layer.attention for layer in model.layers)
