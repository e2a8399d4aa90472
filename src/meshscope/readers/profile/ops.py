"""Extracts executed ops from the planes of a profile and separates them from their containers.

There are two tables: a narrow one with a row per event, and a wide one with a row per instruction.
TPU planes have separate lines for ops, GPU planes have a line per stream, and the CPU backend marks
op events on the threads of the host plane by their stats.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from meshscope.readers.profile.hlo_line import CONTAINERS, HloLine, kind_of, read_hlo_line
from meshscope.readers.profile.nesting import contains_another, innermost
from meshscope.readers.profile.plane import Plane, check_limit
from meshscope.readers.profile.xplane import XSpace
from meshscope.readers.traces.collectives import kernel_collective

ROLES = pl.Enum(["leaf", "container", "covered", "transfer"])
EVENTS_SCHEMA: dict[str, Any] = {
    "op": pl.UInt32,  # row of the instructions
    "host": pl.UInt16,  # row of the hosts
    "plane": pl.UInt16,  # of the host
    "line": pl.UInt32,  # of the plane
    "device": pl.Int32,  # as the host numbers its devices; null if the profile has no number
    "core": pl.Int8,  # number of the SparseCore; null for the device's main core
    "run_id": pl.Int64,  # one execution of a module
    "start_s": pl.Float64,  # from zero_ns
    "dur_s": pl.Float64,
    "role": ROLES,  # leaf: counts; container, covered: contains leaves; transfer: in the background
}
INSTRUCTIONS_SCHEMA: dict[str, Any] = {
    "op": pl.UInt32,
    "module": pl.String,
    "program_id": pl.UInt64,
    "hlo_name": pl.String,
    "opcode": pl.String,
    "kind": pl.String,  # of collectives
    "category": pl.String,  # by the profiler: "loop fusion", "all-reduce", ...
    "starts": pl.String,  # for -start and -done: the name of the -start
    "op_name": pl.String,  # scope path of the program
    "source_line": pl.String,
    "flops": pl.Int64,
    "bytes_accessed": pl.Int64,  # to and from HBM, estimated by the profiler
    "dtype": pl.String,
    "shape": pl.List(pl.Int64),
    "payload_bytes": pl.Int64,
    "groups_text": pl.String,
    "groups": pl.List(pl.List(pl.Int32)),
    "text": pl.String,  # name of the event: on TPUs the whole HLO line
}
COPY_KERNEL = "(?i)^mem(?:cpy|set)|copyBuffer|fillBuffer"  # of CUDA and ROCm
MAX_OPS = 500_000  # distinct ops of a device; parsing their names takes 20 s and 1 GB
UNIX_NS = 10**17  # a later timestamp is Unix time, an earlier one counts from the profile start
PS = 1e-12

_DEVICE = re.compile(r"/device:(TPU|GPU):(\d+)(?: \w+ (\d+))?")
_MODULE = re.compile(r"(.*)\((\d+)\)")
_MODULE_LINES = ("XLA Modules", "Sparse Core Modules")
# Lines of a device plane that profilers derive from other lines.
_DERIVED = ("XLA Modules", "XLA Ops", "Steps", "Framework", "Source", "XLA TraceMe", "Launch Stats")
_KEYS = ("module", "program_id", "hlo_name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """Executed ops: `events` by EVENTS_SCHEMA, `instructions` by INSTRUCTIONS_SCHEMA."""

    events: pl.DataFrame
    instructions: pl.DataFrame

    def wide(self) -> pl.DataFrame:
        """Every event with the columns of its instruction; filter large tables first."""
        return self.events.join(self.instructions, on="op", how="left", maintain_order="left")


def ops_of(space: XSpace, *, host: int = 0) -> Ops:
    """The ops in the profile of one host; times in s from `zero_ns`."""
    zero = zero_ns(space)
    parts: list[Ops] = []
    for index, plane in enumerate(space.planes):
        ops = _ops_of_plane(plane, others=space.planes)
        if ops is None or ops.events.is_empty():
            continue
        base_s = (plane.origin_ns - zero) * 1e-9
        placed = ops.events.with_columns(
            pl.lit(host, pl.UInt16).alias("host"),
            pl.lit(index, pl.UInt16).alias("plane"),
            (pl.col("start_ps") * PS + base_s).alias("start_s"),
            (pl.col("dur_ps") * PS).alias("dur_s"),
        )
        events = placed.select(
            pl.col(name).cast(dtype) for name, dtype in EVENTS_SCHEMA.items() if name in placed
        )
        parts.append(Ops(events=events, instructions=ops.instructions))
    return merged(parts)


def zero_ns(space: XSpace) -> int:
    """The time that ops count from: the start of a profile in Unix time, else 0."""
    first = min((p.origin_ns for p in space.planes if len(p.events)), default=0)
    return first if first > UNIX_NS else 0


def merged(parts: list[Ops]) -> Ops:
    """Merges tables; instructions of the same module and name become one row."""
    empty = pl.DataFrame(schema=INSTRUCTIONS_SCHEMA).drop("op")
    tables = [
        p.instructions.rename({"op": "part_op"}).with_columns(pl.lit(i, pl.UInt32).alias("part"))
        for i, p in enumerate(parts)
    ]
    rows = pl.concat([empty, *tables], how="diagonal_relaxed")
    n_characters = pl.col("text").str.len_bytes()  # asynchronous events may have shorter texts
    unique = rows.sort(n_characters, descending=True, maintain_order=True).unique(
        _KEYS, keep="first", maintain_order=True
    )
    unique = unique.with_row_index("op").select(*INSTRUCTIONS_SCHEMA)
    if not parts:
        return Ops(events=pl.DataFrame(schema=EVENTS_SCHEMA), instructions=unique)
    numbers = rows.select(*_KEYS, "part_op", "part").join(
        unique.select("op", *_KEYS), on=_KEYS, nulls_equal=True
    )
    events = [
        _renumbered(part.events, numbers.filter(pl.col("part") == index))
        for index, part in enumerate(parts)
    ]
    return Ops(events=pl.concat(events), instructions=unique)


def _renumbered(events: pl.DataFrame, numbers: pl.DataFrame) -> pl.DataFrame:
    """The events with rows of the merged instructions; `numbers` maps `part_op` to `op`."""
    new = np.zeros(int(numbers["part_op"].max() or 0) + 1, np.uint32)  # type: ignore[arg-type]
    new[numbers["part_op"].to_numpy()] = numbers["op"].to_numpy()
    return events.with_columns(pl.Series("op", new[events["op"].to_numpy()]))


def _ops_of_plane(plane: Plane, *, others: tuple[Plane, ...]) -> Ops | None:
    device = _DEVICE.fullmatch(plane.name)
    if device and device[1] == "TPU":
        core = int(device[3]) if device[3] else None
        return _tpu_ops(plane, int(device[2]), core)
    if device:
        return _gpu_ops(plane, int(device[2]))
    is_backend = not any(_DEVICE.fullmatch(p.name) and len(p.events) for p in others)
    if plane.name.startswith("/host:CPU") and is_backend and "stat.hlo_op" in plane.events:
        return _cpu_ops(plane)
    return None


def lines_named(plane: Plane, *names: str) -> list[int]:
    """Indices of the lines with one of these names."""
    return plane.lines.filter(pl.col("name").is_in(names))["line"].to_list()


def _tpu_ops(plane: Plane, device: int, core: int | None) -> Ops:
    asynchronous = lines_named(plane, "Async XLA Ops")
    synchronous = lines_named(plane, "XLA Ops", "Sparse Core Ops")
    wanted = pl.col("line").is_in([*synchronous, *asynchronous])
    events = plane.events.filter(wanted).select("line", "kind", "start_ps", "dur_ps")
    modules = module_runs(plane)
    at = innermost(
        modules["start_ps"].to_numpy(), modules["end_ps"].to_numpy(), at=_array(events, "start_ps")
    )
    run_ids = modules["run_id"].gather(pl.Series(at).replace(-1, None))
    used = plane.kinds.filter(pl.col("kind").is_in(events["kind"].unique().implode()))
    check_limit(plane.name, "distinct ops", len(used), MAX_OPS)
    names = dict(modules.select("program_id", "module").drop_nulls().iter_rows())
    instructions = _instructions_of_kinds(used, names)
    new = np.zeros(len(plane.kinds), np.uint32)
    new[used["kind"].to_numpy()] = np.arange(len(used), dtype=np.uint32)
    events = events.with_columns(
        pl.Series("op", new[events["kind"].to_numpy()]),
        pl.lit(device, pl.Int32).alias("device"),
        pl.lit(core, pl.Int8).alias("core"),
        run_ids.alias("run_id"),
    )
    return _with_roles(events, instructions, pl.col("line").is_in(asynchronous))


def module_runs(plane: Plane) -> pl.DataFrame:
    """Executions of modules on a device: module, program_id, run_id, start_ps, end_ps."""
    events = plane.events.filter(pl.col("line").is_in(lines_named(plane, *_MODULE_LINES)))
    run_id = pl.col("stat.run_id") if "stat.run_id" in events else pl.lit(None)
    named = plane.kinds.select("kind", pl.col("name").str.extract_groups(_MODULE.pattern))
    parts = pl.col("name").struct
    return (
        events.join(named, on="kind", how="left", maintain_order="left")
        .sort("start_ps", maintain_order=True)
        .select(
            parts.field("1").alias("module"),
            parts.field("2").cast(pl.UInt64, strict=False).alias("program_id"),
            run_id.cast(pl.Int64, strict=False).alias("run_id"),
            "start_ps",
            (pl.col("start_ps") + pl.col("dur_ps")).alias("end_ps"),
        )
    )


def _instructions_of_kinds(kinds: pl.DataFrame, modules: dict[int, str]) -> pl.DataFrame:
    """Instructions from the metadata of TPU events, one row per kind."""
    lines = [read_hlo_line(name) for name in kinds["name"]]

    def fact(name: str, dtype: Any) -> pl.Series:
        column = f"stat.{name}"
        return (
            kinds[column].cast(dtype, strict=False)
            if column in kinds
            else pl.Series([None] * len(kinds), dtype=dtype)
        )

    programs = fact("program_id", pl.UInt64)
    return _line_columns(lines).with_columns(
        pl.Series("module", [modules.get(p) for p in programs], dtype=pl.String),
        programs.alias("program_id"),
        fact("hlo_category", pl.String).alias("category"),
        fact("tf_op", pl.String).str.strip_suffix(":").alias("op_name"),
        fact("source", pl.String).alias("source_line"),
        fact("flops", pl.Int64).alias("flops"),
        fact("bytes_accessed", pl.Int64).alias("bytes_accessed"),
        kinds["name"].alias("text"),
    )


def _line_columns(lines: list[HloLine]) -> pl.DataFrame:
    kinds = [kind_of(line.opcode, name=line.name) for line in lines]
    columns: dict[str, list[Any]] = {
        "hlo_name": [line.name for line in lines],
        "opcode": [line.opcode for line in lines],
        "kind": [kind.value if kind else None for kind in kinds],
        "starts": [line.starts for line in lines],
        "dtype": [line.dtype for line in lines],
        "shape": [list(line.shape) if line.shape is not None else None for line in lines],
        "payload_bytes": [line.payload_bytes for line in lines],
        "groups_text": [line.groups_text for line in lines],
        "groups": [line.groups for line in lines],
    }
    schema = {name: INSTRUCTIONS_SCHEMA[name] for name in columns}
    return pl.DataFrame(columns, schema=schema).with_row_index("op")


def _gpu_ops(plane: Plane, device: int) -> Ops:
    streams = plane.lines.filter(~pl.col("name").str.contains_any(list(_DERIVED)))["line"]
    events = plane.events.filter(pl.col("line").is_in(streams.implode()))
    op, firsts = _different_ops(plane, events)
    device_events = events.select(
        pl.Series("op", op, dtype=pl.UInt32),
        "line",
        pl.lit(device).alias("device"),
        "start_ps",
        "dur_ps",
    )
    return _with_roles(device_events, _kernels(firsts), pl.lit(value=False))


def _kernels(firsts: pl.DataFrame) -> pl.DataFrame:
    """Kernels as instructions; a copy for a collective is no execution of the collective."""
    kernels = [kernel_collective(text) for text in firsts["text"]]
    op = pl.when(~pl.col("text").str.contains(COPY_KERNEL)).then("hlo_op")
    instructions = _instructions_of_stats(firsts.with_columns(op.alias("hlo_op")))
    kinds = [k.kind.value if k and k.kind else None for k in kernels]
    dtypes = [k.dtype if k else None for k in kernels]
    return instructions.with_columns(
        pl.col("kind").fill_null(pl.Series(kinds, dtype=pl.String)),
        pl.col("dtype").fill_null(pl.Series(dtypes, dtype=pl.String)),
    )


def _cpu_ops(plane: Plane) -> Ops:
    """Events named like the op in their stats, which excludes kernel launches."""
    events = plane.events.filter(pl.col("stat.hlo_op").is_not_null())
    op, firsts = _different_ops(plane, events)
    is_op = firsts.select(pl.col("text") == pl.col("hlo_op")).to_series().to_numpy()
    device_events = events.select(
        pl.Series("op", op, dtype=pl.UInt32),
        "line",
        _stat(events, "device_ordinal").cast(pl.Int32).alias("device"),
        _stat(events, "run_id").cast(pl.Int64, strict=False).alias("run_id"),
        "start_ps",
        "dur_ps",
    ).filter(pl.Series(is_op[op]))
    return _with_roles(device_events, _instructions_of_stats(firsts), pl.lit(value=False))


def _stat(events: pl.DataFrame, name: str) -> pl.Expr:
    column = f"stat.{name}"
    return pl.col(column) if column in events else pl.lit(None)


def _different_ops(plane: Plane, events: pl.DataFrame) -> tuple[Any, pl.DataFrame]:
    """The op of each event [n], and one row per op: stats of its first event, and its name."""
    stats = ("hlo_module", "program_id", "hlo_op")
    key = events["kind"].to_numpy().astype(np.int64)
    for name in stats:
        if f"stat.{name}" in events:
            codes = _codes(events[f"stat.{name}"])
            key = key * (int(codes.max(initial=0)) + 1) + codes
    _, first, op = np.unique(key, return_index=True, return_inverse=True)
    check_limit(plane.name, "distinct ops", len(first), MAX_OPS)
    rows = events[first] if len(first) else events.head(0)
    firsts = rows.select(
        "kind",
        _stat(events, "hlo_module").cast(pl.String).alias("module"),
        _stat(events, "program_id").cast(pl.UInt64, strict=False).alias("program_id"),
        _stat(events, "hlo_op").cast(pl.String).alias("hlo_op"),
        _stat(events, "tf_op").cast(pl.String).alias("op_name"),
        _stat(events, "source").cast(pl.String).alias("source_line"),
    )
    names = plane.kinds.select("kind", pl.col("name").alias("text"))
    return op, firsts.join(names, on="kind", how="left", maintain_order="left")


def _codes(column: pl.Series) -> Any:
    """A number for each value [n], equal for equal values; 0 for null."""
    if isinstance(column.dtype, pl.Enum):
        return column.to_physical().cast(pl.Int64).fill_null(-1).to_numpy() + 1
    _, codes = np.unique(column.fill_null(0).to_numpy(), return_inverse=True)
    return np.where(column.is_not_null().to_numpy(), codes + 1, 0)


def _instructions_of_stats(firsts: pl.DataFrame) -> pl.DataFrame:
    lines = [read_hlo_line(name) for name in firsts["hlo_op"].fill_null(firsts["text"])]
    facts = firsts.select("module", "program_id", "op_name", "source_line", "text")
    return _line_columns(lines).with_columns(*facts)


def _with_roles(events: pl.DataFrame, instructions: pl.DataFrame, is_transfer: pl.Expr) -> Ops:
    """Sets the role of each event, by opcode, category, and the events that it contains."""
    names_container = pl.col("opcode").is_in(list(CONTAINERS))
    if "category" in instructions:
        names_container |= pl.col("category").is_in(list(CONTAINERS)).fill_null(value=False)
    outer = instructions.select(names_container.fill_null(value=False)).to_series().to_numpy()
    is_outer = outer[events["op"].to_numpy()]
    start = _array(events, "start_ps")
    end = start + _array(events, "dur_ps")
    contains = contains_another(start, end, line=_array(events, "line"), outer=is_outer)
    container = pl.Series("is_container", is_outer | contains)
    role = pl.when(is_transfer).then(pl.lit("transfer"))
    role = role.when(container).then(pl.lit("container")).otherwise(pl.lit("leaf"))
    placed = events.with_columns(role.cast(ROLES).alias("role"))
    for name in ("core", "run_id"):
        if name not in placed:
            placed = placed.with_columns(pl.lit(None).alias(name))
    return Ops(events=_with_covered(placed, instructions), instructions=instructions)


def _with_covered(events: pl.DataFrame, instructions: pl.DataFrame) -> pl.DataFrame:
    """Marks each `-done` inside its `-start`, whose duration already includes it."""
    halves = instructions.filter(pl.col("starts").is_not_null()).select(
        "op",
        "starts",
        pl.col("module").fill_null(""),
        pl.col("opcode").str.ends_with("-done").alias("is_done"),
    )
    leaves = events.with_row_index("row").filter(pl.col("role") == "leaf")
    end_ps = pl.col("start_ps") + pl.col("dur_ps")
    device = pl.col("device").fill_null(-1)
    asynchronous = (
        leaves.select("row", "op", device, "start_ps", end_ps.alias("end_ps"))
        .join(halves, on="op")
        .sort("start_ps")
    )
    by = ["device", "module", "starts"]
    starts = asynchronous.filter(~pl.col("is_done")).select(*by, "start_ps", until_ps="end_ps")
    paired = asynchronous.filter("is_done").join_asof(
        starts, on="start_ps", by=by, check_sortedness=False
    )
    covered = paired.filter(pl.col("end_ps") <= pl.col("until_ps"))["row"]
    if covered.is_empty():
        return events
    roles = events["role"].to_physical().to_numpy().copy()
    roles[covered.to_numpy()] = ROLES.categories.to_list().index("covered")
    return events.with_columns(pl.Series("role", roles).cat.to(ROLES))


def _array(frame: pl.DataFrame, name: str) -> Any:
    return frame[name].cast(pl.Int64).to_numpy()
