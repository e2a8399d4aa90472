"""The machine's tally and its HBM against clocks sampled tick by tick."""

import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
from tables import seeds

from meshscope.cost.machine import (
    COPY_LANE,
    CORE_LANE,
    LINK_LANE,
    HbmServer,
    InFlight,
    Machine,
    Task,
)
from meshscope.events.timeline import repetition_starts

TICK = 1.0  # all durations are whole ticks, so that sampling at half ticks is exact


def _task(name: str, lane: str, ticks: int) -> Task:
    return Task(name=name, lane=lane, seconds=ticks * TICK, key=(lane, name))


Program = list[tuple]  # ("run", name, n), ("issue", name, lane, n, resource), ("wait", name)


def _random_program(seed: int) -> Program:
    rng = random.Random(seed)
    steps: list[tuple] = []
    open_names: list[str] = []
    for i in range(rng.randint(5, 25)):
        choice = rng.random()
        if choice < 0.4:
            steps.append(("run", f"w{i}", rng.randint(1, 6)))
        elif choice < 0.75:
            lane = rng.choice([LINK_LANE, LINK_LANE, COPY_LANE])
            resource = rng.choice(["x", "y"]) if lane == LINK_LANE else "copies"
            steps.append(("issue", f"c{i}", lane, rng.randint(1, 9), resource))
            open_names.append(f"c{i}")
        elif open_names:
            steps.append(("wait", open_names.pop(rng.randrange(len(open_names)))))
    return steps + [("wait", name) for name in open_names]


def _play(machine: Machine, program: Program) -> None:
    flights: dict[str, InFlight] = {}
    for what, name, *rest in program:
        if what == "run":
            machine.run(_task(name, CORE_LANE, rest[0]))
        elif what == "issue":
            flights[name] = machine.issue(_task(name, rest[0], rest[1]), [rest[2]])
        else:
            machine.wait(flights[name])


def _repeated(machine: Machine, n: int, body: Callable[[], None], *, is_folded: bool) -> None:
    if is_folded:
        machine.repeat(n, body)
    else:
        for _ in range(n):
            body()


def _sampled(program: Program) -> tuple[float, Counter[str]]:
    """Ticks of compute, exposed communication and idle time, sampled one by one."""
    counts: Counter[str] = Counter()
    under_way: dict[str, list] = {}  # name -> [lane, resource, ticks left]
    queues: dict[str, list[str]] = {}
    now = 0

    def tick(*, is_computing: bool) -> None:
        nonlocal now
        active = [queue[0] for queue in queues.values() if queue]
        on_links = any(under_way[name][0] == LINK_LANE for name in active)
        counts["compute" if is_computing else "exposed" if on_links else "idle"] += 1
        for name in active:
            under_way[name][2] -= 1
            if not under_way[name][2]:
                queues[under_way[name][1]].pop(0)
        now += 1

    for what, name, *rest in program:
        if what == "run":
            for _ in range(rest[0]):
                tick(is_computing=True)
        elif what == "issue":
            under_way[name] = [rest[0], rest[2], rest[1]]
            queues.setdefault(rest[2], []).append(name)
        else:
            while under_way[name][2]:
                tick(is_computing=False)
    return now, counts


@seeds(60)
def test_tally_equals_sampling_of_every_tick(seed: int):
    program = _random_program(seed)
    machine = Machine()
    _play(machine, program)
    now, counts = _sampled(program)
    sums = dict.fromkeys(("compute", "exposed", "idle"), 0.0)
    for key, value in machine.tally.items():
        sums[str(key[0])] = sums.get(str(key[0]), 0.0) + value
    assert machine.now_s == pytest.approx(now)
    shown = {what: sums[what] for what in ("compute", "exposed", "idle")}
    assert shown == pytest.approx({what: counts[what] for what in shown})
    assert sum(shown.values()) == pytest.approx(now)


@seeds(30)
@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_folded_loop_equals_the_unrolled_loop(seed: int, n: int):
    before, body, after = (_random_program(base + seed) for base in (2000, 1000, 3000))
    machines = []
    for is_folded in (True, False):
        machine = Machine()
        _play(machine, before)
        _repeated(machine, n, lambda machine=machine: _play(machine, body), is_folded=is_folded)
        _play(machine, after)
        machines.append(machine)
    folded, written = machines
    assert folded.now_s == pytest.approx(written.now_s)
    assert dict(folded.tally) == pytest.approx(dict(written.tally))


