"""XPlane profiles of any program as traces: TPUs, GPUs and the CPU backend.

Newer profiles have the plane `/device:CUSTOM:Megascale Trace`, whose events `NetworkSend` and
`NetworkReceive` name their device in the stat `graph_key`: `device_200001_gid_...` is device 1 of
slice 2. In older ones, the host has events `MegaScale: Communication Transport Send` and `Receive`,
with the collective, slices, devices, bytes and time in their stats; such an event marks the end.
Sources: openxla/xprof, convert/megascale_perfetto/xspace_loader.cc and convert/dcn_utils.cc;
openxla/xla, tsl/profiler/utils/xplane_schema.cc.

A SparseCore has a plane of its own, `/device:TPU:0 SparseCore 0`, with the lines `Sparse Core Modules`
and `Sparse Core Ops` (openxla/xprof, xprof/utils and convert/xplane_to_op_stats). The main core may
record the op that hands a collective over, or not; an execution counts once.

The facts of a collective come from the HLO inside the profile, else from the name of its event.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from meshscope.errors import ParseError
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind
from meshscope.hardware.chips import ChipKind
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.collectives import collectives_of
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.profile.executions import executions
from meshscope.readers.profile.joining import with_hlo
from meshscope.readers.profile.nesting import CoveredTime
from meshscope.readers.profile.ops import COPY_KERNEL, PS, Ops
from meshscope.readers.profile.plane import Plane
from meshscope.readers.profile.quality import capture_faults
from meshscope.readers.profile.session import Profile, read_profile, start_unix_ns
from meshscope.readers.profile.steps import annotated_steps, step_of_events
from meshscope.readers.profile.xplane import read_programs
from meshscope.readers.traces.trace import (
    BETWEEN_SLICES,
    OPS_SCHEMA,
    Category,
    Trace,
    TraceFormat,
    events_table,
    left_out,
)

STATS = (
    *("graph_key", "dcn_label", "dcn_source_slice_id", "dcn_source_per_slice_device_id"),
    *("dcn_destination_slice_id", "dcn_destination_per_slice_device_id"),
    *("payload_size_bytes", "duration_us"),
)
STREAM = 1_000_000
PLANE = "/device:CUSTOM:Megascale"
_KINDS = {
    "NetworkSend": Kind.SEND,
    "NetworkReceive": Kind.RECV,
    "MegaScale: Communication Transport Send": Kind.SEND,
    "MegaScale: Communication Transport Receive": Kind.RECV,
}
_GRAPH_KEY = re.compile(r"device_(\d+)_")
SCHEMA: dict[str, Any] = {
    "name": pl.String,
    "kind": pl.String,
    "category": pl.String,
    "payload_bytes": pl.Int64,
    "device": pl.Int32,
    "start_s": pl.Float64,
    "dur_s": pl.Float64,
}


def slice_transfers(profile: Profile) -> pl.DataFrame:
    """Transfers by SCHEMA, and the copies between host and device for them; empty without any."""
    has_transfers = {
        host
        for host, _, plane, _ in profile.planes()
        if plane.name.startswith(PLANE) and len(plane.events)
    }
    parts = [pl.DataFrame(schema=SCHEMA)]
    for host, _, plane, base_s in profile.planes():
        devices = profile.ops.events.filter(pl.col("host") == host)["device"]
        known = devices.drop_nulls().unique().sort().to_list() or [0]
        if plane.name.startswith(PLANE):
            parts.append(_placed(_of_plane(plane), known, base_s))
        elif plane.name.startswith("/host:") and host not in has_transfers:
            parts.append(_placed(_of_host(plane), known, base_s))
    return pl.concat(parts)


def _of_plane(plane: Plane) -> pl.DataFrame:
    """Events of the Megascale plane with `number`, the device as the runtime numbers it."""
    events = _named(plane)
    if "stat.graph_key" not in events:
        return events.with_columns(
            pl.lit(None, pl.Int64).alias("number"), pl.lit(None, pl.Int64).alias("payload_bytes")
        )
    key = pl.col("stat.graph_key").cast(pl.String)
    return events.with_columns(
        key.str.extract(_GRAPH_KEY.pattern).cast(pl.Int64, strict=False).alias("number"),
        pl.lit(None, pl.Int64).alias("payload_bytes"),
    )


def _of_host(plane: Plane) -> pl.DataFrame:
    """Transfers among the events of a host; times are those before the event."""
    columns = {f"stat.{name}" for name in STATS[1:]}
    events = _named(plane)
    if not columns <= set(events.columns):
        return events.head(0).with_columns(
            pl.lit(None, pl.Int64).alias("number"), pl.lit(None, pl.Int64).alias("payload_bytes")
        )

    def number(name: str) -> pl.Expr:
        return pl.col(f"stat.{name}").cast(pl.Int64, strict=False)

    is_send = pl.col("name").str.ends_with("Send")
    device = pl.when(is_send).then(number("dcn_source_per_slice_device_id"))
    dur_ps = number("duration_us") * 1_000_000
    label = pl.col("stat.dcn_label").cast(pl.String).fill_null("")
    return events.filter(pl.col("name").is_in(list(_KINDS))).with_columns(
        device.otherwise(number("dcn_destination_per_slice_device_id")).alias("number"),
        number("payload_size_bytes").alias("payload_bytes"),
        (pl.col("start_ps") - dur_ps).clip(lower_bound=0).alias("start_ps"),
        dur_ps.clip(lower_bound=0).alias("dur_ps"),
        pl.concat_str("name", label, separator=" ").alias("name"),
    )


def _named(plane: Plane) -> pl.DataFrame:
    names = plane.kinds.select("kind", "name")
    return plane.events.join(names, on="kind", how="left", maintain_order="left")


def _placed(events: pl.DataFrame, devices: list[int], base_s: float) -> pl.DataFrame:
    """The events on the devices of their host, which count in the order of the runtime's numbers."""
    numbers = events["number"].drop_nulls().unique().sort().to_list()
    of_number = {n: devices[min(i, len(devices) - 1)] for i, n in enumerate(numbers)}
    kinds = [
        next((kind for start, kind in _KINDS.items() if (name or "").startswith(start)), None)
        for name in events["name"]
    ]
    return events.select(
        "name",
        pl.Series("kind", kinds, dtype=pl.String),
        pl.Series(
            "category",
            [(Category.COPY if kind is None else Category.COLLECTIVE).value for kind in kinds],
            dtype=pl.String,
        ),
        "payload_bytes",
        pl.col("number")
        .replace_strict(of_number, default=devices[0], return_dtype=pl.Int32)
        .alias("device"),
        (pl.col("start_ps") * PS + base_s).alias("start_s"),
        (pl.col("dur_ps") * PS).alias("dur_s"),
    ).cast(SCHEMA)  # type: ignore[arg-type]


