"""Requests of a serving load: drawn at random, or recorded in a public trace format."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshscope.errors import ParseError
from meshscope.files import read_text
from meshscope.units import format_seconds

MAX_TIME_S = 1e12  # least and greatest time in a trace, in absolute value
MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1 << 40  # of a prompt or an output in a trace
MAX_TRACE_BYTES = 512 << 20
MAX_LINE = 100_000  # characters of the header of a CSV file


class Arrivals(StrEnum):
    """How requests arrive."""

    POISSON = "poisson"
    BURST = "burst"

    @property
    def burstiness(self) -> float:
        """Shape of the gamma distribution of gaps, as --burstiness of `vllm bench serve`; 1 is Poisson."""
        return 0.25 if self is Arrivals.BURST else 1.0


class Lengths(StrEnum):
    """How the lengths of prompts and outputs are distributed around their means."""

    FIXED = "fixed"
    GEOMETRIC = "geometric"
    UNIFORM = (
        "uniform"  # 8/9 to 10/9 of the mean: 0.8 to 1 of a longest length, a range ratio of 0.8
    )

    def drawn(self, rng: np.random.Generator, mean: int, n: int) -> NDArray[np.int64]:
        """N lengths with this mean."""
        match self:
            case Lengths.FIXED:
                return np.full(n, mean)
            case Lengths.GEOMETRIC:
                return rng.geometric(1 / mean, n)
            case Lengths.UNIFORM:
                return rng.integers(-(-8 * mean // 9), 10 * mean // 9 + 1, n)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """Arrays over [n] requests in the order of arrival."""

    arrival_s: NDArray[np.float64]
    n_prompt: NDArray[np.int64]
    n_output: NDArray[np.int64]

    @property
    def n_requests(self) -> int:
        """Number of requests."""
        return len(self.arrival_s)

    @property
    def rate_per_s(self) -> float:
        """Mean requests per second from the first to the last; inf if all arrive at once."""
        span_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return (self.n_requests - 1) / span_s if span_s > 0 else float("inf")

    def only(self, kept: slice | NDArray[np.bool_]) -> "Load":
        """The requests that are kept."""
        return Load(
            arrival_s=self.arrival_s[kept],
            n_prompt=self.n_prompt[kept],
            n_output=self.n_output[kept],
        )


def random_load(  # noqa: PLR0913  the figures of a load
    burstiness: float,
    *,
    rate_per_s: float | None,
    n_requests: int,
    prompt: int,
    output: int,
    lengths: Lengths = Lengths.FIXED,
    seed: int = 0,
) -> Load:
    """Requests with gaps of a gamma distribution, or all at once without a rate."""
    rng, arrival_s = np.random.default_rng(seed), np.zeros(n_requests)
    if rate_per_s is not None:
        gaps_s = rng.gamma(burstiness, 1 / (burstiness * rate_per_s), n_requests)
        arrival_s = np.cumsum(gaps_s)
    n_prompt, n_output = (lengths.drawn(rng, mean, n_requests) for mean in (prompt, output))
    return Load(arrival_s=arrival_s, n_prompt=n_prompt, n_output=n_output)


def recorded_load(
    path: Path, *, rate_per_s: float | None, n_requests: int | None
) -> tuple[Load, int]:
    """The first requests of a trace, and how many before them have no prompt or no output.

    Gaps are scaled to a rate if one is given. Reads the CSV of the Azure LLM inference traces (TIMESTAMP,
    ContextTokens, GeneratedTokens) and of BurstGPT (Timestamp in s, Request tokens, Response tokens), a plain
    CSV (arrival in s, prompt, output), and the JSON lines of Mooncake (timestamp in ms, input_length, output_length).
    """
    remedy = f"Give {', '.join(Arrivals)}, or a trace as CSV or JSON lines."
    text = read_text(path, remedy, MAX_TRACE_BYTES)
    rows: list[_Row] = []
    for where, cells, trace in _lines(text, path):
        rows.append(_parsed(cells, trace, where, rows[-1] if rows else None))
    at = [i for i, row in enumerate(rows) if row[1] and row[2]][:n_requests]
    n_empty = (len(rows) if not at or n_requests is None else at[-1] + 1) - len(at)
    rows = [rows[i] for i in at]
    if not rows:
        raise ParseError(f"{path}: no requests with prompt and output tokens. Give another trace.")
    arrival_s, n_prompt, n_output = (np.array(column) for column in zip(*rows, strict=True))
    arrival_s = arrival_s.astype(float) - float(arrival_s[0])
    load = Load(arrival_s=arrival_s, n_prompt=n_prompt, n_output=n_output)
    if rate_per_s is not None and np.isfinite(load.rate_per_s):
        load = replace(load, arrival_s=arrival_s * load.rate_per_s / rate_per_s)
    return load, n_empty


_Row = tuple[float, int, int]  # seconds, prompt tokens, output tokens


class _Format(NamedTuple):
    """The names of a format for time, prompt and output, and how its times are read."""

    time: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]


def _clock_s(text: str) -> float:
    """Seconds of a date with a time of at most seven decimals."""
    clock = datetime.fromisoformat(text[:26])
    return (clock if clock.tzinfo else clock.replace(tzinfo=UTC)).timestamp()


# https://github.com/Azure/AzurePublicDataset, https://github.com/HPMLL/BurstGPT (with or without the
# columns of sessions), and https://github.com/kvcache-ai/Mooncake.
_AZURE = _Format("TIMESTAMP", "ContextTokens", "GeneratedTokens", _clock_s)
_BURST_GPT = _Format("Timestamp", "Request tokens", "Response tokens", float)
_MOONCAKE = _Format("timestamp", "input_length", "output_length", lambda ms: float(ms) / 1e3)
_PLAIN = _Format("arrival", "prompt", "output", float)
_CSV = (_PLAIN, _BURST_GPT, _AZURE)
_REMEDY = (
    "Give a CSV with the columns arrival (seconds), prompt and output (tokens), an Azure or a BurstGPT "
    "trace (CSV), or a Mooncake trace (JSON lines)."
)


def _lines(text: str, path: Path) -> Iterator[tuple[str, Any, _Format]]:
    if text.lstrip().startswith("{"):
        lines = enumerate(text.splitlines(), start=1)
        yield from ((f"{path}:{n}", line, _MOONCAKE) for n, line in lines if line.strip())
        return
    # A reader of millions of columns takes minutes.
    if len(text) > MAX_LINE and "\n" not in text[:MAX_LINE]:
        raise ParseError(f"{path}:1: no line ends in {MAX_LINE:,} characters. {_REMEDY}")
    reader = csv.DictReader(StringIO(text, newline=""))
    try:
        names = set(reader.fieldnames or ())
        trace = next((one for one in _CSV if one.time in names), _PLAIN)
        if missing := set(trace[:3]) - names:
            raise ParseError(f"{path}:1: no column {', '.join(sorted(missing))}. {_REMEDY}")
        for row in reader:
            yield f"{path}:{reader.line_num}", row, trace
    except csv.Error as error:
        at = f"{path}:{reader.line_num + 1}"
        raise ParseError(f"{at}: is not CSV ({error}). {_REMEDY}") from error


def _parsed(cells: Any, trace: _Format, where: str, before: _Row | None) -> _Row:
    """The request of a line; ParseError if it is none, or arrives before the previous line's."""
    try:
        cells = json.loads(cells) if isinstance(cells, str) else cells
        tokens = int(cells[trace.prompt]), int(cells[trace.output])
        row = (trace.seconds(cells[trace.time]), *tokens)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ParseError(f"{where}: not a request of the trace ({error}). Remove it.") from error
    if not abs(row[0]) <= MAX_TIME_S:
        raise ParseError(f"{where}: not a request of the trace (time {row[0]}). Remove it.")
    if before is not None and row[0] < before[0]:
        raise ParseError(
            f"{where}: arrives {format_seconds(before[0] - row[0])} before the request above it. "
            "Sort the trace by time."
        )
    for n_tokens in tokens:
        if not 0 <= n_tokens <= MAX_TOKENS:
            raise ParseError(f"{where}: not a request of the trace ({n_tokens} tokens). Remove it.")
    return row
