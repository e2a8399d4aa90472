"""What kernels compute, by the operands that the compiler writes down."""

from meshscope.arch.config import read_model
from meshscope.hardware.topology import parse_topology
from meshscope.hlo.module import Computation, Instruction
from meshscope.hlo.parse import parse_hlo
from meshscope.plan.experiment import experiment_of
from meshscope.plan.plan import parse_plan
from meshscope.plan.workload import Workload
from meshscope.table.kinds import Phase
from meshscope.timing.kernels import expected_cost, known_flops, stated_cost
from meshscope.timing.terms import balanced_rows


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
    assert known_flops(*kernel, 64) == 2 * 64 * 128 * 256
    assert known_flops(*kernel, 9999) == 2 * 4096 * 128 * 256


def test_ragged_dot_that_states_all_its_room_counts_for_the_rows_that_are_expected():
    """A quarter of the rows: a quarter of the flops; of the bytes all weights, and a quarter of the rows'."""
    kernel = _kernel("s32[5];bf16[4096,128];bf16[4,128,256]", "ragged-dot-none.2")
    weights, rows = 2 * 4 * 128 * 256, 2 * 4096 * 128
    stated = (2 * 4096 * 128 * 256, weights + rows)
    flops, n_bytes = expected_cost(*kernel, stated, 1024)
    assert flops == stated[0] // 4
    assert (
        n_bytes == weights + rows // 4 - (3 * 16) // 4
    )  # the kernel here tells 8 numbers as result
    assert expected_cost(*kernel, stated, None) == stated
    assert expected_cost(*_kernel("bf16[64,64]", "mine.1"), stated, 4) == stated


def test_another_kernel_is_not_guessed_at():
    assert known_flops(*_kernel("bf16[64,64]", "mine.1")) is None


def test_cost_that_the_author_states_is_taken_where_it_is_not_zero():
    config = ', backend_config={{"cost_estimate":{{"flops":"{}","bytes_accessed":"{}"}}}}'
    assert stated_cost(_kernel("f32[8]", "a", config.format(7, 9))[1]) == (7, 9)
    assert stated_cost(_kernel("f32[8]", "a", config.format(0, 0))[1]) is None


def test_balanced_rows_are_those_of_all_tokens_over_all_devices():
    experiment = experiment_of(
        model=read_model("Qwen/Qwen3-30B-A3B"),
        plan=parse_plan("dp=2,tp=4,ep=8"),
        topology=parse_topology("v6e-8"),
        workload=Workload(batch=8, prompt=256),
    )
    assert balanced_rows(experiment, Phase.PREFILL) == 8 * 256 * 8 // 8
    assert balanced_rows(experiment, Phase.DECODE) == 8
