"""Grouped-query attention: full, in windows or in chunks, with the variants of each family."""

from collections.abc import Iterator, Mapping
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
from meshscope.model.families import Family, FamilyTraits, LayerRule
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.mechanisms import attention as base
from meshscope.model.mechanisms.linear import LinearAttention
from meshscope.model.mechanisms.state_space import StateSpace
from meshscope.model.reader import ConfigReader, Rope, check_factors, read_rope, refuse

BASE = "model.layers.{layer}.self_attn."
# Weights that layers which share a cache do not have.
KEY_VALUE_WEIGHTS = frozenset({"wk", "wv", "bk", "bv", "k_norm"})
HALF_LANES = 64  # heads of this size: vLLM on TPU stores key and value in one row
# Servers on TPU also bring queries, keys and outputs into the layouts of their kernel and back. Counted in
# simulated prefills of Llama-3.1-8B in vLLM 0.12, and of Qwen2.5-7B and Qwen3-8B in SGLang-JAX (August 2026).
SERVED_HEAD_PASSES = 5
SERVED_NORM_PASSES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FullHeads:
    """The heads of `full` layers where they differ from those of windowed layers (Gemma 4, MiMo-V2, Step-3.5)."""

    n_heads: int | None = None  # None: as many
    n_kv_heads: int
    head_dim: int
    has_shared_values: bool = False  # values are the keys before their norm and rotary embedding
    has_sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention(base.Attention):
    """Grouped-query attention; `of` gives the attention of a layer."""

    mechanism = base.Mechanism.GROUPED
    n_small_ops = 20  # 30 including the MLP in Llama-3.1-70B (jax-llm-examples)

    n_heads: int
    n_kv_heads: int
    head_dim: int
    has_qkv_bias: bool
    has_o_bias: bool
    has_qk_norm: bool
    has_whole_norms: bool = False  # over all heads, not of each head
    rope: Rope
    has_sinks: bool = False
    window: int | None = None  # positions that `sliding` layers attend to; chunk of `chunked` ones
    sliding_rope: Rope | None = None  # of `sliding` layers, if another
    scale: float | None = None  # of products; None is 1 / sqrt(head_dim)
    softcap: float | None = None  # the largest magnitude of scores
    has_full_rope: bool = True  # whether `full` layers have one
    has_l2_norm: bool = False  # norms turned queries and keys without a learned scale
    temperature: base.Temperature | None = None  # of layers of kind `full`
    has_gate: bool = False  # the sigmoid of another projection scales the output of each head
    has_head_gate: bool = False  # or of one number for each head
    has_value_norm: bool = False  # norms values without a learned scale
    value_scale: float = 1.0
    value_dim: int | None = None  # channels of a value, if not those of a key
    has_shared_values: bool = False
    full_heads: FullHeads | None = None  # of `full` layers, if others
    linear: LinearAttention | StateSpace | None = None  # of `linear` layers

    @property
    def head_widths(self) -> tuple[int, int]:
        return self.head_dim, self.value_dim or self.head_dim

    def of(self, kind: AttentionKind) -> base.LayerAttention:
        """The attention of layers of this kind, which may be linear or none."""
        if kind is AttentionKind.NONE:
            return base.NO_ATTENTION
        if kind is AttentionKind.LINEAR:
            assert self.linear is not None
            return self.linear
        return self.with_heads_of(kind)

    def with_heads_of(self, kind: AttentionKind) -> "GroupedAttention":
        """The attention with the heads of layers of this kind."""
        full = self.full_heads
        if full is None or kind is not AttentionKind.FULL:
            return self
        return replace(
            self,
            full_heads=None,
            n_heads=full.n_heads or self.n_heads,
            n_kv_heads=full.n_kv_heads,
            head_dim=full.head_dim,
            has_shared_values=full.has_shared_values,
            has_sinks=full.has_sinks,
        )

    @property
    def score_scale(self) -> float:
        """The factor of products of queries and keys."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def rope_of(self, kind: AttentionKind) -> Rope | None:
        """The rotary embedding of layers of this kind; None if they have none."""
        if kind is AttentionKind.NOPE or (kind is AttentionKind.FULL and not self.has_full_rope):
            return None
        is_sliding = kind is AttentionKind.SLIDING
        return self.sliding_rope if is_sliding and self.sliding_rope is not None else self.rope

    def stored_kv_heads(self, tp: int) -> int:
        """KV heads as stored: replicated up to tp if the model has fewer."""
        return max(self.n_kv_heads, tp)

    def kv_heads(self, kind: AttentionKind) -> int:
        return self.with_heads_of(kind).n_kv_heads

    def query_heads(self, kind: AttentionKind) -> int:
        return self.with_heads_of(kind).n_heads

    @property
    def tp_sizes(self) -> Mapping[str, int]:
        return {
            "n_heads": self.n_heads,
            "n_heads of full layers": self.query_heads(AttentionKind.FULL),
        }

    def check(self, source: str) -> None:
        """Raise SpecError unless KV heads serve whole groups of heads."""
        full = self.with_heads_of(AttentionKind.FULL)
        for key, of in {"": self, "global_": full}.items():
            heads, n_kv = f"num_attention_heads={of.n_heads}", of.n_kv_heads
            multiple = f"{heads} is not a multiple of num_{key}key_value_heads={n_kv}"
            refuse(source, {multiple: of.n_heads % n_kv > 0})
        if self.linear is not None:
            self.linear.check(source)

    def weights(self, hidden: int, tp: int, layer: Layer, *, is_fused: bool) -> Iterator[Weight]:
        """Heads are split over tp; layers that share a cache have no keys and values."""
        weights = self.with_heads_of(layer.attention).all_weights(hidden, tp, is_fused=is_fused)
        return (w for w in weights if not layer.shares_cache or w.name not in KEY_VALUE_WEIGHTS)

    def all_weights(self, hidden: int, tp: int, *, is_fused: bool) -> Iterator[Weight]:
        """The weights of a layer that computes keys and values; `is_fused` joins their projections (Phi-3)."""
        n, k, h = self.n_heads, self.n_kv_heads, self.head_dim
        dims = letters(Dim.HIDDEN, D=hidden) | letters(Dim.NORM, d=hidden) | letters(Dim.HEADS, N=n)
        dims |= letters(Dim.KV_HEADS, K=self.stored_kv_heads(tp)) | letters(Dim.HEAD_DIM, H=h)
        dims |= letters(Dim.HEAD_DIM, U=self.head_widths[1])
        builder, tensors = WeightBuilder(BASE, dims), {name: f"{name}_proj" for name in "qkv"}
        columns: dict[str, ColumnSlice] = {}
        if self.has_gate:  # each head's query, then its gate, in one tensor
            columns = {"q": ColumnSlice(whole=2 * h, start=0, stop=h)}
            gate = ColumnSlice(whole=2 * h, start=h, stop=2 * h)
            yield builder.matrix("wq_gate", "DNH", "q_proj.weight", columns=gate)
        elif is_fused:  # the heads of queries, keys and values in one tensor
            tensors = dict.fromkeys("qkv", "qkv_proj")
            bounds = {"q": (0, n), "k": (n, n + k), "v": (n + k, n + 2 * k)}
            whole = ColumnSlice(whole=n + 2 * k, start=0, stop=n, dim=-2)
            columns = {name: replace(whole, start=a, stop=b) for name, (a, b) in bounds.items()}
        heads = {"q": "NH", "k": "KH"} | ({} if self.has_shared_values else {"v": "KU"})
        for name, of in heads.items():
            tensor = f"{tensors[name]}.weight"
            yield builder.matrix(f"w{name}", f"D{of}", tensor, columns=columns.get(name))
        if self.has_head_gate:
            yield builder.matrix("w_head_gate", "DN", "g_proj.weight")
        yield builder.matrix("wo", "NUD", "o_proj.weight", inputs=(0, 1))
        for name, of in heads.items() if self.has_qkv_bias else ():
            part = columns.get(name) if name == "q" else None
            yield builder.vector(f"b{name}", of, f"{name}_proj.bias", columns=part)
        if self.has_o_bias:
            yield builder.vector("bo", "d", "o_proj.bias")
        for name in "qk" if self.has_qk_norm else "":
            shape = heads[name] if self.has_whole_norms else "H"
            yield builder.vector(f"{name}_norm", shape, f"{name}_norm.weight")
        if self.has_sinks:
            yield builder.vector("sinks", "N", "sinks")

    def cache(self, kind: AttentionKind, tp: int, n_tokens: int = 1) -> Iterator[CacheArray]:
        """Keys and values of every position."""
        for name, width in zip("kv", self.head_widths, strict=True):
            shape = (self.stored_kv_heads(tp), width)
            yield CacheArray(name=name, dims=(Dim.KV_HEADS, Dim.HEAD_DIM), shape=shape)

    def page_elements(
        self, kind: AttentionKind, tp: int, packing: int, *, has_half_rows: bool
    ) -> int:
        n_heads = self.stored_kv_heads(tp) // tp
        if has_half_rows and self.head_dim == HALF_LANES:
            return base.aligned(n_heads, packing) * LANES
        return base.aligned(2 * n_heads, packing) * base.aligned(self.head_dim, LANES)

    def paged_window(self, kind: AttentionKind) -> int | None:
        """The window of a sliding layer: engines free the pages that it has left if all heads have one size."""
        full = self.with_heads_of(AttentionKind.FULL)
        is_one_size = full.cached_widths(1) == self.cached_widths(1)
        is_freed = kind is AttentionKind.SLIDING and is_one_size
        return self.window if is_freed else None

    def cached_widths(self, tp: int) -> tuple[tuple[int, ...], ...]:
        return tuple((self.stored_kv_heads(tp) // tp, width) for width in self.head_widths)

    def step_bytes(self, step: base.AttentionStep) -> float:
        """Queries and outputs of the tokens, keys and values of all that they attend to."""
        n_kv_heads = self.stored_kv_heads(step.tp) / step.tp
        n_heads = self.n_heads / step.tp
        n_keys = step.n_sequences * step.n_keys
        elements = (step.n_tokens * n_heads + n_keys * n_kv_heads) * sum(self.head_widths)
        return elements * step.act_bytes

    def window_of(self, kind: AttentionKind) -> int | None:
        is_windowed = kind in {AttentionKind.SLIDING, AttentionKind.CHUNKED}
        return self.window if is_windowed else None

    def attended_pairs(self, kind: AttentionKind, n: int) -> int:
        window = self.window_of(kind)
        if window is not None and kind is AttentionKind.CHUNKED:
            n_chunks, rest = divmod(n, window)
            return n_chunks * base.seen_pairs(window) + base.seen_pairs(rest)
        return base.seen_pairs(n, most=window)

    def passed_elements(self, tp: int, *, is_prefill: bool, is_served: bool) -> float:
        """Queries, keys and values that are rotated and, in some models, normed."""
        n_kv_heads = self.stored_kv_heads(tp) / tp
        width = self.n_heads / tp * self.head_dim + n_kv_heads * sum(self.head_widths)
        head_passes = SERVED_HEAD_PASSES if is_served else base.HEAD_PASSES
        norm_passes = SERVED_NORM_PASSES if is_served else base.NORM_PASSES
        return (head_passes + norm_passes * self.has_qk_norm) * width

    @property
    def n_token_sums(self) -> int:
        return 2 * self.has_whole_norms

    @property
    def replicated_heads(self) -> tuple[int, ...]:
        return self.n_kv_heads, self.with_heads_of(AttentionKind.FULL).n_kv_heads


# What keeps a state of fixed size in some layers.
_FIXED_STATES = {
    LayerRule.HYBRID: LinearAttention.read,
    LayerRule.POOLED_KEYS: LinearAttention.read,
    LayerRule.BLOCKS: StateSpace.read,
}
grouped_of = partial(base.narrowed, kind=GroupedAttention)


# Keys of configs.
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
KINDS = {SLIDING: AttentionKind.SLIDING, FULL: AttentionKind.FULL}
HYBRID_KINDS = {LINEAR: AttentionKind.LINEAR, FULL: AttentionKind.FULL}
# Defaults of the config classes in transformers.
CHUNK = 8192
CHUNKED_TEMPERATURE = base.Temperature(floor=8192, strength=0.1)
NOPE_INTERVAL = 4
GEMMA3_LOCAL_THETA = 10_000.0  # of Gemma3TextConfig.default_theta
GEMMA4_FULL_HEAD_DIM = 512  # of Gemma4TextConfig, as the parameters below


def grouped_attention(reader: ConfigReader, family: Family) -> GroupedAttention:
    """The attention of a family with grouped queries."""
    row, n_heads = family.traits, reader.integer("num_attention_heads")
    has_bias = reader.boolean("attention_bias", default=row.has_bias)
    default_dim = row.head_dim or reader.integer("hidden_size") // n_heads
    head_dim = reader.integer("head_dim", default_dim)
    turned = base.with_rope(reader, row)
    if (width := reader.optional_integer("rotary_dim")) is not None:
        turned = turned.over({"partial_rotary_factor": width / head_dim, **turned.config})
    rope = read_rope(turned, FULL)
    check_factors(rope, head_dim, reader.source)
    key, kv_key = row.qk_norm, "num_key_value_heads"
    is_whole = row.has_as_many_kv_heads or kv_key in reader.config
    attention = GroupedAttention(
        n_heads=n_heads,
        n_kv_heads=reader.integer(kv_key, n_heads if is_whole else None),
        head_dim=head_dim,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias and row.has_o_bias,
        has_qk_norm=reader.boolean(key, default=False) if isinstance(key, str) else key,
        has_whole_norms=row.has_whole_norms,
        rope=rope,
        has_sinks=row.has_sinks,
        window=_window(reader, row),
        has_gate=row.has_gate,
        linear=_FIXED_STATES[row.layers](reader) if row.layers in _FIXED_STATES else None,
        scale=reader.optional_number(row.scales["scores"]) if "scores" in row.scales else None,
    )
    variant = _VARIANTS.get(row.variant or "")
    return attention if variant is None else variant(reader, attention)


def _gemma2(reader: ConfigReader, attention: GroupedAttention) -> GroupedAttention:
    """Gemma 3 ignores the soft cap in transformers."""
    key = "attn_logit_softcapping"
    softcap = reader.optional_number(key) if key in reader.config else 50.0
    scale = reader.positive("query_pre_attn_scalar", 256.0) ** -0.5
    return replace(attention, scale=scale, softcap=softcap)


def _interleaved(_: ConfigReader, attention: GroupedAttention) -> GroupedAttention:
    """Rotary embeddings turn neighbors (ERNIE 4.5, GLM-4, Command R)."""
    return replace(attention, rope=replace(attention.rope, is_interleaved=True))


def _blocks(reader: ConfigReader, attention: GroupedAttention) -> GroupedAttention:
    """Nemotron-H, whose oldest config has the width of a head under another key."""
    return replace(attention, head_dim=reader.integer("attention_head_dim", attention.head_dim))


def _cohere2(reader: ConfigReader, attention: GroupedAttention) -> GroupedAttention:
    """Only layers with windows have rotary embeddings, which turn neighbors."""
    return replace(_interleaved(reader, attention), has_full_rope=False)


def _olmo3(reader: ConfigReader, attention: GroupedAttention) -> GroupedAttention:
    """Rotary embeddings of windows are not scaled."""
    plain = reader.over({**reader.config, "rope_scaling": None})
    return replace(attention, sliding_rope=read_rope(plain, SLIDING))


def _exaone4(_: ConfigReader, attention: GroupedAttention) -> GroupedAttention:
    """In models with windows, the other layers have no rotary embedding; `layer_types` says which."""
    return replace(attention, has_full_rope=attention.window is None)


def _gemma3(reader: ConfigReader, attention: GroupedAttention) -> GroupedAttention:
    """Rotary embeddings of windows have separate parameters: only the other layers are scaled."""
    by_type, window = reader.get("rope_parameters") or {}, reader
    if not isinstance(by_type, dict) or SLIDING not in by_type:
        theta = reader.positive("rope_local_base_freq", GEMMA3_LOCAL_THETA)
        length = reader.get("max_position_embeddings")
        plain = {"rope_theta": theta, "max_position_embeddings": length}
        window = reader.over({key: value for key, value in plain.items() if value is not None})
    scale = reader.positive("query_pre_attn_scalar", 256.0) ** -0.5
    return replace(attention, scale=scale, sliding_rope=read_rope(window, SLIDING))


def _gemma4(reader: ConfigReader, attention: GroupedAttention) -> GroupedAttention:
    """The heads of full attention differ; defaults of Gemma4TextConfig."""
    n_kv_heads = attention.n_kv_heads
    is_shared = reader.boolean("attention_k_eq_v", default=False)
    if is_shared:
        n_kv_heads = reader.optional_integer("num_global_key_value_heads") or n_kv_heads
    head_dim = reader.integer("global_head_dim", GEMMA4_FULL_HEAD_DIM)
    return replace(
        attention,
        scale=1.0,
        sliding_rope=read_rope(base.with_rope(reader, Family("gemma4_text").traits), SLIDING),
        has_value_norm=True,
        full_heads=FullHeads(n_kv_heads=n_kv_heads, head_dim=head_dim, has_shared_values=is_shared),
    )


def _mimo2(reader: ConfigReader, attention: GroupedAttention) -> GroupedAttention:
    """Windows have other heads, sinks and rotary embeddings, and see their size and the query's position.

    Sources: MiMoV2FlashConfig and MiMoV2FlashAttention of transformers.
    """
    n_kv_heads, alike = attention.n_kv_heads, {"swa_num_attention_heads": attention.n_heads}
    value_dim = reader.integer("v_head_dim", attention.head_dim)
    alike |= {"swa_head_dim": attention.head_dim, "swa_v_head_dim": value_dim}
    for key, size in alike.items():
        other = reader.integer(key, size)
        refuse(reader.source, {f"{key}={other} is not supported, only {size}": other != size})
    window, sliding_rope = reader.optional_integer("sliding_window_size"), attention.rope
    if SLIDING in (reader.get("rope_parameters") or {}):
        sliding_rope = read_rope(reader, SLIDING)
    elif (theta := reader.optional_number("swa_rope_theta")) is not None:
        sliding_rope = replace(attention.rope, theta=theta)
    return replace(
        attention,
        n_kv_heads=reader.integer("swa_num_key_value_heads", 2 * n_kv_heads),
        window=attention.window if window is None else window + 1,
        value_dim=value_dim,
        value_scale=reader.number("attention_value_scale", 1.0),
        sliding_rope=sliding_rope,
        full_heads=FullHeads(n_kv_heads=n_kv_heads, head_dim=attention.head_dim),
    )


def _step3(reader: ConfigReader, attention: GroupedAttention) -> GroupedAttention:
    """Windows have more heads and other rotary embeddings, and a number scales the output of each head.

    Sources: Step3p7TextConfig and Step3p7Attention of transformers.
    """
    of_windows, key = reader.mapping("attention_other_setting"), "num_sliding_attention_heads"
    alike = {"num_attention_groups": attention.n_kv_heads, "head_dim": attention.head_dim}
    for name, size in alike.items():
        other = of_windows.get(name, size)
        wrong = f"{name}={other} of attention_other_setting is not supported, only {size}"
        refuse(reader.source, {wrong: other != size})
    n_heads = ConfigReader(
        {key: of_windows.get("num_attention_heads"), **reader.config}, reader.source
    )
    has_windows = SLIDING in (reader.get("layer_types") or ())
    reader.get(key)
    return replace(
        attention,
        n_heads=n_heads.integer(key, None if has_windows else attention.n_heads),
        has_head_gate=True,
        scale=reader.positive("query_pre_attn_scalar", attention.head_dim) ** -0.5,
        sliding_rope=read_rope(reader, SLIDING),
        full_heads=FullHeads(
            n_heads=attention.n_heads,
            n_kv_heads=attention.n_kv_heads,
            head_dim=attention.head_dim,
        ),
    )


def _chunked(reader: ConfigReader, attention: GroupedAttention) -> GroupedAttention:
    temperature = None
    if reader.boolean("attn_temperature_tuning", default=True):
        temperature = base.Temperature(
            floor=reader.integer("floor_scale", CHUNKED_TEMPERATURE.floor),
            strength=reader.number("attn_scale", CHUNKED_TEMPERATURE.strength),
        )
    return replace(
        attention,
        rope=replace(attention.rope, is_interleaved=True),
        window=reader.integer("attention_chunk_size", CHUNK),
        has_full_rope=False,
        has_l2_norm=reader.boolean("use_qk_norm", default=True),
        temperature=temperature,
    )


def _ministral3(reader: ConfigReader, attention: GroupedAttention) -> GroupedAttention:
    return replace(attention, temperature=base.read_temperature(reader, attention.rope))


def _grok(reader: ConfigReader, attention: GroupedAttention) -> GroupedAttention:
    """Queries beyond a length grow with the logarithm of their position."""
    softcap, length = reader.number("attn_logit_softcapping"), "attn_temperature_len"
    temperature = None
    if (reader.get(length) or -1) != -1:
        floor = reader.integer(length, minimum=2)
        temperature = base.Temperature(floor=floor, strength=1.0, is_ratio=True)
    return replace(attention, softcap=softcap, temperature=temperature)


_VARIANTS = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "chunked": _chunked,
    "interleaved": _interleaved,
    "blocks": _blocks,
    "cohere2": _cohere2,
    "mimo2": _mimo2,
    "olmo3": _olmo3,
    "step3": _step3,
    "exaone4": _exaone4,
    "ministral3": _ministral3,
    "grok": _grok,
}


def _window(reader: ConfigReader, row: FamilyTraits) -> int | None:
    is_stated = row.has_window and "sliding_window" in reader.config
    return reader.optional_integer("sliding_window") if is_stated else row.window


def attention_kinds(reader: ConfigReader, family: Family, n_layers: int) -> list[AttentionKind]:
    """The kind of each layer, from `layer_types` or by the rule of the family."""
    row, known, every = family.traits, KINDS, 0
    match row.layers:
        case LayerRule.CHUNKS | LayerRule.NOPES:  # `no_rope_layers`, 1 for layers that turn
            interval = reader.integer("no_rope_layer_interval", NOPE_INTERVAL)
            usual = [int((index + 1) % interval != 0) for index in range(n_layers)]
            turns = reader.integers("no_rope_layers") or usual
            if len(turns) < n_layers:
                raise SpecError(
                    f"{reader.source}: 'no_rope_layers' has {len(turns)} values for {n_layers} layers. Give one for each."
                )
            turned, other = AttentionKind.CHUNKED, AttentionKind.FULL
            if row.layers is LayerRule.NOPES:
                turned, other = AttentionKind.FULL, AttentionKind.NOPE
            return [turned if turn else other for turn in turns[:n_layers]]
        case LayerRule.HYBRID:
            every, known = reader.integer("full_attention_interval", 4), HYBRID_KINDS
        case LayerRule.WINDOWS if row.pattern_key and row.pattern_key in reader.config:
            pattern = reader.flags(row.pattern_key, n_layers)  # 1 for windows
            return [AttentionKind.SLIDING if one else AttentionKind.FULL for one in pattern]
        case LayerRule.WINDOWS if row.period > 1:
            every, key = row.period, row.period_key
            if key and reader.get(key) is not None and reader.get("layer_types") is None:
                every = reader.integer(key)
        case LayerRule.WINDOWS | LayerRule.UNIFORM:
            every = 1 if _window(reader, row) is None else n_layers + 1
        case _:
            return [AttentionKind.FULL] * n_layers
    other, full = known
    default = [other if (index + 1) % every else full for index in range(n_layers)]
    is_stated = row.layers is not LayerRule.UNIFORM
    names = reader.names("layer_types", n_layers, known, default) if is_stated else default
    kinds = [known[name] for name in names]
    return [*kinds[:-1], AttentionKind.FULL] if row.variant == "gemma4" else kinds
