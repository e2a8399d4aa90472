"""Built-in model configs with Hugging Face config keys, each with its source, and the ids of their checkpoints.

`catalog.json` holds them. A model starts from the family or model that it is `like`; `sizes` are the values
of the keys listed at the top of the file, and a variant that starts with a hyphen continues the model's id.
Variants share the sizes of their base model: instruction-tuned, base, distilled and quantized checkpoints. `lengths`
are the contexts of those that have another, by the longest part of their ids in lower case.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshscope.errors import did_you_mean

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


# Suffixes of ids whose models have the sizes of the model without the suffix.
_SUFFIX = re.compile(
    r"-(instruct|chat|hf|it|base|thinking|fp8|fp8-dynamic|int8|int4|w8a8|w4a16|awq|gptq|bf16|v0\.1|dynamic"
    r"|quantized\.w8a8|quantized\.w4a16|gptq-int4|gptq-int8|awq-int4|int4-awq|int4-autoround)$"
)
_BF16 = re.compile(r"-bf16$", re.IGNORECASE)


def _compressed(kind: str, bits: int, *kept: str, activations: int | None = None) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors."""
    group = {
        "weights": {"type": kind, "num_bits": bits},
        "input_activations": None
        if activations is None
        else {"type": kind, "num_bits": activations, "strategy": "token", "dynamic": True},
    }
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    return {**config, "ignore": [*kept]}


_FP8_BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_FP8_TOKENS = _compressed("float", 8, activations=8)
# Formats that ids name. The fp8 checkpoints of Qwen, DeepSeek and GLM-5 have scales of blocks (their config.json);
# those of GLM-4.5 and later 4.x are of compressed-tensors (HabanaAI/vllm-hpu-extension pull request 350). Ministral 3
# has a scale per tensor, from memory.
_FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"^(qwen/|deepseek-ai/|zai-org/glm-5).*-fp8$", _FP8_BLOCKS),
    (r"^zai-org/glm-4.*-fp8$", _FP8_TOKENS),
    # MLPs only (arXiv 2407.21783, section 6.2).
    (
        r"^meta-llama/.*-405b.*-fp8$",
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["self_attn"]},
    ),
    # vllm-project/vllm issue 16474 prints the scheme; only routed experts have scales in the loader of
    # vllm-project/tpu-inference, models/jax/llama4.py.
    (
        r"^meta-llama/llama-4-maverick.*-fp8$",
        _compressed(
            *("float", 8, "re:.*self_attn.*", "re:.*shared_expert.*"),
            r"re:.*feed_forward\.(gate|up|down)_proj",
            activations=8,
        ),
    ),
    (r"-fp8-dynamic$", _FP8_TOKENS),
    (r"-fp8$|^mistralai/ministral-3-.*-instruct-2512$", {"quant_method": "fp8"}),
    (r"-(awq|awq-int4|int4-awq)$", {"quant_method": "awq", "bits": 4}),
    (r"-gptq(-int4)?$", {"quant_method": "gptq", "bits": 4}),
    (r"-gptq-int8$", {"quant_method": "gptq", "bits": 8}),
    (r"-int4-autoround$", {"quant_method": "auto-round", "bits": 4}),
    (r"[-.]w8a8$", _compressed("int", 8, activations=8)),
    (r"-int8$", _compressed("int", 8)),
    (r"[-.](w4a16|int4)$", _compressed("int", 4)),
)
# Words at the end of ids of checkpoints in another format, and the weight dtype that prices the first one present.
_WORD = re.compile(
    r"nvfp4|mxfp4|fp4|fp8|bf16|fp16|int[248]|[2-8]bit|bnb|unsloth|gguf|mlx|dwq|awq|gptq|autoround|hqq|exl[23]|"
    r"(quantized\.)?w\d+a\d+(fp8)?|q\d(_\w+)?|qat|unquantized|ud|g\d+|gs\d+|\d+g|static|dynamic|kv|preview|"
    r"block|per|tensor|channel|w|a|ptpc|mixed|marlin|sym|asym|torchao"
)
_OPTIONS = (
    (r"unquantized|bf16|fp16", "", ""),
    (r"mxfp4", "mxfp4", ""),
    (r"fp4", "nvfp4", ""),
    (r"gguf|exl[23]|mlx", "int4", "or int8_layers, by the bits of the file"),
    (r"bnb", "int4_group64", "the format nearest to NF4"),
    (r"fp8", "fp8_layers", ""),
    (r"w8a8", "w8a8", ""),
    (r"int8|8bit|w8a16|q[68]", "int8_layers", ""),
    (r"", "int4", ""),
)
BY_NAME = ", by its name"  # ends the text of a format that only the id states
N_SUGGESTED = 3
SIMILAR = 0.8  # ratio of difflib
MIN_COMMON_START = 5  # characters


