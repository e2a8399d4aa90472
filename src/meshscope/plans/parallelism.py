"""The kind of parallelism that causes a collective: tp, sp, pp, dp, cp, ep or fsdp.

A mesh axis does not show it: experts travel over dp and tp, and sp over tp.
"""

from collections.abc import Iterable
from dataclasses import replace

from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part
from meshscope.plans.plan import MESH_AXES, Plan

_SPLIT_KINDS = frozenset({Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.PERMUTE, Kind.ALL_TO_ALL})
_ROUTED_PARTS = frozenset({Part.MOE_ROUTER, Part.MOE_DISPATCH, Part.MOE_COMBINE})


def with_parallelism(
    rows: Iterable[Collective], plan: Plan | None, hidden: int | None
) -> tuple[Collective, ...]:
    """The rows with their parallelism where it is not set; `hidden` is the width of the residual stream."""
    return tuple(
        replace(row, parallelism=kind)
        if row.parallelism is None and (kind := parallelism_of(row, plan, hidden)) is not None
        else row
        for row in rows
    )


def parallelism_of(row: Collective, plan: Plan | None, hidden: int | None = None) -> str | None:
    """The parallelism of a row; several, joined by +, for a collective over axes of several.

    None if the axis is unknown, or is no axis of a plan.
    """
    axes = () if row.axis is None else tuple(row.axis.split("+"))
    if not axes or not set(axes) <= set(MESH_AXES):
        return None
    if row.part is Part.STAGE:
        return "pp"
    if plan is not None and _moves_experts(row, plan, axes):
        return "ep"
    if axes == ("tp",) and plan is not None and plan.sp and _is_split(row, hidden):
        return "sp"
    if "cp" in axes and set(axes) <= {"cp", "tp"}:
        return "cp"  # of a sequence that sp splits further
    return "+".join(axes)


def _moves_experts(row: Collective, plan: Plan, axes: tuple[str, ...]) -> bool:
    """Whether the row exchanges tokens with experts, their row counts, or sums over experts.

    With experts over tp alone, tokens stay where they are, and only the sum is due to the experts.
    """
    shared = set(axes) & set(plan.expert_axes)
    if plan.expert_axes == ("tp",):
        is_sum = row.kind in {Kind.ALL_REDUCE, Kind.REDUCE_SCATTER}
        return bool(shared) and is_sum and row.part is Part.MOE_COMBINE
    return bool(shared) and (row.part in _ROUTED_PARTS or _exchanges(row))


def _exchanges(row: Collective) -> bool:
    return row.kind is Kind.ALL_TO_ALL and row.part in {None, Part.MOE_EXPERTS}


def _is_split(row: Collective, hidden: int | None) -> bool:
    """Whether a row over tp is due to the split of the residual stream.

    These bring the last tokens, as wide as the residual stream, to all devices of tp before the head.
    """
    if row.part is not Part.LM_HEAD:
        return row.kind in _SPLIT_KINDS
    return hidden is not None and row.shape is not None and row.shape[-1] == hidden
