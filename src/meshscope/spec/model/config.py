"""Reads a Hugging Face `config.json`, with old or new key names, into a Model."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshscope.errors import SpecError, nearest
from meshscope.spec.model.catalog import CATALOG, CatalogEntry
from meshscope.spec.model.compressed import (
    compressed_attention,
    compressed_layers,
    compressed_moe,
    hyper_connections,
)
from meshscope.spec.model.model import (
    Activation,
    Attention,
    AttentionKind,
    Family,
    GroupedAttention,
    GroupScore,
    Indexer,
    LatentAttention,
    Layer,
    MixtureOfExperts,
    MlpKind,
    Model,
    Scoring,
)
from meshscope.spec.model.reader import MAX_LAYERS, ConfigReader, read_rope
from meshscope.spec.model.stored_format import stored_format

MAX_CONFIG_BYTES = 4 * 2**20  # the largest published config.json is under 100 kB
QWEN3_HEAD_DIM = 128  # default of transformers' Qwen3Config for every hidden size
LATENT_FAMILIES = frozenset({Family.DEEPSEEK_V2, Family.DEEPSEEK_V3, Family.DEEPSEEK_V32})
# Kimi K2's config states DeepseekV3ForCausalLM as its architecture.
SAME_ARCHITECTURE = {"kimi_k2": Family.DEEPSEEK_V3.value}
# Suffixes of ids on the Hub whose models have the sizes of the model without the suffix.
_VARIANT = re.compile(
    r"-(instruct|chat|hf|it|base|thinking|fp8|fp8-dynamic|int8|int4|w8a8|w4a16|awq|gptq|bf16|2507|v0\.1|dynamic"
    r"|quantized\.w8a8|quantized\.w4a16|gptq-int4|gptq-int8)$"
)
HUB = "https://huggingface.co"
HUB_TIMEOUT_S = 5.0


def read_model(name: str) -> Model:
    """The model with this name: the path of a config.json or snapshot folder, or a model id.

    Ids are looked up in the built-in catalog; other ids of the form `owner/name` are fetched from
    the Hugging Face Hub.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return model_from_config(_read_json(path), name=_display_name(path), source=str(path))
    if name.endswith(".json") or name.startswith((".", "/", "~")):
        raise SpecError(
            f"no config file at '{path}'. Give a config.json, a folder with one, or a model id."
        )
    entry = _catalog_entry(name)
    if entry is not None:
        return model_from_config(entry.config, name=entry.name, source=entry.source)
    return _fetch_model(name)


def _catalog_entry(name: str) -> CatalogEntry | None:
    """The catalog entry of this id, case-insensitive, with or without the owner.

    A variant of a model, such as `-Instruct` or `-FP8`, has the sizes of its base model.
    """
    by_id = {
        key.lower(): entry for entry in CATALOG.values() for key in (entry.name, *entry.aliases)
    }
    by_base_id = {_base_id(key): entry for key, entry in reversed(by_id.items())}
    return by_id.get(name.lower()) or by_base_id.get(_base_id(name))


def _base_id(name: str) -> str:
    """An id without owner, in lower case, without the suffixes of variants."""
    base = name.lower().rsplit("/", 1)[-1].removeprefix("meta-")
    while (shorter := _VARIANT.sub("", base)) != base:
        base = shorter
    return base


def model_from_config(config: Mapping[str, Any], *, name: str, source: str) -> Model:
    """The model described by a config; SpecError names the missing or unsupported key."""
    reader = ConfigReader(config, source)
    family = _family(reader)
    layers = _layers(reader, family)
    has_dense = any(layer.mlp is MlpKind.DENSE for layer in layers)
    stored = stored_format(config)
    _refuse_sliding_window(reader, family)
    if reader.text("hidden_act", "silu") != "silu":
        raise SpecError(
            f"{source}: hidden_act={config['hidden_act']!r} is not supported. Supported: 'silu'."
        )
    return Model(
        name=name,
        family=family,
        layers=layers,
        hidden=reader.integer("hidden_size"),
        ffn=reader.integer("intermediate_size") if has_dense else None,
        vocab=reader.integer("vocab_size"),
        attention=_attention(reader, family),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        has_tied_embeddings=reader.boolean("tie_word_embeddings", default=False),
        has_mlp_bias=reader.boolean("mlp_bias", default=False),
        max_position=reader.optional_integer("max_position_embeddings"),
        source=source,
        moe=None
        if all(layer.mlp is MlpKind.DENSE for layer in layers)
        else read_moe(reader, family),
        hyper=hyper_connections(reader) if family is Family.DEEPSEEK_V4 else None,
        stored_as=None if stored is None else stored.text,
        stored_dtype=None if stored is None else stored.weight_dtype,
    )


