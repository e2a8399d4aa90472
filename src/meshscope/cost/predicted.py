"""The predicted time of one experiment: the closed form of its plan, with intervals, for the report."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from meshscope.cost.closed_form import ClosedSteps, PlanForm, closed_steps, plan_form, stacked
from meshscope.cost.efficiency import Efficiency
from meshscope.cost.features import (
    ACTS,
    CACHE,
    KERNEL,
    MATMUL,
    PARTS,
    PREFETCHED,
    VECTOR,
    WEIGHTS,
    WIDE,
)
from meshscope.cost.rates import CYCLES_INTERVAL
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, Source
from meshscope.events.step_time import PartCost, StepTime, TimeBasis, TimeEstimate
from meshscope.interconnect import LinkConstants, collective_time, constants_of
from meshscope.interconnect.profile import ChipProfile
from meshscope.spec.experiment import Experiment
from meshscope.spec.hardware.chips import Chip, ChipKind

FLOPS, BYTES = (MATMUL, KERNEL, VECTOR), (WEIGHTS, CACHE, ACTS, WIDE, PREFETCHED)


def has_figures(chip: Chip, profile: ChipProfile | None = None) -> bool:
    """Whether published figures, or a profile, say enough of the chip for times."""
    return profile is not None or (
        chip.kind is not ChipKind.CPU and chip.bf16_flops_per_s is not None
    )


def predicted_times(
    experiment: Experiment, profile: ChipProfile | None = None
) -> tuple[StepTime, ...]:
    """The time of each phase's step in closed form; none for a chip without published peaks or profile."""
    if not has_figures(experiment.topology.chip, profile):
        return ()
    return tuple(_step(experiment, phase, profile) for phase in experiment.phases)


def _step(experiment: Experiment, phase: Phase, profile: ChipProfile | None) -> StepTime:
    form = plan_form(experiment, phase, profile=profile)
    workload = experiment.workload
    sizes = {
        name: np.array([float(getattr(workload, name))]) for name in ("batch", "prompt", "output")
    }
    found = closed_steps(stacked([form]), np.zeros(1, dtype=np.int64), **sizes)
    return step_time(form, found)


def step_time(form: PlanForm, found: ClosedSteps, at: int = 0) -> StepTime:
    """One of the closed steps as the report has it."""
    by_axis: dict[str, float] = defaultdict(float)
    for m, line in enumerate(form.lines):
        by_axis[line.axis] += float(found.exposed_s[at, m])
    compute_s = float(found.compute_s[at])
    exposed_s = float(found.exposed_s[at].sum())
    bases = {
        TimeBasis.ROOFLINE.value: compute_s,
        TimeBasis.INTERCONNECT_MODEL.value: exposed_s,
    }
    bubble_s = float(found.bubble_s[at])
    bubble_s = bubble_s if form.n_stages > 1 else 0.0
    return StepTime(
        source=Source.PREDICTED,
        phase=form.phase,
        step=_interval(form, found, at),
        compute_s=compute_s,
        exposed_s=exposed_s,
        idle_s=bubble_s,
        bubble_s=bubble_s,
        collective_s=float(found.lines_s[at].sum()),
        exposed_by_axis_s=dict(by_axis),
        by_basis_s={basis: seconds for basis, seconds in bases.items() if seconds},
        parts=tuple(_parts(form, found, at)),
        is_extrapolated=not all(_is_measured(form, found, at)),
        notes=_notes(form),
    )


def _notes(form: PlanForm) -> tuple[str, ...]:
    source = form.efficiency.source
    return (f"compute by roofline: {source}",) if source else ()


