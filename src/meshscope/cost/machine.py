"""One device's clock: a core that works in order, links and copies beside it, and who waits for whom.

The machine knows nothing of HLO. It is told what to run, what to issue and what to await; it keeps
the time, what the core did in it, and the spans of a timeline. Intervals are told apart as they
come: the core computes, or it does not while a collective is under way (exposed), or it waits for
something else (idle). A repeated body is played until two repetitions cost the same, and the others
are counted.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

Key = tuple[Hashable, ...]
Tally = defaultdict[Key, float]

MAX_PLAYED = 5  # repetitions of a body until it is taken as steady
STEADY_FRAC = 1e-9  # by which two repetitions of a steady body may differ
ON_CORE = "core"
ON_LINKS = "collective"
ON_COPIES = "copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something that takes time. `key` says what it is, for the tally; `lane` where it runs."""

    name: str
    lane: str
    seconds: float
    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A task on the timeline, with the repetitions that it stands for: (times, period), outermost first."""

    task: Task
    start_s: float
    dur_s: float
    repeats: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A task under way beside the core."""

    task: Task
    begin_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class Machine:
    """The state of one device.

    `tally` adds up seconds and counts: ("compute", key), ("exposed", key), ("dur", key) and ("n", key)
    of what ran beside the core, ("idle", why).
    """

    now_s: float = 0.0
    tally: Tally = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list[Span])
    free_s: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    flights: list[InFlight] = field(default_factory=list[InFlight])

    def run(self, task: Task) -> None:
        """The core works on a task to its end."""
        self.spans.append(Span(task=task, start_s=self.now_s, dur_s=task.seconds))
        self.tally["compute", task.key] += task.seconds
        self.tally["n", task.key] += 1
        self.now_s += task.seconds

    def issue(self, task: Task, resources: Sequence[Hashable]) -> InFlight:
        """A task begins beside the core, once all that it needs is free of what was issued before."""
        begin = max([self.now_s, *(self.free_s.get(r, 0.0) for r in resources)])
        flight = InFlight(task=task, begin_s=begin, end_s=begin + task.seconds)
        for resource in resources:
            self.free_s[resource] = flight.end_s
        self.flights.append(flight)
        self.spans.append(Span(task=task, start_s=begin, dur_s=task.seconds))
        self.tally["dur", task.key] += task.seconds
        self.tally["n", task.key] += 1
        return flight

    def wait(self, flight: InFlight) -> None:
        """The core does nothing until the flight has ended."""
        if flight.end_s > self.now_s:
            self._stall(flight)
            self.now_s = flight.end_s
        self.flights = [f for f in self.flights if f.end_s > self.now_s]

    def idle(self, seconds: float, why: str) -> None:
        """The core has nothing to do, for a reason outside this device."""
        self.tally["idle", why] += seconds
        self.now_s += seconds

    def _stall(self, cause: InFlight) -> None:
        """Tells what the wait until the end of `cause` is for, its collective first."""
        open_intervals = [(self.now_s, cause.end_s)]
        others = [f for f in self.flights if f is not cause]
        for flight in [cause, *others]:
            if flight.task.lane == ON_LINKS:
                inside, open_intervals = _split(open_intervals, flight.begin_s, flight.end_s)
                self.tally["exposed", flight.task.key] += inside
        rest = sum(end - begin for begin, end in open_intervals)
        if rest > 0:
            self.tally["idle", cause.task.lane] += rest

    def repeat(self, n: int, body: Callable[[], None]) -> None:
        """Runs a body `n` times; once it is steady, the repetitions left are counted, not played."""
        period = -1.0
        for played in range(n):
            before_s, tally, mark = self.now_s, dict(self.tally), len(self.spans)
            body()
            last, period = period, self.now_s - before_s
            is_steady = abs(period - last) <= STEADY_FRAC * max(period, last)
            if played + 1 < n and (is_steady or played + 1 >= MAX_PLAYED):
                self._fold(n - played - 1, before_s=before_s, before=tally, mark=mark)
                return

    def _fold(
        self, n_left: int, *, before_s: float, before: Mapping[Key, float], mark: int
    ) -> None:
        """Counts `n_left` more repetitions of what was played since `before_s`."""
        period = self.now_s - before_s
        for key in list(self.tally):
            self.tally[key] += n_left * (self.tally[key] - before.get(key, 0))
        for at in range(mark, len(self.spans)):
            span = self.spans[at]
            self.spans[at] = replace(span, repeats=((n_left + 1, period), *span.repeats))
        for flight in self.flights:
            if flight.begin_s >= before_s:
                flight.begin_s += n_left * period
                flight.end_s += n_left * period
        for resource, at_s in self.free_s.items():
            if at_s >= before_s:
                self.free_s[resource] = at_s + n_left * period
        self.now_s += n_left * period


def _split(
    intervals: Sequence[tuple[float, float]], begin: float, end: float
) -> tuple[float, list[tuple[float, float]]]:
    """How much of the intervals lies between `begin` and `end`, and what of them does not."""
    inside = 0.0
    outside: list[tuple[float, float]] = []
    for a, b in intervals:
        low, high = max(a, begin), min(b, end)
        if high <= low:
            outside.append((a, b))
            continue
        inside += high - low
        outside += [(x, y) for x, y in ((a, low), (high, b)) if y > x]
    return inside, outside
