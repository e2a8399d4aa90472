"""Dtype sizes and formatting of quantities."""

import re

import pytest
from tables import table

from meshscope import units
from meshscope.errors import SpecError
from meshscope.model.quantization import WEIGHT_DTYPES
from meshscope.plans.workload import ACTIVATION_DTYPES, CACHE_DTYPES


@table
def test_dtype_names_are_those_of_xla(typed: str, name: str) -> None:
    assert units.dtype_name(typed) == name


def test_an_unknown_dtype_suggests_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"unknown dtype 'bflot16'. Did you mean 'bfloat16'"):
        units.dtype_name("bflot16")


@table
def test_a_format_that_is_no_dtype_names_the_nearest_option(typed: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=f"'{typed}' is not a dtype. .*{remedy}"):
        units.dtype_name(typed)


def test_an_unknown_dtype_of_weights_names_a_format_of_experts() -> None:
    with pytest.raises(SpecError, match=r"Use bf16, .*, int4 or mxfp4_experts\."):
        units.dtype_name("zzz", WEIGHT_DTYPES)


@pytest.mark.parametrize("typed", ["int9", "foo", "nvfp44", "w4a8", "gguf", "float9"])
@pytest.mark.parametrize("supported", [ACTIVATION_DTYPES, CACHE_DTYPES, tuple(WEIGHT_DTYPES)])
def test_a_remedy_names_only_what_the_option_takes(typed: str, supported: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as error:
        units.dtype_name(typed, supported)
    words = re.findall(r"[a-z]+\d+\w*", str(error.value).partition(". ")[2])
    assert {units.DTYPE_ALIASES.get(word, word) for word in words} <= set(supported)


def test_every_dtype_alias_is_known() -> None:
    assert set(units.DTYPE_ALIASES.values()) <= set(units.DTYPE_BITS)


@table
def test_array_bytes(dtype: str, shape: tuple[int, ...], n_bytes: int) -> None:
    assert units.array_bytes(dtype, shape) == n_bytes


@table
def test_format_bytes_keeps_three_digits(n_bytes: float | None, text: str) -> None:
    assert units.format_bytes(n_bytes) == text


@table
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
