"""Why one side of a comparison costs more, in short sentences and as JSON."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from meshscope.analysis.comparison import (
    Explanation,
    Form,
    PhaseChange,
    PlaceChange,
    PlaceTraffic,
    StepBreakdown,
)
from meshscope.analysis.request import SAME_FRAC, are_equal, request_cost_of
from meshscope.events.enums import Source
from meshscope.reports.model import joined, short
from meshscope.reports.words import phase_label, signed_bytes, signed_seconds
from meshscope.serialize import to_plain
from meshscope.units import NANOSECOND_S, counted, format_bytes, format_seconds

MAX_PLACES = 3  # places named in one sentence
MOST_FRAC = 0.5  # fraction of a difference above which a part accounts for most of it
MANY_TIMES = 5.0  # ratio from which a factor replaces a percentage
SMALL_FRAC = 0.015  # distance from 0% and 100% below which a percentage gets a decimal


def sentences(explanation: Explanation) -> list[str]:
    """Which side is faster, differing settings, then the bytes and the time of each phase."""
    left, right = short(explanation.left.name), short(explanation.right.name)
    lines = ["The faster side is unknown: the two sides have different phases."]
    if len(explanation.shared_changes) == len(explanation.changes):
        lines = [_verdict(explanation, left, right)]
    lines += _difference_sentences(explanation, left, right)
    for change in explanation.changes:
        if change in explanation.shared_changes:
            said = (_bytes_sentence, _kinds_sentence, _time_sentence)
            texts = (sentence(change, left, right) for sentence in said)
            lines += [f"{phase_label(change.phase)}: {text}" for text in texts if text]
        else:
            name, side = (left, 0) if explanation.left.has_phase(change.phase) else (right, 1)
            cost = change.costs[side]
            seconds = f", {format_seconds(cost.step_s)} (basis {cost.basis})" if cost else ""
            lines.append(
                f"{phase_label(change.phase)}: only {name} has this phase: "
                f"{format_bytes(change.wire_bytes[side])} in "
                f"{counted(change.count[side], 'collective')} per step{seconds}."
            )
    return [*lines, *_compiler_sentences(explanation, left, right)]


def _difference_sentences(explanation: Explanation, left: str, right: str) -> Iterator[str]:
    known = [d for d in explanation.differences if d.left is not None and d.right is not None]
    if known:
        settings = (
            f"{short(d.name)} {short(d.left or '')} ({left}) and {short(d.right or '')} ({right})"
            for d in known
        )
        yield f"Different settings: {'; '.join(settings)}."
    unknown = {
        left: [short(d.name) for d in explanation.differences if d.left is None],
        right: [short(d.name) for d in explanation.differences if d.right is None],
    }
    for name, settings in unknown.items():
        if settings:
            yield f"Unknown for {name}: {joined(settings)}."
    work = [short(d.name) for d in known if d.is_work]
    if work:
        yield f"{left} and {right} do different work: they differ in {joined(work)}."
    sources = explanation.left.source, explanation.right.source
    if Source.MEASURED in sources and len(set(sources)) > 1:
        yield (
            f"{left} is {sources[0]} and {right} is {sources[1]}: "
            "the comparison mixes measured and modeled times."
        )


def _bytes_sentence(change: PhaseChange, left: str, right: str) -> str:
    before, after = change.wire_bytes
    n_before, n_after = change.count
    if before == after:
        here, there = counted(n_after, "collective"), counted(n_before, "collective")
        counts = f"each in {here}" if here == there else f"{right} in {here} and {left} in {there}"
        return f"{right} and {left} send the same bytes per step, {format_bytes(after)}, {counts}."
    direction = "less" if after < before else "more"
    share = f" ({_ratio(float(after / before))})" if before else ""
    changed = [place for place in change.places if place.wire_change][:MAX_PLACES]
    places = ", ".join(
        f"{short(one.part)} over {short(one.axis)} {signed_bytes(one.wire_change)}"
        for one in changed
    )
    return (
        f"{right} sends {format_bytes(abs(after - before))} {direction} per step{share}, "
        f"{format_bytes(after)} in {counted(n_after, 'collective')} instead of "
        f"{format_bytes(before)} in {n_before:,}: {places}."
    )


def _kinds_sentence(change: PhaseChange, left: str, right: str) -> str | None:
    parts_of: dict[tuple[str, str, str], list[str]] = {}
    for place in sorted(change.places, key=lambda place: -place.right.count):
        if place.left.kinds != place.right.kinds:
            key = (place.axis, _kinds(place.left), _kinds(place.right))
            parts_of.setdefault(key, []).append(short(place.part))
    clauses = [
        f"{joined(parts)} over {short(axis)}{', each' if len(parts) > 1 else ''}: "
        f"{after} in {right}, {before} in {left}"
        for (axis, before, after), parts in parts_of.items()
    ]
    return f"{'; '.join(clauses[:MAX_PLACES])}." if clauses else None


def _kinds(traffic: PlaceTraffic) -> str:
    return joined([counted(n, kind.replace("_", "-")) for kind, n in traffic.kinds]) or "none"


def _time_sentence(change: PhaseChange, left: str, right: str) -> str | None:
    before, after = change.costs
    if before is None or after is None:
        return None
    basis = f"basis {before.basis}"
    if set(before.basis.split("+")) != set(after.basis.split("+")):
        basis = f"basis of {left} {before.basis}, of {right} {after.basis}"
    parts = _part_changes(before, after)
    if _is_same(before.step_s, after.step_s):
        large = [n for n in parts if abs(parts[n]) > SAME_FRAC * before.step_s][:MAX_PLACES]
        changes = ", ".join(f"{short(n)} {signed_seconds(parts[n])}" for n in large)
        tail = f"; {changes}" if changes else ""
        seconds = _both_seconds(before.step_s, after.step_s, left, right)
        return f"the step time is the same within {SAME_FRAC:.1%}, {seconds}{tail} ({basis})."
    change_s = after.step_s - before.step_s
    reasons = list(_component_changes(before, after))
    for name, part_s in list(parts.items())[:1]:
        if part_s:
            label = "mostly" if part_s / change_s > MOST_FRAC else "largest change"
            reasons.append(f"{label} in {short(name)} ({signed_seconds(part_s)})")
    tail = f"; {', '.join(reasons)}" if reasons else ""
    return f"{_change(before.step_s, after.step_s, left, right, 'step')}{tail} ({basis})."


def _both_seconds(left_s: float, right_s: float, left: str, right: str) -> str:
    return f"{format_seconds(right_s)} in {right} and {format_seconds(left_s)} in {left}"


def _change(left_s: float, right_s: float, left: str, right: str, unit: str) -> str:
    """`B takes 3 s per step and A 5 s: -2 s (-40%)`."""
    ratio = f" ({_ratio(right_s / left_s)})" if left_s else ""
    after, before, change = format_seconds(right_s), format_seconds(left_s), right_s - left_s
    return f"{right} takes {after} per {unit} and {left} {before}: {signed_seconds(change)}{ratio}"


def _is_same(left_s: float, right_s: float) -> bool:
    return abs(right_s - left_s) <= SAME_FRAC * left_s


def _component_changes(before: StepBreakdown, after: StepBreakdown) -> Iterator[str]:
    changes: dict[str, float] = {}
    if before.compute_s is not None and after.compute_s is not None:
        changes["compute"] = after.compute_s - before.compute_s
    if before.exposed_s is not None and after.exposed_s is not None:
        for axis in dict.fromkeys((*before.exposed_by_axis_s, *after.exposed_by_axis_s)):
            left_s, right_s = (cost.exposed_by_axis_s.get(axis, 0.0) for cost in (before, after))
            changes[f"exposed communication over {short(axis)}"] = right_s - left_s
    if before.idle_s is not None and after.idle_s is not None:
        changes["idle"] = after.idle_s - before.idle_s
    for name, change_s in changes.items():
        if abs(change_s) >= NANOSECOND_S:  # the rounding error of the sums
            yield f"{name} {signed_seconds(change_s)}"


def _part_changes(before: StepBreakdown, after: StepBreakdown) -> dict[str, float]:
    """Seconds of each part, the largest change first; empty if a side does not know its parts."""
    sides = [{n: sum(s) for n, s in side.by_part_s.items()} for side in (before, after)]
    names = dict.fromkeys((*sides[0], *sides[1])) if all(sides) else ()
    changes = {n: sides[1].get(n, 0.0) - sides[0].get(n, 0.0) for n in names}
    return dict(sorted(changes.items(), key=lambda item: -abs(item[1])))


def _ratio(ratio: float) -> str:
    """`+12%`, `-0.4%`, `-99.7%`; from MANY_TIMES on a factor, `x 12`."""
    if ratio >= MANY_TIMES:
        return f"x {ratio:,.0f}" if ratio >= MANY_TIMES * 2 else f"x {ratio:.1f}"
    change = ratio - 1
    is_near = abs(change) < SMALL_FRAC or (change < 0 and ratio < SMALL_FRAC)
    return f"{change:+.1%}" if is_near else f"{change:+.0%}"


def _verdict(explanation: Explanation, left: str, right: str) -> str:
    left_s, right_s = (explanation.request_s(side) for side in (0, 1))
    sides = (explanation.left, explanation.right)
    requests = [side.run.manifest.experiment.workload for side in sides]
    if requests.count(None) == 1:
        name = (left, right)[requests.index(None)]
        return f"The faster side is unknown: the request of {name} is; compare the steps."
    if left_s is None or right_s is None:
        names = [name for name, s in ((left, left_s), (right, right_s)) if s is None]
        return f"The faster side is unknown: no step of {joined(names)} is timed or modeled."
    if _is_same(left_s, right_s):
        seconds = _both_seconds(left_s, right_s, left, right)
        return f"A request takes the same time within {SAME_FRAC:.1%}: {seconds}."
    faster, slower = (right, left) if right_s < left_s else (left, right)
    costs = [request_cost_of(side.run, side.source) for side in sides]
    change = _change(left_s, right_s, left, right, "request")
    spent = [(change.phase, *change.request_s) for change in explanation.changes]
    phases = ", ".join(
        f"{phase_label(phase)} {signed_seconds((after or 0.0) - (before or 0.0))}"
        for phase, before, after in spent
    )
    if costs[0] is not None and costs[1] is not None and are_equal(costs[0], costs[1]):
        return f"{left} and {right} are equal within the errors that they do not share: {change}; {phases}."
    return f"{faster} is faster than {slower}: {change}; {phases}."


def _compiler_sentences(explanation: Explanation, left: str, right: str) -> Iterator[str]:
    if explanation.forms is None:
        return
    (before, after), (temp_before, temp_after) = _compiled_bytes(explanation).values()
    if before is not None and before == after:
        yield f"Memory: {format_bytes(after)} on a device, the same in {left} and {right}."
    elif before is not None and after is not None:
        head = f"Memory: {format_bytes(after)} on a device in {right} and {format_bytes(before)} in"
        tail = f"{left}, {signed_bytes(after - before)}"
        if temp_before is not None and temp_after is not None:
            tail += f"; temporaries {signed_bytes(temp_after - temp_before)}"
        yield f"{head} {tail}."
    phases = dict.fromkeys(form.phase for form in explanation.forms)
    for phase in phases:
        forms = [(f, b - a) for f, (a, b) in explanation.forms.items() if f.phase is phase]
        fewer = joined([_counted(form, -n) for form, n in forms if n < 0])
        more = joined([_counted(form, n) for form, n in forms if n > 0])
        said = f"{more or fewer} only in {right if more else left}."
        if more and fewer:
            said = f"{more} in {right} run as {fewer} in {left}."
        yield f"{phase_label(phase)}: {said}"
    if not phases:
        yield "Collectives run alike: same operations, synchronous or not, same algorithms."


def _compiled_bytes(explanation: Explanation) -> dict[str, list[int | None]]:
    sides = explanation.left.run, explanation.right.run
    memories = [run.memory.get(Source.COMPILED) for run in sides]
    names = "total_bytes", "temp_bytes"
    return {n: [None if one is None else getattr(one, n) for one in memories] for n in names}


def _counted(form: Form, n: int) -> str:
    kind = form.kind.replace("_", "-")
    over = "" if form.axis is None else f" over {short(form.axis)}"
    words = [] if form.opcode == kind else [f"as {form.opcode}"]
    words += ["asynchronous"] if form.is_async else []
    words.append(form.algorithm or "algorithm not stated")
    return f"{counted(n, kind)}{over} ({', '.join(words)})"


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    """The sentences, the differing settings, and the bytes and seconds of each phase."""
    sides = {"left": explanation.left, "right": explanation.right}

    def of_sides(values: Iterable[Any]) -> dict[str, Any]:
        return dict(zip(sides, values, strict=True))

    def place(change: PlaceChange) -> dict[str, Any]:
        values = asdict(change)
        for traffic in (values["left"], values["right"]):
            traffic["wire_bytes"] = float(traffic["wire_bytes"])
            traffic["kinds"] = dict(traffic["kinds"])
        return {**values, "wire_bytes_change": float(change.wire_change)}

    def time(change: PhaseChange) -> dict[str, Any] | None:
        left, right = change.costs
        if left is None or right is None:
            return None
        document: dict[str, Any] = {"step_s_change": right.step_s - left.step_s}
        for name, cost in of_sides(map(to_plain, change.costs)).items():
            parts = cost.pop("by_part_s").items()
            by_part = {part: {"compute_s": c, "exposed_s": e} for part, (c, e) in parts}
            document[name] = {**cost, "by_part": by_part}
        return document

    compiler: dict[str, Any] | None = None
    if explanation.forms is not None:
        compiler = {n: of_sides(both) for n, both in _compiled_bytes(explanation).items()}
        compiler["forms"] = [
            {**to_plain(form), **of_sides(n)} for form, n in explanation.forms.items()
        ]
    return {
        "sentences": sentences(explanation),
        "asked": [asdict(difference) for difference in explanation.differences],
        "request_s": {side: explanation.request_s(at) for at, side in enumerate(sides)},
        "compiler": compiler,
        "phases": {
            "unknown" if change.phase is None else change.phase.value: {
                "is_in": {name: side.has_phase(change.phase) for name, side in sides.items()},
                "places": list(map(place, change.places)),
                "time": time(change),
            }
            for change in explanation.changes
        },
    }
