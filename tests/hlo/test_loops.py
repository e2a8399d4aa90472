"""Trip counts from loop conditions, against running the loops."""

import itertools
from pathlib import Path

import pytest
from made_hlo import loop_text, module_text, rows_in, timed_text, while_text
from tables import stored

from meshscope.errors import ParseError
from meshscope.readers.hlo import executions
from meshscope.readers.hlo.executions import trip_count
from meshscope.readers.hlo.parse import parse_hlo

TEXTS = stored(Path(__file__).with_suffix(".yaml"))["texts"]
LOOP = TEXTS["LOOP"]
# The CPU compiler and newer TPU compilers wrap single operations in fusions.
WRAPPED = TEXTS["WRAPPED"]
NEXT = """  %one = s32[] constant(1)
  %next = s32[] fusion(%i, %one), kind=kLoop, calls=%wrapped_add
"""
# Each definition doubles the one before, which makes 2^60 paths to the constant.
DOUBLED = "  %d0 = s32[] constant(1)\n" + "".join(
    f"  %d{n + 1} = s32[] add(%d{n}, %d{n})\n" for n in range(60)
)
COUNTED = TEXTS["COUNTED"]
COMPARE = {
    "LT": lambda i, n: i < n,
    "LE": lambda i, n: i <= n,
    "GT": lambda i, n: i > n,
    "GE": lambda i, n: i >= n,
    "NE": lambda i, n: i != n,
}
MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}
PASSED = "get-tuple-element(%q), index=1"


def _counted(text: str) -> int | str:
    module = parse_hlo(text, "loop.hlo")
    return trip_count(module, module.entry.get("while"), module.entry)


def _read(start: int | str, bound: int, step: int, **changes: str) -> int | str:
    fields = {"end": f"constant({bound})", "limit": f"constant({bound})", "sides": "%j, %limit"}
    fields |= {"start": start, "step": step, "direction": "LT", "attributes": "", **changes}
    return _counted(LOOP.format(**fields))


def _run(start: int, bound: int, step: int, direction: str) -> int | None:
    """Iterations of the loop when run; None if it has not ended after 100."""
    i = start
    for n in range(100):
        if not COMPARE[direction](i, bound):
            return n
        i += step
    return None


def test_trip_count_equals_running_the_loop() -> None:
    """With a bound that is passed in or a constant, on either side of the comparison."""
    cases = itertools.product([-3, 0, 2], [-5, 0, 7, 12], [-2, -1, 1, 3], COMPARE)
    for start, bound, step, direction in cases:
        want = _run(start, bound, step, direction)
        mirrored = {"direction": MIRRORED[direction], "sides": "%limit, %j"}
        for limit, sides in itertools.product([{}, {"limit": PASSED}], [{}, mirrored]):
            got = _read(start, bound, step, **{"direction": direction, **limit, **sides})
            assert (None if isinstance(got, str) else got) == want, (
                start,
                bound,
                step,
                direction,
                limit,
                sides,
            )


def test_a_known_trip_count_is_used() -> None:
    known = ', backend_config={"known_trip_count":{"n":"9"}}'
    assert _read(0, 3, 1, attributes=known) == 9


@pytest.mark.parametrize(
    ("start", "step", "changes", "reason"),
    [
        (0, -1, {}, "the trip count of loop 'while' is unknown: it never ends"),
        (
            0,
            1,
            {"limit": PASSED, "end": "parameter(0)"},
            "its start or its bound is not a constant",
        ),
        ("9" * 5000, 1, {}, "its start or its bound is not a constant"),
    ],
    ids=["endless", "bound from a parameter", "thousands of digits"],
)
def test_an_unknown_trip_count_has_a_reason(start, step, changes, reason) -> None:
    assert reason in _read(start, 8, step, **changes)


def test_counter_and_comparison_may_be_inside_fusions() -> None:
    text = WRAPPED + COUNTED.format(lines=NEXT, result="next")
    assert _counted(text) == 28


def test_exponential_sums_do_not_hang_the_reader() -> None:
    assert isinstance(_counted(WRAPPED + COUNTED.format(lines=DOUBLED, result="d60")), str)


def _sum(name: str, operand: str) -> str:
    groups = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true"
    return f"  %{name} = f32[8] all-reduce(%{operand}), {groups}, to_apply=%add\n"


def test_a_loop_of_unknown_trips_counts_once_and_leaves_the_time_without_interval() -> None:
    loop = loop_text("l", 3, _sum("s", "x"), "s").replace("add(%i, %one)", "multiply(%i, %one)")
    entry = "  %a = f32[8] parameter(0)\n  %zero = s32[] constant(0)\n" + while_text("l", "a")
    text = module_text(entry, loop)
    (row,) = rows_in(text, "tp=2")
    assert row.count == 1
    reason = "the trip count of loop 'while' is unknown"
    assert reason in str(row.axis_reason)
    time = timed_text(text, "v6e:1x2", "tp=2").time
    assert (time.step.low_s, time.step.high_s) == (None, None)
    assert str(time.no_interval).startswith(reason)


def test_more_collectives_than_the_limit_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executions, "MAX_SITES", 1)
    entry = "  %a = f32[8] parameter(0)\n" + _sum("s", "a")
    assert len(rows_in(module_text(entry), "tp=2")) == 1
    with pytest.raises(ParseError, match=r"m\.hlo:\d+: more than 1 collectives are reachable from"):
        rows_in(module_text(entry + _sum("t", "s")), "tp=2")


def test_what_an_asynchronous_start_calls_is_in_the_text() -> None:
    """Otherwise it is unknown whether it communicates."""
    entry = (
        "  %a = f32[8] parameter(0)\n"
        "  %s = ((f32[8]), f32[8], u32[]) async-start(%a), calls=%gone\n"
        "  %d = f32[8] async-done(%s)\n"
    )
    with pytest.raises(ParseError, match="'s' calls 'gone', which the text does not define"):
        rows_in(module_text(entry), "tp=2")