def transfer_findings(transfers: pl.DataFrame, *, is_counted: bool) -> Iterator[str]:
    """How the transfers count."""
    n = transfers["kind"].drop_nulls().len()
    if not n:
        return
    recorded = f"the Megascale runtime recorded {n:,} transfers between slices"
    if is_counted:
        yield f"{recorded}: they are rows of their own, as the devices recorded no sends"
    else:
        yield f"{recorded}: the sends and receives of the devices count, and the timeline shows both"


_NS = 1e9
LINES_PER_CORE = 1_000  # streams of SparseCores are numbered behind those of the main core


def streams() -> pl.Expr:
    """The stream of each event: its line, with those of each SparseCore apart."""
    return (
        pl.col("line").cast(pl.Int64)
        + pl.col("core").cast(pl.Int64).fill_null(-1).add(1) * LINES_PER_CORE
    )


def counted_once(events: pl.DataFrame) -> pl.DataFrame:
    """The events without collectives that both cores recorded.

    If the main core's event says the bytes, it counts, with its time from start to end; else the
    SparseCore's. `events` has device, core, kind, payload_bytes, start_s and dur_s.
    """
    is_sparse = pl.col("core").is_not_null()
    is_collective = pl.col("kind").is_not_null()
    if events.filter(is_sparse & is_collective).is_empty():
        return events
    rows = events.with_row_index("row")
    dropped: list[int] = []
    for same in rows.filter(is_collective).partition_by("device", "kind"):
        sized = same.filter(~is_sparse, pl.col("payload_bytes").is_not_null())
        unsized = same.filter(~is_sparse, pl.col("payload_bytes").is_null())
        sparse = same.filter(is_sparse)
        repeated = sparse.filter(_during(sparse, sized))
        dropped += repeated["row"].to_list()
        counted = sparse.filter(~pl.col("row").is_in(repeated["row"].implode()))
        dropped += unsized.filter(_during(unsized, counted))["row"].to_list()
    return rows.filter(~pl.col("row").is_in(dropped)).drop("row")


def _during(events: pl.DataFrame, others: pl.DataFrame) -> pl.Series:
    """Whether each event is at the same time as one of the others."""
    covered = CoveredTime.of(*_bounds(others))
    return pl.Series(covered.within(*_bounds(events)) > 0)


