"""A step of each phase laid out on a line of time, for every device: what timelines show.

Where executions have times, they stand at their times. Where they have none, they stand in the order of
the schedule, a microsecond each, and the layout says so: order, not time.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from meshscope.analysis.intervals import SECONDS, placed
from meshscope.analysis.overlap import timed
from meshscope.analysis.run_inputs import metric_inputs
from meshscope.analysis.timeline import last_step
from meshscope.events.enums import Kind
from meshscope.interconnect.loads import LinkLoad, link_loads
from meshscope.readers.profile.timeline import safe
from meshscope.spec.hardware.topology import Topology, parse_topology
from meshscope.store.run import RunRecord

MAX_DEVICES = 64
MAX_SLICES = 1_000_000  # over all devices; a larger layout shows fewer devices
NS_PER_S = 1e9
NS_PER_OPERATION = 1000
NS_BETWEEN_PHASES = 1000

_SHOWN = (
    "kind",
    "axis",
    "part",
    "layer",
    "dtype",
    "shape",
    "payload_bytes",
    "wire_bytes",
    "opcode",
)
_SHOWN_TOO = (
    "group_size",
    "n_groups",
    "algorithm",
    "inserted_by",
    "hlo_name",
    "source_line",
    "time_basis",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One execution as every device that takes part in it sees it; times in nanoseconds.

    `groups` is empty for what runs on every device; `arguments` are the columns that are known.
    """

    phase: str
    lane: str
    name: str
    start_ns: int
    dur_ns: int
    groups: tuple[tuple[int, ...], ...]
    arguments: Mapping[str, Any]
    meeting: int  # the same for all devices that meet in it
    device: int | None = None  # where it was seen; None for what runs alike on all devices

    @property
    def kind(self) -> Kind | None:
        """What a collective means; None for compute and copies."""
        kind = self.arguments.get("kind")
        return None if kind is None else Kind(kind)

    def is_on(self, device: int) -> bool:
        """Whether the device takes part in it."""
        if self.device is not None:
            return self.device == device
        return not self.groups or bool(self.groups_of(device))

    def groups_of(self, device: int) -> list[int]:
        """Which of the groups the device is in, by index."""
        return [i for i, group in enumerate(self.groups) if device in group]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineStep:
    """One step of a phase on the line."""

    phase: str
    name: str
    start_ns: int
    dur_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineLayout:
    """What a timeline shows; `is_time` is False where the line is an order."""

    title: str
    topology: Topology | None
    devices: tuple[int, ...]
    n_devices: int
    is_time: bool
    steps: tuple[TimelineStep, ...]
    executions: tuple[Execution, ...]

    @property
    def unit_words(self) -> str:
        """What a length on the line means."""
        return "time" if self.is_time else "order, not time: 1 us is one collective of the schedule"

    def of_device(self, device: int) -> Iterator[Execution]:
        """The executions that the device takes part in."""
        return (e for e in self.executions if e.is_on(device))


