"""Keys of a config that its family does not read: which change the model, and which family would read them all."""

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import reduce
from typing import Any

from meshscope.errors import SpecError
from meshscope.files import own_table
from meshscope.model.families import Family
from meshscope.model.layers import AttentionKind
from meshscope.model.model import Model
from meshscope.model.reader import ROPE_OBJECTS, Config, ConfigReader

_TABLES = own_table("model/unread_keys.toml")


def _pattern(name: str, form: str = "{}") -> str:
    return form.format("|".join(_TABLES[name]))


_HARMLESS = re.compile(f"{_pattern('harmless')}|{_pattern('harmless_names', '^({})$')}")
_OF_OBJECTS = re.compile(_pattern("of_objects", "^({})$"))
_SELECTS, _OF_VALUES = re.compile(_pattern("selects")), re.compile(_pattern("of_values"))
_ALWAYS = re.compile(_pattern("always"))
# Patterns that few keys meet are compiled when one does: compiling all of them takes longer than reading a config.
_PARTS: Mapping[str, list[str]] = _TABLES["parts"]
_CHANGES: Mapping[str, str] = _TABLES["changes"]
_SAME: Mapping[str, str] = _TABLES["same"]
_UNNAMED: Mapping[str, str] = _TABLES["unnamed"]
_COUNTS, _ONE, _GATED = (_TABLES[key] for key in ("counts", "one", "gated"))
_KIND_NAMES = {
    AttentionKind.FULL: {"full_attention"},
    AttentionKind.NOPE: {"full_attention"},
    AttentionKind.SLIDING: {"sliding_attention"},
    AttentionKind.CHUNKED: {"chunked_attention"},
    AttentionKind.LINEAR: {"linear_attention"},
    AttentionKind.NGRAM_LINEAR: {"linear_attention"},
    AttentionKind.KEY_BLOCKS: {"full_attention", "indexed_attention"},
}
_SPARSE_NAMES = {"full_attention", "deepseek_sparse_attention", "indexed_attention"}
_READ_APART = ("quantization_config", "compression_config", *ROPE_OBJECTS)
Read = Callable[[Config], object]  # reads a config, or raises SpecError
ALIKE, MIN_ALIKE = 0.85, 8  # of misspelled keys: the likeness, and letters of the key that is meant
SHOWN = 40  # characters of a value in a message


def unread_keys(reader: ConfigReader, outer: Config, model: Model) -> tuple[str, ...]:
    """Keys that the family of the model does not read, with their values, if they seem to change nothing that is counted.

    SpecError lists keys whose names suggest another model, and others whose values may be sizes. `outer` is the config
    around the text part, if there is one.
    """
    family, of_text = model.family, _leaves(reader.config, reader.used)
    around = {
        k: v for k, v in outer.items() if reader.config.get(k, v) != v or k not in reader.config
    }
    left = {
        key: value
        for key, value in (*of_text, *_leaves(around, ()))
        if not _is_inert(key, value, reader, model)
    }
    changing = {k: what for k, v in left.items() if (what := _change(k) or _size(k, v)) is not None}
    changing |= _misspelled(reader, family)
    if not changing:
        return tuple(_shown(key, value) for key, value in left.items())
    listed = ", ".join(
        f"{_shown(key, left.get(key, reader.config.get(key)))} ({what})"
        for key, what in changing.items()
    )
    verb = "it" if len(changing) == 1 else "them"
    raise SpecError(
        f"{reader.source}: {listed}: family '{family}' does not read {verb}, and weights, caches or collectives would be "
        f"wrong. Correct the key or model_type, or set to null what the model does not have."
    )


def _misspelled(reader: ConfigReader, family: Family) -> dict[str, str]:
    missing = [
        one for one in reader.used if len(one) >= MIN_ALIKE and reader.config.get(one) is None
    ]
    return {
        key: f"like '{like[0]}', which is missing"
        for key, value in reader.config.items()
        if key not in {*reader.used, *family.traits.ignored_keys}
        and not key.startswith("_")  # what transformers keeps for itself
        and not _is_empty(value)
        and (like := difflib.get_close_matches(key.lower(), missing, 1, ALIKE))
        and (abs(len(key) - len(like[0])) == 1 or (like[0] not in key and key not in like[0]))
    }