def _bounds(events: pl.DataFrame) -> tuple["np.ndarray[tuple[int], np.dtype[np.int64]]", ...]:
    start = events["start_s"]
    bounds = (start, start + events["dur_s"])
    return tuple((bound * _NS).round().cast(pl.Int64).to_numpy() for bound in bounds)


# Stats of events that are used; those of kinds of events are read in full.
_STATS = (
    *("hlo_op", "hlo_module", "program_id", "run_id", "device_ordinal", "step_num", "tf_op"),
    "source",
    *STATS,
)
_DEVICE = re.compile(r"/device:(TPU|GPU):\d+")  # also of its SparseCores
_COPIES = frozenset({"copy", "async", "slice", "dynamic-slice", "dynamic-update-slice"})
MAX_NAMED = 4  # programs in one message

Facts = Mapping[tuple[str, str], Mapping[str, Any]]  # by program and instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class _Programs:
    """The programs that ran: their HLO `texts`, and `facts` of their collectives."""

    texts: Mapping[str, str]
    facts: Facts
    n_devices: int  # of the largest program; 0 without HLO
    findings: tuple[str, ...]


def read_xplane(path: Path) -> Trace:
    """The trace of one host; TraceError if the file is no profile or is damaged."""
    profile = read_profile(path, stats=_STATS)
    texts, findings = read_programs(path)
    n_events = sum(len(plane.events) for space in profile.spaces for plane in space.planes)
    return trace_of_profile(
        profile, TraceFormat.XPLANE, n_events=n_events, texts=texts, findings=findings
    )


def trace_of_profile(
    profile: Profile,
    kind: TraceFormat,
    *,
    n_events: int,
    texts: Mapping[str, str] | None = None,
    findings: Sequence[str] = (),
) -> Trace:
    """The trace of the hosts of a profile; `texts` is the HLO of its programs, if it has any."""
    named = _with_program_names(profile.ops)
    programs = _programs(texts or {}, named)
    ops = with_hlo(named, programs.facts) if programs.facts else named
    ops = Ops(events=ops.events, instructions=ops.instructions.with_columns(_categories(ops)))
    runs = executions(_collectives_of(ops))
    steps = annotated_steps(profile)
    transfers = _transfers(profile, ops)
    executed = _executed(ops, runs, transfers)
    events, n_invalid, n_repeated = events_table(_columns(profile, executed, steps))
    planes = ((host, _DEVICE.match(plane.name)) for host, _, plane, _ in profile.planes())
    local = {(host, match[0]): match for host, match in planes if match}
    return Trace(
        path=profile.spaces[0].path,
        format=kind,
        events=events,
        ops=pl.concat([_op_rows(ops.instructions), _transfer_rows(transfers)]),
        steps=steps,
        n_events=n_events,
        contents=_planes(profile),
        world_size=max(programs.n_devices, _largest_device(ops) + 1),
        n_local=len(local),
        device_name=_device_name(profile),
        chip_kind=ChipKind(
            next(iter(kinds)).lower() if (kinds := {m[1] for m in local.values()}) else "cpu"
        ),
        origin_unix_ns=start_unix_ns(profile.spaces[0]),
        programs=programs.texts,
        findings=(
            *findings,
            *left_out(n_unreadable=0, n_invalid=n_invalid, n_repeated=n_repeated),
            *programs.findings,
            *(fault.message for fault in capture_faults(profile, ops, runs=runs)),
            *_several_programs(ops),
            *transfer_findings(transfers, is_counted=_counts_transfers(ops)),
        ),
    )


def _with_program_names(ops: Ops) -> Ops:
    """Names the module of each op `module(program id)`, which tells equal names apart."""
    label = pl.format("{}({})", pl.col("module"), pl.col("program_id"))
    named = ops.instructions.with_columns(pl.coalesce(label, "module").alias("module"))
    return Ops(events=ops.events, instructions=named)


def _programs(texts: Mapping[str, str], ops: Ops) -> _Programs:
    """The programs of the profile that ran on its devices, read for their collectives."""
    findings: list[str] = []
    ran = ops.instructions["module"].drop_nulls().unique(maintain_order=True)
    facts: dict[tuple[str, str], Mapping[str, Any]] = {}
    n_devices = 0
    for program in ran:
        try:
            rows, n = _collectives(program, texts.get(program, ""))
        except ParseError as error:
            findings.append(f"the HLO of program '{program}' cannot be read: {error}")
            continue
        n_devices = max(n_devices, n)
        facts |= {(program, name): _facts(same) for name, same in _by_name(rows).items()}
    return _Programs(
        texts={name: texts[name] for name in ran if name in texts},
        facts=facts,
        n_devices=n_devices,
        findings=tuple(findings),
    )


