"""Predicted time of one experiment: the closed form of its plan with intervals, and its collective rows.

Also the chunk of `--prefill-chunk auto`: the longest that fits, and under cp only if faster than whole prompts.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from meshscope.cost.closed_form import (
    NO_LIMIT,
    OTHER_COSTS,
    ClosedSteps,
    PlanForm,
    closed_steps,
    cost_s,
    plan_batch,
    plan_form,
)
from meshscope.cost.collective_times import hidden_behind
from meshscope.cost.collectives import predict
from meshscope.cost.expert_load import exchange_load, is_exchange
from meshscope.cost.features import PARTS, Cost, served_experts
from meshscope.cost.memory import predicted_memory
from meshscope.cost.rates import ClosedConstants, ModeledProgram
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, Source, wire_factor
from meshscope.events.step_time import (
    NO_INTERVAL,
    Activity,
    ActivityTime,
    PartCost,
    StepTime,
    TimeBasis,
    TimeEstimate,
)
from meshscope.hardware.chips import Chip, ChipKind, precision_notes
from meshscope.hardware.interconnect.constants import constants_of
from meshscope.hardware.interconnect.lines import collective_time
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.plans.dispatch import FUSED_BLOCK_TOKENS, DispatchForm
from meshscope.plans.experiment import Experiment
from meshscope.plans.memory import Memory
from meshscope.plans.program import Engine
from meshscope.plans.weights import expert_weights
from meshscope.plans.workload import Workload
from meshscope.units import format_seconds

NOTED_FRAC = 0.01  # of a step
OTHER_PROGRAM_FRAC = 0.1  # least difference at which another program's time is noted
PRODUCTS = [Cost.MATMUL_FLOPS, Cost.NARROW_FLOPS]
KERNEL_FLOPS = [Cost.KERNEL_FLOPS, Cost.PAGED_FLOPS, Cost.GROUPED_FLOPS]
FLOPS = [*PRODUCTS, *KERNEL_FLOPS]
READS = [Cost.CHOSEN_BYTES, Cost.CACHE_BYTES]  # of kernels
HBM_BYTES = [*READS, Cost.WEIGHT_BYTES, Cost.PASS_BYTES, Cost.FUSED_BYTES]
KERNELS = [
    *KERNEL_FLOPS,
    Cost.PAGED_S,
    Cost.KERNEL_S,
    Cost.CONVERTED_S,
    Cost.CHOSEN_ROWS,
    Cost.ONE_HOT_S,
]
GATHERS = [Cost.SORTED_S, Cost.RETURNED_S, Cost.SENT_S, Cost.SERVED_S]
SMALL_OPS = [Cost.SMALL_OPS, Cost.GROUPED_LAYERS]


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
    workload, chip, times = experiment.workload, experiment.topology.chip, list[StepTime]()
    precisions = tuple(precision_notes(workload.weight_dtype, workload.activation_dtype, chip))
    n_chosen = experiment.model.attention.chosen_positions
    experts = expert_weights(experiment.model) if experiment.model.moe else ()
    has_four_bits = any(w.stored_dtype(workload.weight_dtype) == "s4" for w in experts)
    lacks_choice = n_chosen is not None and experiment.model.attention.candidate_positions is None
    for phase in experiment.phases if has_figures(chip, profile) else ():
        form = plan_form(experiment, phase, profile=profile, program=program)
        steps, seconds = evaluated(form, workload)
        time, notes = step_time(form, steps, seconds), [*precisions]
        is_fused = experiment.dispatch_form is DispatchForm.FUSED and experiment.model.moe
        if is_fused and served_experts(experiment, program) is None:
            notes.append(
                f"the fused kernel of experts is timed for blocks of {FUSED_BLOCK_TOKENS} tokens per device, as "
                "SGLang-JAX has tuned them for Qwen3-30B-A3B on v6e; for sizes that it has not tuned, it takes 32, "
                "and reads the experts once for each block"
            )
        if phase is Phase.PREFILL and lacks_choice and workload.prompt > (n_chosen or 0):
            notes.append(
                "the prediction lacks the passes that choose positions by the indexer's scores, which grow with "
                "the square of the prompt: compile, or see docs/axes.md"
            )
        added_s = float(steps.costs[0, :, Cost.CONVERTED_S].sum())
        if has_four_bits and added_s > NOTED_FRAC * float(steps.step_s[0]):
            notes.append(
                f"converting 4-bit experts in VMEM takes {format_seconds(added_s)} longer than reading them"
            )
        connect_s = connecting_s(experiment, profile)
        if phase is Phase.PREFILL and connect_s:
            notes.append(
                f"the first request also connects the stages, which takes {format_seconds(connect_s)} by the profile"
            )
        if seconds.low_s is None:
            notes.append(
                f"{NO_INTERVAL}no published times of collectives on {chip.name} give the error of the model"
            )
        times.append(replace(time, notes=(*time.notes, *notes)))
    return tuple(times)


def connecting_s(experiment: Experiment, profile: ChipProfile | None) -> float:
    """Seconds that a server's first request takes longer, as it connects the stages of a pipeline, by the profile."""
    if profile is None or profile.connection_s is None or experiment.engine is not Engine.VLLM:
        return 0.0
    plan = experiment.plan
    return (plan.pp - 1) * plan.tp * profile.connection_s


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
    bounds = _bounding_forms(form, steps)
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
        by_axis[collective.planned.axis] += float(steps.exposed_s[at, m])
    compute_s = float(steps.compute_s[at])
    exposed_s = float(steps.exposed_s[at].sum())
    bubble_s = float(steps.bubble_s[at]) if form.n_stages > 1 else 0.0  # waits for other stages
    bases = {TimeBasis.ROOFLINE.value: compute_s, TimeBasis.INTERCONNECT_MODEL.value: exposed_s}
    source = form.efficiency.source
    return StepTime(
        source=Source.PREDICTED,
        phase=form.phase,
        step=step,
        compute_s=compute_s,
        exposed_s=exposed_s,
        idle_s=bubble_s,
        bubble_s=bubble_s,
        collective_s=float(steps.collectives_s[at].sum()),
        exposed_by_axis_s=dict(by_axis),
        by_basis_s={basis: seconds for basis, seconds in bases.items() if seconds},
        parts=tuple(_parts(form, steps, at)),
        activities=_activities(form, steps, at, bubble_s),
        is_extrapolated=not all(_is_measured(form, steps, at)),
        notes=(f"compute by roofline: {source}",) if source else (),
    )


