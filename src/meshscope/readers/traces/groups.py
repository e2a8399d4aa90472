"""The mesh axis of a collective, from the ranks, the size or the name of its process group.

Ranks decide: the groups of two axes differ even if their sizes are equal. Frameworks number ranks
in two orders, with pipeline stages outermost (Megatron, MaxText) or replicas (vLLM). The order in
which more groups are groups of an axis, and transfers are between pipeline stages, applies.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from meshscope.errors import SpecError
from meshscope.plans.mesh import Groups, Mesh

NO_PLAN = "the plan is unknown: give --plan and --topology, or a card"
_REPLICAS = ("dp", "fsdp")

# Descriptions of process groups: Megatron-LM (parallel_state.py), PyTorch's DeviceMesh, torchtitan.
_DESCRIPTIONS = (
    (re.compile(r"TENSOR_MODEL_PARALLEL|\btp\b|_tp$|tensor_parallel", re.IGNORECASE), "tp"),
    (re.compile(r"PIPELINE_MODEL_PARALLEL|\bpp\b|_pp$|pipeline_parallel", re.IGNORECASE), "pp"),
    (re.compile(r"EXPERT_MODEL_PARALLEL|\bep\b|_ep$|expert_parallel", re.IGNORECASE), "ep"),
    (re.compile(r"^CONTEXT_PARALLEL|\bd?cp\b|_cp$", re.IGNORECASE), "cp"),
    (re.compile(r"dp_shard|fsdp", re.IGNORECASE), "fsdp"),
    (re.compile(r"^DATA_PARALLEL_GROUP$|\bdp\b|_dp$|dp_replicate", re.IGNORECASE), "dp"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAxis:
    """The axis of a process group and all its groups as mesh positions; None with the reason."""

    axis: str | None
    groups: Groups
    group_size: int | None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """The axes in the order in which ranks count them, outermost first, and each rank's position."""

    axes: tuple[str, ...]
    positions: tuple[int, ...]
    is_assumed: bool = False  # another order fits the groups as well

    def positions_of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Mesh positions of the ranks."""
        return tuple(self.positions[rank] for rank in ranks)


def rank_order(
    mesh: Mesh,
    groups: Sequence[Sequence[int]],
    *,
    pairs: Sequence[Sequence[int]] = (),
    is_vllm: bool = False,
) -> RankOrder:
    """The order of ranks that fits the groups of collectives and the `pairs` of transfers.

    If several orders fit, vLLM's for its traces, else the mesh's. SpecError if a group has a rank
    that the mesh lacks.
    """
    largest = max((rank for group in (*groups, *pairs) for rank in group), default=0)
    if largest >= mesh.n_devices:
        raise SpecError(
            f"the trace has rank {largest}, and the plan lays out {mesh.n_devices} devices. "
            "Give the plan and the topology of all ranks."
        )
    axis_of = _axes_by_group(mesh)
    orders = [_order(mesh, axes) for axes in _axis_orders(mesh)]
    if is_vllm:
        orders.reverse()
    scores = [
        sum(frozenset(order.positions_of(group)) in axis_of for group in groups)
        + sum(axis_of.get(frozenset(order.positions_of(pair))) == "pp" for pair in pairs)
        for order in orders
    ]
    best = orders[scores.index(max(scores))]
    others = {order.positions for order in orders if order is not best} - {best.positions}
    is_assumed = bool(others) and len(set(scores)) == 1 and not is_vllm
    return replace(best, is_assumed=is_assumed)


def _axis_orders(mesh: Mesh) -> list[tuple[str, ...]]:
    """The mesh's order, and the one with replicas outside of the pipeline."""
    names = mesh.names
    outer = tuple(name for name in names if name in _REPLICAS)
    other = (*outer, *(name for name in names if name not in outer))
    return [names] if other == names else [names, other]


def _order(mesh: Mesh, axes: tuple[str, ...]) -> RankOrder:
    ranks = Mesh(axes=tuple((name, mesh.size(name)) for name in axes))
    positions: list[int] = []
    for rank in range(mesh.n_devices):
        at = dict(zip(axes, ranks.coordinates(rank), strict=True))
        position = 0
        for name, size in mesh.axes:
            position = position * size + at[name]
        positions.append(position)
    return RankOrder(axes=axes, positions=tuple(positions))


def group_axis(  # noqa: PLR0913  what a trace may say about a group
    mesh: Mesh | None,
    order: RankOrder | None,
    *,
    ranks: Sequence[int] | None,
    group_size: int | None,
    description: str | None,
    is_pair: bool = False,
) -> GroupAxis:
    """The axis of a group by its ranks, else by its description, else by its size."""
    size = len(ranks) if ranks is not None else group_size
    described = described_axis(description)
    if mesh is None or order is None:
        groups = () if ranks is None else (tuple(ranks),)
        return GroupAxis(
            axis=described,
            groups=groups,
            group_size=size,
            reason=None if described else NO_PLAN,
        )
    if ranks is not None:
        return _by_ranks(mesh, order.positions_of(ranks), is_pair=is_pair)
    if described is not None and mesh.size(described) > 1 and size in {None, mesh.size(described)}:
        return _over(mesh, described)
    return _by_size(mesh, size)


def described_axis(description: str | None) -> str | None:
    """The axis that the description of a process group names; None if it names none."""
    if not description:
        return None
    return next((axis for pattern, axis in _DESCRIPTIONS if pattern.search(description)), None)


def _by_ranks(mesh: Mesh, group: tuple[int, ...], *, is_pair: bool) -> GroupAxis:
    axis = _axes_by_group(mesh).get(frozenset(group))
    if axis is not None:
        return _over(mesh, axis)
    if is_pair and len(group) == 2:
        crossed = mesh.axis_of_pairs((group,))
        return GroupAxis(axis=crossed, groups=(group,), group_size=2)
    reason = (
        "a group of one device"
        if len(group) == 1
        else f"its {len(group)} devices are no axis of the plan"
    )
    return GroupAxis(axis=None, groups=(group,), group_size=len(group), reason=reason)


def _by_size(mesh: Mesh, size: int | None) -> GroupAxis:
    sizes = {axis: prod(mesh.size(name) for name in axis.split("+")) for axis in _axis_names(mesh)}
    possible = [axis for axis, n in sizes.items() if size in {None, n}]
    if len(possible) == 1:
        return _over(mesh, possible[0])
    words = "an unknown number of" if size is None else str(size)
    if not possible:
        reason = f"no axis of the plan has {words} devices, and the trace lists no ranks"
    else:
        reason = f"{words} devices may be {' or '.join(possible)}: the trace lists no ranks"
    return GroupAxis(axis=None, groups=(), group_size=size, reason=reason)


def _over(mesh: Mesh, axis: str) -> GroupAxis:
    groups = mesh.groups(*axis.split("+"))
    return GroupAxis(axis=axis, groups=groups, group_size=len(groups[0]))


def _axis_names(mesh: Mesh) -> list[str]:
    """All combinations of axes larger than one."""
    names = [name for name, size in mesh.axes if size > 1]
    return ["+".join(subset) for n in range(1, len(names) + 1) for subset in combinations(names, n)]


def _axes_by_group(mesh: Mesh) -> Mapping[frozenset[int], str]:
    return {
        frozenset(group): axis
        for axis in reversed(_axis_names(mesh))
        for group in mesh.groups(*axis.split("+"))
    }