def _collectives(program: str, text: str) -> tuple[list[Collective], int]:
    if not text:
        return [], 0
    module = parse_hlo(text, program)
    everywhere = Mesh(axes=(("device", module.n_devices),))
    rows = collectives_of(module, mesh=everywhere, n_steps_of={}, crosses_slices=lambda _: None)
    return rows, module.n_devices


def _by_name(rows: Iterable[Collective]) -> Mapping[str, list[Collective]]:
    named: dict[str, list[Collective]] = {}
    for row in rows:
        if row.hlo_name is not None:
            named.setdefault(row.hlo_name, []).append(row)
    return named


def _facts(rows: Sequence[Collective]) -> Mapping[str, Any]:
    """Facts of one instruction; bytes are summed over its arrays."""
    first = rows[0]
    sizes = [row.payload_bytes for row in rows if row.layer == first.layer]
    return {
        "kind": first.kind,
        "opcode": first.opcode,
        "groups": [list(group) for group in first.groups] or None,
        "dtype": first.dtype,
        "payload_bytes": None if None in sizes else sum(filter(None, sizes)),
    }


def _categories(ops: Ops) -> pl.Expr:
    """The category of each instruction; what SparseCores alone run does not hide collectives."""
    opcode = pl.col("opcode").str.replace("-(start|done|update)$", "")
    is_copy = opcode.is_in(list(_COPIES)) | pl.col("text").str.contains(COPY_KERNEL)
    cores = ops.events.select("op", pl.col("core").is_not_null()).unique()
    sparse, main = (cores.filter(pl.col("core") == is_sparse)["op"] for is_sparse in (True, False))
    is_copy |= pl.col("op").is_in(sparse.implode()) & ~pl.col("op").is_in(main.implode())
    return (
        pl.when(pl.col("kind").is_not_null())
        .then(pl.lit(Category.COLLECTIVE.value))
        .when(is_copy)
        .then(pl.lit(Category.COPY.value))
        .otherwise(pl.lit(Category.COMPUTE.value))
        .alias("category")
    )


def _collectives_of(ops: Ops) -> Ops:
    """The collectives and both halves of the asynchronous ones."""
    keys = ["module", "starts"]
    is_collective = pl.col("category") == Category.COLLECTIVE.value
    starts = ops.instructions.filter(is_collective).select(keys).drop_nulls("starts").unique()
    halves = ops.instructions.join(starts, on=keys, nulls_equal=True, how="semi")["op"]
    chosen = ops.instructions.filter(is_collective | pl.col("op").is_in(halves.implode()))
    return Ops(
        events=ops.events.filter(pl.col("op").is_in(chosen["op"].implode())),
        instructions=chosen,
    )


def _executed(ops: Ops, runs: pl.DataFrame, transfers: pl.DataFrame) -> pl.DataFrame:
    """All executions: collectives from start to end, other ops, and transfers between slices."""
    joined = _collectives_of(ops).instructions["op"]
    is_other = (pl.col("role") == "leaf") & ~pl.col("op").is_in(joined.implode())
    named = ["op", "device", "line", "run_id", "start_s", "dur_s", "core"]
    facts = ops.instructions.select("op", "kind", "payload_bytes")
    both = pl.concat([runs.select(named), ops.events.filter(is_other).select(named)])
    once = counted_once(both.join(facts, on="op", how="left", maintain_order="left"))
    rows = once.select(
        "op", pl.col("device").fill_null(0), streams().alias("stream"), "run_id", "start_s", "dur_s"
    )
    between = transfers.select(
        "op",
        "device",
        pl.lit(STREAM, pl.Int64).alias("stream"),
        pl.lit(None, pl.Int64).alias("run_id"),
        "start_s",
        "dur_s",
    )
    return pl.concat([rows, between], how="vertical_relaxed")


def _transfers(profile: Profile, ops: Ops) -> pl.DataFrame:
    """The transfers between slices, numbered behind the instructions; copies if the devices recorded them, too."""
    transfers = slice_transfers(profile)
    if not _counts_transfers(ops):
        transfers = transfers.with_columns(pl.lit(Category.COPY.value).alias("category"))
    keys = ["name", "kind", "category", "payload_bytes"]
    distinct = transfers.select(keys).unique(maintain_order=True)
    first = len(ops.instructions)
    numbered = distinct.with_columns(
        pl.int_range(first, first + pl.len(), dtype=pl.UInt32).alias("op")
    )
    return transfers.join(numbered, on=keys, nulls_equal=True, maintain_order="left")


