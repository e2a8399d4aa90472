"""The executions of a run on one time line, as a timeline for the trace writer: steps and lanes of each device.

A run shows one step per phase, from its strongest source. If executions have times, they are placed at their
times. Otherwise they follow each other in schedule order, one microsecond each, and `RunTimeline.is_time` is
False. An imported trace shows its last MAX_SLICES executions, in columns throughout.
"""

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from meshscope.analysis.catalog import metric_inputs
from meshscope.analysis.overlap import SECONDS, placed, timed
from meshscope.analysis.timeline import last_step, read_executions
from meshscope.events.enums import Kind, OpClass, Part, Source
from meshscope.events.measured import StepLabel
from meshscope.events.timeline import STEP_CLASSES, printable
from meshscope.readers.profile.ops import own_groups
from meshscope.reports.answer import title_of
from meshscope.reports.export.chrome import FLOWS, Timeline
from meshscope.store.run import RunRecord

MAX_DEVICES = 64
MAX_SLICES = 1_000_000  # over all devices; a longer timeline shows fewer devices, or its end
NS_PER_S = 1e9
NS_PER_OPERATION = 1000
NS_BETWEEN_PHASES = 1000
COPIES = "copies"
LAYERS = "layers"  # lane of the slices that enclose what a layer executes
MAX_GROUPS = 65_536  # of one collective; separates the ids of its flows

