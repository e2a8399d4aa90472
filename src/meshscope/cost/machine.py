"""Clock of one device: an in-order core, concurrent links and copies, and one HBM shared by all.

The HBM serves lanes of transfers, which share its rate. The transfers of one lane run one at a time, in the order
in which they start; the lanes with a transfer in progress divide the rate by their shares, and the HBM never
rests while there is one. A transfer is measured in seconds at the full rate, so the HBM knows neither bytes nor rates.

The machine knows nothing of HLO. Callers run, issue, fetch and await tasks; it keeps the time, a tally of
what the core does, and the spans of a timeline. Each interval is counted as one of three: the core
computes, it waits while a collective is in flight (exposed), or it waits for something else (idle). A task
on the core lasts its own seconds, or until the shared HBM has served its transfer. A repeated
body is simulated until two repetitions take the same time, and the rest is extrapolated.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from meshscope.hardware.compiler_facts import OPERATIONS

Key = tuple[Hashable, ...]
Tally = defaultdict[Key, float]

MAX_SIMULATED = 5  # repetitions of a body before it is assumed to be steady
STEADY_FRAC = 1e-9  # relative difference between two repetitions of a steady body
CORE_LANE = "core"
LINK_LANE = "collective"
COPY_LANE = "copy"


@dataclass(slots=True, kw_only=True)
class Transfer:
    """Bytes on their way; `end_s` is None as long as other transfers may delay the end."""

    left_s: float
    end_s: float | None = None


@dataclass(slots=True, kw_only=True)
class HbmServer:
    """Transfers in progress, by lane; the share of a lane is 1 by default."""

    shares: Mapping[str, float] = field(default_factory=dict[str, float])
    now_s: float = 0.0
    busy_s: float = 0.0
    lanes: defaultdict[str, deque[Transfer]] = field(default_factory=lambda: defaultdict(deque))

    def start(self, lane: str, seconds: float, *, at_s: float) -> Transfer:
        """Starts a transfer of `seconds` at the full rate; calls come in the order of `at_s`."""
        self.advance(at_s)
        transfer = Transfer(left_s=seconds)
        self.lanes[lane].append(transfer)
        return transfer

    def finish(self, transfer: Transfer) -> float:
        """The end of a transfer if no other starts before."""
        while transfer.end_s is None:
            self._serve(inf)
        return transfer.end_s

    def advance(self, to_s: float) -> None:
        """Serves the transfers in progress until `to_s`."""
        while self.now_s < to_s:
            self._serve(to_s - self.now_s)

    def _serve(self, at_most_s: float) -> None:
        """Serves the first transfer of each lane until one ends, or for `at_most_s`."""
        active = {name: lane for name, lane in self.lanes.items() if lane}
        total = sum(self.shares.get(name, 1.0) for name in active)
        needed_s = {
            name: lane[0].left_s * total / self.shares.get(name, 1.0)
            for name, lane in active.items()
        }
        served_s = min([at_most_s, *needed_s.values()])
        self.now_s += served_s
        self.busy_s += served_s if active else 0.0
        for name, lane in active.items():
            if needed_s[name] <= served_s:
                lane.popleft().end_s = self.now_s
            else:
                lane[0].left_s -= served_s * self.shares.get(name, 1.0) / total


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something that takes time on a lane; `key` identifies it in the tally.

    `seconds` is its time alone, `hbm_s` the time of its HBM transfer at the full rate.
    """

    name: str
    lane: str
    seconds: float
    key: Key
    hbm_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A task on the timeline; `repeats` are its (times, period in s) in loops, outermost first.

    `stages` are the pipeline stages whose devices execute it; () if all do.
    """

    task: Task
    start_s: float
    dur_s: float
    repeats: tuple[tuple[int, float], ...] = ()
    stages: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A task concurrent with the core; its end is unknown as long as it shares the HBM."""

    task: Task
    begin_s: float
    end_s: float | None = None
    transfer: Transfer | None = None
    span: int = 0  # its place in the timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment of a machine; everything since then can be repeated."""

    now_s: float
    tally: Mapping[Key, float]
    n_spans: int