def _parts(form: PlanForm, found: ClosedSteps, at: int) -> Iterable[PartCost]:
    lines_s: dict[Part, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for m, line in enumerate(form.lines):
        n = line.n_tick * form.n_microbatches + line.n_once
        own = lines_s[line.part]
        own[0] += float(found.lines_s[at, m])
        own[1] += float(found.exposed_s[at, m])
        own[2] += float(found.payload_bytes[at, m]) * line.wire_factor * n
    for part in dict.fromkeys((*PARTS, *lines_s)):
        quantities = found.quantities[at, PARTS.index(part)] if part in PARTS else None
        compute_s = float(found.parts_s[at, PARTS.index(part)]) if part in PARTS else 0.0
        collective_s, exposed_s, wire_bytes = lines_s[part]
        if not compute_s and not collective_s:
            continue
        yield PartCost(
            part=part.value,
            compute_s=compute_s,
            collective_s=collective_s,
            exposed_s=exposed_s,
            flops=0.0 if quantities is None else float(quantities[list(FLOPS)].sum()),
            hbm_bytes=0.0 if quantities is None else float(quantities[list(BYTES)].sum()),
            wire_bytes=wire_bytes,
        )


def _is_measured(form: PlanForm, found: ClosedSteps, at: int) -> Iterable[bool]:
    """For each collective, whether its payload lies between measured ones."""
    for m, line in enumerate(form.lines):
        payload = found.payload_bytes[at, m]
        yield not found.lines_s[at, m] or any(a <= payload <= b for a, b in line.ranges)


def _interval(form: PlanForm, found: ClosedSteps, at: int) -> TimeEstimate:
    """The ends of compute and of communication, each by its own factors."""
    step_s = float(found.step_s[at])
    low, high = _compute_factors(form.efficiency)
    compute_s = float(found.step_s[at] - found.exposed_s[at].sum())
    ends = [compute_s * low, compute_s * high]
    spreads = None if form.constants is None else form.constants.spreads
    if form.lines and spreads is None:
        return TimeEstimate(value_s=step_s, low_s=None, high_s=None)
    for m, is_measured in enumerate(_is_measured(form, found, at)):
        assert spreads is not None
        spread = max(spreads.short, spreads.long) if is_measured else spreads.out_of_sample
        ends[0] += float(found.exposed_s[at, m]) / spread
        ends[1] += float(found.exposed_s[at, m]) * spread
    return TimeEstimate(value_s=step_s, low_s=ends[0], high_s=ends[1])


def _compute_factors(efficiency: Efficiency) -> tuple[float, float]:
    """Of compute: how far compiled programs lie from the closed form, and measured ones from compiled."""
    if efficiency.spread is None:
        usual, reach = efficiency.usual, efficiency.reach
        low = min(usual.matmul / reach.matmul_interval[1], usual.weight / reach.hbm_interval[1])
        high = max(usual.matmul / reach.matmul_interval[0], usual.weight / reach.hbm_interval[0])
        return min(low, 1.0), max(high, 1.0)
    return CYCLES_INTERVAL[0] / efficiency.spread, CYCLES_INTERVAL[1] * efficiency.spread


def timed_predictions(
    rows: Iterable[Collective], experiment: Experiment, profile: ChipProfile | None = None
) -> list[Collective]:
    """The predicted rows with the time of one execution; the ring of cp may hide, which a row cannot tell."""
    rows = list(rows)
    chip = experiment.topology.chip
    if not rows or not has_figures(chip, profile):
        return rows
    constants = constants_of(chip) if profile is None else profile.constants
    return [_timed(row, experiment, constants) for row in rows]


def _timed(row: Collective, experiment: Experiment, constants: LinkConstants) -> Collective:
    if row.payload_bytes is None or not row.groups:
        return row
    seconds = collective_time(
        row.kind,
        groups=row.groups,
        payload_bytes=row.payload_bytes,
        topology=experiment.topology,
        constants=constants,
    ).seconds
    is_ring = row.kind is Kind.PERMUTE and row.part is Part.ATTN
    return replace(
        row,
        dur_s=seconds,
        exposed_s=None if is_ring else seconds,
        time_basis=TimeBasis.INTERCONNECT_MODEL.value,
    )
