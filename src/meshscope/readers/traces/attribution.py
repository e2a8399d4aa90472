"""Assigns ops to steps and phases and collectives to axes; makes rows, times, loads and the timeline.

A trace shows steps, not requests: `n_steps` counts the recorded steps of a class, and `count` the
executions in one of them on one device. If the steps of a class differ, all of them together count
as one step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import polars as pl

from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Phase, Source, wire_factor
from meshscope.events.measured import (
    CollectiveTime,
    DeviceLoad,
    ProgramFacts,
    StepClass,
    StepLabel,
    TransferTime,
)
from meshscope.events.timeline import DISTINCT_OPS_SCHEMA, EXECUTIONS_SCHEMA
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.groups import CrossesSlices
from meshscope.readers.profile.ops import in_schema
from meshscope.readers.traces.collectives import is_named_like_communication
from meshscope.readers.traces.device_times import (
    LABELS,
    S,
    collective_times,
    labeled,
    loads,
    step_classes,
    step_table,
    transfer_times,
    waiting_findings,
    with_exposure,
    with_transfers,
)
from meshscope.readers.traces.groups import PAIRS, ops_with_axes, order_of_ranks, positioned
from meshscope.readers.traces.merge import MergedTrace
from meshscope.readers.traces.programs import program_rows
from meshscope.readers.traces.trace import BETWEEN_SLICES, Category
from meshscope.units import counted

NO_PART = "the trace names no parts of the model"
# Ops of XPlanes are named `program/instruction`; no kernel has a name of this form.
_INSTRUCTION = r"^[^/\s]*/([^/\s]+)$"
_MAX_NAMED = 4  # kernels in one message


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRows:
    """The contents of a trace for a run.

    `executions` and `distinct_ops` are the timeline, in the form of `events.timeline`. Devices are
    positions in the mesh.
    """

    rows: tuple[Collective, ...]
    programs: tuple[ProgramFacts, ...]
    steps: tuple[StepClass, ...]
    loads: tuple[DeviceLoad, ...]
    times: tuple[CollectiveTime, ...]
    transfers: tuple[TransferTime, ...]
    waiting: tuple[str, ...]  # what a reader must know before the times of collectives
    n_profiled_steps: dict[Phase, int]
    findings: tuple[str, ...]
    executions: pl.DataFrame
    distinct_ops: pl.DataFrame


def attributed(
    trace: MergedTrace, mesh: Mesh | None, *, crosses_slices: CrossesSlices = lambda _: None
) -> TraceRows:
    """The rows of the trace; SpecError if it has ranks beyond the mesh.

    If the trace has the HLO of its programs, they have compiled rows, too.
    """
    order = order_of_ranks(trace, mesh)
    ops = ops_with_axes(trace.ops, mesh, order, crosses_slices=crosses_slices)
    in_steps, counts = labeled(trace)
    events, times = with_exposure(positioned(in_steps, order), ops)
    collectives = _collectives_of(events, ops, mesh)
    phases = pl.Series([label.phase for label in LABELS], dtype=pl.String)
    named = collectives.with_columns(
        ops["name"].gather(collectives["op"]).alias("name"),
        phases.gather(collectives["label"]).alias("phase"),
    )
    programs = program_rows(trace.programs, named, mesh=mesh, crosses_slices=crosses_slices)
    others = collectives.filter(~pl.col("op").is_in(list(programs.ops)))
    n_devices = _devices_of_stage(events["device"].unique(), mesh)
    rows, findings = _rows_of(others, ops, counts, n_devices, crosses_slices)
    matched = with_transfers(collectives, ops)
    steps = step_table(events, trace.steps, counts)
    exposed_ns = pl.when("is_collective").then("exposed_ns").alias("exposed_ns")
    executions = events.with_columns(exposed_ns, step="step_number", step_class="label")
    return TraceRows(
        rows=(*programs.rows, *rows),
        programs=tuple(programs.programs),
        steps=tuple(step_classes(steps, counts)),
        loads=tuple(loads(times, steps)),
        times=tuple(collective_times(matched)),
        transfers=tuple(transfer_times(matched)),
        waiting=tuple(
            waiting_findings(matched, lambda n: n if order is None else order.positions.index(n))
        ),
        n_profiled_steps={label.phase: n for label, n in counts.items() if label.phase is not None},
        findings=(
            *(() if order is None else order.findings()),
            *programs.findings,
            *findings,
            *_unread(events, ops),
            *_unknown(events, ops, collectives),
        ),
        executions=in_schema(executions, EXECUTIONS_SCHEMA),
        distinct_ops=_distinct_ops(ops, programs.places),
    )


def _distinct_ops(ops: pl.DataFrame, places: Mapping[str, Mapping[str, Any]]) -> pl.DataFrame:
    """The facts of the distinct ops, with those that the HLO of their program adds, by name."""
    is_copy = pl.col("category") == Category.COPY.value
    opcode = pl.when(is_copy).then(pl.lit("copy")).otherwise(pl.coalesce("opcode", "name"))
    facts = ops.select("kind", "payload_bytes", "group_size").iter_rows()
    wires = [_wire_bytes(*of_op) if of_op[0] else None for of_op in facts]
    known = ops.with_columns(
        opcode.alias("opcode"),
        pl.col("name").str.extract(_INSTRUCTION).alias("hlo_name"),
        pl.col("groups").list.len().alias("n_groups"),
        pl.Series("wire_bytes", [None if w is None else float(w) for w in wires], pl.Float64),
        *(
            pl.Series(fact, [places.get(name, {}).get(fact) for name in ops["name"]], dtype)
            for fact, dtype in DISTINCT_OPS_SCHEMA.items()
            if fact in {"layer", "part", "shape"}
        ),
    )
    return in_schema(known, DISTINCT_OPS_SCHEMA)


def _wire_bytes(kind: str, payload_bytes: int | None, group_size: int | None) -> Fraction | None:
    if payload_bytes is None or group_size is None:
        return None
    return payload_bytes * wire_factor(Kind(kind), group_size)


def _collectives_of(events: pl.DataFrame, ops: pl.DataFrame, mesh: Mesh | None) -> pl.DataFrame:
    """The executed collectives with their facts and the stage of their device."""
    facts = ops.filter(
        pl.col("category") == Category.COLLECTIVE.value, pl.col("kind").is_not_null()
    ).select("op", "kind", "opcode", "axis", "dtype", "payload_bytes", "group_size", "groups")
    rows = events.filter("is_collective").join(facts, on="op", maintain_order="left")
    stage = pl.lit(None, pl.Int32)
    if mesh is not None and mesh.size("pp") > 1:
        in_stage = ~pl.col("axis").fill_null("").str.split("+").list.contains("pp")
        is_sent = pl.col("kind").is_in([kind.value for kind in PAIRS])
        stage = pl.when(in_stage | is_sent).then(_stage_of(pl.col("device"), mesh))
    return rows.with_columns(stage.alias("stage"))


def _stage_of(device: pl.Expr, mesh: Mesh) -> pl.Expr:
    return (device // (mesh.n_devices // mesh.size("pp"))).cast(pl.Int32)


def _devices_of_stage(devices: pl.Series, mesh: Mesh | None) -> Mapping[int | None, int]:
    """Recorded devices of each stage, and of all stages under None."""
    counts: dict[int | None, int] = {None: len(devices)}
    if mesh is not None and mesh.size("pp") > 1:
        stages = devices.to_frame("device").select(_stage_of(pl.col("device"), mesh).alias("stage"))
        counts |= dict(stages.group_by("stage").len().iter_rows())
    return counts


def _rows_of(
    collectives: pl.DataFrame,
    ops: pl.DataFrame,
    counts: Mapping[StepLabel, int],
    n_devices: Mapping[int | None, int],
    crosses_slices: CrossesSlices,
) -> tuple[list[Collective], list[str]]:
    """The rows of each label in the order of their first execution, and findings about counts."""
    keys = ["label", "stage", "kind", "opcode", "axis", "dtype", "payload_bytes", "group_size"]
    group_texts = pl.col("groups").list.eval(pl.element().cast(pl.List(pl.String)).list.join(","))
    n_of_device = pl.col("device").unique_counts()
    table = (
        collectives.with_columns(group_texts.list.join(";").alias("groups_text"))
        .group_by(*keys, "groups_text", maintain_order=True)
        .agg(
            pl.len().alias("n"),
            n_of_device.min().alias("n_min"),
            n_of_device.max().alias("n_max"),
            pl.col("device").n_unique().alias("n_seen"),
            pl.col("op").first(),
            pl.col("dur_ns", "exposed_ns").mean(),
            pl.col("start_ns").min(),
        )
        .sort("label", "start_ns", maintain_order=True)
    )  # fmt: skip
    rows: list[Collective] = []
    findings: list[str] = []
    for of_label in table.partition_by("label", maintain_order=True):
        label = LABELS[of_label["label"][0]]
        words = "steps" if label is StepLabel.STEP else f"{label.value} steps"
        n_steps = counts.get(label, 1)
        recorded = [n_devices[stage] for stage in of_label["stage"]]
        shares = [Fraction(n, of) for n, of in zip(of_label["n"], recorded, strict=True)]
        if n_steps > 1 and any((share / n_steps).denominator > 1 for share in shares):
            findings.append(
                f"{words} differ in their collectives: counts are of all {n_steps:,} together"
            )
            n_steps = 1
        findings += _uneven(words, of_label, recorded)
        for record, share in zip(of_label.iter_rows(named=True), shares, strict=True):
            facts = ops.row(record["op"], named=True)
            counted_record = record | {"count": max(1, round(share / n_steps)), "n_steps": n_steps}
            rows.append(_row(counted_record, facts, label, crosses_slices))
    return rows, list(dict.fromkeys(findings))


def _uneven(words: str, rows: pl.DataFrame, recorded: Sequence[int]) -> Iterator[str]:
    """The collective whose numbers of executions differ most between the recorded devices."""
    lowest = pl.when(pl.col("n_seen") < pl.Series(recorded)).then(0).otherwise("n_min")
    spread = rows.with_columns(lowest.alias("n_min")).with_columns(
        (pl.col("n_max") - pl.col("n_min")).alias("spread")
    )
    worst = spread.row(spread["spread"].arg_max() or 0, named=True)
    if worst["spread"]:
        axis = f" over {worst['axis']}" if worst["axis"] else ""
        yield (
            f"{words}: devices executed different numbers of a collective, such as "
            f"{worst['n_min']:,} to {worst['n_max']:,} of {worst['kind']}{axis}; counts are means"
        )


def _row(
    record: Mapping[str, Any],
    facts: Mapping[str, Any],
    label: StepLabel,
    crosses_slices: CrossesSlices,
) -> Collective:
    groups = tuple(map(tuple, facts["groups"] or ()))
    is_between = facts["group_name"] == BETWEEN_SLICES
    reasons = (facts["axis_reason"], label.reason, NO_PART)
    return Collective(
        source=Source.MEASURED,
        phase=label.phase,
        layer=None,
        part=None,
        kind=Kind(record["kind"]),
        opcode=facts["opcode"],
        axis=facts["axis"],
        axis_reason="; ".join(reason for reason in reasons if reason),
        group_size=facts["group_size"],
        groups=groups,
        dtype=facts["dtype"],
        shape=None,
        payload_bytes=facts["payload_bytes"],
        wire_bytes=_wire_bytes(record["kind"], facts["payload_bytes"], facts["group_size"]),
        stage=record["stage"],
        count=record["count"],
        n_steps=record["n_steps"],
        crosses_slices=is_between or (crosses_slices(groups) if groups else None),
        start_s=record["start_ns"] * S,
        dur_s=record["dur_ns"] * S,
        exposed_s=record["exposed_ns"] * S,
        time_basis=Source.MEASURED.value,
    )


def _unread(events: pl.DataFrame, ops: pl.DataFrame) -> Iterator[str]:
    """Kernels that count as compute and whose names say that they communicate."""
    is_compute = pl.col("category") == Category.COMPUTE.value
    kernels = ops.filter(is_compute, ~pl.col("name").str.contains("/", literal=True))
    is_alike = [is_named_like_communication(name) for name in kernels["name"]]
    alike = kernels.filter(pl.Series(is_alike, dtype=pl.Boolean)).select("op", "name")
    counts = events.join(alike, on="op").group_by("name").len()
    if len(counts):
        ordered = counts.sort("len", "name", descending=[True, False])
        names = [f"'{name}'" for name in ordered["name"].head(_MAX_NAMED)]
        n, n_more = counts["len"].sum(), len(counts) - _MAX_NAMED
        more = [f"{n_more} more names"] if n_more > 0 else []
        yield (
            f"{n:,} kernel{'s' if n > 1 else ''} named like communication count{'s' if n == 1 else ''} as "
            f"compute: {', '.join([*names, *more])}"
        )


def _unknown(events: pl.DataFrame, ops: pl.DataFrame, collectives: pl.DataFrame) -> Iterator[str]:
    """Kernels that communicate without a name of a collective, and collectives of unknown bytes."""
    is_collective = pl.col("category") == Category.COLLECTIVE.value
    unnamed = ops.filter(is_collective, pl.col("kind").is_null()).select("op", "name")
    counts = events.filter("is_collective").join(unnamed, on="op").group_by("name").len()
    for name, n in counts.sort("len", descending=True).head(_MAX_NAMED).iter_rows():
        yield f"{counted(n, 'kernel')} '{name}' communicate{'s' * (n == 1)}; the trace does not say which collective"
    unsized = collectives.filter(pl.col("payload_bytes").is_null())
    counts = unsized.group_by("opcode").len().sort("len", "opcode", descending=[True, False])
    for opcode, n in counts.head(_MAX_NAMED).iter_rows():
        yield f"the bytes of {n:,} '{opcode}' are unknown: the trace has no sizes for them"
    if len(counts) > _MAX_NAMED:
        others = counts["len"][_MAX_NAMED:].sum()
        yield f"the bytes of {others:,} other collectives are unknown"
