"""Passes over arrays: measured ones, by others, beside what the walk makes of the compiler's estimates."""

from typing import NamedTuple

import pytest

from meshscope.cost.op_cost import OpCosts, Work
from meshscope.cost.rates import rates_of
from meshscope.events.step_time import TimeBasis
from meshscope.readers.hlo.collectives import module_collectives
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.spec.hardware.chips import chip_of
from meshscope.spec.plan.plan import parse_plan


class Pass(NamedTuple):
    """An instruction as the compiler writes it, its estimate, and what was measured."""

    chip: str
    result: str
    operands: tuple[str, ...]
    opcode: str
    cycles: int
    measured_us: float


# Measured: openxla/xprof, a v6e profile (whose own text has these estimates) and the table of a MaxText
# step on v5p, whose text has none; those are libtpu 0.0.42.1's for the same arrays.
TILED = "{1,0:T(8,128)}"
MEASURED = {
    "v6e broadcast": Pass(
        "v6e",
        "f32[5,1024,1024,256]{3,2,1,0:T(8,128)}",
        ("f32[]{:T(128)}",),
        "broadcast",
        27_402_272,
        4443.8,
    ),
    "v6e add": Pass(
        "v6e",
        "f32[5,1024,1024,256]{3,2,1,0:T(8,128)}",
        ("f32[5,1024,1024,256]{3,2,1,0:T(8,128)}",),
        "negate",
        14_180_608,
        7917.5,
    ),
    "v5p broadcast": Pass(
        "v5p",
        "f32[16,512,7168]{2,0,1:T(8,128)}",
        ("f32[]{:T(128)}",),
        "broadcast",
        648_725,
        110.6,
    ),
    "v5p convert": Pass(
        "v5p",
        "bf16[32000,512]{1,0:T(8,128)(2,1)}",
        ("f32[32000,512]{1,0:T(8,128)}",),
        "convert",
        256_375,
        45.7,
    ),
}


def _work(one: Pass) -> Work:
    names = [f"x{i}" for i in range(len(one.operands))]
    parameters = "\n".join(
        f"  %{name} = {shape} parameter({i})"
        for i, (name, shape) in enumerate(zip(names, one.operands, strict=True))
    )
    text = f"""\
HloModule m, is_scheduled=true

ENTRY %main () -> {one.result} {{
{parameters}
  ROOT %y = {one.result} {one.opcode}({", ".join("%" + name for name in names)}), dimensions={{}}, \
backend_config={{"window_config":{{"estimated_cycles":"{one.cycles}"}}}}
}}
"""
    module = parse_hlo(text, "test.hlo")
    assert module.entry is not None
    found = module_collectives(module, mesh=parse_plan("tp=1").mesh, crosses_slices=False)
    work = OpCosts(found.flow, rates_of(chip_of(one.chip))).work(module.entry, module.entry.root)
    assert work is not None
    return work


@pytest.mark.parametrize("one", MEASURED.values(), ids=list(MEASURED))
def test_large_pass_takes_what_was_measured(one: Pass):
    """The share of the HBM's rate is a median of 22 passes from 58 to 89 %, hence the tolerance."""
    price = _work(one).price
    assert price.seconds.value_s == pytest.approx(one.measured_us * 1e-6, rel=0.15)
    assert price.seconds.lower_s <= one.measured_us * 1e-6 <= price.seconds.upper_s


@pytest.mark.parametrize("one", MEASURED.values(), ids=list(MEASURED))
def test_pass_never_takes_longer_than_the_compiler_says(one: Pass):
    cycles = one.cycles // 10
    work = _work(one._replace(cycles=cycles))
    assert work.price.basis is TimeBasis.COMPILER_CYCLES
    assert work.price.seconds.value_s == cycles / (chip_of(one.chip).clock_hz or 0)


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
def test_what_is_laid_out_anew_or_small_takes_the_cycles_of_the_compiler(result: str, operand: str):
    work = _work(Pass("v6e", result, (operand,), "copy", 1_000_000, 0.0))
    assert work.price.basis is TimeBasis.COMPILER_CYCLES


def test_what_the_vector_unit_computes_bounds_a_pass_in_vmem():
    """32 Mi exponentials, one register of 1024 a cycle: 18.7 us at 1.75 GHz; the bytes would take 6."""
    shape = "f32[8192,4096]{1,0:T(8,128)S(1)}"
    work = _work(Pass("v6e", shape, (shape,), "exponential", 100_000_000, 0.0))
    assert work.price.seconds.value_s == pytest.approx(8192 * 4096 / 1024 / 1.75e9, rel=0.2)