def _parts(form: PlanForm, steps: ClosedSteps, at: int) -> Iterator[PartCost]:
    collectives: defaultdict[Part, list[int]] = defaultdict(list)
    for m, collective in enumerate(form.collectives):
        collectives[collective.planned.part].append(m)
    for part in dict.fromkeys((*PARTS, *collectives)):
        index, of_part = PARTS.index(part) if part in PARTS else None, collectives[part]
        compute_s = 0.0 if index is None else float(steps.parts_s[at, index])
        collective_s, exposed_s = (
            sum((float(seconds[at, m]) for m in of_part), 0.0)
            for seconds in (steps.collectives_s, steps.exposed_s)
        )
        if compute_s or collective_s:
            costs = np.zeros(len(Cost)) if index is None else steps.costs[at, index]
            yield PartCost(
                part=part.value,
                compute_s=compute_s,
                collective_s=collective_s,
                exposed_s=exposed_s,
                flops=float(costs[FLOPS].sum()),
                hbm_bytes=float(costs[HBM_BYTES].sum()),
                wire_bytes=sum((wire_bytes(form, steps, at, m) for m in of_part), 0.0),
            )


def wire_bytes(form: PlanForm, steps: ClosedSteps, at: int, collective: int) -> float:
    """Bytes that a device of the mean stage sends in all executions of a collective."""
    cost = form.collectives[collective]
    kind = Kind.ALL_REDUCE if steps.is_reduced[at, collective] else cost.planned.kind
    factor = float(wire_factor(kind, len(cost.planned.groups[0])))
    n_stages = form.n_stages if cost.planned.part is Part.LM_HEAD else 1
    n = cost.n_pass * form.n_microbatches / form.n_stages + cost.n_once / n_stages
    n *= float(steps.n_chunks[at])
    return float(steps.payload_bytes[at, collective]) * factor * n


