"""What a collective that the partitioner inserted moves."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """A collective that the partitioner inserted.

    `argument` is the program's argument that it moves unchanged, None for a computed array. `dim` is the
    dimension that it gathers or scatters, None if the text does not say. `is_unmerged` is whether it runs as an
    all-reduce of which each device keeps its shard. `is_of_product` is whether it serves a matrix product, its
    operand or its sum. `opcode` is that of the operation which computes the operand. `dropped_frac` is the fraction of
    an all-reduce that no user on a device takes, and `dropped_over` the other axes over which devices take other parts. With
    `is_returned`, every device returns all of it, and the other axes, which split an argument like it, could drop
    that fraction.
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
