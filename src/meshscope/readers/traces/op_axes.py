"""Gives the ops of a trace their mesh axes and devices their positions in the mesh."""

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from meshscope.events.collective import size_of_groups
from meshscope.events.enums import Kind
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.devices import CrossesSlices
from meshscope.readers.traces.groups import GroupAxis, RankOrder, group_axis, rank_order
from meshscope.readers.traces.merge import MergedTrace
from meshscope.readers.traces.slice_transfers import GROUP as BETWEEN_SLICES
from meshscope.readers.traces.trace import Category

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
