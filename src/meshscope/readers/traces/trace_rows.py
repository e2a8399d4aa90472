"""Rows of the event table from the executed collectives of a trace.

A trace shows steps, not requests: `n_steps` counts the recorded steps of a class, and `count` the
executions in one of them on one device. If the steps of a class differ, all of them together count
as one step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import polars as pl

from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Source, wire_factor
from meshscope.events.measured import StepLabel
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.devices import CrossesSlices
from meshscope.readers.traces.op_axes import PAIRS
from meshscope.readers.traces.slice_transfers import GROUP as BETWEEN_SLICES
from meshscope.readers.traces.step_classes import LABELS, S
from meshscope.readers.traces.trace import Category

NO_PART = "the trace names no parts of the model"
BASIS = Source.MEASURED.value
_ROW_KEYS = ["label", "stage", "kind", "opcode", "axis", "dtype", "payload_bytes", "group_size"]


def collectives_of_events(
    events: pl.DataFrame, ops: pl.DataFrame, mesh: Mesh | None
) -> pl.DataFrame:
    """The executed collectives with their facts and the stage of their device."""
    facts = ops.filter(
        pl.col("category") == Category.COLLECTIVE.value, pl.col("kind").is_not_null()
    ).select("op", "kind", "opcode", "axis", "dtype", "payload_bytes", "group_size", "groups")
    rows = events.filter("is_collective").join(facts, on="op", maintain_order="left")
    n_stages = 1 if mesh is None else mesh.size("pp")
    stage = pl.lit(None, pl.Int32)
    if mesh is not None and n_stages > 1:
        in_stage = ~pl.col("axis").fill_null("").str.split("+").list.contains("pp")
        of_device = (pl.col("device") // (mesh.n_devices // n_stages)).cast(pl.Int32)
        is_sent = pl.col("kind").is_in([kind.value for kind in PAIRS])
        stage = pl.when(in_stage | is_sent).then(of_device)
    return rows.with_columns(stage.alias("stage"))


def devices_of_stage(devices: Sequence[int], mesh: Mesh | None) -> Mapping[int | None, int]:
    """Recorded devices of each stage, and of all stages under None."""
    n_stages = 1 if mesh is None else mesh.size("pp")
    counts: dict[int | None, int] = {None: len(devices)}
    for device in devices if mesh is not None and n_stages > 1 else ():
        stage = device // (mesh.n_devices // n_stages) if mesh is not None else 0
        counts[stage] = counts.get(stage, 0) + 1
    return counts


def rows_of(
    collectives: pl.DataFrame,
    ops: pl.DataFrame,
    counts: Mapping[StepLabel, int],
    n_devices: Mapping[int | None, int],
    *,
    crosses_slices: CrossesSlices,
) -> tuple[list[Collective], list[str]]:
    """The rows of each label in the order of their first execution, and findings about counts."""
    groups = pl.col("groups").cast(pl.List(pl.List(pl.String))).list.eval(
        pl.element().list.join(",")
    ).list.join(";").alias("groups_text")  # fmt: skip
    table = (
        collectives.with_columns(groups)
        .group_by(*_ROW_KEYS, "groups_text", maintain_order=True)
        .agg(
            pl.len().alias("n"),
            pl.col("device").unique_counts().min().alias("n_min"),
            pl.col("device").unique_counts().max().alias("n_max"),
            pl.col("device").n_unique().alias("n_seen"),
            pl.col("op").first(),
            pl.col("dur_ns", "exposed_ns").mean(),
            pl.col("start_ns").min(),
        )
        .sort("label", "start_ns", maintain_order=True)
    )
    rows: list[Collective] = []
    findings: list[str] = []
    for of_label in table.partition_by("label", maintain_order=True):
        label = LABELS[of_label["label"][0]]
        n_steps = counts.get(label, 1)
        shares = [
            Fraction(record["n"], n_devices[record["stage"]])
            for record in of_label.iter_rows(named=True)
        ]
        is_alike = all((share / n_steps).denominator == 1 for share in shares)
        if n_steps > 1 and not is_alike:
            findings.append(
                f"{_words(label)} differ in their collectives: counts are of all {n_steps:,} together"
            )
        findings += _uneven(label, of_label, n_devices)
        n_counted = n_steps if is_alike else 1
        for record, share in zip(of_label.iter_rows(named=True), shares, strict=True):
            facts = ops.row(record["op"], named=True)
            count = max(1, round(share / n_counted))
            row = _row(record, facts, label, count=count, n_steps=n_counted)
            is_between = facts["group_name"] == BETWEEN_SLICES
            crosses = is_between or (crosses_slices(row.groups) if row.groups else None)
            rows.append(replace(row, crosses_slices=crosses))
    return rows, list(dict.fromkeys(findings))


def _uneven(
    label: StepLabel, rows: pl.DataFrame, n_devices: Mapping[int | None, int]
) -> Iterator[str]:
    """The collective whose numbers of executions differ most between devices."""
    recorded = [n_devices[stage] for stage in rows["stage"]]
    lowest = pl.when(pl.col("n_seen") < pl.Series(recorded)).then(0).otherwise("n_min")
    spread = rows.with_columns(lowest.alias("n_min")).with_columns(
        (pl.col("n_max") - pl.col("n_min")).alias("spread")
    )
    worst = spread.row(spread["spread"].arg_max() or 0, named=True)
    if worst["spread"]:
        axis = f" over {worst['axis']}" if worst["axis"] else ""
        yield (
            f"{_words(label)}: devices executed different numbers of a collective, such as "
            f"{worst['n_min']:,} to {worst['n_max']:,} of {worst['kind']}{axis}; counts are means"
        )


def _words(label: StepLabel) -> str:
    return "steps" if label is StepLabel.STEP else f"{label.value} steps"


def _row(
    record: Mapping[str, Any],
    facts: Mapping[str, Any],
    label: StepLabel,
    *,
    count: int,
    n_steps: int,
) -> Collective:
    kind, size, payload = Kind(record["kind"]), facts["group_size"], facts["payload_bytes"]
    wire_bytes = None
    if payload is not None and size is not None:
        wire_bytes = payload * wire_factor(kind, size)
    reasons = (facts["axis_reason"], label.reason, NO_PART)
    return Collective(
        source=Source.MEASURED,
        phase=label.phase,
        layer=None,
        part=None,
        kind=kind,
        opcode=facts["opcode"],
        axis=facts["axis"],
        axis_reason="; ".join(reason for reason in reasons if reason),
        group_size=size,
        groups=tuple(map(tuple, facts["groups"] or ())),
        dtype=facts["dtype"],
        shape=None,
        payload_bytes=payload,
        wire_bytes=wire_bytes,
        stage=record["stage"],
        count=count,
        n_steps=n_steps,
        start_s=record["start_ns"] * S,
        dur_s=record["dur_ns"] * S,
        exposed_s=record["exposed_ns"] * S,
        time_basis=BASIS,
    )