def _attention(reader: ConfigReader, family: Family) -> Attention:
    if family in LATENT_FAMILIES:
        return _latent_attention(reader, family)
    if family is Family.DEEPSEEK_V4:
        return compressed_attention(reader)
    n_heads = reader.integer("num_attention_heads")
    is_qwen2 = family is Family.QWEN2
    has_qk_norm = family in {Family.QWEN3, Family.QWEN3_MOE}
    head_dim = QWEN3_HEAD_DIM if has_qk_norm else reader.integer("hidden_size") // n_heads
    return GroupedAttention(
        n_heads=n_heads,
        n_kv_heads=reader.integer("num_key_value_heads", n_heads),
        head_dim=reader.integer("head_dim", head_dim),
        has_qkv_bias=reader.boolean("attention_bias", default=is_qwen2 or family is Family.GPT_OSS),
        has_o_bias=not is_qwen2
        and reader.boolean("attention_bias", default=family is Family.GPT_OSS),
        has_qk_norm=has_qk_norm,
        rope=read_rope(reader),
        has_sinks=family is Family.GPT_OSS,
        window=reader.integer("sliding_window", 128) if family is Family.GPT_OSS else None,
    )


def _latent_attention(reader: ConfigReader, family: Family) -> LatentAttention:
    is_sparse = family is Family.DEEPSEEK_V32
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
        indexer=Indexer(
            n_heads=reader.integer("index_n_heads"),
            head_dim=reader.integer("index_head_dim"),
            top_k=reader.integer("index_topk"),
        )
        if is_sparse
        else None,
    )


def read_moe(reader: ConfigReader, family: Family) -> MixtureOfExperts:
    """The experts of a config; keys and routing depend on the family."""
    match family:
        case Family.DEEPSEEK_V4:
            return compressed_moe(reader)
        case Family.MIXTRAL | Family.QWEN3_MOE | Family.GPT_OSS:
            return _softmax_moe(reader, family)
        case _:
            return _deepseek_moe(reader, family)


def _softmax_moe(reader: ConfigReader, family: Family) -> MixtureOfExperts:
    """Routed experts with softmax scores and no shared experts."""
    is_qwen3 = family is Family.QWEN3_MOE
    moe = MixtureOfExperts(
        n_experts=reader.integer("num_experts" if is_qwen3 else "num_local_experts"),
        n_active=reader.integer("num_experts_per_tok"),
        ffn=reader.integer("moe_intermediate_size" if is_qwen3 else "intermediate_size"),
        shared_ffn=None,
        scoring=Scoring.SOFTMAX,
        is_normalized=not is_qwen3 or reader.boolean("norm_topk_prob", default=False),
    )
    if family is not Family.GPT_OSS:
        return moe
    return replace(
        moe,
        has_bias=True,
        activation=Activation.CLAMPED_SWIGLU,
        activation_limit=reader.number("swiglu_limit", 7.0),
    )


