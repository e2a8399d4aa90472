"""Requests of a serving load: drawn at random, or recorded in a public trace format."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshscope.errors import ParseError, SpecError
from meshscope.files import read_file
from meshscope.units import format_seconds

# Shape of the gamma distribution of gaps between bursty arrivals; 1 is Poisson. The option
# --burstiness of `vllm bench serve` is the same figure.
BURST_SHAPE = 0.25
RATES_PER_S = (1e-6, 1e6)
MAX_TIME_S = 1e12  # least and greatest time in a trace, in absolute value
MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1 << 40  # of a prompt or an output in a trace
MAX_TRACE_BYTES = 512 << 20
MAX_LINE = 100_000  # characters of the header of a CSV file


class Arrivals(StrEnum):
    """How requests arrive."""

    POISSON = "poisson"
    BURST = "burst"


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

    def every(self, n: int) -> "Load":
        """Every n-th request: what one of n ranks gets that take turns."""
        return Load(
            arrival_s=self.arrival_s[::n],
            n_prompt=self.n_prompt[::n],
            n_output=self.n_output[::n],
        )

    def only(self, is_kept: NDArray[np.bool_]) -> "Load":
        """The requests that are kept, by a mask [n]."""
        return Load(
            arrival_s=self.arrival_s[is_kept],
            n_prompt=self.n_prompt[is_kept],
            n_output=self.n_output[is_kept],
        )


def random_load(  # noqa: PLR0913  the figures of a load
    arrivals: Arrivals,
    *,
    rate_per_s: float | None,
    n_requests: int,
    prompt: int,
    output: int,
    is_geometric: bool,
    seed: int,
) -> Load:
    """Requests with random gaps, or all at once without a rate; lengths are fixed or geometric."""
    if rate_per_s is not None:
        check_rate(rate_per_s)
    if not 1 <= n_requests <= MAX_REQUESTS:
        raise SpecError(f"--requests {n_requests}: use 1 to {MAX_REQUESTS:,}.")
    rng = np.random.default_rng(seed)
    shape = BURST_SHAPE if arrivals is Arrivals.BURST else 1.0
    gaps_s = np.zeros(n_requests)
    if rate_per_s is not None:
        gaps_s = rng.gamma(shape, 1 / (shape * rate_per_s), n_requests)

    def lengths(mean: int) -> NDArray[np.int64]:
        return rng.geometric(1 / mean, n_requests) if is_geometric else np.full(n_requests, mean)

    return Load(arrival_s=np.cumsum(gaps_s), n_prompt=lengths(prompt), n_output=lengths(output))


def check_rate(rate_per_s: float) -> None:
    """SpecError unless the rate is one that a server can see."""
    least, most = RATES_PER_S
    if not least <= rate_per_s <= most:
        raise SpecError(
            f"--rate {rate_per_s} is not in {least:g} to {most:,.0f}. Give requests per second."
        )


def recorded_load(
    path: Path, *, rate_per_s: float | None, n_requests: int | None
) -> tuple[Load, int]:
    """The first requests of a trace, and how many before them have no prompt or no output.

    Gaps are scaled to a rate if one is given. Reads the CSV of the Azure LLM inference traces (TIMESTAMP,
    ContextTokens, GeneratedTokens) and of BurstGPT (Timestamp in s, Request tokens, Response tokens), and the
    JSON lines of Mooncake (timestamp in ms, input_length, output_length).
    """
    text = _text(path)
    rows = list(_mooncake(text, path) if text.lstrip().startswith("{") else _csv(text, path))
    at = [i for i, row in enumerate(rows) if row[1] and row[2]][:n_requests]
    n_empty = (len(rows) if not at or n_requests is None else at[-1] + 1) - len(at)
    rows = [rows[i] for i in at]
    if not rows:
        raise ParseError(f"{path}: no requests with prompt and output tokens. Give another trace.")
    arrival_s, n_prompt, n_output = (np.array(column) for column in zip(*rows, strict=True))
    arrival_s = arrival_s.astype(float) - float(arrival_s[0])
    if rate_per_s is not None:
        check_rate(rate_per_s)
    load = Load(arrival_s=arrival_s, n_prompt=n_prompt, n_output=n_output)
    if rate_per_s is not None and np.isfinite(load.rate_per_s):
        load = replace(load, arrival_s=arrival_s * load.rate_per_s / rate_per_s)
    return load, n_empty


_Row = tuple[float, int, int]  # seconds, prompt tokens, output tokens


def _text(path: Path) -> str:
    try:
        return read_file(path, MAX_TRACE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ParseError(f"{path}: is not text. Give a trace as CSV or JSON lines.") from error
    except OSError as error:
        raise ParseError(
            f"cannot read '{path}': {error.strerror}. Give {', '.join(Arrivals)} or a trace."
        ) from error


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a trace in CSV, and how its times are read."""

    time: str
    prompt: str
    output: str
    seconds: Callable[[str], float]

    @property
    def names(self) -> tuple[str, str, str]:
        """The three columns."""
        return self.time, self.prompt, self.output

    def row(self, cells: Mapping[str, str]) -> _Row:
        """A request."""
        return self.seconds(cells[self.time]), int(cells[self.prompt]), int(cells[self.output])


