"""Bounds of the closed form: all constants of a plan at their best and at their worst.

Errors of several constants cancel in part, so a step whose time has many causes has a cautious interval.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshscope.cost.closed_form import ClosedSteps, PlanForm
from meshscope.cost.efficiency import ClosedConstants


def bounding_forms(
    form: PlanForm, steps: ClosedSteps, at: int = 0
) -> tuple[PlanForm, PlanForm] | None:
    """The form at its fastest and at its slowest; None for collectives without known errors."""
    if form.collectives and form.constants.spreads is None:
        return None
    spreads = tuple(_spreads(form, steps, at))
    return (
        _bounded(form, form.efficiency.fast, tuple(1 / spread for spread in spreads)),
        _bounded(form, form.efficiency.slow, spreads),
    )


def is_measured(form: PlanForm, steps: ClosedSteps, at: int) -> Iterator[bool]:
    """Whether the payload of each collective is inside a measured range."""
    for m, collective in enumerate(form.collectives):
        payload = steps.payload_bytes[at, m]
        is_inside = any(low <= payload <= high for low, high in collective.transfer.ranges)
        yield not steps.collectives_s[at, m] or is_inside


def _spreads(form: PlanForm, steps: ClosedSteps, at: int) -> Iterator[float]:
    """The factor that covers the errors of each collective."""
    spreads = form.constants.spreads
    for is_inside in is_measured(form, steps, at):
        assert spreads is not None
        yield max(spreads.short, spreads.long) if is_inside else spreads.out_of_sample


def _bounded(form: PlanForm, constants: ClosedConstants, factors: tuple[float, ...]) -> PlanForm:
    collectives = zip(form.collectives, factors, strict=True)
    return replace(
        form,
        efficiency=replace(form.efficiency, constants=constants),
        collectives=tuple(
            replace(collective, transfer=collective.transfer.scaled(factor))
            for collective, factor in collectives
        ),
    )
