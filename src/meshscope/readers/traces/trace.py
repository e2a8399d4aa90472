"""A trace in columns: the schema that all readers of traces fill, and what they collect columns with."""

from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from meshscope.events.intervals import Ints, innermost
from meshscope.events.schema import schema_of
from meshscope.hardware.chips import ChipKind
from meshscope.readers.traces.servers import StepAnnotation, StepMark, phase_of, read_annotation
from meshscope.units import counted


class TraceFormat(StrEnum):
    """The format of a file, by its content."""

    KINETO = "kineto"
    CHROME_TPU = "chrome trace of the TPU profiler"
    NSYS = "nsys sqlite"
    XPLANE = "xplane"
    HLO = "hlo text"
    STABLEHLO = "stablehlo"
    CHAKRA = "chakra"
    SERVING_BENCHMARK = "serving benchmark json"


class Category(StrEnum):
    """What an op does for the step."""

    COLLECTIVE = "collective"
    COMPUTE = "compute"
    COPY = "copy"


# Description of the group of transfers over the data center network.
BETWEEN_SLICES = "between slices"

EVENTS_SCHEMA, OPS_SCHEMA, STEPS_SCHEMA = (
    schema_of(f"trace_{table}") for table in ("events", "ops", "steps")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The trace of one file. `origin_unix_ns` is the time at which its clock shows 0, if known.

    Without a `rank`, the devices of `events` are numbers on the host; the file lists `n_local`
    devices, with ops or not.
    """

    path: Path
    format: TraceFormat
    events: pl.DataFrame
    ops: pl.DataFrame
    steps: pl.DataFrame
    n_events: int  # in the file, on host and devices
    contents: str = ""  # what the file has, in words, if that is no op of a device
    rank: int | None = None
    world_size: int | None = None
    n_local: int | None = None
    device_name: str | None = None  # as the profiler calls the chip
    chip_kind: ChipKind | None = None
    origin_unix_ns: int | None = None
    findings: tuple[str, ...] = ()
    programs: Mapping[str, str] = field(default_factory=dict[str, str])  # HLO text by name


K = TypeVar("K", bound=Hashable)

MAX_OPS = 200_000  # distinct ops of a file; later ones share a row
MAX_NS = 1 << 62
MAX_RANKS = 1 << 20  # more devices than any job has
NS_PER_US = 1000


class OpCodes(Generic[K]):
    """Codes of distinct ops in order of their first event; at most MAX_OPS and `other`.

    `keys` are the distinct ops by code.
    """

    def __init__(self, other: K) -> None:
        self.keys: dict[K, int] = {}
        self._other = other
        self.n_folded = 0

    def codes(self, keys: Iterable[K]) -> NDArray[np.uint32]:
        """The code of each key [n]."""
        known = self.keys
        if len(known) < MAX_OPS:
            return np.fromiter((known.setdefault(k, len(known)) for k in keys), np.uint32)
        other = known.setdefault(self._other, len(known))
        codes = np.fromiter((known.get(key, other) for key in keys), np.uint32)
        self.n_folded += int((codes == other).sum())
        return codes


class ColumnParts(dict[str, list[NDArray[Any]]]):
    """Named columns that grow batch by batch."""

    def __init__(self, *names: str) -> None:
        super().__init__((name, []) for name in names)

    def add(self, **arrays: NDArray[Any]) -> None:
        """Appends an array to each column."""
        for name, values in arrays.items():
            self[name].append(values)

    def taken(self) -> dict[str, NDArray[Any]]:
        """All columns; their parts are released."""
        parts = ((name, self.pop(name)) for name in list(self))
        return {n: np.concatenate(of_name) if of_name else np.empty(0) for n, of_name in parts}


def whole_numbers(values: Sequence[Any]) -> NDArray[np.int64]:
    """The values [n]; -1 for what is no whole number."""

    def whole(value: object) -> int:
        if isinstance(value, str):
            return int(value) if value.isdecimal() and len(value) < 19 else -1
        return value if isinstance(value, int) and abs(value) < MAX_NS else -1

    try:
        numbers = np.frombuffer(array("q", values), np.int64)  # only whole numbers
    except (TypeError, OverflowError):
        try:
            texts = pl.Series(values, dtype=pl.String, strict=True)
        except TypeError:
            numbers = np.fromiter(map(whole, values), np.int64, len(values))
        else:
            read = texts.cast(pl.Int64, strict=False).fill_null(-1).to_numpy()
            numbers = np.maximum(read, -1)
    return np.where(np.abs(numbers) < MAX_NS, numbers, -1)


def nanoseconds(us: Sequence[float | None]) -> NDArray[np.int64]:
    """Times [n] in ns; -1 for None, NaN and what does not fit."""
    given = np.array(us, np.float64)
    is_valid = np.isfinite(given) & (np.abs(given) < MAX_NS / NS_PER_US)
    known = np.where(is_valid, given, 0)
    whole = np.floor(known)  # apart from the rest, as Unix time in ns exceeds the digits of a float
    ns = whole.astype(np.int64) * NS_PER_US + np.rint((known - whole) * NS_PER_US).astype(np.int64)
    return np.where(is_valid, ns, -1)


def events_table(
    columns: Mapping[str, NDArray[Any]] | pl.DataFrame, *, n_unreadable: int = 0, n_invalid: int = 0
) -> tuple[pl.DataFrame, list[str]]:
    """The events in order of time, and what was left out, with what a reader left out before.

    `columns` follow EVENTS_SCHEMA, with -1 for unknown steps. An event is invalid if its
    duration is negative, or its start or its device unknown; it is repeated if another one is equal in all columns.
    """
    frame = pl.DataFrame({name: columns[name] for name in EVENTS_SCHEMA})
    is_placed = pl.col("device").is_between(0, MAX_RANKS, closed="left") & (pl.col("start_ns") >= 0)
    valid = frame.filter(pl.col("dur_ns") >= 0, is_placed)
    step = pl.when(pl.col("step") >= 0).then(pl.col("step"))
    typed = valid.with_columns(step).select(pl.col(n).cast(t) for n, t in EVENTS_SCHEMA.items())
    order = ["device", "start_ns", "stream", "op"]
    ordered = typed.sort(order, maintain_order=True)
    is_same = pl.all_horizontal(
        pl.col(name) == pl.col(name).shift(1) for name in (*order, "dur_ns")
    )
    unique = ordered.filter(~is_same.fill_null(value=False))
    n_invalid += len(frame) - len(valid)
    n_repeated = len(ordered) - len(unique)
    return unique, left_out(n_unreadable=n_unreadable, n_invalid=n_invalid, n_repeated=n_repeated)


def left_out(*, n_unreadable: int, n_invalid: int, n_repeated: int) -> list[str]:
    """Events that are not in the tables, and why."""
    reasons = (
        (n_unreadable, "event", "left out: not valid JSON, or no events"),
        (n_invalid, "device event", "left out: no valid start, duration or device"),
        (n_repeated, "device event", "twice in the file, counted once"),
    )
    return [f"{counted(n, noun)} {reason}" for n, noun, reason in reasons if n]


def ops_table(keys: Iterable[K], facts: Callable[[K], Mapping[str, Any]]) -> pl.DataFrame:
    """The table of distinct ops from their keys, by code, without numbers that no group or array has."""
    records: list[dict[str, Any]] = []
    for code, key in enumerate(keys):
        record: dict[str, Any] = {"op": code, **facts(key)}
        for name, limit in (("group_size", MAX_RANKS), ("payload_bytes", MAX_NS)):
            if not 0 < (record.get(name) or 0) < limit:
                record[name] = None
        ranks: Sequence[int] = record.get("group") or ()
        if not all(0 <= rank < MAX_RANKS for rank in ranks):
            record["group"] = None
        records.append(record)
    return pl.DataFrame(records, schema=OPS_SCHEMA)


def steps_table(marks: Sequence[StepMark], devices: Sequence[int | None] = ()) -> pl.DataFrame:
    """The steps with the tokens or the phase that their names tell; `devices` are theirs, if known."""
    unknown = StepAnnotation(kind=None)
    steps = [read_annotation(mark.name) or unknown for mark in marks]
    columns = {
        "step": range(len(marks)),
        "device": devices or [None] * len(marks),
        "name": [mark.name for mark in marks],
        "kind": [s.kind or phase_of(m.name) for s, m in zip(steps, marks, strict=True)],
        "prefill_tokens": [step.prefill_tokens for step in steps],
        "decode_tokens": [step.decode_tokens for step in steps],
        "start_ns": [mark.start_ns for mark in marks],
        "dur_ns": [mark.dur_ns for mark in marks],
    }
    return pl.DataFrame(columns, schema=STEPS_SCHEMA)


def step_around(steps: pl.DataFrame, at_ns: Ints) -> Ints:
    """The row of the innermost step around each time [n]; -1 outside of steps."""
    start = steps["start_ns"].to_numpy()
    return innermost(start, start + steps["dur_ns"].to_numpy(), at=at_ns)
