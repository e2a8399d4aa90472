"""Reads a Hugging Face `config.json`, with old or new key names, into a Model."""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshscope.errors import SpecError
from meshscope.files import parse_json, read_file
from meshscope.model import catalog
from meshscope.model.families import (
    SAME_ARCHITECTURE,
    SAME_DEFAULTS,
    Family,
    FamilyTraits,
    LayerRule,
)
from meshscope.model.layers import Layer
from meshscope.model.mechanisms.compressed import compressed_attention, compressed_layers
from meshscope.model.mechanisms.drafts import DraftBlocks, ImageTower
from meshscope.model.mechanisms.grouped import FULL, attention_kinds, grouped_attention
from meshscope.model.mechanisms.key_blocks import (
    key_block_attention,
    key_block_kinds,
    pooled_key_attention,
    pooled_key_kinds,
)
from meshscope.model.mechanisms.latent import indexer_kinds, latent_attention, latent_kinds
from meshscope.model.mechanisms.mixture import (
    Activation,
    activation_limits,
    mlp_kinds,
    read_mixture,
)
from meshscope.model.mechanisms.ngrams import Engram, hashed_tables
from meshscope.model.mechanisms.reused import reused_attention, reused_layers
from meshscope.model.mechanisms.state_space import block_layers
from meshscope.model.mechanisms.streams import LayerInputs, read_streams
from meshscope.model.model import Model
from meshscope.model.reader import MAX_LAYERS, Config, ConfigReader, refuse
from meshscope.model.stored_format import StoredFormat, module_names, stored_format
from meshscope.model.unread_keys import unknown_family, unread_keys

MAX_CONFIG_BYTES = 4 * 2**20  # the largest published config.json is under 100 kB
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
MODELOPT_FILE = "hf_quant_config.json"


