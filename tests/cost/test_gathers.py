"""Gathers and sorts in a schedule take the cycles that libtpu's profiles have for them."""

import pytest
from made_hlo import module_text, timed_text

from meshscope.cost.rates import rates_of, row_s
from meshscope.cost.steps import NO_MEASURED_BASIS
from meshscope.events.enums import Phase
from meshscope.events.measured import Flag, FlagEffect
from meshscope.events.step_time import Activity, StepTime
from meshscope.hardware.chips import chip_of
from meshscope.reports.flags import flag_lines

CLOCK_HZ = 1.75e9
_ROWS = (
    "offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, "
    "slice_sizes={1,%d}"
)


def _module(width: int, table_space: str) -> str:
    table = f"bf16[32768,{width}]{{1,0:T(8,128)(2,1){table_space}}}"
    indices = "s32[4096,1]{1,0:T(8,128)S(1)}"
    result = f"bf16[4096,{width}]{{1,0:T(8,128)(2,1)}}"
    fused = f"""
%fused (t: {table}, i: {indices}) -> {result} {{
  %t = {table} parameter(0)
  %i = {indices} parameter(1)
  ROOT %g = {result} gather(%t, %i), {_ROWS % width}
}}
"""
    entry = f"""\
  %table = {table} parameter(0)
  %indices = {indices} parameter(1)
  ROOT %gather_fusion = {result} fusion(%table, %indices), kind=kCustom, calls=%fused
"""
    return module_text(entry, fused, header="")


def _step(text: str, topology: str = "v6e:1x1") -> StepTime:
    return timed_text(text, topology, "tp=1").time


@pytest.mark.parametrize(
    ("width", "topology", "cycles"),
    [(2048, "v6e:1x1", 173_326), (4096, "v6e:1x1", 285_038), (2048, "v5p:1x1x1", 90_568)],
)
def test_rows_from_hbm_take_the_cycles_of_the_profile(width, topology, cycles) -> None:
    """The cycles of libtpu's static profile of 4,096 rows from a table of 32,768; two cores of v5p share them."""
    step = _step(_module(width, ""), topology)
    assert step.step.value_s == pytest.approx(cycles / CLOCK_HZ, rel=0.02)
    assert [spent.activity for spent in step.activities] == [Activity.GATHER]


def test_rows_from_vmem_take_fewer_cycles_until_their_bytes_bind() -> None:
    from_vmem, from_hbm = (_step(_module(2048, space)).step.value_s for space in ("S(1)", ""))
    assert from_vmem < 0.3 * from_hbm
    assert from_vmem >= 4096 * 2048 * 2 / 1.638e12  # written to HBM


def test_a_sort_takes_the_cycles_of_the_profile() -> None:
    """32,768 keys with their positions: 19,480 cycles in libtpu's static profile (v6e)."""
    array = "s32[32768]{0:T(1024)S(1)}"
    less = """
%less (a: s32[], b: s32[], c: s32[], d: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  %c = s32[] parameter(2)
  %d = s32[] parameter(3)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}
"""
    entry = f"""\
  %k = {array} parameter(0)
  %v = {array} parameter(1)
  ROOT %sort = ({array}, {array}) sort(%k, %v), dimensions={{0}}, to_apply=%less
"""
    step = _step(module_text(entry, less, header=""))
    assert step.step.value_s == pytest.approx(19_480 / CLOCK_HZ, rel=0.02)


def test_without_a_clock_a_row_takes_the_time_of_its_bytes() -> None:
    rates = rates_of(chip_of("h100"))
    assert row_s(rates, 2048, 2.0) == pytest.approx(2 * 2 * 2048 / rates.hbm_bytes_per_s)


_TABLE = """  %table = f32[512,128] parameter(0)
  %rows = s32[64] parameter(1)
"""
OFFLOADED = module_text(
    _TABLE
    + """\
  %start = ((f32[512,128], s32[64]), f32[64,128], u32[]) call-start(%table, %rows), async_execution_thread="sparsecore", to_apply=%offloaded
  ROOT %done = f32[64,128] call-done(%start)
""",
    f"""
%offloaded (table: f32[512,128], rows: s32[64]) -> f32[64,128] {{
{_TABLE}  ROOT %gather = f32[64,128] gather(%table, %rows), {_ROWS % 128}
}}, execution_thread="sparsecore"
""",
    header="",
)
NOTE = "times of gathers and scatters on SparseCores, 1 here, have no measured basis"


@pytest.mark.parametrize(
    ("text", "notes"), [(OFFLOADED, [NOTE]), (OFFLOADED.replace("sparsecore", "main"), [])]
)
def test_times_of_gathers_on_sparse_cores_have_no_measured_basis(text, notes) -> None:
    step = timed_text(text, "tpu7x-8", "device=1", phase=Phase.STEP).time
    assert [note for note in step.notes if NO_MEASURED_BASIS in note] == notes


def test_a_flag_that_moves_gathers_says_what_was_not_measured() -> None:
    flag = Flag(name="xla_tpu_offload_gather_to_sparsecore", value="false")
    times = {"step_s": 209e-6, "base_step_s": 184e-6, "notes": (f"without the flag, {NOTE}",)}
    effect = FlagEffect(flag=flag, phase=Phase.STEP, is_changed=True, **times)
    text = " ".join(flag_lines("step", "tpu7x-8", [effect])).replace("\n", " ")
    assert "no measured basis" in " ".join(text.split())
