"""Reads a Hugging Face `config.json` into a Model; knows the key names, old and new."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshscope.arch.catalog import CATALOG, CatalogEntry
from meshscope.arch.model import Family, GroupedAttention, Model, Rope, RopeType
from meshscope.errors import SpecError, nearest

MAX_CONFIG_BYTES = 4 * 2**20  # the largest published config.json is under 100 kB
QWEN3_HEAD_DIM = 128  # the default of transformers' Qwen3Config, whatever the hidden size
HUB = "https://huggingface.co"
HUB_TIMEOUT_S = 5.0


def read_model(name: str) -> Model:
    """The Model that `name` stands for: a config.json, a snapshot folder, or an id.

    Ids are looked up in the built-in catalog first; another id of the form `owner/name` is fetched
    from the Hugging Face hub when the network allows.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return model_from_config(_read_json(path), name=_display_name(path), source=str(path))
    if name.endswith(".json") or name.startswith((".", "/", "~")):
        raise SpecError(
            f"no config file at '{path}'. Give a config.json, a folder that has one, or a model id."
        )
    entry = _catalog_entry(name)
    if entry is not None:
        return model_from_config(entry.config, name=entry.name, source=entry.source)
    return _fetch_model(name)


def _catalog_entry(name: str) -> CatalogEntry | None:
    """The entry of this id, in any case, with or without its owner."""
    by_id = {key.lower(): entry for key, entry in CATALOG.items()}
    by_short_id = {key.split("/")[-1]: entry for key, entry in by_id.items()}
    return by_id.get(name.lower()) or by_short_id.get(name.lower())


def model_from_config(config: Mapping[str, Any], *, name: str, source: str) -> Model:
    """The Model that a config mapping describes; SpecError names the missing or unknown key."""
    reader = _Config(config, source)
    family = _family(reader)
    hidden = reader.integer("hidden_size")
    n_heads = reader.integer("num_attention_heads")
    _refuse_sliding_window(reader)
    if reader.text("hidden_act", "silu") != "silu":
        raise SpecError(
            f"{source}: hidden_act={config['hidden_act']!r} is not supported; the programs have 'silu'."
        )
    return Model(
        name=name,
        family=family,
        n_layers=reader.integer("num_hidden_layers"),
        hidden=hidden,
        ffn=reader.integer("intermediate_size"),
        vocab=reader.integer("vocab_size"),
        attention=GroupedAttention(
            n_heads=n_heads,
            n_kv_heads=reader.integer("num_key_value_heads", n_heads),
            head_dim=reader.integer(
                "head_dim", QWEN3_HEAD_DIM if family is Family.QWEN3 else hidden // n_heads
            ),
            has_qkv_bias=reader.boolean("attention_bias", default=family is Family.QWEN2),
            has_o_bias=family is not Family.QWEN2
            and reader.boolean("attention_bias", default=False),
            has_qk_norm=family is Family.QWEN3,
            rope=_rope(reader),
        ),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        has_tied_embeddings=reader.boolean("tie_word_embeddings", default=False),
        has_mlp_bias=reader.boolean("mlp_bias", default=False),
        max_position=reader.optional_integer("max_position_embeddings"),
        source=source,
    )


class _Config:
    """Typed access to a config mapping; every complaint names file and key."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise SpecError(
                    f"{self.source}: the config has no '{key}'. Take the model's whole config.json."
                )
            return default
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise SpecError(f"{self.source}: '{key}' must be an integer, got {value!r}.")
        if value < 1:
            raise SpecError(f"{self.source}: '{key}' must be positive, got {value}.")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.config.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecError(f"{self.source}: '{key}' must be a number, got {value!r}.")
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise SpecError(f"{self.source}: '{key}' must be true or false, got {value!r}.")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise SpecError(f"{self.source}: '{key}' must be a string, got {value!r}.")
        return value


def _family(reader: _Config) -> Family:
    model_type = reader.text("model_type")
    if model_type not in set(Family):
        raise SpecError(
            f"{reader.source}: model family '{model_type}' is not supported. Supported: {', '.join(Family)}."
        )
    return Family(model_type)


def _refuse_sliding_window(reader: _Config) -> None:
    if reader.boolean("use_sliding_window", default=False):
        raise SpecError(
            f"{reader.source}: use_sliding_window=true is not supported. "
            "Set it to false to study the model with full attention."
        )


def _rope(reader: _Config) -> Rope:
    """`rope_theta` with `rope_scaling`, or `rope_parameters` as transformers 5 writes them."""
    merged = dict(reader.config)
    for key in ("rope_scaling", "rope_parameters"):
        parameters = reader.config.get(key) or {}
        if not isinstance(parameters, Mapping):
            raise SpecError(f"{reader.source}: '{key}' must be an object, got {parameters!r}.")
        merged |= parameters
    scaling = _Config(merged, reader.source)
    name = scaling.text("rope_type", scaling.text("type", RopeType.DEFAULT.value))
    if name not in set(RopeType):
        raise SpecError(
            f"{reader.source}: rope type '{name}' is not supported. Supported: {', '.join(RopeType)}."
        )
    return Rope(
        theta=scaling.number("rope_theta", 10_000.0),
        rope_type=RopeType(name),
        factor=scaling.number("factor", 1.0),
        low_freq_factor=scaling.number("low_freq_factor", 1.0),
        high_freq_factor=scaling.number("high_freq_factor", 4.0),
        original_max_position=scaling.integer("original_max_position_embeddings", 8192),
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
            f"'{origin}' is larger than {MAX_CONFIG_BYTES} bytes: not a model's config.json."
        )
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"'{origin}' is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise SpecError(f"'{origin}' must hold a JSON object, got {type(config).__name__}.")
    return config


def _display_name(path: Path) -> str:
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _fetch_model(name: str) -> Model:
    """The config of `owner/name` from the Hugging Face hub; SpecError when it cannot be had."""
    unknown = (
        f"unknown model '{name}'. {nearest(name, CATALOG)} "
        "Or give a config.json or a folder that has one."
    )
    if name.count("/") != 1:
        raise SpecError(unknown)
    import urllib.parse  # noqa: PLC0415  slow to import, rarely needed
    import urllib.request  # noqa: PLC0415

    token = os.environ.get("HF_TOKEN")
    url = f"{HUB}/{urllib.parse.quote(name)}/resolve/main/config.json"
    request = urllib.request.Request(  # noqa: S310  HUB is https
        url, headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S) as reply:  # noqa: S310  HUB is https
            text = reply.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:  # no network, no such model, or a gated one
        raise SpecError(f"{unknown} The hub did not give it: {error}.") from error
    return model_from_config(_parse_json(text, url), name=name, source=url)
