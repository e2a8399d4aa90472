"""Experts in int4 and mxfp4: programs with them give the logits of dequantized weights."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from tables import read_cases
from tiny_models import TOLERANCE, golden, interpret_kernels, logits_of, tiny_experiment

from meshscope.model import quantization
from meshscope.model.arrays import Weight
from meshscope.model.config import model_from_config
from meshscope.model.quantization import Quantization
from meshscope.plans.kernel_choice import Kernel, KernelChoice
from meshscope.plans.program import Loop, Program
from meshscope.plans.weights import expert_weights
from meshscope.programs.jax import values
from meshscope.programs.jax.matrix import encoded, shared_exponents


class Case(NamedTuple):
    """A tiny model, the format of its weights, and a plan; on a TPU, with an interpreted kernel."""

    config: str
    dtype: str
    plan: str
    loop: Loop = Loop.UNROLL
    chip: str = "cpu"


def _stored(tier: str) -> list[Case]:
    return read_cases(Path(__file__).parent / "four_bit_cases.csv", Case, tier=tier)


@pytest.mark.parametrize(
    "case",
    [
        *_stored("usual"),
        *(pytest.param(case, marks=pytest.mark.matrix) for case in _stored("matrix")),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_experts_of_4_bits_give_the_logits_of_dequantized_weights(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 8 inputs; on v6e, the interpreted kernel reads the codes and the scales."""
    _shrink_groups(monkeypatch)
    expected = _reference(case.config, case.dtype)
    monkeypatch.setattr("meshscope.programs.jax.matrix.MAX_BLOCK_ROWS", 4)
    interpret_kernels(monkeypatch, case.chip)
    experiment = tiny_experiment(
        case.config, case.plan, Program(loop=case.loop), weight_dtype=case.dtype
    )
    has_kernel = experiment.kernels.experts == KernelChoice(kernel=Kernel.GROUPED)
    assert has_kernel == (case.chip == "v6e")

    got = logits_of(experiment, case.config)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def _reference(config: str, dtype: str) -> np.ndarray:
    """The logits of dequantized weights on one device."""
    stored = values.stored_values

    def dequantized(weight: Weight, value: np.ndarray, _: str) -> Iterator[Any]:
        yield weight.name, _dequantized(weight, dict(stored(weight, value, dtype)), dtype)

    with patch.object(values, "stored_values", dequantized):
        return logits_of(tiny_experiment(config, "tp=1", Program(loop=Loop.SCAN)), config)


def _shrink_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups and blocks of 8 inputs for the tiny models."""

    def small(format_of: Quantization) -> Quantization:
        block = None if format_of.block is None else golden.BLOCK
        experts = None if format_of.experts is None else small(format_of.experts)
        return replace(format_of, block=block, experts=experts)

    formats = {name: small(of) for name, of in quantization._QUANTIZATIONS.items()}
    monkeypatch.setattr("meshscope.model.quantization._QUANTIZATIONS", formats)


def _dequantized(weight: Weight, arrays: dict[str, np.ndarray], dtype: str) -> np.ndarray:
    """The weight in float32 by `ml_dtypes` and NumPy alone."""
    value, format_of = arrays[weight.name], weight.quantization(dtype)
    if format_of is None:
        is_wide = weight.dtype is not None or quantization.quantization_of(dtype) is None
        return value if is_wide else value.astype(ml_dtypes.bfloat16).astype(np.float32)
    scale = arrays[weight.name + ".scale"]
    if format_of.codes_dtype is not None:
        nibbles = value.astype(np.int8).view(np.uint8) & 15
        value = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        scale = 2.0 ** (scale.astype(np.float32) - 127)
    elif format_of.values_dtype == "f8e4m3fn":
        value = value.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if scale.ndim < value.ndim and format_of.block is None:
        return value * np.expand_dims(scale, weight.inputs)
    if format_of.square_block is None:
        last = max(weight.inputs)
        return value * scale.repeat(value.shape[last] // scale.shape[last], axis=last)
    _, *sizes = (prod(weight.shape[i] for i in group) for group in weight.matrix_dims)
    block = format_of.square_block
    whole = scale.reshape(-1, *scale.shape[-2:]).repeat(block, 1).repeat(block, 2)
    return value * whole[:, : sizes[0], : sizes[1]].reshape(weight.shape)


CODES = np.arange(16, dtype=np.uint8)
NUMBERS = CODES.view(ml_dtypes.float4_e2m1fn).astype(np.float32)


@pytest.mark.parametrize("dtype", ["f4e2m1fn_experts", "s4_group32", "s4"])
def test_values_that_the_format_has_are_stored_without_a_change(dtype: str) -> None:
    """Random values of the format in groups of any largest magnitude, written and read back."""
    model = model_from_config(golden.CONFIGS["gpt_oss"], name="tiny", source="test")
    gate = next(w for w in expert_weights(model) if w.name == "experts_w_gate")
    weight = replace(gate, shape=(3, 256, 5))
    scale, of = weight.scale(dtype), weight.quantization(dtype)
    random = np.random.default_rng(5)
    exponents = random.integers(-20, 9, size=scale.shape)
    if of.codes_dtype is None:
        value = random.integers(-7, 8, size=weight.shape).astype(np.float32)
        value[:, :: of.block] = 7  # the largest of each group
    else:
        value = random.choice(NUMBERS, size=weight.shape)
    value *= (2.0**exponents).repeat(of.block, axis=1)

    arrays = dict(values.stored_values(weight, value, dtype))

    assert arrays[scale.name].shape == scale.shape
    np.testing.assert_array_equal(_dequantized(weight, arrays, dtype), value)


def test_values_are_rounded_to_the_nearest_number() -> None:
    """Errors up to half a step; above 6 times the scale, the largest number (OCP MX, section 6.3)."""
    value = np.random.default_rng(6).normal(size=(64, 32)).astype(np.float32)
    exponents = shared_exponents(np.abs(value).max(axis=1, keepdims=True))
    scale = 2.0 ** (exponents.astype(np.float32) - 127)

    codes = encoded(value, exponents).astype(np.int8).view(np.uint8) & 15

    got = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    ratios = np.clip(value / scale, -6, 6)
    errors = np.abs(ratios[..., None] - NUMBERS).min(axis=-1)
    np.testing.assert_allclose(np.abs(ratios - got), errors)
    assert (np.abs(value / scale) < 8).all()
    assert (np.abs(value / scale).max(axis=1) >= 4).all()
