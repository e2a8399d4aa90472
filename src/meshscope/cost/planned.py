"""Types of the prediction: the collectives of a pipeline stage in one step."""

from dataclasses import dataclass
from math import inf

from meshscope.events.collective import Groups
from meshscope.events.enums import Kind, Part
from meshscope.units import array_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedFor:
    """Numbers of sequences on a device at which the compiler uses an all-reduce instead.

    Numbers up to `n_sequences` with a payload of more than `over_bytes`, and numbers that `multiple` does not
    divide.
    """

    n_sequences: float
    over_bytes: float = 0
    multiple: int = 1


NEVER_REDUCED, ALWAYS_REDUCED = ReducedFor(n_sequences=0), ReducedFor(n_sequences=inf)
REDUCED_FOR_ONE = ReducedFor(n_sequences=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """One collective of the program: its kind, device groups and payload (`shape`, `dtype`).

    A device has `n_sequences` in it; at some counts it becomes an all-reduce (`reduced_for`).
    """

    part: Part
    kind: Kind
    axis: str
    groups: Groups  # of positions in the mesh; of devices in a row
    shape: tuple[int, ...]
    dtype: str
    count: int = 1
    n_sequences: int = 1
    reduced_for: ReducedFor = NEVER_REDUCED

    @property
    def payload_bytes(self) -> int:
        """Bytes of the logical array."""
        return array_bytes(self.dtype, self.shape)

    @property
    def executed_as(self) -> Kind | None:
        """The kind that the compiler turns it into, if different."""
        rule = self.reduced_for
        is_small = self.n_sequences <= rule.n_sequences and self.payload_bytes > rule.over_bytes
        return Kind.ALL_REDUCE if is_small or self.n_sequences % rule.multiple else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """The collectives of one pipeline stage in one step, in program order.

    `layers` pairs each layer index of the stage with its collectives. `index` is None without a
    pipeline, and for collectives that all stages share.
    """

    before: tuple[PlannedCollective, ...]
    layers: tuple[tuple[int, tuple[PlannedCollective, ...]], ...]
    after: tuple[PlannedCollective, ...]
    index: int | None = None
