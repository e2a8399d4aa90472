"""The costs of a device: replicas, products of 8-bit activations, a fused kernel of experts, and skewed routing."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from made import closed_of, experiment_with
from tables import table

import meshscope
from meshscope.analysis.roofline import step_floor
from meshscope.api.options import request_of
from meshscope.api.request import ExperimentRequest
from meshscope.cost.expert_load import TILE_ROWS, device_load, exchange_load
from meshscope.cost.features import PARTS, Cost, Feature, plan_costs
from meshscope.cost.predicted import predicted_times
from meshscope.cost.rates import efficiency_of, rates_of
from meshscope.cost.simulator import scheduled_collective
from meshscope.errors import MeshscopeError, SpecError
from meshscope.events.enums import REQUEST_PHASES, Part, Phase
from meshscope.events.step_time import Activity, StepTime
from meshscope.hardware.chips import chip_of, precision_notes, product_speedup
from meshscope.hardware.compiler_facts import compiler_facts
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.linear import linear_of
from meshscope.plans.dispatch import FUSED_BLOCK_TOKENS, DispatchForm
from meshscope.plans.experiment import Experiment
from meshscope.plans.mesh import Mesh
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Program
from meshscope.readers.hlo.collectives import module_collectives
from meshscope.readers.hlo.parse import parse_hlo


@table
def test_replicas_and_blocks_of_the_prompt_leave_the_costs_of_a_device(plan, replicated) -> None:
    costs = [
        plan_costs(
            experiment_with(
                "Qwen/Qwen3-30B-A3B",
                text,
                f"v6e:{parse_plan(text).n_devices // 4 * 2}x2",
                batch=16,
                prompt=1024,
            ),
            phase,
            rates_of(chip_of("v6e")),
            served=None,
        ).coefficients
        for text in (plan, replicated)
        for phase in REQUEST_PHASES
    ]
    assert np.array_equal(costs[0], costs[2])
    assert np.array_equal(costs[1], costs[3])
    assert costs[0].any()


def _matmul_s(step: StepTime) -> float:
    return sum(a.seconds for a in step.activities if a.activity is Activity.MATMUL)


def _prefill(weight_dtype: str, model: str = "meta-llama/Llama-3.1-8B") -> StepTime:
    sizes = {"batch": 8, "prompt": 1024, "weight_dtype": weight_dtype}
    return predicted_times(experiment_with(model, "tp=4", "v6e-4", **sizes))[0]


def _seconds(flops: float, efficiency: str) -> float:
    """At the bf16 peak of v6e and the closed form's share of it."""
    chip = chip_of("v6e")
    share = getattr(efficiency_of(chip).constants, efficiency)
    return flops / chip.bf16_flops_per_s / share


def _flops(step: StepTime, *parts: str) -> float:
    return sum(part.flops or 0.0 for part in step.parts if part.part in parts or not parts)


@table
def test_products_run_at_the_published_peak_of_their_dtype(weight_dtype, chip, speedup) -> None:
    assert product_speedup(weight_dtype, chip_of(chip)) == speedup


N_TOKENS = 8 * 1024


def test_int8_products_and_their_floor_take_half_the_time_and_compute_as_much() -> None:
    """On v6e, without the head and the kernels of attention."""
    wide, narrow = _prefill("s8"), _prefill("s8_w8a8")
    assert _matmul_s(narrow) == pytest.approx(_matmul_s(wide) / 2, rel=0.02)
    assert _flops(wide) == pytest.approx(_flops(narrow), rel=1e-9)
    narrow, chip = _prefill("s8_w8a8"), chip_of("v6e")

    at_int8, at_bf16 = step_floor(narrow, chip, "s8_w8a8"), step_floor(narrow, chip, "s8")

    assert at_int8.compute_s == pytest.approx(at_bf16.compute_s / 2)
    assert (at_int8.peak, at_bf16.peak) == ("s8", "bf16")


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
    costs = plan_costs(experiment, Phase.PREFILL, rates_of(chip_of("v6e")), served=None)
    return costs.coefficients[PARTS.index(Part.ATTN), Cost.PASS_BYTES, Feature.TOKENS]


def test_emulation_costs_the_rounding() -> None:
    """v6e has no fp8 unit: products take as long as with fp8 weights, and rounding is added."""
    wide, narrow = _prefill("f8e4m3fn"), _prefill("f8e4m3fn_w8a8")

    assert narrow.step.value_s > wide.step.value_s
    notes = precision_notes("f8e4m3fn_w8a8", "bf16", chip_of("v6e"))
    assert "emulates it" in " ".join(notes)


