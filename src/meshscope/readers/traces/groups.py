"""The mesh axis of a collective, from the ranks, the size or the name of its process group.

Ranks decide: the groups of two axes differ even if their sizes are equal. Frameworks number ranks
in two orders, with pipeline stages outermost (Megatron, MaxText) or replicas (vLLM). The order in
which more groups are groups of an axis, and transfers are between pipeline stages, applies.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Any

import polars as pl

from meshscope.errors import SpecError
from meshscope.events.collective import size_of_groups
from meshscope.events.enums import Kind
from meshscope.plans.mesh import Groups, Mesh
from meshscope.readers.hlo.groups import CrossesSlices
from meshscope.readers.traces.merge import MergedTrace
from meshscope.readers.traces.trace import BETWEEN_SLICES, Category

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


NOT_LISTED = "a transfer between slices, whose devices the trace does not list"
PAIRS = frozenset({Kind.SEND, Kind.RECV, Kind.PERMUTE})


def order_of_ranks(trace: MergedTrace, mesh: Mesh | None) -> RankOrder | None:
    """How the ranks of the trace count the axes; None without a plan. SpecError for ranks beyond it."""
    if mesh is None:
        return None
    if mesh.order is not None:  # the user says where each device is
        return RankOrder(axes=mesh.names, positions=tuple(range(mesh.n_devices)))
    known = trace.ops.filter(pl.col("group").is_not_null())
    if known.is_empty() and trace.ops["groups"].is_not_null().any():
        return RankOrder(axes=mesh.names, positions=tuple(range(mesh.n_devices)))  # as HLO counts
    is_pair = pl.col("kind").is_in([kind.value for kind in PAIRS])
    groups, pairs = (
        known.filter(condition)["group"].unique(maintain_order=True).to_list()
        for condition in (~is_pair, is_pair)
    )
    devices = [[device] for device in trace.events["device"].unique().sort().to_list()]
    is_vllm = trace.steps["name"].str.starts_with("execute_").any()
    return rank_order(mesh, [*groups, *devices], pairs=pairs, is_vllm=is_vllm)


def order_findings(order: RankOrder | None) -> Iterator[str]:
    """Says so if the trace does not decide the order."""
    if order is not None and order.is_assumed:
        yield (
            f"ranks are taken to count {', '.join(order.axes)}, outermost first: the groups in the trace "
            "fit another order as well, in which axes of equal size change places"
        )


def positioned(events: pl.DataFrame, order: RankOrder | None) -> pl.DataFrame:
    """The events with mesh positions as devices."""
    if order is None or order.positions == tuple(range(len(order.positions))):
        return events
    positions = pl.Series(order.positions, dtype=pl.Int32)
    return events.with_columns(positions.gather(events["device"]).alias("device"))


def ops_with_axes(
    ops: pl.DataFrame,
    mesh: Mesh | None,
    order: RankOrder | None,
    *,
    crosses_slices: CrossesSlices,
) -> pl.DataFrame:
    """The ops with `axis`, `axis_reason`, `wire_bytes` and groups as mesh positions."""
    is_collective = pl.col("category") == Category.COLLECTIVE.value
    keys = ["kind", "group", "groups", "group_size", "group_name"]
    distinct = ops.filter(is_collective).select(keys).unique(maintain_order=True)
    axes = [
        _between_slices(mesh, crosses_slices)
        if record["group_name"] == BETWEEN_SLICES
        else _axis_of(record, mesh, order)
        for record in distinct.iter_rows(named=True)
    ]
    facts = distinct.with_columns(
        pl.Series("axis", [f.axis for f in axes], pl.String),
        pl.Series("axis_reason", [f.reason for f in axes], pl.String),
        pl.Series("axis_groups", [[list(g) for g in f.groups] for f in axes], pl.List(pl.List(pl.Int32))),
        pl.Series("axis_group_size", [f.group_size for f in axes], pl.Int32),
    )  # fmt: skip
    joined = ops.join(facts, on=keys, how="left", nulls_equal=True, maintain_order="left")
    return joined.with_columns(
        pl.col("axis_groups").alias("groups"),
        pl.coalesce("axis_group_size", "group_size").alias("group_size"),
    ).drop("axis_groups", "axis_group_size")


def _axis_of(record: Mapping[str, Any], mesh: Mesh | None, order: RankOrder | None) -> GroupAxis:
    if record["groups"] is not None and mesh is not None:
        return _axis_of_all_groups(mesh, tuple(map(tuple, record["groups"])), record["kind"])
    return group_axis(
        mesh,
        order,
        ranks=record["group"],
        group_size=record["group_size"],
        description=record["group_name"],
        is_pair=record["kind"] in PAIRS,
    )


def _between_slices(mesh: Mesh | None, crosses_slices: CrossesSlices) -> GroupAxis:
    """The axis of transfers between slices, if one axis of the plan alone crosses them."""
    unknown = GroupAxis(axis=None, groups=(), group_size=None, reason=NOT_LISTED)
    if mesh is None:
        return unknown
    crossing = [n for n, size in mesh.axes if size > 1 and crosses_slices(mesh.groups(n))]
    if len(crossing) != 1:
        return unknown
    return GroupAxis(axis=crossing[0], groups=mesh.groups(crossing[0]), group_size=2)


def _axis_of_all_groups(mesh: Mesh, groups: tuple[tuple[int, ...], ...], kind: str) -> GroupAxis:
    """The axis of groups that are listed whole, as HLO lists them."""
    is_pairs = kind in PAIRS
    axis = mesh.axis_of_pairs(groups) if is_pairs else mesh.axis_of_groups(groups)
    reason = None if axis else "its groups are no axis of the plan"
    n = size_of_groups(groups, is_pairs=is_pairs)
    return GroupAxis(axis=axis, groups=groups, group_size=n, reason=reason)
