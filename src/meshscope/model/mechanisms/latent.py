"""Multi-head latent attention (DeepSeek-V2), with the indexer of DeepSeek-V3.2 and GLM-5."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from meshscope.errors import SpecError
from meshscope.model.arrays import (
    LANES,
    CacheArray,
    ColumnSlice,
    Dim,
    Weight,
    WeightBuilder,
    letters,
)
from meshscope.model.families import Family, LayerRule
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.mechanisms import attention as base
from meshscope.model.mechanisms.attention import AttentionStep, ContextExchange
from meshscope.model.mechanisms.kimi_delta import KimiDeltaAttention
from meshscope.model.reader import ConfigReader, Rope, read_rope, refuse

# Passes between the projections and the kernel over prompts: queries and keys of two parts are rotated, joined and
# padded. The program of DeepSeek-V3.1 for v6e (libtpu 0.0.42.1) moves 5.2 GB for the 128 heads of 8,192 tokens.
PREFILL_PASSES = 8
BASE = "model.layers.{layer}.self_attn."
FULL_NAMES = ("full_attention", "indexed_attention", "deepseek_sparse_attention")
INDEXER_PATTERNS = ("indexer_types", "index_topk_pattern")  # keys of GlmMoeDsaConfig
INDEXER_KINDS = {
    **dict.fromkeys(("full", "F"), AttentionKind.FULL),
    **dict.fromkeys(("shared", "S"), AttentionKind.SHARED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(base.Attention):
    """Multi-head latent attention (DeepSeek-V2): keys and values are projections of a cached latent."""

    mechanism = base.Mechanism.LATENT
    n_small_ops = 30

    n_heads: int
    q_rank: int | None  # None if queries are projections of the hidden state
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    has_bias: bool
    rope: Rope
    indexer: base.Indexer | None = None
    pool: int | None = None  # positions that the indexer scores and chooses together
    temperature: base.Temperature | None = None
    has_rope: bool = True
    linear: KimiDeltaAttention | None = None  # of `linear` layers

    def of(self, kind: AttentionKind) -> base.LayerAttention:
        """The attention of layers of this kind, which may be linear."""
        return self.linear if kind is AttentionKind.LINEAR and self.linear is not None else self

    @property
    def qk_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def head_widths(self) -> tuple[int, int]:
        return self.qk_dim, self.value_dim

    @property
    def latent_width(self) -> int:
        """Elements that the cache has per position."""
        return self.kv_rank + self.rope_dim

    def check(self, source: str) -> None:
        """Raise SpecError unless keys of the indexer have room for the rotated part."""
        width = self.rope_dim if self.indexer is None else self.indexer.head_dim
        narrow = f"index_head_dim={width} is smaller than qk_rope_head_dim={self.rope_dim}"
        refuse(source, {narrow: width < self.rope_dim})
        if self.linear is not None:
            self.linear.check(source)

    def weights(self, hidden: int, tp: int, layer: Layer, *, is_fused: bool) -> Iterator[Weight]:
        """Heads are split over tp; the projections to latents are replicated."""
        q, rank, nope, value = self.q_rank or 0, self.kv_rank, self.nope_dim, self.value_dim
        dims = letters(Dim.HIDDEN, D=hidden, Q=q, R=rank) | letters(Dim.HEADS, N=self.n_heads)
        dims |= letters(Dim.HEAD_DIM, x=self.qk_dim, u=nope, v=value)
        dims |= letters(Dim.NORM, d=hidden, q=q, r=rank, l=self.latent_width)
        builder = WeightBuilder(BASE, dims)
        if self.q_rank is None:
            yield builder.matrix("wq", "DNx", "q_proj.weight")
        else:
            yield builder.matrix("wq_a", "Dq", "q_a_proj.weight")
            if self.has_bias:
                yield builder.vector("bq_a", "q", "q_a_proj.bias")
            yield builder.vector("q_a_norm", "q", "q_a_layernorm.weight")
            yield builder.matrix("wq_b", "QNx", "q_b_proj.weight")
        yield builder.matrix("wkv_a", "Dl", "kv_a_proj_with_mqa.weight")
        if self.has_bias:
            yield builder.vector("bkv_a", "l", "kv_a_proj_with_mqa.bias")
        yield builder.vector("kv_a_norm", "r", "kv_a_layernorm.weight")
        for name, letter, stop, size in (
            ("w_uk", "u", nope, nope),
            ("w_uv", "v", nope + value, value),
        ):
            columns = ColumnSlice(whole=nope + value, start=stop - size, stop=stop)
            up = builder.matrix(name, f"RN{letter}", "kv_b_proj.weight", columns=columns)
            yield replace(up, is_absorbed=True)
        if self.linear is not None and self.linear.is_wide:  # Ling 3
            yield builder.matrix("w_head_gate", "DN", "g_proj.weight")
        yield builder.matrix("wo", "NvD", "o_proj.weight", inputs=(0, 1))
        if self.has_bias:
            yield builder.vector("bo", "d", "o_proj.bias")
        if self.indexer is not None and layer.attention is not AttentionKind.SHARED:
            assert self.q_rank is not None
            keys = letters(Dim.HIDDEN, D=hidden) | letters(Dim.NORM, i=self.indexer.head_dim)
            builder = WeightBuilder(f"{BASE}indexer.", keys)
            between = [
                builder.matrix("index_wk", "Di", "wk.weight"),
                builder.vector("index_k_norm", "i", "k_norm.weight"),
                builder.vector("index_k_norm_bias", "i", "k_norm.bias"),
            ]
            if self.pool is not None:
                sized = replace(builder, dims=keys | letters(Dim.NORM, p=self.pool))
                between.append(sized.matrix("index_wgate", "Di", "index_kpool_compress_gate"))
                between.append(sized.vector("index_bias", "pi", "index_kpool_compress_ape"))
            for weight in base.index_projections(
                hidden, self.q_rank, self.indexer, builder.base, *between
            ):  # those of pools are stored without scales
                yield weight if self.pool is None else replace(weight, inputs=())

    def cache(self, kind: AttentionKind, tp: int, n_tokens: int = 1) -> Iterator[CacheArray]:
        """The latent of every position, and its key of the indexer, or keys of pools and the positions of open ones."""
        yield CacheArray(name="latent", dims=(Dim.NORM,), shape=(self.latent_width,))
        if self.indexer is None or kind is AttentionKind.SHARED:
            return
        key = CacheArray(name="index_k", dims=(Dim.NORM,), shape=(self.indexer.head_dim,))
        if self.pool is None:
            yield key
            return
        yield replace(key, name="index", rate=self.pool)
        n_open = base.n_open_windows(self.pool, n_tokens) * self.pool
        for name in ("index_kv", "index_gate"):
            yield replace(key, name=name, n_fixed_slots=n_open)

    def page_elements(
        self, kind: AttentionKind, tp: int, packing: int, *, has_half_rows: bool
    ) -> int:
        widths = [self.kv_rank, self.rope_dim]
        if self.indexer is not None and kind is not AttentionKind.SHARED:
            widths.append(self.indexer.head_dim)
        pools = [1, 1, self.pool or 1]
        return sum(base.aligned(n, LANES) // pool for n, pool in zip(widths, pools, strict=False))

    def cached_widths(self, tp: int) -> tuple[tuple[int, ...], ...]:
        return ((self.latent_width,),)

    def shared_prompt(self, kind: AttentionKind, step: AttentionStep) -> Iterator[ContextExchange]:
        """The indexer's single key head, as it selects among all positions of the prompt; then the latents.

        Pools that blocks cut are made of the gathered positions.
        """
        if self.indexer is not None and kind is not AttentionKind.SHARED:
            width, pool = self.indexer.head_dim, self.pool or 1
            if step.n_local % pool:
                positions = (step.n_sequences, step.n_positions, width)
                yield from [base.gather_over_cp(positions)] * 2
            else:
                shape = (step.n_sequences, step.n_positions // pool, 1, width)
                yield base.gather_over_cp(shape)
        yield from base.Attention.shared_prompt(self, kind, step)

    def step_bytes(self, step: AttentionStep) -> float:
        """Queries and outputs of the tokens, keys and values of all that they attend to."""
        n_rows = step.n_tokens + step.n_sequences * step.n_keys
        return n_rows * (self.n_heads / step.tp) * sum(self.head_widths) * step.act_bytes

    def chosen_by(self, kind: AttentionKind) -> tuple[base.Indexer, int] | None:
        """The indexer; layers of kind `shared` have the choice of an earlier one."""
        return None if self.indexer is None else (self.indexer, self.pool or 1)

    @property
    def chosen_positions(self) -> int | None:
        return None if self.indexer is None else self.indexer.top_k * (self.pool or 1)

    def attended_pairs(self, kind: AttentionKind, n: int) -> int:
        """Those with chosen positions, or with chosen pools and the positions after the last whole one."""
        if self.pool is None or self.indexer is None:
            return base.seen_pairs(n, most=self.chosen_positions)
        n_whole, rest = divmod(n, self.pool)
        n_tail = n_whole * self.pool * (self.pool - 1) // 2 + rest * (rest + 1) // 2
        return self.pool * base.seen_pairs(n, rate=self.pool, most=self.indexer.top_k) + n_tail

    @property
    def joint_positions(self) -> int:
        return self.pool or 1

    def passed_elements(self, tp: int, *, is_prefill: bool, is_served: bool) -> float:
        """Queries, keys and values of all heads."""
        passes = PREFILL_PASSES if is_prefill else base.HEAD_PASSES
        return passes * (self.n_heads / tp) * sum(self.head_widths)

    def why_whole_prompts(self, name: str) -> str | None:
        """An indexer needs the scores of whole prompts under cp."""
        if self.indexer is None:
            return None
        return f"under cp, the indexer of {name} needs the scores of a whole prompt"


latent_of = partial(base.narrowed, kind=LatentAttention)


def latent_attention(reader: ConfigReader, family: Family) -> LatentAttention:
    """The attention of a family with latents; source: DeepseekV32Indexer and GlmMoeDsaIndexer of transformers."""
    turned, indexer, temperature = base.with_rope(reader, family.traits), None, None
    rope, is_kimi = read_rope(turned), family.traits.layers is LayerRule.KIMI
    if (
        family.traits.variant == "mistral4"
    ):  # its `partial_rotary_factor` repeats `qk_rope_head_dim`
        rope = replace(rope, rotary_frac=1.0)
        temperature = base.read_temperature(turned, rope)
    pool = None
    if family.traits.has_indexer:
        top_k = reader.integer("index_topk")
        none = "q_lora_rank is null, and the indexer takes the latent of queries"
        refuse(reader.source, {none: reader.get("q_lora_rank") is None})
        if family.traits.has_pools:
            pool = reader.integer("index_kpool", 16)  # of Glm5NextTextConfig
            cut = f"index_topk={top_k} is not a multiple of index_kpool={pool}"
            refuse(reader.source, {cut: top_k % pool > 0})
        indexer = base.Indexer(
            n_heads=reader.integer("index_n_heads"),
            head_dim=reader.integer("index_head_dim"),
            top_k=top_k // (pool or 1),
            is_interleaved=family.traits.layers is LayerRule.INDEXERS,
        )
    of_linear, has_bound, is_ling = reader, pool is not None, family.traits.variant == "ling3"
    if is_ling:  # its config has the sizes of both kinds of layers
        names = {"linear_num_heads": "num_attention_heads", "linear_head_dim": "head_dim"}
        sizes = {new: reader.config.get(old) for new, old in names.items()}
        of_linear = reader.over({**sizes, **reader.config})
        has_bound = reader.boolean("kda_safe_gate", default=True)
    linear = None
    if is_kimi:
        linear = KimiDeltaAttention.read(of_linear, has_bound=has_bound, is_wide=is_ling)
    return LatentAttention(
        n_heads=reader.integer("num_attention_heads"),
        q_rank=reader.optional_integer("q_lora_rank"),
        kv_rank=reader.integer("kv_lora_rank"),
        nope_dim=reader.integer("qk_nope_head_dim"),
        rope_dim=0 if pool is not None else reader.integer("qk_rope_head_dim"),
        value_dim=reader.integer("v_head_dim"),
        has_bias=reader.boolean("attention_bias", default=False),
        rope=replace(rope, is_interleaved=reader.boolean("rope_interleave", default=True)),
        indexer=indexer,
        pool=pool,
        temperature=temperature,
        has_rope=is_ling or not is_kimi,
        linear=linear,
    )


def indexer_kinds(reader: ConfigReader, n_layers: int) -> list[AttentionKind]:
    """Which layers have an indexer, and which take the choice of an earlier layer; as GlmMoeDsaConfig."""
    key = next((key for key in INDEXER_PATTERNS if reader.get(key) is not None), None)
    if key is None:
        every = reader.integer("index_topk_freq", 1)
        first = reader.count("index_skip_topk_offset", 2)
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


def latent_kinds(reader: ConfigReader, n_layers: int, *, has_indexers: bool) -> list[AttentionKind]:
    """The attention of each layer: `layer_types`, or numbers of layers in `linear_attn_config`.

    Kimi Linear counts layers from 1, GLM-5.3 from 0.
    """
    of, start = ConfigReader(reader.mapping("linear_attn_config"), reader.source), 1 - has_indexers
    full, linear = set(of.integers("full_attn_layers")), set(of.integers("kda_layers"))
    reader.used |= {"linear_attn_config.full_attn_layers", "linear_attn_config.kda_layers"}
    full_names = FULL_NAMES if has_indexers else FULL_NAMES[:1]
    names = dict.fromkeys(full_names, AttentionKind.FULL) | {
        "linear_attention": AttentionKind.LINEAR
    }
    every, is_listed = range(start, n_layers + start), bool(full or linear)
    if is_listed:
        rule = f"linear_attn_config must list each of {n_layers} layers once, in kda_layers or full_attn_layers"
        refuse(reader.source, {rule: full ^ linear != set(every)})
    elif (size := reader.optional_integer("layer_group_size")) is not None:
        full = {n for n in every if n % size == 0}
    else:
        full = {n for n in every if n > 1 and (n - start + has_indexers) % 4 == 0}
    usual = ["full_attention" if n in full else "linear_attention" for n in every]
    kinds = [names[name] for name in reader.names("layer_types", n_layers, names, usual)]
    differ = "'layer_types' and the lists of linear_attn_config differ"
    problems = {differ: is_listed and kinds != [names[name] for name in usual]}
    if has_indexers:  # the choice does not pass linear layers
        choosing = zip(kinds, indexer_kinds(reader, n_layers), strict=True)
        shared = "layers that take the choice of an earlier one are not supported beside linear attention"
        problems[shared] = (AttentionKind.FULL, AttentionKind.SHARED) in set(choosing)
    refuse(reader.source, problems)
    return kinds