def _activities(
    form: PlanForm, steps: ClosedSteps, at: int, bubble_s: float
) -> tuple[ActivityTime, ...]:
    """What the core does in step number `at`, the longest first; the activities add up to the step.

    The closed form knows no relayouts and no padding: they are part of what the matrix units, kernels and
    passes reach of their peaks.
    """
    costs = steps.costs[at].sum(axis=0)
    seconds = costs * cost_s(form)
    weights_s = float(seconds[Cost.WEIGHT_BYTES])
    ops_s = float(seconds[SMALL_OPS].sum())
    matmuls_s = float(steps.compute_s[at] - seconds[OTHER_COSTS].sum())  # and waits for weights
    streams = form.efficiency.streams_weights
    waits_s = matmuls_s - float(seconds[PRODUCTS].sum()) if streams else 0.0
    waiting_s = ops_s + float(steps.exposed_s[at].sum())
    hidden_s = weights_s - waits_s  # while the core waits, then during products
    streaming_frac = min(1.0, hidden_s / waiting_s) if streams and waiting_s else 0.0
    busy_s = hidden_s - waiting_s * streaming_frac + float(seconds[Cost.FUSED_BYTES])
    reads_s, passes_s = float(seconds[READS].sum()), float(seconds[Cost.PASS_BYTES])
    kernels_s = reads_s + float(seconds[KERNELS].sum())
    products_s = matmuls_s - waits_s
    lookups_s = float((steps.costs[at, PARTS.index(Part.EMBED)] * cost_s(form))[GATHERS].sum())
    sorting_s = float(seconds[GATHERS].sum()) - lookups_s
    flops = [float(costs[kinds].sum()) for kinds in (PRODUCTS, KERNEL_FLOPS)]
    times = [
        ActivityTime(activity=activity, seconds=spent_s, hbm_busy_s=hbm_s, flops=n_flops)
        for activity, spent_s, hbm_s, n_flops in (
            (Activity.MATMUL, products_s, min(busy_s, products_s), flops[0]),
            (Activity.COPY, waits_s, waits_s, 0.0),
            (Activity.KERNEL, kernels_s, reads_s, flops[1]),
            (Activity.ELEMENTWISE, passes_s, passes_s, 0.0),
            (Activity.BY_EXPERT, sorting_s, 0.0, 0.0),
            (Activity.GATHER, lookups_s, 0.0, 0.0),
            (Activity.SMALL, ops_s, ops_s * streaming_frac, 0.0),
        )
    ]
    for axis in dict.fromkeys(collective.planned.axis for collective in form.collectives):
        of_axis = [m for m, c in enumerate(form.collectives) if c.planned.axis == axis]
        exposed_s = float(steps.exposed_s[at, of_axis].sum())
        times.append(
            ActivityTime(
                activity=Activity.EXPOSED,
                axis=axis,
                seconds=exposed_s,
                hbm_busy_s=exposed_s * streaming_frac,
                wire_bytes=sum(wire_bytes(form, steps, at, m) for m in of_axis),
            )
        )
    times.append(ActivityTime(activity=Activity.BUBBLE, seconds=bubble_s, hbm_busy_s=0.0))
    return tuple(sorted((t for t in times if t.seconds), key=lambda time: -time.seconds))


def timed_predictions(
    rows: Iterable[Collective], experiment: Experiment, profile: ChipProfile | None = None
) -> list[Collective]:
    """The predicted rows with the time of one execution.

    A collective that overlaps compute has no separate exposed time; the step has the total.
    """
    rows = list(rows)
    chip = experiment.topology.chip
    if not rows or not has_figures(chip, profile):
        return rows
    constants = constants_of(chip) if profile is None else profile.constants
    timed: list[Collective] = []
    for row in rows:
        kind = row.kind if row.opcode is None else Kind(row.opcode.replace("-", "_"))
        factor, payload_bytes = wire_factor(kind, row.group_size or 1), row.payload_bytes
        if row.wire_bytes is not None and factor:
            payload_bytes = round(row.wire_bytes / factor)  # with padding
        if payload_bytes is None or not row.groups or row.phase is None:
            timed.append(row)
            continue
        seconds = collective_time(
            kind,
            groups=row.groups,
            payload_bytes=payload_bytes,
            topology=experiment.topology,
            constants=constants,
        ).seconds
        is_loaded = is_exchange(row.kind, row.part)
        seconds *= exchange_load(experiment, row.phase) if is_loaded else 1.0
        is_in_layers = row.layer is not None
        hidden = hidden_behind(experiment, row.phase, row, is_in_layers=is_in_layers)
        exposed_s, basis = seconds if hidden is None else None, TimeBasis.INTERCONNECT_MODEL.value
        timed.append(replace(row, dur_s=seconds, exposed_s=exposed_s, time_basis=basis))
    return timed


