"""Containment, innermost intervals and unions against brute force, on random intervals."""

import numpy as np
from tables import seeds

from meshscope.events.intervals import CoveredTime, contains_another, innermost


def random_intervals(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Starts, ends, lines and marks of up to 40 intervals on a small grid, so that many ends are equal."""
    random = np.random.default_rng(seed)
    n = int(random.integers(0, 40))
    start = random.integers(0, 20, n)
    return (
        start,
        start + random.integers(0, 12, n),
        random.integers(0, 3, n),
        random.random(n) < 0.2,
    )


def first_of_equals(i: int, j: int, outer: np.ndarray) -> bool:
    return (not outer[i], i) < (not outer[j], j)


def contains_by_brute_force(start, end, line, outer) -> list[bool]:
    def holds(i: int, j: int) -> bool:
        if i == j or line[i] != line[j] or start[j] == end[j]:
            return False
        if (start[i], end[i]) == (start[j], end[j]):
            return first_of_equals(i, j, outer)
        return start[i] <= start[j] and end[j] <= end[i]

    n = range(len(start))
    return [any(holds(i, j) for j in n) for i in n]


@seeds(300)
def test_containment_equals_brute_force(seed: int) -> None:
    start, end, line, outer = random_intervals(seed)
    result = contains_another(start, end, line=line, outer=outer)
    assert result.tolist() == contains_by_brute_force(start, end, line, outer)


@seeds(200)
def test_innermost_equals_brute_force(seed: int) -> None:
    start, end, _, _ = random_intervals(seed)
    at = np.arange(-1, 35)
    indices = innermost(start, end, at=at)
    for time, index in zip(at, indices, strict=True):
        holding = [i for i in range(len(start)) if start[i] <= time < end[i]]
        if not holding:
            assert index == -1
        else:
            best = max((start[i], -end[i]) for i in holding)
            assert index in holding
            assert (start[index], -end[index]) == best


@seeds(100)
def test_covered_time_equals_a_grid(seed: int) -> None:
    start, end, _, _ = random_intervals(seed)
    grid = {t for s, e in zip(start, end, strict=True) for t in range(s, e)}
    assert CoveredTime.of(start, end).total() == len(grid)


def test_deeply_nested_intervals_need_no_recursion() -> None:
    n = 200_000
    start, end = np.arange(n), np.arange(2 * n, n, -1)
    held = contains_another(start, end, line=np.zeros(n, int), outer=np.zeros(n, bool))
    assert held.sum() == n - 1
    assert innermost(start, end, at=np.array([n]))[0] == n - 1
