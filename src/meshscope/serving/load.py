"""Requests of a serving load: drawn at random, or recorded in a public trace format."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
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
from meshscope.serving.prefixes import Part, Prefix
from meshscope.units import decimal_number, format_seconds, whole_number

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


def read_quantiles(path: Path) -> NDArray[np.float64]:
    """[3, n] quantiles of a dataset (0 to 1), and the tokens of prompts and of outputs at each; ParseError for none."""
    remedy = f"Give {', '.join(Lengths)}, or a CSV with rising columns quantile (0 to 1), prompt and output (tokens)."
    names = ("quantile", "prompt", "output")
    try:
        rows = list(csv.DictReader(StringIO(read_text(path, remedy, MAX_LINE), newline="")))
        columns = np.array([[float(row[name] or "") for row in rows] for name in names])
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise ParseError(f"{path}: no quantiles of lengths ({error}). {remedy}") from error
    is_rising = columns.shape[1] > 1 and bool((np.diff(columns) >= 0).all())
    limits = zip((0, 1, 1), (1, MAX_TOKENS, MAX_TOKENS), columns, strict=True)
    if not (is_rising and all(least <= one[0] < most >= one[-1] for least, most, one in limits)):
        raise ParseError(
            f"{path}: the quantiles of lengths do not rise within their limits. {remedy}"
        )
    return columns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversations:
    """`n` conversations, whose turns are `n` requests apart; [requests] `pause_s` come before a turn."""

    n: int
    pause_s: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """Arrays over [n] requests in the order of arrival.

    `prefixes` are the parts of each prompt that others may share. Of `conversations`, all first turns come
    before all second turns, and the arrival of a later turn is when its conversation begins.
    """

    arrival_s: NDArray[np.float64]
    n_prompt: NDArray[np.int64]
    n_output: NDArray[np.int64]
    prefixes: Sequence[Prefix] | None = None
    answers: Sequence[Part | None] | None = None
    conversations: Conversations | None = None

    @property
    def n_requests(self) -> int:
        """Number of requests."""
        return len(self.arrival_s)

    @property
    def rate_per_s(self) -> float:
        """Mean requests per second from the first to the last; inf if all arrive at once."""
        n = self.n_requests if self.conversations is None else self.conversations.n
        span_s = float(self.arrival_s[n - 1] - self.arrival_s[0])
        n_after = (n - 1) * self.n_requests / n
        return n_after / span_s if span_s > 0 else float("inf")

    def is_first(self, number: int) -> bool:
        """Whether a request follows no other."""
        return self.conversations is None or number < self.conversations.n

    def following(self, number: int) -> int | None:
        """The next turn of a conversation; None without one."""
        next_turn = self.n_requests if self.conversations is None else number + self.conversations.n
        return next_turn if next_turn < self.n_requests else None

    def pause_s(self, number: int) -> float:
        """Seconds between the answer before and this turn."""
        return 0.0 if self.conversations is None else float(self.conversations.pause_s[number])

    def conversation(self, number: int) -> int:
        """The number of the conversation; without turns, of the request."""
        return number if self.conversations is None else number % self.conversations.n

    def answer(self, number: int) -> Part | None:
        """The part that prompt and answer add to a conversation."""
        return None if self.answers is None else self.answers[number]

    def at_once(self, n_least: int) -> "Load":
        """At least so many requests at once: these, again and again.

        What prompts share stays as it is, so a trace is not repeated; conversations are, each with its own.
        """
        n_repeats = -(-n_least // self.n_requests)
        if self.conversations is not None:
            n = self.conversations.n
            n_prompt, n_output = (one.reshape(-1, n) for one in (self.n_prompt, self.n_output))
            n_new = np.diff(n_prompt, axis=0, prepend=0)
            n_new[1:] -= n_output[:-1]
            many = _conversations(
                np.zeros(n * n_repeats),
                np.tile(n_new, n_repeats),
                np.tile(n_output, n_repeats),
                np.zeros(n_prompt.size * n_repeats),
            )
            return many if self.prefixes is not None else many.unshared()
        if self.prefixes is not None:
            return replace(self, arrival_s=np.zeros(self.n_requests))
        return Load(
            arrival_s=np.zeros(n_repeats * self.n_requests),
            n_prompt=np.tile(self.n_prompt, n_repeats),
            n_output=np.tile(self.n_output, n_repeats),
        )

    def unshared(self) -> "Load":
        """The load without what prompts share."""
        return replace(self, prefixes=None, answers=None)

    def only(self, kept: slice | NDArray[np.bool_]) -> "Load":
        """The requests that are kept; all conversations."""
        at = np.arange(self.n_requests)[kept]
        if len(at) == self.n_requests:
            return self
        assert self.conversations is None
        return Load(
            arrival_s=self.arrival_s[kept],
            n_prompt=self.n_prompt[kept],
            n_output=self.n_output[kept],
            prefixes=self.prefixes and [self.prefixes[i] for i in at],
            answers=self.answers and [self.answers[i] for i in at],
        )


def random_load(  # noqa: PLR0913  the figures of a load
    burstiness: float,
    *,
    rate_per_s: float | None,
    n_requests: int,
    prompt: int,
    output: int,
    lengths: Lengths | NDArray[np.float64] = Lengths.FIXED,
    seed: int = 0,
) -> Load:
    """Requests with gaps of a gamma distribution, or all at once without a rate; lengths may be quantiles."""
    rng, arrival_s = np.random.default_rng(seed), np.zeros(n_requests)
    if rate_per_s is not None:
        gaps_s = rng.gamma(burstiness, 1 / (burstiness * rate_per_s), n_requests)
        arrival_s = np.cumsum(gaps_s)
    if isinstance(lengths, Lengths):
        n_prompt, n_output = (lengths.drawn(rng, mean, n_requests) for mean in (prompt, output))
    else:  # linear between quantiles
        draws = (np.interp(rng.random(n_requests), lengths[0], tokens) for tokens in lengths[1:])
        n_prompt, n_output = (np.rint(one).astype(np.int64) for one in draws)
    return Load(arrival_s=arrival_s, n_prompt=n_prompt, n_output=n_output)


def conversation_load(drawn: Load, n_turns: int, think_s: float, seed: int = 0) -> Load:
    """Conversations of so many turns, each with the lengths of a drawn request and all that came before.

    Conversations begin at the rate of the drawn requests over the number of turns. Between an answer and the
    next turn, the time to think is drawn from an exponential distribution.
    """
    n = max(1, drawn.n_requests // n_turns)
    n_new, n_output = (
        one[: n * n_turns].reshape(n_turns, n) for one in (drawn.n_prompt, drawn.n_output)
    )
    pauses_s = np.random.default_rng([seed, 1]).exponential(1.0, n * n_turns) * think_s
    return _conversations(drawn.arrival_s[:n] * n_turns, n_new, n_output, pauses_s)


def _conversations(
    begin_s: NDArray[np.float64],
    n_new: NDArray[np.int64],
    n_output: NDArray[np.int64],
    pauses_s: NDArray[np.float64],
) -> Load:
    """The load of [turns, conversations] new tokens and answers."""
    n_turns, n = n_new.shape
    n_before = np.vstack([np.zeros((1, n), int), np.cumsum(n_new + n_output, axis=0)[:-1]])
    # The keys and values of the last token of an answer come with the next turn.
    answers = list(enumerate((n_new + n_output).ravel().tolist()))
    return Load(
        arrival_s=np.tile(begin_s, n_turns),
        n_prompt=(n_before + n_new).ravel(),
        n_output=n_output.ravel(),
        prefixes=[tuple(answers[number % n : number : n]) for number in range(n * n_turns)],
        answers=answers,
        conversations=Conversations(n=n, pause_s=pauses_s),
    )


def recorded_load(
    path: Path, *, rate_per_s: float | None, n_requests: int | None
) -> tuple[Load, int]:
    """The first requests of a trace, and how many before them have no prompt or no output.

    Prompts share what the `hash_ids` of a Mooncake trace say, 512 tokens each, or what came before in the
    `session` of a plain CSV.

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
    times_s, n_prompt, n_output, _ = map(list, zip(*rows, strict=True))
    arrival_s = np.array(times_s).astype(float) - float(times_s[0])
    load = Load(arrival_s=arrival_s, n_prompt=np.array(n_prompt), n_output=np.array(n_output))
    if any(begins is not None for *_, begins in rows):
        prefixes, answers = _shared(rows)
        load = replace(load, prefixes=prefixes, answers=answers)
    if rate_per_s is not None and np.isfinite(load.rate_per_s):
        load = replace(load, arrival_s=arrival_s * load.rate_per_s / rate_per_s)
    return load, n_empty


