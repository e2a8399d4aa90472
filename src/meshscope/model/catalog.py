"""Built-in model configs with Hugging Face config keys, each with its source, and the ids of their checkpoints.

`catalog.json` holds them. A model starts from the family or model that it is `like`; `sizes` are the values
of the keys listed at the top of the file, and a variant that starts with a hyphen continues the model's id.
Variants share the sizes of their base model: instruction-tuned, base, distilled and quantized checkpoints. `lengths`
are the contexts of those that have another, by the longest part of their ids in lower case.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_ENTRY_KEYS = {"like", "sizes", "source", "variants", "lengths"}  # the others are of the config


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A published config."""

    name: str
    config: Mapping[str, Any]
    source: str
    variants: tuple[str, ...]  # ids of models with the same sizes
    text_part_of: str | None = None  # the multimodal architecture of which this is the text part
    lengths: Mapping[str, int]  # the contexts of other variants, by a part of their ids

    @property
    def ids(self) -> tuple[str, ...]:
        """The id of the model and those of its variants."""
        return (self.name, *self.variants)

    def config_of(self, name: str) -> Mapping[str, Any]:
        """The config of the variant with this id."""
        parts = sorted((one for one in self.lengths if one in name.lower()), key=len)
        length = {"max_position_embeddings": self.lengths[parts[-1]]} if parts else {}
        return {**self.config, **length}


@cache
def catalog() -> Mapping[str, CatalogEntry]:
    """Every model of the catalog by its id."""
    file = Path(__file__).with_name("catalog.json")
    document = json.loads(file.read_text(encoding="utf-8"))
    stored, sources = document["families"] | document["models"], document["sources"]

    def config(name: str) -> dict[str, Any]:
        values = {key: value for key, value in stored[name].items() if key not in _ENTRY_KEYS}
        sizes = dict(zip(document["sizes"], stored[name].get("sizes", ()), strict=False))
        return (config(stored[name]["like"]) if "like" in stored[name] else {}) | sizes | values

    def lengths(name: str) -> Mapping[str, int]:
        entry = stored[name]
        inherited = lengths(entry["like"]) if "like" in entry else {}
        return entry.get("lengths", inherited)

    def entry_of(name: str, entry: Mapping[str, Any]) -> CatalogEntry:
        values = config(name)
        return CatalogEntry(
            name=name,
            text_part_of=values.pop("text_part_of", None),
            config=values,
            lengths=lengths(name),
            source=entry.get("source", "{aiconfigurator}").format_map(sources),
            variants=tuple(
                f"{name}{variant}" if variant.startswith("-") else variant
                for variant in entry.get("variants", ())
            ),
        )

    return {name: entry_of(name, entry) for name, entry in document["models"].items()}


def catalog_ids() -> tuple[str, ...]:
    """Every id of the catalog, variants included."""
    return tuple(key for one in catalog().values() for key in one.ids)
