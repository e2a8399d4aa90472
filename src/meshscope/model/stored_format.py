"""How a checkpoint stores its weights, read from `quantization_config` and `dtype` of its config."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.errors import SpecError
from meshscope.model.model import Model
from meshscope.model.modules import MatrixGroup
from meshscope.model.quantization import (
    FP8_BLOCKS,
    FP8_MXFP4,
    FP8_NVFP4,
    MXFP4,
    NVFP4,
    UNQUANTIZED_DTYPE,
    WEIGHT_DTYPES,
    Coverage,
    format_with,
)
from meshscope.model.reader import ConfigReader, NestedConfig
from meshscope.model.recipes import (
    METHODS,
    WIDE_BITS,
    QuantizationRecipe,
    Scheme,
    recipe_of,
    stored_cache,
)
from meshscope.units import DTYPE_ALIASES, dtype_name

PLAIN_DTYPES = ("bfloat16", "float16", "float32")
Modules = Mapping[MatrixGroup, tuple[str, ...]]
# The groups that each coverage quantizes, and how a text ends that names it. Coverages that quantize the same groups
# of a model are named by the first.
_GROUPS = {
    Coverage.LAYERS: frozenset(MatrixGroup),
    Coverage.EXPERTS: frozenset({MatrixGroup.EXPERTS}),
    Coverage.MLPS: frozenset({MatrixGroup.MLPS, MatrixGroup.EXPERTS}),
    Coverage.NOT_LINEAR: frozenset(MatrixGroup) - {MatrixGroup.LINEAR},
}
_ENDS = {
    Coverage.LAYERS: "",
    Coverage.NOT_LINEAR: " except in linear attention",
    Coverage.MLPS: " in the MLPs",
    Coverage.EXPERTS: " in the experts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """The format as the config states it, and the weight dtype that counts its bytes.

    `weight_dtype` is None if no weight dtype is its equal; `nearest` is then the one that comes nearest, if any.
    `cache` is the dtype of the KV cache for which the checkpoint has scales.
    """

    text: str
    weight_dtype: str | None = None
    nearest: str | None = None
    cache: str | None = None


def stored_format(reader: ConfigReader, modules: Modules) -> StoredFormat | None:
    """The format of the checkpoint of a model with these modules; None if the config does not state it."""
    config = reader.config
    for key in ("quantization_config", "compression_config"):
        quantization = config.get(key)
        if quantization is not None and not isinstance(quantization, Mapping):
            raise SpecError(
                f"'{key}' must be an object with a quant_method, got {quantization!r}. Correct the config, or remove it "
                "and name --weight-dtype."
            )
        if quantization is not None:
            quantization = NestedConfig(quantization, key, reader.used)
            recipe = recipe_of(quantization, config.get("expert_dtype"))
            return _quantized(recipe, modules, stored_cache(quantization))
    dtype = config.get("dtype") or config.get("torch_dtype")
    if not isinstance(dtype, str):
        return None
    if dtype in PLAIN_DTYPES:
        return StoredFormat(text=dtype, weight_dtype=DTYPE_ALIASES[dtype])
    bits = re.search(r"\d+", dtype)
    wide = UNQUANTIZED_DTYPE if bits is None or int(bits[0]) <= WIDE_BITS else "f32"
    alias = DTYPE_ALIASES.get(dtype, wide)
    return StoredFormat(text=dtype, nearest=alias if alias in WEIGHT_DTYPES else wide)


def _quantized(recipe: QuantizationRecipe, modules: Modules, cache: str | None) -> StoredFormat:
    """The format of a recipe: one scheme in some groups of matrices, or several."""
    schemes = {group: _of_most(recipe, modules[group]) for group in MatrixGroup if group in modules}
    quantized = {group: scheme for group, scheme in schemes.items() if scheme is not None}
    if not quantized:
        return StoredFormat(
            text=f"{recipe.text}, in none of its layers",
            weight_dtype=UNQUANTIZED_DTYPE,
            cache=cache,
        )
    if len(set(quantized.values())) > 1:
        return _mixed(quantized, modules, cache)
    scheme = next(iter(quantized.values()))
    equal = [of for of in _GROUPS if _GROUPS[of].intersection(modules) == quantized.keys()]
    if not equal:
        return _unequal(f"{scheme.text} in {_named(quantized)}", scheme, quantized, modules, cache)
    text = f"{scheme.text}{_ENDS[equal[0]]}"
    if scheme.dtype is None:
        return _unequal(text, scheme, quantized, modules, cache)
    return StoredFormat(text=text, weight_dtype=format_with(scheme.dtype, equal[0]), cache=cache)


def _of_most(recipe: QuantizationRecipe, names: tuple[str, ...]) -> Scheme | None:
    """The scheme of most modules: single layers, such as the first, may have another."""
    return Counter(recipe.scheme_of(name) for name in names).most_common(1)[0][0]


def _mixed(
    quantized: Mapping[MatrixGroup, Scheme], modules: Modules, cache: str | None
) -> StoredFormat:
    """Several schemes: fp8 with experts in mxfp4 or nvfp4 has an equal, others only one that is near."""
    by_scheme: dict[Scheme, list[MatrixGroup]] = {}
    for group, scheme in quantized.items():
        by_scheme.setdefault(scheme, []).append(group)
    text = ", ".join(f"{scheme.text} in {_named(of)}" for scheme, of in by_scheme.items())
    experts = quantized.get(MatrixGroup.EXPERTS)
    others = {scheme for group, scheme in quantized.items() if group is not MatrixGroup.EXPERTS}
    equal = {MXFP4: FP8_MXFP4, NVFP4: FP8_NVFP4}.get((experts and experts.dtype) or "")
    if (
        equal is not None
        and quantized.keys() == modules.keys()
        and {s.dtype for s in others} == {FP8_BLOCKS}
    ):
        return StoredFormat(text=text, weight_dtype=equal, cache=cache)
    largest = MatrixGroup.EXPERTS if experts is not None else MatrixGroup.MLPS
    scheme = quantized.get(largest) or next(iter(quantized.values()))
    of_scheme = {group: one for group, one in quantized.items() if one == scheme}
    return _unequal(text, scheme, of_scheme, modules, cache)


def _unequal(
    text: str,
    scheme: Scheme,
    quantized: Mapping[MatrixGroup, Scheme],
    modules: Modules,
    cache: str | None,
) -> StoredFormat:
    """A format without an equal, with the nearest: the most matrices that a weight dtype can quantize of these."""
    dtype = scheme.dtype or scheme.nearest
    covered = {of: _GROUPS[of].intersection(modules) for of in _GROUPS}
    fitting = [of for of in covered if covered[of] and covered[of] <= quantized.keys()]
    most = max(fitting, key=lambda of: len(covered[of]), default=None)
    nearest = None if dtype is None or most is None else format_with(dtype, most)
    return StoredFormat(text=text, nearest=nearest, cache=cache)


def _named(groups: Mapping[MatrixGroup, Scheme] | list[MatrixGroup]) -> str:
    """The groups in words."""
    *first, last = groups
    return f"{', '.join(first)} and {last}" if first else last.value


def weight_dtype_of(model: Model, name: str) -> str:
    """The weight dtype of an option's value: `auto`, a dtype, or vLLM's name of a quantization.

    A method such as `fp8`, `mxfp4` or `gptq` is the checkpoint's own format if that is what it stores.
    """
    method = name.lower()
    if method == "auto":
        return model.default_weight_dtype
    stored = None if model.stored_dtype is None else model.stored_as
    if (
        stored is not None
        and method in METHODS
        and method in {stored, stored.split()[0].rstrip(",")}
    ):
        return model.default_weight_dtype
    if method == "compressed-tensors":
        raise SpecError(
            f"--quantization {name}: the config of {model.name} states "
            f"{model.stored_as or 'no quantization'}. Give a config.json with this quantization, or name the "
            "dtype: int8, fp8 or int4."
        )
    return dtype_name(name)