# Seconds, prompt tokens, output tokens, and the blocks or the conversation that the prompt begins with.
_Row = tuple[float, int, int, tuple[int, ...] | str | None]
_HASHED = 512  # tokens of a block of Mooncake


def _shared(rows: Sequence[_Row]) -> tuple[list[Prefix], list[Part | None]]:
    """The parts of prompts that others share, and what answers add to conversations."""
    prefixes, answers = list[Prefix](), list[Part | None]()
    spoken: dict[str, Prefix] = {}
    for number, (_, prompt, output, begins) in enumerate(rows):
        if isinstance(begins, str):
            before = spoken.get(begins, ())
            n_before = sum(size for _, size in before)
            if n_before > prompt:  # the conversation was cut
                before, n_before = (), 0
            answer = (number, prompt - n_before + output)
            spoken[begins] = (*before, answer)
        else:
            ids, answer = begins or (), None
            sizes = (min(_HASHED, max(prompt - _HASHED * i, 0)) for i in range(len(ids)))
            before = tuple(zip(ids, sizes, strict=True))
        prefixes.append(before)
        answers.append(answer)
    return prefixes, answers


class _Format(NamedTuple):
    """The names of a format for time, prompt and output, and how its times are read."""

    time: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]
    begins: str = ""  # the name of what prompts begin with


