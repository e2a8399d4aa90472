"""What the core of a device does in a closed-form step, and how long the HBM is busy meanwhile."""

from collections.abc import Iterator

from meshscope.cost.closed_form import ClosedSteps, PlanForm, cost_s
from meshscope.cost.features import Cost
from meshscope.events.enums import Part
from meshscope.events.step_time import Activity, ActivityTime

_PRODUCTS = [Cost.MATMUL_FLOPS, Cost.NARROW_FLOPS]
_KERNEL_FLOPS = [Cost.KERNEL_FLOPS, Cost.GROUPED_FLOPS]
_READS = [Cost.CHOSEN_BYTES, Cost.CACHE_BYTES]  # of kernels
_PASSES = [Cost.PASS_BYTES, Cost.WIDE_BYTES]
_GATHERS = [Cost.SORTED_S, Cost.RETURNED_S, Cost.SENT_S]


def closed_activities(form: PlanForm, steps: ClosedSteps, at: int) -> tuple[ActivityTime, ...]:
    """The activities of step number `at`, the longest first; they add up to the step.

    The closed form knows no relayouts and no padding: they are part of what the matrix units, kernels and
    passes reach of their peaks.
    """
    costs = steps.costs[at].sum(axis=0)
    seconds = costs * cost_s(form)
    weights_s, ops_s = float(seconds[Cost.WEIGHT_BYTES]), float(seconds[Cost.SMALL_OPS])
    streamed = {*_PRODUCTS, Cost.WEIGHT_BYTES, Cost.FUSED_BYTES}
    others = [cost for cost in Cost if cost not in streamed]
    matmuls_s = float(steps.compute_s[at] - seconds[others].sum())  # with their waits for weights
    streams = form.efficiency.streams_weights
    waits_s = matmuls_s - float(seconds[_PRODUCTS].sum()) if streams else 0.0
    waiting_s = ops_s + float(steps.exposed_s[at].sum())
    hidden_s = weights_s - waits_s  # while the core waits, then during products
    streaming_frac = min(1.0, hidden_s / waiting_s) if streams and waiting_s else 0.0
    busy_s = hidden_s - waiting_s * streaming_frac + float(seconds[Cost.FUSED_BYTES])
    reads_s, passes_s = float(seconds[_READS].sum()), float(seconds[_PASSES].sum())
    times = (
        ActivityTime(
            activity=Activity.MATMUL,
            seconds=matmuls_s - waits_s,
            hbm_busy_s=min(busy_s, matmuls_s - waits_s),
            flops=float(costs[_PRODUCTS].sum()),
        ),
        ActivityTime(activity=Activity.COPY, seconds=waits_s, hbm_busy_s=waits_s),
        ActivityTime(
            activity=Activity.KERNEL,
            seconds=reads_s
            + float(seconds[[*_KERNEL_FLOPS, Cost.TILES_S, Cost.CONVERTED_S]].sum()),
            hbm_busy_s=reads_s,
            flops=float(costs[_KERNEL_FLOPS].sum()),
        ),
        ActivityTime(activity=Activity.ELEMENTWISE, seconds=passes_s, hbm_busy_s=passes_s),
        ActivityTime(
            activity=Activity.GATHER, seconds=float(seconds[_GATHERS].sum()), hbm_busy_s=0.0
        ),
        ActivityTime(activity=Activity.SMALL, seconds=ops_s, hbm_busy_s=ops_s * streaming_frac),
        *_exposed(form, steps, at, streaming_frac),
        ActivityTime(activity=Activity.BUBBLE, seconds=bubble_s(form, steps, at), hbm_busy_s=0.0),
    )
    return tuple(sorted((t for t in times if t.seconds), key=lambda time: -time.seconds))


def _exposed(
    form: PlanForm, steps: ClosedSteps, at: int, streaming_frac: float
) -> Iterator[ActivityTime]:
    for axis in dict.fromkeys(collective.axis for collective in form.collectives):
        of_axis = [m for m, c in enumerate(form.collectives) if c.axis == axis]
        seconds = float(steps.exposed_s[at, of_axis].sum())
        yield ActivityTime(
            activity=Activity.EXPOSED,
            axis=axis,
            seconds=seconds,
            hbm_busy_s=seconds * streaming_frac,
            wire_bytes=sum(wire_bytes(form, steps, at, m) for m in of_axis),
        )


def bubble_s(form: PlanForm, steps: ClosedSteps, at: int) -> float:
    """Seconds in which a pipeline stage waits for others."""
    return float(steps.bubble_s[at]) if form.n_stages > 1 else 0.0


def wire_bytes(form: PlanForm, steps: ClosedSteps, at: int, collective: int) -> float:
    """Bytes that a device of the mean stage sends in all executions of a collective."""
    cost = form.collectives[collective]
    transfer, is_reduced = cost.transfer, steps.is_reduced[at, collective]
    factor = transfer.reduced_wire_factor if is_reduced else transfer.wire_factor
    n_stages = form.n_stages if cost.part is Part.LM_HEAD else 1
    n = cost.n_pass * form.n_microbatches / form.n_stages + cost.n_once / n_stages
    n *= float(steps.n_chunks[at])
    return float(steps.payload_bytes[at, collective]) * factor * n
