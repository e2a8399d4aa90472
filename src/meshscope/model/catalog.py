"""Built-in model configs with Hugging Face config keys, each with its source, and the ids of their checkpoints.

`catalog.json` holds them. A model starts from the family or model that it is `like`; `sizes` are the values
of the keys listed at the top of the file, and a variant that starts with a hyphen continues the model's id.
Variants share the sizes of their base model: instruction-tuned, base, distilled and quantized checkpoints. `lengths`
are the contexts of variants with another one, by the longest part of their ids in lower case.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from meshscope.errors import did_you_mean
from meshscope.files import own_table

_ENTRY_KEYS = {"like", "sizes", "source", "variants"}  # of an entry alone


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A published config."""

    name: str
    config: Mapping[str, Any]
    source: str
    variants: tuple[str, ...]  # ids of models with the same sizes
    text_part_of: str | None = None  # the multimodal architecture that this is the text part of
    lengths: Mapping[str, int]  # the contexts of other variants, by a part of their ids

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the model and its variants."""
        return (self.name, *self.variants)


@cache
def catalog() -> Mapping[str, CatalogEntry]:
    """Every model of the catalog by its id."""
    document = own_table("model/catalog.json")
    stored, sources = document["families"] | document["models"], document["sources"]

    def config(name: str) -> dict[str, Any]:
        values = {key: value for key, value in stored[name].items() if key not in _ENTRY_KEYS}
        sizes = dict(zip(document["sizes"], stored[name].get("sizes", ()), strict=False))
        return (config(stored[name]["like"]) if "like" in stored[name] else {}) | sizes | values

    def entry_of(name: str, entry: Mapping[str, Any]) -> CatalogEntry:
        values = config(name)
        variants = (f"{name}{one}" if one[0] == "-" else one for one in entry.get("variants", ()))
        return CatalogEntry(
            name=name,
            text_part_of=values.pop("text_part_of", None),
            lengths=values.pop("lengths", {}),
            config=values,
            source=entry.get("source", "{aiconfigurator}").format_map(sources),
            variants=tuple(variants),
        )

    return {name: entry_of(name, entry) for name, entry in document["models"].items()}


def catalog_ids() -> tuple[str, ...]:
    """Every id of the catalog, variants included."""
    return tuple(key for one in catalog().values() for key in one.ids)


_NAMES = own_table("model/names.toml")
_SUFFIX = re.compile(f"-({'|'.join(_NAMES['suffixes'])})$")
_WORD = re.compile("|".join(_NAMES["words"]))
BY_NAME = ", by its name"  # ends the text of a format that only the id states
N_SUGGESTED = 3
SIMILAR = 0.8  # ratio of difflib
MIN_COMMON_START = 5  # characters


def base_ids(name: str) -> Iterator[str]:
    """An id without owner in lower case, then with its variant suffixes removed one by one."""
    base = _short(name)
    yield base
    while (shorter := _SUFFIX.sub("", base)) != base:
        base = shorter
        yield base


def _short(name: str) -> str:
    return name.lower().rsplit("/", 1)[-1].removeprefix("meta-")


@cache
def _entries() -> tuple[Mapping[str, CatalogEntry], Mapping[str, CatalogEntry]]:
    ids = {key: one for one in catalog().values() for key in one.ids}
    shortened = {base: one for one in catalog().values() for base in base_ids(one.name)}
    return (
        {key.lower(): one for key, one in ids.items()},
        shortened | {_short(key): one for key, one in reversed(ids.items())},
    )


def entry_named(name: str) -> CatalogEntry | None:
    """The catalog entry of this id or of its base model, case-insensitive, with or without the owner."""
    exact, by_base = _entries()
    if name.lower() in exact:
        return exact[name.lower()]
    return next((by_base[base] for base in base_ids(name) if base in by_base), None)


def config_named(entry: CatalogEntry, name: str) -> Mapping[str, Any]:
    """The config of the variant of an entry, with the quantization that the id names by its suffix."""
    lowered = name.lower()
    parts = sorted((one for one in entry.lengths if one in lowered), key=len)
    length = {"max_position_embeddings": entry.lengths[parts[-1]]} if parts else {}
    config = {**entry.config, **length}
    if lowered.endswith("-bf16"):
        kept = {k: v for k, v in config.items() if k not in {"quantization_config", "expert_dtype"}}
        return {**kept, "dtype": "bfloat16"}
    formats = (of for pattern, of in _NAMES["formats"] if re.search(pattern, lowered))
    named = next(formats, None)
    if named is None:
        return config
    return {**config, "quantization_config": _NAMES["quantizations"][named]}


def names_format(name: str) -> bool:
    """Whether an id ends with a word for a format."""
    return _WORD.fullmatch(_short(name).rsplit("-", 1)[-1]) is not None


def as_written(name: str) -> str:
    """An id or search without owner, version `v`, or signs other than `-`: `deepseek-3.1` for `DeepSeek V3.1`."""
    words = re.sub(r"[\s_]+", "-", _short(name).strip())
    return re.sub(r"-v(?=\d)", "-", re.sub(r"(?<=[a-z]{3})(?=\d)", "-", words))


def nearest_ids(name: str, otherwise: str) -> str:
    """A sentence that suggests ids of the catalog; `otherwise` if none is near."""
    short = as_written(name)
    ids = {one: as_written(one) for one in catalog_ids()}
    continuing = [one for one in ids if short and ids[one].startswith(short)]
    continuing.sort(key=lambda one: ids[one] != short)
    inside = sorted(
        (one for one in ids if f"-{ids[one]}-" in f"-{short}-"), key=lambda one: -len(ids[one])
    )
    starts = {one: len(os.path.commonprefix([short, ids[one]])) for one in ids}  # noqa: RUF071
    least = max(MIN_COMMON_START, -(-len(short) // 2))
    common = sorted(
        (one for one in ids if starts[one] >= least), key=lambda one: (-starts[one], len(one))
    )
    alike = difflib.get_close_matches(short, ids.values(), n=N_SUGGESTED, cutoff=SIMILAR)
    # Ids that continue the name, that it contains, with the longest common start, and with similar spelling.
    close = [*continuing, *inside, *common, *(one for one in ids if ids[one] in alike)]
    suggested = list(dict.fromkeys(close))[:N_SUGGESTED]
    return did_you_mean(suggested) if suggested else otherwise