def layout_of(run: RunRecord) -> TimelineLayout:
    """The layout of the run's strongest source."""
    subject = metric_inputs(run)
    source = run.manifest.source.value
    events = subject.events.filter(pl.col("source") == source)
    own = None
    if subject.timeline is not None:
        own = last_step(timed(subject.timeline).filter(source=source))
    rows = {p: _rows(p, events, own) for p in _phases(run, events)}
    is_time = bool(rows) and all(is_timed for _, is_timed in rows.values())
    steps: list[TimelineStep] = []
    executions: list[Execution] = []
    at_ns = 0
    for phase, (frame, is_timed) in rows.items():
        found, dur_ns = _executions(
            phase, frame, at_ns, is_timed=is_timed, first_meeting=len(executions) + 1
        )
        executions += found
        steps.append(
            TimelineStep(phase=phase, name=_step_name(phase, frame), start_ns=at_ns, dur_ns=dur_ns)
        )
        at_ns += dur_ns + NS_BETWEEN_PHASES
    n_devices = subject.n_devices or 1
    n_shown = min(n_devices, MAX_DEVICES, max(1, MAX_SLICES // max(1, len(executions))))
    topology = run.manifest.experiment.get("topology")
    return TimelineLayout(
        title=_title(run),
        topology=None if topology is None else parse_topology(str(topology)),
        devices=tuple(range(n_shown)),
        n_devices=n_devices,
        is_time=is_time,
        steps=tuple(steps),
        executions=_with_lanes(executions),
    )


def _title(run: RunRecord) -> str:
    asked = run.manifest.experiment
    model = asked.get("model") or {}
    words = (
        model.get("name"),
        f"plan {asked.get('plan')} on {asked.get('topology')}",
        run.manifest.source,
    )
    return safe(", ".join(str(word) for word in words if word))


def _phases(run: RunRecord, events: pl.DataFrame) -> list[str]:
    found = [phase.value for phase in run.manifest.phases]
    return [*found, *("" for _ in [0] if events["phase"].null_count())]


def _rows(
    phase: str, events: pl.DataFrame, timeline: pl.DataFrame | None
) -> tuple[pl.DataFrame, bool]:
    """Executions of a phase with `begin` and `end`, and whether these are seconds."""
    wanted = pl.col("phase").fill_null("") == phase
    if timeline is not None and not (own := timeline.filter(wanted)).is_empty():
        begin = pl.col("start_s").alias("begin")
        return own.with_columns(begin, (pl.col("start_s") + pl.col("dur_s")).alias("end")), True
    rows = placed(events.filter(wanted))
    return rows, not rows.is_empty() and (rows["unit"] == SECONDS).all()


def _step_name(phase: str, rows: pl.DataFrame) -> str:
    n_steps = None if rows.is_empty() else rows["n_steps"].max()
    words = phase or "unknown phase"
    return f"{words} (1 of {n_steps} steps)" if isinstance(n_steps, int) and n_steps > 1 else words


def _executions(
    phase: str, rows: pl.DataFrame, at_ns: int, *, is_timed: bool, first_meeting: int
) -> tuple[list[Execution], int]:
    if rows.is_empty():
        return [], 0
    unit_ns = NS_PER_S if is_timed else NS_PER_OPERATION
    first = float(rows["begin"].min())  # type: ignore[arg-type]
    meetings = _meetings(rows)
    found = [
        Execution(
            phase=phase,
            lane=_lane(row),
            name=_name(row),
            start_ns=at_ns + round((row["begin"] - first) * unit_ns),
            # Both ends are rounded, so that what follows without a pause still does.
            dur_ns=round((row["end"] - first) * unit_ns) - round((row["begin"] - first) * unit_ns),
            groups=() if row["kind"] is None else tuple(map(tuple, row["groups"] or ())),
            arguments=_arguments(row),
            meeting=first_meeting + meeting,
            device=row["device"],
        )
        for row, meeting in zip(rows.iter_rows(named=True), meetings, strict=True)
    ]
    return found, max(e.start_ns + e.dur_ns for e in found) - at_ns


def _meetings(rows: pl.DataFrame) -> list[int]:
    """A number for each execution; that of an instruction is the same on all devices, time by time."""
    if rows["device"].null_count():
        return list(range(len(rows)))
    occurrence = pl.int_range(pl.len()).over("hlo_name", "device")
    told = rows.with_columns(occurrence.alias("occurrence"))
    numbered = told.select(pl.struct("hlo_name", "occurrence").rank("dense").alias("meeting"))
    return numbered["meeting"].to_list()


def _lane(row: Mapping[str, Any]) -> str:
    if row["kind"] is not None:
        return f"communication {safe(row['axis'] or 'of unknown axis')}"
    return "copies" if (row["opcode"] or "").startswith("copy") else "compute"


def _name(row: Mapping[str, Any]) -> str:
    layer = "" if row["layer"] is None else f"layer {row['layer']}"
    words = (row["kind"] or row["hlo_name"] or row["opcode"] or "compute", row["part"], layer)
    return safe(" ".join(str(word) for word in words if word))


def _arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: row[name] for name in (*_SHOWN, *_SHOWN_TOO) if row[name] is not None}
    return {name: safe(value) if isinstance(value, str) else value for name, value in shown.items()}


def _with_lanes(executions: Iterable[Execution]) -> tuple[Execution, ...]:
    """Executions of a lane that overlap go on further lanes of its name."""
    ends: dict[tuple[int | None, str], list[int]] = {}
    found: list[Execution] = []
    for execution in sorted(executions, key=lambda e: e.start_ns):
        own = ends.setdefault((execution.device, execution.lane), [])
        at = next((i for i, end in enumerate(own) if end <= execution.start_ns), len(own))
        own[at : at + 1] = [execution.start_ns + execution.dur_ns]
        name = execution.lane if at == 0 else f"{execution.lane} ({at + 1})"
        found.append(replace(execution, lane=name))
    return tuple(found)


def flows_of(execution: Execution, device: int) -> list[int]:
    """Ids of the flows that connect this device's slice with those of its group; 0 is none's."""
    first = 1 + execution.meeting * 65_536
    return [first + at for at in execution.groups_of(device) if len(execution.groups[at]) > 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCount:
    """From `at_ns` on, a link carries `load` (bytes a second; bytes of an operation without times)."""

    link: str
    at_ns: int
    load: float


def link_counts(layout: TimelineLayout) -> list[LinkCount]:
    """How the load of every link changes along the line; none without a torus."""
    topology = layout.topology
    if topology is None or topology.chip.link_bytes_per_s is None:
        return []
    known: dict[Any, list[tuple[str, float]]] = {}
    changes: dict[str, dict[int, float]] = {}
    seen: set[int] = set()
    for execution in layout.executions:
        payload_bytes = execution.arguments.get("payload_bytes")
        if execution.kind is None or not payload_bytes or execution.meeting in seen:
            continue
        seen.add(execution.meeting)
        key = (execution.kind, execution.groups, payload_bytes)
        if key not in known:
            loads = link_loads(
                execution.kind,
                groups=execution.groups,
                payload_bytes=payload_bytes,
                topology=topology,
            )
            known[key] = [(_link_name(load, topology), load.load_bytes) for load in loads]
        seconds = max(1, execution.dur_ns) / NS_PER_S if layout.is_time else 1.0
        for link, load_bytes in known[key]:
            own = changes.setdefault(link, {})
            end_ns = execution.start_ns + max(1, execution.dur_ns)
            own[execution.start_ns] = own.get(execution.start_ns, 0.0) + load_bytes / seconds
            own[end_ns] = own.get(end_ns, 0.0) - load_bytes / seconds
    return [count for link in sorted(changes) for count in _summed(link, changes[link])]


def _link_name(load: LinkLoad, topology: Topology) -> str:
    source, target = (",".join(map(str, chip)) for chip in (load.source, load.target))
    of_slice = f"slice {load.slice_index} " if topology.n_slices > 1 else ""
    return f"{of_slice}link {source} to {target}"


def _summed(link: str, changes: Mapping[int, float]) -> Iterator[LinkCount]:
    load, largest = 0.0, max(map(abs, changes.values()))
    for at_ns in sorted(changes):
        load += changes[at_ns]
        yield LinkCount(link=link, at_ns=at_ns, load=load if load > 1e-9 * largest else 0.0)
