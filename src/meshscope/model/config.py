"""Reads a Hugging Face `config.json`, with old or new key names, into a Model."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from meshscope.errors import SpecError
from meshscope.files import read_file
from meshscope.model.catalog import CatalogEntry
from meshscope.model.compressed import (
    compressed_attention,
    compressed_layers,
    compressed_moe,
    hyper_connections,
)
from meshscope.model.grouped import attention_kinds, grouped_attention
from meshscope.model.hub import NotDownloadedError, downloaded, file_url
from meshscope.model.model import (
    HYBRID_FAMILIES,
    SPARSE_FAMILIES,
    Activation,
    Attention,
    AttentionKind,
    Family,
    GroupScore,
    Indexer,
    LatentAttention,
    Layer,
    LayerInputs,
    MixtureOfExperts,
    MlpKind,
    Model,
    Scoring,
)
from meshscope.model.modules import module_names
from meshscope.model.names import (
    BY_NAME,
    config_named,
    derived_from,
    entry_named,
    names_format,
    nearest_ids,
)
from meshscope.model.reader import MAX_LAYERS, ConfigReader, read_rope
from meshscope.model.stored_format import stored_format
from meshscope.model.unread_keys import unknown_family, unread_keys

MAX_CONFIG_BYTES = 4 * 2**20  # the largest published config.json is under 100 kB
LATENT_FAMILIES = frozenset({Family.DEEPSEEK_V2, Family.DEEPSEEK_V3}) | SPARSE_FAMILIES
GEMMA = frozenset({Family.GEMMA2, Family.GEMMA3, Family.GEMMA4})
# Norms multiply by one plus their weight.
UNIT_OFFSET_FAMILIES = frozenset({Family.GEMMA2, Family.GEMMA3}) | HYBRID_FAMILIES
V3_DEFAULTS = frozenset({Family.DEEPSEEK_V3}) | SPARSE_FAMILIES
# Defaults of `first_k_dense_replace` in transformers.
N_DENSE = {
    Family.DEEPSEEK_V2: 0,
    Family.DEEPSEEK_V3: 3,
    Family.DEEPSEEK_V32: 3,
    Family.GLM_MOE_DSA: 3,
    Family.GLM4_MOE: 1,
}
INDEXER_PATTERNS = ("indexer_types", "index_topk_pattern")  # keys of GlmMoeDsaConfig
INDEXER_KINDS = {
    **dict.fromkeys(("full", "F"), AttentionKind.FULL),
    **dict.fromkeys(("shared", "S"), AttentionKind.SHARED),
}
# Defaults of transformers on which published configs rely (Gemma3TextConfig).
DEFAULTS: Mapping[Family, Mapping[str, Any]] = {
    Family.GEMMA3: {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
    **{key: {"partial_rotary_factor": 0.25} for key in HYBRID_FAMILIES},
}
# Defaults of Glm4MoeLiteConfig, whose layers are those of another family.
LITE_DEFAULTS = {"first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5}
# Objects of a multimodal config with its text part, outermost first, and with the parts that are not counted.
TEXT_PARTS = ("thinker_config", "text_config", "llm_config", "language_config", "language_model")
TOWERS = re.compile(
    r"^((vision|visual|vit|audio|speech|image|video)(_encoder|_model|_tower)?_config|visual|mm_\w*_tower)$"
)
# Keys of a multimodal config that hold for its text part, too.
OF_WHOLE_MODEL = (
    *("quantization_config", "compression_config", "expert_dtype"),
    *("dtype", "torch_dtype", "tie_word_embeddings"),
)
# Kimi K2's config states DeepseekV3ForCausalLM as its architecture, and GLM-4.7-Flash has the same layers; the text
# parts of Qwen-VL are Qwen2 and Qwen3.
SAME_ARCHITECTURE = {
    "seed_oss": Family.QWEN2.value,
    "mimo": Family.QWEN2.value,
    **dict.fromkeys(("granite", "smollm3", "solar", "ernie4_5"), Family.LLAMA.value),
    "kimi_k2": Family.DEEPSEEK_V3.value,
    "glm4_moe_lite": Family.DEEPSEEK_V3.value,
    "qwen2_vl": Family.QWEN2.value,
    "qwen2_vl_text": Family.QWEN2.value,
    "qwen2_5_vl": Family.QWEN2.value,
    "qwen2_5_vl_text": Family.QWEN2.value,
    "qwen3_vl_text": Family.QWEN3.value,
    "qwen3_vl_moe_text": Family.QWEN3_MOE.value,
    "qwen3_omni_moe_text": Family.QWEN3_MOE.value,
    "gemma4_unified_text": Family.GEMMA4.value,
    "qwen3_5": Family.QWEN3_5.value,
    "qwen3_5_moe": Family.QWEN3_5_MOE.value,
}
MODELOPT_FILE = "hf_quant_config.json"


def read_model(name: str) -> Model:
    """The model with this name: the path of a config.json or snapshot folder, or a model id.

    Ids are looked up in the built-in catalog; other ids of the form `owner/name` are fetched from
    the Hugging Face Hub.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return model_from_config(_read_config(path), name=_display_name(path), source=str(path))
    if name.endswith(".json") or name.startswith((".", "/", "~")):
        raise SpecError(
            f"no config file at '{path}'. Give a config.json, a folder with one, or a model id."
        )
    entry = entry_named(name)
    if entry is not None:
        return _catalog_model(entry, name)
    return _fetch_model(name)


