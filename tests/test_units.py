"""Dtype sizes and formatting of quantities."""

import re
from typing import NamedTuple

import pytest

from meshscope import units
from meshscope.errors import SpecError
from meshscope.model.quantization import WEIGHT_DTYPES
from meshscope.plans.workload import ACTIVATION_DTYPES, CACHE_DTYPES


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("bfloat16", "bf16"),
        ("BF16", "bf16"),
        ("fp8", "f8e4m3fn"),
        ("s8", "s8"),
        ("fp8_e4m3", "f8e4m3fn"),
        ("fp8_e5m2", "f8e5m2"),
        ("float8", "f8e4m3fn"),
        ("fp4", "f4e2m1fn"),
        ("half", "f16"),
        ("AWQ", "s4"),
        ("gptq", "s4"),
        ("int4_group32", "s4_group32"),
        ("w8a8", "s8_w8a8"),
        ("fp8_w8a8", "f8e4m3fn_w8a8"),
    ],
)
def test_dtype_names_are_those_of_xla(typed: str, name: str) -> None:
    assert units.dtype_name(typed) == name


def test_an_unknown_dtype_suggests_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"unknown dtype 'bflot16'. Did you mean 'bfloat16'"):
        units.dtype_name("bflot16")


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("modelopt", "--weight-dtype fp8"),
        ("gguf", "name one, such as int8"),
        ("hqq", "name one, such as int8"),
        ("nf4", "int4_group64"),
        ("mxfp8", "fp8"),
    ],
)
def test_a_format_that_is_no_dtype_names_the_nearest_option(typed: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=f"'{typed}' is not a dtype. .*{remedy}"):
        units.dtype_name(typed)


@pytest.mark.parametrize("typed", ["int9", "foo", "nvfp44", "w4a8", "gguf", "float9"])
@pytest.mark.parametrize("supported", [ACTIVATION_DTYPES, CACHE_DTYPES, tuple(WEIGHT_DTYPES)])
def test_a_remedy_names_only_what_the_option_takes(typed: str, supported: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as error:
        units.dtype_name(typed, supported)
    words = re.findall(r"[a-z]+\d+\w*", str(error.value).partition(". ")[2])
    assert {units.DTYPE_ALIASES.get(word, word) for word in words} <= set(supported)


def test_every_dtype_alias_is_known() -> None:
    assert set(units.DTYPE_ALIASES.values()) <= set(units.DTYPE_BITS)


class Array(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int


@pytest.mark.parametrize(
    "case",
    [
        Array("bf16", (128, 4096), 1_048_576),  # Xu et al., Table IV
        Array("f32", (), 4),
        Array("bf16", (0, 4096), 0),
        Array("s4", (3,), 2),  # two elements a byte
        Array("c128", (2,), 32),
    ],
    ids=str,
)
def test_array_bytes(case: Array) -> None:
    assert units.array_bytes(case.dtype, case.shape) == case.n_bytes


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (None, "?"),
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (1000, "1 kB"),
        (33_554_432, "33.6 MB"),
        (999_499_999, "999 MB"),
        (999_500_000, "1 GB"),
        (141e9, "141 GB"),
        (5e15, "5000 TB"),
    ],
)
def test_format_bytes_keeps_three_digits(n_bytes: float | None, text: str) -> None:
    assert units.format_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "?"),
        (0.0, "0 us"),
        (3e-11, "< 1 ns"),
        (7.41e-6, "7.41 us"),
        (999.9e-6, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1 s"),
        (1.524, "1.52 s"),
        (4321.0, "4321 s"),
    ],
)
def test_format_seconds_keeps_three_digits(seconds: float | None, text: str) -> None:
    assert units.format_seconds(seconds) == text


def test_format_gib_is_binary() -> None:
    assert (units.format_gib(32 * 2**30), units.format_gib(None)) == ("32.00 GiB", "?")


@pytest.mark.parametrize(
    ("shape", "text"),
    [((8, 1024, 5120), "[8,1024,5120]"), ((), "[]"), ([64128], "[64128]"), (None, "?")],
)
def test_format_shape(shape: tuple[int, ...] | list[int] | None, text: str) -> None:
    assert units.format_shape(shape) == text
