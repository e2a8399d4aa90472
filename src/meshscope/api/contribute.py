"""`meshscope contribute`: what a run measured on a TPU would change, and the files of a pull request."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from meshscope.analysis.capture import FOLDER, Capture, ContributedRun, capture_of, contributed_text
from meshscope.api.console import note, print_json
from meshscope.api.options import JsonOption, Option
from meshscope.backends.calibrate.fit import fit_constants
from meshscope.errors import MeshscopeError, RunError, SpecError
from meshscope.hardware.topology import Topology
from meshscope.interconnect import LinkConstants, collective_time, constants_of
from meshscope.interconnect.samples import TimedCollective
from meshscope.reports.export.files import check_new, new_file
from meshscope.reports.plain import short
from meshscope.reports.words import counted
from meshscope.serialize import to_plain
from meshscope.store.folder import safe_name
from meshscope.store.read import read_run
from meshscope.store.run import RunRecord
from meshscope.units import format_bytes, format_seconds

MIN_POINTS = 4  # of which every second one is held out


@dataclass(frozen=True, slots=True, kw_only=True)
class PointError:
    """A measured collective beside the modeled time of the present constants, with its interval."""

    timed: TimedCollective
    modeled_s: float
    low_s: float | None
    high_s: float | None

    @property
    def is_within(self) -> bool:
        """Whether the measured time is in the interval."""
        return (
            self.low_s is not None
            and self.high_s is not None
            and self.low_s <= self.timed.seconds <= self.high_s
        )


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
class Contribution:
    """A measured run as a contribution; `refit` is None if its points are too few, for `no_refit`."""

    run: ContributedRun
    capture: Capture
    before: LinkConstants
    errors: tuple[PointError, ...]
    refit: Refit | None
    no_refit: str | None

    def as_dict(self) -> dict[str, Any]:
        """The document of `--json`."""
        rates = self.before.rates
        return {
            "run": to_plain(self.run),
            "findings": list(self.run.findings),
            "left_out": dict(self.capture.left_out),
            "collectives": [
                {
                    "axis": e.timed.axis,
                    "kind": e.timed.kind.value,
                    "payload_bytes": e.timed.payload_bytes,
                    "measured_s": e.timed.seconds,
                    "modeled_s": e.modeled_s,
                    "low_s": e.low_s,
                    "high_s": e.high_s,
                }
                for e in self.errors
            ],
            "constants": {"latency_s": rates.latency_s, "efficiency": rates.efficiency},
            "refit": None if self.refit is None else to_plain(self.refit),
            "no_refit": self.no_refit,
        }


def contribution_of(path: Path, *, accept_findings: bool = False) -> Contribution:
    """The contribution of the run in a folder.

    Raises:
        RunError: The folder is no run measured on a TPU slice, holds no usable time, or its capture has
            faults that are not accepted.
    """
    record = read_run(path)
    capture = capture_of(record)
    if capture.findings and not accept_findings:
        listed = "\n".join(f"  {finding}" for finding in capture.findings)
        raise RunError(
            f"the capture of '{path}' has faults:\n{listed}\n"
            "Capture again, or state them in the contribution with --accept-findings."
        )
    if not capture.points and not capture.steps:
        reasons = ", ".join(f"{n} x {reason}" for reason, n in capture.left_out) or "no collectives"
        raise RunError(
            f"'{path}' holds no usable time: {reasons}. Measure with 'meshscope run', which times steps."
        )
    run = _contributed(record, capture)
    return _judged(run, capture)


def write_contribution(
    contribution: Contribution, text: str, out: Path, *, force: bool
) -> tuple[Path, Path]:
    """Writes the data into `tools/contributed` below `out`, and `text` as the pull request's description."""
    name = contribution.run.name
    data, description = out / FOLDER / f"{name}.json", out / f"contribution-{name}.md"
    for path in (data, description):
        check_new(path, force=force)
    data.parent.mkdir(parents=True, exist_ok=True)
    for path, content in (
        (data, contributed_text(contribution.run)),
        (description, text),
    ):
        with new_file(path, force=force) as partial:
            partial.write_text(content, encoding="utf-8")
    return data, description