def _clock_s(text: str) -> float:
    """Seconds of a date with a time of at most seven decimals."""
    clock = datetime.fromisoformat(text[:26])
    return (clock if clock.tzinfo else clock.replace(tzinfo=UTC)).timestamp()


# https://github.com/Azure/AzurePublicDataset, and https://github.com/HPMLL/BurstGPT (with or without the
# columns of sessions).
_AZURE = _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", _clock_s)
_BURST_GPT = _Columns("Timestamp", "Request tokens", "Response tokens", float)
_REMEDY = "Give an Azure or a BurstGPT trace (CSV), or a Mooncake trace (JSON lines)."


def _csv(text: str, path: Path) -> Iterator[_Row]:
    if (
        len(text) > MAX_LINE and "\n" not in text[:MAX_LINE]
    ):  # a reader of millions of columns takes minutes
        raise ParseError(f"{path}:1: no line ends in {MAX_LINE:,} characters. {_REMEDY}")
    reader, before_s = csv.DictReader(StringIO(text, newline="")), None
    try:
        names = set(reader.fieldnames or ())
        columns = _BURST_GPT if _BURST_GPT.time in names else _AZURE
        if missing := set(columns.names) - names:
            raise ParseError(f"{path}:1: no column {', '.join(sorted(missing))}. {_REMEDY}")
        for row in reader:
            request = _parsed(
                lambda row=row: columns.row(row), f"{path}:{reader.line_num}", before_s
            )
            before_s = request[0]
            yield request
    except csv.Error as error:
        raise ParseError(
            f"{path}:{reader.line_num + 1}: is not CSV ({error}). {_REMEDY}"
        ) from error


def _mooncake(text: str, path: Path) -> Iterator[_Row]:
    before_s = None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            where = f"{path}:{number}"
            request = _parsed(lambda line=line: _mooncake_row(json.loads(line)), where, before_s)
            before_s = request[0]
            yield request


def _mooncake_row(row: Any) -> _Row:
    return float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"])


def _parsed(parse: Callable[[], _Row], where: str, before_s: float | None) -> _Row:
    """The request of a line; ParseError if it is none, or arrives before that of the line before."""
    try:
        row = parse()
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ParseError(f"{where}: not a request of the trace ({error}). Remove it.") from error
    if not abs(row[0]) <= MAX_TIME_S:
        raise ParseError(f"{where}: not a request of the trace (time {row[0]}). Remove it.")
    if before_s is not None and row[0] < before_s:
        raise ParseError(
            f"{where}: arrives {format_seconds(before_s - row[0])} before the request above it. "
            "Sort the trace by time."
        )
    for n_tokens in row[1:]:
        if not 0 <= n_tokens <= MAX_TOKENS:
            raise ParseError(f"{where}: not a request of the trace ({n_tokens} tokens). Remove it.")
    return row