MODEL, N_EXPERTS, N_ACTIVE, N_DEVICES, N_LAYERS = "Qwen/Qwen3-30B-A3B", 128, 8, 4, 48
CLOCK_HZ = 1.75e9  # of v6e


def _experiment(batch: int, prompt: int, plan: str = "tp=4,ep=4") -> Experiment:
    program = Program(dispatch=DispatchForm.FUSED)
    return experiment_with(MODEL, plan, "v6e:2x2", batch=batch, prompt=prompt, program=program)


def _costs(experiment: Experiment, phase: Phase) -> Mapping[Cost, float]:
    """The costs of the routed experts in one layer."""
    costs = closed_of(experiment, phase)[1].costs[0, PARTS.index(Part.MOE_EXPERTS)]
    return dict(zip(Cost, costs / N_LAYERS, strict=True))


def _drawn(n_tokens: int) -> tuple[float, float]:
    """Tiles of the mean device, and experts with rows of the one that has most, in one layer; over random routings."""
    rng = np.random.default_rng(0)
    n_local = n_tokens // N_DEVICES
    tile_rows = min(TILE_ROWS, n_local)
    tiles, hits = [], []
    for _ in range(20):
        chosen = rng.random((n_tokens, N_EXPERTS)).argpartition(N_ACTIVE, axis=1)[:, :N_ACTIVE]
        of_block = np.arange(n_tokens) % n_local // FUSED_BLOCK_TOKENS
        for block in range(-(-n_local // FUSED_BLOCK_TOKENS)):
            rows = np.bincount(chosen[of_block == block].ravel(), minlength=N_EXPERTS)
            tiles.append(np.ceil(rows / tile_rows).sum() * tile_rows / TILE_ROWS / N_DEVICES)
            hits.append((rows > 0).reshape(N_DEVICES, -1).sum(axis=1).max())
    return sum(tiles) / 20, sum(hits) / 20


@pytest.mark.parametrize(
    ("batch", "prompt", "phase"),
    [(1, 4096, Phase.PREFILL), (2, 1024, Phase.PREFILL), (64, 128, Phase.DECODE)],
)
def test_tiles_and_reads_are_as_in_random_routing(batch: int, prompt: int, phase: Phase) -> None:
    experiment = _experiment(batch, prompt)
    costs = _costs(experiment, phase)
    n_tokens = batch * (prompt if phase is Phase.PREFILL else 1)
    tiles, hits = _drawn(n_tokens)
    facts = compiler_facts("v6e").fused_expert_cycles
    assert facts is not None
    row_cycles, tile_cycles = facts
    assert costs[Cost.KERNEL_S] * CLOCK_HZ / tile_cycles == pytest.approx(tiles, rel=0.1)
    n_rows = n_tokens * N_ACTIVE / N_DEVICES
    assert costs[Cost.SENT_S] * CLOCK_HZ / row_cycles == pytest.approx(n_rows)
    expert_bytes = 3 * 2048 * 768 * 2
    assert costs[Cost.CHOSEN_BYTES] / expert_bytes == pytest.approx(hits, rel=0.01)


def test_rows_of_a_tp_group_are_split_and_gathered_again() -> None:
    """4,096 tokens, 1,024 on each device, 8 rows of a token there and back."""
    run = meshscope.predict(
        MODEL, topology="v6e:2x2", plan="tp=4,ep=4", prompt=4096, dispatch="fused"
    )
    of_layer = run.collectives.filter(layer=0, phase="prefill").select("part", "kind", "wire_bytes")
    row_bytes = 2048 * 2
    assert [row for row in of_layer.rows() if row[0].startswith("moe")] == [
        ("moe.dispatch", "all_gather", 4 * 128 * 4 * 3 // 4),
        ("moe.dispatch", "all_to_all", 8192 * row_bytes * 3 // 4),
        ("moe.combine", "all_to_all", 8192 * row_bytes * 3 // 4),
        ("moe.combine", "all_gather", 4096 * row_bytes * 3 // 4),
    ]


def test_the_time_says_what_it_assumes() -> None:
    run = meshscope.predict(MODEL, topology="v6e:2x2", plan="tp=4,ep=4", dispatch="fused")
    assert "blocks of 512 tokens" in json.dumps(run.as_dict())
    plain = meshscope.predict(MODEL, topology="v6e:2x2", plan="tp=4,ep=4")
    assert "blocks of 512" not in json.dumps(plain.as_dict())


@table
def test_what_the_kernel_cannot_do_is_refused(topology: str, plan: str, message: str) -> None:
    with pytest.raises(MeshscopeError, match=message):
        meshscope.predict(MODEL, topology=topology, plan=plan, batch=2, dispatch="fused")


@pytest.mark.parametrize("dispatch", ["fused", "allgather"])
def test_dense_models_and_programs_have_no_dispatch_of_servers(dispatch: str) -> None:
    with pytest.raises(MeshscopeError, match="has no experts"):
        meshscope.predict("Qwen/Qwen3-8B", topology="v6e:2x2", plan="tp=4", dispatch=dispatch)
    with pytest.raises(MeshscopeError, match="no program of meshscope does"):
        meshscope.compile(MODEL, topology="v6e:2x2", plan="tp=4,ep=4", dispatch=dispatch)


def test_tokens_of_all_ranks_are_gathered_and_their_sums_scattered() -> None:
    """Two ranks of two devices, 512 tokens each, 8 experts with a weight for each token."""
    run = meshscope.predict(
        MODEL, topology="v6e:2x2", plan="dp=2,tp=2,ep=4", batch=2, prompt=512, dispatch="allgather"
    )
    of_layer = run.collectives.filter(layer=0, phase="prefill").select("part", "kind", "wire_bytes")
    n_bytes = 1024 * 2048 * 2
    assert [row for row in of_layer.rows() if row[0].startswith("moe")] == [
        ("moe.dispatch", "all_gather", 2 * 1024 * 8 * 4 // 2),
        ("moe.dispatch", "all_gather", n_bytes // 2),
        ("moe.combine", "all_reduce", n_bytes),
        ("moe.combine", "reduce_scatter", n_bytes // 2),
    ]


GPT_OSS = {"model": "openai/gpt-oss-20b", "topology": "v6e-8", "batch": 64, "prompt": 1024}


@table
def test_a_device_with_twice_the_rows(options, rows, exchange) -> None:
    experiment = request_of(
        ExperimentRequest, {**GPT_OSS, "routing_skew": 2.0, **options}
    ).experiment()
    assert device_load(experiment, Phase.PREFILL) == pytest.approx(rows, rel=0.01)
    assert exchange_load(experiment, Phase.PREFILL) == pytest.approx(exchange, rel=0.01)


@pytest.mark.slow
def test_skew_lengthens_rows_of_the_exchange_experts_and_the_step() -> None:
    even, skewed = (
        meshscope.predict(**GPT_OSS, plan="dp=8,ep=8", routing_skew=skew) for skew in (1.0, 4.0)
    )
    parts = ("moe.dispatch", "moe.combine")
    pairs = zip(even.collectives.to_dicts(), skewed.collectives.to_dicts(), strict=True)
    for one, other in pairs:
        factor = 4 if one["part"] in parts and one["kind"] == "all_to_all" else 1
        assert other["dur_s"] == pytest.approx(factor * one["dur_s"])
        assert other["payload_bytes"] == one["payload_bytes"]  # a mean over devices
    assert skewed.time.ttft_s > 2 * even.time.ttft_s
    assert skewed.time.tpot_s > even.time.tpot_s


@table
def test_a_load_that_no_routing_gives_is_refused(options: dict[str, Any], most: int) -> None:
    options = GPT_OSS | options
    meshscope.predict(**options, routing_skew=float(most))
    with pytest.raises(SpecError, match=f"Use 1 to {most}\\."):
        meshscope.predict(**options, routing_skew=float(most) + 0.1)


HLO = """HloModule step, is_scheduled=true, entry_computation_layout={(bf16[512,128]{1,0})->bf16[512,128]{1,0}}, num_partitions=8

ENTRY main {
  p = bf16[512,128]{1,0} parameter(0)
  a = bf16[512,128]{1,0} all-to-all(p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, metadata={op_name="jit(f)/prefill/layer0/moe.dispatch/all_to_all"}
  ROOT b = bf16[512,128]{1,0} all-to-all(a), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, metadata={op_name="jit(f)/prefill/layer0/attn/all_to_all"}
}
"""


def test_the_compiled_exchange_with_experts_takes_longer_and_others_do_not() -> None:
    compiled = module_collectives(
        parse_hlo(HLO, "step"), mesh=Mesh(axes=(("dp", 8),)), crosses_slices=lambda _: None
    )
    exchange, other = [(operation,) for operation in compiled.scheduled]
    for operations, factor in ((exchange, 3), (other, 1)):
        one, longer = (
            scheduled_collective(operations, parse_topology("v6e-8"), exchange_load=load)
            for load in (1.0, 3.0)
        )
        assert longer.seconds.value_s == pytest.approx(factor * one.seconds.value_s)
