"""The headline of the page and the sentences below it."""

from collections.abc import Iterator, Sequence

from meshscope.analysis.comparison import runs_on_cpu
from meshscope.analysis.totals import step_totals
from meshscope.events.enums import Phase
from meshscope.units import format_bytes, format_seconds
from meshscope.views.charts.cost import COLLECTIVES, EXPOSED, MEMORY, STAGES, CostBar
from meshscope.views.html.page_run import PageRun
from meshscope.views.live import SHARED_CORES
from meshscope.views.model import joined
from meshscope.views.plain import short
from meshscope.views.words import counted, phase_label

SMALL_FRAC = 0.02  # of a step; smaller shares are called almost none
LARGE_FRAC = 0.4  # of a step; larger parts of the model are named
SAME_FRAC = 0.005  # two times that differ less are called the same


def headline(runs: Sequence[PageRun]) -> list[str]:
    """One or more sentences, the most important first."""
    if len(runs) == 1:
        return [*_run_sentences(runs[0]), *_memory_sentence(runs[0]), *_cpu_sentence(runs)]
    names = (f"{run.letter} is {run.label}." for run in runs)
    return [*_fastest(runs), *names, *_cpu_sentence(runs)]


def _run_sentences(run: PageRun) -> Iterator[str]:
    costs = run.strongest_costs
    for bar in costs.values():
        yield f"{_step_sentence(bar)}{_costliest_part(run, bar)}"
    if not costs:
        yield from _bytes_sentences(run)


def _step_sentence(bar: CostBar) -> str:
    """The time of a step, its exposed communication, and its waiting."""
    segments = dict(bar.segments)
    step = f"A {bar.phase} step takes {format_seconds(bar.step_s)}"
    if COLLECTIVES in segments:
        return f"{step}; {_amount(segments[COLLECTIVES], bar)} of it is spent in collectives."
    waits = [
        f"{_share(seconds, bar)} waits for {reason}"
        for seconds, reason in (
            (segments.get(MEMORY, 0.0), "memory"),
            (segments.get(STAGES, 0.0), "other pipeline stages"),
        )
        if seconds > SMALL_FRAC * bar.step_s
    ]
    return f"{step}; {joined([_exposed(segments, bar), *waits])}."


def _exposed(segments: dict[str, float], bar: CostBar) -> str:
    """`3 ms (30%) of it is exposed communication over tp`."""
    by_axis = {n.removeprefix(EXPOSED): s for n, s in segments.items() if n.startswith(EXPOSED)}
    total_s = sum(by_axis.values())
    if total_s <= SMALL_FRAC * bar.step_s:
        return f"{'almost none' if total_s else 'none'} of it is exposed communication"
    axes = joined([short(axis, 40) for axis in sorted(by_axis, key=lambda a: -by_axis[a])])
    return f"{_amount(total_s, bar)} of it is exposed communication over {axes}"


def _costliest_part(run: PageRun, bar: CostBar) -> str:
    """The most expensive part of the model in a modeled step, if it dominates the step."""
    times = (t for t in run.inputs.times if (t.source, t.phase) == (bar.source, bar.phase))
    parts = [(part.compute_s + part.exposed_s, part.part) for time in times for part in time.parts]
    seconds, part = max(parts, key=lambda pair: pair[0], default=(0.0, None))
    if part is None or seconds < LARGE_FRAC * bar.step_s:
        return ""
    return f" The most expensive part is {short(part, 40)}: {_amount(seconds, bar)}."


def _amount(seconds: float, bar: CostBar) -> str:
    return f"{format_seconds(seconds)} ({_share(seconds, bar)})"


def _share(seconds: float, bar: CostBar) -> str:
    return f"{seconds / bar.step_s:.0%}" if bar.step_s else "0%"


def _bytes_sentences(run: PageRun) -> Iterator[str]:
    """The bytes that a device sends, for runs without times."""
    totals = step_totals(run.run.rows_of(run.source))
    if not totals:
        yield "No communication: the run has no collectives."
    for phase, total in totals.items():
        sent, count = format_bytes(total.wire_bytes), counted(total.count, "collective")
        yield f"Each device sends {sent} in {count} per {phase_label(phase)} step."
    if totals:
        yield "The step time is unknown: nothing was measured or modeled."


def _memory_sentence(run: PageRun) -> Iterator[str]:
    memory = run.run.memory.get(run.source)
    if memory is None or memory.total_bytes is None or not memory.hbm_bytes:
        return
    share = f"{memory.total_bytes / memory.hbm_bytes:.0%} of its HBM"
    if memory.fits:
        yield f"It fits: each device needs {share}."
    elif memory.fits is False:
        yield f"It does not fit: each device would need {share}."


def _cpu_sentence(runs: Sequence[PageRun]) -> Iterator[str]:
    """What times on virtual devices mean."""
    if any(run.costs and runs_on_cpu(run.run) for run in runs):
        yield f"{SHARED_CORES[0].upper()}{SHARED_CORES[1:]}."


def _fastest(runs: Sequence[PageRun]) -> Iterator[str]:
    """The run with the shortest step of each phase."""
    for phase in Phase:
        steps = [(r, c[phase].step_s) for r in runs if phase in (c := r.strongest_costs)]
        if len(steps) > 1:
            yield _fastest_sentence(steps, phase)
    sources = {bar.source for run in runs for bar in run.strongest_costs.values()}
    if len(sources) > 1:
        yield f"Times come from different sources ({', '.join(sorted(sources))}), whose errors differ."
    if not any(run.costs for run in runs):
        yield "No run has a step time; the report compares their traffic."


def _fastest_sentence(steps: Sequence[tuple[PageRun, float]], phase: Phase) -> str:
    (best, best_s), (worst, worst_s) = (f(steps, key=lambda step: step[1]) for f in (min, max))
    if worst_s - best_s <= SAME_FRAC * worst_s:
        return f"All runs take the same time for a {phase} step ({format_seconds(best_s)})."
    return (
        f"{_name(best, phase)} has the fastest {phase} step ({format_seconds(best_s)}); "
        f"{_name(worst, phase)} takes {worst_s / best_s:.2f}x as long ({format_seconds(worst_s)})."
    )


def _name(run: PageRun, phase: Phase) -> str:
    """The plan of a run, its letter, and the source of its time."""
    return f"{run.plan} ({run.letter}, {run.strongest_costs[phase].source})"
