"""The Pareto front of three figures of which less is better."""

from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096  # rows that are compared with the staircase together


def pareto_front(figures: NDArray[np.float64]) -> NDArray[np.int64]:
    """The rows of `figures` [n, 3] that no other row equals or beats in all three, first ones of equals.

    Rows are visited in lexicographic order; the staircase of the second and third figure of the rows so far
    decides each in logarithmic time.
    """
    order = np.lexsort((figures[:, 2], figures[:, 1], figures[:, 0]))
    second: list[float] = []  # rising
    third: list[float] = []  # falling
    front: list[int] = []
    for first_row in range(0, len(order), BLOCK):
        rows = order[first_row : first_row + BLOCK]
        for row in rows[~_is_beaten(figures[rows], second, third)]:
            y, z = figures[row, 1], figures[row, 2]
            at = bisect_right(second, y)
            if at and third[at - 1] <= z:
                continue
            first = bisect_left(second, y)
            last = first
            while last < len(second) and third[last] >= z:
                last += 1
            second[first:last], third[first:last] = [y], [z]
            front.append(int(row))
    return np.array(front, dtype=np.int64)


def _is_beaten(
    figures: NDArray[np.float64], second: list[float], third: list[float]
) -> NDArray[np.bool_]:
    """[n] whether a step of the staircase is no more than the second and third figure of a row."""
    at = np.searchsorted(np.array(second), figures[:, 1], side="right")
    lowest = np.array([np.inf, *third])[at]
    return lowest <= figures[:, 2]
