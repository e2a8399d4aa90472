"""Predicted time of one experiment: the closed form of its plan with intervals, and its collective rows."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from meshscope.cost.closed_activities import bubble_s, closed_activities, wire_bytes
from meshscope.cost.closed_form import (
    NO_LIMIT,
    ClosedSteps,
    PlanForm,
    closed_steps,
    plan_batch,
    plan_form,
)
from meshscope.cost.efficiency import ClosedConstants, ModeledProgram
from meshscope.cost.expert_load import exchange_load, is_exchange
from meshscope.cost.features import PARTS, Cost
from meshscope.cost.grouped_kernels import fused_notes
from meshscope.cost.planned_collectives import hidden_behind
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, Source
from meshscope.events.step_time import PartCost, StepTime, TimeBasis, TimeEstimate
from meshscope.hardware.chips import Chip, ChipKind, precision_notes
from meshscope.interconnect import LinkConstants, collective_time, constants_of
from meshscope.interconnect.profile import ChipProfile
from meshscope.plans.experiment import Experiment
from meshscope.plans.workload import Workload
from meshscope.units import format_seconds

NOTED_FRAC = 0.01  # of a step
FLOPS = (Cost.MATMUL_FLOPS, Cost.KERNEL_FLOPS, Cost.GROUPED_FLOPS, Cost.NARROW_FLOPS)
HBM_BYTES = (
    *(Cost.WEIGHT_BYTES, Cost.CHOSEN_BYTES, Cost.CACHE_BYTES),
    *(Cost.PASS_BYTES, Cost.WIDE_BYTES, Cost.FUSED_BYTES),
)


def has_figures(chip: Chip, profile: ChipProfile | None = None) -> bool:
    """Whether the chip has the published figures, or a profile, that times need."""
    return profile is not None or (
        chip.kind is not ChipKind.CPU and chip.bf16_flops_per_s is not None
    )


def predicted_times(
    experiment: Experiment,
    profile: ChipProfile | None = None,
    *,
    program: ModeledProgram = ModeledProgram.PUBLISHED,
) -> tuple[StepTime, ...]:
    """The closed-form step time of each phase; empty for a chip without published peaks or profile."""
    if not has_figures(experiment.topology.chip, profile):
        return ()
    return tuple(_phase_time(experiment, phase, profile, program) for phase in experiment.phases)


def _phase_time(
    experiment: Experiment, phase: Phase, profile: ChipProfile | None, program: ModeledProgram
) -> StepTime:
    form = plan_form(experiment, phase, profile=profile, program=program)
    steps, seconds = evaluated(form, experiment.workload)
    time = step_time(form, steps, seconds)
    notes = (
        *precision_notes(
            experiment.workload.weight_dtype,
            experiment.workload.activation_dtype,
            experiment.topology.chip,
        ),
        *fused_notes(experiment),
        *_indexer_notes(experiment, phase),
        *_conversion_notes(steps),
        *_interval_notes(form, seconds),
    )
    return replace(time, notes=(*time.notes, *notes))


def _indexer_notes(experiment: Experiment, phase: Phase) -> Iterator[str]:
    """That the time lacks the choice of an indexer, if a prompt has more positions than it chooses."""
    n_chosen = experiment.model.attention.chosen_positions
    if phase is Phase.PREFILL and n_chosen is not None and experiment.workload.prompt > n_chosen:
        yield (
            "the prediction lacks the passes that choose positions by the indexer's scores, which grow with the "
            "square of the prompt: compile, or see docs/axes.md"
        )


def _interval_notes(form: PlanForm, step: TimeEstimate) -> Iterator[str]:
    if step.low_s is None:
        chip = form.topology.chip.name
        yield f"no interval: no published times of collectives on {chip} give the error of the model"


def _conversion_notes(steps: ClosedSteps) -> Iterator[str]:
    """How much longer experts of 4 bits take to be converted than to be read, if that binds."""
    added_s = float(steps.costs[0, :, Cost.CONVERTED_S].sum())
    if added_s > NOTED_FRAC * float(steps.step_s[0]):
        yield (
            f"converting experts of 4 bits in VMEM takes {format_seconds(added_s)} longer than reading them"
        )


def steps_of(forms: Sequence[PlanForm], workloads: Sequence[Workload]) -> ClosedSteps:
    """The step of each form for a workload."""
    sizes = {
        name: np.array([getattr(workload, name) for workload in workloads], dtype=float)
        for name in ("batch", "prompt", "output")
    }
    sizes["batch"] *= [form.n_tokens for form in forms]
    sizes["chunk"] = np.array([float(w.prefill_chunk or NO_LIMIT) for w in workloads])
    return closed_steps(plan_batch(forms), np.arange(len(forms)), **sizes)


def evaluated(form: PlanForm, workload: Workload) -> tuple[ClosedSteps, TimeEstimate]:
    """The step of a workload, and its time with bounds."""
    steps = steps_of([form], [workload])
    value_s = float(steps.step_s[0])
    bounds = bounding_forms(form, steps)
    if bounds is None:
        return steps, TimeEstimate(value_s=value_s, low_s=None, high_s=None)
    low_s, high_s = map(float, steps_of(bounds, [workload, workload]).step_s)
    spread = form.efficiency.model_spread
    low_s, high_s = min(low_s, value_s / spread), max(high_s, value_s * spread)
    return steps, TimeEstimate(value_s=value_s, low_s=low_s, high_s=high_s)


def step_time(form: PlanForm, steps: ClosedSteps, step: TimeEstimate, *, at: int = 0) -> StepTime:
    """The closed step number `at` as a StepTime; `step` is its time with an interval."""
    by_axis: dict[str, float] = defaultdict(float)
    for m, collective in enumerate(form.collectives):
        by_axis[collective.axis] += float(steps.exposed_s[at, m])
    compute_s = float(steps.compute_s[at])
    exposed_s = float(steps.exposed_s[at].sum())
    bases = {
        TimeBasis.ROOFLINE.value: compute_s,
        TimeBasis.INTERCONNECT_MODEL.value: exposed_s,
    }
    source = form.efficiency.source
    return StepTime(
        source=Source.PREDICTED,
        phase=form.phase,
        step=step,
        compute_s=compute_s,
        exposed_s=exposed_s,
        idle_s=bubble_s(form, steps, at),
        bubble_s=bubble_s(form, steps, at),
        collective_s=float(steps.collectives_s[at].sum()),
        exposed_by_axis_s=dict(by_axis),
        by_basis_s={basis: seconds for basis, seconds in bases.items() if seconds},
        parts=tuple(_parts(form, steps, at)),
        activities=closed_activities(form, steps, at),
        is_extrapolated=not all(is_measured(form, steps, at)),
        notes=(f"compute by roofline: {source}",) if source else (),
    )


def _parts(form: PlanForm, steps: ClosedSteps, at: int) -> Iterable[PartCost]:
    collective_s: dict[Part, float] = defaultdict(float)
    exposed_s: dict[Part, float] = defaultdict(float)
    sent_bytes: dict[Part, float] = defaultdict(float)
    for m, collective in enumerate(form.collectives):
        collective_s[collective.part] += float(steps.collectives_s[at, m])
        exposed_s[collective.part] += float(steps.exposed_s[at, m])
        sent_bytes[collective.part] += wire_bytes(form, steps, at, m)
    for part in dict.fromkeys((*PARTS, *collective_s)):
        index = PARTS.index(part) if part in PARTS else None
        compute_s = 0.0 if index is None else float(steps.parts_s[at, index])
        if not compute_s and not collective_s[part]:
            continue
        costs = np.zeros(len(Cost)) if index is None else steps.costs[at, index]
        yield PartCost(
            part=part.value,
            compute_s=compute_s,
            collective_s=collective_s[part],
            exposed_s=exposed_s[part],
            flops=float(costs[list(FLOPS)].sum()),
            hbm_bytes=float(costs[list(HBM_BYTES)].sum()),
            wire_bytes=sent_bytes[part],
        )


def timed_predictions(
    rows: Iterable[Collective], experiment: Experiment, profile: ChipProfile | None = None
) -> list[Collective]:
    """The predicted rows with the time of one execution.

    A collective that overlaps compute has no exposed time of its own; the step has their total.
    """
    rows = list(rows)
    chip = experiment.topology.chip
    if not rows or not has_figures(chip, profile):
        return rows
    constants = constants_of(chip) if profile is None else profile.constants
    return [_timed_row(row, experiment, constants) for row in rows]


def _timed_row(row: Collective, experiment: Experiment, constants: LinkConstants) -> Collective:
    if row.payload_bytes is None or not row.groups or row.phase is None:
        return row
    seconds = collective_time(
        row.kind if row.opcode is None else Kind(row.opcode.replace("-", "_")),
        groups=row.groups,
        payload_bytes=row.payload_bytes,
        topology=experiment.topology,
        constants=constants,
    ).seconds
    seconds *= exchange_load(experiment, row.phase) if is_exchange(row) else 1.0
    is_in_layers = row.layer is not None
    hidden = hidden_behind(experiment, row.phase, row, is_in_layers=is_in_layers)
    return replace(
        row,
        dur_s=seconds,
        exposed_s=seconds if hidden is None else None,
        time_basis=TimeBasis.INTERCONNECT_MODEL.value,
    )


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