def _catalog_model(entry: CatalogEntry, name: str) -> Model:
    """The model of a catalog entry under the id that was given, in the weight format that the id names."""
    known = {key.lower(): key for key in entry.ids}
    shown = known.get(name.lower(), name if "/" in name else entry.name)
    model = model_from_config(config_named(entry, name), name=shown, source=entry.source)
    is_read = shown in entry.ids or model.stored_as is None
    stored = model.stored_as if is_read else f"{model.stored_as}{BY_NAME}"
    return replace(model, text_part_of=entry.text_part_of, stored_as=stored)


def model_from_config(config: Mapping[str, Any], *, name: str, source: str) -> Model:
    """The model described by a config; SpecError names the missing or unsupported key."""
    reader, outer_type = _text_reader(config, source)
    family = _family(reader)
    is_lite = reader.get("model_type") == "glm4_moe_lite"
    reader = reader.over(
        {**(LITE_DEFAULTS if is_lite else DEFAULTS.get(family, {})), **reader.config}
    )
    layers = _layers(reader, family)
    has_dense = any(layer.has_mlp for layer in layers)
    has_experts = any(layer.has_experts for layer in layers)
    stored = stored_format(reader, module_names(family, layers))
    _refuse_sliding_window(reader, family)
    _check_activation(reader, family)
    _refuse_encoder(reader, family)
    is_gemma = family in GEMMA
    hidden = reader.integer("hidden_size")
    reader.get(_ffn_key(family))  # the width of dense layers, which a mixture may not have
    model = Model(
        name=name,
        family=family,
        layers=layers,
        hidden=hidden,
        ffn=reader.integer(_ffn_key(family)) if has_dense else None,
        vocab=reader.integer("vocab_size"),
        attention=_attention(reader, family),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        has_tied_embeddings=reader.boolean("tie_word_embeddings", default=is_gemma),
        has_mlp_bias=reader.boolean("mlp_bias", default=False),
        max_position=reader.optional_integer("max_position_embeddings"),
        source=source,
        moe=_mixture(reader, family, has_experts=has_experts),
        hyper=hyper_connections(reader) if family is Family.DEEPSEEK_V4 else None,
        layer_inputs=_layer_inputs(reader, len(layers)) if family is Family.GEMMA4 else None,
        activation=Activation.GEGLU if is_gemma else Activation.SWIGLU,
        norm_offset=1.0 if family in UNIT_OFFSET_FAMILIES else 0.0,
        has_post_norms=is_gemma,
        has_layer_scale=family is Family.GEMMA4,
        has_wide_mlps=reader.boolean("use_double_wide_mlp", default=False),
        embed_scale=hidden**0.5 if is_gemma else 1.0,
        logit_softcap=reader.optional_number("final_logit_softcapping") if is_gemma else None,
        text_part_of=outer_type,
        n_mtp_layers=_n_mtp_layers(reader, family) or None,
        stored_as=None if stored is None else stored.text,
        stored_dtype=None if stored is None else stored.weight_dtype,
        nearest_dtype=None if stored is None else stored.nearest,
        stored_cache=None if stored is None else stored.cache,
    )
    return replace(model, unread_keys=unread_keys(reader, config, family, layers))


def _n_mtp_layers(reader: ConfigReader, family: Family) -> int:
    """Layers for multi-token prediction; those of Qwen have one unless the config says otherwise.

    Source: vllm/model_executor/models/qwen3_next_mtp.py and qwen3_5_mtp.py.
    """
    match family:
        case Family.QWEN3_NEXT:
            return reader.count("num_nextn_predict_layers", 1)
        case Family.QWEN3_5 | Family.QWEN3_5_MOE:
            return reader.count("mtp_num_hidden_layers", 1)
        case _:
            return reader.count("num_nextn_predict_layers", 0)


