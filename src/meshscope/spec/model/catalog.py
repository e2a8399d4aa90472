"""Built-in model configs with Hugging Face config keys, each with its source, and the ids of their checkpoints.

`catalog.json` holds them. A model starts from the family or model that it is `like`; `sizes` are the values
of the keys listed at the top of the file, and a variant that starts with a hyphen continues the model's id.
Variants share the sizes of their base model: instruction-tuned, base, distilled and quantized checkpoints.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_ENTRY_KEYS = {"like", "sizes", "source", "variants"}  # the others are of the config


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A published config."""

    name: str
    config: Mapping[str, Any]
    source: str
    variants: tuple[str, ...]  # ids of models with the same sizes
    text_part_of: str | None = None  # the multimodal architecture of which this is the text part

    @property
    def ids(self) -> tuple[str, ...]:
        """The id of the model and those of its variants."""
        return (self.name, *self.variants)


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

    def entry_of(name: str, entry: Mapping[str, Any]) -> CatalogEntry:
        values = config(name)
        return CatalogEntry(
            name=name,
            text_part_of=values.pop("text_part_of", None),
            config=values,
            source=entry.get("source", "{aiconfigurator}").format_map(sources),
            variants=tuple(
                f"{name}{variant}" if variant.startswith("-") else variant
                for variant in entry.get("variants", ())
            ),
        )

    return {name: entry_of(name, entry) for name, entry in document["models"].items()}


# Suffixes of ids whose models have the sizes of the model without the suffix.
_SUFFIX = re.compile(
    r"-(instruct|chat|hf|it|base|thinking|fp8|fp8-dynamic|int8|int4|w8a8|w4a16|awq|gptq|bf16|v0\.1|dynamic"
    r"|quantized\.w8a8|quantized\.w4a16|gptq-int4|gptq-int8)$"
)


def _compressed(kind: str, bits: int, *, activations: int | None) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors."""
    group = {
        "weights": {"type": kind, "num_bits": bits},
        "input_activations": None
        if activations is None
        else {"type": kind, "num_bits": activations, "strategy": "token", "dynamic": True},
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


_FP8_BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
# Formats that ids name. The fp8 checkpoints of Qwen, DeepSeek and GLM-5 have scales of blocks (their config.json).
_FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"^(qwen/|deepseek-ai/|zai-org/glm-5).*-fp8$", _FP8_BLOCKS),
    # MLPs only (arXiv 2407.21783, section 6.2).
    (
        r"^meta-llama/.*-405b.*-fp8$",
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["self_attn"]},
    ),
    (r"-fp8(-dynamic)?$", {"quant_method": "fp8"}),
    (r"-awq$", {"quant_method": "awq", "bits": 4}),
    (r"-gptq(-int4)?$", {"quant_method": "gptq", "bits": 4}),
    (r"-gptq-int8$", {"quant_method": "gptq", "bits": 8}),
    (r"[-.]w8a8$", _compressed("int", 8, activations=8)),
    (r"-int8$", _compressed("int", 8, activations=None)),
    (r"[-.](w4a16|int4)$", _compressed("int", 4, activations=None)),
)


def base_ids(name: str) -> Iterator[str]:
    """An id without owner in lower case, then without one suffix of a variant after the other."""
    base = name.lower().rsplit("/", 1)[-1].removeprefix("meta-")
    yield base
    while (shorter := _SUFFIX.sub("", base)) != base:
        base = shorter
        yield base


def quantization_named(name: str) -> Mapping[str, Any] | None:
    """The `quantization_config` that an id names by its suffix; None if it names none."""
    lowered = name.lower()
    for pattern, config in _FORMATS:
        if re.search(pattern, lowered):
            return config
    return None