NAMED_CLASSES = frozenset({OpClass.MATMUL, OpClass.ATTENTION, OpClass.EXPERTS})
ARGUMENTS = (
    *("kind", "axis", "parallelism", "part", "layer", "stage", "dtype", "shape", "payload_bytes"),
    *("wire_bytes", "opcode", "group_size", "n_groups", "algorithm", "inserted_by", "hlo_name"),
    *("source_line", "time_basis", "exposed_s", "is_async", "activity", "phase", "op_class"),
    *("flops", "hbm_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One execution of an instruction; times in ns.

    `groups` is empty if it is no collective; `arguments` are the known columns of its row. `devices` form
    the pipeline stage that runs it; None if all devices run it alike. A stage that receives what
    another one sends has an execution without `kind`.
    """

    phase: str
    lane: str
    name: str
    start_ns: int
    dur_ns: int
    groups: tuple[tuple[int, ...], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    collective_id: int = 0  # the same on all devices that take part in one collective
    device: int | None = None  # where it was measured
    devices: frozenset[int] | None = None
    is_received: bool = False

    @property
    def kind(self) -> Kind | None:
        """Kind of a collective; None for compute and copies."""
        kind = self.arguments.get("kind")
        return None if kind is None else Kind(kind)

    def is_on(self, device: int) -> bool:
        """Whether the device takes part in it."""
        if self.device is not None:
            return self.device == device
        if self.devices is not None and device not in self.devices:
            return False
        return not self.groups or bool(self.groups_of(device))

    def groups_of(self, device: int) -> list[int]:
        """Indices of the groups that contain the device."""
        return [i for i, group in enumerate(self.groups) if device in group]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeline:
    """Executions of one step per phase, sorted by start; `devices` are to be shown.

    Each of `layers` encloses what a layer executes on its devices; () without times.
    """

    title: str
    devices: tuple[int, ...]
    n_devices: int
    is_time: bool
    steps: tuple[Execution, ...]
    executions: tuple[Execution, ...]
    layers: tuple[Execution, ...]

    @property
    def unit_label(self) -> str:
        """What a length on the time line means."""
        return "time" if self.is_time else "order, not time: 1 us is one collective of the schedule"

    def of_device(self, device: int) -> Iterator[Execution]:
        """The executions that the device takes part in."""
        return (e for e in self.executions if e.is_on(device))


def run_timeline(run: RunRecord, max_devices: int = MAX_DEVICES) -> RunTimeline:
    """The timeline of the run's strongest source: measured, else compiled, else predicted."""
    inputs = metric_inputs(run)
    source = run.manifest.source.value
    events = inputs.events.filter(pl.col("source") == source)
    mesh = run.manifest.experiment.device_mesh
    stages = [frozenset[int]() for _ in range(mesh.size("pp") if mesh.size("pp") > 1 else 0)]
    for device in range(mesh.n_devices if stages else 0):
        at = [name for name, _ in mesh.axes].index("pp")
        stages[mesh.coordinates(device)[at]] |= {device}
    single = None
    if inputs.timeline is not None:
        single = last_step(timed(inputs.timeline).filter(source=source))
    phases = [phase.value for phase in run.manifest.phases]
    if any(table["phase"].null_count() for table in (events, single) if table is not None):
        phases.append("")  # events of unknown phase
    rows = {phase: _rows(phase, events, single) for phase in phases}
    steps: list[Execution] = []
    executions: list[Execution] = []
    layers: list[Execution] = []
    at_ns = 0
    for phase, (frame, is_timed) in rows.items():
        in_step = _executions(phase, frame, at_ns, is_timed=is_timed, first_id=len(executions) + 1)
        in_step = [of_stage for e in in_step for of_stage in _in_stages(e, stages)]
        executions += in_step
        layers += _layers(in_step) if is_timed else ()
        dur_ns = max((e.start_ns + e.dur_ns for e in in_step), default=at_ns) - at_ns
        n_steps = None if frame.is_empty() else frame["n_steps"].max()
        name = phase or "unknown phase"
        if isinstance(n_steps, int) and n_steps > 1:
            name += f" (1 of {n_steps} steps)"
        steps.append(Execution(phase=phase, lane="steps", name=name, start_ns=at_ns, dur_ns=dur_ns))
        at_ns += dur_ns + NS_BETWEEN_PHASES
    n_devices = inputs.experiment.n_devices or 1
    n_slices = max(1, len(executions) // max(1, len(stages)))  # of a device
    return RunTimeline(
        title=printable(f"{title_of(run)}, {source}"),
        devices=tuple(range(min(n_devices, max_devices, max(1, MAX_SLICES // n_slices)))),
        n_devices=n_devices,
        is_time=bool(rows) and all(is_timed for _, is_timed in rows.values()),
        steps=tuple(steps),
        executions=tuple(sorted(executions, key=lambda e: e.start_ns)),
        layers=tuple(layers),
    )


def _in_stages(execution: Execution, stages: Sequence[frozenset[int]]) -> Iterator[Execution]:
    """The execution in each pipeline stage that runs it, and the reception of a send by the next stage."""
    part, stage = execution.arguments.get("part"), execution.arguments.get("stage")
    sender = stage if part == Part.STAGE.value else None
    if stages and execution.device is None:
        for number in range(len(stages)) if stage is None else (stage,):
            yield replace(execution, devices=stages[number])
        if sender is not None and sender + 1 < len(stages):
            yield _received(replace(execution, devices=stages[sender + 1]), sender)
    elif sender is not None and sender + 1 == len(stages):
        # A profile has one op for what a device sends and receives.
        yield _received(execution, sender - 1)
    else:
        yield execution


def _received(sent: Execution, stage: int) -> Execution:
    kept = ("axis", "part", "payload_bytes", "time_basis", "exposed_s")
    facts = {n: v for n, v in sent.arguments.items() if n in kept} | {"stage": stage + 1}
    name = f"receive from stage {stage}"
    return replace(sent, name=name, arguments=facts, is_received=True)


def _layers(executions: Iterable[Execution]) -> Iterator[Execution]:
    """A slice for each time that a device runs a layer, in the order of most of their operations.

    The compiler may move a few operations of a layer into the time of another: `_boundary` cuts them off.
    """
    by_layer: dict[tuple[Hashable, int], dict[str, list[Execution]]] = {}
    for execution in executions:
        layer, facts = execution.arguments.get("layer"), execution.arguments
        if layer is not None and execution.lane != COPIES and not facts.get("is_async"):
            device = execution.device, execution.devices
            by_name = by_layer.setdefault((device, layer), {})
            by_name.setdefault(facts.get("hlo_name", ""), []).append(execution)
    slices: dict[Hashable, list[_LayerTime]] = {}
    for (device, _), by_name in by_layer.items():
        n_times = min(map(len, by_name.values()))
        for n in range(n_times):
            parts = (
                e[n * len(e) // n_times : (n + 1) * len(e) // n_times] for e in by_name.values()
            )
            once = _LayerTime([execution for part in parts for execution in part])
            slices.setdefault(device, []).append(once)
    for of_device in slices.values():
        in_order = sorted(of_device, key=lambda one: one.starts_ns[len(one.starts_ns) // 2])
        bounds = [0, *(_boundary(*pair) for pair in pairwise(in_order)), sys.maxsize]
        for one, low, high in zip(in_order, accumulate(bounds, max), bounds[1:], strict=False):
            starts, ends = one.starts_ns[one.starts_ns >= low], one.ends_ns[one.ends_ns <= high]
            start_ns = int(starts.min(initial=one.ends_ns[-1]))
            end_ns = int(ends.max(initial=start_ns))
            facts = {n: v for n, v in one.first.arguments.items() if n in {"layer", "stage"}}
            times = {"start_ns": start_ns, "dur_ns": end_ns - start_ns}
            name = f"layer {facts['layer']}"
            yield replace(one.first, lane=LAYERS, name=name, groups=(), arguments=facts, **times)


class _LayerTime:
    """When the operations of one layer run, once."""

    def __init__(self, executions: Sequence[Execution]) -> None:
        self.first = min(executions, key=lambda execution: execution.start_ns)
        self.starts_ns = np.sort([e.start_ns for e in executions])
        self.ends_ns = np.sort([e.start_ns + e.dur_ns for e in executions])


def _boundary(before: _LayerTime, after: _LayerTime) -> int:
    """The end of an operation that has the fewest of `before` after it, and of `after` before it."""
    n_late = np.arange(len(before.ends_ns))[::-1]
    n_early = np.searchsorted(after.starts_ns, before.ends_ns)
    return int(before.ends_ns[np.argmin(n_late + n_early)])


def _rows(
    phase: str, events: pl.DataFrame, timeline: pl.DataFrame | None
) -> tuple[pl.DataFrame, bool]:
    """Executions of a phase with `begin` and `end`, and whether these are seconds."""
    in_phase = pl.col("phase").fill_null("") == phase
    if timeline is not None and not (rows := timeline.filter(in_phase)).is_empty():
        begin = pl.col("start_s").alias("begin")
        return rows.with_columns(begin, (pl.col("start_s") + pl.col("dur_s")).alias("end")), True
    rows = placed(events.filter(in_phase))
    return rows, not rows.is_empty() and (rows["unit"] == SECONDS).all()


def _executions(
    phase: str, rows: pl.DataFrame, at_ns: int, *, is_timed: bool, first_id: int
) -> list[Execution]:
    if rows.is_empty():
        return []
    # Both ends are rounded, so that back-to-back executions stay back to back.
    unit_ns = NS_PER_S if is_timed else NS_PER_OPERATION
    ends = rows.select(pl.col("begin", "end") - pl.col("begin").min()) * unit_ns
    begin_ns, end_ns = (ends[name].round().cast(pl.Int64).to_list() for name in ("begin", "end"))
    ids = pl.int_range(len(rows), eager=True)
    if not rows["device"].null_count():
        # The n-th execution of an instruction has one number on all devices.
        identity = ("hlo_name", "kind", "opcode", "payload_bytes", "axis")
        occurrence = pl.int_range(pl.len()).over(*identity, "device").alias("occurrence")
        ids = rows.select(pl.struct(*identity, occurrence).rank("dense")).to_series()
    executions: list[Execution] = []
    records = rows.iter_rows(named=True)
    for row, begin, end, ident in zip(records, begin_ns, end_ns, ids.to_list(), strict=True):
        lane = COPIES if (row["opcode"] or "").startswith("copy") else "compute"
        if row["kind"] is not None:
            lane = f"communication {printable(row['axis'] or 'of unknown axis')}"
        layer = "" if row["layer"] is None else f"layer {row['layer']}"
        words = (row["kind"] or row["hlo_name"] or row["opcode"] or "compute", row["part"], layer)
        known = {name: row[name] for name in ARGUMENTS if row.get(name) is not None}
        if row["kind"] is None and row.get("op_class") in NAMED_CLASSES:
            words = (row["op_class"], *words)
        executions.append(
            Execution(
                phase=phase,
                lane=lane,
                name=printable(" ".join(filter(None, words))),
                start_ns=at_ns + begin,
                dur_ns=end - begin,
                groups=() if row["kind"] is None else tuple(map(tuple, row["groups"] or ())),
                arguments={n: _shown(v) for n, v in known.items()},
                collective_id=first_id + ident,
                device=row["device"],
            )
        )
    return executions


_ROWS = {"device": pl.Int32, "kind": pl.UInt32, "flows": FLOWS}


def timeline_of(run: RunTimeline) -> Timeline:
    """Every shown device with its steps, its lanes and its flows."""
    shown = (*run.steps, *run.layers, *run.executions)
    return Timeline(
        title=run.title,
        length=run.unit_label,
        process=f"{run.title} ({run.unit_label})",
        kinds=[(e.name, _placed_facts(e)) for e in shown],
        rows=_placed(shown, run.devices),
    )


def _placed_facts(execution: Execution) -> Mapping[str, Any]:
    """The arguments with phase and layer, so that every slice can be selected by them."""
    facts = {"phase": execution.phase or "unknown", **execution.arguments}
    if execution.lane != "steps" and "layer" not in facts:
        facts["layer"] = "unknown" if facts.get("part") is None else "outside"
    return facts


def _placed(executions: Sequence[Execution], devices: Sequence[int]) -> pl.DataFrame:
    """The executions on each shown device that takes part; the kind is the place of the execution."""
    places: dict[Hashable, list[tuple[int, list[tuple[int, str]]]]] = {}
    rows: list[tuple[int, int, list[dict[str, Any]] | None]] = []
    for kind, execution in enumerate(executions):
        place = execution.device, execution.devices, execution.groups
        if place not in places:
            places[place] = _flows(execution, devices)
        first = 1 + execution.collective_id * MAX_GROUPS
        for device, flows in places[place]:
            ids = [{"id": first + index, "position": position} for index, position in flows]
            rows.append((device, kind, ids or None))
    facts = ("lane", "start_ns", "dur_ns")
    times = pl.DataFrame(
        {name: [getattr(e, name) for e in executions] for name in facts},
        {"lane": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64},
    )
    table = pl.DataFrame(rows, _ROWS, orient="row")
    return table.hstack(times[table["kind"]])


def _flows(execution: Execution, devices: Sequence[int]) -> list[tuple[int, list[tuple[int, str]]]]:
    """The shown devices that take part, each with its groups of several and its place among those shown."""
    flows: dict[int, list[tuple[int, str]]] = {d: [] for d in devices if execution.is_on(d)}
    all_shown = set(devices)
    for index, group in enumerate(execution.groups):
        shown = [device for device in group if device in all_shown] if len(group) > 1 else []
        positions = {shown[-1]: "f", shown[0]: "s"} if shown else {}
        for device in dict.fromkeys(shown):
            if device in flows:
                flows[device].append((index, positions.get(device, "t")))
    return list(flows.items())


_OF_TRACE = (
    *("kind", "axis", "part", "layer", "dtype", "shape", "payload_bytes", "wire_bytes", "opcode"),
    *("group_size", "n_groups", "hlo_name", "op_class"),
)
_IDENTITY = ("kind", "opcode", "dtype", "payload_bytes", "axis", "hlo_name", "members")
_END_NS = pl.col("start_ns") + pl.col("dur_ns")


def trace_timeline(folder: Path, title: str) -> tuple[Timeline, int, int]:
    """The last executions of an imported trace, how many these are, and how many the trace has.

    Steps of every device, and a lane for each stream of compute, copies, and collectives of each axis.
    """
    executions, ops, n_executions = read_executions(folder, max_rows=MAX_SLICES)
    axis = pl.concat_str(pl.lit("communication "), pl.col("axis").fill_null("of unknown axis"))
    lane = pl.when(pl.col("category") == "collective").then(axis)
    lane = lane.when(pl.col("category") == "copy").then(pl.lit(COPIES)).otherwise(pl.lit("compute"))
    rows = executions.join(ops.select("op", lane=lane), on="op", how="left", maintain_order="left")
    rows = rows.join(_flows_of_trace(executions, ops), on="row", how="left", maintain_order="left")
    stream = pl.concat_str("lane", pl.lit(", stream "), "stream")
    rows = rows.with_columns(stream.alias("lane"))
    used = rows.select("op", "step_class").unique(maintain_order=True).with_row_index("kind")
    rows = rows.join(used, on=["op", "step_class"], how="left", maintain_order="left")
    is_step = pl.col("step_class") != STEP_CLASSES.index(StepLabel.OUTSIDE.value)
    steps = (
        executions.filter(is_step)
        .group_by("device", "step_class", "step", maintain_order=True)
        .agg(pl.col("start_ns").min(), dur_ns=_END_NS.max() - pl.col("start_ns").min())
        .with_row_index("kind", offset=len(used))
        .with_columns(lane=pl.lit("steps"))
    )
    ordered = used.drop("kind").join(ops, on="op", how="left", maintain_order="left")
    layer = pl.concat_str(pl.lit("layer "), pl.col("layer").cast(pl.String))
    words = (pl.coalesce("kind", "hlo_name", "name"), "part", layer)
    is_named = pl.col("op_class").is_in([op_class.value for op_class in NAMED_CLASSES])
    shown_class = pl.when(is_named).then("op_class")
    text = pl.concat_str(shown_class, *words, separator=" ", ignore_nulls=True)
    names = ordered.select(text).to_series()
    phase = pl.Series([label.phase or label.value for label in StepLabel], dtype=pl.String)
    ordered = ordered.with_columns(phase=phase.gather(ordered["step_class"]))
    facts = ordered.select(*_OF_TRACE, "phase").iter_rows(named=True)
    kinds: list[tuple[str, Mapping[str, Any]]] = [
        (printable(name), {n: _shown(v) for n, v in of.items() if v is not None})
        for name, of in zip(names, facts, strict=True)
    ]
    of_steps = steps.select("step_class", "step").iter_rows()
    kinds += [(f"{STEP_CLASSES[step_class]} {step}", {}) for step_class, step in of_steps]
    columns = ("device", "lane", "kind", "start_ns", "dur_ns")
    every = [steps.select(columns), rows.sort("lane").select(*columns, "flows")]
    title = printable(title)
    shown = pl.concat(every, how="diagonal")
    timeline = Timeline(title=title, length="time", process=title, kinds=kinds, rows=shown)
    return timeline, len(executions), n_executions


def is_in_background(execution: Execution) -> bool:
    """Whether a copy runs beside the core, as all copies of a modeled step do."""
    facts = execution.arguments
    return facts.get("time_basis") != Source.MEASURED.value or facts.get("is_async") is True


def _shown(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def _flows_of_trace(rows: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """Row numbers with `flows`, which join the executions of one collective on the devices of its group."""
    keys = ["op", "device"]
    facts = ops.filter(pl.col("kind").is_not_null(), pl.col("groups").is_not_null())
    collectives = rows.join(facts, on="op", how="inner")
    of_device = own_groups(collectives.unique(keys, maintain_order=True), *keys)
    members = pl.col("group").cast(pl.List(pl.String)).list.join(",").alias("members")
    shared = of_device.filter(pl.col("group").list.len() > 1).select(*keys, members)
    named = collectives.join(shared, on=keys)
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