def _contributed(record: RunRecord, capture: Capture) -> ContributedRun:
    """The conditions and times of the run, without paths or the words of its command."""
    manifest, experiment = record.manifest, record.manifest.experiment
    workload, program = experiment.workload, experiment.program
    model = experiment.model_name
    parts = (model or "program", capture.topology.name, str(experiment.plan), manifest.created[:10])
    try:
        return ContributedRun(
            name=safe_name("-".join(part.rpartition("/")[2] for part in parts)),
            model=model,
            topology=capture.topology.name,
            plan=str(experiment.plan),
            batch=None if workload is None else workload.batch,
            prompt=None if workload is None else workload.prompt,
            output=None if workload is None else workload.output,
            frontend=None if program is None else program.frontend.value,
            created=manifest.created,
            versions=dict(manifest.versions),
            points=capture.points,
            steps=capture.steps,
            findings=capture.findings,
        )
    except SpecError as error:
        raise RunError(f"'{record.path}': {error} Remeasure the run.") from error


def _judged(run: ContributedRun, capture: Capture) -> Contribution:
    topology, timed = run.slice, run.timed
    refit, no_refit = None, None
    try:
        refit = _refit(timed, topology)
    except MeshscopeError as error:
        no_refit = str(error)
    return Contribution(
        run=run,
        capture=capture,
        before=constants_of(topology.chip),
        errors=tuple(_error(one, topology) for one in timed),
        refit=refit,
        no_refit=no_refit,
    )


def _error(timed: TimedCollective, topology: Topology) -> PointError:
    time = collective_time(
        timed.kind, groups=timed.groups, payload_bytes=timed.payload_bytes, topology=topology
    )
    return PointError(timed=timed, modeled_s=time.seconds, low_s=time.low_s, high_s=time.high_s)


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
    return Refit(
        latency_s=after.rates.latency_s,
        efficiency=after.rates.efficiency,
        n_fitted=len(fitted),
        n_held_out=len(held_out),
        error_before_frac=_median_error(held_out, topology, None),
        error_after_frac=_median_error(held_out, topology, after),
    )


def _median_error(
    points: Sequence[TimedCollective], topology: Topology, constants: LinkConstants | None
) -> float:
    errors = [
        abs(
            log(
                collective_time(
                    point.kind,
                    groups=point.groups,
                    payload_bytes=point.payload_bytes,
                    topology=topology,
                    constants=constants,
                ).seconds
                / point.seconds
            )
        )
        for point in points
    ]
    return exp(median(errors)) - 1


def contribution_text(contribution: Contribution) -> str:
    """The description of the pull request."""
    return "\n".join(_text_lines(contribution)) + "\n"


def _text_lines(contribution: Contribution) -> Iterator[str]:
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
    yield from _refit_lines(contribution, contribution.refit)


def _refit_lines(contribution: Contribution, refit: Refit) -> Iterator[str]:
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


def command(
    run: Annotated[
        Path, Option(help="Folder of a run measured on a TPU.", metavar="RUN", is_argument=True)
    ],
    *,
    out: Annotated[
        Path | None,
        Option(
            help="Clone of meshscope, or any folder; without it, nothing is written.", metavar="DIR"
        ),
    ] = None,
    accept_findings: Annotated[
        bool, Option(help="Contribute despite faults of the capture.")
    ] = False,
    force: Annotated[bool, Option(help="Replace earlier files.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a run measured on a TPU, and write its accuracy entry.

    Refuses captures with faults. Prints the measured collectives and steps beside the modeled ones, and the
    constants of the chip before and after a fit. Files hold times, versions and conditions, not the command.
    """
    contribution = contribution_of(run, accept_findings=accept_findings)
    text = contribution_text(contribution)
    if out is not None:
        for path in write_contribution(contribution, text, out, force=force):
            note(f"wrote {path}")
    if as_json:
        print_json(contribution.as_dict())
        return
    sys.stdout.write(text)
