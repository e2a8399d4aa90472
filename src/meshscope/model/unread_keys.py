"""Keys of a config that its family does not read: which change the model, and which family would read them all."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from meshscope.errors import SpecError
from meshscope.model.families import Family
from meshscope.model.layers import AttentionKind, Layer
from meshscope.model.reader import ROPE_OBJECTS, ConfigReader

# Keys of training, generation, tokens and bookkeeping, which change no weight, cache or collective, and those of
# towers for images and sound, which are left out by statement. `rope` and `rotary` are positions.
_HARMLESS = re.compile(
    r"^_|token_(ids?|index)$|^tokenizer|^(bos|eos|pad)_id$|dropout|pdrop|drop_path|initializer|(^|_)init(_|$)|prenorm"
    r"|(^|_)loss(_|$)|^(seq_)?aux_|_aux$|jitter|noise|_penalty$|^output_(attentions|hidden_states|router_logits|scores)$"
    r"|^return_dict|version|dtype|_path$|implementation|flash_attn|flash_attention|fp32|(^|_)rope(?!_head)|rotary"
    r"|(^|_)(vision|visual|images?|img|audio|video|multimodal|mm|projector|speech|media|talker|code2wav|token2wav)(_|$)"
    r"|^(architectures|model_type|auto_map|name|model_name|license|id2label|label2id|problem_type|finetuning_task|torchscript"
    r"|task_specific_params|prefix|use_cache|use_bfloat16|is_decoder|tie_encoder_decoder|chunk_size_feed_forward"
    r"|ignore_index|pretraining_tp|ep_size|(num_)?logits_to_keep|max_length|min_length|max_new_tokens|do_sample"
    r"|temperature|top_k|top_p|typical_p|num_beams|num_beam_groups|num_return_sequences|early_stopping|bad_words_ids"
    r"|(begin_)?suppress_tokens|(encoder_)?no_repeat_ngram_size|remove_invalid_values|max_window_layers"
    r"|initial_context_length|original_max_position_embeddings|max_seq(uence)?_len(gth)?|seq_length|model_max_length"
    r"|tie_word_embeddings|quantization_config|compression_config|expert_dtype|text_config|llm_config|language_config"
    r"|language_model)$"
)
# Keys of positions and of quantization that change no shape of a weight: how the tool rounded, what it measured with,
# and how its own kernels run. Sources as in stored_format.py.
_OF_OBJECTS = re.compile(
    r"^(mrope_\w+|finetuned|alpha|attn_factor|(short|long)_mscale|max_position_embeddings|quant_method|method|format|fmt"
    r"|scale_fmt|activation_scheme|sym|symmetric|desc_act|act_group_aware|hyb_act|static_groups|true_sequential"
    r"|damp_\w+|mse|zero_point|backend|do_fuse|fuse_\w+|modules_to_fuse|use_\w+|exllama_config|checkpoint_format|meta"
    r"|is_marlin_format|pack\w+|dataset|model_seqlen|block_name_to_quantize|module_name_preceding_first_block|max_input_length"
    r"|cache_block_outputs|offload\w*|batch_size|lm_head|load_in_[48]bit|llm_int8_(threshold|has_\w+)|bnb_4bit_\w+"
    r"|quantization_status|global_compression_ratio|sparsity_config|transform_config|run_compressed|actorder"
    r"|observer\w*|dynamic|strategy|scale_\w+|zp_\w+|(in|out)put_\w+|producer|has_zero_point|pre_quant_scale|kv_cache_\w+"
    r"|algo_config|export|quant_mode|softmax_quant_spec|bias|target_device|ch_axis|is_\w+|round_\w+|mx_element_dtype"
    r"|qat_spec|amp|enable_\w+|gradient_\w+|iters|low_\w+|lr|minmax_lr|nsamples|seqlen|quant_block_list|super_\w+"
    r"|to_quant_block_names|act_\w+|supported_types|layer_config|zero_\w+|axis|optimize|channel_wise|view_as_float"
    r"|config_groups|(moe_)?quant_algo|hadamard_group_size|include_\w+|untie_\w+|dequantize|_\w+)$"
)
# Other keys of quantization that select weights, or their bits and scales.
_SELECTS = re.compile(
    r"bit|group|block|modul|layer|ignor|exclu|skip|target|expert|linear|weight|quant|dtype|scheme|type"
)
# Factors and limits of values, which add no array.
_OF_VALUES = re.compile(
    r"multiplier|scal(e|ing|ar)(s|_|$)|softcap|_limit$|swiglu_|temperature|clip|topk_prob$|^route_norm$|_eps(ilon)?$"
)
# What the other keys change, by the words in their names; the first that is found.
_CHANGES = {
    re.compile(words): what
    for words, what in (
        (r"expert|moe|router|decoder_sparse|first_k_dense", "experts"),
        (r"mamba|ssm|(^|_)state_size|(^|_)d_state|conv|dt_rank|time_(step|mix)|rwkv|^expand$|lru_", "state space layers"),
        (r"linear_(attn|attention|num|key|value)|lightning", "linear attention"),
        (r"lora_rank|nope_head|rope_head|v_head_dim|(^|_)mla(_|$)", "latent attention"),
        (r"index|spars", "sparse attention"),
        (r"engram|n_?gram|(^|_)ple_|per_layer_input", "tables of embeddings"),
        (r"(^|_)hc_|hyper|stream|altup", "parallel residual streams"),
        (r"encoder|cross_attention|decoder_layers|bidirectional", "an encoder"),
        (r"parallel_(attn|attention|block|residual)|new_decoder_arch|multi_query|alibi", "parallel attention"),
        (r"window|sliding|chunk|layer_types|(attn|attention|block)_type|pattern|hybrid|swa_", "windows or kinds of layers"),
        (r"block_configs|per_layer_config|attn_layer|layer_(freq|period|offset|interval)", "kinds of layers"),
        (r"mtp|nextn", "layers for multi-token prediction"),
        (r"bias", "biases"),
        (r"norm", "norms"),
        (r"(^|_)gate(_|$)", "gates"),
        (r"(^|_)act(ivation)?(_f(n|unc(tion)?))?$|feed_forward_proj", "another MLP"),
        (r"cache|(^|_)cla(_|$)|memory", "caches"),
        (r"(^|_)lora(_|$)|adapter", "adapters"),
        (r"vocab|embed|pos_emb", "tables of embeddings"),
        (r"compress_r|expansion|d_ff|_inner$|group|block|layer|head|(^|_)kv|hidden|intermediate|ffn|mlp|attn|attention|rank|state|residual", "layers"),
    )
}  # fmt: skip
# Other names of sizes, which change nothing where they agree.
_SAME = {
    **dict.fromkeys(("num_layers", "n_layers", "n_layer"), "num_hidden_layers"),
    **dict.fromkeys(("n_heads", "n_head"), "num_attention_heads"),
    **dict.fromkeys(("experts_per_token", "num_experts_per_token"), "num_experts_per_tok"),
    **dict.fromkeys(("d_model", "n_embd", "dim"), "hidden_size"),
    "ffn_hidden_size": "intermediate_size",
}
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Keys whose value 1 is that of a model without the part.
_ONE = frozenset(
    {"moe_layer_freq", "n_group", "topk_group", "num_expert_group", "decoder_sparse_step"}
)
_KIND_NAMES = {
    AttentionKind.FULL: {"full_attention"},
    AttentionKind.SLIDING: {"sliding_attention"},
    AttentionKind.CHUNKED: {"chunked_attention"},
    AttentionKind.LINEAR: {"linear_attention"},
}
_SPARSE_NAMES = {"full_attention", "deepseek_sparse_attention", "indexed_attention"}
_GATED = ("silu", "swish", "swiglu")
MAX_KEYS = 3  # in a message, for each part of a model
SHOWN = 40  # characters of a value in a message


class UnreadKeysError(SpecError):
    """A config with keys that change the model and that its family does not read; `parts` says what they change."""

    def __init__(self, message: str, parts: str) -> None:
        super().__init__(message)
        self.parts = parts


def unread_keys(
    reader: ConfigReader, outer: Mapping[str, Any], family: Family, layers: Iterable[Layer]
) -> tuple[str, ...]:
    """Keys that the family does not read, with their values, if they seem to change nothing that is counted.

    UnreadKeysError names those that change weights, caches or collectives by their names. `outer` is the whole
    config if the reader has the text part of it.
    """
    kinds = [layer.attention for layer in layers]
    of_text = _leaves(reader.config, reader.used)
    around = {
        k: v for k, v in outer.items() if reader.config.get(k, v) != v or k not in reader.config
    }
    left = {
        key: value
        for key, value in (*of_text, *_leaves(around, ()))
        if not _is_inert(key, value, reader, family, kinds)
    }
    changing = {key: what for key in left if (what := _change(key)) is not None}
    if not changing:
        return tuple(_shown(key, value) for key, value in left.items())
    parts = _parts(changing)
    listed = ", ".join(f"{_shown(key, left[key])} ({what})" for key, what in changing.items())
    verb = "it" if len(changing) == 1 else "them"
    raise UnreadKeysError(
        f"{reader.source}: {listed}: family '{family}' does not read {verb}, and weights, caches or collectives would be "
        f"wrong. Correct the key or model_type, or set to null what the model does not have.",
        parts,
    )


def _leaves(
    config: Mapping[str, Any], used: Collection[str], prefix: str = "", of: str = ""
) -> Iterator[tuple[str, Any]]:
    """Keys that were not asked for, with those inside of objects and of lists of objects.

    `of` is the name of the object in `used`, with a dot.
    """
    for key, value in config.items():
        if of and _OF_OBJECTS.search(key):
            continue
        parts = value if isinstance(value, list) else [value]
        objects = [one for one in parts if isinstance(one, Mapping) and one]
        inside = "rope." if key in ROPE_OBJECTS or of == "rope." else f"{of}{key}."
        is_known = f"{of}{key}" in used or _HARMLESS.search(key)
        is_read = any(one.startswith(inside) for one in used)
        if objects and (is_read or (not is_known and _change(key) is None)):
            for one in objects:
                yield from _leaves(one, used, f"{prefix}{key}.", inside)
        elif not is_known:
            yield prefix + key, value


def _change(key: str) -> str | None:
    """What a key changes by its name; None if nothing that is counted."""
    name = key.rpartition(".")[2]
    if key.startswith(("quantization_config.", "compression_config.")):
        return "quantized weights" if _SELECTS.search(name) else None
    if _OF_VALUES.search(name):
        return None
    return next((what for words, what in _CHANGES.items() if words.search(name)), None)


def _is_inert(
    key: str, value: object, reader: ConfigReader, family: Family, kinds: list[AttentionKind]
) -> bool:
    """Whether a key that was not read changes nothing with this value."""
    config, used = reader.config, reader.used
    if _is_empty(value) or key in family.traits.ignored_keys:
        return True
    if value == 1:
        return key in _ONE or _OF_VALUES.search(key) is not None
    if key in _COUNTS or key in _SAME:
        same = _COUNTS if key in _COUNTS else (_SAME[key],)
        return any(one in used and config.get(one) == value for one in same)
    if key == "layer_types":
        return _are_kinds(value, family, kinds)
    if "window" in key:
        is_off = config.get("use_sliding_window", not family.traits.window_is_off) is False
        length = config.get("max_position_embeddings")
        return is_off or (type(value) is int and type(length) is int and value >= length)
    return _change(key) == "another MLP" and value in _GATED


def _is_empty(value: object) -> bool:
    """Whether a value stands for none: null, false, 0, or an object or list of such."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    if isinstance(value, list):
        return all(map(_is_empty, value)) and value != [0]  # a list of one layer, the first
    return not value or value == "none"