def _leaves(
    config: Config, used: Collection[str], prefix: str = "", of: str = ""
) -> Iterator[tuple[str, Any]]:
    """Keys that were not asked for, also inside objects and lists of objects; `of` is the object's name in `used`, with a dot."""
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
    name = key.rpartition(".")[2]
    if key.startswith(("quantization_config.", "compression_config.")):
        return "quantized weights" if _SELECTS.search(name) else None
    if _OF_VALUES.search(name):
        return None
    return next((what for words, what in _CHANGES.items() if re.search(words, name)), None)


def _size(key: str, value: object) -> str | None:
    """What a key that no table knows may be: whole numbers are sizes and counts, other values change no shape."""
    outer, _, name = key.rpartition(".")
    numbers = value if isinstance(value, list) else [value]
    is_known = outer.startswith(_READ_APART) or _OF_VALUES.search(name)
    is_size = any(type(one) is int and one > 1 for one in numbers)
    return "unknown, may be a size" if is_size and not is_known else None


def _has_part(model: Model, key: str) -> bool:
    """Whether the model has a part that the key names."""
    paths = (path.split(".") for words in _PARTS if re.search(words, key) for path in _PARTS[words])
    return any(reduce(lambda of, at: getattr(of, at, None), path, model) for path in paths)


def _is_inert(key: str, value: object, reader: ConfigReader, model: Model) -> bool:
    config, used, traits = reader.config, reader.used, model.family.traits
    is_switch = isinstance(value, bool) or value in (0, "none")
    is_always = is_switch and (_has_part(model, key) or _ALWAYS.search(key) is not None)
    is_other_name = value is not None and _SAME.get(key) in used
    if is_always or (_is_empty(value) and not is_other_name) or key in traits.ignored_keys:
        return not (is_always and _is_empty(value))
    if value == 1:
        return key in _ONE or _OF_VALUES.search(key) is not None
    if key in _COUNTS or key in _SAME:
        same = _COUNTS if key in _COUNTS else (_SAME[key],)
        return any(one in used and config.get(one) == value for one in same)
    if key == "layer_types":
        return _are_kinds(value, model)
    if "window" in key:
        is_off = config.get("use_sliding_window", not traits.window_is_off) is False
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


def _are_kinds(value: object, model: Model) -> bool:
    kinds = [layer.attention for layer in model.layers]
    if not isinstance(value, list) or len(value) != len(kinds):
        return False
    if model.family.traits.has_indexer:
        return all(name in _SPARSE_NAMES for name in value)
    return all(name in _KIND_NAMES.get(kind, ()) for name, kind in zip(value, kinds, strict=True))


def _shown(key: str, value: object) -> str:
    text = repr(value)
    return f"{key}={text if len(text) <= SHOWN else text[:SHOWN] + '...'}"


def unknown_family(model_type: str, config: Config, read: Read) -> str:
    """The sentences of an error: a family that reads all keys of the config, if there is one, and all families."""
    classes = config.get("architectures")
    stated = f" ({classes[0]})" if isinstance(classes, list) and classes else ""
    return (
        f"model family '{model_type}'{stated} is not supported. {_advice(model_type, config, read)} "
        f"Supported: {', '.join(Family)}."
    )


def _advice(model_type: str, config: Config, read: Read) -> str:
    start = re.split(r"[\d_-]", model_type)[0] or model_type
    lacks_eps = config.get("rms_norm_eps") is None
    unnamed = "has other norms (the config has no rms_norm_eps)" if lacks_eps else None
    names = f"{model_type} {config.get('architectures') or ''}".lower()
    unnamed = next((_UNNAMED[one] for one in _UNNAMED if re.search(one, names)), unnamed)
    if unnamed is not None:
        return f"No family has its layers: 'llama' {unnamed}."
    candidates = [one for one in Family if one.traits.is_plain or one.startswith(start)]
    candidates.sort(key=lambda one: -len(os.path.commonprefix([model_type, one])))  # noqa: RUF071
    for family in candidates:
        with suppress(SpecError):
            read({**config, "model_type": family.value})
            return f"'{family}' reads all keys of its config: if its layers are the same, write that model_type."
    return (
        "No family reads all keys of its config: with the model_type of the nearest one, the error names those that it "
        "lacks."
    )
