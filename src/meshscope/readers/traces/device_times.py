"""Times of devices and collectives in a trace: exposure, load, transfer and waiting."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from meshscope.events.enums import Kind
from meshscope.events.measured import CollectiveTime, DeviceLoad, StepLabel
from meshscope.readers.traces.covered_time import CoveredTime
from meshscope.readers.traces.step_classes import LABELS, S
from meshscope.readers.traces.trace import Category


def with_exposure(events: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """The events with `is_collective`, `is_compute` and the time of collectives not hidden by compute."""
    category = ops["category"].gather(events["op"])
    marked = events.with_columns(
        (category == Category.COLLECTIVE.value).alias("is_collective"),
        (category == Category.COMPUTE.value).alias("is_compute"),
    )
    exposed = np.zeros(len(events), np.int64)
    start = events["start_ns"].to_numpy()
    end = start + events["dur_ns"].to_numpy()
    device = events["device"].to_numpy()
    collective, compute = marked["is_collective"].to_numpy(), marked["is_compute"].to_numpy()
    for number in np.unique(device[collective]):
        of_device = device == number
        covered = CoveredTime.of(start[of_device & compute], end[of_device & compute])
        at = np.flatnonzero(of_device & collective)
        exposed[at] = end[at] - start[at] - covered.within(start[at], end[at])
    return marked.with_columns(pl.Series("exposed_ns", exposed))


def loads(events: pl.DataFrame, steps: pl.DataFrame) -> Iterator[DeviceLoad]:
    """Busy, collective, exposed and idle time of each device over the steps of each label."""
    by_device = {of_device.device: of_device for of_device in _unions(events)}
    for spans in steps.partition_by("label", "device", maintain_order=True):
        number, label = spans["device"][0], LABELS[spans["label"][0]]
        if label is StepLabel.OUTSIDE:
            continue
        starts, ends = spans["start_ns"].to_numpy(), spans["end_ns"].to_numpy()
        unions = by_device[number]
        busy, collective, compute, both = (
            int(union.within(starts, ends).sum())
            for union in (unions.busy, unions.collective, unions.compute, unions.both)
        )
        window = int((ends - starts).sum())
        yield DeviceLoad(
            phase=label.phase,
            label=label,
            device=number,
            busy_s=busy * S,
            collective_s=collective * S,
            wait_s=None,
            exposed_s=(both - compute) * S,
            idle_s=(window - busy) * S,
            window_s=window * S,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unions:
    """The times in which a device runs ops, collectives, compute, and collectives or compute."""

    device: int
    busy: CoveredTime
    collective: CoveredTime
    compute: CoveredTime
    both: CoveredTime


def _unions(events: pl.DataFrame) -> Iterator[_Unions]:
    start = events["start_ns"].to_numpy()
    end = start + events["dur_ns"].to_numpy()
    device, collective = events["device"].to_numpy(), events["is_collective"].to_numpy()
    compute = events["is_compute"].to_numpy()
    for number in np.unique(device).tolist():
        of_device = device == number
        parts = (of_device, of_device & collective, of_device & compute)
        busy, *single = (CoveredTime.of(start[part], end[part]) for part in parts)
        both = CoveredTime.of(
            *(np.concatenate([getattr(u, n) for u in single]) for n in ("starts", "ends"))
        )
        yield _Unions(device=number, busy=busy, collective=single[0], compute=single[1], both=both)


def collective_times(collectives: pl.DataFrame, ops: pl.DataFrame) -> Iterator[CollectiveTime]:
    """Mean durations by label, kind and axis; the fastest participant shows the transfer time."""
    keys = ["label", "kind", "axis"]
    identity = ["kind", "opcode", "dtype", "payload_bytes", "axis"]
    runs = (
        collectives.join(_members(collectives, ops), on=["op", "device"], how="left", maintain_order="left")
        .sort("start_ns", maintain_order=True)
        .with_columns(
            pl.int_range(pl.len()).over(*identity, "members", "device").alias("occurrence"),
            pl.len().over(*identity, "members", "device").alias("n_of_device"),
        )
    )  # fmt: skip
    together = [*identity, "members", "n_of_device", "occurrence"]
    is_matched = pl.col("members").is_not_null() & (pl.len().over(together) > 1)
    matched = runs.with_columns(
        pl.when(is_matched).then(pl.col("dur_ns").min().over(together)).alias("wire_ns")
    )
    means = matched.group_by(keys, maintain_order=True).agg(
        pl.len().alias("n"),
        pl.col("dur_ns").mean(),
        pl.col("wire_ns").mean(),
        pl.col("wire_ns").is_not_null().all().alias("is_known"),
    )
    for record in means.sort("label", maintain_order=True).iter_rows(named=True):
        label, is_known = LABELS[record["label"]], record["is_known"]
        yield CollectiveTime(
            phase=label.phase,
            part=None,
            kind=Kind(record["kind"]),
            axis=record["axis"],
            n_executions=record["n"],
            dur_s=record["dur_ns"] * S,
            wire_s=record["wire_ns"] * S if is_known else None,
            wait_s=(record["dur_ns"] - record["wire_ns"]) * S if is_known else None,
        )


def _members(collectives: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """The devices that execute an op together with a device, as text; null if unknown."""
    pairs = collectives.select("op", "device").unique(maintain_order=True)
    groups_of = dict(ops.filter(pl.col("kind").is_not_null()).select("op", "groups").iter_rows())
    members: list[str | None] = []
    for op, device in pairs.iter_rows():
        of_device = [group for group in groups_of[op] or () if device in group]
        members.append(",".join(map(str, of_device[0])) if len(of_device) == 1 else None)
    return pairs.with_columns(pl.Series("members", members, pl.String))
