"""The mesh axis of a collective, from the ranks, the size or the name of its process group.

Ranks decide: the groups of two axes differ even if their sizes are equal. Frameworks number ranks
in two orders, with pipeline stages outermost (Megatron, MaxText) or replicas (vLLM). The order in
which more groups are groups of an axis, and transfers are between pipeline stages, applies.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from meshscope.errors import SpecError
from meshscope.events.collective import size_of_groups
from meshscope.events.enums import Kind
from meshscope.plans.mesh import Groups, Mesh
from meshscope.readers.hlo.groups import CrossesSlices, is_one_slice
from meshscope.readers.traces import names
from meshscope.readers.traces.merge import MergedTrace
from meshscope.readers.traces.trace import BETWEEN_SLICES, Category

NO_PLAN = "the plan is unknown: give --plan and --topology, or a card"
NOT_LISTED = "a transfer between slices, whose devices the trace does not list"
PAIRS = frozenset({Kind.SEND, Kind.RECV, Kind.PERMUTE})
_REPLICAS = ("dp", "fsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """The axes in the order in which ranks count them, outermost first, and each rank's position."""

    axes: tuple[str, ...]
    positions: tuple[int, ...]
    is_assumed: bool = False  # another order fits the groups as well

    @classmethod
    def of(cls, mesh: Mesh, axes: tuple[str, ...]) -> "RankOrder":
        """The ranks of the mesh that count its axes in this order."""
        positions = np.arange(mesh.n_devices).reshape([size for _, size in mesh.axes])
        by_rank = positions.transpose([mesh.names.index(name) for name in axes])
        return cls(axes=axes, positions=tuple(by_rank.ravel().tolist()))

    def positions_of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Mesh positions of the ranks."""
        return tuple(self.positions[rank] for rank in ranks)

    def findings(self) -> Iterator[str]:
        """Says so if the trace does not decide the order."""
        if self.is_assumed:
            yield (
                f"ranks are taken to count {', '.join(self.axes)}, outermost first: the groups in the trace "
                "fit another order as well, in which axes of equal size change places"
            )


def order_of_ranks(trace: MergedTrace, mesh: Mesh | None) -> RankOrder | None:
    """How the ranks of the trace count the axes; None without a plan. SpecError for ranks beyond it."""
    if mesh is None:
        return None
    known = trace.ops.filter(pl.col("group").is_not_null())
    is_given = mesh.order is not None  # the user says where each device is
    if is_given or (known.is_empty() and trace.ops["groups"].is_not_null().any()):  # as HLO counts
        return RankOrder(axes=mesh.names, positions=tuple(range(mesh.n_devices)))
    is_pair = pl.col("kind").is_in([kind.value for kind in PAIRS])
    groups, pairs = (
        known.filter(condition)["group"].unique(maintain_order=True).to_list()
        for condition in (~is_pair, is_pair)
    )
    devices = [[device] for device in trace.events["device"].unique().sort().to_list()]
    is_vllm = trace.steps["name"].str.starts_with("execute_").any()
    return rank_order(mesh, [*groups, *devices], pairs=pairs, is_vllm=is_vllm)


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
    axis_of, names = _axes_by_group(mesh), mesh.names
    replicas_first = sorted(names, key=lambda name: name not in _REPLICAS)
    orders = [RankOrder.of(mesh, axes) for axes in dict.fromkeys((names, tuple(replicas_first)))]
    if is_vllm:
        orders.reverse()
    scores = [
        sum(frozenset(order.positions_of(group)) in axis_of for group in groups)
        + sum(axis_of.get(frozenset(order.positions_of(pair))) == "pp" for pair in pairs)
        for order in orders
    ]
    best = orders[scores.index(max(scores))]
    is_other = any(order.positions != best.positions for order in orders)
    return replace(best, is_assumed=is_other and len(set(scores)) == 1 and not is_vllm)


def _axes_by_group(mesh: Mesh) -> Mapping[frozenset[int], str]:
    return {
        frozenset(group): "+".join(axes)
        for axes in reversed(mesh.axis_subsets)
        for group in mesh.groups(*axes)
    }


def positioned(events: pl.DataFrame, order: RankOrder | None) -> pl.DataFrame:
    """The events with mesh positions as devices."""
    if order is None or order.positions == tuple(range(len(order.positions))):
        return events
    positions = pl.Series(order.positions, dtype=pl.Int32)
    return events.with_columns(positions.gather(events["device"]).alias("device"))


class GroupAxis(NamedTuple):
    """The axis of a process group and all its groups as mesh positions; None with the reason."""

    axis: str | None
    groups: Groups
    group_size: int | None
    reason: str | None = None


def ops_with_axes(
    ops: pl.DataFrame, mesh: Mesh | None, order: RankOrder | None, *, crosses_slices: CrossesSlices
) -> pl.DataFrame:
    """The ops with `axis`, `axis_reason`, `wire_bytes` and groups as mesh positions."""
    is_collective = pl.col("category") == Category.COLLECTIVE.value
    keys = ["kind", "group", "groups", "group_size", "group_name"]
    distinct = ops.filter(is_collective).select(keys).unique(maintain_order=True)
    axes = [
        _axis_of(record, mesh, order, crosses_slices) for record in distinct.iter_rows(named=True)
    ]
    schema: dict[str, Any] = {
        "axis": pl.String,
        "axis_groups": pl.List(pl.List(pl.Int32)),
        "axis_group_size": pl.Int32,
        "axis_reason": pl.String,
    }
    facts = distinct.hstack(pl.DataFrame(axes, schema=schema, orient="row"))
    joined = ops.join(facts, on=keys, how="left", nulls_equal=True, maintain_order="left")
    return joined.with_columns(
        pl.col("axis_groups").alias("groups"),
        pl.coalesce("axis_group_size", "group_size").alias("group_size"),
    ).drop("axis_groups", "axis_group_size")


def _axis_of(
    op: Mapping[str, Any], mesh: Mesh | None, order: RankOrder | None, crosses_slices: CrossesSlices
) -> GroupAxis:
    """The axis of an op by all its groups, else by its ranks, its description, or its size."""
    ranks, size, description = op["group"], op["group_size"], op["group_name"]
    size = len(ranks) if ranks is not None else size
    if description == BETWEEN_SLICES:
        return _between_slices(mesh, crosses_slices)
    patterns = names("axes").items()
    described = [axis for axis, pattern in patterns if re.search(pattern, description or "")]
    if mesh is None or order is None:
        groups = () if ranks is None else (tuple(ranks),)
        axis = "+".join(described) or None
        return GroupAxis(axis, groups, size, None if described else NO_PLAN)
    if op["groups"] is not None:  # listed whole, as HLO lists them
        groups, is_pairs = tuple(map(tuple, op["groups"])), op["kind"] in PAIRS
        n = len({device for group in groups for device in group})
        if is_one_slice(n, mesh, crosses_slices):  # whose program counts its devices alone
            firsts = range(0, mesh.n_devices, n)
            groups = tuple(tuple(at + d for d in group) for at in firsts for group in groups)
        axis = mesh.axis_of_pairs(groups) if is_pairs else mesh.axis_of_groups(groups)
        reason = None if axis else "its groups are no axis of the plan"
        return GroupAxis(axis, groups, size_of_groups(groups, is_pairs=is_pairs), reason)
    if ranks is not None:
        return _by_ranks(mesh, order.positions_of(ranks), is_pair=op["kind"] in PAIRS)
    axes = [name for name, n in mesh.axes if n > 1 and name in described]
    is_described = bool(axes) and size in {None, prod(map(mesh.size, axes))}
    group_axis = _over(mesh, "+".join(axes)) if is_described else _by_size(mesh, size)
    is_pair = op["kind"] in PAIRS
    return group_axis._replace(groups=(), group_size=2) if is_pair else group_axis


def _between_slices(mesh: Mesh | None, crosses_slices: CrossesSlices) -> GroupAxis:
    """The axis of transfers between slices, if one axis of the plan alone crosses them."""
    axes = () if mesh is None else mesh.axes
    crossing = [n for n, size in axes if mesh and size > 1 and crosses_slices(mesh.groups(n))]
    if mesh is None or len(crossing) != 1:
        return GroupAxis(None, (), None, NOT_LISTED)
    return GroupAxis(crossing[0], mesh.groups(crossing[0]), 2)


def _by_ranks(mesh: Mesh, group: tuple[int, ...], *, is_pair: bool) -> GroupAxis:
    axis = _axes_by_group(mesh).get(frozenset(group))
    if axis is not None:
        return _over(mesh, axis)
    if is_pair and len(group) == 2:
        return GroupAxis(mesh.axis_of_pairs((group,)), (group,), 2)
    is_alone = len(group) == 1
    reason = (
        "a group of one device" if is_alone else f"its {len(group)} devices are no axis of the plan"
    )
    return GroupAxis(None, (group,), len(group), reason)


def _by_size(mesh: Mesh, size: int | None) -> GroupAxis:
    sizes = {"+".join(axes): prod(map(mesh.size, axes)) for axes in mesh.axis_subsets}
    possible = [axis for axis, n in sizes.items() if size in {None, n}]
    if len(possible) == 1:
        return _over(mesh, possible[0])
    words = "an unknown number of" if size is None else str(size)
    reason = f"{words} devices may be {' or '.join(possible)}: the trace lists no ranks"
    if not possible:
        reason = f"no axis of the plan has {words} devices, and the trace lists no ranks"
    return GroupAxis(None, (), size, reason)


def _over(mesh: Mesh, axis: str) -> GroupAxis:
    groups = mesh.groups(*axis.split("+"))
    return GroupAxis(axis, groups, len(groups[0]))