def _attention(reader: ConfigReader, family: Family) -> Attention:
    if family in LATENT_FAMILIES:
        return _latent_attention(reader, family)
    if family is Family.DEEPSEEK_V4:
        return compressed_attention(reader)
    return grouped_attention(reader, family)


def _latent_attention(reader: ConfigReader, family: Family) -> LatentAttention:
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
        indexer=_indexer(reader, family) if family in SPARSE_FAMILIES else None,
    )


def _indexer(reader: ConfigReader, family: Family) -> Indexer:
    """Source: DeepseekV32Indexer and GlmMoeDsaIndexer of transformers."""
    return Indexer(
        n_heads=reader.integer("index_n_heads"),
        head_dim=reader.integer("index_head_dim"),
        top_k=reader.integer("index_topk"),
        is_interleaved=family is Family.GLM_MOE_DSA,
    )


def _indexer_kinds(reader: ConfigReader, n_layers: int) -> list[AttentionKind]:
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


# Keys that say which layers have experts: a family that reads them may have a model without such a layer.
_EXPERT_LAYER_KEYS = frozenset(
    {"first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step", "mlp_layer_types"}
    | {"interleave_moe_layer_step", "moe_layers"}
)


def _mixture(reader: ConfigReader, family: Family, *, has_experts: bool) -> MixtureOfExperts | None:
    """The experts of a config; None if all of its layers are dense, whose keys for experts may be incomplete."""
    if has_experts:
        return read_moe(reader, family)
    if reader.used & _EXPERT_LAYER_KEYS:
        with suppress(SpecError):
            read_moe(reader, family)  # so that its keys count as read
    return None


def read_moe(reader: ConfigReader, family: Family) -> MixtureOfExperts:
    """The experts of a config; keys and routing depend on the family."""
    match family:
        case Family.DEEPSEEK_V4:
            return compressed_moe(reader)
        case Family.MIXTRAL | Family.QWEN3_MOE | Family.GPT_OSS:
            return _softmax_moe(reader, family)
        case Family.QWEN3_NEXT | Family.QWEN3_5_MOE:
            return _qwen3_next_moe(reader, family)
        case Family.LLAMA4:
            return _llama4_moe(reader)
        case Family.GEMMA4:
            return _gemma4_moe(reader)
        case _:
            return _deepseek_moe(reader, family)


