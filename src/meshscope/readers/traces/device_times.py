"""Times of steps, devices and collectives in a trace: exposure, load, transfer and waiting."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from meshscope.events.enums import Kind
from meshscope.events.measured import CollectiveTime, DeviceLoad, StepClass, StepLabel, TransferTime
from meshscope.readers.profile.nesting import CoveredTime
from meshscope.readers.traces.merge import MergedTrace
from meshscope.readers.traces.trace import Category

S = 1e-9
LABELS = tuple(StepLabel)


def labels_of_events(trace: MergedTrace) -> pl.Series:
    """The index in `LABELS` of the step of each event."""
    if trace.steps.is_empty():
        whole = LABELS.index(StepLabel.TRACE)
        return pl.Series([whole], dtype=pl.Int8).new_from_index(0, len(trace.events))
    kinds = [LABELS.index(StepLabel(kind or StepLabel.STEP)) for kind in trace.steps["kind"]]
    outside = LABELS.index(StepLabel.OUTSIDE)
    return pl.Series(kinds, dtype=pl.Int8).gather(trace.events["step"]).fill_null(outside)


def n_steps_of(trace: MergedTrace) -> dict[StepLabel, int]:
    """The steps of each label on one device: those with ops."""
    if trace.steps.is_empty():
        return {StepLabel.TRACE: 1}
    counts = _steps_by_device(trace).group_by("kind", "device").len()
    most = counts.group_by("kind").agg(pl.col("len").max())
    by_kind = {StepLabel(kind or StepLabel.STEP): n for kind, n in most.iter_rows()}
    return {label: by_kind[label] for label in StepLabel if label in by_kind} | {
        StepLabel.OUTSIDE: 1
    }


def step_numbers(trace: MergedTrace) -> pl.Series:
    """The index of the step of each event among those of its class on its device; null outside of steps."""
    if trace.steps.is_empty():
        return pl.Series([0], dtype=pl.Int32).new_from_index(0, len(trace.events))
    order = (pl.col("start_ns").rank("ordinal").over("kind", "device") - 1).cast(pl.Int32)
    numbers = _steps_by_device(trace).select("device", "step", order.alias("number"))
    keys = ["device", "step"]
    events = trace.events.select(keys).join(numbers, on=keys, how="left", maintain_order="left")
    return events["number"]


def _steps_by_device(trace: MergedTrace) -> pl.DataFrame:
    """The steps with ops on each device: those of other ranks have none."""
    pairs = trace.events.select("device", "step").drop_nulls().unique()
    facts = trace.steps.select("step", "kind", "start_ns")
    return pairs.join(facts, on="step").sort("start_ns", "step", "device")


def step_table(
    events: pl.DataFrame, steps: pl.DataFrame, counts: Mapping[StepLabel, int]
) -> pl.DataFrame:
    """The device time of each step on each device: from its first to the end of its last op."""
    key = pl.col("step") if StepLabel.TRACE not in counts else pl.lit(None, pl.Int32).alias("step")
    spans = (
        events.select("device", "label", key, "start_ns", (pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns"))
        .group_by("label", "device", "step", maintain_order=True)
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    )  # fmt: skip
    tokens = steps.select("step", "prefill_tokens", "decode_tokens")
    return spans.join(tokens, on="step", how="left", maintain_order="left").sort(
        "label", "start_ns"
    )


def step_classes(steps: pl.DataFrame, counts: Mapping[StepLabel, int]) -> Iterator[StepClass]:
    """Number, device time and tokens of the steps of each class."""
    for label, n_steps in counts.items():
        of_label = steps.filter(pl.col("label") == LABELS.index(label))
        if of_label.is_empty():
            continue
        dur_s = (of_label["end_ns"] - of_label["start_ns"]) * S
        quantiles = [dur_s.quantile(q, "linear") for q in (0.5, 0.99)]
        yield StepClass(
            label=label,
            n_steps=n_steps,
            mean_s=float(np.mean(dur_s.to_numpy())),
            p50_s=float(quantiles[0] or 0.0),
            p99_s=float(quantiles[1] or 0.0),
            prefill_tokens=_mean(of_label["prefill_tokens"]),
            decode_tokens=_mean(of_label["decode_tokens"]),
        )


def _mean(values: pl.Series) -> float | None:
    mean = values.mean()
    return mean if isinstance(mean, float) else None


_SYMMETRIC = [
    kind.value for kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)
]
MAX_WAIT_FRAC = 0.5  # of the time in collectives; beyond it, their times say little of the links


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


def with_transfers(collectives: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """The executed collectives with `wire_ns` and `late`, null unless all devices of the group executed it.

    The device that comes last does not wait: `late` is that device, and its duration the transfer.
    """
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
    n_members = pl.col("members").str.count_matches(",", literal=True) + 1
    is_whole = (n_members > 1) & (pl.len().over(together) == n_members)
    least = pl.col("dur_ns").min().over(together)
    late = pl.col("device").sort_by("dur_ns", maintain_order=True).first().over(together)
    return runs.with_columns(
        pl.when(is_whole).then(least).alias("wire_ns"), pl.when(is_whole).then(late).alias("late")
    )


def collective_times(matched: pl.DataFrame) -> Iterator[CollectiveTime]:
    """Mean durations by label, kind and axis of collectives with their transfers."""
    means = matched.group_by("label", "kind", "axis", maintain_order=True).agg(
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


def transfer_times(matched: pl.DataFrame) -> Iterator[TransferTime]:
    """The mean time of the transfer of each size, where all executions are known."""
    keys = ["label", "kind", "axis", "dtype", "payload_bytes"]
    means = matched.group_by(keys, maintain_order=True).agg(
        pl.col("wire_ns").mean(), pl.col("wire_ns").is_not_null().all().alias("is_known")
    )
    for record in means.filter("is_known").iter_rows(named=True):
        yield TransferTime(
            label=LABELS[record["label"]],
            kind=Kind(record["kind"]),
            axis=record["axis"],
            dtype=record["dtype"],
            payload_bytes=record["payload_bytes"],
            wire_s=record["wire_ns"] * S,
        )


def waiting_findings(matched: pl.DataFrame, rank_of: Callable[[int], int]) -> Iterator[str]:
    """The share of waiting in the collectives of complete groups, if it exceeds the transfers.

    The root of a broadcast may leave early, so only collectives in which all wait for all count.
    """
    symmetric = matched.filter(pl.col("kind").is_in(_SYMMETRIC))
    known = symmetric.filter(pl.col("wire_ns").is_not_null())
    wait_ns = known["dur_ns"] - known["wire_ns"]
    total_ns, waited_ns = int(known["dur_ns"].sum()), int(wait_ns.sum())
    if waited_ns <= total_ns * MAX_WAIT_FRAC:
        return
    caused = (
        known.select("late", wait_ns.alias("wait_ns"))
        .group_by("late")
        .agg(pl.col("wait_ns").sum())
        .sort("wait_ns", "late", descending=[True, False])
    )
    late, caused_ns = caused.row(0)
    of_all = "" if len(known) == len(symmetric) else " whose ranks all have a trace"
    mean_us = (total_ns - waited_ns) / len(known) / 1e3
    yield (
        f"{waited_ns / total_ns:.1%} of the time in collectives{of_all} is waiting for the rank that "
        f"comes last: {caused_ns / waited_ns:.0%} of it for rank {rank_of(late)}. A transfer takes "
        f"{mean_us:,.3g} us on average"
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
