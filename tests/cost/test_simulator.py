"""Schedules of a few lines whose time is a simple sum."""

import polars as pl
import pytest
from made_hlo import loop_text, module_text, timed_text, while_text

from meshscope.analysis.overlap import exposed_by, overlap
from meshscope.analysis.timeline import modeled_timeline
from meshscope.cost.steps import TimedStep, timeline_table
from meshscope.events.enums import Kind
from meshscope.events.schema import table_of
from meshscope.hardware.chips import chip_of
from meshscope.hardware.interconnect.lines import collective_time
from meshscope.hardware.topology import parse_topology

SLICE = parse_topology("v6e:1x2")
HZ = chip_of("v6e").clock_hz or 0
GROUPS = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true"
ARRAY = "f32[1024,1024]{1,0:T(8,128)S(1)}"  # in VMEM, so that products take the compiler's cycles
IN_HBM = "f32[1024,1024]{1,0:T(8,128)}"
PAYLOAD = 4 << 20
READ_S, WRITE_S = (PAYLOAD / 1.638e12 / frac for frac in (0.91, 0.76))
COPY_S = PAYLOAD / 1.638e12 / 0.95  # beside other transfers


def _cycles(n: int) -> str:
    """An estimate that is priced as `n` cycles: 1,820 are the compiler's launch, 350 that of a v6e."""
    return _estimated(n + 1820 - 350)


