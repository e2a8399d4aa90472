"""Times of steps, devices and collectives in a trace: exposure, load, transfer and waiting."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import polars as pl

from meshscope.events.enums import Kind, Part
from meshscope.events.intervals import CoveredTime
from meshscope.events.measured import CollectiveTime, DeviceLoad, StepClass, StepLabel, TransferTime
from meshscope.readers.traces.trace import Category

S = 1e-9
LABELS = tuple(StepLabel)


def labeled(events: pl.DataFrame, steps: pl.DataFrame) -> tuple[pl.DataFrame, dict[StepLabel, int]]:
    """The events with their step's `label` (index in `LABELS`) and `step_number`, and the steps of each label.

    `step_number` is the index among the steps of its class on its device; null outside of steps.
    Steps without ops on a device, such as other ranks', do not count there.
    """
    if steps.is_empty():
        whole = pl.lit(LABELS.index(StepLabel.TRACE), pl.Int8).alias("label")
        number = pl.lit(0, pl.Int32).alias("step_number")
        return events.with_columns(whole, number), {StepLabel.TRACE: 1}
    labels = [LABELS.index(StepLabel(kind or StepLabel.STEP)) for kind in steps["kind"]]
    facts = steps.select("step", pl.Series("label", labels, dtype=pl.Int8), at="start_ns")
    keys = ["device", "step"]
    number = pl.col("at").rank("ordinal").over("label", "device") - 1
    of_devices = events.select(keys).drop_nulls().unique().join(facts, on="step")
    of_devices = of_devices.sort("at", "step", "device")
    of_devices = of_devices.with_columns(step_number=number.cast(pl.Int32))
    counts = of_devices.group_by("label", "device").len().group_by("label").agg(pl.col("len").max())
    by_label = dict(counts.sort("label").iter_rows())
    joined = events.join(of_devices.drop("at"), on=keys, how="left", maintain_order="left")
    events = joined.with_columns(pl.col("label").fill_null(LABELS.index(StepLabel.OUTSIDE)))
    return events, {LABELS[label]: n for label, n in by_label.items()} | {StepLabel.OUTSIDE: 1}


def step_table(events: pl.DataFrame) -> pl.DataFrame:
    """The device time of each step on each device: from its first to the end of its last op."""
    step = pl.when(pl.col("label") != LABELS.index(StepLabel.TRACE)).then("step")
    return (
        events.with_columns(step.alias("step"))
        .group_by("label", "device", "step", maintain_order=True)
        .agg(pl.col("start_ns").min(), end_ns=(pl.col("start_ns") + pl.col("dur_ns")).max())
    )


def step_classes(steps: pl.DataFrame, counts: Mapping[StepLabel, int]) -> Iterator[StepClass]:
    """Number, device time and tokens of the steps of each class."""
    for label, n_steps in counts.items():
        of_label = steps.filter(pl.col("label") == LABELS.index(label))
        if not of_label.is_empty():
            dur_s = ((of_label["end_ns"] - of_label["start_ns"]) * S).to_numpy()
            tokens = of_label.select(pl.col("prefill_tokens", "decode_tokens").mean())
            yield StepClass(
                label=label,
                n_steps=n_steps,
                mean_s=float(np.mean(dur_s)),
                p50_s=float(np.quantile(dur_s, 0.5)),
                p99_s=float(np.quantile(dur_s, 0.99)),
                **tokens.row(0, named=True),
            )


class DeviceTimes(NamedTuple):
    """The times in which a device runs ops, collectives, compute, and either of the last two."""

    busy: CoveredTime
    collective: CoveredTime
    compute: CoveredTime
    either: CoveredTime


def with_exposure(events: pl.DataFrame) -> tuple[pl.DataFrame, dict[int, DeviceTimes]]:
    """The events, which have their `category`, with `is_collective` and `exposed_ns`, and the times of each device.

    `exposed_ns` is the time of collectives not hidden by compute.
    """
    collective, compute = (
        (events["category"] == kind.value).to_numpy()
        for kind in (Category.COLLECTIVE, Category.COMPUTE)
    )
    start, device = events["start_ns"].to_numpy(), events["device"].to_numpy()
    end = start + events["dur_ns"].to_numpy()
    exposed = np.zeros(len(events), np.int64)
    times: dict[int, DeviceTimes] = {}
    for number in np.unique(device).tolist():
        masks = (True, collective, compute, collective | compute)
        places = [np.flatnonzero((device == number) & mask) for mask in masks]
        times[number] = DeviceTimes(*(CoveredTime.of(start[at], end[at]) for at in places))
        at = places[1]
        exposed[at] = end[at] - start[at] - times[number].compute.within(start[at], end[at])
    marked = events.with_columns(
        pl.Series("is_collective", collective), pl.Series("exposed_ns", exposed)
    )
    return marked, times


def loads(times: Mapping[int, DeviceTimes], steps: pl.DataFrame) -> Iterator[DeviceLoad]:
    """Busy, collective, exposed and idle time of each device over the steps of each label."""
    for spans in steps.partition_by("label", "device", maintain_order=True):
        device, label = spans["device"][0], LABELS[spans["label"][0]]
        if label is StepLabel.OUTSIDE:
            continue
        starts, ends = spans["start_ns"].to_numpy(), spans["end_ns"].to_numpy()
        busy, collective, compute, either = (
            int(union.within(starts, ends).sum()) for union in times[device]
        )
        window = int((ends - starts).sum())
        yield DeviceLoad(
            phase=label.phase,
            label=label,
            device=device,
            busy_s=busy * S,
            collective_s=collective * S,
            wait_s=None,
            exposed_s=(either - compute) * S,
            idle_s=(window - busy) * S,
            window_s=window * S,
        )


_SYMMETRIC = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)
MAX_WAIT_FRAC = 0.5  # of the time in collectives; beyond it, their times say little of the links


def with_transfers(collectives: pl.DataFrame) -> pl.DataFrame:
    """The executed collectives with `wire_ns` and `late`, null unless all devices of the group executed it.

    The device that comes last does not wait: `late` is that device, and its duration the transfer.
    """
    pairs = collectives.unique(["op", "device"], maintain_order=True)
    listed = pairs.select("op", "device", "groups").explode("groups")
    group = pl.col("groups")
    of_device = (
        listed.filter(group.list.contains(pl.col("device")))
        .group_by("op", "device")
        .agg(
            pl.len().alias("n_groups"),
            group.first().cast(pl.List(pl.String)).list.join(",").alias("members"),
        )
    )
    members = of_device.filter(pl.col("n_groups") == 1).drop("n_groups")
    together = ["kind", "opcode", "dtype", "payload_bytes", "axis", "members"]
    runs = (
        collectives.join(members, on=["op", "device"], how="left", maintain_order="left")
        .sort("start_ns", maintain_order=True)
        .with_columns(
            pl.int_range(pl.len()).over(*together, "device").alias("occurrence"),
            pl.len().over(*together, "device").alias("n_of_device"),
        )
    )
    together += ["n_of_device", "occurrence"]
    n_members = pl.col("members").str.count_matches(",", literal=True) + 1
    is_whole = (n_members > 1) & (pl.len().over(together) == n_members)
    least = pl.col("dur_ns").min().over(together)
    late = pl.col("device").sort_by("dur_ns", maintain_order=True).first().over(together)
    return runs.with_columns(
        wire_ns=pl.when(is_whole).then(least), late=pl.when(is_whole).then(late)
    )


def collective_times(matched: pl.DataFrame) -> Iterator[CollectiveTime]:
    """Mean durations by label, kind, axis, and part if it is known, of collectives with their transfers."""
    parts = [name for name in ("part",) if name in matched]
    for record in (
        _means(matched, "label", "kind", "axis", *parts)
        .sort("label", maintain_order=True)
        .iter_rows(named=True)
    ):
        is_known = record["is_known"]
        yield CollectiveTime(
            phase=LABELS[record["label"]].phase,
            part=Part(record["part"]) if record.get("part") else None,
            kind=Kind(record["kind"]),
            axis=record["axis"],
            n_executions=record["n"],
            dur_s=record["dur_ns"] * S,
            wire_s=record["wire_ns"] * S if is_known else None,
            wait_s=(record["dur_ns"] - record["wire_ns"]) * S if is_known else None,
        )


def _means(matched: pl.DataFrame, *keys: str) -> pl.DataFrame:
    return matched.group_by(keys, maintain_order=True).agg(
        pl.len().alias("n"),
        pl.col("dur_ns", "wire_ns").mean(),
        pl.col("wire_ns").is_not_null().all().alias("is_known"),
    )


def transfer_times(matched: pl.DataFrame) -> Iterator[TransferTime]:
    """The mean time of the transfer of each size, where all executions are known."""
    means = _means(matched, "label", "kind", "axis", "dtype", "payload_bytes")
    for record in means.filter("is_known").iter_rows(named=True):
        yield TransferTime(
            label=LABELS[record["label"]],
            kind=Kind(record["kind"]),
            wire_s=record["wire_ns"] * S,
            **{name: record[name] for name in ("axis", "dtype", "payload_bytes")},
        )


def waiting_findings(matched: pl.DataFrame, rank_of: Callable[[int], int]) -> Iterator[str]:
    """The share of waiting in the collectives of complete groups, if it exceeds the transfers.

    The root of a broadcast may leave early, so only collectives in which all wait for all count.
    """
    symmetric = matched.filter(pl.col("kind").is_in([kind.value for kind in _SYMMETRIC]))
    known = symmetric.filter(pl.col("wire_ns").is_not_null())
    wait_ns = known["dur_ns"] - known["wire_ns"]
    total_ns, waited_ns = int(known["dur_ns"].sum()), int(wait_ns.sum())
    if waited_ns <= total_ns * MAX_WAIT_FRAC:
        return
    caused = known.select("late", wait_ns.alias("wait_ns")).group_by("late").sum()
    late, caused_ns = caused.sort("wait_ns", "late", descending=[True, False]).row(0)
    of_all = "" if len(known) == len(symmetric) else " whose ranks all have a trace"
    mean_us = (total_ns - waited_ns) / len(known) / 1e3
    yield (
        f"{waited_ns / total_ns:.1%} of the time in collectives{of_all} is waiting for the rank that "
        f"comes last: {caused_ns / waited_ns:.0%} of it for rank {rank_of(late)}. A transfer takes "
        f"{mean_us:,.3g} us on average"
    )
