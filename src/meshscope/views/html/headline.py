"""What the figures say, in plain sentences: the first is the headline of the page."""

from collections.abc import Iterator, Sequence

from meshscope.analysis.comparison import runs_on_cpu
from meshscope.analysis.totals import step_totals
from meshscope.events.enums import Phase
from meshscope.units import format_bytes, format_seconds
from meshscope.views.charts.cost import COLLECTIVES, EXPOSED, MEMORY, STAGES, CostBar
from meshscope.views.html.blocks import shown
from meshscope.views.html.side import PageRun
from meshscope.views.live import SHARED_CORES
from meshscope.views.words import count_words, phase_words

SMALL_FRAC = 0.02  # of a step, which is called next to nothing
LARGE_FRAC = 0.4  # of a step, from which on a part of the model is named
SAME_FRAC = 0.005  # by which two times may differ and be called the same


def headline(runs: Sequence[PageRun]) -> list[str]:
    """One or more sentences, the most important first."""
    if len(runs) == 1:
        return [*_run_sentences(runs[0]), *_memory_sentence(runs[0]), *_cpu_sentence(runs)]
    return [*_fastest(runs), *(f"{r.letter} is {r.short}." for r in runs), *_cpu_sentence(runs)]


def strongest_costs(run: PageRun) -> dict[Phase, CostBar]:
    """For each phase the step of the strongest source that has one."""
    return {bar.phase: bar for bar in run.costs}  # weaker sources come first


def _run_sentences(run: PageRun) -> Iterator[str]:
    costs = strongest_costs(run)
    for bar in costs.values():
        yield f"{_step_sentence(bar)}{_dearest(run, bar)}"
    if not costs:
        yield from _bytes_sentences(run)


def _step_sentence(bar: CostBar) -> str:
    """What share of a step nothing hides, and where the rest goes."""
    step = format_seconds(bar.step_s)
    segments = dict(bar.segments)
    if COLLECTIVES in segments:
        spent = segments[COLLECTIVES]
        return f"Of {step} {_a_step(bar)}, {format_seconds(spent)} ({_share(spent, bar)}) is spent in collectives."
    exposed = {name: s for name, s in segments.items() if name.startswith(EXPOSED)}
    total = sum(exposed.values())
    waits = segments.get(MEMORY, 0.0), segments.get(STAGES, 0.0)
    tails = [
        f"{_share(seconds, bar)} of the step is {words}"
        for seconds, words in zip(waits, (MEMORY, "waiting for other stages"), strict=True)
        if seconds > SMALL_FRAC * bar.step_s
    ]
    tail = f"; {' and '.join(tails)}" if tails else ""
    if total <= SMALL_FRAC * bar.step_s:
        head = "Next to nothing" if total else "Nothing"
        return f"{head} of the {step} of {_a_step(bar)} is communication that compute does not hide{tail}."
    axes = " and ".join(
        shown(name.removeprefix(EXPOSED), 40) for name in sorted(exposed, key=lambda n: -exposed[n])
    )
    return (
        f"Of {step} {_a_step(bar)}, {format_seconds(total)} ({_share(total, bar)}) is communication "
        f"over {axes} that nothing hides{tail}."
    )


def _dearest(run: PageRun, bar: CostBar) -> str:
    """The part of the model that takes most of a modelled step, where one stands out."""
    times = (t for t in run.subject.times if (t.source, t.phase) == (bar.source, bar.phase))
    parts = [(part.compute_s + part.exposed_s, part.part) for time in times for part in time.parts]
    seconds, part = max(parts, key=lambda found: found[0], default=(0.0, None))
    if part is None or seconds < LARGE_FRAC * bar.step_s:
        return ""
    return f" The dearest part is {shown(part, 40)}: {format_seconds(seconds)} ({_share(seconds, bar)})."


def _a_step(bar: CostBar) -> str:
    return f"a {bar.phase} step"


def _share(seconds: float, bar: CostBar) -> str:
    return f"{seconds / bar.step_s:.0%}" if bar.step_s else "no share"


def _bytes_sentences(run: PageRun) -> Iterator[str]:
    """Where no time is known: what a device sends."""
    totals = step_totals(run.run.rows_of(run.source))
    if not totals:
        yield "Nothing travels between devices: the run has no collectives."
    for phase, total in totals.items():
        yield (
            f"In a step of {phase_words(phase)} each device sends {format_bytes(total.wire_bytes)} "
            f"in {count_words(total.count)}."
        )
    if totals:
        yield "How long that takes is not known: nothing was timed and no time was modelled."


def _memory_sentence(run: PageRun) -> Iterator[str]:
    memory = run.run.memory.get(run.source)
    if memory is None or memory.total_bytes is None or not memory.hbm_bytes:
        return
    share = f"{memory.total_bytes / memory.hbm_bytes:.0%} of the HBM"
    if memory.fits:
        yield f"It fits: a device needs {share}."
    elif memory.fits is False:
        yield f"It does not fit: a device would need {share}."


def _cpu_sentence(runs: Sequence[PageRun]) -> Iterator[str]:
    """What times on virtual devices are worth."""
    if any(run.costs and runs_on_cpu(run.run) for run in runs):
        yield f"{SHARED_CORES[0].upper()}{SHARED_CORES[1:]}."


def _fastest(runs: Sequence[PageRun]) -> Iterator[str]:
    """Which run has the shortest step, phase by phase."""
    for phase in Phase:
        found = [(r, c[phase].step_s) for r in runs if phase in (c := strongest_costs(r))]
        if len(found) < 2:
            continue
        (best, best_s), (worst, worst_s) = (f(found, key=lambda f: f[1]) for f in (min, max))
        if worst_s - best_s <= SAME_FRAC * worst_s:
            yield f"A {phase} step takes the same time in all runs, {format_seconds(best_s)}."
        else:
            yield (
                f"{_called(best, phase)} has the fastest {phase} step, {format_seconds(best_s)}; "
                f"{_called(worst, phase)} takes {worst_s / best_s:.2f} times as long, {format_seconds(worst_s)}."
            )
    sources = {bar.source for r in runs for bar in strongest_costs(r).values()}
    if len(sources) > 1:
        yield f"Times are {' and '.join(sorted(sources))}: they do not err alike."
    if not any(r.costs for r in runs):
        yield "No time is known of these runs: here is what they send."


def _called(run: PageRun, phase: Phase) -> str:
    """A run by its plan and letter, and where its time comes from."""
    return f"{shown(run.run.manifest.experiment.plan or 'the plan', 40)} ({run.letter}, {strongest_costs(run)[phase].source})"
