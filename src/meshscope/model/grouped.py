"""Reads grouped-query attention from a Hugging Face config: heads, windows, rotary embeddings by family."""

from dataclasses import replace

from meshscope.errors import SpecError
from meshscope.model.model import (
    HYBRID_FAMILIES,
    AttentionKind,
    Family,
    FullHeads,
    GroupedAttention,
    LinearAttention,
    Rope,
    Temperature,
)
from meshscope.model.reader import ConfigReader, check_factors, read_rope

SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = "linear_attention"
KINDS = {SLIDING: AttentionKind.SLIDING, FULL: AttentionKind.FULL}
HYBRID_KINDS = {LINEAR: AttentionKind.LINEAR, FULL: AttentionKind.FULL}
QWEN3_HEAD_DIM = 128  # default of transformers' Qwen3Config for every hidden size
WIDE_HEAD_DIM = 256  # of Gemma2Config, Gemma3TextConfig, Qwen3NextConfig and Qwen3_5TextConfig
# The window if the config has no `sliding_window`; null in a config means full attention.
WINDOWS = {
    Family.GPT_OSS: 128,
    Family.MISTRAL: 4096,
    Family.MINISTRAL: 4096,
    Family.MINISTRAL3: None,
    Family.PHI3: None,
    Family.GEMMA2: 4096,
    Family.GEMMA3: 4096,
    Family.GEMMA4: 512,
}
LLAMA4_CHUNK = 8192  # of Llama4TextConfig, as the values below
LLAMA4_TEMPERATURE = Temperature(floor=8192, strength=0.1)
LLAMA4_NOPE_INTERVAL = 4
MINISTRAL3_ROPE = {
    "type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
}
MINISTRAL3_BETA = 0.1  # of Ministral3Config
GEMMA3_LOCAL_THETA = 10_000.0  # of Gemma3TextConfig.default_theta
GEMMA3_THETA = 1_000_000.0
GEMMA4_FULL_HEAD_DIM = 512  # of Gemma4TextConfig, as the parameters below
GEMMA4_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def grouped_attention(reader: ConfigReader, family: Family) -> GroupedAttention:
    """The attention of a family with grouped queries."""
    n_heads = reader.integer("num_attention_heads")
    is_gemma = family in {Family.GEMMA2, Family.GEMMA3}
    is_gpt_oss = family is Family.GPT_OSS
    has_bias = reader.boolean("attention_bias", default=is_gpt_oss or family is Family.QWEN2)
    is_gemma4 = family is Family.GEMMA4
    scale = reader.number("query_pre_attn_scalar", 256.0) ** -0.5 if is_gemma else None
    head_dim, rope = _head_dim(reader, family, n_heads), _rope(reader, family)
    check_factors(rope, head_dim, reader.source)
    return GroupedAttention(
        n_heads=n_heads,
        n_kv_heads=reader.integer("num_key_value_heads", n_heads),
        head_dim=head_dim,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias and family not in {Family.QWEN2, Family.GLM4_MOE},
        has_qk_norm=_has_qk_norm(reader, family),
        rope=rope,
        has_sinks=is_gpt_oss,
        window=_window(reader, family),
        sliding_rope=_sliding_rope(reader, family),
        scale=1.0 if is_gemma4 else scale,
        softcap=_softcap(reader, family),
        has_full_rope=family is not Family.LLAMA4,
        has_l2_norm=family is Family.LLAMA4 and reader.boolean("use_qk_norm", default=True),
        temperature=_temperature(reader, family, rope),
        has_gate=family in HYBRID_FAMILIES,
        has_value_norm=is_gemma4,
        full_heads=_gemma4_heads(reader, n_heads) if is_gemma4 else None,
        linear=_linear(reader) if family in HYBRID_FAMILIES else None,
    )