def base_ids(name: str) -> Iterator[str]:
    """An id without owner in lower case, then without one suffix of a variant after the other."""
    base = _short(name)
    yield base
    while (shorter := _SUFFIX.sub("", base)) != base:
        base = shorter
        yield base


def _short(name: str) -> str:
    """An id without its owner."""
    return name.lower().rsplit("/", 1)[-1].removeprefix("meta-")


@cache
def _entries() -> tuple[Mapping[str, CatalogEntry], Mapping[str, CatalogEntry]]:
    """The entries by each id in lower case, and by ids without owner and suffixes."""
    ids = {key: one for one in catalog().values() for key in one.ids}
    shortened = {base: one for one in catalog().values() for base in base_ids(one.name)}
    return (
        {key.lower(): one for key, one in ids.items()},
        shortened | {_short(key): one for key, one in reversed(ids.items())},
    )


def entry_named(name: str) -> CatalogEntry | None:
    """The catalog entry of this id, case-insensitive, with or without the owner.

    A variant of a model, such as `-Instruct` or `-FP8`, has the sizes of its base model.
    """
    exact, by_base = _entries()
    if name.lower() in exact:
        return exact[name.lower()]
    return next((by_base[base] for base in base_ids(name) if base in by_base), None)


def config_named(entry: CatalogEntry, name: str) -> Mapping[str, Any]:
    """The config of the entry, with the quantization that the id names by its suffix."""
    config = entry.config_of(name)
    if _BF16.search(name):
        kept = {k: v for k, v in config.items() if k not in {"quantization_config", "expert_dtype"}}
        return {**kept, "dtype": "bfloat16"}
    for pattern, quantization in _FORMATS:
        if re.search(pattern, name.lower()):
            return {**config, "quantization_config": quantization}
    return config


def names_format(name: str) -> bool:
    """Whether an id ends with a word for a format."""
    return _WORD.fullmatch(_short(name).rsplit("-", 1)[-1]) is not None


def derived_from(name: str) -> str | None:
    """The sentence for an id that is a cataloged one in another format: which one, and the option that prices it."""
    words = _short(name).split("-")
    n_words = len(words)
    while n_words > 1 and _WORD.fullmatch(words[n_words - 1]):
        n_words -= 1
    base = "-".join(words[:n_words])
    entry = entry_named(base)
    if entry is None or n_words == len(words):
        return None
    same = next((one for one in entry.ids if _short(one) == base), entry.name)
    option = _option("-".join(words[n_words:]))
    return f"By its name it is {same} in another format: use that id {option}."


def _option(words: str) -> str:
    """The option that prices these words at the end of an id."""
    dtype, why = next((dtype, why) for pattern, dtype, why in _OPTIONS if re.search(pattern, words))
    if not dtype:
        return "with --dtype bf16"
    return f"with --weight-dtype {dtype}{why and f', {why}'}"


def as_written(name: str) -> str:
    """An id or a search without owner, `v` of versions, and other signs than `-`: `deepseek-3.1` for `DeepSeek V3.1`."""
    words = re.sub(r"[\s_]+", "-", _short(name).strip())
    return re.sub(r"-v(?=\d)", "-", re.sub(r"(?<=[a-z]{3})(?=\d)", "-", words))


def nearest_ids(name: str, otherwise: str) -> str:
    """A sentence that suggests ids of the catalog; `otherwise` if none is near.

    Those that continue `name` come first, then those that it contains, then those with the longest common start, then
    those that are written alike.
    """
    short = as_written(name)
    ids = {one: as_written(one) for one in catalog_ids()}
    continuing = [one for one in ids if short and ids[one].startswith(short)]
    continuing.sort(key=lambda one: ids[one] != short)
    inside = sorted(
        (one for one in ids if f"-{ids[one]}-" in f"-{short}-"), key=lambda one: -len(ids[one])
    )
    starts = {one: _n_common(short, ids[one]) for one in ids}
    least = max(MIN_COMMON_START, -(-len(short) // 2))
    common = sorted(
        (one for one in ids if starts[one] >= least), key=lambda one: (-starts[one], len(one))
    )
    alike = difflib.get_close_matches(short, ids.values(), n=N_SUGGESTED, cutoff=SIMILAR)
    close = [*continuing, *inside, *common, *(one for one in ids if ids[one] in alike)]
    suggested = list(dict.fromkeys(close))[:N_SUGGESTED]
    return did_you_mean(suggested) if suggested else otherwise


def _n_common(one: str, other: str) -> int:
    """Characters at the start that both have."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
