"""Assigns ops to steps and phases and collectives to axes; makes rows, times and loads."""

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.events.measured import (
    CollectiveTime,
    DeviceLoad,
    ProgramFacts,
    StepClass,
    TransferTime,
)
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.devices import CrossesSlices
from meshscope.readers.traces.collectives import is_named_like_communication
from meshscope.readers.traces.device_times import (
    collective_times,
    loads,
    transfer_times,
    waiting_findings,
    with_exposure,
    with_transfers,
)
from meshscope.readers.traces.merge import MergedTrace
from meshscope.readers.traces.op_axes import (
    ops_with_axes,
    order_findings,
    order_of_ranks,
    positioned,
)
from meshscope.readers.traces.programs import program_rows
from meshscope.readers.traces.step_classes import (
    LABELS,
    labels_of_events,
    n_steps_of,
    step_classes,
    step_numbers,
    step_table,
)
from meshscope.readers.traces.timeline import distinct_ops_of, executions_of
from meshscope.readers.traces.trace import Category
from meshscope.readers.traces.trace_rows import collectives_of_events, devices_of_stage, rows_of


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
    """The collectives with the names of their ops and the phases of their steps."""
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
        yield f"{n:,} kernels '{name}' communicate; the trace does not say which collective"


def _unsized(collectives: pl.DataFrame) -> Iterator[str]:
    """Collectives of unknown bytes, by the name of their kernel."""
    unsized = collectives.filter(pl.col("payload_bytes").is_null())
    counts = unsized.group_by("opcode").len().sort("len", "opcode", descending=[True, False])
    for opcode, n in counts.head(4).iter_rows():
        yield f"the bytes of {n:,} '{opcode}' are unknown: the trace has no sizes for them"
    if len(counts) > 4:
        yield f"the bytes of {counts['len'][4:].sum():,} other collectives are unknown"
