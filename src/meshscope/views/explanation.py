"""Why A beats B, in a few plain sentences with figures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshscope.analysis.explanation import (
    CostLocation,
    PhaseChange,
    StepCostChange,
    TrafficChange,
    cost_of,
    explained,
    measured_cost,
)
from meshscope.events.enums import Phase, Source
from meshscope.store.run import RunRecord
from meshscope.units import NANOSECOND_S, format_bytes, format_seconds
from meshscope.views.document import run_latency
from meshscope.views.plain import short
from meshscope.views.side import Difference, Side, asked_differences
from meshscope.views.words import phase_words, signed_bytes

SAME_FRAC = 0.005  # times that differ by less are called the same
MAX_PLACES = 3  # that are named in a sentence
MOST_FRAC = 0.5  # of a difference that is called most of it
MANY_TIMES = 5.0  # from here on a ratio is told as times, not as percent
SMALL_FRAC = 0.015  # changes to be told with a decimal: below it, or short of the whole by less


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What was not asked alike of two sides, and what differs between them, phase by phase."""

    left: Side
    right: Side
    asked: tuple[Difference, ...]
    changes: tuple[PhaseChange, ...]


def explanation_of(left: Side, right: Side) -> Explanation:
    """What differs between the sides."""
    changes = explained(
        left.run.rows_of(left.source),
        right.run.rows_of(right.source),
        left_costs=_costs(left.run, left.source),
        right_costs=_costs(right.run, right.source),
    )
    asked = tuple(asked_differences(left, right))
    return Explanation(left=left, right=right, asked=asked, changes=changes)


def _costs(run: RunRecord, source: Source) -> dict[Phase, StepCostChange]:
    """The cost of each phase's step: measured where that is the source, else modelled."""
    if source is not Source.MEASURED:
        return {time.phase: cost_of(time) for time in run.times_of(source)}
    latency = run_latency(run)
    if latency is None:
        return {}
    found = {Phase.PREFILL: measured_cost(latency.ttft.mean_s)}
    if latency.itl is not None:
        found[Phase.DECODE] = measured_cost(latency.itl.mean_s)
    return found


def sentences(explanation: Explanation) -> list[str]:
    """What was asked otherwise, each phase's bytes and time in a sentence or two, which side is faster and why."""
    left, right = short(explanation.left.name), short(explanation.right.name)
    found = list(_asked_sentences(explanation, left, right))
    both: list[PhaseChange] = []
    for change in explanation.changes:
        sides = [side.has_phase(change.phase) for side in (explanation.left, explanation.right)]
        if all(sides):
            both.append(change)
            found += _phase_sentences(change, left, right)
        else:
            name = left if sides[0] else right
            found.append(_alone_sentence(change, name, sides.index(True)))
    if len(both) < len(explanation.changes):
        return [*found, "Which one is faster is not known: they do not have the same phases."]
    return [*found, _verdict(both, left, right)]


def _asked_sentences(explanation: Explanation, left: str, right: str) -> Iterator[str]:
    """In what the sides differ from the beginning."""
    known = [one for one in explanation.asked if one.left is not None and one.right is not None]
    if known:
        words = [
            f"{short(o.name)} {_value(o.right, right)} and {_value(o.left, left)}" for o in known
        ]
        yield f"asked otherwise: {'; '.join(words)}."
    for name, missing in (
        (left, [short(one.name) for one in explanation.asked if one.left is None]),
        (right, [short(one.name) for one in explanation.asked if one.right is None]),
    ):
        if missing:
            yield f"not known of {name}: {_listed(missing)}."
    work = [short(one.name) for one in known if one.is_work]
    if work:
        yield f"{left} and {right} do not do the same work, for they differ in {_listed(work)}."
    sources = explanation.left.source, explanation.right.source
    if Source.MEASURED in sources and len(set(sources)) > 1:
        yield (
            f"{left} was {sources[0]}, {right} {sources[1]}: seconds that were measured stand beside "
            "seconds of a model."
        )


def _value(value: str | None, name: str) -> str:
    return f"{short(value or '')} in {name}"


def _alone_sentence(change: PhaseChange, name: str, side: int) -> str:
    """A phase that only one side has."""
    n, wire = change.count[side], change.wire_bytes[side]
    cost = (change.left_cost, change.right_cost)[side]
    takes = "" if cost is None else f"; it takes {format_seconds(cost.step_s)} by {cost.basis}"
    return f"{phase_words(change.phase)} is in {name} alone: {format_bytes(wire)} in {n:,} collectives of a step{takes}."


def _phase_sentences(change: PhaseChange, left: str, right: str) -> Iterator[str]:
    yield f"{phase_words(change.phase)}: {_bytes_sentence(change, left, right)}"
    regrouped = [place for place in change.places if place.left.kinds != place.right.kinds]
    if regrouped:
        yield f"{phase_words(change.phase)}: {_kinds_sentence(regrouped, left, right)}"
    seconds = _time_sentence(change, left, right)
    if seconds is not None:
        yield f"{phase_words(change.phase)}: {seconds}"


