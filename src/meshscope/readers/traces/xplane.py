"""XPlane profiles of any program as traces: TPUs, GPUs and the CPU backend.

The facts of a collective come from the HLO inside the profile, else from the name of its event.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from meshscope.errors import ParseError
from meshscope.events.collective import Collective
from meshscope.readers.hlo.collectives import collectives_of
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.profile.executions import executions
from meshscope.readers.profile.joining import with_hlo
from meshscope.readers.profile.nesting import innermost
from meshscope.readers.profile.ops import COPY_KERNEL, PS, Ops, module_runs
from meshscope.readers.profile.programs import read_programs
from meshscope.readers.profile.quality import capture_faults
from meshscope.readers.profile.session import Profile, read_profile, start_unix_ns
from meshscope.readers.profile.steps import phase_of, steps_of
from meshscope.readers.traces.annotations import read_annotation
from meshscope.readers.traces.columns import events_table, left_out
from meshscope.readers.traces.trace import (
    OPS_SCHEMA,
    STEPS_SCHEMA,
    Category,
    Trace,
    TraceFormat,
)
from meshscope.spec.plan.mesh import Mesh

# Stats of events that are used; those of kinds of events are read in full.
_STATS = (
    *("hlo_op", "hlo_module", "program_id", "run_id", "device_ordinal", "step_num", "tf_op"),
    "source",
)
_COPIES = frozenset({"copy", "async", "slice", "dynamic-slice", "dynamic-update-slice"})
_NS = 1e9
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
    ops = Ops(events=ops.events, instructions=ops.instructions.with_columns(_categories()))
    runs = executions(_collectives_of(ops))
    steps = _steps(profile)
    events, n_invalid, n_repeated = events_table(_columns(profile, ops, runs, steps))
    return Trace(
        path=profile.spaces[0].path,
        format=kind,
        events=events,
        ops=_op_rows(ops.instructions),
        steps=steps,
        n_events=n_events,
        world_size=max(programs.n_devices, _largest_device(ops) + 1),
        device_name=_device_name(profile),
        origin_unix_ns=start_unix_ns(profile.spaces[0]),
        programs=programs.texts,
        findings=(
            *findings,
            *left_out(n_unreadable=0, n_invalid=n_invalid, n_repeated=n_repeated),
            *programs.findings,
            *(fault.message for fault in capture_faults(profile, ops, runs=runs)),
            *_several_programs(ops),
            *_unread_planes(profile),
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


def _categories() -> pl.Expr:
    """The category of each instruction."""
    opcode = pl.col("opcode").str.replace("-(start|done|update)$", "")
    is_copy = opcode.is_in(list(_COPIES)) | pl.col("text").str.contains(COPY_KERNEL)
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


def _columns(
    profile: Profile, ops: Ops, runs: pl.DataFrame, steps: pl.DataFrame
) -> Mapping[str, NDArray[Any]]:
    """The columns of the trace's events: collectives from start to end, and all other ops.

    Ops of SparseCores are left out: those of the core that start them count.
    """
    joined = _collectives_of(ops).instructions["op"]
    is_other = (pl.col("role") == "leaf") & ~pl.col("op").is_in(joined.implode())
    named = ["op", "device", "line", "run_id", "start_s", "dur_s", "core"]
    both = pl.concat([runs.select(named), ops.events.filter(is_other).select(named)])
    events = both.filter(pl.col("core").is_null()).with_columns(pl.col("device").fill_null(0))
    start_ns = (events["start_s"] * _NS).round().cast(pl.Int64)
    end_ns = ((events["start_s"] + events["dur_s"]) * _NS).round().cast(pl.Int64)
    return {
        "op": events["op"].to_numpy(),
        "device": events["device"].to_numpy(),
        "stream": events["line"].cast(pl.Int64).to_numpy(),
        "start_ns": start_ns.to_numpy(),
        "dur_ns": (end_ns - start_ns).to_numpy(),
        "step": _step_of(profile, steps, events),
    }


def _steps(profile: Profile) -> pl.DataFrame:
    """The steps that the program annotated, on hosts or devices; empty if there are none.

    Annotations of servers that tell prefill and decode come first, then numbered steps, then
    annotations and modules named after a phase.
    """
    marks = _marks(profile)
    candidates = (
        _served(profile),
        marks.filter(pl.col("step").is_not_null()),
        marks.filter(pl.col("phase").is_not_null()),
        _phase_runs(profile),
    )
    chosen = next((c for c in candidates if not c.is_empty()), marks.head(0))
    records = [
        {
            **_tokens(name, phase),
            "step": index,
            "device": device,
            "name": name,
            "start_ns": round(start_s * _NS),
            "dur_ns": round(dur_s * _NS),
        }
        for index, (name, phase, start_s, dur_s, device) in enumerate(
            chosen.select("name", "phase", "start_s", "dur_s", "device").iter_rows()
        )
    ]
    return pl.DataFrame(records, schema=STEPS_SCHEMA)


def _tokens(name: str, phase: str | None) -> Mapping[str, Any]:
    annotation = read_annotation(name)
    if annotation is None or annotation.kind is None:
        return {"kind": phase}
    return {
        "kind": annotation.kind,
        "prefill_tokens": annotation.prefill_tokens,
        "decode_tokens": annotation.decode_tokens,
    }


def _marks(profile: Profile) -> pl.DataFrame:
    """Numbered steps and annotations named after a phase; `device` is null for those of hosts."""
    devices = _devices(profile)
    marks = steps_of(profile).join(devices, on=["host", "plane"], how="left", maintain_order="left")
    return marks.with_columns(pl.when("on_device").then("device").alias("device")).select(
        "name", "phase", "step", "start_s", "dur_s", "device"
    )


def _devices(profile: Profile) -> pl.DataFrame:
    """The device of each plane with ops: host, plane, device."""
    planes = profile.ops.events.select("host", "plane", "device")
    return planes.unique(["host", "plane"], maintain_order=True)


def _served(profile: Profile) -> pl.DataFrame:
    """Annotations of serving engines on the hosts, which tell prefill from decode."""
    parts = [_marks(profile).head(0)]
    for _, _, plane, base_s in profile.planes():
        if not plane.name.startswith("/host:"):
            continue
        names = plane.kinds.select("kind", "name")
        known = [
            (a := read_annotation(n)) is not None and a.kind is not None for n in names["name"]
        ]
        marks = plane.events.join(names.filter(pl.Series(known, dtype=pl.Boolean)), on="kind")
        parts.append(_placed(marks, base_s, device=None))
    return pl.concat(parts).sort("start_s", maintain_order=True)


def _phase_runs(profile: Profile) -> pl.DataFrame:
    """Executions of modules named after a phase, such as `jit_decode`, on each device."""
    devices = {(host, plane): device for host, plane, device in _devices(profile).iter_rows()}
    parts = [_marks(profile).head(0)]
    for host, index, plane, base_s in profile.planes():
        if plane.name.startswith("/device:TPU") and (host, index) in devices:
            runs = module_runs(plane).with_columns(
                pl.col("module").fill_null("").alias("name"),
                (pl.col("end_ps") - pl.col("start_ps")).alias("dur_ps"),
            )
            parts.append(_placed(runs, base_s, device=devices[host, index]))
    runs = pl.concat(parts).sort("start_s", maintain_order=True)
    return runs.filter(pl.col("phase").is_not_null())


def _placed(marks: pl.DataFrame, base_s: float, *, device: int | None) -> pl.DataFrame:
    """Named events of a plane as marks."""
    return marks.select(
        "name",
        pl.Series("phase", [phase_of(name) for name in marks["name"]], pl.String),
        pl.lit(None, pl.Int64).alias("step"),
        (pl.col("start_ps") * PS + base_s).alias("start_s"),
        (pl.col("dur_ps") * PS).alias("dur_s"),
        pl.lit(device, pl.Int32).alias("device"),
    )


def _step_of(profile: Profile, steps: pl.DataFrame, events: pl.DataFrame) -> NDArray[np.int64]:
    """The step of each event [n]; -1 outside of steps.

    A step of a host contains the ops of the runs that it launched; one of a device, what ran in it.
    """
    run_start = pl.col("start_s").min().over("device", "run_id")
    at_s = events.select(pl.when(pl.col("run_id").is_null()).then("start_s").otherwise(run_start))
    step = np.full(len(events), -1, np.int64)
    device = events["device"].to_numpy()
    for of_device in steps.partition_by("device", maintain_order=True):
        number = of_device["device"][0]
        at = _launched_s(profile, events, at_s.to_series()) if number is None else at_s.to_series()
        start = of_device["start_ns"].to_numpy()
        inner = innermost(
            start,
            start + of_device["dur_ns"].to_numpy(),
            at=(at * _NS).round().cast(pl.Int64).to_numpy(),
        )
        is_in = (inner >= 0) & ((device == number) if number is not None else True)
        step[is_in] = of_device["step"].to_numpy()[inner[is_in]]
    return step


def _launched_s(profile: Profile, events: pl.DataFrame, at_s: pl.Series) -> pl.Series:
    """When the host launched the run of each event, if it recorded that; else the given time."""
    keys = ["device", "run_id"]
    parts: list[pl.DataFrame] = []
    for _, _, plane, base_s in profile.planes():
        stats = ("stat.device_ordinal", "stat.run_id")
        if plane.name.startswith("/host:") and set(stats) <= set(plane.events.columns):
            launches = plane.events.select(
                pl.col(stats[0]).cast(pl.Int32, strict=False).alias("device"),
                pl.col(stats[1]).cast(pl.Int64, strict=False).alias("run_id"),
                (pl.col("start_ps") * PS + base_s).alias("launch_s"),
            )
            parts.append(launches.drop_nulls(keys).group_by(keys).agg(pl.col("launch_s").min()))
    if not parts:
        return at_s
    launches = pl.concat(parts).group_by(keys).agg(pl.col("launch_s").min())
    joined = events.select(keys).with_columns(at_s.alias("at_s")).join(
        launches, on=keys, how="left", maintain_order="left"
    )  # fmt: skip
    return joined.select(pl.min_horizontal("launch_s", "at_s")).to_series()


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


def _unread_planes(profile: Profile) -> Iterator[str]:
    """Planes whose events are no rows: SparseCores and the transfers between slices."""
    for _, _, plane, _ in profile.planes():
        if len(plane.events) and "SparseCore" in plane.name:
            yield (
                f"'{plane.name}' has {len(plane.events):,} events, which are not counted: the core that "
                "starts them has its own"
            )
        if len(plane.events) and plane.name.startswith("/device:CUSTOM:Megascale"):
            yield (
                f"'{plane.name}' has {len(plane.events):,} events of transfers between slices, which are "
                "not counted: the devices' sends and receives are"
            )
