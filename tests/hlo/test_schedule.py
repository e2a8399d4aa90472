"""Cycles and what they hide, against walking the schedule step by step."""

import gzip
import re

import pytest
from goldens import GOLDEN_DIR

from meshscope.readers.hlo.parse import parse_hlo, read_hlo
from meshscope.readers.hlo.schedule import Schedule, schedule_of

GROUPS = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true"


def _cycles(n: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{n}"}}}}'


def _module(entry: str, computations: str = "") -> str:
    return f"""\
HloModule m, is_scheduled=true, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
{computations}
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8] parameter(0)
{entry.rstrip()}
}}
"""


def _schedule(entry: str, computations: str = "") -> Schedule:
    return schedule_of(parse_hlo(_module(entry, computations), "test.hlo"))


def _work(name: str, operand: str, cycles: int) -> str:
    return f"  %{name} = f32[8] negate(%{operand}), {_cycles(cycles)}\n"


def _loop(n: int, body: str, result: str) -> str:
    return f"""
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[8] get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
{body}  ROOT %t = (s32[], f32[8]) tuple(%next, %{result})
}}

%cond (q: (s32[], f32[8])) -> pred[] {{
  %q = (s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant({n})
  ROOT %less = pred[] compare(%j, %n), direction=LT, {_cycles(1)}
}}
"""


LOOP_AT_ENTRY = """\
  %zero = s32[] constant(0)
  %init = (s32[], f32[8]) tuple(%zero, %x)
  %while = (s32[], f32[8]) while(%init), condition=%cond, body=%body
  ROOT %out = f32[8] get-tuple-element(%while), index=1
"""


def _permute(name: str, operand: str) -> str:
    return (
        f"  %{name} = (f32[8], f32[8]) collective-permute-start(%{operand}), channel_id=2, "
        "source_target_pairs={{0,1},{1,0}}\n"
    )


def _permuted(name: str, start: str) -> str:
    return f"  %{name} = f32[8] collective-permute-done(%{start})\n"


def test_work_between_start_and_done_is_hidden_and_other_work_is_not():
    schedule = _schedule(
        _work("before", "x", 5)
        + _permute("start", "before")
        + _work("one", "before", 10)
        + _work("two", "one", 20)
        + _permuted("done", "start")
        + _work("after", "done", 40)
    )
    (window,) = schedule.windows
    assert (window.is_async, window.hidden_cycles, window.count) == (True, 30, 1)
    assert (schedule.cycles, schedule.covered_cycles) == (75, 30)
    assert schedule.unestimated == {}


def test_a_synchronous_collective_hides_nothing():
    schedule = _schedule(
        _work("one", "x", 10)
        + f"  %sum.1 = f32[8] all-reduce(%one), {GROUPS}, to_apply=%add\n"
        + _work("two", "sum.1", 20)
    )
    (window,) = schedule.windows
    assert (window.is_async, window.hidden_cycles) == (False, 0)
    assert (schedule.cycles, schedule.covered_cycles) == (30, 0)
    assert schedule.unestimated == {}, "a collective is told by its window"


def test_windows_that_overlap_cover_their_work_once():
    schedule = _schedule(
        _permute("start.1", "x")
        + _work("one", "x", 1)
        + _permute("start.2", "x")
        + _work("two", "x", 2)
        + _permuted("done.1", "start.1")
        + _work("three", "x", 4)
        + _permuted("done.2", "start.2")
    )
    assert [w.hidden_cycles for w in schedule.windows] == [3, 6]
    assert schedule.covered_cycles == 7


@pytest.mark.parametrize("n", [0, 1, 3])
def test_loops_count_as_often_as_they_run(n: int):
    body = (
        _permute("start", "v")
        + _work("hidden", "v", 10)
        + _permuted("done", "start")
        + _work("open", "done", 100)
    )
    schedule = _schedule(LOOP_AT_ENTRY, _loop(n, body, "open"))
    expected = covered = 0
    for _ in range(n):
        expected += 1 + 10 + 100
        covered += 10
    assert schedule.cycles == expected + 1, "the condition runs once more, to find that it is over"
    assert schedule.covered_cycles == covered
    (window,) = schedule.windows
    assert (window.count, window.hidden_cycles) == (n, 10)


def test_a_loop_within_a_window_is_hidden_as_a_whole():
    entry = _permute("start", "x") + LOOP_AT_ENTRY.replace("ROOT %out", "%out")
    schedule = _schedule(
        entry + _permuted("done", "start"), _loop(3, _work("open", "v", 7), "open")
    )
    assert schedule.windows[0].hidden_cycles == schedule.covered_cycles == 3 * 7 + 4


def test_what_has_no_estimate_is_counted_by_opcode():
    schedule = _schedule(
        _permute("start", "x")
        + "  %order = f32[8] sort(%x), dimensions={0}, to_apply=%add\n"
        + '  %kernel = f32[8] custom-call(%x), custom_call_target="tpu_custom_call"\n'
        + '  %room = f32[8] custom-call(), custom_call_target="AllocateBuffer"\n'
        + _permuted("done", "start")
    )
    assert schedule.unestimated == {"sort": 1, "custom-call": 1}
    assert schedule.windows[0].n_unestimated == 2


def test_a_fusion_counts_by_its_own_estimate_alone():
    fused = f"""
%fused (r: f32[8]) -> f32[8] {{
  %r = f32[8] parameter(0)
  ROOT %inner = f32[8] negate(%r), {_cycles(1000)}
}}
"""
    schedule = _schedule(
        f"  ROOT %f = f32[8] fusion(%x), kind=kLoop, calls=%fused, {_cycles(3)}\n", fused
    )
    assert schedule.cycles == 3


def test_a_conditional_counts_as_its_dearest_branch():
    branches = "".join(
        f"""
%branch{n} (r{n}: f32[8]) -> f32[8] {{
  %r{n} = f32[8] parameter(0)
  ROOT %inner{n} = f32[8] negate(%r{n}), {_cycles(n)}
}}
"""
        for n in (3, 9)
    )
    schedule = _schedule(
        "  %which = s32[] constant(0)\n"
        "  ROOT %c = f32[8] conditional(%which, %x, %x), branch_computations={%branch3, %branch9}\n",
        branches,
    )
    assert schedule.cycles == 9


def test_collectives_spread_over_fusions_equal_a_search_of_the_text():
    """The fusions that call the computations of AsyncCollectiveStart and -Done bound the window."""
    path = GOLDEN_DIR / "v5e_fsdp8_prefill_auto_async.jax-0.10.2.txt.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    computations = re.split(r"\n(?=\S)", text)
    ends: dict[str, dict[str, str]] = {"Start": {}, "Done": {}}
    for computation in computations:
        for end, found in ends.items():
            if f'custom_call_target="AsyncCollective{end}"' in computation:
                chain = re.search(r'chain_id="(\d+)"', computation)
                name = re.match(r"%(\S+)", computation)
                assert chain is not None
                assert name is not None
                found[chain[1]] = name[1]
    entry = next(c for c in computations if c.startswith("ENTRY")).splitlines()
    expected = [
        sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', "".join(entry[first + 1 : last]))))
        for chain in ends["Start"]
        for first in [_line(entry, ends["Start"][chain])]
        for last in [_line(entry, ends["Done"][chain])]
    ]
    schedule = schedule_of(read_hlo(path))
    hidden = [w.hidden_cycles for w in schedule.windows if w.is_async]
    assert sorted(hidden) == sorted(expected)
    assert len(hidden) == 4


def _line(entry: list[str], called: str) -> int:
    return next(
        n for n, line in enumerate(entry) if re.search(rf"calls=%{called}[,\s]", line + " ")
    )