def _are_kinds(value: object, family: Family, kinds: list[AttentionKind]) -> bool:
    """Whether names of layers are those of the kinds that were read."""
    if not isinstance(value, list) or len(value) != len(kinds):
        return False
    if family.traits.has_indexer:
        return all(name in _SPARSE_NAMES for name in value)
    return all(name in _KIND_NAMES.get(kind, ()) for name, kind in zip(value, kinds, strict=True))


def _parts(changes: Mapping[str, str]) -> str:
    """`experts (num_experts, moe_k) and biases (use_bias)`."""
    keys: dict[str, list[str]] = {}
    for key, what in changes.items():
        keys.setdefault(what, []).append(key)
    few = {what: (*of[:MAX_KEYS], *["..."] * (len(of) > MAX_KEYS)) for what, of in keys.items()}
    return " and no ".join(f"{what} ({', '.join(of)})" for what, of in few.items())


def _shown(key: str, value: object) -> str:
    text = repr(value)
    return f"{key}={text if len(text) <= SHOWN else text[:SHOWN] + '...'}"


# What every decoder has.
_COMMON = frozenset({"layers", "tables of embeddings", "norms", "biases"})
# What families whose layers no key names lack, by words in the model type and class of a config; the first found.
_UNNAMED = {
    r"mamba|rwkv|jamba|zamba|bamba|falcon_?h|nemotron_?h|griffin|recurrent": "has no state space layers",
    r"bert|electra|bart|t5|whisper|clip|pegasus|marian": "has no encoder",
    r"cohere|command|gpt_?neox|gpt-?j|codegen|falcon|persimmon|^phi(?!3)": (
        "has attention and MLP in another order, or other norms"
    ),
    r"gpt-?2|gpt_?neo|gpt_?bigcode|^opt|bloom|^mpt|starcoder": "has other norms, MLPs and positions",
    r"olmo|minimax|hunyuan": "has other norms of queries and keys",
    r"exaone|gemma|glm4": "has other norms",
    r"^diff": "has other attention",
    r"nemotron": "has other MLPs",
}


