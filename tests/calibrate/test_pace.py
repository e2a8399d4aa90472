"""A calibration starts no piece of work after its budget."""

import pytest

from meshscope.backends.calibrate import measure as child
from meshscope.backends.calibrate.measure import collectives_budget_s, in_time


class Clock:
    """A clock that tests advance."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("budget_s", "seconds"), [(15.0, 7.5), (120.0, 60.0), (600.0, 540.0)])
def test_collectives_get_at_least_half_of_the_budget(budget_s: float, seconds: float) -> None:
    assert collectives_budget_s(budget_s) == seconds


def test_each_list_has_its_first_piece_and_those_that_begin_in_time(monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(child, "time", clock)
    done: list[int] = []
    for piece in in_time(range(5), 103.0):
        done.append(piece)
        clock.now += 2.0
    assert (done, list(in_time(range(3), 103.0))) == ([0, 1], [0])
