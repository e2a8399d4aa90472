"""Traffic intervals: bursts of an axis, the gaps between them, windows between axes, and periods.

A phase whose collectives all have times is measured in seconds. Otherwise the collectives are placed
by their order in the schedule, and the column `unit` says `operations` instead of `s`.
"""

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from meshscope.analysis.overlap import PS_PER_S, ratio, to_ps, union
from meshscope.analysis.volume import WHERE, collectives

SECONDS = "s"
OPERATIONS = "operations"
PLACE = (*WHERE, "stage", "device")
PLACED = (*PLACE, "unit")

_PERIOD = {
    **dict.fromkeys(("n_collectives", "n_steps", "period_collectives", "n_repeats"), pl.Int64),
    **dict.fromkeys(("covered_frac", "period_wire_bytes", "period_s"), pl.Float64),
}
_SPREAD = ("min", "mean", "max")


def placed(events: pl.DataFrame) -> pl.DataFrame:
    """Every execution of a collective with `begin` and `end`, in seconds or in operations.

    In operations, the i-th collective of the step occupies [i, i+1), and a collective that runs several
    times has one row for each execution. The body of a loop over layers is repeated layer by layer.
    """
    rows = collectives(events).with_row_index("position")
    is_timed = (
        pl.col("start_s").is_not_null() & pl.col("dur_s").is_not_null() & (pl.col("count") == 1)
    )
    known = rows.with_columns(is_timed.all().over(PLACE).alias("is_timed"))
    once = known.filter("is_timed").with_columns(
        pl.col("start_s").alias("begin"),
        (pl.col("start_s") + pl.col("dur_s")).alias("end"),
        pl.lit(SECONDS).alias("unit"),
    )
    order = in_schedule_order(known.filter(~pl.col("is_timed"))).select(
        pl.all().repeat_by("count").explode()
    )
    index = pl.int_range(pl.len()).over(PLACE).cast(pl.Float64)
    counted = order.with_columns(
        index.alias("begin"), (index + 1).alias("end"), pl.lit(OPERATIONS).alias("unit")
    )
    together = pl.concat([once, counted.select(once.columns)])
    return together.sort(*PLACE, "begin", "position", maintain_order=True, nulls_last=True)


