"""Model architecture: global sizes, independent of mesh and plan."""

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from meshscope.errors import SpecError
from meshscope.model.quantization import (
    UNQUANTIZED_DTYPE,
    quantization_of,
)


class Family(StrEnum):
    """Model families that the programs implement; values are the config's `model_type`."""

    LLAMA = "llama"
    LLAMA4 = "llama4_text"
    MISTRAL = "mistral"
    MINISTRAL = "ministral"
    MINISTRAL3 = "ministral3"
    PHI3 = "phi3"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3_text"
    GEMMA4 = "gemma4_text"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    MIXTRAL = "mixtral"
    QWEN3_MOE = "qwen3_moe"
    QWEN3_NEXT = "qwen3_next"
    QWEN3_5 = "qwen3_5_text"
    QWEN3_5_MOE = "qwen3_5_moe_text"
    GLM4_MOE = "glm4_moe"
    GPT_OSS = "gpt_oss"
    DEEPSEEK_V2 = "deepseek_v2"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V32 = "deepseek_v32"
    GLM_MOE_DSA = "glm_moe_dsa"
    DEEPSEEK_V4 = "deepseek_v4"


# Families that mix layers of linear attention with layers of full attention.
SPARSE_FAMILIES = frozenset({Family.DEEPSEEK_V32, Family.GLM_MOE_DSA})  # with an indexer
HYBRID_FAMILIES = frozenset({Family.QWEN3_NEXT, Family.QWEN3_5, Family.QWEN3_5_MOE})


