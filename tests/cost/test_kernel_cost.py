"""What kernels compute, by the operands that the compiler writes down."""

import numpy as np
import pytest

from meshscope.cost.features import expert_load
from meshscope.cost.kernel_cost import ExpertLoad, known_flops, ragged_dot_cost, stated_cost
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


def test_splash_attention_computes_the_blocks_on_and_below_the_diagonal():
    """Batch 8, 8 heads, 1,024 positions in blocks of 512: three of four blocks; 4 flops a pair and width."""
    shapes = "s8[1,2,2];s8[1,2,2];bf16[8,8,1024,128];bf16[8,1,1024,128];bf16[8,1,1024,128]"
    assert known_flops(*_kernel(shapes, "splash_mha_fwd.3")) == 4 * 64 * 1024 * 1024 * 128 * 3 // 4


def test_ragged_dot_multiplies_the_rows_that_experts_have():
    kernel = _kernel("s32[5];bf16[4096,128];bf16[4,128,256]", "ragged-dot-none.2")
    assert known_flops(*kernel) == 2 * 4096 * 128 * 256


def test_ragged_dot_counts_for_the_rows_and_experts_that_are_expected():
    """A quarter of the rows, 1.5 of the four experts; 20 experts in a stack of layers are read no more."""
    load = ExpertLoad(rows=1024, experts=1.5)
    expert, rows, result = 2 * 128 * 256, 2 * 4096 * 128, 16  # the kernel here tells 8 numbers
    of_four, of_stack = (
        ragged_dot_cost(
            *_kernel(f"s32[5];bf16[4096,128];bf16[{n},128,256]", "ragged-dot-none.2"), load
        )
        for n in (4, 20)
    )
    assert of_four == (2 * 1024 * 128 * 256, 1.5 * expert + (rows + result) / 4)
    assert of_stack == of_four
    assert ragged_dot_cost(*_kernel("bf16[64,64]", "mine.1"), load) is None


def test_no_more_rows_and_experts_are_counted_than_there_are():
    kernel = _kernel("s32[5];bf16[64,128];bf16[4,128,256]", "ragged-dot-none.2")
    found = ragged_dot_cost(*kernel, ExpertLoad(rows=9999, experts=7))
    assert found == (2 * 64 * 128 * 256, 2 * (4 * 128 * 256 + 64 * 128 + 8))


def test_another_kernel_is_not_guessed_at():
    assert known_flops(*_kernel("bf16[64,64]", "mine.1")) is None


def test_cost_that_the_author_states_is_taken_where_it_is_not_zero():
    config = ', backend_config={{"cost_estimate":{{"flops":"{}","bytes_accessed":"{}"}}}}'
    assert stated_cost(_kernel("f32[8]", "a", config.format(7, 9))[1]) == (7, 9)
    assert stated_cost(_kernel("f32[8]", "a", config.format(0, 0))[1]) is None


@pytest.mark.parametrize(
    ("plan", "rows_share"), [("dp=2,tp=4,ep=8", 8), ("tp=8", 1), ("dp=8,ep=8", 8)]
)
def test_load_of_experts_is_that_of_all_tokens_that_may_choose_them(
    plan: str, rows_share: int
) -> None:
    """Of 128 experts a token chooses 8; a device has all of them, cut, or 16."""
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
    # Brute force: every token draws 8 of 128 experts, and each device has the first ones.
    n_local, draws = 128 // experiment.plan.ep, np.random.default_rng(3)
    drawn = [
        len({e for _ in range(8) for e in draws.choice(128, 8, replace=False) if e < n_local})
        for _ in range(2000)
    ]
    assert decode.experts == pytest.approx(np.mean(drawn), rel=0.02)
