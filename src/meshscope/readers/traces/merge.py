"""Puts the traces of all files on one clock and one numbering of devices.

Files of one rank, such as captures of prefill and of decode, stay one device. A collective ends on all its
devices within microseconds, so the median difference of the ends of shared collectives is the offset of two clocks.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, filterfalse, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from meshscope.errors import TraceError
from meshscope.readers.traces import trace as tables
from meshscope.readers.traces.trace import Category, Trace, TraceFormat
from meshscope.units import counted

MIN_SHARED = 3  # collectives needed to set a clock by their ends
MIN_SKEW_NS = 50_000  # smaller offsets stay: the ends themselves differ by some microseconds
JUMP_NS = 3_600_000_000_000  # a pause of an hour inside a capture is a jump of the clock
EXPORT_CAP = 1_000_000  # events that the TPU profiler writes to a Chrome trace
MAX_LISTED = 8
_RECORD = {
    TraceFormat.KINETO: "Record the device, too, with an activity such as ProfilerActivity.CUDA.",
    TraceFormat.NSYS: "Record with `nsys profile --trace=cuda,nvtx --cuda-graph-trace=node`.",
}
# rank0.pt.trace.json.gz, and SGLang's 1717-TP-0-EXTEND.trace.json.gz, whose TP is the rank without
# other axes in the name; TP8 and 2rank_8gpu are sizes.
_RANK_IN_NAME = re.compile(
    r"(?i)(?:(?<![a-z0-9])rank[-_]?|-TP-(?!.*-(?:DP|PP|EP)-))(\d{1,6})(?!\d)"
)


_Span = tuple[int, int, int, Path]  # a device, its first start and last end in a file, and the file


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedTrace:
    """The traces of a session: tables of `trace.py`, times from the first op on."""

    files: tuple[Trace, ...]  # without their tables
    events: pl.DataFrame
    ops: pl.DataFrame
    steps: pl.DataFrame
    n_devices: int  # that the session had, as far as the files say
    findings: tuple[str, ...]
    programs: Mapping[str, str]  # HLO text by name


def merged(traces: Sequence[Trace]) -> MergedTrace:
    """The tables of all files, and the findings about them; device ids are global ranks.

    TraceError if no file has an op of a device.
    """
    if all(trace.events.is_empty() for trace in traces):
        raise TraceError(_nothing(traces))
    numbered, findings = _numbered(traces)
    offsets, skews = _clock_offsets(numbered)
    firsts = [trace.events["start_ns"].min() for trace in numbered]
    zero = min(n + off for n, off in zip(firsts, offsets, strict=True) if isinstance(n, int))
    events, ops, steps = _tables(numbered, [offset - zero for offset in offsets])
    n_devices = _n_devices(numbered, events, ops)
    end_ns = (pl.col("start_ns") + pl.col("dur_ns")).max().alias("end_ns")
    spans = [
        (device, start + offset, end + offset, trace.path)
        for trace, offset in zip(numbered, offsets, strict=True)
        for device, start, end in trace.events.group_by("device", maintain_order=True)
        .agg(pl.col("start_ns").min(), end_ns)
        .iter_rows()
    ]
    sizes = sorted({trace.world_size for trace in traces if trace.world_size})
    differ = f"the files state world sizes of {' and '.join(map(str, sizes))}"
    pause_ns = events["start_ns"].sort().diff().max()
    if isinstance(pause_ns, int) and pause_ns > JUMP_NS:
        hours = pause_ns / 3.6e12
        skews.append(
            f"a pause of {hours:,.1f} hours between ops: the clock jumped, or captures differ"
        )
    empty = pl.DataFrame()
    return MergedTrace(
        files=tuple(replace(t, events=empty, ops=empty, steps=empty) for t in numbered),
        events=events,
        ops=ops,
        steps=steps,
        n_devices=n_devices,
        findings=(
            *_of_files(numbered),
            *findings,
            *_repeated(spans),
            *([f"{differ}: are they of one session? {sizes[-1]} counts"] if sizes[1:] else []),
            *_missing(events, ops, n_devices),
            *_apart(spans),
            *skews,
        ),
        programs={name: text for t in numbered for name, text in t.programs.items()},
    )


def _nothing(traces: Sequence[Trace]) -> str:
    first = traces[0]
    files = "" if len(traces) == 1 else f" in {len(traces):,} files, such as this one"
    contents = counted(first.n_events, "event") + (f": {first.contents}" if first.contents else "")
    said = "".join(f" {finding}." for finding in first.findings[:2])
    return (
        f"{first.path}: no op of a device{files}, but {contents}.{said} Is this a trace of the profiler? "
        f"{_RECORD.get(first.format, 'Run the program inside of jax.profiler.trace.')}"
    )


def _n_devices(traces: Sequence[Trace], events: pl.DataFrame, ops: pl.DataFrame) -> int:
    """Devices of the session: the world size, else those that ran ops or are in a group."""
    numbers = (events["device"], ops["group"].explode(), ops["groups"].explode().explode())
    largest = (ops["group_size"].max(), *(one.max() for one in numbers))
    sizes = [n + (at > 0) for at, n in enumerate(largest) if isinstance(n, int)]
    n_local = sum(trace.n_local or 0 for trace in traces)
    return max(1, n_local, *sizes, *(trace.world_size or 0 for trace in traces))


def _numbered(traces: Sequence[Trace]) -> tuple[list[Trace], list[str]]:
    """The traces with ranks as devices: stated ones, else from file names, else the next free numbers.

    The number of a device on its host is not a rank. It only orders the devices of files that number
    them differently, and is kept where the groups of a program have it.
    """
    named = [_rank_in_name(t) for t in traces]
    used = {t.rank for t in traces} | set(named)
    others = [t for t, n in zip(traces, named, strict=True) if t.rank is None and n is None]
    local = [_local_devices(t) for t in others]
    counts = Counter(device for devices in local for device in devices)
    is_repeated = max(counts.values(), default=0) > 1
    # Programs of the traces may name devices by their numbers, which are kept then.
    sizes = [t.world_size or 0 for t in others if t.format is not TraceFormat.KINETO]
    is_kept = not is_repeated and used <= {None} and max(counts, default=-1) < max(sizes, default=0)
    keys = [(index, device) for index, devices in enumerate(local) for device in devices]
    ordered = keys if is_repeated else sorted(keys, key=lambda key: key[1])
    taken, numbers = set(used), dict[tuple[int, int], int]()
    free = filterfalse(taken.__contains__, count())
    for index, device in ordered:
        ranks = [device] if is_kept else sorted(_shared_ranks(others[index]) - taken)
        numbers[index, device] = ranks[0] if ranks else next(free)
        taken.add(numbers[index, device])
    numbered: list[Trace] = []
    places = iter(range(len(others)))
    for trace, number in zip(traces, named, strict=True):
        if trace.rank is not None:
            numbered.append(trace)
        elif number is not None:
            numbered.append(_moved(trace, dict.fromkeys(_local_devices(trace), number)))
        else:
            at = next(places)
            numbered.append(_moved(trace, {device: numbers[at, device] for device in local[at]}))
    findings: list[str] = []
    if from_names := sorted({number for number in named if number is not None}):
        findings.append(f"ranks come from file names, not from traces: {_listed(from_names)}")
    if len(traces) == 1 and others and not is_kept:
        group_size = traces[0].ops["group_size"].max()
        is_group = isinstance(group_size, int) and group_size > 1
        if is_group or (traces[0].world_size or 1) > 1:
            findings.append(f"the trace names no rank: it counts as rank {min(numbers.values())}")
    if is_repeated:
        findings.append("the files name no ranks: devices are numbered in the order of the files")
    return numbered, findings


def _shared_ranks(trace: Trace) -> set[int]:
    """The ranks that are in every group of a trace of one device."""
    groups = [set(group) for group in trace.ops["group"].drop_nulls().to_list()]
    is_one = trace.events["device"].n_unique() == 1
    return set.intersection(*groups) if groups and is_one else set()


def _rank_in_name(trace: Trace) -> int | None:
    """The rank that the file name of a trace of one device tells, if the trace tells none."""
    in_name = _RANK_IN_NAME.search(trace.path.name)
    is_program = trace.format is not TraceFormat.KINETO and (trace.world_size or 1) > 1
    if trace.rank is not None or in_name is None or is_program:
        return None
    return int(in_name[1]) if trace.events["device"].n_unique() == 1 else None


def _local_devices(trace: Trace) -> list[int]:
    """The numbers of a host's devices, including listed ones without ops."""
    used = trace.events["device"].unique().sort().to_list()
    n_listed = trace.n_local or 0
    return list(range(n_listed)) if used and n_listed > used[-1] else used