def unknown_family(
    model_type: str, config: Mapping[str, Any], read: Callable[[Mapping[str, Any]], object]
) -> str:
    """The sentences of an error: a family that reads all keys of the config, or what no family has, and all families.

    `read` reads a config, or raises SpecError.
    """
    classes = config.get("architectures")
    stated = f" ({classes[0]})" if isinstance(classes, list) and classes else ""
    return (
        f"model family '{model_type}'{stated} is not supported. {_advice(model_type, config, read)} "
        f"Supported: {', '.join(Family)}."
    )


def _advice(
    model_type: str, config: Mapping[str, Any], read: Callable[[Mapping[str, Any]], object]
) -> str:
    """The family that reads all keys; or the nearest with what it lacks; or what the config has."""
    lacking: dict[Family, str] = {}
    start = re.split(r"[\d_-]", model_type)[0] or model_type
    lacks_eps = config.get("rms_norm_eps") is None
    unnamed = "has other norms (the config has no rms_norm_eps)" if lacks_eps else None
    names = f"{model_type} {config.get('architectures') or ''}".lower()
    unnamed = next((_UNNAMED[one] for one in _UNNAMED if re.search(one, names)), unnamed)
    candidates = [one for one in Family if one.traits.is_plain or one.startswith(start)]
    candidates.sort(key=lambda one: -len(os.path.commonprefix([model_type, one])))  # noqa: RUF071
    for family in candidates:
        try:
            read({**config, "model_type": family.value})
        except UnreadKeysError as error:
            lacking[family] = f"has no {error.parts}"
        except SpecError:
            continue
        else:
            if unnamed is None:
                return f"'{family}' reads all keys of its config: if its layers are the same, write that model_type."
            lacking[family] = unnamed
    if lacking:
        nearest = min(lacking, key=lambda one: lacking[one].count(",") + lacking[one].count("("))
        return f"No family has its layers: '{nearest}', the nearest, {lacking[nearest]}."
    changes = {
        key: what
        for key, value in config.items()
        if not (_is_empty(value) or _HARMLESS.search(key) or value in _GATED)
        and (what := _change(key)) is not None
        and what not in _COMMON
    }
    if changes:
        return f"No family has its layers: it has {_parts(changes).replace(' and no ', ' and ')}."
    if unnamed is not None:
        return f"No family has its layers: 'llama' {unnamed}."
    return "No family has its layers, or its sizes are under other keys."