def _clock_s(text: str) -> float:
    """Seconds of a date with a time of at most seven decimals."""
    clock = datetime.fromisoformat(text[:26])
    return (clock if clock.tzinfo else clock.replace(tzinfo=UTC)).timestamp()


# https://github.com/Azure/AzurePublicDataset, https://github.com/HPMLL/BurstGPT (with or without the
# columns of sessions), and https://github.com/kvcache-ai/Mooncake.
_AZURE = _Format("TIMESTAMP", "ContextTokens", "GeneratedTokens", _clock_s)
_BURST_GPT = _Format("Timestamp", "Request tokens", "Response tokens", decimal_number)
_MOONCAKE = _Format(
    "timestamp", "input_length", "output_length", lambda ms: float(ms) / 1e3, "hash_ids"
)
_PLAIN = _Format("arrival", "prompt", "output", decimal_number, "session")
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
        if missing := {trace.time, trace.prompt, trace.output} - names:
            raise ParseError(f"{path}:1: no column {', '.join(sorted(missing))}. {_REMEDY}")
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row:
                raise ParseError(
                    f"{where}: has more cells than columns. Write decimals with a point."
                )
            yield where, row, trace
    except csv.Error as error:
        at = f"{path}:{reader.line_num + 1}"
        raise ParseError(f"{at}: is not CSV ({error}). {_REMEDY}") from error


def _parsed(cells: Any, trace: _Format, where: str, before: _Row | None) -> _Row:
    """The request of a line; ParseError if it is none, or arrives before the previous line's."""
    try:
        cells = json.loads(cells) if isinstance(cells, str) else cells
        tokens = tuple(whole_number(str(cells[name])) for name in (trace.prompt, trace.output))
        begins = cells.get(trace.begins)
        if isinstance(begins, list):
            begins = tuple(map(int, begins))
        elif not isinstance(begins, str) or not begins:
            begins = None
        row = (trace.seconds(cells[trace.time]), tokens[0], tokens[1], begins)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        named = (trace.time, trace.prompt, trace.output)
        shown = {name: cells.get(name) for name in named} if isinstance(cells, dict) else cells
        raise ParseError(
            f"{where}: not a request of the trace ({str(shown)[:200]}): it needs a time and whole numbers of tokens. "
            "Correct or remove it."
        ) from error
    if not abs(row[0]) <= MAX_TIME_S:
        raise ParseError(f"{where}: not a request of the trace (time {row[0]}). Remove it.")
    if before is not None and row[0] < before[0]:
        raise ParseError(
            f"{where}: arrives {format_seconds(before[0] - row[0])} before the request above it. "
            "Sort the trace by time."
        )
    if wrong := [n for n in tokens if not 0 <= n <= MAX_TOKENS]:
        raise ParseError(f"{where}: not a request of the trace ({wrong[0]} tokens). Remove it.")
    return row
