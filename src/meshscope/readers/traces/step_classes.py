"""The classes of the steps of a trace: the class of each event, and the times of the steps."""

from collections.abc import Iterator, Mapping

import numpy as np
import polars as pl

from meshscope.events.measured import StepClass, StepLabel
from meshscope.readers.traces.merge import MergedTrace

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
