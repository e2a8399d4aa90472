"""The closed form against published and compiled steps, as tables for docs/evidence/times.md."""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from closed_form_grid import compiled_steps
from published_steps import Half, PublishedStep, closed_time, published_steps

from meshscope.cost.predicted import predicted_times
from meshscope.cost.rates import ModeledProgram
from meshscope.events.enums import REQUEST_PHASES
from meshscope.units import format_seconds

TARGET_ERROR = 0.15
OWN = ModeledProgram.OWN


def summary() -> None:
    """Prints the distribution of |predicted / published - 1|, by half and phase."""
    print_row = sys.stdout.write
    print_row("| half | phase | steps | within 15 % | median | worst |\n")
    print_row("| --- | --- | --- | --- | --- | --- |\n")
    steps = published_steps()
    for half in (Half.FITTED, Half.JUDGING):
        for phase in REQUEST_PHASES:
            errors = _errors([s for s in steps if s.half is half and s.phase is phase])
            if not errors:
                continue
            n_within = sum(error <= TARGET_ERROR for error in errors)
            figures = f"{n_within} | {median(errors):.1%} | {max(errors):.0%}"
            print_row(f"| {half} | {phase} | {len(errors)} | {figures} |\n")


def compiled_summary() -> None:
    """Prints the steps of the grid beside the closed form of meshscope's own program."""
    print_row = sys.stdout.write
    print_row("| model | slice, plan | batch x prompt | phase | compiled | predicted | |\n")
    print_row("| --- | --- | --- | --- | --- | --- | --- |\n")
    for compiled in compiled_steps():
        step = compiled.step
        times = {time.phase: time for time in predicted_times(step.experiment, program=OWN)}
        predicted_s = times[compiled.phase].step.value_s
        cells = (
            step.model.rpartition("/")[2]
            + ("" if step.layers is None else f", {step.layers} layers"),
            f"`{step.topology}`, `{step.plan}`",
            f"{step.batch} x {step.prompt}" + (", 8-bit" if step.weight_dtype != "bf16" else ""),
            compiled.phase.value,
            format_seconds(compiled.compiled_s),
            format_seconds(predicted_s),
            f"{predicted_s / compiled.compiled_s - 1:+.0%}",
        )
        print_row(f"| {' | '.join(cells)} |\n")


def _errors(steps: Sequence[PublishedStep]) -> list[float]:
    times = [closed_time(step).value_s for step in steps]
    return [abs(step.error_of(t)) for step, t in zip(steps, times, strict=True)]
