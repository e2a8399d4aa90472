"""Multi-head latent attention (DeepSeek-V2), with the indexer of DeepSeek-V3.2 and GLM-5."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshscope.errors import SpecError
from meshscope.events.enums import Kind
from meshscope.model.arrays import CacheArray, ColumnSlice, Dim, Weight, WeightBuilder
from meshscope.model.families import Family, LayerRule
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.mechanisms.attention import (
    HEAD_PASSES,
    LANES,
    Attention,
    AttentionStep,
    ContextExchange,
    Indexer,
    LayerAttention,
    Mechanism,
    aligned,
    index_projections,
    narrowed,
    seen_pairs,
)
from meshscope.model.reader import ConfigReader, Rope, read_rope

# Passes between the projections and the kernel over prompts: queries and keys of two parts are rotated, joined and
# padded. The program of DeepSeek-V3.1 for v6e (libtpu 0.0.42.1) moves 5.2 GB for the 128 heads of 8,192 tokens.
PREFILL_PASSES = 8
INDEXER_PATTERNS = ("indexer_types", "index_topk_pattern")  # keys of GlmMoeDsaConfig
INDEXER_KINDS = {
    **dict.fromkeys(("full", "F"), AttentionKind.FULL),
    **dict.fromkeys(("shared", "S"), AttentionKind.SHARED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2): keys and values are projections of a cached latent.

    The cache holds `kv_rank + rope_dim` elements per position, independent of the number of heads.
    `q_rank` is None if queries are projected from the hidden state directly.
    """

    mechanism = Mechanism.LATENT
    n_small_ops = 30

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

    @property
    def head_widths(self) -> tuple[int, int]:
        """Widths of a query and of a value head."""
        return self.qk_dim, self.value_dim

    @property
    def latent_width(self) -> int:
        """Elements that the cache has per position."""
        return self.kv_rank + self.rope_dim

    def check(self, source: str) -> None:
        """Raise SpecError unless keys of the indexer have room for the rotated part."""
        if self.indexer is not None and self.indexer.head_dim < self.rope_dim:
            raise SpecError(
                f"{source}: index_head_dim={self.indexer.head_dim} is smaller than "
                f"qk_rope_head_dim={self.rope_dim}. Correct the config."
            )

    def weights(self, hidden: int, tp: int, layer: Layer, *, is_fused: bool) -> Iterator[Weight]:
        """Heads are split over tp; the projections to latents are replicated."""
        del tp, is_fused
        builder = WeightBuilder(base="model.layers.{layer}.self_attn.")
        n, rank = self.n_heads, self.kv_rank
        latent = rank + self.rope_dim
        if self.q_rank is None:
            shape = (hidden, n, self.qk_dim)
            yield builder.matrix(
                "wq", (Dim.HIDDEN, Dim.HEADS, Dim.HEAD_DIM), shape, "q_proj.weight"
            )
        else:
            q = self.q_rank
            yield builder.matrix("wq_a", (Dim.HIDDEN, Dim.NORM), (hidden, q), "q_a_proj.weight")
            if self.has_bias:
                yield builder.vector("bq_a", (Dim.NORM,), (q,), "q_a_proj.bias")
            yield builder.vector("q_a_norm", (Dim.NORM,), (q,), "q_a_layernorm.weight")
            shape = (q, n, self.qk_dim)
            yield builder.matrix(
                "wq_b", (Dim.HIDDEN, Dim.HEADS, Dim.HEAD_DIM), shape, "q_b_proj.weight"
            )
        yield builder.matrix(
            "wkv_a", (Dim.HIDDEN, Dim.NORM), (hidden, latent), "kv_a_proj_with_mqa.weight"
        )
        if self.has_bias:
            yield builder.vector("bkv_a", (Dim.NORM,), (latent,), "kv_a_proj_with_mqa.bias")
        yield builder.vector("kv_a_norm", (Dim.NORM,), (rank,), "kv_a_layernorm.weight")
        whole = self.nope_dim + self.value_dim
        for name, start, stop in (
            ("w_uk", 0, self.nope_dim),
            ("w_uv", self.nope_dim, whole),
        ):
            up = builder.matrix(
                name,
                (Dim.HIDDEN, Dim.HEADS, Dim.HEAD_DIM),
                (rank, n, stop - start),
                "kv_b_proj.weight",
                columns=ColumnSlice(whole=whole, start=start, stop=stop),
            )
            yield replace(up, is_absorbed=True)
        shape = (n, self.value_dim, hidden)
        out = (Dim.HEADS, Dim.HEAD_DIM, Dim.HIDDEN)
        yield builder.matrix("wo", out, shape, "o_proj.weight", inputs=(0, 1))
        if self.has_bias:
            yield builder.vector("bo", (Dim.NORM,), (hidden,), "o_proj.bias")
        if layer.attention is not AttentionKind.SHARED:
            yield from self._indexer_weights(hidden)

    def _indexer_weights(self, hidden: int) -> Iterator[Weight]:
        indexer = self.indexer
        if indexer is None:
            return
        assert self.q_rank is not None
        base, h = "model.layers.{layer}.self_attn.indexer.", indexer.head_dim
        builder = WeightBuilder(base=base)
        queries, weights = index_projections(hidden, self.q_rank, indexer, base)
        yield queries
        yield builder.matrix("index_wk", (Dim.HIDDEN, Dim.NORM), (hidden, h), "wk.weight")
        yield builder.vector("index_k_norm", (Dim.NORM,), (h,), "k_norm.weight")
        yield builder.vector("index_k_norm_bias", (Dim.NORM,), (h,), "k_norm.bias")
        yield weights

    def cache(self, kind: AttentionKind, tp: int, n_tokens: int = 1) -> Iterator[CacheArray]:
        """The latent of every position, and its key of the indexer."""
        del tp, n_tokens
        yield CacheArray(name="latent", dims=(Dim.NORM,), shape=(self.latent_width,))
        if self.indexer is not None and kind is not AttentionKind.SHARED:
            yield CacheArray(name="index_k", dims=(Dim.NORM,), shape=(self.indexer.head_dim,))

    def page_elements(
        self, kind: AttentionKind, tp: int, packing: int, *, has_half_rows: bool
    ) -> int:
        """Elements of a position in pages of a serving engine, as `LayerAttention.page_elements`."""
        del tp, packing, has_half_rows
        widths = [self.kv_rank, self.rope_dim]
        if self.indexer is not None and kind is not AttentionKind.SHARED:
            widths.append(self.indexer.head_dim)
        return sum(aligned(width, LANES) for width in widths)

    def cached_widths(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """The shape cached per position on one device: the latent, which tp does not split."""
        del tp
        return ((self.latent_width,),)

    def shared_prompt(self, kind: AttentionKind, step: AttentionStep) -> Iterator[ContextExchange]:
        """The indexer's single key head, as it selects among all positions of the prompt; then the latents."""
        if self.indexer is not None and kind is not AttentionKind.SHARED:
            shape = (step.n_sequences, step.n_positions, 1, self.indexer.head_dim)
            yield ContextExchange(Kind.ALL_GATHER, shape)
        yield from Attention.shared_prompt(self, kind, step)

    def step_bytes(self, step: AttentionStep) -> float:
        """Queries and outputs of the tokens, keys and values of all that they attend to."""
        n_rows = step.n_tokens + step.n_sequences * step.n_keys
        return n_rows * (self.n_heads / step.tp) * sum(self.head_widths) * step.act_bytes

    def chosen_by(self, kind: AttentionKind) -> tuple[Indexer, int] | None:
        """The indexer; layers of kind `shared` have the choice of an earlier one."""
        del kind
        return None if self.indexer is None else (self.indexer, 1)

    @property
    def chosen_positions(self) -> int | None:
        """Positions in the choice of the indexer."""
        return None if self.indexer is None else self.indexer.top_k

    def attended_pairs(self, kind: AttentionKind, n: int) -> int:
        """Pairs of the first `n` queries of a sequence with the keys that each attends to."""
        del kind
        return seen_pairs(n, most=self.chosen_positions)

    @property
    def absorbed_pair_flops(self) -> float:
        """FLOPs of one query with one latent, all heads, as decode computes them."""
        return 2.0 * self.n_heads * (2 * self.kv_rank + self.rope_dim)

    def passed_elements(self, tp: int, *, is_prefill: bool, is_served: bool) -> float:
        """Queries, keys and values of all heads."""
        del is_served
        passes = PREFILL_PASSES if is_prefill else HEAD_PASSES
        return passes * (self.n_heads / tp) * sum(self.head_widths)

    def why_whole_prompts(self, name: str) -> str | None:
        """An indexer needs the scores of whole prompts under cp."""
        if self.indexer is None:
            return None
        return f"under cp, the indexer of {name} needs the scores of a whole prompt"


def latent_of(attention: LayerAttention) -> LatentAttention:
    """The attention of a model that is known to have this mechanism."""
    return narrowed(attention, LatentAttention)


def latent_attention(reader: ConfigReader, family: Family) -> LatentAttention:
    """The attention of a family with latents."""
    rope = read_rope(reader)
    return LatentAttention(
        n_heads=reader.integer("num_attention_heads"),
        q_rank=reader.optional_integer("q_lora_rank"),
        kv_rank=reader.integer("kv_lora_rank"),
        nope_dim=reader.integer("qk_nope_head_dim"),
        rope_dim=reader.integer("qk_rope_head_dim"),
        value_dim=reader.integer("v_head_dim"),
        has_bias=reader.boolean("attention_bias", default=False),
        rope=replace(rope, is_interleaved=reader.boolean("rope_interleave", default=True)),
        indexer=_indexer(reader, family) if family.traits.has_indexer else None,
    )


def _indexer(reader: ConfigReader, family: Family) -> Indexer:
    """Source: DeepseekV32Indexer and GlmMoeDsaIndexer of transformers."""
    return Indexer(
        n_heads=reader.integer("index_n_heads"),
        head_dim=reader.integer("index_head_dim"),
        top_k=reader.integer("index_topk"),
        is_interleaved=family.traits.layers is LayerRule.INDEXERS,
    )


def indexer_kinds(reader: ConfigReader, n_layers: int) -> list[AttentionKind]:
    """Which layers have an indexer, and which take the choice of an earlier layer; as GlmMoeDsaConfig."""
    key = next((key for key in INDEXER_PATTERNS if reader.get(key) is not None), None)
    if key is None:
        every, first = (
            reader.integer("index_topk_freq", 1),
            reader.count("index_skip_topk_offset", 2),
        )
        return [
            AttentionKind.SHARED if max(index - first + 1, 0) % every else AttentionKind.FULL
            for index in range(n_layers)
        ]
    names = reader.config[key]
    is_list = isinstance(names, str | list) and len(names) == n_layers
    if not is_list or any(str(name) not in INDEXER_KINDS for name in names):
        raise SpecError(
            f"{reader.source}: '{key}' must list one of {', '.join(INDEXER_KINDS)} for each of {n_layers} layers, "
            f"got {names!r}."
        )
    kinds = [INDEXER_KINDS[str(name)] for name in names]
    if kinds[0] is AttentionKind.SHARED:
        raise SpecError(
            f"{reader.source}: '{key}' lets the first layer take the positions of an earlier one. Start with 'full'."
        )
    return kinds
