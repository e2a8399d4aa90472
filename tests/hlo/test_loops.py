"""Trip counts from loop conditions, against running the loops."""

import itertools

from meshscope.readers.hlo.executions import TripCount, trip_count
from meshscope.readers.hlo.parse import parse_hlo

LOOP = """\
HloModule m, is_scheduled=true

%body (p: (s32[], s32[])) -> (s32[], s32[]) {{
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %bound = s32[] get-tuple-element(%p), index=1
  %step = s32[] constant({step})
  %copy.1 = s32[] copy(%i)
  %next = s32[] add(%copy.1, %step)
  ROOT %t = (s32[], s32[]) tuple(%next, %bound)
}}

%cond (q: (s32[], s32[])) -> pred[] {{
  %q = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] {limit}
  ROOT %lt = pred[] compare({sides}), direction={direction}
}}

ENTRY %main () -> s32[] {{
  %start = s32[] constant({start})
  %end = s32[] constant({bound})
  %init = (s32[], s32[]) tuple(%start, %end)
  %while = (s32[], s32[]) while(%init), condition=%cond, body=%body{attributes}
  ROOT %r = s32[] get-tuple-element(%while), index=0
}}
"""
COMPARE = {
    "LT": lambda i, n: i < n,
    "LE": lambda i, n: i <= n,
    "GT": lambda i, n: i > n,
    "GE": lambda i, n: i >= n,
    "NE": lambda i, n: i != n,
}
MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


def _read(
    start: int,
    bound: int,
    step: int,
    direction: str,
    *,
    is_passed: bool = False,
    is_mirrored: bool = False,
    attributes: str = "",
) -> TripCount:
    text = LOOP.format(
        start=start,
        bound=bound,
        step=step,
        direction=MIRRORED[direction] if is_mirrored else direction,
        limit="get-tuple-element(%q), index=1" if is_passed else f"constant({bound})",
        sides="%limit, %j" if is_mirrored else "%j, %limit",
        attributes=attributes,
    )
    module = parse_hlo(text, "loop.hlo")
    loop = module.entry.get("while")
    assert loop is not None
    return trip_count(module, loop, module.entry)


def _run(start: int, bound: int, step: int, direction: str) -> int | None:
    """Iterations of the loop when run; None if it has not ended after 100."""
    i = start
    for n in range(100):
        if not COMPARE[direction](i, bound):
            return n
        i += step
    return None


def test_trip_count_equals_running_the_loop() -> None:
    cases = itertools.product([-3, 0, 2], [-5, 0, 7, 12], [-2, -1, 1, 3], COMPARE)
    for start, bound, step, direction in cases:
        want = _run(start, bound, step, direction)
        for is_passed, is_mirrored in itertools.product([False, True], repeat=2):
            got = _read(start, bound, step, direction, is_passed=is_passed, is_mirrored=is_mirrored)
            assert got.count == want, (start, bound, step, direction, is_passed, is_mirrored)


def test_a_known_trip_count_is_used() -> None:
    known = ', backend_config={"known_trip_count":{"n":"9"}}'

    assert _read(0, 3, 1, "LT", attributes=known) == TripCount(count=9)


def test_a_loop_that_does_not_end_is_unknown_with_a_reason() -> None:
    got = _read(0, 5, -1, "LT")

    assert got.count is None
    assert got.reason == "the trip count of loop 'while' is unknown: it never ends"


def test_a_bound_from_a_parameter_is_unknown() -> None:
    text = LOOP.format(
        start=0,
        bound=8,
        step=1,
        direction="LT",
        limit="get-tuple-element(%q), index=1",
        sides="%j, %limit",
        attributes="",
    )
    text = text.replace("main ()", "main (n: s32[])").replace(
        "%end = s32[] constant(8)", "%end = s32[] parameter(0)"
    )
    module = parse_hlo(text, "loop.hlo")
    loop = module.entry.get("while")
    assert loop is not None

    got = trip_count(module, loop, module.entry)

    assert got.count is None
    assert "its start or its bound is not a constant" in str(got.reason)


def test_a_constant_of_thousands_of_digits_is_unknown() -> None:
    text = LOOP.format(
        start="9" * 5000,
        bound=8,
        step=1,
        direction="LT",
        limit="constant(8)",
        sides="%j, %limit",
        attributes="",
    )
    module = parse_hlo(text, "loop.hlo")
    loop = module.entry.get("while")
    assert loop is not None

    got = trip_count(module, loop, module.entry)

    assert "its start or its bound is not a constant" in str(got.reason)


def test_counter_and_comparison_may_be_inside_fusions() -> None:
    """The CPU compiler and newer TPU compilers wrap single operations in fusions."""
    text = """\
HloModule m

%wrapped_add (a: s32[], b: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %sum = s32[] add(%a, %b)
}

%wrapped_compare (c: s32[], d: s32[]) -> pred[] {
  %c = s32[] parameter(0)
  %d = s32[] parameter(1)
  ROOT %less = pred[] compare(%c, %d), direction=LT
}

%body (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] fusion(%i, %one), kind=kLoop, calls=%wrapped_add
  ROOT %t = (s32[]) tuple(%next)
}

%cond (q: (s32[])) -> pred[] {
  %q = (s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] constant(28)
  ROOT %wrapped = pred[] fusion(%j, %limit), kind=kLoop, calls=%wrapped_compare
}

ENTRY %main () -> (s32[]) {
  %zero = s32[] constant(0)
  %init = (s32[]) tuple(%zero)
  ROOT %while = (s32[]) while(%init), condition=%cond, body=%body
}
"""
    module = parse_hlo(text, "loop.hlo")

    assert trip_count(module, module.entry.root, module.entry) == TripCount(count=28)


def test_exponential_sums_do_not_hang_the_reader() -> None:
    """Each definition doubles the one before, which makes 2^60 paths to the constant."""
    doubled = "\n".join(f"  %d{n + 1} = s32[] add(%d{n}, %d{n})" for n in range(60))
    text = f"""\
HloModule m

%body (p: (s32[])) -> (s32[]) {{
  %p = (s32[]) parameter(0)
  %d0 = s32[] constant(1)
{doubled}
  ROOT %t = (s32[]) tuple(%d60)
}}

%cond (q: (s32[])) -> pred[] {{
  %q = (s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] constant(28)
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}}

ENTRY %main () -> (s32[]) {{
  %zero = s32[] constant(0)
  %init = (s32[]) tuple(%zero)
  ROOT %while = (s32[]) while(%init), condition=%cond, body=%body
}}
"""
    module = parse_hlo(text, "loop.hlo")

    assert trip_count(module, module.entry.root, module.entry).count is None
