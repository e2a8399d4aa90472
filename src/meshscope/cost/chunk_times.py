"""Time of a prefill in chunks, from its programs: the sum over all chunks.

Chunks of whole sequences run the same program. The chunks of a prompt attend to ever more positions;
their times are interpolated between those of the first and the last chunk.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from meshscope.cost.steps import TimedStep
from meshscope.events.step_time import (
    NO_TIME,
    Activity,
    ActivityTime,
    PartCost,
    StepTime,
    TimeEstimate,
    UnestimatedWork,
)
from meshscope.plans.chunks import PrefillChunks


def prefill_time(chunk_times: Sequence[StepTime], chunks: PrefillChunks) -> StepTime:
    """The time of all chunks; `chunk_times` are those of the first and last chunk of a prompt.

    There is one if all chunks run the same program.
    """
    if chunks.count == 1:
        return chunk_times[0]
    weight = chunks.count / len(chunk_times)
    total = _weighted_sum(chunk_times, weight)
    return replace(total, notes=(*_notes(len(chunk_times), chunks), *total.notes))


def summed_time(times: Sequence[StepTime]) -> StepTime:
    """The time of a step whose programs run one after the other."""
    notes = dict.fromkeys(note for time in times for note in time.notes)
    return times[0] if len(times) == 1 else replace(_weighted_sum(times, 1.0), notes=tuple(notes))


def placed_chunks(steps: Sequence[TimedStep], chunks: PrefillChunks) -> tuple[TimedStep, ...]:
    """The programs at their times on the timeline of the whole prefill.

    In a prompt of more than two chunks, the first program stands for the first half of them and the
    last program for the second.
    """
    n_last = chunks.n_position_chunks // 2 if len(steps) > 1 else 0
    counts = (chunks.n_position_chunks - n_last, n_last)[: len(steps)]
    prompt_s = sum(n * step.time.step.value_s for n, step in zip(counts, steps, strict=True))
    placed: list[TimedStep] = []
    start_s = 0.0
    for n, step in zip(counts, steps, strict=True):
        chunk_s = step.time.step.value_s
        loops = ((chunks.n_sequence_chunks, prompt_s), (n, chunk_s))
        repeats = tuple((times, period_s) for times, period_s in loops if times > 1)
        placed.append(replace(step, start_s=start_s, repeats=repeats))
        start_s += n * chunk_s
    return tuple(placed)


def _notes(n_programs: int, chunks: PrefillChunks) -> Iterator[str]:
    sequences = "sequence" if chunks.n_sequences == 1 else "sequences"
    yield (
        f"prefill is the sum of {chunks.count} chunks of {chunks.n_sequences} {sequences} x "
        f"{chunks.n_positions} tokens"
    )
    if n_programs > 1 and chunks.n_position_chunks > n_programs:
        yield (
            f"{n_programs} of the {chunks.n_position_chunks} programs of a prompt were compiled, the first "
            "and the last; the others are interpolated"
        )


def _weighted_sum(times: Sequence[StepTime], weight: float) -> StepTime:
    """Every duration, cost and count added up and multiplied; notes and facts of the last."""
    last = times[-1]
    values = {
        field.name: _sum_of([getattr(time, field.name) for time in times], weight)
        for field in fields(last)
    }
    summed = {name: value for name, value in values.items() if value is not None}
    summed["parts"] = _parts(times, weight)
    summed["activities"] = _activities(times, weight)
    summed["is_extrapolated"] = any(time.is_extrapolated for time in times)
    summed["unestimated"] = _unestimated(times, weight)
    return replace(last, **summed)


def _sum_of(values: Sequence[Any], weight: float) -> Any:
    """The weighted sum of numbers, estimates or mappings of numbers; None for anything else."""
    first = values[0]
    if isinstance(first, TimeEstimate):
        return sum(values, start=NO_TIME) * weight
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: weight * sum(value.get(name, 0.0) for value in values) for name in names}
    if type(first) in {int, float}:
        return weight * sum(values)
    return None


def _unestimated(times: Sequence[StepTime], weight: float) -> tuple[UnestimatedWork, ...]:
    """The work without a compiler estimate by opcode, the longest first."""
    summed: dict[tuple[str, bool], UnestimatedWork] = {}
    for work in (work for time in times for work in time.unestimated):
        key = (work.opcode, work.is_known)
        if key in summed:
            known = summed[key]
            work = replace(  # noqa: PLW2901  the sum so far
                work, count=known.count + work.count, seconds=known.seconds + work.seconds
            )
        summed[key] = work
    scaled = [
        replace(work, count=round(work.count * weight), seconds=work.seconds * weight)
        for work in summed.values()
    ]
    return tuple(sorted(scaled, key=lambda work: -work.seconds.value_s))


def _parts(times: Sequence[StepTime], weight: float) -> tuple[PartCost, ...]:
    """The costs of each part, the costliest first."""
    by_part: dict[str | None, list[PartCost]] = {}
    for time in times:
        for cost in time.parts:
            by_part.setdefault(cost.part, []).append(cost)
    names = [field.name for field in fields(PartCost) if field.name != "part"]
    summed = [
        PartCost(
            part=part,
            **{name: _known_sum([getattr(c, name) for c in costs], weight) for name in names},
        )
        for part, costs in by_part.items()
    ]
    return tuple(sorted(summed, key=lambda cost: -(cost.compute_s + cost.exposed_s)))


def _activities(times: Sequence[StepTime], weight: float) -> tuple[ActivityTime, ...]:
    """The seconds and the work of each activity, the longest first."""
    by_kind: dict[tuple[Activity, str | None], list[ActivityTime]] = {}
    for spent in (spent for time in times for spent in time.activities):
        by_kind.setdefault((spent.activity, spent.axis), []).append(spent)
    names = [field.name for field in fields(ActivityTime) if field.name not in {"activity", "axis"}]
    summed = [
        ActivityTime(
            activity=activity,
            axis=axis,
            **{name: weight * sum(getattr(s, name) for s in same) for name in names},
        )
        for (activity, axis), same in by_kind.items()
    ]
    return tuple(sorted(summed, key=lambda spent: -spent.seconds))


def _known_sum(values: Sequence[float | None], weight: float) -> Any:
    """The weighted sum; None if a value is unknown."""
    known = [value for value in values if value is not None]
    return weight * sum(known) if len(known) == len(values) else None
