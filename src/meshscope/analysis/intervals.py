"""Traffic intervals: bursts of an axis, the gaps between them, windows between axes, and periods.

Rows with times are placed in seconds. Where a phase has rows without times, all its rows are placed by
their order in the schedule, and every figure says so: `unit` is `s`, or `operations` (how many
collectives of the step lie there). No figure mixes both.
"""

import numpy as np
import polars as pl
from numpy.typing import NDArray

from meshscope.analysis.spans import PS_PER_S, Spans, union
from meshscope.analysis.volume import WHERE, collectives

SECONDS = "s"
OPERATIONS = "operations"
PLACE = (*WHERE, "stage", "device")
PLACED = (*PLACE, "unit")

_BURST = {
    "n_collectives": pl.Int64,
    "wire_bytes": pl.Float64,
    "begin": pl.Float64,
    "end": pl.Float64,
}
_SPREAD = ("min", "mean", "max")


def placed(events: pl.DataFrame) -> pl.DataFrame:
    """Every execution of a collective with `begin` and `end`, in the `unit` that its phase allows.

    Rows that run several times in a step stand there as often, in operations: a row has one start. In operations, the i-th collective of the
    step lies in [i, i+1). Rows of a loop over layers are taken layer by layer, as they run.
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
    """Rows of one or more tables in the order in which a device runs them, `position` being the table's.

    A compiled program without a loop stands in the order of its schedule. In a loop over layers, and in
    a prediction, the rows before the first layer come first, then each layer's, then the others.
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
    """Times in which an axis has traffic without a pause longer than `max_gap` (in the rows' unit).

    Source: the up phases of Rajasekaran et al., "CASSINI" (NSDI 2024), "Up-Down" phases of network
    demand, for each axis of the plan by itself.
    """
    found: list[tuple[object, ...]] = []
    keys = [*PLACED, "axis"]
    for own in placed_rows.partition_by(keys, maintain_order=True):
        named = own.row(0, named=True)
        bounds = own.select("begin", "end").to_numpy()
        merged = union(_ps(bounds), max_gap=round(max_gap * PS_PER_S))
        at = np.searchsorted(merged[:, 0], _ps(bounds)[:, 0], side="right") - 1
        bytes_of = np.bincount(at, own["wire_bytes"].fill_null(0.0).to_numpy(), len(merged))
        count_of = np.bincount(at, minlength=len(merged))
        for burst, n, n_bytes in zip(merged / PS_PER_S, count_of, bytes_of, strict=True):
            place = (named[key] for key in keys)
            found.append((*place, int(n), float(n_bytes), float(burst[0]), float(burst[1])))
    schema = {**{key: placed_rows.schema[key] for key in keys}, **_BURST}
    return pl.DataFrame(found, schema=schema, orient="row").sort(
        *PLACED, "begin", maintain_order=True, nulls_last=True
    )


def _ps(bounds: NDArray[np.float64]) -> Spans:
    return np.rint(bounds * PS_PER_S).astype(np.int64)


def traffic_intervals(events: pl.DataFrame, *, max_gap: float = 0.0) -> pl.DataFrame:
    """Traffic of each axis by itself: bursts, the gaps between them, and its share of the step.

    A burst is a time of traffic without a pause longer than `max_gap`, a gap the pause between two
    bursts. `up` is all bursts together, `down` the rest of the time from the first to the last
    collective of any axis in the step, `up_frac` the share of the former. Figures are in `unit`: seconds,
    or operations of the schedule where rows have no times. Gaps are null with a single burst. Of several
    recorded steps the last is taken.

    Source: traffic interval within one parallelism, as Cornell's course project on CCL-Bench names it;
    up and down phases as Rajasekaran et al., "CASSINI" (NSDI 2024).
    """
    rows = placed(events)
    found = bursts(rows, max_gap=max_gap)
    window = rows.group_by(PLACED).agg(
        (pl.col("end").max() - pl.col("begin").min()).alias("window")
    )
    gap = pl.col("begin").shift(-1) - pl.col("end")
    up = pl.col("end") - pl.col("begin")
    table = found.group_by(*PLACED, "axis", maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("n_bursts"),
        pl.col("n_collectives").sum(),
        *_spread(up, "burst"),
        *_spread(gap, "gap"),
        pl.col("wire_bytes").mean().alias("mean_burst_wire_bytes"),
        pl.col("wire_bytes").max().alias("max_burst_wire_bytes"),
        up.sum().alias("up"),
    )
    joined = table.join(window, on=PLACED, how="left", nulls_equal=True, maintain_order="left")
    share = pl.when(pl.col("window") > 0).then(pl.col("up") / pl.col("window"))
    down = (pl.col("window") - pl.col("up")).alias("down")
    return joined.with_columns(down, share.alias("up_frac"))