def _bytes_sentence(change: PhaseChange, left: str, right: str) -> str:
    ours, theirs = change.wire_bytes
    n_ours, n_theirs = change.count
    counts = (
        f"in {n_theirs:,} collectives, as {left} does"
        if n_ours == n_theirs
        else f"in {n_theirs:,} collectives, where {left} has {n_ours:,}"
    )
    if ours == theirs:
        return f"{right} sends as many bytes as {left} in a step, {format_bytes(ours)}, {counts}."
    less = "less" if theirs < ours else "more"
    share = f" ({_ratio(float(theirs / ours))})" if ours else ""
    moved = [place for place in change.places if place.wire_change][:MAX_PLACES]
    where = ", ".join(f"{_place_words(place)} {signed_bytes(place.wire_change)}" for place in moved)
    return (
        f"{right} sends {format_bytes(abs(theirs - ours))} {less} in a step{share}, "
        f"{format_bytes(theirs)} in place of {format_bytes(ours)}, {counts}: {where}."
    )


def _place_words(place: CostLocation) -> str:
    return f"{short(place.part)} over {short(place.axis)}"


def _kinds_sentence(places: Sequence[CostLocation], left: str, right: str) -> str:
    """Parts with the same change are told together."""
    changes: dict[tuple[str, str, str], list[str]] = {}
    for place in sorted(places, key=lambda place: -place.right.count):
        told = (place.axis, _kinds_words(place.left), _kinds_words(place.right))
        changes.setdefault(told, []).append(short(place.part))
    found = [
        f"for {_listed(parts)} over {short(axis)}{', each,' if len(parts) > 1 else ''} "
        f"{right} has {theirs} where {left} has {ours}"
        for (axis, ours, theirs), parts in changes.items()
    ]
    return f"{'; '.join(found[:MAX_PLACES])}."


def _kinds_words(traffic: TrafficChange) -> str:
    words = [f"{n:,} {kind.replace('_', '-')}{'' if n == 1 else 's'}" for kind, n in traffic.kinds]
    return _listed(words) or "nothing"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""


def _time_sentence(change: PhaseChange, left: str, right: str) -> str | None:
    ours, theirs = change.left_cost, change.right_cost
    if ours is None or theirs is None:
        return None
    basis = (
        f"by {ours.basis}"
        if set(ours.basis.split("+")) == set(theirs.basis.split("+"))
        else f"{left} by {ours.basis}, {right} by {theirs.basis}"
    )
    seconds = (
        f"{format_seconds(theirs.step_s)} in {right} and {format_seconds(ours.step_s)} in {left}"
    )
    parts = _part_changes(ours, theirs)
    if _is_same(ours.step_s, theirs.step_s):
        large = [n for n in parts if abs(parts[n]) > SAME_FRAC * ours.step_s][:MAX_PLACES]
        but = ", ".join(f"{short(n)} {_signed(parts[n])}" for n in large)
        return f"a step takes the same time, within {SAME_FRAC:.1%}: {seconds}{but and f', but {but}'} ({basis})."
    told = [*_time_parts(ours, theirs), *_largest_part(parts, theirs.step_s - ours.step_s)]
    why = f": {', '.join(told)}" if told else ""
    return (
        f"a step takes {seconds}, {_signed(theirs.step_s - ours.step_s)}"
        f"{_share(theirs.step_s, ours.step_s)}{why} ({basis})."
    )


def _is_same(ours_s: float, theirs_s: float) -> bool:
    return abs(theirs_s - ours_s) <= SAME_FRAC * ours_s


def _time_parts(ours: StepCostChange, theirs: StepCostChange) -> list[str]:
    """Compute, exposed communication by axis, and idle, where both sides know them and they differ."""
    found: list[str] = []
    if ours.compute_s is not None and theirs.compute_s is not None:
        found += _told("compute", theirs.compute_s - ours.compute_s)
    if ours.exposed_s is not None and theirs.exposed_s is not None:
        for axis in dict.fromkeys((*ours.exposed_by_axis_s, *theirs.exposed_by_axis_s)):
            before, after = (cost.exposed_by_axis_s.get(axis, 0.0) for cost in (ours, theirs))
            found += _told(f"exposed communication over {short(axis)}", after - before)
    if ours.idle_s is not None and theirs.idle_s is not None:
        found += _told("idle", theirs.idle_s - ours.idle_s)
    return found


def _told(name: str, change_s: float) -> Iterator[str]:
    """The change, where it is one: sums of many seconds err by less than a nanosecond."""
    if abs(change_s) >= NANOSECOND_S:
        yield f"{name} {_signed(change_s)}"


