"""`meshscope contribute`: what a run measured on a TPU would change, and the files of a pull request."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import median

from meshscope.analysis.samples import (
    FOLDER,
    ContributedRun,
    TimedCollective,
    captured_run,
    contributed_text,
)
from meshscope.api.console import note, print_json
from meshscope.api.options import JsonOutput, option
from meshscope.backends.calibrate.fit import fit_constants
from meshscope.errors import MeshscopeError, RunError, SpecError
from meshscope.events.enums import Kind
from meshscope.hardware.interconnect import LinkConstants, collective_time, constants_of
from meshscope.hardware.interconnect.lines import ModeledTime
from meshscope.hardware.topology import Topology
from meshscope.reports.export.files import check_new, new_file
from meshscope.reports.model import short
from meshscope.reports.words import counted
from meshscope.serialize import picked, to_plain
from meshscope.store.read import read_run
from meshscope.units import format_bytes, format_seconds

MIN_POINTS = 4  # every second one is held out


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """Constants of the chip fitted to the measured collectives alone, and both errors on the held-out half.

    Errors are medians of |modeled / measured - 1|.
    """

    latency_s: float
    efficiency: float
    n_fitted: int
    n_held_out: int
    error_before_frac: float
    error_after_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeledCollective:
    """A measured collective as the present constants model it."""

    axis: str
    kind: Kind
    payload_bytes: int
    measured_s: float
    modeled_s: float
    low_s: float | None
    high_s: float | None

    @property
    def is_within(self) -> bool:
        """Whether the measured time is in the modeled interval."""
        if self.low_s is None or self.high_s is None:
            return False
        return self.low_s <= self.measured_s <= self.high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """A measured run as a contribution, with the fields of `--json`.

    `constants` are the present ones of the chip. `refit` is None if the points are too few, for `no_refit`.
    """

    run: ContributedRun
    findings: tuple[str, ...]
    left_out: Mapping[str, int]
    collectives: tuple[ModeledCollective, ...]
    constants: Mapping[str, float]
    refit: Refit | None
    no_refit: str | None


def contribution_of(path: Path, *, accept_findings: bool = False) -> Contribution:
    """The contribution of the run in a folder.

    Raises:
        RunError: The folder is no run measured on a TPU slice, holds no usable time, or its capture has
            faults that are not accepted.
    """
    run, left_out = captured_run(read_run(path))
    if run.findings and not accept_findings:
        listed = "\n".join(f"  {finding}" for finding in run.findings)
        raise RunError(
            f"the capture of '{path}' has faults:\n{listed}\n"
            "Capture again, or state them in the contribution with --accept-findings."
        )
    if not run.points and not run.steps:
        reasons = ", ".join(f"{n} x {reason}" for reason, n in left_out.items()) or "no collectives"
        raise RunError(
            f"'{path}' holds no usable time: {reasons}. Measure with 'meshscope run', which times steps."
        )
    refit, no_refit = None, None
    try:
        refit = _refit(run.timed, run.slice)
    except MeshscopeError as error:
        no_refit = str(error)
    times = ((timed, _modeled(timed, run.slice)) for timed in run.timed)
    return Contribution(
        run=run,
        findings=run.findings,
        left_out=left_out,
        collectives=tuple(
            ModeledCollective(
                **picked(timed, "axis", "kind", "payload_bytes"),
                **picked(time, "low_s", "high_s"),
                measured_s=timed.seconds,
                modeled_s=time.seconds,
            )
            for timed, time in times
        ),
        constants=picked(constants_of(run.slice.chip).rates, "latency_s", "efficiency"),
        refit=refit,
        no_refit=no_refit,
    )


def _modeled(
    timed: TimedCollective, topology: Topology, constants: LinkConstants | None = None
) -> ModeledTime:
    return collective_time(
        timed.kind,
        groups=timed.groups,
        payload_bytes=timed.payload_bytes,
        topology=topology,
        constants=constants,
    )


def _refit(timed: Sequence[TimedCollective], topology: Topology) -> Refit:
    """The constants of every second point, judged by the others; SpecError for too few points."""
    if len(timed) < MIN_POINTS:
        raise SpecError(
            f"{len(timed)} of the {MIN_POINTS} timed collectives that a fit and its check need; too few. "
            f"Measure at least {MIN_POINTS}, with 'meshscope calibrate' or other batches."
        )
    ordered = sorted(timed, key=lambda one: (one.payload_bytes, one.kind, one.axis))
    # The largest is fitted: without a large payload there is no bandwidth.
    fitted, held_out = ordered[-1::-2], ordered[-2::-2]
    after = fit_constants(fitted, topology, source="contributed").constants
    before_frac, after_frac = (
        exp(median(abs(log(_modeled(p, topology, of).seconds / p.seconds)) for p in held_out)) - 1
        for of in (None, after)
    )
    return Refit(
        **picked(after.rates, "latency_s", "efficiency"),
        n_fitted=len(fitted),
        n_held_out=len(held_out),
        error_before_frac=before_frac,
        error_after_frac=after_frac,
    )


def contribution_lines(contribution: Contribution) -> Iterator[str]:
    """The description of the pull request."""
    run, refit = contribution.run, contribution.refit
    collectives = contribution.collectives
    model = "a program" if run.model is None else short(run.model)
    yield from (f"# Measured: {model} on {run.topology}, {run.plan}", "")
    added = f"{counted(len(collectives), 'collective')} and {counted(len(run.steps), 'step')}"
    yield f"- adds {added} of {run.slice.chip.name} to the accuracy page"
    if collectives:
        n_within = sum(one.is_within for one in collectives)
        yield f"- {n_within} of {len(collectives)} collectives are in the modeled interval"
    if refit is None:
        yield f"- constants: no fit from this run alone; {contribution.no_refit}"
    else:
        latency, after = (
            format_seconds(s) for s in (contribution.constants["latency_s"], refit.latency_s)
        )
        efficiency = f"{contribution.constants['efficiency']:.0%} to {refit.efficiency:.0%}"
        yield f"- constants of this run alone: latency {latency} to {after}, efficiency {efficiency}"
        yield (
            f"- median error of {refit.n_held_out} collectives held out of that fit: "
            f"{refit.error_before_frac:.0%} to {refit.error_after_frac:.0%}"
        )
        yield "- `make constants accuracy` fits all contributed and published points together"
    workload = f"batch {run.batch}, prompt {run.prompt}, output {run.output}"
    versions = ", ".join(f"{short(name)} {short(v)}" for name, v in sorted(run.versions.items()))
    yield from ("", "## Capture", "")
    yield f"- {'unknown workload' if run.batch is None else workload}; {run.frontend or 'unknown'} program"
    yield f"- {versions or 'unknown versions'}"
    yield from (f"- accepted fault: {short(finding, 300)}" for finding in run.findings)
    yield from (f"- left out: {n} x {reason}" for reason, n in contribution.left_out.items())
    if collectives:
        yield from ("", "## Collectives", "")
        head = "collective, axis, payload, measured, modeled, error, in the interval"
        rows = [
            (
                *(one.kind.value, one.axis, format_bytes(one.payload_bytes)),
                *(format_seconds(one.measured_s), format_seconds(one.modeled_s)),
                *(f"{one.modeled_s / one.measured_s - 1:+.0%}", "yes" if one.is_within else "no"),
            )
            for one in collectives
        ]
        yield from _table(head.split(", "), rows)
    if run.steps:
        yield from ("", "## Steps", "")
        rows = []
        for step in run.steps:
            predicted, low, high = (
                "unknown" if value is None else format_seconds(value)
                for value in (step.predicted_s, step.predicted_low_s, step.predicted_high_s)
            )
            measured = format_seconds(step.seconds)
            rows.append((step.phase, str(step.n_steps), measured, predicted, f"{low} to {high}"))
        yield from _table(("phase", "steps", "measured", "predicted", "range"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for cells in (head, ["-" * width for width in widths], *rows):
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        yield f"| {' | '.join(padded)} |"


def command(
    *,
    run: Path = option("RUN: Folder of a run measured on a TPU.", kw_only=False),
    out: Path | None = option(
        "DIR: Clone of meshscope, or any folder; without it, nothing is written.", default=None
    ),
    accept_findings: bool = option("Contribute despite faults of the capture.", default=False),
    force: bool = option("Replace earlier files.", default=False),
    output: JsonOutput,
) -> None:
    """Check a run measured on a TPU, and write its accuracy entry.

    Refuses captures with faults. Prints the measured collectives and steps beside the modeled ones, and the
    constants of the chip before and after a fit. Files hold times, versions and conditions, not the command.
    """
    contribution = contribution_of(run, accept_findings=accept_findings)
    text, name = "\n".join([*contribution_lines(contribution), ""]), contribution.run.name
    if out is not None:
        files = {
            out / FOLDER / f"{name}.json": contributed_text(contribution.run),
            out / f"contribution-{name}.md": text,
        }
        for path in files:
            check_new(path, force=force)
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path, force=force) as partial:
                partial.write_text(content, encoding="utf-8")
        for path in files:
            note(f"wrote {path}")
    if output.as_json:
        print_json(to_plain(contribution))
    else:
        sys.stdout.write(text)