class RopeType(StrEnum):
    """How rotary frequencies are scaled for long contexts."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"  # Gemma 4: all channels are paired, the last pairs do not turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding; names as in `transformers.modeling_rope_utils`.

    `is_interleaved` pairs channel 2i with 2i+1 (DeepSeek), otherwise i with i + half. Only the first
    `rotary_frac` of the channels turn, or of the pairs if the type is `proportional`. LongRoPE divides each frequency by its own factor, one of
    `short_factors` or, if `is_long`, of `long_factors`.
    """

    theta: float
    rope_type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    is_truncated: bool = True
    is_interleaved: bool = False
    rotary_frac: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False

    def rotary_dim(self, head_dim: int) -> int:
        """Channels of a head that are paired."""
        is_whole = self.rope_type is RopeType.PROPORTIONAL
        return head_dim if is_whole else int(head_dim * self.rotary_frac)


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """A scale of queries that grows with their position p (arXiv 2501.19399).

    It is `strength` log(1 + floor((p + `offset`) / `floor`)) + 1.
    """

    floor: int
    strength: float
    offset: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Gated delta rule (arXiv 2412.06464): each value head keeps a state [key_dim, value_dim] for a sequence.

    Each key head serves `n_value_heads / n_key_heads` value heads. Queries, keys and values pass a causal
    convolution over `conv_width` positions first.
    """

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def group(self) -> int:
        """Value heads that a key head serves."""
        return self.n_value_heads // self.n_key_heads

    @property
    def n_channels(self) -> int:
        """Channels that pass the convolution: queries, keys and values of all heads."""
        return 2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class FullHeads:
    """The heads of layers of kind `full` where they differ from those of windows (Gemma 4).

    With `has_shared_values`, values are the projected keys before their norm and rotary embedding.
    """

    n_kv_heads: int
    head_dim: int
    has_shared_values: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """Grouped-query attention.

    `window` is the number of positions, including its own, that a query attends to in layers of
    kind `sliding`; in layers of kind `chunked` it attends to those of its own chunk of `window` positions.
    The rotary embedding of `sliding` layers is `sliding_rope` if that is given; `full` layers have none if
    `has_full_rope` is false, and scale queries by `temperature`. With `has_l2_norm`, turned queries and keys
    are normed without a learned scale. Scores are products times
    `scale`, by default 1 / sqrt(head_dim), and at most `softcap` in magnitude. With `has_gate`, the sigmoid of
    another projection scales the output of each head. With `has_value_norm`, values are normed without a
    learned scale. Layers of kind `full` have `full_heads` if those are given; `of` gives the attention of a
    layer. Layers of kind `linear` have `linear` instead.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    has_qkv_bias: bool
    has_o_bias: bool
    has_qk_norm: bool
    rope: Rope
    has_sinks: bool = False
    window: int | None = None
    sliding_rope: Rope | None = None
    scale: float | None = None
    softcap: float | None = None
    has_full_rope: bool = True
    has_l2_norm: bool = False
    temperature: Temperature | None = None  # of layers of kind `full`
    has_gate: bool = False
    has_value_norm: bool = False
    has_shared_values: bool = False
    full_heads: FullHeads | None = None
    linear: LinearAttention | None = None

    def of(self, kind: "AttentionKind") -> "GroupedAttention":
        """The attention of layers of this kind, with their heads."""
        full = self.full_heads
        if full is None or kind is not AttentionKind.FULL:
            return self
        return replace(
            self,
            full_heads=None,
            n_kv_heads=full.n_kv_heads,
            head_dim=full.head_dim,
            has_shared_values=full.has_shared_values,
        )

    @property
    def score_scale(self) -> float:
        """The factor of products of queries and keys."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def rope_of(self, kind: "AttentionKind") -> Rope | None:
        """The rotary embedding of layers of this kind; None if they have none."""
        if kind is AttentionKind.FULL and not self.has_full_rope:
            return None
        is_sliding = kind is AttentionKind.SLIDING
        return self.sliding_rope if is_sliding and self.sliding_rope is not None else self.rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """The lightning indexer of sparse attention, which selects `top_k` positions per query.

    `is_interleaved` pairs the channels of its rotary embedding as `Rope` does.
    """

    n_heads: int
    head_dim: int
    top_k: int
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): keys and values are projections of a cached latent.

    The cache holds `kv_rank + rope_dim` elements per position, independent of the number of heads.
    `q_rank` is None if queries are projected from the hidden state directly.
    """

    n_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    has_bias: bool
    rope: Rope
    indexer: Indexer | None = None

    @property
    def qk_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention:
    """Attention over a window plus compressed entries of earlier positions (DeepSeek-V4).

    All heads share one key, which is also the value. A `compressed_sparse` layer compresses every
    `sparse_rate` positions (overlapping the previous ones) into an entry and attends to the entries
    selected by the indexer. A `heavily_compressed` layer attends to all entries, of `heavy_rate`
    positions each. The output projection has `n_groups` groups of heads with rank `group_rank`.
    `rope` applies to window-only layers, `compressed_rope` to the others.
    """

    n_heads: int
    q_rank: int
    head_dim: int
    rope_dim: int
    window: int
    sparse_rate: int
    heavy_rate: int
    n_groups: int
    group_rank: int
    rope: Rope
    compressed_rope: Rope
    indexer: Indexer


Attention = GroupedAttention | LatentAttention | CompressedAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnections:
    """`n_streams` parallel residual streams, mixed around every block (arXiv 2512.24880).

    `n_iterations` of Sinkhorn-Knopp make the mixing matrix doubly stochastic.
    """

    n_streams: int
    n_iterations: int
    eps: float

    @property
    def n_coefficients(self) -> int:
        """Mixing coefficients per token and block: input, output and stream-to-stream."""
        return (2 + self.n_streams) * self.n_streams


