"""Sets the clocks of hosts and files by the collectives that they share.

A collective ends on all its devices within microseconds, so the median difference of the ends of shared
collectives is the offset of two clocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

MIN_SHARED = 3  # collectives needed to set a clock by their ends


class Skew(NamedTuple):
    """What to add to times, by the ends of `n_shared` collectives, which vary by `spread`; in their unit."""

    offset: float
    n_shared: int
    spread: float


def collective_ends(events: pl.DataFrame, same: Sequence[str]) -> pl.DataFrame:
    """The last `end` of each collective, which `same` and its occurrence identify; from device, start and dur."""
    of_device = [*same, "device"]
    ends = events.sort("start", maintain_order=True).with_columns(
        end=pl.col("start") + pl.col("dur"),
        occurrence=pl.int_range(pl.len()).over(of_device),
        n=pl.len().over(of_device),  # who lost events counts otherwise
    )
    return ends.group_by(*same, "occurrence", "n").agg(pl.col("end").max())


def skews(ends: Sequence[pl.DataFrame]) -> list[Skew | None]:
    """The skew of each table of `collective_ends` to the first; None if no chain of shared collectives leads there."""
    known: dict[int, Skew] = {0: Skew(0.0, 0, 0.0)}
    for reference in (queue := [0]):
        for other in (index for index in range(len(ends)) if index not in known):
            keys = [name for name in ends[other].columns if name != "end"]
            both = ends[reference].join(ends[other], on=keys, nulls_equal=True, suffix="_other")
            if len(both) >= MIN_SHARED:
                apart = (both["end"] - both["end_other"]).to_numpy()
                offset = known[reference].offset + float(np.median(apart))
                known[other] = Skew(offset, len(apart), float(np.ptp(apart)) / 2)
                queue.append(other)
    return [known.get(index) for index in range(len(ends))]
