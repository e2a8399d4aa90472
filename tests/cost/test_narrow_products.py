"""Predicted cost of 8-bit activations: the peak of their dtype where a chip has it."""

import pytest
from made import experiment_with
from tables import table

from meshscope.analysis.roofline import step_floor
from meshscope.cost.features import PARTS, Cost, Feature, plan_costs
from meshscope.cost.predicted import predicted_times
from meshscope.cost.rates import efficiency_of, rates_of
from meshscope.events.enums import Part, Phase
from meshscope.events.step_time import Activity, StepTime
from meshscope.hardware.chips import chip_of, precision_notes, product_speedup
from meshscope.model.config import read_model
from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.linear import linear_of


def _matmul_s(step: StepTime) -> float:
    return sum(a.seconds for a in step.activities if a.activity is Activity.MATMUL)


def _prefill(weight_dtype: str, model: str = "meta-llama/Llama-3.1-8B") -> StepTime:
    sizes = {"batch": 8, "prompt": 1024, "weight_dtype": weight_dtype}
    return predicted_times(experiment_with(model, "tp=4", "v6e-4", **sizes))[0]


def _seconds(flops: float, efficiency: str) -> float:
    """At the bf16 peak of v6e and the closed form's share of it."""
    chip = chip_of("v6e")
    share = getattr(efficiency_of(chip, rates_of(chip)).constants, efficiency)
    return flops / chip.bf16_flops_per_s / share


def _flops(step: StepTime, *parts: str) -> float:
    return sum(part.flops or 0.0 for part in step.parts if part.part in parts or not parts)


@table
def test_products_run_at_the_published_peak_of_their_dtype(weight_dtype, chip, speedup) -> None:
    assert product_speedup(weight_dtype, chip_of(chip)) == speedup


N_TOKENS = 8 * 1024


def test_int8_products_take_half_the_time_and_compute_as_much() -> None:
    """On v6e, without the head and the kernels of attention."""
    wide, narrow = _prefill("s8"), _prefill("s8_w8a8")
    assert _matmul_s(narrow) == pytest.approx(_matmul_s(wide) / 2, rel=0.02)
    assert _flops(wide) == pytest.approx(_flops(narrow), rel=1e-9)


def test_int8_experts_take_half_the_time_of_their_products() -> None:
    """Qwen3-30B-A3B on v6e, a quarter of the experts' width: 8 rows of a token in three products of 2,048 x 192."""
    wide_s, narrow_s = (
        sum(a.seconds for a in step.activities if a.activity is Activity.KERNEL)
        for step in (_prefill(dtype, "Qwen/Qwen3-30B-A3B") for dtype in ("s8", "s8_w8a8"))
    )
    products_s = _seconds(48 * N_TOKENS * 8 * 3 * 2 * 2048 * 192, "experts")
    assert wide_s - narrow_s == pytest.approx(products_s / 2, rel=1e-6)


def test_up_projections_of_latents_keep_the_bf16_peak() -> None:
    """DeepSeek-V2-Lite on v6e: 27 layers, a quarter of 16 heads of 128 + 128 from latents of 512; routers, too."""
    wide, narrow = (_prefill(d, "deepseek-ai/DeepSeek-V2-Lite") for d in ("s8", "s8_w8a8"))
    of_up = 27 * N_TOKENS * 2 * 4 * 512 * (128 + 128)
    wide_s = _seconds(_flops(wide, "moe.router", "lm_head") + of_up, "matmul")
    assert _matmul_s(narrow) - wide_s == pytest.approx((_matmul_s(wide) - wide_s) / 2, rel=0.01)


def test_rates_and_the_delta_rule_keep_the_bf16_peak() -> None:
    """Qwen3.5-9B on v6e: 24 of 32 layers, a quarter of 32 value heads with two rates each, from 4,096 numbers."""
    model = read_model("Qwen/Qwen3.5-9B")
    wide, narrow = (_prefill(dtype, model.name) for dtype in ("s8", "s8_w8a8"))
    linear = linear_of(model.attention.of(AttentionKind.LINEAR))
    of_token = 2 * 4096 * 2 * 8 + linear.chunked_flops / 4
    wide_s = _seconds(24 * N_TOKENS * of_token + _flops(wide, "lm_head"), "matmul")
    assert _matmul_s(narrow) - wide_s == pytest.approx((_matmul_s(wide) - wide_s) / 2, rel=1e-6)


def test_each_input_of_compressed_attention_is_rounded_once() -> None:
    """A sliding layer of DeepSeek-V4 under tp=4: the residual stream of two products, its latent, heads and groups."""
    costs = [_attention_bytes(dtype) for dtype in ("s8", "s8_w8a8")]

    hidden, latent, heads, groups = 4096, 1024, 64 * 512 // 4, 8 * 1024 // 4
    assert costs[1] - costs[0] == pytest.approx((hidden + latent + heads + groups) * (2 + 1))


def _attention_bytes(weight_dtype: str) -> float:
    """Bytes of wide arrays for a token in the attention of the first layer."""
    options = {"weight_dtype": weight_dtype, "n_layers": 1}
    experiment = experiment_with("deepseek-ai/DeepSeek-V4-Flash", "tp=4", "v6e-4", **options)
    costs = plan_costs(experiment, Phase.PREFILL, rates_of(chip_of("v6e")))
    return costs.coefficients[PARTS.index(Part.ATTN), Cost.PASS_BYTES, Feature.TOKENS]


def test_the_floor_of_a_step_counts_the_peak_of_its_products() -> None:
    narrow, chip = _prefill("s8_w8a8"), chip_of("v6e")

    at_int8, at_bf16 = step_floor(narrow, chip, "s8_w8a8"), step_floor(narrow, chip, "s8")

    assert at_int8.compute_s == pytest.approx(at_bf16.compute_s / 2)
    assert (at_int8.peak, at_bf16.peak) == ("s8", "bf16")


def test_emulation_costs_the_rounding() -> None:
    """v6e has no fp8 unit: products take as long as with fp8 weights, and rounding is added."""
    wide, narrow = _prefill("f8e4m3fn"), _prefill("f8e4m3fn_w8a8")

    assert narrow.step.value_s > wide.step.value_s
    notes = precision_notes("f8e4m3fn_w8a8", "bf16", chip_of("v6e"))
    assert "emulates it" in " ".join(notes)