def _deepseek_moe(reader: ConfigReader, family: Family) -> MixtureOfExperts:
    """Source: DeepseekV2TopkRouter and DeepseekV3TopkRouter of transformers."""
    is_v2 = family is Family.DEEPSEEK_V2
    method = reader.text("topk_method", "greedy" if is_v2 else "noaux_tc")
    known = {"greedy", "group_limited_greedy"} if is_v2 else {"noaux_tc"}
    if method not in known:
        raise SpecError(
            f"{reader.source}: topk_method={method!r} is not supported for {family}. "
            f"Supported: {', '.join(sorted(known))}."
        )
    scoring = Scoring.SOFTMAX if is_v2 else Scoring.SIGMOID
    if reader.text("scoring_func", scoring.value) != scoring:
        raise SpecError(
            f"{reader.source}: scoring_func={reader.config['scoring_func']!r} is not supported for {family}, "
            f"which uses '{scoring}' in transformers. Correct the config."
        )
    is_limited = method != "greedy"
    ffn, n_shared = reader.integer("moe_intermediate_size"), reader.integer("n_shared_experts")
    return MixtureOfExperts(
        n_experts=reader.integer("n_routed_experts"),
        n_active=reader.integer("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * n_shared,
        scoring=scoring,
        is_normalized=not is_v2 and reader.boolean("norm_topk_prob", default=True),
        scale=reader.number("routed_scaling_factor", 1.0 if is_v2 else 2.5),
        n_groups=reader.integer("n_group", 1) if is_limited else 1,
        n_active_groups=reader.integer("topk_group", 1) if is_limited else 1,
        group_score=GroupScore.MAX if is_v2 else GroupScore.TOP2_SUM,
        has_correction_bias=not is_v2,
    )


def _layers(reader: ConfigReader, family: Family) -> tuple[Layer, ...]:
    """The kind of each layer."""
    n_layers = reader.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if family is Family.DEEPSEEK_V4:
        return compressed_layers(reader, n_layers)
    attention = [AttentionKind.FULL] * n_layers
    if family is Family.GPT_OSS:
        attention = _gpt_oss_attention(reader, n_layers)
    mlp = _mlp_kinds(reader, family, n_layers)
    return tuple(Layer(attention=a, mlp=m) for a, m in zip(attention, mlp, strict=True))


def _gpt_oss_attention(reader: ConfigReader, n_layers: int) -> list[AttentionKind]:
    """From `layer_types`; by default every other layer, starting with the first, is sliding."""
    kinds = {"sliding_attention": AttentionKind.SLIDING, "full_attention": AttentionKind.FULL}
    default = [list(kinds)[index % 2] for index in range(n_layers)]
    return [kinds[name] for name in reader.names("layer_types", n_layers, kinds, default)]


def _mlp_kinds(reader: ConfigReader, family: Family, n_layers: int) -> list[MlpKind]:
    if family in {Family.MIXTRAL, Family.GPT_OSS}:
        return [MlpKind.MOE] * n_layers
    if family is Family.QWEN3_MOE:
        step = reader.integer("decoder_sparse_step", 1)
        dense = set(reader.integers("mlp_only_layers"))
        return [
            MlpKind.DENSE if index in dense or (index + 1) % step else MlpKind.MOE
            for index in range(n_layers)
        ]
    if family in LATENT_FAMILIES:
        kinds = {"dense": MlpKind.DENSE, "sparse": MlpKind.MOE}
        n_dense = reader.count("first_k_dense_replace", 0 if family is Family.DEEPSEEK_V2 else 3)
        default = ["dense" if index < n_dense else "sparse" for index in range(n_layers)]
        return [kinds[name] for name in reader.names("mlp_layer_types", n_layers, kinds, default)]
    return [MlpKind.DENSE] * n_layers


def _family(reader: ConfigReader) -> Family:
    model_type = reader.text("model_type")
    model_type = SAME_ARCHITECTURE.get(model_type, model_type)
    if model_type not in set(Family):
        raise SpecError(
            f"{reader.source}: model family '{model_type}' is not supported. Supported: {', '.join(Family)}."
        )
    return Family(model_type)


def _refuse_sliding_window(reader: ConfigReader, family: Family) -> None:
    """Raise SpecError for sliding windows, which only the gpt-oss programs implement."""
    has_window = family is Family.MIXTRAL and reader.config.get("sliding_window") is not None
    if has_window:
        raise SpecError(
            f"{reader.source}: sliding_window={reader.config['sliding_window']!r} is not supported for "
            "mixtral. Set it to null to use full attention."
        )
    if reader.boolean("use_sliding_window", default=False):
        raise SpecError(
            f"{reader.source}: use_sliding_window=true is not supported. "
            "Set it to false to use full attention."
        )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise SpecError(f"'{path}' cannot be read: {error.strerror}.") from error
    return _parse_json(text, str(path))


def _parse_json(text: bytes, origin: str) -> Mapping[str, Any]:
    if len(text) > MAX_CONFIG_BYTES:
        raise SpecError(
            f"'{origin}' is larger than {MAX_CONFIG_BYTES} bytes and no model config. Give a config.json."
        )
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"'{origin}' is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise SpecError(f"'{origin}' must contain a JSON object, got {type(config).__name__}.")
    return config


def _display_name(path: Path) -> str:
    return path.resolve().parent.name if path.name == "config.json" else path.stem


LISTING = "'meshscope models' lists the catalog."


def _fetch_model(name: str) -> Model:
    """Fetch the config of `owner/name` from the Hugging Face Hub; SpecError if unavailable."""
    unknown = (
        f"unknown model '{name}'. {nearest(name, CATALOG, LISTING)} "
        "Or give a config.json or a folder with one."
    )
    if name.count("/") != 1:
        raise SpecError(unknown)
    import urllib.error  # noqa: PLC0415  slow to import, rarely needed
    import urllib.parse  # noqa: PLC0415
    import urllib.request  # noqa: PLC0415
    from http import HTTPStatus  # noqa: PLC0415

    token = os.environ.get("HF_TOKEN")
    url = f"{HUB}/{urllib.parse.quote(name)}/resolve/main/config.json"
    request = urllib.request.Request(  # noqa: S310  HUB is https
        url, headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S) as reply:  # noqa: S310  HUB is https
            text = reply.read(MAX_CONFIG_BYTES + 1)
    except urllib.error.HTTPError as error:
        reason = f"the Hub answered {error.code} for '{name}'"
        if error.code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            reason += " (gated or private: set HF_TOKEN)"
        raise SpecError(f"{unknown} Its config was not downloaded: {reason}.") from error
    except OSError as error:
        raise SpecError(
            f"{unknown} Its config was not downloaded: the Hub cannot be reached."
        ) from error
    return model_from_config(_parse_json(text, url), name=name, source=url)
