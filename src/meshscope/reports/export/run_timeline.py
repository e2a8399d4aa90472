"""The executions of one step per phase of a run, on one time line, as tracks for the trace writers.

If executions have times, they are placed at their times. Otherwise they follow each other in
schedule order, one microsecond each, and `RunTimeline.is_time` is False.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from meshscope.analysis.catalog import metric_inputs
from meshscope.analysis.intervals import SECONDS, placed
from meshscope.analysis.overlap import timed
from meshscope.analysis.timeline import TIMELINE_SCHEMA, last_step
from meshscope.events.enums import Kind, Part
from meshscope.events.timeline import ARGUMENT, Counter, Timeline, Track, printable
from meshscope.hardware.topology import Topology
from meshscope.interconnect.lines import LinkLoad, link_loads
from meshscope.plans.mesh import Mesh
from meshscope.store.run import RunRecord

MAX_DEVICES = 64
MAX_SLICES = 1_000_000  # over all devices; a longer timeline shows fewer devices
NS_PER_S = 1e9
NS_PER_OPERATION = 1000
NS_BETWEEN_PHASES = 1000
COPIES = "copies"
LAYERS = "layers"  # lane of the slices that enclose what a layer executes

ARGUMENTS = (
    "kind",
    "axis",
    "parallelism",
    "part",
    "layer",
    "stage",
    "dtype",
    "shape",
    "payload_bytes",
    "wire_bytes",
    "opcode",
    "group_size",
    "n_groups",
    "algorithm",
    "inserted_by",
    "hlo_name",
    "source_line",
    "time_basis",
    "exposed_s",
    "is_async",
    "activity",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One execution of an instruction; times in ns.

    `groups` is empty if it is no collective; `arguments` are the known columns of its row. `devices` are
    those of the pipeline stage that runs it; None if all devices run it alike. A stage that receives what
    another one sends has an execution without `kind`.
    """

    phase: str
    lane: str
    name: str
    start_ns: int
    dur_ns: int
    groups: tuple[tuple[int, ...], ...]
    arguments: Mapping[str, Any]
    collective_id: int  # the same on all devices that take part in one collective
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
class TimelineStep:
    """One step of a phase."""

    phase: str
    name: str
    start_ns: int
    dur_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeline:
    """Executions of one step per phase, sorted by start; `devices` are those to show.

    Each of `layers` encloses what a layer executes on its devices; () without times.
    """

    title: str
    topology: Topology | None
    devices: tuple[int, ...]
    n_devices: int
    is_time: bool
    steps: tuple[TimelineStep, ...]
    executions: tuple[Execution, ...]
    layers: tuple[Execution, ...]

    @property
    def unit_label(self) -> str:
        """What a length on the time line means."""
        return "time" if self.is_time else "order, not time: 1 us is one collective of the schedule"

    def of_device(self, device: int) -> Iterator[Execution]:
        """The executions that the device takes part in."""
        return (e for e in self.executions if e.is_on(device))


