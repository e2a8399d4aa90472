"""Sizes of dtypes, and formatting of seconds, bytes and shapes for display.

Internally everything is SI: seconds, bytes, 1 GB = 1e9 bytes.
"""

from collections.abc import Collection
from fractions import Fraction
from math import prod

from meshscope.errors import SpecError, nearest

# Weight formats that may apply to only some matrices, with their common names.
_PARTIAL_FORMATS = {
    "f8e4m3fn": "fp8",
    "f8e4m3fn_block128": "fp8_block128",  # a scale for each 128 x 128 block of values
    "f8e4m3fn_block32": "fp8_block32",
    "s8": "int8",
    "s4": "int4",  # a scale for 128 inputs, or for 64, 32 or all of a channel
    "s4_group64": "int4_group64",
    "s4_group32": "int4_group32",
    "s4_channel": "int4_channel",
    "f4e2m1fn": "mxfp4",
    "f4e2m1fn_group16": "nvfp4",
}
# The matrices that they quantize, as names of formats end (`Coverage` of model/quantization.py).
_COVERAGES = ("not_linear", "mlps", "experts")
_PARTIAL_NAMES = {
    **{
        f"{dtype}_{of}": f"{name}_{of}"
        for dtype, name in _PARTIAL_FORMATS.items()
        for of in _COVERAGES
    },
    **{f"{dtype}_layers": f"{_PARTIAL_FORMATS[dtype]}_layers" for dtype in ("f8e4m3fn", "s8")},
}
# Bits per element, by XLA's name of the dtype (xla/primitive_util).
_EIGHT_BITS = (
    *("f8e4m3fn", "f8e5m2", "f8e4m3", "f8e3m4", "f8e4m3fnuz", "f8e5m2fnuz", "f8e4m3b11fnuz"),
    "f8e8m0fnu",
    "f8e4m3fn_block128",
    "f8e4m3fn_block128_f4e2m1fn_experts",  # fp8 as before, experts in mxfp4
    "f8e4m3fn_block128_f4e2m1fn_group16_experts",  # or in nvfp4
    "f8e4m3fn_block32_f4e2m1fn_experts",
    "s8_w8a8",  # int8 weights, multiplied by activations that are rounded to int8
    "f8e4m3fn_w8a8",
)
DTYPE_BITS: dict[str, int] = {
    "pred": 8,
    **{f"{kind}{bits}": bits for bits in (1, 2, 4, 8, 16, 32, 64) for kind in "su"},
    **dict.fromkeys(_EIGHT_BITS, 8),
    **{name: int(name[1]) for name in (*_PARTIAL_FORMATS, *_PARTIAL_NAMES)},
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
}

# XLA's name -> common names. The e4m3 of vLLM is finite, too: torch.float8_e4m3fn.
_NAMES = {
    "bf16": ("bfloat16",),
    "f16": ("float16", "fp16", "half"),
    "f32": ("float32", "fp32", "float"),
    "f64": ("float64",),
    **{dtype: (name,) for dtype, name in (_PARTIAL_FORMATS | _PARTIAL_NAMES).items()},
    "s8": ("int8", "w8a16", "tpu_int8"),
    "s4": ("int4", "awq", "gptq", "w4a16", "awq_marlin", "gptq_marlin", "moe_wna16"),
    "s32": ("int32",),
    "f8e4m3fn": ("fp8", "fp8_e4m3", "float8", "float8_e4m3", "float8_e4m3fn", "fbgemm_fp8"),
    "f8e5m2": ("fp8_e5m2", "float8_e5m2"),
    "f4e2m1fn": ("mxfp4", "fp4", "float4_e2m1fn"),
    "f4e2m1fn_group16": ("nvfp4", "modelopt_fp4", "petit_nvfp4"),
    "f8e4m3fn_block128_f4e2m1fn_experts": ("fp8_block128_mxfp4_experts",),
    "f8e4m3fn_block128_f4e2m1fn_group16_experts": ("fp8_block128_nvfp4_experts",),
    "f8e4m3fn_block32_f4e2m1fn_experts": ("fp8_block32_mxfp4_experts",),
    "s8_w8a8": ("w8a8", "int8_w8a8"),
    "f8e4m3fn_w8a8": ("fp8_w8a8", "ptpc_fp8"),
    "s8_experts": ("int8_experts", "experts_int8"),
}
DTYPE_ALIASES = {alias: dtype for dtype, aliases in _NAMES.items() for alias in aliases}

