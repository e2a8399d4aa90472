"""The Pareto front of three figures of which less is better."""

from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray


def pareto_front(figures: NDArray[np.float64]) -> NDArray[np.int64]:
    """The rows of `figures` [n, 3] that no other row equals or beats in all three, first ones of equals.

    Rows are visited in lexicographic order; the staircase of the second and third figure of the rows so far
    decides each in logarithmic time.
    """
    order = np.lexsort((figures[:, 2], figures[:, 1], figures[:, 0]))
    second: list[float] = []  # rising
    third: list[float] = []  # falling
    front: list[int] = []
    for row in order:
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