def run_timeline(run: RunRecord) -> RunTimeline:
    """The timeline of the run's strongest source: measured, else compiled, else predicted."""
    inputs = metric_inputs(run)
    source = run.manifest.source.value
    events = inputs.events.filter(pl.col("source") == source)
    stages = _devices_of_stages(run.manifest.experiment.device_mesh)
    single = None
    if inputs.timeline is not None:
        single = last_step(timed(inputs.timeline).filter(source=source))
    rows = {p: _rows(p, events, single) for p in _phases(run, events, single)}
    steps: list[TimelineStep] = []
    executions: list[Execution] = []
    layers: list[Execution] = []
    at_ns = 0
    for phase, (frame, is_timed) in rows.items():
        in_step = _executions(phase, frame, at_ns, is_timed=is_timed, first_id=len(executions) + 1)
        in_step = [of_stage for e in in_step for of_stage in _in_stages(e, stages)]
        executions += in_step
        layers += _layers(in_step) if is_timed else ()
        dur_ns = max((e.start_ns + e.dur_ns for e in in_step), default=at_ns) - at_ns
        name = _step_name(phase, frame)
        steps.append(TimelineStep(phase=phase, name=name, start_ns=at_ns, dur_ns=dur_ns))
        at_ns += dur_ns + NS_BETWEEN_PHASES
    n_devices = inputs.n_devices or 1
    n_slices = max(1, len(executions) // max(1, len(stages)))  # of a device
    n_shown = min(n_devices, MAX_DEVICES, max(1, MAX_SLICES // n_slices))
    return RunTimeline(
        title=title_of(run),
        topology=run.manifest.experiment.topology,
        devices=tuple(range(n_shown)),
        n_devices=n_devices,
        is_time=bool(rows) and all(is_timed for _, is_timed in rows.values()),
        steps=tuple(steps),
        executions=_with_lanes(executions),
        layers=tuple(layers),
    )


def _devices_of_stages(mesh: Mesh) -> list[frozenset[int]]:
    """The devices of each pipeline stage; empty without a pipeline."""
    names = [name for name, _ in mesh.axes]
    stages = [frozenset[int]() for _ in range(mesh.size("pp") if mesh.size("pp") > 1 else 0)]
    for device in range(mesh.n_devices if stages else 0):
        stages[mesh.coordinates(device)[names.index("pp")]] |= {device}
    return stages


def _in_stages(execution: Execution, stages: Sequence[frozenset[int]]) -> Iterator[Execution]:
    """The execution in each pipeline stage that runs it, and the reception of a send by the next stage."""
    stage, part = (execution.arguments.get(name) for name in ("stage", "part"))
    if not stages or execution.device is not None:
        yield execution
        return
    for number in range(len(stages)) if stage is None else (stage,):
        yield replace(execution, devices=stages[number])
    if part == Part.STAGE.value and stage is not None and stage + 1 < len(stages):
        kept = {
            n: v for n, v in execution.arguments.items() if n in {"axis", "part", "payload_bytes"}
        }
        yield replace(
            execution,
            name=f"receive from stage {stage}",
            arguments={**kept, "stage": stage + 1},
            devices=stages[stage + 1],
            is_received=True,
        )


def _layers(executions: Iterable[Execution]) -> Iterator[Execution]:
    """A slice for each time that a device runs a layer, from the end of the layer before or its first operation.

    The compiler may move operations of a layer between those of the layers before.
    """
    by_layer: dict[tuple[Hashable, int], dict[str, list[Execution]]] = {}
    for execution in executions:
        layer, facts = execution.arguments.get("layer"), execution.arguments
        if layer is not None and execution.lane != COPIES and not facts.get("is_async"):
            device = execution.device, execution.devices
            by_name = by_layer.setdefault((device, layer), {})
            by_name.setdefault(facts.get("hlo_name", ""), []).append(execution)
    slices: dict[Hashable, list[tuple[int, int, Execution]]] = {}
    for (device, _), by_name in by_layer.items():
        n_times = min(map(len, by_name.values()))
        for n in range(n_times):
            parts = (
                e[n * len(e) // n_times : (n + 1) * len(e) // n_times] for e in by_name.values()
            )
            once = [execution for part in parts for execution in part]
            end_ns = max(execution.start_ns + execution.dur_ns for execution in once)
            first = min(once, key=lambda execution: execution.start_ns)
            slices.setdefault(device, []).append((end_ns, first.start_ns, first))
    for of_device in slices.values():
        before_ns = 0
        for end_ns, start_ns, first in sorted(of_device, key=lambda layer: layer[:2]):
            facts = {n: v for n, v in first.arguments.items() if n in {"layer", "stage"}}
            before_ns, start_ns = end_ns, max(start_ns, before_ns)  # noqa: PLW2901  not before it
            yield replace(
                first,
                lane=LAYERS,
                name=f"layer {facts['layer']}",
                start_ns=start_ns,
                dur_ns=end_ns - start_ns,
                groups=(),
                arguments=facts,
            )


def title_of(run: RunRecord) -> str:
    """The model, plan and slice of a run, as far as they are known."""
    experiment = run.manifest.experiment
    slice_name = None if experiment.topology is None else experiment.topology.name
    place = f"plan {experiment.layout} on {slice_name}" if experiment.layout else slice_name
    parts = (experiment.model_name, place, run.manifest.source)
    return printable(", ".join(str(part) for part in parts if part))


def _phases(run: RunRecord, events: pl.DataFrame, timeline: pl.DataFrame | None) -> list[str]:
    """The phases of the run; "" for events of unknown phase."""
    phases = [phase.value for phase in run.manifest.phases]
    tables = (events,) if timeline is None else (events, timeline)
    return [*phases, ""] if any(table["phase"].null_count() for table in tables) else phases


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


def _step_name(phase: str, rows: pl.DataFrame) -> str:
    n_steps = None if rows.is_empty() else rows["n_steps"].max()
    name = phase or "unknown phase"
    return f"{name} (1 of {n_steps} steps)" if isinstance(n_steps, int) and n_steps > 1 else name


def _executions(
    phase: str, rows: pl.DataFrame, at_ns: int, *, is_timed: bool, first_id: int
) -> list[Execution]:
    if rows.is_empty():
        return []
    # Both ends are rounded, so that back-to-back executions stay back to back.
    unit_ns = NS_PER_S if is_timed else NS_PER_OPERATION
    ends = rows.select(pl.col("begin", "end") - pl.col("begin").min()) * unit_ns
    begin_ns, end_ns = (ends[name].round().cast(pl.Int64).to_list() for name in ("begin", "end"))
    records = rows.iter_rows(named=True)
    return [
        Execution(
            phase=phase,
            lane=_lane(row),
            name=_name(row),
            start_ns=at_ns + begin,
            dur_ns=end - begin,
            groups=() if row["kind"] is None else tuple(map(tuple, row["groups"] or ())),
            arguments=_arguments(row),
            collective_id=first_id + ident,
            device=row["device"],
        )
        for row, begin, end, ident in zip(
            records, begin_ns, end_ns, _collective_ids(rows), strict=True
        )
    ]


def _collective_ids(rows: pl.DataFrame) -> list[int]:
    """Numbers the executions; the n-th execution of an instruction has one number on all devices."""
    if rows["device"].null_count():
        return list(range(len(rows)))
    identity = ("hlo_name", "kind", "opcode", "payload_bytes", "axis")
    occurrence = pl.int_range(pl.len()).over(*identity, "device")
    counted = rows.with_columns(occurrence.alias("occurrence"))
    return counted.select(pl.struct(*identity, "occurrence").rank("dense")).to_series().to_list()


def _lane(row: Mapping[str, Any]) -> str:
    if row["kind"] is not None:
        return f"communication {printable(row['axis'] or 'of unknown axis')}"
    return COPIES if (row["opcode"] or "").startswith("copy") else "compute"


def _name(row: Mapping[str, Any]) -> str:
    layer = "" if row["layer"] is None else f"layer {row['layer']}"
    parts = (row["kind"] or row["hlo_name"] or row["opcode"] or "compute", row["part"], layer)
    return printable(" ".join(str(part) for part in parts if part))


def _arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: row[name] for name in ARGUMENTS if row.get(name) is not None}
    return {name: printable(v) if isinstance(v, str) else v for name, v in known.items()}


def _with_lanes(executions: Iterable[Execution]) -> tuple[Execution, ...]:
    """Moves executions that overlap in a lane to further lanes of its name; sorts by start."""
    ends: dict[Hashable, list[int]] = {}
    in_lanes: list[Execution] = []
    for execution in sorted(executions, key=lambda e: e.start_ns):
        of_device = execution.device, execution.devices
        lane_ends = ends.setdefault((of_device, execution.lane), [])
        free = (i for i, end in enumerate(lane_ends) if end <= execution.start_ns)
        at = next(free, len(lane_ends))
        lane_ends[at : at + 1] = [execution.start_ns + execution.dur_ns]
        lane = execution.lane if at == 0 else f"{execution.lane} ({at + 1})"
        in_lanes.append(replace(execution, lane=lane))
    return tuple(in_lanes)


PS_PER_NS = 1000
MAX_GROUPS = 65_536  # of one collective; separates the ids of its flows

# The groups of a collective, and the devices of the pipeline stage that runs it.
Place = tuple[tuple[tuple[int, ...], ...], frozenset[int] | None]


def timeline_of(run: RunTimeline) -> Timeline:
    """Every shown device with its steps, its lanes and its flows, and the load of every link."""
    return Timeline(
        tracks=_tracks(run),
        counters=link_counters(run),
        metadata={"title": run.title, "a length is": run.unit_label},
    )


def _tracks(run: RunTimeline) -> Iterator[Track]:
    plan = f"{run.title} ({run.unit_label})"
    per_chip = 1 if run.topology is None else run.topology.chip.devices_per_chip
    kinds = _kinds((*run.layers, *run.executions))
    by_device = _slices(run).partition_by("device", as_dict=True, include_key=False)
    for device in run.devices:
        chip, of_device = f"chip {device // per_chip}", f"device {device}"
        lanes = {"steps": (_step_kinds(run), _step_slices(run))}
        slices = by_device.get((device,), pl.DataFrame(schema={"lane": pl.String}))
        for in_lane in slices.partition_by("lane", maintain_order=True):
            lanes[in_lane["lane"][0]] = (kinds, in_lane.drop("lane"))
        for tid, (lane, (lane_kinds, lane_slices)) in enumerate(lanes.items(), start=1):
            yield Track(
                pid=device + 1,
                process=f"{of_device}: {plan}",
                tid=tid,
                thread=lane,
                parents=(plan, chip) if per_chip == 1 else (plan, chip, of_device),
                kinds=lane_kinds,
                slices=lane_slices,
            )


def _step_kinds(run: RunTimeline) -> pl.DataFrame:
    names = pl.Series("name", [step.name for step in run.steps], dtype=pl.String)
    return names.to_frame().with_row_index("kind")


def _step_slices(run: RunTimeline) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "kind": pl.Series(range(len(run.steps)), dtype=pl.UInt32),
            "start_ps": pl.Series([s.start_ns * PS_PER_NS for s in run.steps], dtype=pl.Int64),
            "dur_ps": pl.Series([s.dur_ns * PS_PER_NS for s in run.steps], dtype=pl.Int64),
        }
    )


def _kinds(executions: Sequence[Execution]) -> pl.DataFrame:
    """One kind per execution: all devices that take part in it share its arguments."""
    columns = {
        ARGUMENT + name: pl.Series(
            [e.arguments.get(name) for e in executions], dtype=TIMELINE_SCHEMA[name]
        )
        for name in ARGUMENTS
    }
    names = pl.Series("name", [e.name for e in executions], dtype=pl.String)
    return names.to_frame().with_columns(**columns).with_row_index("kind")


def _slices(run: RunTimeline) -> pl.DataFrame:
    """device, lane, kind, start_ps, dur_ps and flows of every execution on every shown device."""
    shown = (*run.layers, *run.executions)
    places = dict.fromkeys((e.groups, e.devices) for e in shown)
    groups = {place: i for i, place in enumerate(places)}
    executions = pl.DataFrame(
        [
            (
                i,
                e.lane,
                e.device,
                e.start_ns * PS_PER_NS,
                e.dur_ns * PS_PER_NS,
                groups[e.groups, e.devices],
                e.collective_id,
            )
            for i, e in enumerate(shown)
        ],
        schema={
            "kind": pl.UInt32,
            "lane": pl.String,
            "device": pl.Int64,
            "start_ps": pl.Int64,
            "dur_ps": pl.Int64,
            "groups": pl.Int64,
            "collective_id": pl.UInt64,
        },
        orient="row",
    )
    is_measured = pl.col("device").is_not_null()
    everywhere = executions.filter(~is_measured).drop("device")
    placed = pl.concat(
        [
            executions.filter(is_measured),
            everywhere.join(_members(groups, run.devices), on="groups").select(executions.columns),
        ]
    ).sort("device", "kind")
    flows = _flows(placed, _memberships(groups, run.devices))
    with_flows = placed.join(flows, on=["kind", "device"], how="left", maintain_order="left")
    return with_flows.drop("groups", "collective_id")


def _members(groups: dict[Place, int], devices: Sequence[int]) -> pl.DataFrame:
    """The shown devices that take part in each list of groups, or all, if they are in its stage."""
    rows = [
        (ident, device)
        for (of_collective, of_stage), ident in groups.items()
        for members in [{device for group in of_collective for device in group}]
        for device in devices
        if (not of_collective or device in members) and (of_stage is None or device in of_stage)
    ]
    return pl.DataFrame(rows, schema={"groups": pl.Int64, "device": pl.Int64}, orient="row")


def _memberships(groups: dict[Place, int], devices: Sequence[int]) -> pl.DataFrame:
    """The groups of more than one device that each shown device is in, and its position there."""
    rows: list[tuple[int, int, int, str]] = []
    shown_devices = set(devices)
    for (of_collective, _), ident in groups.items():
        for index, group in enumerate(of_collective):
            shown = [device for device in group if device in shown_devices]
            if len(group) > 1 and shown:
                ends = {shown[-1]: "f", shown[0]: "s"}
                rows += [(ident, d, index, ends.get(d, "t")) for d in dict.fromkeys(shown)]
    schema = {"groups": pl.Int64, "device": pl.Int64, "index": pl.UInt64, "position": pl.String}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _flows(placed: pl.DataFrame, memberships: pl.DataFrame) -> pl.DataFrame:
    """kind, device and `flows`, which join the slices of one group of a collective."""
    ident = (1 + pl.col("collective_id") * MAX_GROUPS + pl.col("index")).cast(pl.UInt64)
    joined = placed.join(memberships, on=["groups", "device"], maintain_order="left_right")
    flow = pl.struct(ident.alias("id"), "position").alias("flows")
    return joined.select("kind", "device", flow).group_by("kind", "device").agg("flows")


def link_counters(run: RunTimeline) -> tuple[Counter, ...]:
    """How the load of every link changes over time; none without a torus.

    Without times, a sample is the bytes of one operation.
    """
    topology = run.topology
    if topology is None or topology.chip.link_bytes_per_s is None:
        return ()
    loads: dict[Any, list[tuple[str, float]]] = {}
    changes: dict[str, dict[int, float]] = {}
    for execution in _first_of_each_collective(run):
        key = (execution.kind, execution.groups, execution.arguments["payload_bytes"])
        if key not in loads:
            loads[key] = _loads(execution, topology)
        dur_ns = max(1, execution.dur_ns)
        seconds = dur_ns / NS_PER_S if run.is_time else 1.0
        for link, load_bytes in loads[key]:
            of_link = changes.setdefault(link, {})
            start_ns, end_ns = execution.start_ns, execution.start_ns + dur_ns
            of_link[start_ns] = of_link.get(start_ns, 0.0) + load_bytes / seconds
            of_link[end_ns] = of_link.get(end_ns, 0.0) - load_bytes / seconds
    unit = "bytes/s" if run.is_time else "bytes"
    return tuple(
        Counter(name=link, unit=unit, samples=tuple(_samples(changes[link])))
        for link in sorted(changes)
    )


def _first_of_each_collective(run: RunTimeline) -> Iterator[Execution]:
    """Collectives of known size; one that several devices recorded counts once."""
    seen: set[int] = set()
    for execution in run.executions:
        is_sized = execution.kind is not None and execution.arguments.get("payload_bytes")
        if is_sized and execution.collective_id not in seen:
            seen.add(execution.collective_id)
            yield execution


def _loads(execution: Execution, topology: Topology) -> list[tuple[str, float]]:
    assert execution.kind is not None
    loads = link_loads(
        execution.kind,
        groups=execution.groups,
        payload_bytes=execution.arguments["payload_bytes"],
        topology=topology,
    )
    return [(_link_name(load, topology), load.load_bytes) for load in loads]


def _link_name(load: LinkLoad, topology: Topology) -> str:
    source, target = (",".join(map(str, chip)) for chip in (load.source, load.target))
    of_slice = f"slice {load.slice_index} " if topology.n_slices > 1 else ""
    return f"{of_slice}link {source} to {target}"


def _samples(changes: dict[int, float]) -> Iterator[tuple[int, float]]:
    """Running sums; a rest below 1e-9 of the largest change is rounding and becomes 0."""
    load, largest = 0.0, max(map(abs, changes.values()))
    for at_ns in sorted(changes):
        load += changes[at_ns]
        yield at_ns, load if load > 1e-9 * largest else 0.0
