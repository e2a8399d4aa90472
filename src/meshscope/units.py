"""Sizes of dtypes, and formatting of seconds, bytes and shapes for display.

Internally everything is SI: seconds, bytes, 1 GB = 1e9 bytes.
"""

from collections.abc import Collection
from fractions import Fraction
from math import prod
from typing import Any

from meshscope.errors import SpecError, nearest
from meshscope.files import own_table

_STORED = own_table("dtypes.toml")
# The matrices that partial formats quantize, as their names end (`Coverage` of model/quantization.py).
_COVERAGES = ("not_linear", "mlps", "experts")
_PARTIAL = {
    f"{dtype}_{of}": [bits, f"{names[0]}_{of}"]
    for dtype, (bits, *names) in _STORED["partial"].items()
    for of in (*_COVERAGES, *(["layers"] if dtype in {"f8e4m3fn", "s8"} else []))
}
_INTEGERS = {f"{kind}{bits}": [bits] for bits in (1, 2, 4, 8, 16, 32, 64) for kind in "su"}
_DTYPES: dict[str, list[Any]] = _INTEGERS | _PARTIAL | _STORED["partial"] | _STORED["dtypes"]
DTYPE_BITS: dict[str, int] = {dtype: bits for dtype, (bits, *_) in _DTYPES.items()}
DTYPE_ALIASES = {alias: dtype for dtype, (_, *names) in _DTYPES.items() for alias in names}
# Names of formats that are no dtype -> what to use for them.
_FORMATS = {name: remedy for remedy, names in _STORED["refused"].items() for name in names}
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
    """The number that the text spells with the digits 0 to 9; ValueError for other digits, `_` and `+`."""
    return int(_plain(text))


def decimal_number(text: str) -> float:
    """The number that the text spells as `whole_number`, with a decimal point or exponent."""
    return float(_plain(text))


def _plain(text: str) -> str:
    if not text.isascii() or "_" in text or text.startswith("+"):
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
    names = _DTYPES[dtype][1:] if dtype in _DTYPES else []
    return names[0] if names and dtype not in {"bf16", "f32", "f16"} else dtype


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
