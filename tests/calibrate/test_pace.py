"""The time left of a calibration is that of the latest pieces of work, and never more than the budget."""

import pytest

from meshscope.backends.calibrate import worker as child
from meshscope.backends.calibrate.worker import Pace
from meshscope.events.enums import Kind

KINDS = (Kind.ALL_REDUCE, Kind.PERMUTE)


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(child, "time", found)
    return found


def pace(budget_s: float) -> Pace:
    """Two kinds over one axis, five sizes: ten pieces."""
    work = [(kind, "tp", 8**power) for power in range(5) for kind in KINDS]
    return Pace(work=work, budget_s=budget_s, began_s=100.0)


def test_the_latest_size_tells_of_all_that_are_left(clock: Clock) -> None:
    going, left = pace(1000.0), list[float | None]()
    for number, _ in enumerate(going):
        left.append(going.left_s)
        clock.now += 1.0 if number < 4 else 3.0
    assert left == [None, 9.0, 8.0, 7.0, 6.0, 10.0, 12.0, 9.0, 6.0, 3.0]


def test_nothing_is_begun_after_the_budget_and_the_time_left_is_within_it(clock: Clock) -> None:
    going, left = pace(5.0), list[float | None]()
    for _ in going:
        left.append(going.left_s)
        clock.now += 2.0
    assert (going.n_begun, left) == (3, [None, 3.0, 1.0])
