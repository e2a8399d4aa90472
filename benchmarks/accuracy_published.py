"""Every published step on a real TPU beside the predicted and the compiled time, for docs/evidence/accuracy.md.

    python benchmarks/accuracy_published.py compile FOLDER [WORD]

compiles the steps whose id contains the word, and keeps their HLO in the folder, so that another call only
simulates it. benchmarks/accuracy_published.csv stores the times with the libtpu version. The steps, their sources
and their halves are in tools/published_steps.csv.
"""

import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from statistics import median

from meshscope.backends.compile.compile import compile_step_time
from meshscope.events.step_time import TimeEstimate
from meshscope.plans.dispatch import DispatchForm
from meshscope.units import format_seconds

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from engine_grid import published_s as engine_s
from published_steps import Half, PublishedStep, closed_time, published_steps

CSV = Path(__file__).with_suffix(".csv")
JUDGED = (Half.FITTED, Half.JUDGING)
SHOWN = (*JUDGED, Half.OLD)
FIELDS = ("id", "step_s", "low_s", "high_s", "libtpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedStep:
    """A published step with its predicted time, and its compiled time if it was compiled."""

    published: PublishedStep
    predicted: TimeEstimate
    compiled: TimeEstimate | None

    @property
    def error(self) -> float:
        """Predicted over published, minus 1; over the nearer end of a published range."""
        return self.published.error_of(self.predicted.value_s)

    @property
    def is_inside(self) -> bool:
        """Whether the published time, or a part of its range, is in the predicted interval."""
        return self.published.is_inside(self.predicted)

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Chip, phase, precision of the weights, and kind of the model."""
        return self.published.kind


def compiled_steps() -> dict[str, TimeEstimate]:
    """The stored compiled times by step."""
    if not CSV.exists():
        return {}
    with CSV.open() as file:
        return {row["id"]: _estimate(row) for row in csv.DictReader(file)}


def _estimate(row: dict[str, str]) -> TimeEstimate:
    value_s, low_s, high_s = (float(row[name]) for name in FIELDS[1:4])
    return TimeEstimate(value_s=value_s, low_s=low_s, high_s=high_s)


@cache
def compared_steps() -> tuple[ComparedStep, ...]:
    """All published steps with both times."""
    compiled = compiled_steps()
    return tuple(
        ComparedStep(published=step, predicted=closed_time(step), compiled=compiled.get(step.id))
        for step in published_steps()
    )


def compile_steps(folder: str, word: str = "") -> None:
    """Compiles the steps whose id contains `word` and stores their times; no program has a fused kernel."""
    for step in published_steps():
        is_fused = step.experiment.program.dispatch is DispatchForm.FUSED
        if word in step.id and not is_fused:
            _store(step.id, _compiled_time(step, Path(folder) / step.id))


def _compiled_time(step: PublishedStep, folder: Path) -> TimeEstimate:
    folder.mkdir(parents=True, exist_ok=True)
    return compile_step_time(step.experiment, step.phase, folder, progress=lambda *_: None).step


def _store(name: str, time: TimeEstimate) -> None:
    rows: list[dict[str, str]] = []
    if CSV.exists():
        with CSV.open() as file:
            rows = [row for row in csv.DictReader(file) if row["id"] != name]
    figures = (time.value_s, time.lower_s, time.upper_s)
    values = (name, *(f"{figure:.6g}" for figure in figures), version("libtpu"))
    rows.append(dict(zip(FIELDS, values, strict=True)))
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: row["id"]))


def groups() -> None:
    """Prints the errors by chip, phase, precision and kind of model, for each half."""
    steps = [s for s in compared_steps() if s.published.half is not Half.BOUND]
    head = (
        "chip",
        "phase",
        "weights",
        "models",
        "half",
        "steps",
        "median",
        "worst",
        "inside",
        "half-width",
    )
    lines: list[Sequence[str]] = []
    for group in dict.fromkeys(step.group for step in steps):
        for half in SHOWN:
            chosen = [s for s in steps if s.group == group and s.published.half is half]
            if chosen:
                lines.append((*group, half.value, *_distribution(chosen)))
    for half in SHOWN:
        chosen = [s for s in steps if s.published.half is half]
        lines.append(("all", "", "", "", half.value, *_distribution(chosen)))
    _print_table(head, lines)


def _distribution(steps: Sequence[ComparedStep]) -> tuple[str, ...]:
    worst = max((step.error for step in steps), key=abs)
    typical = median(abs(step.error) for step in steps)
    n_inside = sum(step.is_inside for step in steps)
    width = median(
        (s.predicted.upper_s - s.predicted.lower_s) / 2 / s.predicted.value_s for s in steps
    )
    return (
        str(len(steps)),
        f"{typical:.0%}",
        f"{worst:+.0%}",
        f"{n_inside} of {len(steps)}",
        f"{width:.0%}",
    )


def steps() -> None:
    """Prints one row per published step."""
    head = ("step", "slice, plan", "weights", "published", "predicted", "", "interval", "compiled")
    _print_table((*head, "", "engine", "", "half"), map(_line, compared_steps()))


def _line(step: ComparedStep) -> Sequence[str]:
    published = step.published
    experiment, workload = published.experiment, published.experiment.workload
    name = experiment.model.name.rpartition("/")[2]
    tokens = f"{workload.batch} x {workload.prompt}"
    is_fused = experiment.program.dispatch is DispatchForm.FUSED
    fused = ", fused experts" if is_fused else ""
    return (
        f"{name} {published.phase.value}, {tokens}",
        f"`{experiment.topology.name}`, `{experiment.plan}`{fused}",
        workload.weight_dtype,
        _published(published),
        format_seconds(step.predicted.value_s),
        f"{step.error:+.0%}",
        f"{format_seconds(step.predicted.low_s)} to {format_seconds(step.predicted.high_s)}",
        *_compared(published, None if step.compiled is None else step.compiled.value_s),
        *_compared(published, engine_s(published)),
        published.half.value,
    )


def _compared(step: PublishedStep, seconds: float | None) -> tuple[str, str]:
    """A time and its error, or nothing."""
    if seconds is None:
        return "", ""
    return format_seconds(seconds), f"{step.error_of(seconds):+.0%}"


def _published(step: PublishedStep) -> str:
    """The published time of the device, as far as it is known."""
    if step.half is Half.BOUND:
        return f"at most {format_seconds(step.device_s)}"
    if step.most_device_s > step.device_s:
        return f"{format_seconds(step.device_s)} to {format_seconds(step.most_device_s)}"
    return format_seconds(step.device_s)


def ranked_pairs() -> list[tuple[ComparedStep, ComparedStep]]:
    """Pairs of steps of one model, chip and phase, the one that was published as faster first.

    Upper bounds, and the step whose cache was not full, take no part.
    """
    steps = [s for s in compared_steps() if s.published.half in JUDGED]
    pairs = combinations(sorted(steps, key=lambda step: step.published.device_s), 2)
    return [(a, b) for a, b in pairs if _subject(a) == _subject(b)]


def _subject(step: ComparedStep) -> tuple[str, str, str]:
    published = step.published
    return published.experiment.model.name, published.chip, published.phase.value


def is_ranked(fast: ComparedStep, slow: ComparedStep) -> bool:
    """Whether the published order is predicted."""
    return fast.predicted.value_s < slow.predicted.value_s


def rankings() -> None:
    """Prints the pairs in the published order, by model and phase, and the comparisons of plans one by one."""
    pairs = ranked_pairs()
    lines: list[Sequence[str]] = []
    for subject in dict.fromkeys(_subject(fast) for fast, _ in pairs):
        chosen = [pair for pair in pairs if _subject(pair[0]) == subject]
        n_ranked = sum(is_ranked(*pair) for pair in chosen)
        n_judged = sum(any(s.published.half is not Half.FITTED for s in pair) for pair in chosen)
        cells = (subject[0].rpartition("/")[2], *subject[1:], str(len(chosen)), str(n_judged))
        lines.append((*cells, str(n_ranked)))
    head = ("model", "chip", "phase", "pairs", "with a step not fitted", "in the published order")
    _print_table(head, lines)
    sys.stdout.write("\n")
    head = ("plans, faster first", "step", "slower by, published", "predicted", "compiled")
    _print_table(head, (_comparison(*pair) for pair in pairs if _compares_plans(*pair)))


def _compares_plans(fast: ComparedStep, slow: ComparedStep) -> bool:
    a, b = fast.published.experiment, slow.published.experiment
    return a.plan != b.plan and a.workload == b.workload


def _comparison(fast: ComparedStep, slow: ComparedStep) -> Sequence[str]:
    published, workload = fast.published, fast.published.experiment.workload
    model = published.experiment.model.name.rpartition("/")[2]
    compiled = (
        ""
        if fast.compiled is None or slow.compiled is None
        else _ratio(slow.compiled.value_s, fast.compiled.value_s)
    )
    return (
        f"`{published.experiment.plan}`, `{slow.published.experiment.plan}`",
        f"{model} {published.phase.value}, {workload.batch} x {workload.prompt}",
        _ratio(slow.published.device_s, published.device_s),
        _ratio(slow.predicted.value_s, fast.predicted.value_s),
        compiled,
    )


def _ratio(slow_s: float, fast_s: float) -> str:
    return f"{slow_s / fast_s:.2f} x"


def sources() -> None:
    """Prints the sources, with the steps of each."""
    by_source: dict[str, int] = {}
    for step in compared_steps():
        by_source[step.published.source] = by_source.get(step.published.source, 0) + 1
    for source, n in by_source.items():
        sys.stdout.write(f"- {source} ({n})\n")


def _print_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    for cells in (head, ["---"] * len(head), *lines):
        sys.stdout.write(f"| {' | '.join(cells)} |\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["compile"]:
        compile_steps(*sys.argv[2:4])
    groups()
    steps()