def _part_changes(ours: StepCostChange, theirs: StepCostChange) -> dict[str, float]:
    """By how many seconds each part differs, compute and exposed communication together, the largest first.

    Empty where a side does not know its parts.
    """
    if not ours.by_part_s or not theirs.by_part_s:
        return {}
    none = (0.0, 0.0)
    names = dict.fromkeys((*ours.by_part_s, *theirs.by_part_s))
    changes = {
        n: sum(theirs.by_part_s.get(n, none)) - sum(ours.by_part_s.get(n, none)) for n in names
    }
    return dict(sorted(changes.items(), key=lambda one: -abs(one[1])))


def _largest_part(changes: Mapping[str, float], whole_s: float) -> Iterator[str]:
    """The part that changes most: most of the difference where it is, else as the largest."""
    for name, change in list(changes.items())[:1]:
        if change:
            is_most = change / whole_s > MOST_FRAC
            words = "most of it in" if is_most else "the largest change of a part in"
            yield f"{words} {short(name)} ({_signed(change)})"


def _signed(seconds: float) -> str:
    return f"+{format_seconds(seconds)}" if seconds > 0 else format_seconds(seconds)


def _share(after: float, before: float) -> str:
    return f" ({_ratio(after / before)})" if before else ""


def _ratio(ratio: float) -> str:
    """`+12%`, `-0.4%`, `-99.7%`; what is many times as much says how many: `x 12`."""
    if ratio >= MANY_TIMES:
        return f"x {ratio:,.0f}" if ratio >= MANY_TIMES * 2 else f"x {ratio:.1f}"
    change = ratio - 1
    is_near = abs(change) < SMALL_FRAC or (change < 0 and ratio < SMALL_FRAC)
    return f"{change:+.1%}" if is_near else f"{change:+.0%}"


def _verdict(changes: Sequence[PhaseChange], left: str, right: str) -> str:
    """Which side is faster over the request, and which phase makes it so."""
    ours, theirs = (request_s(changes, side) for side in (0, 1))
    if ours is None or theirs is None:
        known = {0: ours, 1: theirs}
        missing = [name for side, name in enumerate((left, right)) if known[side] is None]
        return f"Which one is faster is not known: nothing timed or modelled a step of {_listed(missing)}."
    words = f"{format_seconds(theirs)} in {right} and {format_seconds(ours)} in {left}"
    if _is_same(ours, theirs):
        return f"Both take the same time for a request, within {SAME_FRAC:.1%}: {words}."
    faster, slower = (right, left) if theirs < ours else (left, right)
    shares = ", ".join(f"{phase_words(p)} {_signed(s)}" for p, s in _request_changes(changes))
    return (
        f"{faster} is faster than {slower}: a request takes {words}, "
        f"{_signed(theirs - ours)}{_share(theirs, ours)}, of which {shares}."
        f"{_doubt(changes, left, right)}"
    )


def _doubt(changes: Sequence[PhaseChange], left: str, right: str) -> str:
    """That the intervals of the requests overlap, where they do."""
    ours, theirs = (_request_bounds(changes, side) for side in (0, 1))
    if ours is None or theirs is None or not (ours[0] < theirs[1] and theirs[0] < ours[1]):
        return ""
    words = [
        f"{format_seconds(low)} to {format_seconds(high)} in {name}"
        for (low, high), name in zip((ours, theirs), (left, right), strict=True)
    ]
    return (
        f" Their intervals overlap ({', '.join(words)}): an error that both share cancels, "
        "another could turn it round."
    )


def _request_bounds(changes: Sequence[PhaseChange], side: int) -> tuple[float, float] | None:
    """Between what all steps of one side are taken to lie; null where a step says nothing."""
    low, high = 0.0, 0.0
    for change in changes:
        cost = (change.left_cost, change.right_cost)[side]
        if cost is None or cost.low_s is None or cost.high_s is None:
            return None
        low += cost.low_s * change.n_steps[side]
        high += cost.high_s * change.n_steps[side]
    return low, high


def request_s(changes: Sequence[PhaseChange], side: int) -> float | None:
    """All steps of all phases of one side; null where a phase is not known."""
    costs = [(change.left_cost, change.right_cost)[side] for change in changes]
    if not changes or None in costs:
        return None
    steps = zip(costs, changes, strict=True)
    return sum(cost.step_s * change.n_steps[side] for cost, change in steps if cost is not None)


def _request_changes(changes: Sequence[PhaseChange]) -> list[tuple[Phase | None, float]]:
    """By how many seconds all steps of each phase differ."""
    found: list[tuple[Phase | None, float]] = []
    for change in changes:
        assert change.left_cost is not None
        assert change.right_cost is not None
        ours = change.left_cost.step_s * change.n_steps[0]
        found.append((change.phase, change.right_cost.step_s * change.n_steps[1] - ours))
    return found