def _gemma4_heads(reader: ConfigReader, n_heads: int) -> FullHeads:
    """The heads of full attention; defaults of Gemma4TextConfig."""
    n_kv_heads = reader.integer("num_key_value_heads", n_heads)
    is_shared = reader.boolean("attention_k_eq_v", default=False)
    if is_shared:
        n_kv_heads = reader.optional_integer("num_global_key_value_heads") or n_kv_heads
    head_dim = reader.integer("global_head_dim", GEMMA4_FULL_HEAD_DIM)
    return FullHeads(n_kv_heads=n_kv_heads, head_dim=head_dim, has_shared_values=is_shared)


def _linear(reader: ConfigReader) -> LinearAttention:
    """Defaults of Qwen3NextConfig and Qwen3_5TextConfig."""
    return LinearAttention(
        n_key_heads=reader.integer("linear_num_key_heads", 16),
        n_value_heads=reader.integer("linear_num_value_heads", 32),
        key_dim=reader.integer("linear_key_head_dim", 128),
        value_dim=reader.integer("linear_value_head_dim", 128),
        conv_width=reader.integer("linear_conv_kernel_dim", 4, minimum=2),
    )


def _temperature(reader: ConfigReader, family: Family, rope: Rope) -> Temperature | None:
    if family is Family.MINISTRAL3:
        parameters = reader.get("rope_parameters")
        beta = parameters.get("llama_4_scaling_beta") if isinstance(parameters, dict) else None
        strength = MINISTRAL3_BETA if not isinstance(beta, int | float) else float(beta)
        return Temperature(floor=rope.original_max_position, strength=strength, offset=0.0)
    if family is not Family.LLAMA4:
        return None
    if not reader.boolean("attn_temperature_tuning", default=True):
        return None
    return Temperature(
        floor=reader.integer("floor_scale", LLAMA4_TEMPERATURE.floor),
        strength=reader.number("attn_scale", LLAMA4_TEMPERATURE.strength),
    )


def attention_kinds(reader: ConfigReader, family: Family, n_layers: int) -> list[AttentionKind]:
    """The kind of each layer, from `layer_types` or by the default of the family.

    gpt-oss and Gemma 2 have a window in every other layer, starting with the first; Gemma 3 in
    five of six; Mistral and Phi-3 in all layers or none. Qwen3-Next and Qwen3.5 have linear attention in three of four.
    """
    match family:
        case Family.GPT_OSS | Family.GEMMA2:
            period = 2
        case Family.GEMMA3:
            period = reader.integer("sliding_window_pattern", 6)
        case Family.GEMMA4:
            return _gemma4_kinds(reader, n_layers)
        case Family.LLAMA4:
            return _llama4_kinds(reader, n_layers)
        case Family.QWEN3_NEXT | Family.QWEN3_5 | Family.QWEN3_5_MOE:
            return _hybrid_kinds(reader, n_layers)
        case Family.MISTRAL | Family.MINISTRAL | Family.MINISTRAL3 | Family.PHI3:
            has_window = _window(reader, family) is not None
            every = SLIDING if has_window else FULL
            return _kinds(reader, family, [every] * n_layers)
        case _:
            return [AttentionKind.FULL] * n_layers
    default = [FULL if (index + 1) % period == 0 else SLIDING for index in range(n_layers)]
    return _kinds(reader, family, default)


def _gemma4_kinds(reader: ConfigReader, n_layers: int) -> list[AttentionKind]:
    """From `layer_types`, or full attention in every sixth layer; always in the last."""
    default = [SLIDING if (index + 1) % 6 else FULL for index in range(n_layers)]
    kinds = _kinds(reader, Family.GEMMA4, default)
    return [*kinds[:-1], AttentionKind.FULL]


def _llama4_kinds(reader: ConfigReader, n_layers: int) -> list[AttentionKind]:
    """From `no_rope_layers`, 1 for layers that turn, or every fourth layer without; only the others have chunks."""
    interval = reader.integer("no_rope_layer_interval", LLAMA4_NOPE_INTERVAL)
    default = [int((index + 1) % interval != 0) for index in range(n_layers)]
    turns = reader.integers("no_rope_layers") or default
    if len(turns) < n_layers:
        raise SpecError(
            f"{reader.source}: 'no_rope_layers' has {len(turns)} values for {n_layers} layers. Give one for each."
        )
    return [AttentionKind.CHUNKED if turn else AttentionKind.FULL for turn in turns[:n_layers]]


