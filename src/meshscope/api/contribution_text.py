"""A contribution as Markdown that reads as text, too: what it would change, its errors and its capture."""

from collections.abc import Iterator, Sequence

from meshscope.api.contribute import Contribution, Refit
from meshscope.reports.plain import short
from meshscope.reports.words import counted
from meshscope.units import format_bytes, format_seconds


def contribution_text(contribution: Contribution) -> str:
    """The description of the pull request."""
    return "\n".join(_lines(contribution)) + "\n"


def _lines(contribution: Contribution) -> Iterator[str]:
    run = contribution.run
    model = "a program" if run.model is None else short(run.model)
    yield f"# Measured: {model} on {run.topology}, {run.plan}"
    yield ""
    yield from _answer(contribution)
    yield from _conditions(contribution)
    if contribution.errors:
        yield from ("", "## Collectives", "")
        yield from _table(
            ("collective", "axis", "payload", "measured", "modeled", "error", "in the interval"),
            [
                (
                    e.timed.kind.value,
                    e.timed.axis,
                    format_bytes(e.timed.payload_bytes),
                    format_seconds(e.timed.seconds),
                    format_seconds(e.modeled_s),
                    f"{e.modeled_s / e.timed.seconds - 1:+.0%}",
                    "yes" if e.is_within else "no",
                )
                for e in contribution.errors
            ],
        )
    if run.steps:
        yield from ("", "## Steps", "")
        yield from _table(
            ("phase", "steps", "measured", "predicted", "range"),
            [
                (
                    step.phase.value,
                    str(step.n_steps),
                    format_seconds(step.seconds),
                    _seconds(step.predicted_s),
                    f"{_seconds(step.predicted_low_s)} to {_seconds(step.predicted_high_s)}",
                )
                for step in run.steps
            ],
        )


def _answer(contribution: Contribution) -> Iterator[str]:
    errors = contribution.errors
    chip = contribution.run.slice.chip.name
    n_within = sum(error.is_within for error in errors)
    collectives = counted(len(errors), "collective")
    steps = counted(len(contribution.run.steps), "step")
    yield f"- adds {collectives} and {steps} of {chip} to the accuracy page"
    if errors:
        yield f"- {n_within} of {len(errors)} collectives are in the modeled interval"
    if contribution.refit is None:
        yield f"- constants: no fit from this run alone; {contribution.no_refit}"
        return
    yield from _refit(contribution, contribution.refit)


def _refit(contribution: Contribution, refit: Refit) -> Iterator[str]:
    rates = contribution.before.rates
    yield (
        f"- constants of this run alone: latency {format_seconds(rates.latency_s)} to "
        f"{format_seconds(refit.latency_s)}, efficiency {rates.efficiency:.0%} to {refit.efficiency:.0%}"
    )
    yield (
        f"- median error of {refit.n_held_out} collectives held out of that fit: "
        f"{refit.error_before_frac:.0%} to {refit.error_after_frac:.0%}"
    )
    yield "- `make constants accuracy` fits all contributed and published points together"


def _conditions(contribution: Contribution) -> Iterator[str]:
    run = contribution.run
    workload = f"batch {run.batch}, prompt {run.prompt}, output {run.output}"
    versions = ", ".join(
        f"{short(name)} {short(text)}" for name, text in sorted(run.versions.items())
    )
    yield from ("", "## Capture", "")
    yield f"- {workload if run.batch is not None else 'unknown workload'}; {run.frontend or 'unknown'} program"
    yield f"- {versions or 'unknown versions'}"
    for finding in run.findings:
        yield f"- accepted fault: {short(finding, 300)}"
    for reason, n in contribution.capture.left_out:
        yield f"- left out: {n} x {reason}"


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else format_seconds(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for cells in (head, ["-" * width for width in widths], *rows):
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        yield f"| {' | '.join(padded)} |"