def _moved(trace: Trace, numbers: Mapping[int, int]) -> Trace:
    device = pl.col("device").replace_strict(numbers, default=None, return_dtype=pl.Int32)
    if all(old == new for old, new in numbers.items()):
        return trace
    events, steps = (table.with_columns(device) for table in (trace.events, trace.steps))
    return replace(trace, events=events, steps=steps)


def _tables(
    traces: Sequence[Trace], shifts_ns: Sequence[int]
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    schemas = (tables.EVENTS_SCHEMA, tables.OPS_SCHEMA, tables.STEPS_SCHEMA)
    events, ops, steps = ([pl.DataFrame(schema=schema)] for schema in schemas)
    n_ops = n_steps = 0
    for trace, shift_ns in zip(traces, shifts_ns, strict=True):
        moved = pl.col("start_ns") + shift_ns
        op = (pl.col("op") + n_ops).cast(pl.UInt32)
        step = (pl.col("step") + n_steps).cast(pl.Int32)
        events.append(trace.events.with_columns(moved, op, step))
        ops.append(trace.ops.with_columns(op))
        steps.append(trace.steps.with_columns(moved, step))
        n_ops, n_steps = n_ops + len(trace.ops), n_steps + len(trace.steps)
    return pl.concat(events), pl.concat(ops), pl.concat(steps)


def _of_files(traces: Sequence[Trace]) -> Iterator[str]:
    """The findings with the names of their files; one that several files share appears once."""
    files: dict[str, list[str]] = {}
    for trace in traces:
        findings = list(trace.findings)
        if trace.format is TraceFormat.CHROME_TPU and trace.n_events >= EXPORT_CAP * 0.95:
            findings.insert(
                0,
                f"{trace.n_events:,} events: the profiler stops its export near one million, so "
                "totals may lack the end; import the .xplane.pb beside it",
            )
        if trace.events.is_empty():
            findings.insert(0, "no op of any device was recorded")
        for finding in findings:
            files.setdefault(finding, []).append(trace.path.name)
    for finding, names in files.items():
        several = f"{len(names):,} files, such as {names[0]}" if len(names) > 1 else names[0]
        yield finding if len(traces) == 1 else f"{several}: {finding}"


def _missing(events: pl.DataFrame, ops: pl.DataFrame, n_devices: int) -> Iterator[str]:
    """Devices of the session without a trace; a trace without collectives waits for none of them."""
    seen = events["device"].unique().sort().to_list()
    if 0 < len(seen) < n_devices:
        kinds = ops["category"].gather(events["op"].unique())
        waits = ": waiting for the others is part of the times of collectives"
        shown = waits if Category.COLLECTIVE.value in kinds else ""
        yield f"{len(seen)} of {n_devices} ranks have a trace ({_listed(seen)}){shown}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:MAX_LISTED])) + (", ..." if ranks[MAX_LISTED:] else "")


def _apart(spans: Sequence[_Span]) -> Iterator[str]:
    """Files of other ranks that have no time in common with the first."""
    of_file: dict[Path, list[_Span]] = defaultdict(list)
    for span in spans:
        of_file[span[3]].append(span)
    bounds = {
        path.name: ({span[0] for span in of}, min(s[1] for s in of), max(s[2] for s in of))
        for path, of in of_file.items()
    }
    first, (all_devices, first_ns, last_ns) = next(iter(bounds.items()))
    for name, (devices, start, end) in bounds.items():
        if not devices & all_devices and (start > last_ns or end < first_ns):
            yield (
                f"{name}: no time in common with {first}: the clocks or the captures differ, "
                "and what spans both has no meaning"
            )


def _repeated(spans: Sequence[_Span]) -> Iterator[str]:
    """Devices that two files trace at the same time, whose ops count twice."""
    for (device, _, end, path), (other, start, _, later) in pairwise(sorted(spans)):
        if device == other and start < end:
            yield (
                f"'{path}' and '{later}' both trace rank {device} at the same time: its ops count twice. "
                "Give one of them"
            )


def _clock_offsets(traces: Sequence[Trace]) -> tuple[list[int], list[str]]:
    """What to add to the times of each file, in ns, and findings about clocks."""
    origins = [trace.origin_unix_ns for trace in traces]
    offsets = [0 if None in origins else origin or 0 for origin in origins]
    findings: list[str] = []
    if len(traces) == 1:
        return offsets, findings
    spanning = _spanning(traces)
    apart = skews([_collective_ends(trace, spanning) for trace in traces])
    for index, known in enumerate(apart[1:], start=1):
        if known is None:
            continue
        skew = int(known.offset) + offsets[0] - offsets[index]
        if abs(skew) > MIN_SKEW_NS:
            offsets[index] += skew
            findings.append(
                f"{traces[index].path.name}: its clock is {abs(skew) / 1e3:,.0f} us "
                f"{'behind' if skew > 0 else 'ahead'}; set by the ends of {known.n_shared} shared collectives"
            )
    return offsets, findings


def _collective_ends(trace: Trace, spanning: Collection[str]) -> pl.DataFrame:
    """The ends of the collectives of a file, with what identifies them in the files of others.

    A list of all groups identifies a collective together with its name, if a group spans files.
    """
    group = pl.col("group").cast(pl.List(pl.String)).list.join(",")
    groups = pl.Series([_text(groups) for groups in trace.ops["groups"]], dtype=pl.String)
    of_all = pl.when(groups.is_in(list(spanning))).then(pl.concat_str("name", pl.lit(" "), groups))
    is_collective = pl.col("category") == Category.COLLECTIVE.value
    named = trace.ops.with_columns(pl.coalesce(group, of_all).alias("group")).filter(is_collective)
    same = ("kind", "dtype", "payload_bytes", "group")
    events = trace.events.rename({"start_ns": "start", "dur_ns": "dur"})
    return collective_ends(
        events.join(named.drop_nulls("group").select("op", *same), on="op"), same
    )


def _spanning(traces: Sequence[Trace]) -> set[str]:
    """Lists of groups, as HLO has them, with a group whose devices are in several files."""
    files = {device: trace.path for trace in traces for device in trace.events["device"].unique()}
    listed = (groups for trace in traces for groups in trace.ops["groups"].drop_nulls().to_list())
    return {
        _text(groups) or ""
        for groups in listed
        if any(len({files[device] for device in group if device in files}) > 1 for group in groups)
    }


def _text(groups: Iterable[Iterable[int]] | None) -> str | None:
    return None if groups is None else ";".join(",".join(map(str, group)) for group in groups)


class Skew(NamedTuple):
    """What to add to times, by the ends of `n_shared` collectives, which vary by `spread`; in their unit."""

    offset: float
    n_shared: int
    spread: float


def collective_ends(events: pl.DataFrame, same: Sequence[str]) -> pl.DataFrame:
    """The last `end` of each collective, which `same` and its occurrence identify; from device, start and dur."""
    of_device = [*same, "device"]
    ends = events.sort("start", maintain_order=True).with_columns(
        end=pl.col("start") + pl.col("dur"),
        occurrence=pl.int_range(pl.len()).over(of_device),
        n=pl.len().over(of_device),  # who lost events counts otherwise
    )
    return ends.group_by(*same, "occurrence", "n").agg(pl.col("end").max())


def skews(ends: Sequence[pl.DataFrame]) -> list[Skew | None]:
    """The skew of each table of `collective_ends` to the first; None if no chain of shared collectives leads there."""
    known: dict[int, Skew] = {0: Skew(0.0, 0, 0.0)}
    for reference in (queue := [0]):
        for other in (index for index in range(len(ends)) if index not in known):
            keys = [name for name in ends[other].columns if name != "end"]
            both = ends[reference].join(ends[other], on=keys, nulls_equal=True, suffix="_other")
            if len(both) >= MIN_SHARED:
                apart = (both["end"] - both["end_other"]).to_numpy()
                offset = known[reference].offset + float(np.median(apart))
                known[other] = Skew(offset, len(apart), float(np.ptp(apart)) / 2)
                queue.append(other)
    return [known.get(index) for index in range(len(ends))]
