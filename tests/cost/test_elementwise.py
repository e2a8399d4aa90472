"""Published times of elementwise ops beside the modeled times."""

from typing import NamedTuple

import pytest

from meshscope.cost.op_cost import OpCost, OpCostModel
from meshscope.cost.rates import rates_of
from meshscope.events.step_time import TimeBasis
from meshscope.readers.hlo.collectives import module_collectives
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.spec.hardware.chips import chip_of
from meshscope.spec.plan.plan import parse_plan


class MeasuredOp(NamedTuple):
    """An instruction in compiled HLO, the compiler's estimate, and its measured time."""

    chip: str
    result: str
    operands: tuple[str, ...]
    opcode: str
    cycles: int
    measured_us: float


# Measured: openxla/xprof, a v6e profile (whose HLO has these estimates) and the op table of a MaxText step
# on v5p (estimates of libtpu 0.0.42.1 for the same arrays).
TILED = "{1,0:T(8,128)}"
MEASURED = {
    "v6e broadcast": MeasuredOp(
        "v6e",
        "f32[5,1024,1024,256]{3,2,1,0:T(8,128)}",
        ("f32[]{:T(128)}",),
        "broadcast",
        27_402_272,
        4443.8,
    ),
    "v6e add": MeasuredOp(
        "v6e",
        "f32[5,1024,1024,256]{3,2,1,0:T(8,128)}",
        ("f32[5,1024,1024,256]{3,2,1,0:T(8,128)}",),
        "negate",
        14_180_608,
        7917.5,
    ),
    "v5p broadcast": MeasuredOp(
        "v5p",
        "f32[16,512,7168]{2,0,1:T(8,128)}",
        ("f32[]{:T(128)}",),
        "broadcast",
        648_725,
        110.6,
    ),
    "v5p convert": MeasuredOp(
        "v5p",
        "bf16[32000,512]{1,0:T(8,128)(2,1)}",
        ("f32[32000,512]{1,0:T(8,128)}",),
        "convert",
        256_375,
        45.7,
    ),
}


def _op_cost(op: MeasuredOp) -> OpCost:
    names = [f"x{i}" for i in range(len(op.operands))]
    parameters = "\n".join(
        f"  %{name} = {shape} parameter({i})"
        for i, (name, shape) in enumerate(zip(names, op.operands, strict=True))
    )
    text = f"""\
HloModule m, is_scheduled=true

ENTRY %main () -> {op.result} {{
{parameters}
  ROOT %y = {op.result} {op.opcode}({", ".join("%" + name for name in names)}), dimensions={{}}, \
backend_config={{"window_config":{{"estimated_cycles":"{op.cycles}"}}}}
}}
"""
    module = parse_hlo(text, "test.hlo")
    assert module.entry is not None
    collectives = module_collectives(module, mesh=parse_plan("tp=1").mesh, crosses_slices=False)
    model = OpCostModel(collectives.flow, rates_of(chip_of(op.chip)))
    cost = model.cost(module.entry, module.entry.root)
    assert cost is not None
    return cost


@pytest.mark.parametrize("op", MEASURED.values(), ids=list(MEASURED))
def test_large_op_takes_its_measured_time(op: MeasuredOp):
    """The fraction of the HBM rate is the median of 22 ops from 58 to 89 %, hence the tolerance."""
    time = _op_cost(op).time
    assert time.seconds.value_s == pytest.approx(op.measured_us * 1e-6, rel=0.15)
    assert time.seconds.lower_s <= op.measured_us * 1e-6 <= time.seconds.upper_s


@pytest.mark.parametrize("op", MEASURED.values(), ids=list(MEASURED))
def test_time_is_at_most_the_compiler_estimate(op: MeasuredOp):
    cycles = op.cycles // 10
    cost = _op_cost(op._replace(cycles=cycles))
    assert cost.time.basis is TimeBasis.COMPILER_CYCLES
    assert cost.time.seconds.value_s == cycles / (chip_of(op.chip).clock_hz or 0)


@pytest.mark.parametrize(
    ("result", "operand"),
    [
        ("bf16[4,4,2176,2,128]{4,3,2,1,0:T(2,128)(2,1)}",) * 2,
        ("bf16[64,1024,1024]{2,1,0:T(8,128)(2,1)}", "bf16[64,1024,1024]{2,1,0:T(4,128)(2,1)}"),
        ("bf16[64,1024,512]{2,1,0:T(8,128)(2,1)}", "bf16[64,1024,512]{1,2,0:T(8,128)(2,1)}"),
        ("bf16[8,128,512]{2,1,0:T(8,128)(2,1)}",) * 2,
    ],
    ids=["partial tiles", "another tile", "another dimension along the lanes", "small"],
)
def test_relayouts_and_small_ops_take_the_compiler_cycles(result: str, operand: str):
    cost = _op_cost(MeasuredOp("v6e", result, (operand,), "copy", 1_000_000, 0.0))
    assert cost.time.basis is TimeBasis.COMPILER_CYCLES


def test_vector_work_bounds_an_op_in_vmem():
    """32 Mi exponentials, one register of 1024 a cycle: 18.7 us at 1.75 GHz; the bytes would take 6."""
    shape = "f32[8192,4096]{1,0:T(8,128)S(1)}"
    cost = _op_cost(MeasuredOp("v6e", shape, (shape,), "exponential", 100_000_000, 0.0))
    assert cost.time.seconds.value_s == pytest.approx(8192 * 4096 / 1024 / 1.75e9, rel=0.2)
