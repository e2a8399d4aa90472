"""Why A beats B, in a few plain sentences with figures, and the same figures for --json."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshscope.metrics.explanation import (
    PhaseChange,
    Place,
    StepCost,
    Traffic,
    cost_of,
    explained,
    measured_cost,
)
from meshscope.report.document import run_latency
from meshscope.report.plain import short
from meshscope.report.words import phase_words, signed_bytes
from meshscope.rundir.run import Run
from meshscope.table.kinds import Phase, Source
from meshscope.units import format_bytes, format_seconds

SAME_FRAC = 0.005  # times that differ by less are called the same
MAX_PLACES = 3  # that are named in a sentence


def phase_changes(left: tuple[Run, Source], right: tuple[Run, Source]) -> tuple[PhaseChange, ...]:
    """What differs between the sides, phase by phase."""
    return explained(
        left[0].rows_of(left[1]),
        right[0].rows_of(right[1]),
        left_costs=_costs(*left),
        right_costs=_costs(*right),
    )


def _costs(run: Run, source: Source) -> dict[Phase, StepCost]:
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


def sentences(changes: Sequence[PhaseChange], *, left: str, right: str) -> list[str]:
    """Each phase's bytes and time in a sentence or two, then which side is faster and why."""
    left, right = short(left), short(right)
    found = [text for change in changes for text in _phase_sentences(change, left, right)]
    return [*found, _verdict(changes, left, right)]


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
    share = f" ({float(abs(theirs - ours) / ours):.0%})" if ours else ""
    moved = [place for place in change.places if place.wire_change][:MAX_PLACES]
    where = ", ".join(f"{_place_words(place)} {signed_bytes(place.wire_change)}" for place in moved)
    return (
        f"{right} sends {format_bytes(abs(theirs - ours))}{share} {less} in a step, "
        f"{format_bytes(theirs)} in place of {format_bytes(ours)}, {counts}: {where}."
    )


def _place_words(place: Place) -> str:
    return f"{short(place.part)} over {short(place.axis)}"


def _kinds_sentence(places: Sequence[Place], left: str, right: str) -> str:
    """Parts with the same change are told together."""
    changes: dict[tuple[str, str, str], list[str]] = {}
    for place in sorted(places, key=lambda place: -place.right.count):
        told = (place.axis, _kinds_words(place.left), _kinds_words(place.right))
        changes.setdefault(told, []).append(short(place.part))
    found = [
        f"for {_listed(parts)} over {short(axis)} {right} has {theirs} where {left} has {ours}"
        for (axis, ours, theirs), parts in changes.items()
    ]
    return f"{'; '.join(found[:MAX_PLACES])}."


def _kinds_words(traffic: Traffic) -> str:
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
    head = f"a step takes {format_seconds(theirs.step_s)} in {right} and {format_seconds(ours.step_s)} in {left}"
    parts = _time_parts(ours, theirs)
    why = f": {', '.join(parts)}" if parts else ""
    return f"{head}, {_signed(theirs.step_s - ours.step_s)}{_share(theirs.step_s, ours.step_s)}{why} ({basis})."


def _time_parts(ours: StepCost, theirs: StepCost) -> list[str]:
    """Compute, exposed communication by axis, and idle, where they are known and differ."""
    found: list[str] = []
    if ours.compute_s is not None and theirs.compute_s is not None:
        found.append(f"compute {_signed(theirs.compute_s - ours.compute_s)}")
    for axis in dict.fromkeys((*ours.exposed_by_axis_s, *theirs.exposed_by_axis_s)):
        before, after = (cost.exposed_by_axis_s.get(axis, 0.0) for cost in (ours, theirs))
        if before != after:
            found.append(f"exposed communication over {short(axis)} {_signed(after - before)}")
    if ours.idle_s is not None and theirs.idle_s is not None and ours.idle_s != theirs.idle_s:
        found.append(f"idle {_signed(theirs.idle_s - ours.idle_s)}")
    moved = _largest_part(ours, theirs)
    return [*found, *([f"most of it in {moved}"] if moved else [])]


def _largest_part(ours: StepCost, theirs: StepCost) -> str | None:
    """The part with the largest change, with compute and exposed communication together."""
    names = dict.fromkeys((*ours.by_part_s, *theirs.by_part_s))
    none = (0.0, 0.0)
    changes = {
        n: sum(theirs.by_part_s.get(n, none)) - sum(ours.by_part_s.get(n, none)) for n in names
    }
    if not changes or not any(changes.values()):
        return None
    name = max(changes, key=lambda n: abs(changes[n]))
    return f"{short(name)} ({_signed(changes[name])})"


def _signed(seconds: float) -> str:
    return f"+{format_seconds(seconds)}" if seconds > 0 else format_seconds(seconds)


def _share(after: float, before: float) -> str:
    return f" ({(after - before) / before:+.0%})" if before else ""


def _verdict(changes: Sequence[PhaseChange], left: str, right: str) -> str:
    """Which side is faster over the request, and which phase makes it so."""
    ours, theirs = (_request_s(changes, side) for side in (0, 1))
    if ours is None or theirs is None:
        known = {0: ours, 1: theirs}
        missing = [name for side, name in enumerate((left, right)) if known[side] is None]
        return f"Which one is faster is not known: nothing timed or modelled a step of {_listed(missing)}."
    words = f"{format_seconds(theirs)} in {right} and {format_seconds(ours)} in {left}"
    if abs(theirs - ours) <= SAME_FRAC * ours:
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


def _request_s(changes: Sequence[PhaseChange], side: int) -> float | None:
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


def explanation_document(
    changes: Sequence[PhaseChange], *, left: str, right: str
) -> dict[str, Any]:
    """The sentences, and by phase the bytes of each place and the seconds of a step, on both sides."""
    ours, theirs = (_request_s(changes, side) for side in (0, 1))
    return {
        "sentences": sentences(changes, left=left, right=right),
        "request_s": {"left": ours, "right": theirs},
        "phases": {
            "unknown" if change.phase is None else change.phase.value: {
                "places": [_place_document(place) for place in change.places],
                "time": _time_document(change),
            }
            for change in changes
        },
    }


def _place_document(place: Place) -> dict[str, Any]:
    return {
        "axis": place.axis,
        "part": place.part,
        "left": _traffic_document(place.left),
        "right": _traffic_document(place.right),
        "wire_bytes_change": float(place.wire_change),
    }


def _traffic_document(traffic: Traffic) -> dict[str, Any]:
    return {
        "count": traffic.count,
        "payload_bytes": traffic.payload_bytes,
        "wire_bytes": float(traffic.wire_bytes),
        "n_unsized": traffic.n_unsized,
        "kinds": dict(traffic.kinds),
    }


def _time_document(change: PhaseChange) -> dict[str, Any] | None:
    """Null where a side has no time of its step."""
    if change.left_cost is None or change.right_cost is None:
        return None
    return {
        "step_s_change": change.step_change_s,
        "left": _cost_document(change.left_cost),
        "right": _cost_document(change.right_cost),
    }


def _cost_document(cost: StepCost) -> dict[str, Any]:
    parts: Mapping[str, tuple[float, float]] = cost.by_part_s
    return {
        "step_s": cost.step_s,
        "low_s": cost.low_s,
        "high_s": cost.high_s,
        "compute_s": cost.compute_s,
        "exposed_s": cost.exposed_s,
        "idle_s": cost.idle_s,
        "exposed_by_axis_s": dict(cost.exposed_by_axis_s),
        "by_part": {n: {"compute_s": c, "exposed_s": e} for n, (c, e) in parts.items()},
        "basis": cost.basis,
    }