_MANY = "It stores weights in many dtypes: name one, such as int8, int4 or fp8."
# Names of formats that are no dtype -> what to use for them.
_FORMATS: dict[str, str] = {
    **dict.fromkeys(("gguf", "torchao", "quark", "inc", "auto-round", "hqq", "quanto"), _MANY),
    **dict.fromkeys(("nf4", "bnb"), "Use int4_group64, which has a scale for 64 weights, too."),
    "bitsandbytes": "Use --weight-dtype int8, or int4_group64 for its 4-bit values.",
    "mxfp8": "Use fp8, which has a scale a channel, not for 32 weights.",
    "w4a8": "Use int4, whose activations have 16 bits.",
    "modelopt": "Use --weight-dtype fp8.",
    "fp8_inc": "Use --weight-dtype fp8.",
}
# What a remedy names of the dtypes that an option takes.
_COMMON = (
    "bf16",
    "f16",
    "f32",
    "s8",
    "f8e4m3fn",
    "f8e4m3fn_block128",
    "s8_w8a8",
    "f8e4m3fn_w8a8",
    "s4",
    "f4e2m1fn_experts",
)


ROUNDS_TO_1000 = 999.5  # values from here on take the next larger unit at three digits


def whole_number(text: str) -> int:
    """The number that the text spells with the digits 0 to 9; ValueError for other digits, `_` and blanks."""
    return int(_plain(text))


def decimal_number(text: str) -> float:
    """The number that the text spells as `whole_number`, with a decimal point or exponent."""
    return float(_plain(text))


def _plain(text: str) -> str:
    if not text.isascii() or "_" in text or text != text.strip():
        raise ValueError(f"{text!r} is not spelled with the digits 0 to 9")
    return text


def dtype_name(text: str, supported: Collection[str] = DTYPE_BITS.keys()) -> str:
    """XLA's name of a dtype, e.g. `bfloat16` -> `bf16`; SpecError if unknown, with a remedy of the `supported` ones."""
    name = DTYPE_ALIASES.get(text.lower(), text.lower())
    if name in DTYPE_BITS:
        return name
    *first, last = (format_dtype(dtype) for dtype in _COMMON if dtype in supported)
    common = f"Use {', '.join(first)} or {last}."
    if name in _FORMATS:
        is_of_weights = "s4" in supported
        raise SpecError(f"'{text}' is not a dtype. {_FORMATS[name] if is_of_weights else common}")
    aliases = (alias for alias, dtype in DTYPE_ALIASES.items() if dtype in supported)
    raise SpecError(f"unknown dtype {text!r}. {nearest(text, [*supported, *aliases], common)}")


def format_dtype(dtype: str) -> str:
    """The name that options of serving engines use, e.g. `f8e4m3fn` -> `fp8`."""
    return dtype if dtype in {"bf16", "f32", "f16"} else _NAMES.get(dtype, (dtype,))[0]


def format_words(name: str) -> str:
    """A format in a sentence, e.g. `int8_layers` -> `int8 in layers only`."""
    values, _, of = name.partition("_not_linear" if name.endswith("_not_linear") else "_")
    if name.endswith("_not_linear"):
        return f"{values} except in linear attention"
    return (
        f"{values} in {'MLPs' if of == 'mlps' else of} only"
        if of in {"layers", *_COVERAGES}
        else name
    )


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense array; 4-bit dtypes pack two elements per byte."""
    return -(-prod(shape) * DTYPE_BITS[dtype] // 8)


def counted(count: int, noun: str) -> str:
    """`1 collective`, `129 collectives`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(n_bytes: float | Fraction | None) -> str:
    """Bytes in decimal units, e.g. `33.6 MB`; `?` if unknown."""
    if n_bytes is None:
        return "?"
    value = float(n_bytes)
    units = ("B", "kB", "MB", "GB", "TB")
    power = 0
    while abs(value) >= ROUNDS_TO_1000 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    return f"{_three_digits(value)} {units[power]}"


def format_gib(n_bytes: float | None) -> str:
    """Bytes in GiB, the unit of chip memory, e.g. `27.53 GiB`; `?` if unknown."""
    return "?" if n_bytes is None else f"{n_bytes / 2**30:.2f} GiB"


NANOSECOND_S = 1e-9


def format_seconds(seconds: float | None) -> str:
    """A duration, e.g. `7.4 us`, `12.3 ms`, `1.52 s` or `< 1 ns`; `?` if unknown."""
    if seconds is None:
        return "?"
    if 0 < seconds < NANOSECOND_S:
        return "< 1 ns"
    for scale, unit in ((1e-6, "us"), (1e-3, "ms")):
        if abs(seconds) < scale * ROUNDS_TO_1000:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds)} s"


def _three_digits(value: float) -> str:
    """At least three digits, without an exponent."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def format_rate(per_s: float) -> str:
    """A rate without its unit, e.g. `1,462` or `0.56`."""
    return f"{per_s:.3g}" if per_s < ROUNDS_TO_1000 else f"{per_s:,.0f}"


def format_shape(shape: tuple[int, ...] | list[int] | None) -> str:
    """A shape, e.g. `[8,1024,5120]`, `[]` for a scalar, `?` if unknown."""
    return "?" if shape is None else "[" + ",".join(map(str, shape)) + "]"