def _hybrid_kinds(reader: ConfigReader, n_layers: int) -> list[AttentionKind]:
    """From `layer_types`, or full attention in the last layer of each interval."""
    interval = reader.integer("full_attention_interval", 4)
    default = [LINEAR if (index + 1) % interval else FULL for index in range(n_layers)]
    names = reader.names("layer_types", n_layers, HYBRID_KINDS, default)
    return [HYBRID_KINDS[name] for name in names]


def _kinds(reader: ConfigReader, family: Family, default: list[str]) -> list[AttentionKind]:
    is_uniform = family in {
        Family.MISTRAL,
        Family.MINISTRAL3,
        Family.PHI3,
    }  # transformers ignores their `layer_types`
    names = default if is_uniform else reader.names("layer_types", len(default), KINDS, default)
    return [KINDS[name] for name in names]


def _head_dim(reader: ConfigReader, family: Family, n_heads: int) -> int:
    if family in {Family.QWEN3, Family.QWEN3_MOE}:
        return reader.integer("head_dim", QWEN3_HEAD_DIM)
    if family in {Family.GEMMA2, Family.GEMMA3, Family.GEMMA4} | HYBRID_FAMILIES:
        return reader.integer("head_dim", WIDE_HEAD_DIM)
    return reader.integer("head_dim", reader.integer("hidden_size") // n_heads)


def _has_qk_norm(reader: ConfigReader, family: Family) -> bool:
    if family is Family.GLM4_MOE:
        return reader.boolean("use_qk_norm", default=False)
    return (
        family in {Family.QWEN3, Family.QWEN3_MOE, Family.GEMMA3, Family.GEMMA4} | HYBRID_FAMILIES
    )


def _window(reader: ConfigReader, family: Family) -> int | None:
    if family is Family.LLAMA4:
        return reader.integer("attention_chunk_size", LLAMA4_CHUNK)
    if family not in WINDOWS:
        return None
    if "sliding_window" in reader.config:
        return reader.optional_integer("sliding_window")
    return WINDOWS[family]


def _softcap(reader: ConfigReader, family: Family) -> float | None:
    """Gemma 3 ignores the key in transformers."""
    if family is not Family.GEMMA2:
        return None
    key = "attn_logit_softcapping"
    return reader.optional_number(key) if key in reader.config else 50.0


def _rope(reader: ConfigReader, family: Family) -> Rope:
    """The rotary embedding of layers that attend to all positions."""
    if family is Family.GEMMA3:
        reader = reader.over({"rope_theta": GEMMA3_THETA} | dict(reader.config))
    if family is Family.GEMMA4:
        reader = _gemma4_rope(reader)
    if family is Family.MINISTRAL3:
        reader = reader.over({"rope_parameters": MINISTRAL3_ROPE, **reader.config})
    return replace(read_rope(reader, FULL), is_interleaved=family is Family.LLAMA4)


def _sliding_rope(reader: ConfigReader, family: Family) -> Rope | None:
    """The rotary embedding of windows where it differs: Gemma 3 scales only the other layers."""
    if family is Family.GEMMA4:
        return read_rope(_gemma4_rope(reader), SLIDING)
    if family is not Family.GEMMA3:
        return None
    by_type = reader.get("rope_parameters") or {}
    if isinstance(by_type, dict) and SLIDING in by_type:
        return read_rope(reader, SLIDING)
    theta = reader.number("rope_local_base_freq", GEMMA3_LOCAL_THETA)
    plain = {"rope_theta": theta}
    if (length := reader.get("max_position_embeddings")) is not None:
        plain["max_position_embeddings"] = length
    return read_rope(reader.over(plain))


def _gemma4_rope(reader: ConfigReader) -> ConfigReader:
    config = {**reader.config}
    config["rope_parameters"] = config.get("rope_parameters") or GEMMA4_ROPE
    return reader.over(config)
