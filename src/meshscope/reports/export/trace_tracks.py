"""The executions of an imported trace as tracks for the trace writers, in columns throughout."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from meshscope.analysis.timeline import read_executions
from meshscope.events.measured import StepLabel
from meshscope.events.timeline import ARGUMENT, STEP_CLASSES, Timeline, Track, printable
from meshscope.reports.export.run_timeline import PS_PER_NS, free_lane, tracks_of

MAX_SLICES = 1_000_000
_FACTS = (
    *("kind", "axis", "part", "layer", "dtype", "shape", "payload_bytes", "wire_bytes", "opcode"),
    *("group_size", "n_groups", "hlo_name"),
)
_IDENTITY = ("kind", "opcode", "dtype", "payload_bytes", "axis", "hlo_name", "members")
_CLASSES = pl.Series(STEP_CLASSES, dtype=pl.String)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTracks:
    """A timeline of the last `n_shown` of the `n_executions` of a trace."""

    timeline: Timeline
    n_shown: int
    n_executions: int


def trace_tracks(folder: Path, title: str) -> TraceTracks:
    """Steps, compute, copies and collectives of every device; a lane for each stream and axis."""
    rows, ops, n_executions = read_executions(folder, max_rows=MAX_SLICES)
    axis = pl.concat_str(pl.lit("communication "), pl.col("axis").fill_null("of unknown axis"))
    category = {"collective": axis, "copy": pl.lit("copies")}
    lane = pl.coalesce(
        *(pl.when(pl.col("category") == name).then(of) for name, of in category.items()),
        pl.lit("compute"),
    )
    lanes = rows.join(ops.select("op", lane=lane), on="op", how="left", maintain_order="left")
    timeline = Timeline(
        tracks=_tracks(lanes, _kinds(ops), _flows(rows, ops), printable(title)),
        metadata={"title": printable(title), "a length is": "time"},
    )
    return TraceTracks(timeline=timeline, n_shown=len(rows), n_executions=n_executions)


def _kinds(ops: pl.DataFrame) -> pl.DataFrame:
    place = pl.concat_str(
        pl.coalesce("kind", "hlo_name", "name"),
        "part",
        pl.concat_str(pl.lit("layer "), pl.col("layer").cast(pl.String)),
        separator=" ",
        ignore_nulls=True,
    )
    return ops.select(
        pl.col("op").alias("kind"),
        place.alias("name"),
        *(pl.col(fact).alias(ARGUMENT + fact) for fact in _FACTS),
    )


def _tracks(
    rows: pl.DataFrame, kinds: pl.DataFrame, flows: pl.DataFrame, title: str
) -> Iterator[Track]:
    for (device,), of_device in sorted(rows.partition_by("device", as_dict=True).items()):
        process = f"device {device}: {title}"
        step_kinds, steps = _steps(of_device)
        tracks = [("steps", step_kinds, steps)] if len(steps) else []
        for (lane, stream), of_lane in of_device.partition_by(
            "lane", "stream", as_dict=True
        ).items():
            slices = (
                of_lane.join(flows, on="row", how="left", maintain_order="left")
                .sort("start_ns", maintain_order=True)
                .select(
                    pl.col("op").alias("kind"),
                    pl.col("start_ns").mul(PS_PER_NS).alias("start_ps"),
                    pl.col("dur_ns").mul(PS_PER_NS).alias("dur_ps"),
                    "flows",
                )
            )
            for index, part in enumerate(_without_overlap(slices)):
                more = f" ({index + 1})" if index else ""
                tracks.append((f"{lane}, stream {stream}{more}", kinds, part))
        tracks[1:] = sorted(tracks[1:], key=lambda track: track[0])
        yield from tracks_of(int(device) + 1, process, (title, f"device {device}"), tracks)


def _steps(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    is_step = pl.col("step_class") != STEP_CLASSES.index(StepLabel.OUTSIDE.value)
    spans = (
        rows.filter(is_step)
        .group_by("step_class", "step", maintain_order=True)
        .agg(pl.col("start_ns").min(), end_ns.max().alias("end_ns"))
        .sort("start_ns")
        .with_row_index("kind")
    )
    name = pl.concat_str(_CLASSES.gather(spans["step_class"]), pl.col("step"), separator=" ")
    return spans.select("kind", name.alias("name")), spans.select(
        "kind",
        (pl.col("start_ns") * PS_PER_NS).alias("start_ps"),
        ((pl.col("end_ns") - pl.col("start_ns")) * PS_PER_NS).alias("dur_ps"),
    )


def _without_overlap(slices: pl.DataFrame) -> list[pl.DataFrame]:
    """The slices on as few lanes as they need; asynchronous collectives may overlap."""
    end_ps = slices["start_ps"] + slices["dur_ps"]
    if not (slices["start_ps"] < end_ps.cum_max().shift(1).fill_null(0)).any():
        return [slices]
    ends: list[float] = []
    times = zip(slices["start_ps"].to_list(), end_ps.to_list(), strict=True)
    lanes = [free_lane(ends, start, end) for start, end in times]
    return slices.with_columns(pl.Series("lane", lanes)).partition_by("lane", include_key=False)


def _flows(rows: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """Row numbers with `flows`, which join the executions of one collective on the devices of its group."""
    keys = ["op", "device"]
    facts = ops.filter(pl.col("kind").is_not_null(), pl.col("groups").is_not_null())
    collectives = rows.join(facts, on="op", how="inner")
    pairs = collectives.select(*keys, "groups").unique(keys, maintain_order=True)
    members = [
        next((",".join(map(str, g)) for g in groups if device in g and len(g) > 1), None)
        for _, device, groups in pairs.iter_rows()
    ]
    named = collectives.join(
        pairs.select(*keys, pl.Series("members", members, dtype=pl.String)), on=keys
    ).drop_nulls("members")
    counted = named.sort("start_ns", maintain_order=True).with_columns(
        pl.int_range(pl.len()).over(*_IDENTITY, "device").alias("occurrence"),
        pl.len().over(*_IDENTITY, "device").alias("n"),
    )
    together = [*_IDENTITY, "n", "occurrence"]
    last = pl.len().over(together) - 1
    position = pl.col("device").rank("ordinal").over(together) - 1
    flow = pl.struct(
        pl.struct(together).rank("dense").cast(pl.UInt64).alias("id"),
        pl.when(position == 0).then(pl.lit("s")).when(position == last).then(pl.lit("f"))
        .otherwise(pl.lit("t")).alias("position"),
    )  # fmt: skip
    joined = counted.with_columns(flow.alias("flow"), last.alias("last")).filter(pl.col("last") > 0)
    return joined.select("row", pl.concat_list("flow").alias("flows"))
