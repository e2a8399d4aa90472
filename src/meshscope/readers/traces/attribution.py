"""Assigns ops to steps and phases and collectives to axes; makes rows, times, loads and the timeline.

A trace shows steps, not requests: `n_steps` counts the recorded steps of a class, and `count` the
executions in one of them on one device. If the steps of a class differ, all of them together count
as one step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from meshscope.readers.traces.collectives import is_named_like_communication
from meshscope.readers.traces.device_times import (
    LABELS,
    S,
    collective_times,
    labels_of_events,
    loads,
    n_steps_of,
    step_classes,
    step_numbers,
    step_table,
    transfer_times,
    waiting_findings,
    with_exposure,
    with_transfers,
)
from meshscope.readers.traces.groups import (
    PAIRS,
    ops_with_axes,
    order_findings,
    order_of_ranks,
    positioned,
)
from meshscope.readers.traces.merge import MergedTrace
from meshscope.readers.traces.programs import program_rows
from meshscope.readers.traces.trace import BETWEEN_SLICES, Category
from meshscope.units import counted

COPY = "copy"
# Ops of XPlanes are named `program/instruction`; no kernel has a name of this form.
_INSTRUCTION = r"^[^/\s]*/([^/\s]+)$"

Places = Mapping[str, Mapping[str, Any]]  # layer, part and shape, by the name of the op


def executions_of(events: pl.DataFrame) -> pl.DataFrame:
    """The executed ops as numbers; `events` are those of `TraceRows` with `step_number`."""
    exposed = pl.when("is_collective").then("exposed_ns").alias("exposed_ns")
    named = events.with_columns(
        pl.col("label").alias("step_class"), pl.col("step_number").alias("step"), exposed
    )
    return named.select(pl.col(name).cast(type_) for name, type_ in EXECUTIONS_SCHEMA.items())


def distinct_ops_of(ops: pl.DataFrame, places: Places) -> pl.DataFrame:
    """The facts of the distinct ops, with those that the HLO of their program adds."""
    is_copy = pl.col("category") == Category.COPY.value
    names = ops["name"].to_list()
    wires = [
        _wire_bytes(kind, payload, size)
        for kind, payload, size in ops.select("kind", "payload_bytes", "group_size").iter_rows()
    ]
    known = ops.with_columns(
        pl.when(is_copy).then(pl.lit(COPY)).otherwise(pl.coalesce("opcode", "name")).alias("opcode"),
        pl.col("name").str.extract(_INSTRUCTION).alias("hlo_name"),
        pl.col("groups").list.len().cast(pl.Int32).alias("n_groups"),
        pl.Series("wire_bytes", wires, dtype=pl.Float64),
        *(
            pl.Series(fact, [places.get(name, {}).get(fact) for name in names], dtype=DISTINCT_OPS_SCHEMA[fact])
            for fact in ("layer", "part", "shape")
        ),
    )  # fmt: skip
    return known.select(pl.col(n).cast(t) for n, t in DISTINCT_OPS_SCHEMA.items())


def _wire_bytes(kind: str | None, payload: int | None, size: int | None) -> float | None:
    if kind is None or payload is None or size is None:
        return None
    return float(payload * wire_factor(Kind(kind), size))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRows:
    """The contents of a trace for a run.

    `executions` and `distinct_ops` are the timeline, in the form of `events.trace_timeline`. Devices are
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
    events = with_exposure(
        positioned(trace.events, order).with_columns(
            labels_of_events(trace).alias("label"), step_numbers(trace).alias("step_number")
        ),
        ops,
    )
    collectives = collectives_of_events(events, ops, mesh)
    counts = n_steps_of(trace)
    devices = events["device"].unique().sort().to_list()
    programs = program_rows(
        trace.programs, _named(collectives, ops), mesh=mesh, crosses_slices=crosses_slices
    )
    others = collectives.filter(~pl.col("op").is_in(list(programs.ops)))
    rows, findings = rows_of(
        others, ops, counts, devices_of_stage(devices, mesh), crosses_slices=crosses_slices
    )
    matched = with_transfers(collectives, ops)
    steps = step_table(events, trace.steps, counts)
    return TraceRows(
        rows=(*programs.rows, *rows),
        programs=programs.programs,
        steps=tuple(step_classes(steps, counts)),
        loads=tuple(loads(events, steps)),
        times=tuple(collective_times(matched)),
        transfers=tuple(transfer_times(matched)),
        waiting=tuple(
            waiting_findings(matched, lambda n: n if order is None else order.positions.index(n))
        ),
        n_profiled_steps={label.phase: n for label, n in counts.items() if label.phase is not None},
        findings=(
            *order_findings(order),
            *programs.findings,
            *findings,
            *_unread(events, ops),
            *_unnamed(events, ops),
            *_unsized(collectives),
        ),
        executions=executions_of(events),
        distinct_ops=distinct_ops_of(ops, programs.places),
    )


def _named(collectives: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    phases = pl.Series([label.phase for label in LABELS], dtype=pl.String)
    return collectives.with_columns(
        ops["name"].gather(collectives["op"]).alias("name"),
        phases.gather(collectives["label"]).alias("phase"),
    )


def _unread(events: pl.DataFrame, ops: pl.DataFrame) -> Iterator[str]:
    """Kernels that count as compute and whose names say that they communicate."""
    kernels = ops.filter(
        pl.col("category") == Category.COMPUTE.value,
        ~pl.col("name").str.contains("/", literal=True),
    ).select("op", "name")
    alike = kernels.filter(
        pl.Series([is_named_like_communication(name) for name in kernels["name"]], dtype=pl.Boolean)
    )
    counts = events.join(alike, on="op").group_by("name").len()
    if counts.is_empty():
        return
    ordered = counts.sort("len", "name", descending=[True, False])
    names = [f"'{name}'" for name in ordered["name"].head(4)]
    more = [f"{len(counts) - 4} more names"] if len(counts) > 4 else []
    n = counts["len"].sum()
    yield (
        f"{n:,} kernel{'s' if n > 1 else ''} named like communication count{'s' if n == 1 else ''} as "
        f"compute: {', '.join([*names, *more])}"
    )


def _unnamed(events: pl.DataFrame, ops: pl.DataFrame) -> Iterator[str]:
    """Kernels that communicate without a name of a collective."""
    unnamed = ops.filter(
        pl.col("category") == Category.COLLECTIVE.value, pl.col("kind").is_null()
    ).select("op", "name")
    counts = events.filter("is_collective").join(unnamed, on="op").group_by("name").len()
    for name, n in counts.sort("len", descending=True).head(4).iter_rows():
        yield f"{counted(n, 'kernel')} '{name}' communicate{'s' * (n == 1)}; the trace does not say which collective"


def _unsized(collectives: pl.DataFrame) -> Iterator[str]:
    """Collectives of unknown bytes, by the name of their kernel."""
    unsized = collectives.filter(pl.col("payload_bytes").is_null())
    counts = unsized.group_by("opcode").len().sort("len", "opcode", descending=[True, False])
    for opcode, n in counts.head(4).iter_rows():
        yield f"the bytes of {n:,} '{opcode}' are unknown: the trace has no sizes for them"
    if len(counts) > 4:
        yield f"the bytes of {counts['len'][4:].sum():,} other collectives are unknown"