@dataclass(slots=True, kw_only=True)
class Machine:
    """The state of one device.

    `tally` sums seconds and counts: ("compute", key), ("exposed", key), ("idle", reason), and ("dur", key)
    and ("n", key) of tasks off the core. ("hbm", quantity, key) is the part of one of the first three during
    which the HBM is busy.
    """

    now_s: float = 0.0
    hbm_busy_s: float = 0.0  # before now_s
    tally: Tally = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list[Span])
    free_s: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    in_flight: list[InFlight] = field(default_factory=list[InFlight])  # on links
    copies: list[InFlight] = field(default_factory=list[InFlight])
    hbm: HbmServer = field(
        default_factory=lambda: HbmServer(shares={CORE_LANE: OPERATIONS.core_share})
    )

    def run(self, task: Task) -> None:
        """Runs a task on the core to its end, which its HBM transfer may delay."""
        seconds = task.seconds
        if task.hbm_s > 0:
            transfer = self.hbm.start(task.lane, task.hbm_s, at_s=self.now_s)
            seconds = max(seconds, self.hbm.finish(transfer) - self.now_s)
        self.spans.append(Span(task=task, start_s=self.now_s, dur_s=seconds))
        self.tally["n", task.key] += 1
        self._spend(seconds, {("compute", task.key): seconds})

    def fetch(self, task: Task) -> InFlight:
        """Starts a copy, which lasts until the HBM, shared with all other transfers, has served it."""
        transfer = self.hbm.start(task.lane, task.hbm_s, at_s=self.now_s)
        issued = InFlight(task=task, begin_s=self.now_s, transfer=transfer, span=len(self.spans))
        self.spans.append(Span(task=task, start_s=self.now_s, dur_s=task.seconds))
        self.copies.append(issued)
        self.tally["dur", task.key] += 0.0
        self.tally["n", task.key] += 1
        return issued

    def issue(self, task: Task, resources: Sequence[Hashable]) -> InFlight:
        """Starts a task off the core once earlier tasks have freed its resources."""
        begin = max([self.now_s, *(self.free_s.get(r, 0.0) for r in resources)])
        end_s = begin + task.seconds
        issued = InFlight(task=task, begin_s=begin, end_s=end_s)
        for resource in resources:
            self.free_s[resource] = end_s
        self.in_flight.append(issued)
        self.spans.append(Span(task=task, start_s=begin, dur_s=task.seconds))
        self.tally["dur", task.key] += task.seconds
        self.tally["n", task.key] += 1
        return issued

    def wait(self, awaited: InFlight) -> None:
        """Stalls the core until the task has ended."""
        end_s = self._end(awaited)
        if end_s > self.now_s:
            self._spend(end_s - self.now_s, self._stall(awaited, end_s))
        self.in_flight = [task for task in self.in_flight if self._end(task) > self.now_s]

    def _end(self, awaited: InFlight) -> float:
        """The end of a task off the core; if it is a copy, its end is now known and tallied."""
        if awaited.end_s is None:
            assert awaited.transfer is not None
            awaited.end_s = self.hbm.finish(awaited.transfer)
            dur_s = awaited.end_s - awaited.begin_s
            self.tally["dur", awaited.task.key] += dur_s
            self.spans[awaited.span] = replace(self.spans[awaited.span], dur_s=dur_s)
            self.copies.remove(awaited)
        return awaited.end_s

    def wait_until(self, end_s: float, reason: str) -> None:
        """Stalls the core until a moment that other devices set."""
        task = Task(name=reason, lane=reason, seconds=0.0, key=())
        self.wait(InFlight(task=task, begin_s=self.now_s, end_s=end_s))

    def _spend(self, seconds: float, by_quantity: Mapping[Key, float]) -> None:
        """Advances the clock, and tallies the seconds and the HBM seconds, which all quantities share."""
        self.hbm.advance(self.now_s + seconds)
        frac = (self.hbm.busy_s - self.hbm_busy_s) / seconds if seconds else 0.0
        self.hbm_busy_s = self.hbm.busy_s
        for key, spent_s in by_quantity.items():
            self.tally[key] += spent_s
            self.tally[("hbm", *key)] += frac * spent_s
        self.now_s += seconds

    def _stall(self, awaited: InFlight, end_s: float) -> Tally:
        """A stall, attributed to the collectives in flight, the awaited one first, and the rest to idle."""
        stalls: Tally = defaultdict(float)
        open_intervals = [(self.now_s, end_s)]
        others = [task for task in self.in_flight if task is not awaited]
        for candidate in [awaited, *others]:
            if candidate.task.lane == LINK_LANE:
                ends_s = self._end(candidate)
                covered, open_intervals = _split(open_intervals, candidate.begin_s, ends_s)
                stalls["exposed", candidate.task.key] += covered
        rest = sum(end - begin for begin, end in open_intervals)
        if rest > 0:
            stalls["idle", awaited.task.lane] = rest
        return stalls

    def repeat(self, n: int, body: Callable[[], None]) -> None:
        """Runs a body `n` times, extrapolating the repetitions after it is steady."""
        period = -1.0
        for repetition in range(n):
            mark = self.mark()
            body()
            last, period = period, self.now_s - mark.now_s
            is_steady = abs(period - last) <= STEADY_FRAC * max(period, last)
            if repetition + 1 < n and (is_steady or repetition + 1 >= MAX_SIMULATED):
                self.repeat_since(mark, n - repetition - 1)
                return

    def mark(self) -> Mark:
        """The present moment."""
        return Mark(now_s=self.now_s, tally=dict(self.tally), n_spans=len(self.spans))

    def repeat_since(self, mark: Mark, n_left: int) -> None:
        """Adds `n_left` more repetitions of everything since the mark."""
        period = self.now_s - mark.now_s
        for key in list(self.tally):
            self.tally[key] += n_left * (self.tally[key] - mark.tally.get(key, 0))
        for at in range(mark.n_spans, len(self.spans)):
            span = self.spans[at]
            self.spans[at] = replace(span, repeats=((n_left + 1, period), *span.repeats))
        for task in self.in_flight:
            if task.begin_s >= mark.now_s:
                task.begin_s += n_left * period
                task.end_s = self._end(task) + n_left * period
        for copy in self.copies:
            if copy.begin_s >= mark.now_s:
                copy.begin_s += n_left * period
                if copy.transfer is not None and copy.transfer.end_s is not None:
                    copy.transfer.end_s += n_left * period
        for resource, at_s in self.free_s.items():
            if at_s >= mark.now_s:
                self.free_s[resource] = at_s + n_left * period
        self.hbm.now_s += n_left * period  # its transfers keep what is left of them
        self.now_s += n_left * period


def _split(
    intervals: Sequence[tuple[float, float]], begin: float, end: float
) -> tuple[float, list[tuple[float, float]]]:
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
