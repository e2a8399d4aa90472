"""Times of single operations against published rates, measured ops, and cycles of libtpu's profiles."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from made_hlo import module_text, timed_text
from tables import read_cases, stored, table

from meshscope.analysis.roofline import BindingResource, step_floor
from meshscope.api.flags import flag_lines
from meshscope.cost.array_traffic import products
from meshscope.cost.op_cost import OpCost, OpCostModel
from meshscope.cost.rates import ArrayTraffic, Rates, efficiency_of, rates_of, row_s
from meshscope.cost.steps import NO_MEASURED_BASIS
from meshscope.events.enums import Phase
from meshscope.events.measured import Flag, FlagEffect
from meshscope.events.step_time import Activity, StepTime, TimeBasis
from meshscope.hardware.chips import chip_of
from meshscope.plans.plan import parse_plan
from meshscope.readers.hlo.collectives import module_collectives
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.parse import parse_hlo

GIB = 2**30
COPIED = ArrayTraffic(hbm_bytes=GIB, hbm_written_bytes=GIB // 2)

TERA = {"flops": 1e12}
# Seconds for a GiB that is read, or a triad (RRZE-HPC/gpu-benches@1038c5d, a100_80; AI-Hypercomputer's
# microbenchmarks of Trillium and Ironwood, one of a chip's two cores), and for a TFLOP at the best shape
# (stas00/ml-engineering@b9e2972), or in 8192^3 on a v6e.
MEASURED_S = [
    *(("a100", {"moved": COPIED}, GIB / 1.794e12), ("v6e", {"moved": COPIED}, GIB / 1.3596e12)),
    *(("tpu7x", {"moved": COPIED}, GIB / 3.2e12), ("a100", TERA, 1 / 271.2)),
    *(("h100", TERA, 1 / 794.5), ("v6e", TERA, 1 / 754)),
]


@pytest.mark.parametrize(("chip", "work", "measured_s"), MEASURED_S)
def test_measured_times_are_in_the_interval(chip: str, work: Any, measured_s: float) -> None:
    seconds = rates_of(chip_of(chip)).roofline(**work).seconds
    assert seconds.low_s <= measured_s <= seconds.high_s
    assert seconds.value_s == pytest.approx(measured_s, rel=0.1)


def test_gpus_reach_more_of_their_hbm_rate_than_tpus() -> None:
    tpu = Rates(flops_per_s=1e15, hbm_bytes_per_s=1e12, clock_hz=None)
    gpu = replace(tpu, efficiency=rates_of(chip_of("h100")).efficiency)
    ratio = gpu.roofline(moved=COPIED).seconds.value_s / tpu.roofline(moved=COPIED).seconds.value_s
    assert ratio == pytest.approx((0.5 / 0.91 + 0.5 / 0.76) ** -1 / 0.95)
    unknown_s = gpu.unknown(COPIED).seconds.value_s
    assert unknown_s == pytest.approx(gpu.roofline(moved=COPIED).seconds.value_s)


def test_the_closed_form_of_a_gpu_uses_the_same_efficiency() -> None:
    chip = chip_of("h200")
    rates = rates_of(chip)
    efficiency = efficiency_of(chip)
    peak, constants = rates.efficiency, efficiency.constants
    assert (constants.matmul, constants.weights) == (peak.matmul, peak.hbm)
    assert (efficiency.fast.matmul, efficiency.slow.matmul) == (0.9, 0.7)
    assert not efficiency.streams_weights
    assert f"{peak.hbm:.0%} of the HBM rate" in efficiency.source


class MeasuredOp(NamedTuple):
    """An instruction in compiled HLO, the compiler's estimate, and its measured time."""

    chip: str
    opcode: str
    result: str
    operand: str
    cycles: int
    measured_us: float


MEASURED = read_cases(Path(__file__).with_name("measured_ops.csv"), MeasuredOp)


def _text(name: str, /, *, header: str = "", **values: str) -> str:
    """The entry and the computations with this name, where <X> has the value of X."""
    texts = stored(Path(__file__).with_suffix(".yaml"))["texts"][name]
    for key, value in values.items():
        texts = [text.replace(f"<{key}>", value) for text in texts]
    return module_text(*texts, header=header)


def _op_cost(op: MeasuredOp) -> OpCost:
    values = {name: str(value) for name, value in op._asdict().items()}
    return _root_cost(_text("op", **values), op.chip)


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


def test_ops_in_vmem_take_their_work_without_the_latency_of_the_hbm():
    """A norm of 2 MB in VMEM is estimated at 14.6 us, of which 0.3 are vector work."""
    shape = "f32[8,1024]{1,0:T(8,128)S(1)}"
    small = _op_cost(MeasuredOp("v5e", "negate", shape, shape, 1830, 0.0))
    assert 0.15e-6 < small.time.seconds.value_s < 0.25e-6
    assert small.time.hbm_s == 0
    shape = "bf16[128,8192]{1,0:T(8,128)(2,1)S(1)}"
    cost = _op_cost(MeasuredOp("v5e", "multiply", shape, shape, 21_872, 0.0))
    assert cost.time.seconds.value_s == pytest.approx(14.6e-6 * 0.3, rel=0.1)


def _row_product(memory: str) -> OpCost:
    """A decode product of one row in a program of v6e, with 3,584 x 4,096 weights in HBM or VMEM."""
    return _root_cost(_text("row product", memory=memory), "v6e")


