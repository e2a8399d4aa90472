"""The remaining time of a calibration follows its latest pieces of work, within the budget."""

import pytest

from meshscope.backends.calibrate import measure as child
from meshscope.backends.calibrate.measure import Pace, collectives_budget_s
from meshscope.events.enums import Kind

KINDS = (Kind.ALL_REDUCE, Kind.PERMUTE)


class Clock:
    """A clock that tests advance."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(child, "time", fake)
    return fake


WORK = [(kind, "tp", 8**power) for power in range(5) for kind in KINDS]  # five sizes of two kinds


def test_the_time_of_the_latest_size_applies_to_all_remaining_pieces(clock: Clock) -> None:
    going, left = Pace(end_s=1100.0), list[float | None]()
    for number, _ in enumerate(going.of(WORK)):
        left.append(going.left_s(len(KINDS)))
        clock.now += 1.0 if number < 4 else 3.0
    assert left == [None, 9.0, 8.0, 7.0, 6.0, 10.0, 12.0, 9.0, 6.0, 3.0]


def test_no_piece_starts_after_the_budget_and_the_remaining_time_is_within_it(clock: Clock) -> None:
    going, left = Pace(end_s=105.0), list[float | None]()
    for _ in going.of(WORK):
        left.append(going.left_s(len(KINDS)))
        clock.now += 2.0
    assert (going.n_left_out, left) == (7, [None, 3.0, 1.0])


@pytest.mark.parametrize(("budget_s", "seconds"), [(15.0, 7.5), (120.0, 60.0), (600.0, 540.0)])
def test_collectives_get_at_least_half_of_the_budget(budget_s: float, seconds: float) -> None:
    assert collectives_budget_s(budget_s) == seconds


def test_each_list_has_its_first_piece_and_the_others_are_counted(clock: Clock) -> None:
    rest = Pace(end_s=103.0)
    done: list[int] = []
    for piece in rest.of(range(5)):
        done.append(piece)
        clock.now += 2.0
    assert (done, list(rest.of(range(3))), rest.n_left_out) == ([0, 1], [0], 3 + 2)
