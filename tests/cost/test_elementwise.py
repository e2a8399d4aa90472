"""Published times of elementwise ops beside the modeled times."""

from pathlib import Path
from typing import NamedTuple

import pytest
from made_hlo import module_text
from tables import read_cases

from meshscope.cost.op_cost import OpCost, OpCostModel
from meshscope.cost.rates import rates_of
from meshscope.events.step_time import Activity, TimeBasis
from meshscope.hardware.chips import chip_of
from meshscope.plans.plan import parse_plan
from meshscope.readers.hlo.collectives import module_collectives
from meshscope.readers.hlo.parse import parse_hlo


class MeasuredOp(NamedTuple):
    """An instruction in compiled HLO, the compiler's estimate, and its measured time."""

    chip: str
    opcode: str
    result: str
    operand: str
    cycles: int
    measured_us: float


MEASURED = read_cases(Path(__file__).with_name("measured_ops.csv"), MeasuredOp)


def _op_cost(op: MeasuredOp) -> OpCost:
    entry = f"""\
  %x = {op.operand} parameter(0)
  ROOT %y = {op.result} {op.opcode}(%x), dimensions={{}}, \
backend_config={{"window_config":{{"estimated_cycles":"{op.cycles}"}}}}
"""
    return _root_cost(module_text(entry, header=""), op.chip)


def _root_cost(text: str, chip: str) -> OpCost:
    module = parse_hlo(text, "test.hlo")
    collectives = module_collectives(module, mesh=parse_plan("tp=1").mesh, crosses_slices=False)
    model = OpCostModel(collectives.flow, rates_of(chip_of(chip)))
    return model.cost(module.entry, module.entry.root)


@pytest.mark.parametrize("op", MEASURED, ids=lambda op: f"{op.chip} {op.opcode} {op.result}")
def test_op_takes_its_measured_time_and_at_most_the_compiler_estimate(op: MeasuredOp):
    """The rates of single ops vary by a fifth, hence the tolerance."""
    seconds = _op_cost(op).time.seconds
    assert seconds.value_s == pytest.approx(op.measured_us * 1e-6, rel=0.17)
    assert seconds.lower_s <= op.measured_us * 1e-6 <= seconds.upper_s
    cycles = op.cycles // 10
    time = _op_cost(op._replace(cycles=cycles)).time
    assert time.basis is TimeBasis.COMPILER_CYCLES
    assert time.seconds.value_s == cycles / (chip_of(op.chip).clock_hz or 0)


def test_op_in_vmem_takes_its_work_without_the_latency_of_the_hbm():
    shape = "f32[8,1024]{1,0:T(8,128)S(1)}"
    small = _op_cost(MeasuredOp("v5e", "negate", shape, shape, 1830, 0.0))
    assert 0.15e-6 < small.time.seconds.value_s < 0.25e-6
    assert small.time.hbm_s == 0


def test_vector_work_bounds_an_op_in_vmem():
    """A norm of 2 MB in VMEM, estimated at 14.6 us, of which 0.3 are vector work."""
    shape = "bf16[128,8192]{1,0:T(8,128)(2,1)S(1)}"
    cost = _op_cost(MeasuredOp("v5e", "multiply", shape, shape, 21_872, 0.0))
    assert cost.time.seconds.value_s == pytest.approx(14.6e-6 * 0.3, rel=0.1)


def _row_product(memory: str) -> OpCost:
    """A decode product of one row in a program of v6e, with 3,584 x 4,096 weights in HBM or VMEM."""
    weights, row = f"bf16[3584,4096]{{1,0:T(8,128)(2,1){memory}}}", "{0:T(1024)(128)(2,1)S(1)}"
    fused = f"""
%fused (w: bf16[3584,4096], x: bf16[3584]) -> bf16[4096] {{
  %x = bf16[3584]{row} parameter(1)
  %wide = bf16[3584,4096]{{1,0:T(8,128)(2,1)}} broadcast(%x), dimensions={{0}}
  %w = {weights} parameter(0)
  %terms = bf16[3584,4096]{{1,0:T(8,128)(2,1)}} multiply(%wide, %w)
  %zero = bf16[] constant(0)
  ROOT %sum = bf16[4096]{row} reduce(%terms, %zero), dimensions={{0}}, \
to_apply=%add, metadata={{op_name="jit(decode)/decode/layer0/mlp/dot_general"}}
}}
"""
    entry = f"""\
  %w.1 = {weights} parameter(0)
  %x.1 = bf16[3584]{row} parameter(1)
  ROOT %y = bf16[4096]{row} fusion(%w.1, %x.1), kind=kLoop, calls=%fused, \
backend_config={{"window_config":{{"estimated_cycles":"95430"}}}}
"""
    return _root_cost(module_text(entry, fused, header=""), "v6e")


def test_a_product_of_one_row_takes_the_bundles_of_its_loop_or_the_time_of_its_bytes():
    """15,624 bundles of libtpu 0.0.42.1, of which the compiler estimates six times as many."""
    cost = _row_product("S(1)")
    assert cost.time.seconds.value_s == pytest.approx(15_624 / 1.75e9, rel=0.1)
    assert (cost.flops, cost.activity) == (2 * 3584 * 4096, Activity.MATMUL)
    bytes_s = 2 * 3584 * 4096 / rates_of(chip_of("v6e")).hbm_bytes_per_s
    assert bytes_s / 0.95 < _row_product("").time.seconds.value_s < bytes_s / 0.85
