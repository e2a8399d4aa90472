"""Assigns ops to steps and phases and collectives to axes; makes rows, times and loads.

A trace shows steps, not requests: `n_steps` counts the recorded steps of a class, and `count` the
executions in one of them on one device. If the steps of a class differ, all of them together count
as one step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl

from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Phase, Source, wire_factor
from meshscope.events.measured import CollectiveTime, DeviceLoad, ProgramFacts, StepClass, StepLabel
from meshscope.readers.hlo.devices import CrossesSlices
from meshscope.readers.profile.nesting import Ints
from meshscope.readers.traces.covered_time import CoveredTime
from meshscope.readers.traces.groups import GroupAxis, RankOrder, group_axis, rank_order
from meshscope.readers.traces.merge import MergedTrace
from meshscope.readers.traces.programs import program_rows
from meshscope.readers.traces.trace import Category
from meshscope.spec.plan.mesh import Mesh

S = 1e-9
NO_PART = "the trace names no parts of the model"
BASIS = Source.MEASURED.value
_PAIRS = frozenset({Kind.SEND, Kind.RECV, Kind.PERMUTE})


_LABELS = tuple(StepLabel)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRows:
    """The contents of a trace for a run.

    `ops` has the axis and groups of each op; `events` are those of the merged trace with `label` and
    `exposed_ns`. Devices in both are positions in the mesh.
    """

    rows: tuple[Collective, ...]
    programs: tuple[ProgramFacts, ...]
    steps: tuple[StepClass, ...]
    loads: tuple[DeviceLoad, ...]
    times: tuple[CollectiveTime, ...]
    n_profiled_steps: dict[Phase, int]
    findings: tuple[str, ...]
    ops: pl.DataFrame
    events: pl.DataFrame


def attributed(
    trace: MergedTrace, mesh: Mesh | None, *, crosses_slices: CrossesSlices = lambda _: None
) -> TraceRows:
    """The rows of the trace; SpecError if it has ranks beyond the mesh.

    If the trace has the HLO of its programs, they have compiled rows, too.
    """
    order = _order(trace, mesh)
    ops = _ops_with_axes(trace.ops, mesh, order)
    events = _positioned(trace.events, order).with_columns(_labels(trace).alias("label"))
    events = _with_exposure(events, ops)
    collectives = _collectives(events, ops, mesh)
    counts = _n_steps(trace)
    devices = events["device"].unique().sort().to_list()
    programs = program_rows(
        trace.programs, _named(collectives, ops), mesh=mesh, crosses_slices=crosses_slices
    )
    others = collectives.filter(~pl.col("op").is_in(list(programs.ops)))
    rows, findings = _rows(others, ops, counts, _devices_of_stage(devices, mesh))
    steps = _step_table(events, trace.steps, counts)
    return TraceRows(
        rows=(*programs.rows, *rows),
        programs=programs.programs,
        steps=tuple(_step_classes(steps, counts)),
        loads=tuple(_loads(events, steps)),
        times=tuple(_times(collectives, ops)),
        n_profiled_steps={label.phase: n for label, n in counts.items() if label.phase is not None},
        findings=(
            *_order_findings(order),
            *programs.findings,
            *findings,
            *_unnamed(events, ops),
            *_unsized(collectives),
        ),
        ops=ops,
        events=events,
    )


def _order(trace: MergedTrace, mesh: Mesh | None) -> RankOrder | None:
    if mesh is None:
        return None
    known = trace.ops.filter(pl.col("group").is_not_null())
    if known.is_empty() and trace.ops["groups"].is_not_null().any():
        return RankOrder(axes=mesh.names, positions=tuple(range(mesh.n_devices)))  # as HLO counts
    is_pair = pl.col("kind").is_in([kind.value for kind in _PAIRS])
    groups, pairs = (
        known.filter(condition)["group"].unique(maintain_order=True).to_list()
        for condition in (~is_pair, is_pair)
    )
    devices = [[device] for device in trace.events["device"].unique().sort().to_list()]
    is_vllm = trace.steps["name"].str.starts_with("execute_").any()
    return rank_order(mesh, [*groups, *devices], pairs=pairs, is_vllm=is_vllm)


def _order_findings(order: RankOrder | None) -> Iterator[str]:
    if order is not None and order.is_assumed:
        yield (
            f"ranks are taken to count {', '.join(order.axes)}, outermost first: the groups in the trace "
            "fit another order as well, in which axes of equal size change places"
        )


def _positioned(events: pl.DataFrame, order: RankOrder | None) -> pl.DataFrame:
    """The events with mesh positions as devices."""
    if order is None or order.positions == tuple(range(len(order.positions))):
        return events
    positions = pl.Series(order.positions, dtype=pl.Int32)
    return events.with_columns(positions.gather(events["device"]).alias("device"))


def _ops_with_axes(ops: pl.DataFrame, mesh: Mesh | None, order: RankOrder | None) -> pl.DataFrame:
    """The ops with `axis`, `axis_reason`, `wire_bytes` and groups as mesh positions."""
    is_collective = pl.col("category") == Category.COLLECTIVE.value
    keys = ["kind", "group", "groups", "group_size", "group_name"]
    distinct = ops.filter(is_collective).select(keys).unique(maintain_order=True)
    axes = [_axis_of(record, mesh, order) for record in distinct.iter_rows(named=True)]
    facts = distinct.with_columns(
        pl.Series("axis", [f.axis for f in axes], pl.String),
        pl.Series("axis_reason", [f.reason for f in axes], pl.String),
        pl.Series("axis_groups", [[list(g) for g in f.groups] for f in axes], pl.List(pl.List(pl.Int32))),
        pl.Series("axis_group_size", [f.group_size for f in axes], pl.Int32),
    )  # fmt: skip
    joined = ops.join(facts, on=keys, how="left", nulls_equal=True, maintain_order="left")
    return joined.with_columns(
        pl.col("axis_groups").alias("groups"),
        pl.coalesce("axis_group_size", "group_size").alias("group_size"),
    ).drop("axis_groups", "axis_group_size")


def _axis_of(record: Mapping[str, Any], mesh: Mesh | None, order: RankOrder | None) -> GroupAxis:
    if record["groups"] is not None and mesh is not None:
        return _axis_of_all_groups(mesh, tuple(map(tuple, record["groups"])), record["kind"])
    return group_axis(
        mesh,
        order,
        ranks=record["group"],
        group_size=record["group_size"],
        description=record["group_name"],
        is_pair=record["kind"] in _PAIRS,
    )


def _axis_of_all_groups(mesh: Mesh, groups: tuple[tuple[int, ...], ...], kind: str) -> GroupAxis:
    """The axis of groups that are listed whole, as HLO lists them."""
    axis = mesh.axis_of_pairs(groups) if kind in _PAIRS else mesh.axis_of_groups(groups)
    reason = None if axis else "its groups are no axis of the plan"
    return GroupAxis(axis=axis, groups=groups, group_size=len(groups[0]), reason=reason)


def _labels(trace: MergedTrace) -> pl.Series:
    """The index in `_LABELS` of the step of each event."""
    if trace.steps.is_empty():
        whole = _LABELS.index(StepLabel.TRACE)
        return pl.Series([whole], dtype=pl.Int8).new_from_index(0, len(trace.events))
    kinds = [_LABELS.index(StepLabel(kind or StepLabel.STEP)) for kind in trace.steps["kind"]]
    outside = _LABELS.index(StepLabel.OUTSIDE)
    return pl.Series(kinds, dtype=pl.Int8).gather(trace.events["step"]).fill_null(outside)


def _n_steps(trace: MergedTrace) -> dict[StepLabel, int]:
    """The steps of each label on one device: those with ops."""
    if trace.steps.is_empty():
        return {StepLabel.TRACE: 1}
    used = trace.events["step"].drop_nulls().unique()
    steps = trace.steps.filter(pl.col("step").is_in(used.implode()))
    counts = steps.group_by("kind", "device").len().group_by("kind").agg(pl.col("len").max())
    by_kind = {StepLabel(kind or StepLabel.STEP): n for kind, n in counts.iter_rows()}
    return {label: by_kind[label] for label in StepLabel if label in by_kind} | {
        StepLabel.OUTSIDE: 1
    }


def _with_exposure(events: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """The events with `is_collective` and, for collectives, the time not hidden by compute."""
    category = ops["category"].gather(events["op"])
    marked = events.with_columns((category == Category.COLLECTIVE.value).alias("is_collective"))
    is_compute = category == Category.COMPUTE.value
    exposed = np.zeros(len(events), np.int64)
    start = events["start_ns"].to_numpy()
    end = start + events["dur_ns"].to_numpy()
    device = events["device"].to_numpy()
    collective, compute = marked["is_collective"].to_numpy(), is_compute.to_numpy()
    for number in np.unique(device[collective]):
        of_device = device == number
        covered = CoveredTime.of(start[of_device & compute], end[of_device & compute])
        at = np.flatnonzero(of_device & collective)
        exposed[at] = end[at] - start[at] - covered.within(start[at], end[at])
    return marked.with_columns(pl.Series("exposed_ns", exposed))


def _collectives(events: pl.DataFrame, ops: pl.DataFrame, mesh: Mesh | None) -> pl.DataFrame:
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
        is_sent = pl.col("kind").is_in([kind.value for kind in _PAIRS])
        stage = pl.when(in_stage | is_sent).then(of_device)
    return rows.with_columns(stage.alias("stage"))


def _devices_of_stage(devices: Sequence[int], mesh: Mesh | None) -> Mapping[int | None, int]:
    """Recorded devices of each stage, and of all stages under None."""
    n_stages = 1 if mesh is None else mesh.size("pp")
    counts: dict[int | None, int] = {None: len(devices)}
    for device in devices if mesh is not None and n_stages > 1 else ():
        stage = device // (mesh.n_devices // n_stages) if mesh is not None else 0
        counts[stage] = counts.get(stage, 0) + 1
    return counts


def _named(collectives: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """The collectives with the names of their ops and the phases of their steps."""
    phases = pl.Series([label.phase for label in _LABELS], dtype=pl.String)
    return collectives.with_columns(
        ops["name"].gather(collectives["op"]).alias("name"),
        phases.gather(collectives["label"]).alias("phase"),
    )


_ROW_KEYS = ["label", "stage", "kind", "opcode", "axis", "dtype", "payload_bytes", "group_size"]


def _rows(
    collectives: pl.DataFrame,
    ops: pl.DataFrame,
    counts: Mapping[StepLabel, int],
    n_devices: Mapping[int | None, int],
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
            pl.col("op").first(),
            pl.col("dur_ns", "exposed_ns").mean(),
            pl.col("start_ns").min(),
        )
        .sort("label", "start_ns", maintain_order=True)
    )
    rows: list[Collective] = []
    findings: list[str] = []
    for of_label in table.partition_by("label", maintain_order=True):
        label = _LABELS[of_label["label"][0]]
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
        if not all(share.denominator == 1 for share in shares):
            findings.append(
                f"{_words(label)}: devices executed different numbers of a collective; counts are means"
            )
        n_counted = n_steps if is_alike else 1
        for record, share in zip(of_label.iter_rows(named=True), shares, strict=True):
            facts = ops.row(record["op"], named=True)
            count = max(1, round(share / n_counted))
            rows.append(_row(record, facts, label, count=count, n_steps=n_counted))
    return rows, list(dict.fromkeys(findings))


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


def _step_table(
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


def _step_classes(steps: pl.DataFrame, counts: Mapping[StepLabel, int]) -> Iterator[StepClass]:
    for label, n_steps in counts.items():
        of_label = steps.filter(pl.col("label") == _LABELS.index(label))
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


def _loads(events: pl.DataFrame, steps: pl.DataFrame) -> Iterator[DeviceLoad]:
    """Busy, collective and idle time of each device over the steps of each label."""
    start = events["start_ns"].to_numpy()
    end = start + events["dur_ns"].to_numpy()
    device, collective = events["device"].to_numpy(), events["is_collective"].to_numpy()
    busy: dict[int, CoveredTime] = {}
    inside: dict[int, CoveredTime] = {}
    for number in np.unique(device).tolist():
        of_device = device == number
        busy[number] = CoveredTime.of(start[of_device], end[of_device])
        inside[number] = CoveredTime.of(start[of_device & collective], end[of_device & collective])
    for spans in steps.partition_by("label", "device", maintain_order=True):
        number, label = spans["device"][0], _LABELS[spans["label"][0]]
        if label is StepLabel.OUTSIDE:
            continue
        bounds: tuple[Ints, Ints] = (spans["start_ns"].to_numpy(), spans["end_ns"].to_numpy())
        busy_ns, window_ns = (
            int(busy[number].within(*bounds).sum()),
            int((bounds[1] - bounds[0]).sum()),
        )
        yield DeviceLoad(
            phase=label.phase,
            label=label,
            device=number,
            busy_s=busy_ns * S,
            collective_s=int(inside[number].within(*bounds).sum()) * S,
            wait_s=None,
            idle_s=(window_ns - busy_ns) * S,
            window_s=window_ns * S,
        )


def _times(collectives: pl.DataFrame, ops: pl.DataFrame) -> Iterator[CollectiveTime]:
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
        label, is_known = _LABELS[record["label"]], record["is_known"]
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