def _spread(value: pl.Expr, name: str) -> list[pl.Expr]:
    return [getattr(value, how)().alias(f"{how}_{name}") for how in _SPREAD]


def axis_windows(events: pl.DataFrame) -> pl.DataFrame:
    """Windows between axes: from the end of one axis's burst to the next burst of another axis.

    `n` counts the changes from `from_axis` to `to_axis` in one step; a window is 0 where the bursts
    adjoin or overlap. Where rows have no times, changes are counted, and their lengths are null: between
    two collectives that follow each other lies no third.

    Source: windows between the traffic of different parallelisms, in which a network can be
    reconfigured, as Ding et al., "Photonic Rails in ML Datacenters" (arXiv 2507.08119); interval across
    parallelisms as Cornell's course project on CCL-Bench names it.
    """
    found = bursts(placed(events))
    following = found.with_columns(
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
    """After how many collectives the traffic of a step repeats, how often, and what one period sends.

    The period is the smallest number of collectives p for which the longest stretch of the step repeats
    itself (kind, axis and payload p collectives later are the same, at least twice in all). `period_s` is
    the median time between the beginnings of collectives that are p apart, null without times. Null where
    nothing repeats. Over decode, the whole step repeats `n_steps` times: the step is the longer period.

    Source: periods of traffic as Rajasekaran et al., "CASSINI" (NSDI 2024), which takes an iteration of
    training for the period; layers within a step, and decode steps, are our reading for inference.
    """
    found: list[dict[str, object]] = []
    for own in placed(events).partition_by(PLACED, maintain_order=True):
        named = own.row(0, named=True)
        first, p, n_repeats = _smallest_period(_letters(own))
        is_timed = named["unit"] == SECONDS
        begins = own["begin"].to_numpy()[first : first + p * n_repeats] if p else np.empty(0)
        bytes_of = own["wire_bytes"][first : first + p] if p else None
        found.append(
            {
                **{key: named[key] for key in PLACE},
                "n_collectives": len(own),
                "n_steps": named["n_steps"],
                "period_collectives": p or None,
                "n_repeats": n_repeats if p else None,
                "covered_frac": p * n_repeats / len(own) if p else None,
                "period_wire_bytes": None if bytes_of is None else bytes_of.sum(),
                "period_s": float(np.median(begins[p:] - begins[:-p])) if p and is_timed else None,
            }
        )
    schema = {
        **{key: events.schema[key] for key in PLACE},
        "n_collectives": pl.Int64,
        "n_steps": pl.Int64,
        "period_collectives": pl.Int64,
        "n_repeats": pl.Int64,
        "covered_frac": pl.Float64,
        "period_wire_bytes": pl.Float64,
        "period_s": pl.Float64,
    }
    return pl.DataFrame(found, schema=schema)


def _letters(rows: pl.DataFrame) -> NDArray[np.int64]:
    """A number for each sort of collective, in order [n]."""
    told = rows.select(pl.struct("kind", "axis", "payload_bytes").rank("dense").alias("letter"))
    return told["letter"].to_numpy().astype(np.int64)


def _smallest_period(letters: NDArray[np.int64]) -> tuple[int, int, int]:
    """Where the longest repetition begins, its period and how often it repeats; period 0 for none."""
    best = (0, 0, 0)
    for p in range(1, len(letters) // 2 + 1):
        first, run = _longest_run(letters[:-p] == letters[p:])
        n_repeats = (run + p) // p
        if n_repeats >= 2 and n_repeats * p > best[1] * best[2]:
            best = (first, p, n_repeats)
    return best


def _longest_run(same: NDArray[np.bool_]) -> tuple[int, int]:
    """Where the longest run of True begins, and its length."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], same.astype(np.int8), [0]])))
    if not len(edges):
        return 0, 0
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    longest = int(np.argmax(lengths))
    return int(starts[longest]), int(lengths[longest])
