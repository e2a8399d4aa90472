"""XPlane profiles of any program as traces: TPUs, GPUs and the CPU backend.

Profiles of several slices have the plane `/device:CUSTOM:Megascale Trace`, whose events `NetworkSend` and
`NetworkReceive` name their device in the stat `graph_key`: `device_200001_gid_...` is device 1 of
slice 2.
Sources: openxla/xprof, convert/megascale_perfetto/xspace_loader.cc; openxla/xla,
tsl/profiler/utils/xplane_schema.cc.

A SparseCore has a plane of its own, `/device:TPU:0 SparseCore 0`, with the lines `Sparse Core Modules`
and `Sparse Core Ops` (openxla/xprof, xprof/utils and convert/xplane_to_op_stats). The main core may
record the op that hands a collective over, or not; an execution counts once.

The facts of a collective come from the HLO inside the profile, else from the name of its event.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.errors import ParseError
from meshscope.events.collective import Effect
from meshscope.events.enums import Kind
from meshscope.events.intervals import CoveredTime
from meshscope.events.schema import in_schema, schema_of
from meshscope.hardware.chips import ChipKind
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.collectives import (
    by_instruction,
    instruction_facts,
    module_collectives,
)
from meshscope.readers.hlo.communication import effect_of
from meshscope.readers.hlo.parse import parse_hlo, parse_instruction_line
from meshscope.readers.profile.executions import categorized, executions, with_hlo
from meshscope.readers.profile.ops import PS, Ops, stat_of
from meshscope.readers.profile.quality import capture_faults
from meshscope.readers.profile.steps import annotated_steps, step_of_events
from meshscope.readers.profile.xplane import Profile, read_profile, read_programs, start_unix_ns
from meshscope.readers.traces.trace import (
    BETWEEN_SLICES,
    OPS_SCHEMA,
    Category,
    Trace,
    TraceFormat,
    events_table,
)
from meshscope.units import counted

STREAM = 1_000_000  # of the transfers between slices
LINES_PER_CORE = 1_000  # streams of SparseCores are numbered after the main core's
PLANE = "/device:CUSTOM:Megascale"
MAX_NAMED = 4  # programs in one message
_NS = 1e9
_DEVICE = re.compile(r"/device:(TPU|GPU):\d+")  # also of its SparseCores
_GRAPH_KEY = r"device_(\d+)_"
_TRANSFER = r"^Network(Send|Receive)"
_TRANSFERS_SCHEMA = schema_of("slice_transfers")


def read_xplane(path: Path) -> Trace:
    """The trace of one host; TraceError if the file is no profile or is damaged."""
    profile = read_profile(path)
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
    # Named `module(program id)`, which tells modules of equal names apart.
    label = pl.format("{}({})", pl.col("module"), pl.col("program_id"))
    named = profile.ops.instructions.with_columns(pl.coalesce(label, "module").alias("module"))
    ran = named["module"].drop_nulls().unique(maintain_order=True).to_list()
    programs = {name: text for name in ran if (text := (texts or {}).get(name))}
    facts, n_devices, unread = _facts_of(programs)
    ops = Ops(events=profile.ops.events, instructions=named)
    ops = with_hlo(ops, facts) if facts else ops
    ops = categorized(ops)
    collectives = _collectives_of(ops)
    runs = executions(collectives)
    steps = annotated_steps(profile)
    is_counted = not set(ops.instructions["kind"].drop_nulls()) & {Kind.SEND, Kind.RECV}
    transfers = _transfers(profile, ops, is_counted=is_counted)
    executed = _executed(ops, runs, transfers, joined=collectives.instructions["op"])
    start_ns, end_ns = bounds_ns(executed)
    step = pl.Series("step", step_of_events(profile, steps, executed))
    placed = executed.with_columns(step, start_ns=start_ns, dur_ns=end_ns - start_ns)
    events, left = events_table(placed)
    # The distinct ops, named `program/instruction`; kernels keep their name.
    name = pl.concat_str(pl.col("module").fill_null(""), pl.lit("/"), "hlo_name")
    shown_ops = ops.instructions.with_columns(
        pl.when(pl.col("module").is_null()).then("hlo_name").otherwise(name).alias("name"),
        pl.coalesce("opcode", "hlo_name").alias("opcode"),
        pl.col("groups").list.first().list.len().alias("group_size"),
    )
    named_devices = {
        (host, match[0]): match[1].lower()
        for host, _, plane, _ in profile.planes()
        if (match := _DEVICE.match(plane.name))
    }
    n_between = transfers["kind"].drop_nulls().len()
    how = (
        "transfers between slices: they have separate rows, as the devices recorded no sends"
        if is_counted
        else "transfers between slices: the sends and receives of the devices count, and the timeline shows both"
    )
    largest = ops.instructions["groups"].drop_nulls().explode().explode().max()
    world_size = max(n_devices, largest + 1 if isinstance(largest, int) else 0)
    planes = [plane for _, _, plane, _ in profile.planes()]
    chips = (plane.stats.get("device_type_string") for plane in planes)  # such as `TPU v6 Lite`
    shown = [f"'{p.name}' ({len(p.events):,} events)" for p in planes[:MAX_NAMED]]
    shown += ["..."] if planes[MAX_NAMED:] else []
    return Trace(
        path=profile.spaces[0].path,
        format=kind,
        events=events,
        ops=pl.concat([in_schema(shown_ops, OPS_SCHEMA), _transfer_rows(transfers)]),
        steps=steps.drop("host"),
        n_events=n_events,
        contents=f"planes {', '.join(shown)}" if planes else "no planes",
        world_size=world_size,
        n_local=len(named_devices),
        device_name=next((chip for chip in chips if isinstance(chip, str) and chip), None),
        chip_kind=ChipKind(next(iter(named_devices.values()), "cpu")),
        origin_unix_ns=start_unix_ns(profile.spaces[0]),
        programs=programs,
        findings=(
            *findings,
            *left,
            *unread,
            *capture_faults(profile, ops, runs),
            *_several_programs(ops),
            *(_custom_calls(ops, programs) if max(world_size, len(named_devices)) > 1 else ()),
            *([f"the Megascale runtime recorded {n_between:,} {how}"] if n_between else []),
        ),
    )


def _facts_of(
    programs: Mapping[str, str],
) -> tuple[dict[tuple[str, str], dict[str, Any]], int, list[str]]:
    """Facts of the collectives of programs by program and instruction, the devices of the largest, and findings."""
    facts: dict[tuple[str, str], dict[str, Any]] = {}
    findings: list[str] = []
    n_devices = 0
    for program, text in programs.items():
        try:
            module = parse_hlo(text, program)
            everywhere = Mesh(axes=(("device", module.n_devices),))
            rows = module_collectives(module, mesh=everywhere).rows()
        except ParseError as error:
            findings.append(f"the HLO of program '{program}' cannot be read: {error}")
            continue
        n_devices = max(n_devices, module.n_devices)
        for name, of_name in by_instruction(rows).items():
            facts[program, name] = instruction_facts(of_name)
    return facts, n_devices, findings


def _custom_calls(ops: Ops, programs: Mapping[str, str]) -> Iterator[str]:
    """Custom calls that may communicate, by the names of events of programs without HLO."""
    is_known = pl.col("module").is_in(list(programs)).fill_null(value=False)
    calls = ops.instructions.filter(~is_known, opcode="custom-call")
    counts = Counter[str]()
    for text, n in (
        calls.join(ops.events.group_by("op").len(), on="op").select("text", "len").iter_rows()
    ):
        call = parse_instruction_line(text)
        if call and call.custom_call_target and effect_of(call) is Effect.UNKNOWN:
            counts[call.custom_call_target] += n
    for target, n in counts.most_common():
        yield f"{counted(n, 'custom call')} '{target}' may communicate: the trace has no HLO of the program"


def _collectives_of(ops: Ops) -> Ops:
    """The collectives and both halves of the asynchronous ones."""
    keys = ["module", "starts"]
    is_collective = pl.col("category") == Category.COLLECTIVE.value
    starts = ops.instructions.filter(is_collective).select(keys).drop_nulls("starts").unique()
    halves = ops.instructions.join(starts, on=keys, nulls_equal=True, how="semi")["op"]
    return ops.only(ops.instructions.filter(is_collective | pl.col("op").is_in(halves.implode())))


def _executed(
    ops: Ops, runs: pl.DataFrame, transfers: pl.DataFrame, *, joined: pl.Series
) -> pl.DataFrame:
    """All executions: collectives from start to end, other ops, and transfers between slices.

    The stream of an event is its line, separate for each SparseCore.
    """
    is_other = (pl.col("role") == "leaf") & ~pl.col("op").is_in(joined.implode())
    columns = ["op", "host", "device", "line", "run_id", "start_s", "dur_s", "core"]
    facts = ops.instructions.select("op", "kind", "payload_bytes")
    both = pl.concat([runs.select(columns), ops.events.filter(is_other).select(columns)])
    core = pl.col("core").cast(pl.Int64).fill_null(-1) + 1
    rows = counted_once(both.join(facts, on="op", how="left", maintain_order="left")).select(
        *("op", "host", "run_id", "start_s", "dur_s"),
        device=pl.col("device").fill_null(0),
        stream=pl.col("line").cast(pl.Int64) + core * LINES_PER_CORE,
    )
    between = transfers.with_columns(stream=pl.lit(STREAM, pl.Int64), run_id=pl.lit(None, pl.Int64))
    return pl.concat([rows, between.select(rows.columns)], how="vertical_relaxed")


def counted_once(events: pl.DataFrame) -> pl.DataFrame:
    """The events without collectives that both cores recorded.

    If the main core's event says the bytes, it counts, with its time from start to end; else the
    SparseCore's. `events` has device, core, kind, payload_bytes, start_s and dur_s.
    """
    is_sparse, is_collective = pl.col("core").is_not_null(), pl.col("kind").is_not_null()
    if events.filter(is_sparse & is_collective).is_empty():
        return events
    rows = events.with_row_index("row")
    dropped: list[int] = []
    for same in rows.filter(is_collective).partition_by("device", "kind"):
        is_sized = pl.col("payload_bytes").is_not_null()
        sparse, sized = same.filter(is_sparse), same.filter(~is_sparse, is_sized)
        unsized = same.filter(~is_sparse, ~is_sized)
        is_repeated = _during(sparse, sized)
        counted = sparse.filter(~is_repeated)
        dropped += sparse.filter(is_repeated)["row"].to_list()
        dropped += unsized.filter(_during(unsized, counted))["row"].to_list()
    return rows.filter(~pl.col("row").is_in(dropped)).drop("row")


def _during(events: pl.DataFrame, others: pl.DataFrame) -> pl.Series:
    """Whether each event is at the same time as one of the others."""
    covered = CoveredTime.of(*(bound.to_numpy() for bound in bounds_ns(others)))
    start, end = (bound.to_numpy() for bound in bounds_ns(events))
    return pl.Series(covered.within(start, end) > 0)


def bounds_ns(frame: pl.DataFrame) -> tuple[pl.Series, pl.Series]:
    """Start and end of each event, whose times are in s."""
    start_s = frame["start_s"]
    start, end = (
        (bound * _NS).round().cast(pl.Int64) for bound in (start_s, start_s + frame["dur_s"])
    )
    return start, end


def _transfers(profile: Profile, ops: Ops, *, is_counted: bool) -> pl.DataFrame:
    """The transfers between slices, and the copies between host and device for them.

    They are numbered after the instructions, and are copies if the devices recorded them, too.
    """
    parts = [pl.DataFrame(schema=_TRANSFERS_SCHEMA)]
    for host, _, plane, base_s in profile.planes():
        if plane.name.startswith(PLANE):
            number = stat_of(plane.events, "graph_key", pl.String).str.extract(_GRAPH_KEY)
            events = plane.with_names(plane.events).with_columns(number=number, host=pl.lit(host))
            devices = profile.ops.events.filter(pl.col("host") == host)["device"]
            known = devices.drop_nulls().unique().sort().to_list() or [0]
            parts.append(_placed(events, known, base_s))
    transfers = pl.concat(parts)
    if not is_counted:
        transfers = transfers.with_columns(category=pl.lit(Category.COPY.value))
    keys = ["name", "kind", "category"]
    distinct = transfers.select(keys).unique(maintain_order=True)
    numbered = distinct.with_row_index("op", offset=len(ops.instructions))
    return transfers.join(numbered, on=keys, nulls_equal=True, maintain_order="left")


def _placed(events: pl.DataFrame, devices: list[int], base_s: float) -> pl.DataFrame:
    """The events on the devices of their host, which count in the order of the runtime's numbers."""
    number = events["number"].cast(pl.Int64, strict=False)
    numbers = number.drop_nulls().unique().sort()
    places = [devices[min(index, len(devices) - 1)] for index in range(len(numbers))]
    kinds = {"Send": Kind.SEND.value, "Receive": Kind.RECV.value}
    kind = pl.col("name").str.extract(_TRANSFER).replace(kinds)
    collective, copy = (pl.lit(c.value) for c in (Category.COLLECTIVE, Category.COPY))
    placed = events.with_columns(
        device=number.replace_strict(numbers, places, default=devices[0], return_dtype=pl.Int32),
        kind=kind,
        category=pl.when(kind.is_null()).then(copy).otherwise(collective),
        start_s=pl.col("start_ps") * PS + base_s,
        dur_s=pl.col("dur_ps") * PS,
    )
    return in_schema(placed, _TRANSFERS_SCHEMA)


def _transfer_rows(transfers: pl.DataFrame) -> pl.DataFrame:
    is_counted = pl.col("category") == Category.COLLECTIVE.value
    distinct = transfers.unique("op", maintain_order=True).with_columns(
        kind=pl.when(is_counted).then("kind"),
        opcode=pl.col("name").str.extract(r"^(\S+)"),
        group_name=pl.when(is_counted).then(pl.lit(BETWEEN_SLICES)),
    )
    return in_schema(distinct, OPS_SCHEMA)


def _several_programs(ops: Ops) -> Iterator[str]:
    """The programs that ran, if there are several: totals over the window mix them."""
    leaves = ops.events.filter(pl.col("role") == "leaf")
    counts = (
        leaves.join(ops.instructions.select("op", "module"), on="op")
        .drop_nulls("module")
        .group_by("module")
        .len("n_ops")
        .sort("n_ops", "module", descending=[True, False])
    )
    if len(counts) > 1:
        shown = ", ".join(f"{name} ({n:,} ops)" for name, n in counts.head(MAX_NAMED).iter_rows())
        more = f" and {len(counts) - MAX_NAMED} more" if len(counts) > MAX_NAMED else ""
        yield f"{len(counts)} programs ran in the window: {shown}{more}; totals are over all of them"