def in_schedule_order(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows in the order in which a device runs them; `position` is their order in the table.

    A compiled program without loops is already in schedule order. In a loop over layers and in a
    prediction, the rows before the first layer come first, then each layer's rows, then the rest.
    """
    place = [*WHERE, "stage"]
    in_layers = pl.col("layer").is_not_null()
    first = pl.col("position").filter(in_layers).min().over(place)
    is_behind = ~in_layers & (pl.col("position") > first).fill_null(value=False)
    block = pl.when(in_layers).then(1).when(is_behind).then(2).otherwise(0)
    is_named_once = pl.col("hlo_name").is_not_null() & (pl.len().over([*place, "hlo_name"]) == 1)
    is_unrolled = is_named_once.all().over(place)
    key = pl.when(is_unrolled).then(0).otherwise(block)
    layer = pl.when(is_unrolled).then(0).otherwise(pl.col("layer").fill_null(-1))
    return rows.sort(*WHERE, key, layer, "position", maintain_order=True, nulls_last=True)


def bursts(placed_rows: pl.DataFrame, *, max_gap: float = 0.0) -> pl.DataFrame:
    """Intervals with traffic on an axis and no pause longer than `max_gap` (in the unit of the rows).

    Source: the up phases of network demand in Rajasekaran et al., "CASSINI" (NSDI 2024), applied to each
    axis of the plan.
    """
    records: list[tuple[object, ...]] = []
    keys = [*PLACED, "axis"]
    for rows in placed_rows.partition_by(keys, maintain_order=True):
        bounds = to_ps(rows.select("begin", "end").to_numpy())
        bounds[:, 1] = np.maximum(bounds[:, 1], bounds[:, 0] + 1)  # an instant lasts 1 ps
        merged = union(bounds, max_gap=round(max_gap * PS_PER_S))
        at = np.searchsorted(merged[:, 0], bounds[:, 0], side="right") - 1
        bytes_of = np.bincount(at, rows["wire_bytes"].fill_null(0.0).to_numpy(), len(merged))
        count_of = np.bincount(at, minlength=len(merged))
        place = rows.select(keys).row(0)
        spans = (merged / PS_PER_S).tolist()
        for span, n, n_bytes in zip(spans, count_of.tolist(), bytes_of.tolist(), strict=True):
            records.append((*place, n, n_bytes, *span))
    schema = {**{key: placed_rows.schema[key] for key in keys}, "n_collectives": pl.Int64}
    schema |= dict.fromkeys(("wire_bytes", "begin", "end"), pl.Float64)
    return pl.DataFrame(records, schema=schema, orient="row").sort(
        *PLACED, "begin", maintain_order=True, nulls_last=True
    )


def traffic_intervals(events: pl.DataFrame, *, max_gap: float = 0.0) -> pl.DataFrame:
    """Bursts of traffic on each axis, the gaps between them, and the fraction of the step with traffic.

    A burst is an interval with traffic and no pause longer than `max_gap`; a gap is the pause between two
    bursts. `window` is the time from the first to the last collective of any axis in the step, `up` the
    total length of the bursts, `down` = window - up, `up_frac` = up / window. Lengths are in `unit`:
    seconds, or operations of the schedule if the collectives have no times. Gaps are null with a single
    burst. The last recorded step counts.

    Source: the traffic interval within one parallelism of Cornell's course project on CCL-Bench; up and
    down phases of Rajasekaran et al., "CASSINI" (NSDI 2024).
    """
    rows = placed(events)
    merged = bursts(rows, max_gap=max_gap)
    window = rows.group_by(PLACED).agg(
        (pl.col("end").max() - pl.col("begin").min()).alias("window")
    )
    gap = pl.col("begin").shift(-1) - pl.col("end")
    up = pl.col("end") - pl.col("begin")
    table = merged.group_by(*PLACED, "axis", maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("n_bursts"),
        pl.col("n_collectives").sum(),
        *_spread(up, "burst"),
        *_spread(gap, "gap"),
        pl.col("wire_bytes").mean().alias("mean_burst_wire_bytes"),
        pl.col("wire_bytes").max().alias("max_burst_wire_bytes"),
        up.sum().alias("up"),
    )
    joined = table.join(window, on=PLACED, how="left", nulls_equal=True, maintain_order="left")
    down = (pl.col("window") - pl.col("up")).alias("down")
    return joined.with_columns(down, ratio("up", "window").alias("up_frac"))


def _spread(value: pl.Expr, name: str) -> list[pl.Expr]:
    return [getattr(value, how)().alias(f"{how}_{name}") for how in _SPREAD]


def axis_windows(events: pl.DataFrame) -> pl.DataFrame:
    """Windows between axes: time from the end of a burst of one axis to the next burst of another axis.

    `n` counts the changes from `from_axis` to `to_axis` in one step. A window is 0 if the bursts adjoin or
    overlap, and null if the collectives have no times.

    Source: windows between the traffic of different parallelisms, in which a network can be reconfigured:
    Ding et al., "Photonic Rails in ML Datacenters" (arXiv 2507.08119); the interval across parallelisms of
    Cornell's course project on CCL-Bench.
    """
    merged = bursts(placed(events))
    following = merged.with_columns(
        pl.col("axis", "begin").shift(-1).over(PLACED).name.prefix("next_"),
        (pl.int_range(pl.len()).over(PLACED) == pl.len().over(PLACED) - 1).alias("is_last"),
    ).filter(~pl.col("is_last"), pl.col("next_axis").ne_missing(pl.col("axis")))
    pause = (pl.col("next_begin") - pl.col("end")).clip(lower_bound=0)
    window = pl.when(pl.col("unit") == SECONDS).then(pause)
    return following.group_by(
        *PLACED,
        pl.col("axis").alias("from_axis"),
        pl.col("next_axis").alias("to_axis"),
        maintain_order=True,
    ).agg(
        pl.len().cast(pl.Int64).alias("n"),
        *(w.name.suffix("_s") for w in _spread(window, "window")),
    )


def period(events: pl.DataFrame) -> pl.DataFrame:
    """Period of the traffic within a step: its length in collectives, its repetitions, and its bytes.

    `period_collectives` is the smallest p with which the longest part of the step repeats: kind, axis and
    payload recur p collectives later, at least twice in total. `covered_frac` is the fraction of the step's
    collectives in this part. `period_s` is the median time between the starts of collectives that are p
    apart, null without times. The columns of the period are null if nothing repeats. The decode step
    itself repeats `n_steps` times.

    Source: periods of traffic of Rajasekaran et al., "CASSINI" (NSDI 2024), where the period is a training
    iteration. Layers within a step are the counterpart for inference.
    """
    records: list[dict[str, Any]] = []
    for rows in placed(events).partition_by(PLACED, maintain_order=True):
        # A number for each distinct (kind, axis, payload).
        key = pl.struct("kind", "axis", "payload_bytes").rank("dense")
        first, p, n_repeats = _smallest_period(rows.select(key).to_series().to_numpy())
        record = rows.select(*PLACE, "n_steps").row(0, named=True) | {"n_collectives": len(rows)}
        if p:
            begins = rows["begin"].to_numpy()[first : first + p * n_repeats]
            is_timed = rows["unit"][0] == SECONDS
            record |= {
                "period_collectives": p,
                "n_repeats": n_repeats,
                "covered_frac": p * n_repeats / len(rows),
                "period_wire_bytes": rows["wire_bytes"][first : first + p].sum(),
                "period_s": float(np.median(begins[p:] - begins[:-p])) if is_timed else None,
            }
        records.append(record)
    schema = {**{key: events.schema[key] for key in PLACE}, **_PERIOD}
    return pl.DataFrame(records, schema=schema)


def _smallest_period(letters: NDArray[np.integer]) -> tuple[int, int, int]:
    """Start, period and number of repetitions of the longest repeating part; period 0 for none."""
    best = (0, 0, 0)
    for p in range(1, len(letters) // 2 + 1):
        same = np.concatenate([[0], letters[:-p] == letters[p:], [0]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(same))  # where runs of equal letters begin and end
        if len(edges):
            starts, lengths = edges[::2], edges[1::2] - edges[::2]
            longest = int(np.argmax(lengths))
            n_repeats = (int(lengths[longest]) + p) // p
            if n_repeats >= 2 and n_repeats * p > best[1] * best[2]:
                best = (int(starts[longest]), p, n_repeats)
    return best
