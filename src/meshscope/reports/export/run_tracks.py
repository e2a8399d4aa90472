"""The timeline of a run as tracks for the trace writers: lanes of devices, flows, link loads."""

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from meshscope.analysis.timeline import TIMELINE_SCHEMA
from meshscope.events.timeline import ARGUMENT, Counter, Timeline, Track
from meshscope.hardware.topology import Topology
from meshscope.interconnect.time_model import LinkLoad, link_loads
from meshscope.reports.export.run_timeline import ARGUMENTS, NS_PER_S, Execution, RunTimeline

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