def _counts_transfers(ops: Ops) -> bool:
    """Whether the devices recorded no sends and receives themselves."""
    kinds = set(ops.instructions["kind"].drop_nulls())
    return not kinds & {Kind.SEND.value, Kind.RECV.value}


def _transfer_rows(transfers: pl.DataFrame) -> pl.DataFrame:
    """The distinct transfers as ops."""
    distinct = transfers.unique("op", maintain_order=True)
    is_counted = pl.col("category") == Category.COLLECTIVE.value
    columns = {
        **{name: pl.col(name) for name in ("op", "name", "category")},
        "kind": pl.when(is_counted).then("kind"),
        "opcode": pl.col("name").str.extract(r"^(MegaScale: [A-Za-z ]+?(?:Send|Receive)|\S+)"),
        "group_name": pl.when(is_counted).then(pl.lit(BETWEEN_SLICES)),
        "payload_bytes": pl.col("payload_bytes"),
    }
    return distinct.select(
        columns.get(name, pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in OPS_SCHEMA.items()
    )


def _columns(
    profile: Profile, events: pl.DataFrame, steps: pl.DataFrame
) -> Mapping[str, NDArray[Any]]:
    """The columns of the trace's events."""
    start_ns = (events["start_s"] * _NS).round().cast(pl.Int64)
    end_ns = ((events["start_s"] + events["dur_s"]) * _NS).round().cast(pl.Int64)
    return {
        "op": events["op"].to_numpy(),
        "device": events["device"].to_numpy(),
        "stream": events["stream"].to_numpy(),
        "start_ns": start_ns.to_numpy(),
        "dur_ns": (end_ns - start_ns).to_numpy(),
        "step": step_of_events(profile, steps, events),
    }


def _op_rows(instructions: pl.DataFrame) -> pl.DataFrame:
    """The distinct ops, named `program/instruction`; kernels keep their name."""
    name = pl.concat_str(pl.col("module").fill_null(""), pl.lit("/"), "hlo_name")
    shown = {
        "name": pl.when(pl.col("module").is_null()).then("hlo_name").otherwise(name),
        "opcode": pl.coalesce("opcode", "hlo_name"),
        "group_size": pl.col("groups").list.first().list.len(),
    }
    columns = {**{n: pl.col(n) for n in instructions.columns if n in OPS_SCHEMA}, **shown}
    return instructions.select(
        columns.get(name, pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in OPS_SCHEMA.items()
    )


def _largest_device(ops: Ops) -> int:
    """The largest device in the groups of collectives; -1 without groups."""
    devices = ops.instructions["groups"].drop_nulls().explode().explode()
    largest = devices.max()
    return largest if isinstance(largest, int) else -1


def _planes(profile: Profile) -> str:
    """The planes with events: `planes '/host:CPU' (12 events)`."""
    planes = [f"'{p.name}' ({len(p.events):,} events)" for _, _, p, _ in profile.planes()]
    shown = ", ".join([*planes[:MAX_NAMED], *(["..."] if planes[MAX_NAMED:] else [])])
    return f"planes {shown}" if planes else "no planes"


def _device_name(profile: Profile) -> str | None:
    """The chip, as the profiler calls it: `TPU v6 Lite`."""
    names = (plane.stats.get("device_type_string") for _, _, plane, _ in profile.planes())
    return next((name for name in names if isinstance(name, str) and name), None)


def _several_programs(ops: Ops) -> Iterator[str]:
    """The programs that ran, if there are several: totals over the window mix them."""
    counts = (
        ops.events.filter(pl.col("role") == "leaf")
        .join(ops.instructions.select("op", "module"), on="op")
        .drop_nulls("module")
        .group_by("module")
        .agg(pl.len().alias("n_ops"), pl.struct("device", "run_id").n_unique().alias("n_runs"))
        .sort("n_ops", "module", descending=[True, False])
    )
    if len(counts) < 2:
        return
    shown = ", ".join(f"{name} ({n:,} ops)" for name, n, _ in counts.head(MAX_NAMED).iter_rows())
    more = f" and {len(counts) - MAX_NAMED} more" if len(counts) > MAX_NAMED else ""
    yield f"{len(counts)} programs ran in the window: {shown}{more}; totals are over all of them"
