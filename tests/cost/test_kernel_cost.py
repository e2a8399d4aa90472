"""Kernel costs from operands, declarations and the expected expert load."""

import numpy as np
import pytest

from meshscope.cost.expert_load import ExpertLoad, expert_load
from meshscope.cost.kernel_cost import declared_cost, known_kernel_flops, ragged_dot_cost
from meshscope.events.enums import Phase
from meshscope.readers.hlo.module import Computation, Instruction
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.spec.experiment import experiment_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import read_model
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.workload import Workload


def _kernel(operands: str, name: str, config: str = "") -> tuple[Computation, Instruction]:
    names = ", ".join(f"%p{i}" for i in range(operands.count(";") + 1))
    lines = "".join(
        f"  %p{i} = {shape} parameter({i})\n" for i, shape in enumerate(operands.split(";"))
    )
    text = (
        "HloModule m, is_scheduled=true, num_partitions=1\n\nENTRY %main () -> f32[] {\n"
        f"{lines}  ROOT %{name} = bf16[8] custom-call({names}), "
        f'custom_call_target="tpu_custom_call"{config}\n}}\n'
    )
    entry = parse_hlo(text, "test.hlo").entry
    assert entry is not None
    return entry, entry.root


def test_splash_attention_computes_the_causal_blocks():
    """Batch 8, 8 heads, 1,024 positions in blocks of 512: three of four blocks; 4 flops a pair and width."""
    shapes = "s8[1,2,2];s8[1,2,2];bf16[8,8,1024,128];bf16[8,1,1024,128];bf16[8,1,1024,128]"
    assert (
        known_kernel_flops(*_kernel(shapes, "splash_mha_fwd.3"))
        == 4 * 64 * 1024 * 1024 * 128 * 3 // 4
    )


def test_windowed_splash_attention_computes_the_blocks_of_its_band():
    """gpt-oss on v6e-8 with tp=8: libtpu's grid has 8 rows of 2 blocks, so 15 of 64 blocks are computed."""
    grid, keys = "s8[1,8,2]", "bf16[8,1,4096,64]"
    shapes = f"{grid};{grid};bf16[8,8,4096,64];{keys};{keys}"
    n_pairs = 8 * 8 * 15 * 512 * 512
    assert known_kernel_flops(*_kernel(shapes, "splash_mha_fwd.2")) == 4 * 64 * n_pairs


def test_ragged_dot_multiplies_all_rows():
    kernel = _kernel("s32[5];bf16[4096,128];bf16[4,128,256]", "ragged-dot-none.2")
    assert known_kernel_flops(*kernel) == 2 * 4096 * 128 * 256


def test_ragged_dot_counts_the_expected_rows_and_experts():
    """A quarter of the rows and 1.5 of four experts; a stack of 20 experts reads no more."""
    load = ExpertLoad(rows=1024, experts=1.5)
    expert, rows, result = (
        2 * 128 * 256,
        2 * 4096 * 128,
        16,
    )  # the result of this kernel has 8 numbers
    of_four, of_stack = (
        ragged_dot_cost(
            *_kernel(f"s32[5];bf16[4096,128];bf16[{n},128,256]", "ragged-dot-none.2"), load
        )
        for n in (4, 20)
    )
    assert of_four == (2 * 1024 * 128 * 256, 1.5 * expert + (rows + result) / 4)
    assert of_stack == of_four
    assert ragged_dot_cost(*_kernel("bf16[64,64]", "mine.1"), load) is None


def test_rows_and_experts_are_capped():
    kernel = _kernel("s32[5];bf16[64,128];bf16[4,128,256]", "ragged-dot-none.2")
    cost = ragged_dot_cost(*kernel, ExpertLoad(rows=9999, experts=7))
    assert cost == (2 * 64 * 128 * 256, 2 * (4 * 128 * 256 + 64 * 128 + 8))


def test_unknown_kernel_has_no_flops():
    assert known_kernel_flops(*_kernel("bf16[64,64]", "mine.1")) is None


def test_declared_cost_of_zero_is_ignored():
    config = ', backend_config={{"cost_estimate":{{"flops":"{}","bytes_accessed":"{}"}}}}'
    assert declared_cost(_kernel("f32[8]", "a", config.format(7, 9))[1]) == (7, 9)
    assert declared_cost(_kernel("f32[8]", "a", config.format(0, 0))[1]) is None


@pytest.mark.parametrize(
    ("plan", "rows_share"), [("dp=2,tp=4,ep=8", 8), ("tp=8", 1), ("dp=8,ep=8", 8)]
)
def test_expert_load_counts_all_tokens_that_may_choose_an_expert(
    plan: str, rows_share: int
) -> None:
    """A token chooses 8 of 128 experts; a device has a shard of all, or 16."""
    experiment = experiment_of(
        model=read_model("Qwen/Qwen3-30B-A3B"),
        plan=parse_plan(plan),
        topology=parse_topology("v6e-8"),
        workload=Workload(batch=8, prompt=256),
    )
    prefill, decode = (expert_load(experiment, phase) for phase in Phase)
    assert prefill is not None
    assert decode is not None
    assert prefill.rows == 8 * 256 * 8 // rows_share
    assert prefill.experts == pytest.approx(128 / experiment.plan.ep)
    assert decode.rows == 8 * 8 // rows_share
    # Brute force: every token draws 8 of 128 experts; the device has the first ones.
    n_local, draws = 128 // experiment.plan.ep, np.random.default_rng(3)
    drawn = [
        len({e for _ in range(8) for e in draws.choice(128, 8, replace=False) if e < n_local})
        for _ in range(2000)
    ]
    assert decode.experts == pytest.approx(np.mean(drawn), rel=0.02)