def prediction(
    experiment: Experiment, profile: ChipProfile | None = None, *, is_compiled: bool = False
) -> tuple[list[Collective], Memory, tuple[StepTime, ...]]:
    """The rows with their times, the memory, and the step times by the profile or by published figures.

    The closed form follows published steps, whose programs spend more on the routing of experts. For an experiment
    that is compiled, too, a note names the steps in which meshscope's own program takes another time.
    """
    times = predicted_times(experiment, profile)
    if is_compiled and experiment.program.frontend.is_own:
        own_times = predicted_times(experiment, profile, program=ModeledProgram.OWN)
        times = tuple(_noting(time, of_own) for time, of_own in zip(times, own_times, strict=True))
    rows = timed_predictions(predict(experiment), experiment, profile)
    return rows, predicted_memory(experiment), times


def _noting(time: StepTime, of_own: StepTime) -> StepTime:
    own_s = of_own.step.value_s
    if abs(own_s / time.step.value_s - 1) < OTHER_PROGRAM_FRAC:
        return time
    note = (
        f"{format_seconds(own_s)} for the compiled program by the same model: its small operations "
        "work on arrays in VMEM, and not in published programs"
    )
    return replace(time, notes=(*time.notes, note))


def _bounding_forms(form: PlanForm, steps: ClosedSteps) -> tuple[PlanForm, PlanForm] | None:
    spreads, factors = form.constants.spreads, list[float]()
    if form.collectives:
        if spreads is None:
            return None
        inside, outside = max(spreads.short, spreads.long), spreads.out_of_sample
        factors = [inside if is_inside else outside for is_inside in _is_measured(form, steps, 0)]

    def bounded(constants: ClosedConstants, factors: Sequence[float]) -> PlanForm:
        return replace(
            form,
            efficiency=replace(form.efficiency, constants=constants),
            collectives=tuple(
                structs.replace(collective, factor=collective.factor * factor)
                for collective, factor in zip(form.collectives, factors, strict=True)
            ),
        )

    fastest = [1 / factor for factor in factors]
    return bounded(form.efficiency.fast, fastest), bounded(form.efficiency.slow, factors)


def _is_measured(form: PlanForm, steps: ClosedSteps, at: int) -> Iterator[bool]:
    for m, collective in enumerate(form.collectives):
        kind, group_size = collective.planned.kind, len(collective.planned.groups[0])
        payload_bytes = float(steps.payload_bytes[at, m])
        is_inside = form.constants.is_measured(kind, payload_bytes, group_size)
        yield not steps.collectives_s[at, m] or is_inside


def with_default_chunk(experiment: Experiment) -> Experiment:
    """The experiment with the default chunk; prompts that cp splits are cut only where that is faster.

    On a chip without published figures they are cut. A chunk of a prompt is shorter than the default if only a
    shorter one fits: plain attention writes its scores with all positions before the chunk.
    """
    cut = longest_chunk_that_fits(experiment)
    is_cut = experiment.plan.cp > 1 and cut.prefill_chunks.is_cut
    if not is_cut or not has_figures(experiment.topology.chip) or is_faster_cut(cut):
        return cut
    return replace(experiment, workload=replace(experiment.workload, prefill_chunk=None))


def is_faster_cut(cut: Experiment) -> bool:
    """Whether prefill in the chunks of `cut` is faster than with whole prompts."""
    whole = replace(cut, workload=replace(cut.workload, prefill_chunk=None))
    every = (whole, cut)
    forms = [plan_form(experiment, Phase.PREFILL) for experiment in every]
    whole_s, cut_s = steps_of(forms, [experiment.workload for experiment in every]).step_s
    return bool(cut_s < whole_s)


def longest_chunk_that_fits(experiment: Experiment) -> Experiment:
    """The experiment with the longest chunk of the default rule that fits, else with the longest."""
    choice = longest = experiment.with_auto_chunk()
    may_fit: Experiment | None = None
    while choice.prefill_chunks.is_cut:
        fits = predicted_memory(choice).fits
        if fits:
            return choice
        if fits is None and may_fit is None:
            may_fit = choice
        choice = choice.with_auto_chunk(limit=choice.prefill_chunks.n_positions - 1)
    return may_fit or longest