def _softmax_moe(reader: ConfigReader, family: Family) -> MixtureOfExperts:
    """Routed experts with softmax scores and no shared experts."""
    is_qwen3 = family is Family.QWEN3_MOE
    has_own_name = is_qwen3 and reader.get("num_local_experts") is None  # not in transformers 5
    moe = MixtureOfExperts(
        n_experts=reader.integer("num_experts" if has_own_name else "num_local_experts"),
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


def _qwen3_next_moe(reader: ConfigReader, family: Family) -> MixtureOfExperts:
    """Source: Qwen3NextSparseMoeBlock and Qwen3_5MoeSparseMoeBlock of transformers."""
    is_next = family is Family.QWEN3_NEXT  # Qwen3.5 always normalizes
    return MixtureOfExperts(
        n_experts=reader.integer("num_experts"),
        n_active=reader.integer("num_experts_per_tok"),
        ffn=reader.integer("moe_intermediate_size"),
        shared_ffn=reader.integer("shared_expert_intermediate_size"),
        scoring=Scoring.SOFTMAX,
        is_normalized=not is_next or reader.boolean("norm_topk_prob", default=True),
        has_shared_gate=True,
    )


def _llama4_moe(reader: ConfigReader) -> MixtureOfExperts:
    """Source: Llama4TextMoe of transformers."""
    n_active = reader.integer("num_experts_per_tok", 1)
    if n_active != 1:
        raise SpecError(
            f"{reader.source}: num_experts_per_tok={n_active} is not supported for llama4_text, whose scores "
            "scale the inputs of experts. Supported: 1."
        )
    ffn = reader.integer("intermediate_size")
    return MixtureOfExperts(
        n_experts=reader.integer("num_local_experts"),
        n_active=n_active,
        ffn=ffn,
        shared_ffn=ffn,
        scoring=Scoring.SIGMOID,
        is_normalized=False,
        scales_inputs=True,
    )


def _gemma4_moe(reader: ConfigReader) -> MixtureOfExperts:
    """Source: Gemma4TextRouter and Gemma4TextExperts of transformers."""
    return MixtureOfExperts(
        n_experts=reader.integer("num_experts"),
        n_active=reader.integer("top_k_experts"),
        ffn=reader.integer("moe_intermediate_size"),
        shared_ffn=None,
        scoring=Scoring.SOFTMAX,
        is_normalized=True,
        has_scales=True,
        activation=Activation.GEGLU,
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
        scale=reader.number("routed_scaling_factor", 2.5 if family in V3_DEFAULTS else 1.0),
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
    is_glm = family is Family.GLM_MOE_DSA
    attention = (
        _indexer_kinds(reader, n_layers) if is_glm else attention_kinds(reader, family, n_layers)
    )
    mlp = _mlp_kinds(reader, family, n_layers)
    n_shared = reader.count("num_kv_shared_layers", 0) if family is Family.GEMMA4 else 0
    shares = [index >= n_layers - n_shared for index in range(n_layers)]
    kinds = zip(attention, mlp, shares, strict=True)
    return tuple(Layer(attention=a, mlp=m, shares_cache=s) for a, m, s in kinds)


def _layer_inputs(reader: ConfigReader, n_layers: int) -> LayerInputs | None:
    """The embeddings of each layer, with the defaults of Gemma4TextConfig; None without them."""
    width = reader.count("hidden_size_per_layer_input", 256)
    if not width:
        return None
    sizes = reader.integer("vocab_size_per_layer_input", 262_144), reader.integer("vocab_size")
    if sizes[0] != sizes[1]:
        raise SpecError(
            f"{reader.source}: vocab_size_per_layer_input={sizes[0]} differs from vocab_size={sizes[1]}. "
            "Programs have both tables for the same tokens: correct the config."
        )
    return LayerInputs(width=width, n_layers=n_layers)


def _mlp_kinds(reader: ConfigReader, family: Family, n_layers: int) -> list[MlpKind]:
    if family in {Family.MIXTRAL, Family.GPT_OSS, Family.QWEN3_5_MOE}:
        return [MlpKind.MOE] * n_layers
    if family is Family.GEMMA4 and reader.boolean("enable_moe_block", default=False):
        return [MlpKind.DENSE_AND_MOE] * n_layers
    if family is Family.LLAMA4:
        step = reader.integer("interleave_moe_layer_step", 1)
        sparse = set(reader.integers("moe_layers") or range(step - 1, n_layers, step))
        return [MlpKind.MOE if index in sparse else MlpKind.DENSE for index in range(n_layers)]
    if family in {Family.QWEN3_MOE, Family.QWEN3_NEXT}:
        step = reader.integer("decoder_sparse_step", 1)
        dense = set(reader.integers("mlp_only_layers"))
        return [
            MlpKind.DENSE if index in dense or (index + 1) % step else MlpKind.MOE
            for index in range(n_layers)
        ]
    if family in LATENT_FAMILIES or family is Family.GLM4_MOE:
        kinds = {"dense": MlpKind.DENSE, "sparse": MlpKind.MOE}
        n_dense = reader.count("first_k_dense_replace", N_DENSE[family])
        default = ["dense" if index < n_dense else "sparse" for index in range(n_layers)]
        return [kinds[name] for name in reader.names("mlp_layer_types", n_layers, kinds, default)]
    return [MlpKind.DENSE] * n_layers


def _family(reader: ConfigReader) -> Family:
    """The family of `model_type`, or else of the class that `architectures` names."""
    architectures = reader.get("architectures")
    classes = architectures if isinstance(architectures, list) else []
    model_type = reader.text("model_type", "" if classes else None)
    for name in (model_type, *(_CLASS_END.sub("", str(one)) for one in classes)):
        family = _families().get(re.sub(r"\W|_|text$", "", name.lower()))
        if family is not None:
            return family

    def read(config: Mapping[str, Any]) -> Model:
        return model_from_config({**config, "architectures": None}, name="", source=reader.source)

    raise SpecError(f"{reader.source}: {unknown_family(model_type, reader.config, read)}")


_CLASS_END = re.compile(r"(For[A-Z]\w*|Model)$")


@cache
def _families() -> Mapping[str, Family]:
    """The family of each model type, in lower case without underscores and `_text`, as names of classes have it."""
    types = {family.value: family.value for family in Family} | SAME_ARCHITECTURE
    return {re.sub(r"_|text$", "", name): Family(value) for name, value in types.items()}


def _text_reader(config: Mapping[str, Any], source: str) -> tuple[ConfigReader, str | None]:
    """A reader of the text part, and the `model_type` of the multimodal config that has it, if one does."""
    text = config
    while key := next(
        (k for k in TEXT_PARTS if text.get(k) and isinstance(text[k], Mapping)), None
    ):
        around = {k: text[k] for k in OF_WHOLE_MODEL if k in text}
        text = {**around, **text[key]}
    outer = str(config.get("model_type") or next(iter(config.get("architectures") or ()), "-"))
    if text.get("model_type") is None and text is not config:
        text = {**text, "model_type": outer}
    has_parts = text is not config or any(
        value and TOWERS.search(key) for key, value in config.items()
    )
    return ConfigReader(text, source), outer if has_parts else None


def _ffn_key(family: Family) -> str:
    """The key of the width of dense layers."""
    return "intermediate_size_mlp" if family is Family.LLAMA4 else "intermediate_size"


def _check_activation(reader: ConfigReader, family: Family) -> None:
    """SpecError unless the MLP has the activation that the programs of the family implement."""
    known = ["gelu_pytorch_tanh", "gelu"] if family in GEMMA else ["silu"]
    for key in ("hidden_act", "hidden_activation"):
        name = reader.text(key, known[0])
        if name not in known and not (family in GEMMA and key == "hidden_act"):
            raise SpecError(
                f"{reader.source}: {key}={name!r} is not supported. Supported: '{known[0]}'."
            )


def _refuse_encoder(reader: ConfigReader, family: Family) -> None:
    """Raise SpecError for a Gemma 4 whose tokens attend to later ones."""
    if family is Family.GEMMA4 and reader.get("use_bidirectional_attention") == "all":
        raise SpecError(
            f"{reader.source}: use_bidirectional_attention='all' makes an encoder. Use a decoder."
        )


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


def _read_config(path: Path) -> Mapping[str, Any]:
    """The config, with the quantization that ModelOpt writes to a file beside it."""
    config, beside = _read_json(path), path.with_name(MODELOPT_FILE)
    if path.name != "config.json" or "quantization_config" in config or not beside.is_file():
        return config
    return _with_quantization(config, _read_json(beside), str(beside))


def _with_quantization(
    config: Mapping[str, Any], beside: Mapping[str, Any], origin: str
) -> Mapping[str, Any]:
    """The config with the quantization of ModelOpt's file."""
    quantization = beside.get("quantization")
    if not isinstance(quantization, dict):
        raise SpecError(
            f"'{origin}' has no 'quantization', as ModelOpt writes it. Mend or remove the file."
        )
    return {**config, "quantization_config": {"quant_method": "modelopt", **quantization}}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        text = read_file(path, MAX_CONFIG_BYTES)
    except OSError as error:
        raise SpecError(f"'{path}' cannot be read: {error.strerror}.") from error
    return _parse_json(text, str(path))


def _parse_json(text: bytes, origin: str) -> Mapping[str, Any]:
    try:
        config = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"'{origin}' is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise SpecError(f"'{origin}' must contain a JSON object, got {type(config).__name__}.")
    return config


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys; ValueError if one is there twice, of which readers take either."""
    values = dict(pairs)
    if len(values) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key '{key}' is there twice")
    return values


def _display_name(path: Path) -> str:
    return path.resolve().parent.name if path.name == "config.json" else path.stem


LISTING = "'meshscope models' lists all."


def _fetch_model(name: str) -> Model:
    """Fetch the config of `owner/name` from the Hugging Face Hub; SpecError if unavailable."""
    hint = derived_from(name) or nearest_ids(name, LISTING)
    unknown = (
        f"'{name}' is not in the catalog. {hint} Or give its config.json, or a folder with one."
    )
    if name.count("/") != 1:
        raise SpecError(unknown)
    try:
        config = _fetch_json(name, "config.json")
    except NotDownloadedError as error:
        raise SpecError(f"{unknown} Its config was not downloaded: {error}.") from error
    if "quantization_config" not in config and names_format(name):
        config = _with_modelopt_file(name, config)
    return model_from_config(config, name=name, source=file_url(name, "config.json"))


def _fetch_json(name: str, file: str) -> Mapping[str, Any]:
    text = downloaded(name, file, max_bytes=MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise SpecError(f"'{file_url(name, file)}' is larger than {MAX_CONFIG_BYTES:,} bytes.")
    return _parse_json(text, file_url(name, file))


def _with_modelopt_file(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with the quantization of ModelOpt's file on the Hub, if the model has one."""
    try:
        beside = _fetch_json(name, MODELOPT_FILE)
    except NotDownloadedError as error:
        if error.is_missing:
            return config
        raise SpecError(
            f"{MODELOPT_FILE} of '{name}' was not downloaded: {error}. Try again, or give a folder with both files."
        ) from error
    return _with_quantization(config, beside, file_url(name, MODELOPT_FILE))