def read_model(name: str) -> Model:
    """The model with this name: the path of a config.json or snapshot folder, or an id of the catalog or the Hugging Face Hub."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        is_named = path.name == "config.json"
        shown = path.resolve().parent.name if is_named else path.stem
        config, beside = _read_json(path), path.with_name(MODELOPT_FILE)
        if is_named and "quantization_config" not in config and beside.is_file():
            config = _with_quantization(config, _read_json(beside), str(beside))
        return model_from_config(config, name=shown, source=str(path))
    if name.endswith(".json") or name.startswith((".", "/", "~")):
        raise SpecError(
            f"no config file at '{path}'. Give a config.json, a folder with one, or a model id."
        )
    entry = catalog.entry_named(name)
    if entry is None:
        return _fetch_model(name)
    # The id that was given, in the weight format that it names.
    known = {key.lower(): key for key in entry.ids}
    shown = known.get(name.lower(), name if "/" in name else entry.name)
    model = model_from_config(catalog.config_named(entry, name), name=shown, source=entry.source)
    is_read = shown in entry.ids or model.stored_as is None
    stored = model.stored_as if is_read else f"{model.stored_as}{catalog.BY_NAME}"
    return replace(model, text_part_of=entry.text_part_of, stored_as=stored)


def model_from_config(config: Config, *, name: str, source: str) -> Model:
    """The model described by a config; SpecError names the missing or unsupported key."""
    if isinstance(mlx := config.get("quantization"), Mapping):  # MLX writes both, or only this one
        config = {"quantization_config": mlx} | {
            k: v for k, v in config.items() if k != "quantization"
        }
    reader, outer_type = _text_reader(config, source)
    family = _family(reader)
    row = family.traits
    defaults = SAME_DEFAULTS.get(str(reader.get("model_type")), row.defaults)
    around = {} if reader.config is config else config
    reader = reader.over({**defaults, **reader.config})
    reader = _with_layer_lists(_with_aliases(reader, row), row)
    layers = _layers(reader, family)
    has_experts = any(layer.has_experts for layer in layers)
    stored = stored_format(reader, module_names(family, layers)) or StoredFormat(text="")
    # Layers that share caches are found by their kind, which formats would change.
    if not any(layer.shares_cache for layer in layers):
        layers = tuple(
            replace(of, formats=stored.special.get(i, ())) for i, of in enumerate(layers)
        )
    _refuse_others(reader, family)
    is_gemma, is_gemma4 = row.is_gemma, row.variant == "gemma4"
    is_reused, tower = row.layers is LayerRule.SOURCES, config.get("vision_config") or {}
    read_attention = _MECHANISMS[row.mechanism]
    hidden = reader.integer("hidden_size")
    moe = read_mixture(reader, family, has_experts=has_experts)
    activation = Activation.GEGLU if is_gemma else _ACTIVATIONS[row.hidden_act]
    has_limit = moe is not None and moe.activation is Activation.LIMITED_SWIGLU
    if has_limit and any(layer.has_mlp for layer in layers):
        activation = Activation.LIMITED_SWIGLU
    lacks_limit = activation is Activation.CLAMPED_SWIGLU and moe is None
    has_mlp_bias = reader.boolean("mlp_bias", default=False)
    has_biases = has_mlp_bias and moe is not None
    problems = {f"{family} without layers with experts is not supported": lacks_limit}
    refuse(source, problems | {"mlp_bias=true is not supported beside experts": has_biases})
    is_capped = is_gemma or row.has_softcap
    scales = {part: reader.positive(key, 1.0) for part, key in row.scales.items()}
    reader.get(row.ffn_key)  # the width of dense layers, which a mixture may not have
    model = Model(
        name=name,
        family=family,
        layers=layers,
        hidden=hidden,
        ffn=reader.integer(row.ffn_key) if any(layer.has_mlp for layer in layers) else None,
        vocab=reader.integer("vocab_size"),
        attention=read_attention(reader, family),
        norm_eps=reader.number(row.norm_eps_key, 1e-6),
        has_tied_embeddings=reader.boolean("tie_word_embeddings", default=is_gemma),
        has_mlp_bias=has_mlp_bias,
        max_position=reader.optional_integer("max_position_embeddings"),
        source=source,
        moe=moe,
        hyper=read_streams(reader, row.streams),
        layer_inputs=LayerInputs.read(reader, len(layers)) if is_gemma4 else None,
        engram=_tables(reader, row, len(layers)),
        drafts=DraftBlocks.read(reader, len(layers)) if is_reused else None,
        images=ImageTower.read(reader.over(tower)) if is_reused and tower else None,
        activation=activation,
        norm_offset=row.norm_offset,
        has_input_norms=row.has_input_norms,
        has_post_norms=row.has_post_norms,
        has_mean_norms=row.has_mean_norms,
        is_parallel=row.is_parallel,
        has_layer_scale=is_gemma4,
        has_wide_mlps=reader.boolean("use_double_wide_mlp", default=False),
        embed_scale=hidden**0.5 if is_gemma else scales.get("embeddings", 1.0),
        residual_scale=scales.get("residual", 1.0),
        logit_scale=scales.get("logits", 1.0) / scales.get("logits_over", 1.0),
        logit_softcap=reader.optional_number("final_logit_softcapping") if is_capped else None,
        text_part_of=outer_type,
        n_mtp_layers=reader.count(*row.mtp) or None,
        stored_as=stored.text or None,
        stored_dtype=stored.weight_dtype,
        nearest_dtype=stored.nearest,
        stored_cache=stored.cache,
    )
    unread = unread_keys(reader, around, model)
    known = ["gelu_pytorch_tanh", "gelu"] if is_gemma else [row.hidden_act]
    if row.hidden_act == "swigluoai":  # which transformers writes as "silu"
        known.append("silu")
    for key in ("hidden_act", "hidden_activation"):
        shape = reader.text(key, known[0])
        if shape not in known and not (is_gemma and key == "hidden_act"):
            raise SpecError(f"{source}: {key}={shape!r} is not supported. Supported: '{known[0]}'.")
    if (kind := reader.text("model_type", "")) and _known(kind) is None:
        # The class that `architectures` names has the family.
        unread = (f"model_type='{kind}'", *unread)
    return replace(model, unread_keys=unread)


def _tables(reader: ConfigReader, row: FamilyTraits, n_layers: int) -> Engram | None:
    if row.layers is LayerRule.SOURCES:
        return Engram.read(reader, n_layers)
    return hashed_tables(reader, n_layers) if row.layers is LayerRule.POOLED_KEYS else None


_ACTIVATIONS = {
    "silu": Activation.SWIGLU,
    "swigluoai": Activation.CLAMPED_SWIGLU,
    "xielu": Activation.XIELU,
    "relu2": Activation.RELU2,
}
_MECHANISMS = {
    "grouped": grouped_attention,
    "latent": latent_attention,
    "key_blocks": key_block_attention,
    "pooled_keys": pooled_key_attention,
    "compressed": compressed_attention,
    "reused": reused_attention,
}


def _layers(reader: ConfigReader, family: Family) -> tuple[Layer, ...]:
    if family.traits.layers is LayerRule.BLOCKS:
        return block_layers(reader, MAX_LAYERS)
    n_layers = reader.integer("num_hidden_layers", maximum=MAX_LAYERS)
    match family.traits.layers:
        case LayerRule.ENTRIES:
            return compressed_layers(reader, n_layers)
        case LayerRule.SOURCES:
            return reused_layers(reader, n_layers)
        case LayerRule.KIMI:
            attention = latent_kinds(reader, n_layers, has_indexers=family.traits.has_indexer)
        case LayerRule.KEY_BLOCKS:
            attention = key_block_kinds(reader, n_layers)
        case LayerRule.POOLED_KEYS:
            attention = pooled_key_kinds(reader, n_layers)
        case LayerRule.INDEXERS:
            attention = indexer_kinds(reader, n_layers)
        case _:
            attention = attention_kinds(reader, family, n_layers)
    mlp = mlp_kinds(reader, family, n_layers)
    has_shared = family.traits.variant == "gemma4"
    n_shared = reader.count("num_kv_shared_layers", 0) if has_shared else 0
    shares = [index >= n_layers - n_shared for index in range(n_layers)]
    limits = [(None, None)] * n_layers
    if family.traits.has_layer_lists:
        limits = activation_limits(reader, mlp)
    kinds = zip(attention, mlp, shares, limits, strict=True)
    return tuple(Layer(attention=a, mlp=m, shares_cache=s, limits=n) for a, m, s, n in kinds)


def _with_aliases(reader: ConfigReader, row: FamilyTraits) -> ConfigReader:
    """The config with the first name of each key."""
    config = dict(reader.config)
    for key, name in row.aliases.items():
        if key in config and config.setdefault(name, value := reader.get(key)) != value:
            raise SpecError(
                f"{reader.source}: {key}={value!r}, but {name}={config[name]!r}. Correct the config."
            )
    return reader.over(config)


def _with_layer_lists(reader: ConfigReader, row: FamilyTraits) -> ConfigReader:
    """The config without the entries of lists for layers of multi-token prediction, and with positions by kind of layer."""
    if not row.has_layer_lists:
        return reader
    config, n_layers = dict(reader.config), reader.integer("num_hidden_layers", maximum=MAX_LAYERS)
    sizes = {n_layers, n_layers + reader.count(*row.mtp)}
    scalars = {"layer_types": FULL, "rope_theta": None, "partial_rotary_factors": 1.0}
    for key in (*scalars, "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"):
        if isinstance(values := reader.get(key), list):
            n = len(values)
            wrong = f"'{key}' has {n} values for {n_layers} layers"
            refuse(reader.source, {wrong: n not in sizes})
            config[key] = [0 if value is None else value for value in values[:n_layers]]
        elif key in scalars:
            config[key] = [values or scalars[key]] * n_layers
    if (listed := reader.get("moe_layers_enum")) is not None:  # "3,4" or [3, 4]
        sparse = {word.strip() for word in str(listed).strip("[]").split(",")}
        kinds = ["sparse" if str(at) in sparse else "dense" for at in range(n_layers)]
        config.setdefault("mlp_layer_types", kinds)
    by_kind, scaling = dict[str, Config](), reader.mapping("rope_scaling")
    scaled = str(reader.get("yarn_only_types") or FULL)
    columns = [config[key] for key in scalars]
    for kind, theta, frac in zip(*columns, strict=True):
        values = {"rope_theta": theta, "partial_rotary_factor": frac}
        values |= scaling if str(kind) in scaled else {}
        other = f"rotary embeddings differ between layers of '{kind}'"
        refuse(reader.source, {other: by_kind.setdefault(str(kind), values) != values})
    if not reader.get("rope_parameters"):
        config |= {"rope_parameters": by_kind, "rope_scaling": None}
    return reader.over(config | {"rope_theta": None})


def _family(reader: ConfigReader) -> Family:
    """The family of `model_type`, or else of the class that `architectures` names."""
    architectures = reader.get("architectures")
    classes = architectures if isinstance(architectures, list) else []
    model_type = reader.text("model_type", "" if classes else None)
    for name in (model_type, *(_CLASS_END.sub("", str(one)) for one in classes)):
        if (family := _known(name)) is not None:
            return family

    def read(config: Config) -> Model:
        return model_from_config({**config, "architectures": None}, name="", source=reader.source)

    raise SpecError(f"{reader.source}: {unknown_family(model_type, reader.config, read)}")


def _known(name: str) -> Family | None:
    """The family of a model type, or of a class without its end."""
    return _FAMILIES.get(re.sub(r"\W|_|text$", "", name.lower()))


_CLASS_END = re.compile(r"(For[A-Z]\w*|Model)$")
# The family of each model type, in lower case without underscores and `_text`, as names of classes have it.
_FAMILIES = {
    re.sub(r"_|text$", "", name): family
    for name, family in ({family.value: family for family in Family} | SAME_ARCHITECTURE).items()
}


def _text_reader(config: Config, source: str) -> tuple[ConfigReader, str | None]:
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


def _refuse_others(reader: ConfigReader, family: Family) -> None:
    """Raise SpecError for values and windows that programs lack, and for a Gemma 4 that is an encoder."""
    row = family.traits
    for key, value in row.fixed.items():
        if reader.get(key) not in (None, value):
            raise SpecError(
                f"{reader.source}: {key}={reader.config[key]!r} is not supported for {family}. Use {value!r}."
            )
    reader.used |= {"hidden_act", "hidden_activation"}
    window = reader.config.get("sliding_window")
    has_window = reader.boolean("use_sliding_window", default=False)
    is_encoder = row.variant == "gemma4" and reader.get("use_bidirectional_attention") == "all"
    problems = {
        "use_bidirectional_attention='all' makes an encoder, which is not supported": is_encoder,
        f"sliding_window={window!r} is not supported for mixtral, only null": (
            row.experts == "mixtral" and window is not None
        ),
        "use_sliding_window=true is not supported, only false": has_window,
    }
    refuse(reader.source, problems)


def _with_quantization(config: Config, beside: Config, origin: str) -> Config:
    quantization = beside.get("quantization")
    if not isinstance(quantization, dict):
        raise SpecError(
            f"'{origin}' has no 'quantization', as ModelOpt writes it. Mend or remove the file."
        )
    return {**config, "quantization_config": {"quant_method": "modelopt", **quantization}}


def _read_json(path: Path) -> Config:
    try:
        text = read_file(path, MAX_CONFIG_BYTES)
    except OSError as error:
        raise SpecError(f"'{path}' cannot be read: {error.strerror}.") from error
    return _parse_json(text, str(path))


def _parse_json(text: bytes, origin: str) -> Config:
    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """The object with these keys; ValueError for a repeated key, of which readers take either one."""
        repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if repeated:
            raise ValueError(f"the key '{repeated[0]}' is there twice")
        return dict(pairs)

    try:
        config = parse_json(text, without_repeats)
    except ValueError as error:
        raise SpecError(
            f"'{origin}' cannot be read: {error}. Give the config.json of a checkpoint."
        ) from error
    if not isinstance(config, dict):
        raise SpecError(f"'{origin}' must contain a JSON object, got {type(config).__name__}.")
    return config


LISTING = "'meshscope models' lists all."


def _fetch_model(name: str) -> Model:
    hint = catalog.nearest_ids(name, LISTING)
    other = "Or give its config.json, or a folder with one."
    unknown = f"{name!r} is not in the catalog. {hint} {other}"
    if name.count("/") != 1:
        raise SpecError(unknown)
    try:
        config = _fetch_json(name, "config.json")
    except NotDownloadedError as error:
        raise SpecError(f"{unknown} Its config was not downloaded: {error}.") from error
    if "quantization_config" not in config and catalog.names_format(name):
        try:
            beside = _fetch_json(name, MODELOPT_FILE)
        except NotDownloadedError as error:
            if not error.is_missing:
                raise SpecError(
                    f"{MODELOPT_FILE} of '{name}' was not downloaded: {error}. Try again, or give a folder with both files."
                ) from error
        else:
            config = _with_quantization(config, beside, file_url(name, MODELOPT_FILE))
    return model_from_config(config, name=name, source=file_url(name, "config.json"))


def _fetch_json(name: str, file: str) -> Config:
    text = downloaded(name, file, max_bytes=MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise SpecError(f"'{file_url(name, file)}' is larger than {MAX_CONFIG_BYTES:,} bytes.")
    return _parse_json(text, file_url(name, file))


HUB = "https://huggingface.co"
HUB_TIMEOUT_S = 5.0


class NotDownloadedError(SpecError):
    """A file that the Hub does not give; the message is the reason."""

    def __init__(self, reason: str, *, is_missing: bool = False) -> None:
        """`is_missing` if the model has no such file, or no such model exists."""
        super().__init__(reason)
        self.is_missing = is_missing


def file_url(name: str, file: str) -> str:
    """The address of a file of `owner/name`."""
    from urllib.parse import quote  # noqa: PLC0415  slow to import, rarely needed

    return f"{HUB}/{quote(name)}/resolve/main/{file}"


def downloaded(name: str, file: str, *, max_bytes: int) -> bytes:
    """The first `max_bytes` of a file of `owner/name`; NotDownloadedError if it is unavailable."""
    import urllib.error  # noqa: PLC0415  slow to import, rarely needed
    import urllib.request  # noqa: PLC0415
    from http import HTTPStatus  # noqa: PLC0415

    token = os.environ.get("HF_TOKEN")
    request = urllib.request.Request(  # noqa: S310  HUB is https
        file_url(name, file), headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S) as reply:  # noqa: S310  HUB is https
            return reply.read(max_bytes)
    except urllib.error.HTTPError as error:
        reason = f"the Hub answered {error.code} for '{name}'"
        if error.code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            reason += " (gated or private: set HF_TOKEN)"
        is_missing = error.code == HTTPStatus.NOT_FOUND
        raise NotDownloadedError(reason, is_missing=is_missing) from error
    except OSError as error:
        raise NotDownloadedError("the Hub cannot be reached") from error
