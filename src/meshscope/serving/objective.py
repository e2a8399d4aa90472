"""What a search optimizes: throughput or latency, under limits on the latencies of a request."""

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshscope.errors import SpecError

N = TypeVar("N", float, NDArray[np.float64])
_LIMITS = ("ttft", "tpot")
_NUMBER = re.compile(r"(?P<value>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e-?[0-9]{1,2})?)(?P<unit>s|ms)?")


class Goal(StrEnum):
    """What to optimize among the plans that meet the limits."""

    THROUGHPUT = "throughput"  # output tokens of the request a second and chip
    LATENCY = "latency"  # seconds of the request, prefill and all decode steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A goal, and the most seconds for the first token and for each later one; None without a limit."""

    goal: Goal = Goal.THROUGHPUT
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def has_limits(self) -> bool:
        """Whether a latency is limited."""
        return self.ttft_s is not None or self.tpot_s is not None

    def meets(self, ttft_s: Any, tpot_s: Any) -> Any:
        """Whether latencies, as numbers or arrays, are within the limits."""
        is_fast = ttft_s <= (np.inf if self.ttft_s is None else self.ttft_s)
        return is_fast & (tpot_s <= (np.inf if self.tpot_s is None else self.tpot_s))

    def excess(self, ttft_s: Any, tpot_s: Any) -> Any:
        """The factor by which latencies, as numbers or arrays, exceed the limits."""
        return np.maximum(ttft_s / (self.ttft_s or np.inf), tpot_s / (self.tpot_s or np.inf))

    def cost(self, e2e_s: N, tokens_per_s: N) -> N:
        """What the goal minimizes."""
        return -tokens_per_s if self.goal is Goal.THROUGHPUT else e2e_s


def objective_of(slo: str | None, goal: Goal = Goal.THROUGHPUT) -> Objective:
    """The objective of `ttft=0.5,tpot=0.03`; SpecError for anything else."""
    if slo is None:
        return Objective(goal=goal)
    if "=" not in slo:
        raise SpecError(f"--slo '{slo}' is no limit in seconds, such as ttft=0.5,tpot=0.03.")
    limits: dict[str, float] = {}
    for item in slo.split(","):
        name, _, value = (word.strip() for word in item.partition("="))
        if name not in _LIMITS:
            raise SpecError(f"--slo '{slo}': '{name}' is not a limit. Use ttft, tpot or both.")
        if name in limits:
            raise SpecError(f"--slo '{slo}': {name} appears twice. Give it once.")
        match = _NUMBER.fullmatch(value)
        if match is None or not (seconds := float(match["value"])):
            raise SpecError(
                f"--slo '{slo}': {name}='{value}' is no positive number of seconds. "
                f"Use for example {name}=0.5 or {name}=500ms."
            )
        limits[name] = seconds / 1000 if match["unit"] == "ms" else seconds
    return Objective(goal=goal, ttft_s=limits.get("ttft"), tpot_s=limits.get("tpot"))


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
        # A step of the staircase that is no more than the second and third figure beats a row.
        step = np.searchsorted(np.array(second), figures[rows, 1], side="right")
        lowest = np.array([np.inf, *third])[step]
        for row in rows[lowest > figures[rows, 2]]:
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