def test_spans_of_nested_loops_expand_to_every_repetition():
    machine, written = Machine(), Machine()

    def inner(m: Machine) -> None:
        m.run(_task("a", CORE_LANE, 2))
        m.run(_task("b", CORE_LANE, 3))

    def outer(m: Machine) -> None:
        m.repeat(4, lambda: inner(m))
        m.run(_task("c", CORE_LANE, 1))

    machine.repeat(6, lambda: outer(machine))
    for _ in range(6):
        for _ in range(4):
            inner(written)
        written.run(_task("c", CORE_LANE, 1))
    assert len(machine.spans) < len(written.spans)
    for name in "abc":
        spans = [s for s in machine.spans if s.task.name == name]
        starts = sorted(start for s in spans for start in repetition_starts(s.start_s, s.repeats))
        assert starts == pytest.approx([s.start_s for s in written.spans if s.task.name == name])


TICK_HBM = 1e-3
SHARES = {"a": 3.0}


class Started(NamedTuple):
    """A transfer: lane, start and seconds at the full rate."""

    lane: str
    at_s: int
    seconds: int


def _random_transfers(seed: int) -> list[Started]:
    rng = random.Random(seed)
    starts = sorted(rng.randint(0, 20) for _ in range(rng.randint(1, 8)))
    return [Started(rng.choice("abc"), at_s, rng.randint(1, 6)) for at_s in starts]


def _sampled_ends(transfers: list[Started]) -> list[float]:
    left = [float(transfer.seconds) for transfer in transfers]
    ends = [0.0] * len(transfers)
    now = 0.0
    while any(n > 0 for n in left):
        first: dict[str, int] = {}
        for i, transfer in enumerate(transfers):
            if left[i] > 0 and transfer.at_s <= now + TICK_HBM / 2:
                first.setdefault(transfer.lane, i)
        now += TICK_HBM
        total = sum(SHARES.get(lane, 1) for lane in first)
        for lane, i in first.items():
            left[i] -= TICK_HBM * SHARES.get(lane, 1) / total
            if left[i] <= 1e-9:
                left[i], ends[i] = 0.0, now
    return ends


@seeds(25)
def test_ends_equal_those_of_a_sampled_clock(seed: int):
    transfers = _random_transfers(seed)
    hbm = HbmServer(shares=SHARES)
    served = [hbm.start(t.lane, t.seconds, at_s=t.at_s) for t in transfers]
    ends = [hbm.finish(transfer) for transfer in served]
    assert ends == pytest.approx(_sampled_ends(transfers), abs=0.05)
    assert hbm.busy_s == pytest.approx(sum(t.seconds for t in transfers))


COPY = Task(name="c", lane=COPY_LANE, seconds=3, hbm_s=3, key=(COPY_LANE, "c"))
STARTS: dict[str, Callable[[Machine], InFlight]] = {
    "copy": lambda machine: machine.fetch(COPY),
    "collective": lambda machine: machine.issue(_task("ahead", LINK_LANE, 7), ["x"]),
}


def _played(n: int, what: str, *, is_folded: bool) -> Machine:
    """A loop that awaits what the iteration before has started, beside an op with a transfer of its own."""
    machine = Machine()
    flights = [STARTS[what](machine)]

    def body() -> None:
        flights.append(STARTS[what](machine))
        machine.run(Task(name="w", lane=CORE_LANE, seconds=2, hbm_s=1, key=(CORE_LANE, "w")))
        machine.wait(flights.pop(0))

    _repeated(machine, n, body, is_folded=is_folded)
    machine.wait(flights.pop())
    return machine


@pytest.mark.parametrize("what", STARTS)
@pytest.mark.parametrize("n", [1, 3, 50])
def test_a_loop_that_starts_ahead_folds_correctly(n: int, what: str):
    folded, written = (_played(n, what, is_folded=is_folded) for is_folded in (True, False))
    assert folded.now_s == pytest.approx(written.now_s)
    assert dict(folded.tally) == pytest.approx(dict(written.tally))


def test_loops_are_bound_by_the_hbm_or_the_links():
    assert _played(50, "copy", is_folded=True).now_s == pytest.approx(3 * 51 + 50)
    sent = _played(50, "collective", is_folded=True)
    assert sent.now_s == pytest.approx(51 * 7)
    assert sent.tally["exposed", (LINK_LANE, "ahead")] == pytest.approx(51 * 7 - 50 * 2)
