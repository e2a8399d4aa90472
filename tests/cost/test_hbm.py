"""The HBM server against a clock that serves one thousandth of a second at a time."""

import random
from typing import NamedTuple

import pytest

from meshscope.cost.machine import COPY_LANE, CORE_LANE, HbmServer, InFlight, Machine, Task

TICK = 1e-3
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
            if left[i] > 0 and transfer.at_s <= now + TICK / 2:
                first.setdefault(transfer.lane, i)
        now += TICK
        total = sum(SHARES.get(lane, 1) for lane in first)
        for lane, i in first.items():
            left[i] -= TICK * SHARES.get(lane, 1) / total
            if left[i] <= 1e-9:
                left[i], ends[i] = 0.0, now
    return ends


@pytest.mark.parametrize("seed", range(25))
def test_ends_equal_those_of_a_sampled_clock(seed: int):
    transfers = _random_transfers(seed)
    hbm = HbmServer(shares=SHARES)
    served = [hbm.start(t.lane, t.seconds, at_s=t.at_s) for t in transfers]
    ends = [hbm.finish(transfer) for transfer in served]
    assert ends == pytest.approx(_sampled_ends(transfers), abs=0.05)
    assert hbm.busy_s == pytest.approx(sum(t.seconds for t in transfers))


def test_lanes_share_the_rate_and_transfers_of_a_lane_queue():
    hbm = HbmServer()
    first, second, other = (hbm.start(lane, 4, at_s=0) for lane in ("a", "a", "b"))
    assert (hbm.finish(first), hbm.finish(other), hbm.finish(second)) == (8, 8, 12)


def _played(n: int, *, is_folded: bool) -> Machine:
    """A loop that awaits the copy of the iteration before, beside an op with a transfer of its own."""
    machine = Machine()
    flights: list[InFlight] = []

    def fetch() -> None:
        task = Task(name="c", lane=COPY_LANE, seconds=3, hbm_s=3, key=(COPY_LANE, "c"))
        flights.append(machine.fetch(task))

    def body() -> None:
        fetch()
        machine.run(Task(name="w", lane=CORE_LANE, seconds=2, hbm_s=1, key=(CORE_LANE, "w")))
        machine.wait(flights.pop(0))

    fetch()
    if is_folded:
        machine.repeat(n, body)
    else:
        for _ in range(n):
            body()
    machine.wait(flights.pop())
    return machine


@pytest.mark.parametrize("n", [1, 3, 50])
def test_folded_loop_equals_the_written_loop(n: int):
    folded, written = _played(n, is_folded=True), _played(n, is_folded=False)
    assert folded.now_s == pytest.approx(written.now_s)
    assert dict(folded.tally) == pytest.approx(dict(written.tally))


def test_loop_with_more_transfers_than_work_is_bound_by_the_hbm():
    n = 50
    assert _played(n, is_folded=True).now_s == pytest.approx(3 * (n + 1) + n)
