"""The programs of a live run with their collectives, and rows summed over the chunks of a prompt."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.readers.hlo.module import HloModule

_SAME = ("phase", "stage", "layer", "part", "kind", "axis", "groups", "dtype", "shape")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfiledProgram:
    """A program that ran `n_runs` times in a profile.

    `rows` are its collectives, with the counts of one step of its phase.
    """

    phase: Phase
    module: HloModule
    rows: Sequence[Collective]
    n_runs: int


def summed_rows(parts: Sequence[Sequence[Collective]]) -> list[Collective]:
    """The rows of the last part with the counts of equal rows of the others, then all other rows."""
    summed: dict[Hashable, Collective] = {}
    for rows in reversed(parts):
        n_equal: Counter[Hashable] = Counter()
        for row in rows:
            same = tuple(getattr(row, name) for name in _SAME)
            key = (same, n_equal[same])
            n_equal[same] += 1
            known = summed.get(key)
            summed[key] = row if known is None else replace(known, count=known.count + row.count)
    return list(summed.values())
