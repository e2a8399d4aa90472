"""A collective as a typed row of the event table, and what one that the partitioner inserted moves."""

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from meshscope.events.enums import Kind, Part, Phase, Source, wire_factor
from meshscope.units import array_bytes, counted

Groups = tuple[tuple[int, ...], ...]


def size_of_groups(groups: Groups, *, is_pairs: bool) -> int:
    """Devices in one group. Pairs count as 2, or as 1 if no device sends to another."""
    if is_pairs:
        return 2 if any(source != target for source, target in groups) else 1
    return len(groups[0]) if groups else 1


# In the axis_reason of a row whose groups are subsets of its axis's groups, as with axis_index_groups.
SUBSETS = "are subsets of"
# Inserter of a collective that XLA runs again instead of keeping its result in memory.
REMATERIALIZATION = "rematerialization"
# Algorithm of a collective that a ring of sends around a product implements.
WINDOWED_EINSUM = "windowed einsum"


class Effect(StrEnum):
    """What an operation other than a collective does beyond its device."""

    UNKNOWN = "may_communicate"
    HOST = "host_transfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherOperation:
    """Operations of a program without rows, by opcode and, for custom calls, target; `count` in one step."""

    phase: Phase | None
    opcode: str
    target: str | None
    effect: Effect
    count: int

    def __str__(self) -> str:
        """`1 custom call 'pfft3d' may communicate`."""
        name = self.opcode if self.target is None else self.target
        what = "operation" if self.target is None else "custom call"
        if self.effect is Effect.HOST:
            return f"{counted(self.count, 'host transfer')} by '{name}'"
        return f"{counted(self.count, what)} '{name}' may communicate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective operation on one device in one step of its phase.

    Fields that are None are unknown. `groups` holds the device ids of each group; for point-to-point
    operations each (source, target) pair is a group. `dur_s` and `exposed_s` are means over the
    `count` executions; `start_s` is the start of the first. Units and meanings of all fields are in
    `meshscope.events.schema`.
    """

    source: Source
    phase: Phase | None
    layer: int | None
    part: Part | None
    kind: Kind
    opcode: str | None
    axis: str | None
    axis_reason: str | None = None
    parallelism: str | None = None
    group_size: int | None
    groups: Groups
    dtype: str | None
    shape: tuple[int, ...] | None
    payload_bytes: int | None
    wire_bytes: Fraction | None
    stage: int | None = None
    count: int = 1
    n_steps: int = 1
    is_async: bool | None = None
    algorithm: str | None = None
    inserted_by: str | None = None
    crosses_slices: bool | None = None
    hlo_name: str | None = None
    hlo_shape: str | None = None
    source_line: str | None = None
    start_s: float | None = None
    dur_s: float | None = None
    exposed_s: float | None = None
    time_basis: str | None = None

    @property
    def n_groups(self) -> int:
        """Number of groups that run the operation concurrently."""
        return len(self.groups)


def predicted_collective(  # noqa: PLR0913  the fields of the row
    *,
    phase: Phase,
    layer: int | None,
    part: Part,
    kind: Kind,
    axis: str,
    groups: Groups,
    dtype: str,
    shape: tuple[int, ...],
    count: int = 1,
    n_steps: int = 1,
    stage: int | None = None,
    crosses_slices: bool | None = None,
    carried_bytes: int | None = None,
    executed_as: Kind | None = None,
) -> Collective:
    """A predicted row, with payload and wire bytes derived from kind, dtype, shape and group size.

    `carried_bytes` is the payload with padding, and `executed_as` the kind that the compiler makes of it, if they differ.
    """
    group_size = len(groups[0])
    payload_bytes = array_bytes(dtype, shape)
    factor = wire_factor(executed_as or kind, group_size)
    return Collective(
        source=Source.PREDICTED,
        phase=phase,
        layer=layer,
        part=part,
        kind=kind,
        opcode=None if executed_as is None else executed_as.value.replace("_", "-"),
        axis=axis,
        group_size=group_size,
        groups=groups,
        dtype=dtype,
        shape=shape,
        payload_bytes=payload_bytes,
        wire_bytes=(carried_bytes or payload_bytes) * factor,
        count=count,
        n_steps=n_steps,
        stage=stage,
        inserted_by="program",
        crosses_slices=crosses_slices,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """A collective that the partitioner inserted, or of a program that does not keep its whole result.

    `argument` is the program's argument that it moves unchanged, None for a computed array. `dim` is the
    dimension that it gathers or scatters, None if the text does not say. `is_unmerged` is whether it runs as an
    all-reduce from which each device keeps its shard. `is_of_product` is whether it serves a matrix product, its
    operand or its sum. `opcode` is the operation that computes the operand. `dropped_frac` is the fraction of
    an all-reduce or all-gather that no user on a device takes, and `dropped_over` the other axes over which devices take
    different parts. With `is_returned`, every device returns all of it, and the other axes, which split an
    argument like it, could drop that fraction.
    """

    hlo_name: str
    argument: str | None
    opcode: str | None
    dim: int | None
    is_unmerged: bool
    is_of_product: bool = False
    dropped_frac: Fraction | None = None
    dropped_over: str | None = None
    is_returned: bool = False
    is_regathered: bool = False  # gathers what a reduce-scatter just split

    @property
    def is_wasteful(self) -> bool:
        """Whether less would have to be sent for what the program uses."""
        has_rest = bool(self.dropped_frac) and not self.is_returned
        return has_rest or self.is_unmerged or self.is_regathered