class Scoring(StrEnum):
    """The function that maps router logits to scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrtsoftplus"


class GroupScore(StrEnum):
    """The score of a group of experts in group-limited routing."""

    MAX = "max"
    TOP2_SUM = "top2_sum"


class Activation(StrEnum):
    """The activation of a gated MLP or an expert."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"  # Gemma: GELU by its tanh approximation
    LIMITED_SWIGLU = (
        "limited_swiglu"  # DeepSeek-V4: clamps both projections, also in shared experts
    )
    CLAMPED_SWIGLU = "clamped_swiglu"  # gpt-oss: clamps, scales by 1.702, adds one to the up factor


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """Routed experts, `n_active` of `n_experts` per token, and shared experts for every token.

    `ffn` is the width of one expert, `shared_ffn` that of all shared experts together. Routing
    scores all experts, keeps the best `n_active_groups` of `n_groups`, and picks the best experts
    of those.
    """

    n_experts: int
    n_active: int
    ffn: int
    shared_ffn: int | None
    scoring: Scoring
    is_normalized: bool  # scores of the chosen experts are scaled to sum to one
    scale: float = 1.0
    n_groups: int = 1
    n_active_groups: int = 1
    group_score: GroupScore = GroupScore.MAX
    has_correction_bias: bool = False  # added to the scores for expert selection only
    has_bias: bool = False  # router and experts have biases
    has_shared_gate: bool = False  # a sigmoid scales the output of the shared experts
    # Gemma 4: router and experts each have scales for the normed input, and each expert a scale of its score.
    has_scales: bool = False
    scales_inputs: bool = (
        False  # the score of the one chosen expert scales its input, not its output
    )
    activation: Activation = Activation.SWIGLU
    activation_limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """An embedding of each token for each layer, of `width` numbers (Gemma 4).

    A gate that the layer computes from its output scales it. The checkpoint has one table for all of its
    `n_layers` layers, also if fewer are compiled.
    """

    width: int
    n_layers: int


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
class DraftHead:
    """What joins the embedding of a token and the hidden state before it: a matrix [2 hidden, hidden].

    With `has_norms`, both are normed before (DeepSeek-V3, arXiv 2412.19437, equation 21); EAGLE joins them as
    they are (arXiv 2401.15077, section 4.1).
    """

    has_norms: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only transformer.

    `hidden` is the width of the residual stream, `ffn` the width of the gated MLP in dense layers
    (None without dense layers), and `layers` the kind of each layer in order. Norms multiply by their
    scale plus `norm_offset`; with `has_post_norms`, another norm follows each block, and with
    `has_layer_scale`, a number scales the output of each layer. With `has_wide_mlps`, the MLP of layers that
    share a cache is twice as wide. `logit_softcap` limits the magnitude of logits. A model with a `draft_head`
    is a draft of another one, whose hidden states it takes beside the tokens.
    """

    name: str
    family: Family
    layers: tuple[Layer, ...]
    hidden: int
    ffn: int | None
    vocab: int
    attention: Attention
    norm_eps: float
    has_tied_embeddings: bool
    has_mlp_bias: bool
    max_position: int | None
    source: str  # file, URL or catalog source of the config
    moe: MixtureOfExperts | None = None
    hyper: HyperConnections | None = None
    layer_inputs: LayerInputs | None = None
    activation: Activation = Activation.SWIGLU  # of the MLP in dense layers
    norm_offset: float = 0.0
    has_post_norms: bool = False
    has_layer_scale: bool = False
    has_wide_mlps: bool = False
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    draft_head: DraftHead | None = None
    # The `model_type` of a multimodal config of which this is the text part.
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
        for part in (self, self.attention, *parts, self.moe, self.hyper, self.layer_inputs):
            for one in fields(part) if part is not None else ():
                value = getattr(part, one.name)
                if isinstance(value, int) and not isinstance(value, bool) and value <= 0:
                    raise SpecError(f"{self.source}: {one.name}={value} must be positive.")
        if not self.layers:
            raise SpecError(f"{self.source}: the model has no layers. It needs at least one.")
        self._check_attention()
        self._check_caches()
        self._check_experts()

    def __hash__(self) -> int:
        """A hash that skips the layers: the key of many small caches."""
        return hash((self.name, self.source, self.hidden, self.n_layers))

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def shares_caches(self) -> bool:
        """Whether some layers read the cache of an earlier one."""
        return any(layer.shares_cache for layer in self.layers)

    def cache_layer(self, layer: Layer) -> Layer:
        """The kind whose last layer writes the cache that a layer of this kind shares."""
        return replace(layer, shares_cache=False)

    def ffn_of(self, layer: Layer) -> int:
        """The width of the MLP of a layer that has one."""
        assert self.ffn is not None
        return self.ffn * (2 if self.has_wide_mlps and layer.shares_cache else 1)

    @property
    def default_weight_dtype(self) -> str:
        """The weight dtype unless one is named: the quantized format of the checkpoint or the nearest, else bf16.

        TPU servers load 16-bit and 32-bit checkpoints as bf16.
        """
        stored = self.stored_dtype or self.nearest_dtype
        if stored is None or quantization_of(stored) is None:
            return UNQUANTIZED_DTYPE
        return stored

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what is not counted, and on what the config leaves open."""
        of, unread = self.text_part_of, ", ".join(self.unread_keys)
        notes = {
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

    def _check_attention(self) -> None:
        match self.attention:
            case GroupedAttention() as attention:
                self._check_kv_heads(attention, "num_key_value_heads")
                full = attention.of(AttentionKind.FULL)
                self._check_kv_heads(full, "num_global_key_value_heads")
                self._check_linear(attention.linear)
            case LatentAttention(indexer=indexer, rope_dim=rope_dim):
                if indexer is not None and indexer.head_dim < rope_dim:
                    raise SpecError(
                        f"{self.source}: index_head_dim={indexer.head_dim} is smaller than "
                        f"qk_rope_head_dim={rope_dim}. Correct the config."
                    )
            case CompressedAttention():
                self._check_compressed(self.attention)

    def _check_caches(self) -> None:
        """Each shared cache is that of a layer before the first one that shares."""
        kinds = list(self.layers)
        n_before = next((i for i, layer in enumerate(kinds) if layer.shares_cache), len(kinds))
        for layer in kinds[n_before:]:
            if not layer.shares_cache or self.cache_layer(layer) not in kinds[:n_before]:
                raise SpecError(
                    f"{self.source}: the last {len(kinds) - n_before} layers share caches, but no layer of kind "
                    f"'{layer.attention}' before them has one. Correct num_kv_shared_layers."
                )

    def _check_kv_heads(self, attention: GroupedAttention, key: str) -> None:
        if attention.n_heads % attention.n_kv_heads:
            raise SpecError(
                f"{self.source}: num_attention_heads={attention.n_heads} is not a multiple of "
                f"{key}={attention.n_kv_heads}. Correct the config."
            )

    def _check_linear(self, linear: LinearAttention | None) -> None:
        if linear is not None and linear.n_value_heads % linear.n_key_heads:
            raise SpecError(
                f"{self.source}: linear_num_value_heads={linear.n_value_heads} is not a multiple of "
                f"linear_num_key_heads={linear.n_key_heads}. Correct the config."
            )

    def _check_compressed(self, attention: CompressedAttention) -> None:
        narrowest = min(attention.head_dim, attention.indexer.head_dim)
        if attention.rope_dim > narrowest or attention.rope_dim % 2:
            raise SpecError(
                f"{self.source}: qk_rope_head_dim={attention.rope_dim} must be even and at most "
                f"{narrowest}, the smaller of head_dim and index_head_dim. Correct the config."
            )
        if attention.n_heads % attention.n_groups:
            raise SpecError(
                f"{self.source}: num_attention_heads={attention.n_heads} is not a multiple of "
                f"o_groups={attention.n_groups}. Correct the config."
            )

    def _check_experts(self) -> None:
        moe = self.moe
        if moe is None:
            return
        if moe.n_experts % moe.n_groups:
            raise SpecError(
                f"{self.source}: n_group={moe.n_groups} does not divide {moe.n_experts} experts. "
                "Correct the config."
            )
        n_choices = moe.n_experts // moe.n_groups * moe.n_active_groups
        if moe.n_active_groups > moe.n_groups or moe.n_active > n_choices:
            raise SpecError(
                f"{self.source}: {moe.n_active} experts per token exceed the {n_choices} available in "
                f"{moe.n_active_groups} of {moe.n_groups} groups. Correct the config."
            )
