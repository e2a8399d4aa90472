"""Extracts executed ops from the planes of a profile and separates them from their containers.

There are two tables: a narrow one with a row per event, and a wide one with a row per instruction.
TPU planes have separate lines for ops, GPU planes have a line per stream, and the CPU backend marks
op events on the threads of the host plane by their stats.

The name of an event is a line of optimized HLO, or an instruction name. It cannot show trip counts,
callers or the device mesh: those come from the HLO module, which `executions.with_hlo` joins.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from meshscope.events.enums import Kind
from meshscope.events.intervals import contains_another, innermost
from meshscope.events.schema import in_schema, schema_of
from meshscope.plans.mesh import Groups
from meshscope.readers.hlo.groups import groups_without_module
from meshscope.readers.hlo.module import ArrayShape, Instruction
from meshscope.readers.hlo.parse import parse_instruction_line
from meshscope.readers.hlo.semantics import ALL_REDUCE_SCATTER, KIND_OF_OPCODE
from meshscope.readers.hlo.shapes import result_arrays
from meshscope.readers.profile.plane import Plane, XSpace, check_limit
from meshscope.readers.traces.collectives import kernel_collective

EVENTS_SCHEMA, INSTRUCTIONS_SCHEMA = (
    schema_of(f"profile_{table}") for table in ("events", "instructions")
)
ROLES = EVENTS_SCHEMA["role"]
COPY_KERNEL = "(?i)^mem(?:cpy|set)|copyBuffer|fillBuffer"  # of CUDA and ROCm
CUDA_GRAPH = r"^command_buffer"  # XLA's name of one
MAX_OPS = 500_000  # distinct ops of a device; parsing their names takes 20 s and 1 GB
UNIX_NS = 10**17  # a later timestamp is Unix time, an earlier one counts from the profile start
PS = 1e-12

_DEVICE = re.compile(r"/device:(TPU|GPU):(\d+)(?: \w+ (\d+))?")
_MODULE = r"(.*)\((\d+)\)"
_MODULE_LINES = ("XLA Modules", "Sparse Core Modules")
# Lines of a device plane that profilers derive from other lines.
_DERIVED = ("XLA Modules", "XLA Ops", "Steps", "Framework", "Source", "XLA TraceMe", "Launch Stats")
_KEYS = ("module", "program_id", "hlo_name")

MAX_TEXT = 200_000  # characters; longer event names are not parsed as HLO
MAX_DEVICE = 1 << 31  # device ids and bytes beyond these are damage, and do not fit into columns
MAX_BYTES = 1 << 62
KIND_OF: dict[str, Kind] = KIND_OF_OPCODE | {
    ALL_REDUCE_SCATTER: Kind.REDUCE_SCATTER,
    "send": Kind.SEND,
    "recv": Kind.RECV,
}
CONTAINERS = frozenset({"while", "call", "conditional"})
MOVES = frozenset({"copy", "async", "slice", "dynamic-slice", "dynamic-update-slice"})
_NAMED_OPCODES = frozenset({*KIND_OF, *MOVES, *CONTAINERS})
_NAME = re.compile(r"\s*(?:ROOT\s+)?%?([^\s=%(]+)\s+=(?:\s|$)")
_SUFFIX = re.compile(r"\.\d+$|\.(?:clone|remat)[\w.]*$")
_HALF = re.compile(r"-start$|-done$|-update$")


class HloLine(NamedTuple):
    """The facts in one event name under the names of INSTRUCTIONS_SCHEMA; None if it does not show them.

    `starts` names the instruction that a `-done` waits for; for a `-start` it is its own name.
    """

    hlo_name: str
    opcode: str | None = None
    kind: Kind | None = None
    starts: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    payload_bytes: int | None = None
    groups: Groups | None = None


@lru_cache(maxsize=1 << 16)  # distinct names, shared by all devices of a profile
def read_hlo_line(text: str) -> HloLine:
    """Reads an event name, either a line of HLO or only an instruction name."""
    instruction = parse_instruction_line(text) if len(text) <= MAX_TEXT else None
    if instruction is None:
        if match := _NAME.match(text[:MAX_TEXT]):  # truncated before its opcode
            return HloLine(hlo_name=match[1], kind=_kind(None, match[1]))
        name = text.lstrip("%")
        opcode = _opcode_of_name(name)
        starts = _starts(name, opcode, ())
        return HloLine(hlo_name=name, opcode=opcode, kind=_kind(opcode, name), starts=starts)
    arrays = _payload(instruction)
    n_bytes = sum(array.n_bytes or 0 for array in arrays)
    is_sized = bool(arrays) and n_bytes < MAX_BYTES
    groups_text = instruction.replica_groups or instruction.attribute("source_target_pairs")
    groups = groups_without_module(groups_text) if groups_text else None
    is_damaged = any(device >= MAX_DEVICE for group in groups or () for device in group)
    return HloLine(
        hlo_name=instruction.name,
        opcode=instruction.opcode,
        kind=_kind(instruction.opcode, instruction.name),
        starts=_starts(instruction.name, instruction.opcode, instruction.operands),
        dtype=arrays[0].dtype if len({array.dtype for array in arrays}) == 1 else None,
        shape=arrays[0].dims if len(arrays) == 1 and is_sized else None,
        payload_bytes=n_bytes if is_sized else None,
        groups=None if is_damaged else groups,
    )


def _opcode_of_name(name: str) -> str | None:
    """The opcode in an instruction name that XLA derived from a collective, container or move."""
    opcode = name
    while (shorter := _SUFFIX.sub("", opcode)) != opcode:
        opcode = shorter
    return opcode if _HALF.sub("", opcode) in _NAMED_OPCODES else None


def _kind(opcode: str | None, name: str) -> Kind | None:
    labels = (_HALF.sub("", label) for label in (opcode, _opcode_of_name(name)) if label)
    return next((KIND_OF[label] for label in labels if label in KIND_OF), None)


def _starts(name: str, opcode: str | None, operands: Sequence[str]) -> str | None:
    if opcode is None or not opcode.endswith(("-start", "-done")):
        return None
    if opcode.endswith("-start"):
        return name
    return operands[0] if operands else name.replace("-done", "-start", 1)


def _payload(instruction: Instruction) -> tuple[ArrayShape, ...]:
    """The arrays that make up the payload: the whole array of a gather or scatter, not a shard.

    Arrays of an unknown width, such as tokens, are left out.
    """
    opcode, arrays = instruction.opcode, instruction.arrays
    base, is_start = _HALF.sub("", opcode), opcode.endswith("-start")
    if base == "reduce-scatter" and not opcode.endswith("-done"):
        operands = _sized(instruction.operand_arrays)
        return operands if operands or is_start else _sized(arrays)
    if base in KIND_OF and (is_start or opcode in {"send", "recv"}):
        arrays = result_arrays(instruction)
    sized = _sized(arrays)
    return sized if base in KIND_OF or len(sized) == 1 else ()


def _sized(arrays: Sequence[ArrayShape]) -> tuple[ArrayShape, ...]:
    return tuple(array for array in arrays if array.n_bytes is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """Executed ops: `events` by EVENTS_SCHEMA, `instructions` by INSTRUCTIONS_SCHEMA."""

    events: pl.DataFrame
    instructions: pl.DataFrame

    def wide(self) -> pl.DataFrame:
        """Every event with the columns of its instruction; filter large tables first."""
        return self.events.join(self.instructions, on="op", how="left", maintain_order="left")

    def only(self, instructions: pl.DataFrame) -> "Ops":
        """The ops of these instructions."""
        events = self.events.filter(pl.col("op").is_in(instructions["op"].implode()))
        return Ops(events=events, instructions=instructions)


_Found = tuple[pl.DataFrame, pl.DataFrame]  # events and instructions of a plane


def ops_of(space: XSpace, *, host: int = 0) -> Ops:
    """The ops in the profile of one host; times in s from `zero_ns`."""
    zero = zero_ns(space)
    devices = [_DEVICE.fullmatch(plane.name) for plane in space.planes]
    has_devices = any(d and len(p.events) for d, p in zip(devices, space.planes, strict=True))
    parts: list[Ops] = []
    for index, (plane, device) in enumerate(zip(space.planes, devices, strict=True)):
        if device is not None:
            events, instructions = (_tpu_ops if device[1] == "TPU" else _gpu_ops)(plane)
            core = int(device[3]) if device[3] else None
            events = events.with_columns(device=pl.lit(int(device[2])), core=pl.lit(core))
        elif plane.name.startswith("/host:CPU") and not has_devices:
            events, instructions = _cpu_ops(plane)
        else:
            continue
        if len(events):
            base_s = (plane.origin_ns - zero) * 1e-9
            placed = _with_roles(events, instructions).with_columns(
                host=pl.lit(host),
                plane=pl.lit(index),
                start_s=pl.col("start_ps") * PS + base_s,
                dur_s=pl.col("dur_ps") * PS,
            )
            parts.append(Ops(events=in_schema(placed, EVENTS_SCHEMA), instructions=instructions))
    return merged(parts)


def own_groups(rows: pl.DataFrame, *keys: str) -> pl.DataFrame:
    """The first of the `groups` that contains the `device` of each row, by these keys."""
    exploded = rows.select(*keys, "groups", of_device="device").explode("groups")
    matching = exploded.filter(pl.col("groups").list.contains(pl.col("of_device")))
    return matching.unique(keys, keep="first").select(*keys, group="groups")


def zero_ns(space: XSpace) -> int:
    """The time that ops count from: the start of a profile in Unix time, else 0."""
    first = min((p.origin_ns for p in space.planes if len(p.events)), default=0)
    return first if first > UNIX_NS else 0


def merged(parts: list[Ops]) -> Ops:
    """Merges tables; instructions of the same module and name become one row."""
    empty = pl.DataFrame(schema=INSTRUCTIONS_SCHEMA)
    rows = pl.concat([empty, *(p.instructions for p in parts)], how="diagonal_relaxed").drop("op")
    n_characters = pl.col("text").str.len_bytes()  # asynchronous events may have shorter texts
    longest = rows.sort(n_characters, descending=True, maintain_order=True)
    unique = longest.unique(_KEYS, keep="first", maintain_order=True).with_row_index("op")
    keyed = unique.select("op", *_KEYS)
    numbers = rows.join(keyed, on=_KEYS, how="left", nulls_equal=True, maintain_order="left")["op"]
    events, first = [pl.DataFrame(schema=EVENTS_SCHEMA)], 0
    for part in parts:
        new = numbers.slice(first, len(part.instructions)).gather(part.events["op"])
        events.append(part.events.with_columns(new.alias("op")))
        first += len(part.instructions)
    return Ops(events=pl.concat(events), instructions=in_schema(unique, INSTRUCTIONS_SCHEMA))


def _tpu_ops(plane: Plane) -> _Found:
    asynchronous = plane.lines_named("Async XLA Ops")
    wanted = [*plane.lines_named("XLA Ops", "Sparse Core Ops"), *asynchronous]
    events = plane.events.filter(pl.col("line").is_in(wanted))
    modules = module_runs(plane)
    bounds = (modules[name].to_numpy() for name in ("start_ps", "end_ps"))
    run = pl.Series(innermost(*bounds, at=_array(events, "start_ps"))).replace(-1, None)
    kinds = plane.kinds.filter(pl.col("kind").is_in(events["kind"].unique().implode()))
    check_limit(plane.name, "distinct ops", len(kinds), MAX_OPS)
    new = np.zeros(len(plane.kinds), np.uint32)
    new[kinds["kind"].to_numpy()] = np.arange(len(kinds), dtype=np.uint32)
    named = modules.select("program_id", "module").drop_nulls().unique("program_id", keep="last")
    instructions = kinds.select(
        stat_of(kinds, "program_id", pl.UInt64),
        stat_of(kinds, "hlo_category", pl.String).alias("category"),
        stat_of(kinds, "source", pl.String).alias("source_line"),
        text="name",
    ).join(named, on="program_id", how="left", maintain_order="left")
    columns = events.select(
        "line",
        "start_ps",
        "dur_ps",
        op=pl.Series(new[events["kind"].to_numpy()]),
        run_id=modules["run_id"].gather(run),
        is_transfer=pl.col("line").is_in(asynchronous),
    )
    return columns, _with_lines(instructions, kinds["name"])


def module_runs(plane: Plane) -> pl.DataFrame:
    """Executions of modules on a device: module, program_id, run_id, start_ps, end_ps."""
    parts = pl.col("name").str.extract_groups(_MODULE).struct
    events = plane.events.filter(pl.col("line").is_in(plane.lines_named(*_MODULE_LINES)))
    return plane.with_names(events.sort("start_ps", maintain_order=True)).select(
        stat_of(events, "run_id", pl.Int64),
        "start_ps",
        module=parts.field("1"),
        program_id=parts.field("2").cast(pl.UInt64, strict=False),
        end_ps=pl.col("start_ps") + pl.col("dur_ps"),
    )


def _with_lines(instructions: pl.DataFrame, names: pl.Series) -> pl.DataFrame:
    schema = {fact: INSTRUCTIONS_SCHEMA[fact] for fact in HloLine._fields}
    read = pl.DataFrame([read_hlo_line(name) for name in names], schema=schema, orient="row")
    return pl.concat([read, instructions], how="horizontal").with_row_index("op")


def _gpu_ops(plane: Plane) -> _Found:
    """Kernels; a copy for a collective is no execution of the collective."""
    is_derived = [any(name in line for name in _DERIVED) for line in plane.lines]
    streams = [line for line, derived in enumerate(is_derived) if not derived]
    events = plane.events.filter(pl.col("line").is_in(streams))
    op, firsts = _different_ops(plane, events)
    is_copy = pl.col("text").str.contains(COPY_KERNEL)
    # All kernels of a CUDA graph have the name of the graph as their op. Several instructions may share a kernel.
    in_graph = pl.col("hlo_op").str.contains(CUDA_GRAPH).fill_null(value=False)
    instructions = _with_hlo_ops(firsts.with_columns(pl.when(~is_copy & ~in_graph).then("hlo_op")))
    kernels = [kernel_collective(text) for text in firsts["text"]]
    facts = {n: [getattr(k, n) if k else None for k in kernels] for n in ("kind", "dtype")}
    known = (pl.col(n).fill_null(pl.Series(facts[n], dtype=pl.String)) for n in facts)
    return events.select("line", "start_ps", "dur_ps", op), instructions.with_columns(known)


def _cpu_ops(plane: Plane) -> _Found:
    """Events named like the op in their stats, which excludes kernel launches."""
    events = plane.events.filter(stat_of(plane.events, "hlo_op").is_not_null())
    op, firsts = _different_ops(plane, events)
    is_op = firsts.select(pl.col("text") == pl.col("hlo_op")).to_series()
    device = stat_of(events, "device_ordinal", pl.Int32).alias("device")
    run_id = stat_of(events, "run_id", pl.Int64)
    columns = events.select("line", "start_ps", "dur_ps", op, device, run_id)
    return columns.filter(is_op.gather(op)), _with_hlo_ops(firsts)


def _with_hlo_ops(firsts: pl.DataFrame) -> pl.DataFrame:
    names = firsts["hlo_op"].fill_null(firsts["text"])
    return _with_lines(firsts.drop("hlo_op"), names)


def stat_of(frame: pl.DataFrame, name: str, dtype: Any = None) -> pl.Expr:
    """The stat of this name under its own name, as `dtype` if given; null if the plane has none."""
    column = pl.col(f"stat.{name}") if f"stat.{name}" in frame else pl.lit(None)
    if isinstance(frame.schema.get(f"stat.{name}"), pl.Enum) and dtype is not None:
        column = column.cast(pl.String)  # numbers may be written as texts
    typed = column if dtype is None else column.cast(dtype, strict=False)
    return typed.alias(name)


def _different_ops(plane: Plane, events: pl.DataFrame) -> tuple[pl.Series, pl.DataFrame]:
    """The op of each event [n], and one row per op: stats of its first event, and its name."""
    stats = [f"stat.{name}" for name in ("hlo_module", "program_id", "hlo_op")]
    keys = ["kind", *(stat for stat in stats if stat in events)]
    firsts = events.unique(keys, keep="first", maintain_order=True).with_row_index("op")
    check_limit(plane.name, "distinct ops", len(firsts), MAX_OPS)
    numbered = firsts.select("op", *keys)
    of_events = events.select(keys).join(
        numbered, on=keys, how="left", nulls_equal=True, maintain_order="left"
    )
    rows = plane.with_names(firsts).select(
        stat_of(events, "hlo_module", pl.String).alias("module"),
        stat_of(events, "program_id", pl.UInt64),
        stat_of(events, "hlo_op", pl.String),
        stat_of(events, "source", pl.String).alias("source_line"),
        text="name",
    )
    return of_events["op"], rows


def _with_roles(events: pl.DataFrame, instructions: pl.DataFrame) -> pl.DataFrame:
    """The events with their role, by opcode, category, and the events that they contain."""
    names = list(CONTAINERS)
    is_container = pl.col("opcode").is_in(names)
    if "category" in instructions:
        is_container |= pl.col("category").is_in(names).fill_null(value=False)
    outer = instructions.select(is_container.fill_null(value=False)).to_series().to_numpy()
    is_outer = outer[events["op"].to_numpy()]
    start = _array(events, "start_ps")
    end = start + _array(events, "dur_ps")
    contains = contains_another(start, end, line=_array(events, "line"), outer=is_outer)
    is_transfer = pl.col("is_transfer") if "is_transfer" in events else pl.lit(value=False)
    role = pl.when(is_transfer).then(pl.lit("transfer"))
    role = role.when(pl.Series(is_outer | contains)).then(pl.lit("container"))
    placed = events.with_columns(role=role.otherwise(pl.lit("leaf")).cast(ROLES))
    return _with_covered(placed, instructions)


def _with_covered(events: pl.DataFrame, instructions: pl.DataFrame) -> pl.DataFrame:
    """Marks each `-done` inside its `-start`, whose duration already includes it."""
    is_done = pl.col("opcode").str.ends_with("-done").alias("is_done")
    halves = instructions.drop_nulls("starts").select("op", "starts", "module", is_done)
    by = ["device", "module", "starts"]
    asynchronous = (
        events.with_row_index("row")
        .filter(pl.col("role") == "leaf")
        .join(halves, on="op")
        .sort("start_ps")
        .with_columns(
            pl.col("device").fill_null(-1),
            pl.col("module").fill_null(""),
            end_ps=pl.col("start_ps") + pl.col("dur_ps"),
        )
    )
    starts = asynchronous.filter(~pl.col("is_done")).select(*by, "start_ps", until_ps="end_ps")
    paired = asynchronous.filter("is_done").join_asof(
        starts, on="start_ps", by=by, check_sortedness=False
    )
    covered = paired.filter(pl.col("end_ps") <= pl.col("until_ps"))["row"]
    is_covered = pl.int_range(pl.len()).is_in(covered.cast(pl.Int64).implode())
    role = pl.when(is_covered).then(pl.lit("covered", ROLES)).otherwise("role")
    return events if covered.is_empty() else events.with_columns(role.alias("role"))


def _array(frame: pl.DataFrame, name: str) -> Any:
    return frame[name].cast(pl.Int64).to_numpy()