def _estimated(n: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{n}"}}}}'


def _timed(entry: str, computations: str = "", array: str = ARRAY, mesh: str = "tp=2") -> TimedStep:
    text = module_text(f"  %x = {array} parameter(0)\n{entry}", computations)
    return timed_text(text, "v6e:1x2", mesh)


def _work(name: str, operand: str, cycles: int, part: str = "mlp") -> str:
    return (
        f"  %{name} = {ARRAY} dot(%{operand}, %{operand}), "
        "lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
        f'metadata={{op_name="prefill/layer0/{part}/dot"}}, {_cycles(cycles)}\n'
    )


def _reduced(name: str, operand: str) -> str:
    return (
        f"  %{name} = {ARRAY} all-reduce(%{operand}), {GROUPS}, to_apply=%add, "
        'metadata={op_name="prefill/layer0/mlp/psum"}\n'
    )


def _permute(name: str, operand: str) -> tuple[str, str]:
    """The start and the done."""
    start = (
        f"  %{name}s = ({ARRAY}, {ARRAY}) collective-permute-start(%{operand}), channel_id=2, "
        'source_target_pairs={{0,1},{1,0}}, metadata={op_name="prefill/layer0/mlp/ppermute"}\n'
    )
    return start, f"  %{name} = {ARRAY} collective-permute-done(%{name}s)\n"


def _collective_s(kind: Kind, *groups: tuple[int, int]) -> float:
    return collective_time(kind, groups=groups, payload_bytes=PAYLOAD, topology=SLICE).seconds


ALL_REDUCE_S = _collective_s(Kind.ALL_REDUCE, (0, 1))
PERMUTE_S = _collective_s(Kind.PERMUTE, (0, 1), (1, 0))


def test_synchronous_collective_stalls_the_core():
    step = _timed(_work("a", "x", 7000) + _reduced("r", "a") + _work("b", "r", 3500)).time
    work_s = pytest.approx(10_500 / HZ)
    assert (step.compute_s, step.exposed_s) == (work_s, pytest.approx(ALL_REDUCE_S))
    assert step.exposed_by_axis_s == pytest.approx({"tp": ALL_REDUCE_S})
    assert step.step.value_s == pytest.approx(10_500 / HZ + ALL_REDUCE_S)
    assert step.step.low_s < step.step.value_s < step.step.high_s
    bases = {"compiler_cycles": 10_500 / HZ, "interconnect_model": ALL_REDUCE_S}
    assert step.by_basis_s == pytest.approx(bases)


def test_asynchronous_collective_overlaps_work_before_its_done():
    some_s, much_s = 10e-6, 3 * PERMUTE_S  # less and more than the permute takes
    start, done = _permute("d", "x")
    step = _timed(start + _work("a", "x", round(some_s * HZ)) + done + _work("b", "d", 1750)).time
    assert some_s < PERMUTE_S
    assert step.collective_s == pytest.approx(PERMUTE_S)
    assert step.exposed_s == pytest.approx(PERMUTE_S - some_s)
    assert step.step.value_s == pytest.approx(PERMUTE_S + 1750 / HZ)
    hidden = _timed(start + _work("a", "x", round(much_s * HZ)) + done).time
    assert (hidden.exposed_s, hidden.step.value_s) == (0, pytest.approx(much_s, rel=1e-4))


def test_synchronous_collective_queues_behind_an_asynchronous_one_on_its_links():
    start, done = _permute("d", "x")
    step = _timed(start + _reduced("r", "x") + done).time
    assert step.step.value_s == pytest.approx(PERMUTE_S + ALL_REDUCE_S)


AT_ENTRY = "  %zero = s32[] constant(0)\n" + while_text("l", "x", array=ARRAY)


def test_loop_rows_have_the_mean_time_of_one_execution():
    body = _work("w", "x", 1750) + _reduced("r", "w")
    timed = _timed(AT_ENTRY, loop_text("l", 40, body, "r", ARRAY))
    assert timed.time.compute_s == pytest.approx(40 * 1750 / HZ)
    assert timed.time.exposed_s == pytest.approx(40 * ALL_REDUCE_S)
    (part,) = timed.time.parts
    assert (part.part, part.exposed_s) == ("mlp", pytest.approx(40 * ALL_REDUCE_S))


def _computation(name: str, work: str) -> str:
    return f"%{name} (p.{name}: {ARRAY}) -> {ARRAY} {{\n  %p.{name} = {ARRAY} parameter(0)\n{work}}}\n\n"


def test_costliest_branch_of_a_conditional_runs():
    branches = "".join(
        _computation(f"b{k}", _work(f"w{k}", f"p.b{k}", cycles))
        for k, cycles in enumerate((1750, 7000))
    )
    chosen = f"  ROOT %c = {ARRAY} conditional(%i, %x, %x), branch_computations={{%b0, %b1}}\n"
    time = _timed(f"  %i = s32[] constant(0)\n{chosen}", branches).time
    assert time.step.value_s == pytest.approx(7000 / HZ)


LAYER_CYCLES = (3500, 7000)  # of the layer of each stage
HEAD_CYCLES = 1750


def _pipeline(n_microbatches: int) -> TimedStep:
    """Two stages with a layer each, of kinds that differ, and a head on the last one; a layer chooses its work, too."""
    n_ticks = n_microbatches + 1
    ticks = f"microbatches{n_microbatches}of{n_ticks}"
    layers = [
        _work(name, f"p.{stage}", cycles).replace("layer0", f"stage{n}/{ticks}/layer{n}")
        for n, (name, stage, cycles) in enumerate(
            zip("ab", ("first", "second"), LAYER_CYCLES, strict=True)
        )
    ]
    head = _work("h", "p.head", HEAD_CYCLES).replace("layer0/mlp", "stage1/lm_head")
    inner = layers[1].replace("p.second", "p.chosen")
    chooses = (
        f"  %n = s32[] constant(1)\n  %c = {ARRAY} conditional(%n, %p.second, %p.second), "
        "branch_computations={%skipped, %chosen}, "
        f'metadata={{op_name="prefill/stage1/{ticks}/layer1/mlp/cond"}}\n'
    )
    works = {"skipped": "", "chosen": inner, "idle": "", "first": layers[0]}
    works |= {"second": chooses, "none": "", "head": head}
    branches = "".join(_computation(name, work) for name, work in works.items())
    body = f"""\
  %y = {ARRAY} conditional(%i, %x, %x, %x), branch_computations={{%idle, %first, %second}}
  %s = {ARRAY} collective-permute(%y), channel_id=3, source_target_pairs={{{{0,1}}}}, metadata={{op_name="prefill/stage0/stage/ppermute"}}
"""
    entry = AT_ENTRY + (
        f"  ROOT %end = {ARRAY} conditional(%zero, %out, %out), branch_computations={{%none, %head}}, "
        'metadata={op_name="prefill/stage1/cond"}\n'
    )
    return _timed(entry, branches + loop_text("l", n_ticks, body, "s", ARRAY), mesh="pp=2")


@pytest.mark.parametrize("n_microbatches", [1, 3])
def test_each_stage_computes_in_its_ticks_and_waits_for_the_slowest(n_microbatches: int):
    """A single micro-batch pays each stage once; later ticks last as long as the slower stage."""
    step = _pipeline(n_microbatches)
    first_s, second_s, head_s = (n / HZ for n in (*LAYER_CYCLES, HEAD_CYCLES))
    busy_s = n_microbatches * (first_s + second_s) + head_s  # of both devices
    sends_s = (n_microbatches + 1) * _collective_s(Kind.PERMUTE, (0, 1))
    step_s = first_s + n_microbatches * second_s + head_s + sends_s
    assert step.time.step.value_s == pytest.approx(step_s)
    assert step.time.compute_s == pytest.approx(busy_s / 2)
    assert step.time.exposed_by_axis_s == pytest.approx({"pp": sends_s})
    assert step.time.bubble_s == pytest.approx(step_s - sends_s - busy_s / 2)


def test_the_timeline_of_a_pipeline_has_the_work_of_each_stage():
    """And its overlap is the mean of the stages."""
    step = _pipeline(3)
    timeline = modeled_timeline(timeline_table([step]), table_of([]))
    work = timeline.filter(pl.col("kind").is_null()).group_by("stage", "layer", "part").len()
    rows = work.sort("stage", "layer").rows()
    assert rows == [(0, 0, "mlp", 3), (1, None, "lm_head", 1), (1, 1, "mlp", 3)]
    sends = timeline.filter(kind="permute")
    assert sends["stage"].to_list() == [0] * 4
    assert sends["exposed_s"].to_list() == pytest.approx(sends["dur_s"].to_list())
    (row,) = overlap(timeline).iter_rows(named=True)
    assert row["n_steps_seen"] == 1
    for name in ("compute_s", "exposed_s", "idle_s"):
        assert row[name] == pytest.approx(getattr(step.time, name)), name
    exposed = {axis: seconds for *_, axis, seconds in exposed_by(timeline).iter_rows()}
    assert exposed == pytest.approx(step.time.exposed_by_axis_s)


def test_unknown_op_is_counted_with_a_bounded_time():
    step = _timed(f"  %odd = {ARRAY} frobnicate(%x)\n" + _work("a", "odd", 1750)).time
    (work,) = step.unestimated
    assert (work.opcode, work.count, work.is_known) == ("odd", 1, False)
    assert work.seconds.low_s == 0
    assert work.seconds.high_s == pytest.approx(10 * work.seconds.value_s)
    assert step.unestimated_frac == pytest.approx(work.seconds.value_s / step.step.value_s)


def test_work_without_an_estimate_is_priced_by_its_bytes():
    step = _timed(f"  %s = {IN_HBM} negate(%x)\n", array=IN_HBM).time
    assert step.compute_s == pytest.approx(READ_S + WRITE_S)
    assert [(u.opcode, u.is_known) for u in step.unestimated] == [("s", True)]
    assert step.by_basis_s == pytest.approx({"roofline": READ_S + WRITE_S})


def test_a_gather_counts_the_rows_it_reads():
    taken = (
        "  %i = s32[] constant(0)\n"
        "  %t = f32[1,1024] dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,1024}\n"
    )
    indices = 2 * 4
    moved = ((4096 + indices) / 0.91 + 4096 / 0.76) / 1.638e12
    assert _timed(taken, array=IN_HBM).time.compute_s == pytest.approx(moved)


def _copied(name: str) -> tuple[str, str]:
    """A copy of the parameter from HBM to VMEM, and its done."""
    start = f"  %{name} = ({ARRAY}, {IN_HBM}, u32[]) copy-start(%x)\n"
    return start, f"  %{name}d = {ARRAY} copy-done(%{name})\n"


def test_waiting_for_a_copy_is_idle_time():
    start, done = _copied("c")
    bare = _timed(start + done, array=IN_HBM).time
    assert (bare.idle_s, bare.exposed_s) == (pytest.approx(COPY_S), 0)


def test_a_copy_counts_for_the_part_that_consumes_it_behind_joined_slices():
    """libtpu fetches a weight in slices, joins them and casts the result before the product."""
    start, done = _copied("c")
    joined = f'  %j = {ARRAY} custom-call(%cd), custom_call_target="ConcatBitcast"\n'
    cast = f"  %b = {ARRAY} bitcast(%j)\n  %b2 = {ARRAY} bitcast(%b)\n"
    step = _timed(start + done + joined + cast + _work("y", "b2", 1000), array=IN_HBM).time
    assert {part.part: part.hbm_bytes for part in step.parts} == {"mlp": PAYLOAD}


def test_copies_share_the_hbm_and_go_on_during_a_collective():
    (one, one_done), (two, two_done) = _copied("c1"), _copied("c2")
    both = _timed(one + two + one_done + two_done, array=IN_HBM).time
    assert both.idle_s == pytest.approx(2 * COPY_S)
    in_vmem = f"  %z = {ARRAY} broadcast(%x), dimensions={{}}, {_estimated(0)}\n"
    hidden = _timed(in_vmem + one + _reduced("r", "z") + one_done, array=IN_HBM).time
    assert ALL_REDUCE_S > COPY_S
    assert (hidden.idle_s, hidden.exposed_s) == (0, pytest.approx(ALL_REDUCE_S))


def test_an_op_and_a_copy_share_the_hbm():
    """The op, which reads and writes an array, gets four fifths of the rate."""
    start, done = _copied("c")
    negated = f"  %n = {IN_HBM} negate(%x)\n"
    step = _timed(start + negated + done, array=IN_HBM).time
    op_s = (READ_S + WRITE_S) * 0.91 / 0.95
    assert op_s / 4 < COPY_S
    assert step.compute_s == pytest.approx(1.25 * op_s)
    assert step.step.value_s == pytest.approx(op_s + COPY_S)