def test_a_product_of_one_row_takes_the_bundles_of_its_loop_or_the_time_of_its_bytes():
    """15,624 bundles of libtpu 0.0.42.1, of which the compiler estimates six times as many."""
    cost = _row_product("S(1)")
    assert cost.time.seconds.value_s == pytest.approx(15_624 / 1.75e9, rel=0.1)
    assert (cost.flops, cost.activity) == (2 * 3584 * 4096, Activity.MATMUL)
    bytes_s = 2 * 3584 * 4096 / rates_of(chip_of("v6e")).hbm_bytes_per_s
    assert bytes_s / 0.95 < _row_product("").time.seconds.value_s < bytes_s / 0.85


# 128 heads, each [1024, 128] x [128, 512].
HEADS, ROWS, WIDTH, RANK = 128, 1024, 128, 512


@table
def test_a_batched_product_has_the_flops_of_its_heads(left, right, result, product) -> None:
    """Each head counts once, whatever window it is written with."""
    text = _text("product", left=left, right=right, result=result, product=product)
    module = parse_hlo(text, "test.hlo")
    rank = 7168 if "7168" in result else RANK
    in_entry = products(Dataflow(module), module.entry, module.entry.root)
    assert sum(p.flops for p in in_entry) == 2 * HEADS * ROWS * WIDTH * rank


def test_a_product_of_cublas_has_its_flops_and_its_workspace_no_bytes() -> None:
    """As XLA compiled queries, keys and values of Qwen3-8B on an H200 (JAX 0.11.2)."""
    cost = _root_cost(_text("cublas"), "h200")
    assert cost.flops == 2 * 1024 * 4096 * 6144
    assert cost.hbm_bytes == 2 * (1024 * 4096 + 4096 * 6144 + 1024 * 6144)
    assert (cost.activity, cost.is_known) == (Activity.MATMUL, True)


CLOCK_HZ = 1.75e9


def _step(text: str, topology: str = "v6e:1x1") -> StepTime:
    return timed_text(text, topology, "tp=1").time


@table
def test_rows_from_hbm_take_the_cycles_of_the_profile(width, topology, cycles) -> None:
    """The cycles of libtpu's static profile of 4,096 rows from a table of 32,768; two cores of v5p share them."""
    step = _step(_text("rows", width=str(width), space=""), topology)
    assert step.step.value_s == pytest.approx(cycles / CLOCK_HZ, rel=0.02)
    assert [spent.activity for spent in step.activities] == [Activity.GATHER]


def test_rows_of_experts_are_sorted_and_those_of_tables_looked_up() -> None:
    of_part = {
        part: _text("rows", width="2048", space="").replace(
            "calls=%fused", f'calls=%fused, metadata={{op_name="jit(f)/{part}/gather"}}'
        )
        for part in ("embed", "moe.dispatch")
    }
    activities = {part: _step(text).activities[0].activity for part, text in of_part.items()}
    assert activities == {"embed": Activity.GATHER, "moe.dispatch": Activity.BY_EXPERT}


def test_rows_from_vmem_take_fewer_cycles_until_their_bytes_bind() -> None:
    steps = (_step(_text("rows", width="2048", space=space)) for space in ("S(1)", ""))
    from_vmem, from_hbm = (step.step.value_s for step in steps)
    assert from_vmem < 0.3 * from_hbm
    assert from_vmem >= 4096 * 2048 * 2 / 1.638e12  # written to HBM


def test_a_sort_takes_the_cycles_of_the_profile() -> None:
    """32,768 keys with their positions: 19,480 cycles in libtpu's static profile (v6e)."""
    step = _step(_text("sort"))
    assert step.step.value_s == pytest.approx(19_480 / CLOCK_HZ, rel=0.02)
    assert [spent.activity for spent in step.activities] == [Activity.SORT]


@table
def test_only_kernels_of_attention_and_experts_have_their_name(
    name, scope, activity: Activity
) -> None:
    step = _step(_text("kernel", name=name, scope=scope))
    assert [spent.activity for spent in step.activities] == [activity]


def test_a_collective_that_the_time_lacks_raises_no_floor() -> None:
    """The step was 0.53 x its link floor: nothing says between which devices the bytes go."""
    text = _text("send", header=", num_partitions=4")
    time = timed_text(text, "v6e:2x2", "tp=4").time
    floor = step_floor(time, chip_of("v6e"))
    assert (floor.binding, floor.link_s) == (BindingResource.HBM, 0.0)
    assert floor.floor_s < time.step.value_s


def test_without_a_clock_a_row_takes_the_time_of_its_bytes() -> None:
    rates = rates_of(chip_of("h100"))
    assert row_s(rates, 2048, 2.0) == pytest.approx(2 * 2 * 2048 / rates.hbm_bytes_per_s)


NOTE = "times of gathers and scatters on SparseCores, 1 here, have no measured basis"


@pytest.mark.parametrize(("thread", "notes"), [("sparsecore", [NOTE]), ("main", [])])
def test_times_of_gathers_on_sparse_cores_have_no_measured_basis(thread, notes) -> None:
    text = _text("offloaded", thread=thread)
    step = timed_text(text, "tpu7x-8", "device=1", phase=Phase.STEP).time
    assert [note for note in step.notes if NO_MEASURED_BASIS in note] == notes


def test_a_flag_that_moves_gathers_says_what_was_not_measured() -> None:
    flag = Flag(name="xla_tpu_offload_gather_to_sparsecore", value="false")
    times = {"step_s": 209e-6, "base_step_s": 184e-6, "notes": (f"without the flag, {NOTE}",)}
    effect = FlagEffect(flag=flag, phase=Phase.STEP, is_changed=True, **times)
    text = " ".join(flag_lines("step", "tpu7x-8", [effect])).replace("\n", " ")
    assert "no measured basis" in " ".join(text.split())
