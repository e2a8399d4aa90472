"""Why the partitioner inserted each collective, which of the program's own are redundant, and what avoids them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import inf

from meshscope.analysis.join import Comparison, Verdict
from meshscope.analysis.totals import without_place
from meshscope.errors import read_only
from meshscope.events.collective import Collective, Resharding
from meshscope.events.enums import Kind

OWN_PROGRAMS = "meshscope/programs/"  # lines that a user cannot change
_SMALL_BYTES = 1024  # a payload up to this is a flag, a norm or a loss


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class Insertion:
    """A collective that the partitioner inserted, or a redundant one of the program: the array before, what was needed, the remedy.

    `exposed_s` and `total_s` are seconds of one step, None if the run has no times. `remedy` is None if the
    program does not show one, or the user did not write it. `is_planned` is whether the plan's
    prediction has it, None without a prediction. `is_of_product` is whether it gathers an operand of a matrix
    product, or scatters its sum, so that a collective matmul could hide it.
    """

    row: Collective
    operand: str
    wanted: str
    remedy: str | None
    exposed_s: float | None
    total_s: float | None
    is_of_product: bool = False
    is_planned: bool | None = None

    def __str__(self) -> str:
        """`all_gather over dp at model.py:6: split along dimension 0 over dp, wanted whole on every device`."""
        remedy = "" if self.remedy is None else f"; {self.remedy}"
        axis = self.row.axis or "an unknown axis"
        line = "" if self.row.source_line is None else f" at {self.row.source_line}"
        return f"{self.row.kind} over {axis}{line}: {self.operand}, wanted {self.wanted}{remedy}"

    @property
    def hidden_frac(self) -> float | None:
        """Fraction of its time hidden by compute; None if unknown."""
        if self.exposed_s is None or not self.total_s:
            return None
        return max(0.0, 1 - self.exposed_s / self.total_s)


def insertions(
    rows: Iterable[Collective],
    reshardings: Mapping[str, Resharding],
    comparison: Comparison | None = None,
    *,
    is_of_user: bool = True,
) -> tuple[Insertion, ...]:
    """The rows that the partitioner inserted, and the user's redundant ones: first those that the plan lacks, then the costliest.

    `comparison` compares the plan's prediction, if there is one, with the rows. Lines of programs that the user
    did not write have no remedy.
    """
    differing = {
        (without_place(match.right), layer)
        for match in (() if comparison is None else comparison.matches)
        if match.right is not None and match.verdict is not Verdict.EQUAL
        for layer in match.layers or (None,)
    }
    explained: list[Insertion] = []
    for row in rows:
        resharding = reshardings.get(row.hlo_name or "")
        is_shown = is_of_user or row.inserted_by != "program"
        if resharding is not None and is_shown:
            operand, wanted = _shardings(row, resharding)
            is_fixed = not is_of_user or OWN_PROGRAMS in (row.source_line or "")
            is_planned = (without_place(row), row.layer) not in differing
            explained.append(
                Insertion(
                    row=row,
                    operand=operand,
                    wanted=wanted,
                    remedy=None if is_fixed else _remedy(row, resharding),
                    exposed_s=None if row.exposed_s is None else row.exposed_s * row.count,
                    total_s=None if row.dur_s is None else row.dur_s * row.count,
                    is_of_product=resharding.is_of_product
                    and row.kind in {Kind.ALL_GATHER, Kind.REDUCE_SCATTER},
                    is_planned=None if comparison is None else is_planned,
                )
            )
    return tuple(sorted(explained, key=lambda one: (bool(one.is_planned), -(one.exposed_s or 0.0))))


def _shardings(row: Collective, resharding: Resharding) -> tuple[str, str]:
    """The sharding of the operand, and the sharding that its user wants."""
    over = f"over {row.axis}" if row.axis else "over unknown devices"
    along = "" if resharding.dim is None else f" along dimension {resharding.dim}"
    split, partial, one = (
        f"split{along} {over}",
        f"a partial result on each device {over}",
        "on one device",
    )
    moved = f"{one} {over}", "on another device: other tiles or a neighbor's edge"
    spread = one, f"on every device {over}"
    return {
        Kind.ALL_GATHER: (split, "whole on every device"),
        Kind.ALL_REDUCE: (partial, "the whole result on every device"),
        Kind.REDUCE_SCATTER: (partial, split),
        Kind.ALL_TO_ALL: (f"split along one dimension {over}", f"split along another {over}"),
        Kind.PERMUTE: moved,
        Kind.SEND: moved,
        Kind.RECV: moved,
        Kind.GATHER: spread,
        Kind.BROADCAST: spread,
        Kind.REDUCE: (partial, "the whole result on one device"),
        Kind.SCATTER: (one, split),
    }[row.kind]


def _remedy(row: Collective, resharding: Resharding) -> str | None:  # noqa: PLR0911  one per cause
    constrain = (
        f"constrain the result of this line to be split over {row.axis} (with_sharding_constraint)"
    )
    if resharding.is_unmerged:
        return (
            "the compiler did not make this reduce-scatter: it sums everywhere and keeps a shard, with twice "
            "the bytes; psum_scatter under shard_map is one"
        )
    if dropped_frac := resharding.dropped_frac:
        part = "half" if dropped_frac == Fraction(1, 2) else str(dropped_frac)
        over = f" over {resharding.dropped_over}" if resharding.dropped_over else " on each device"
        if resharding.is_returned:
            return (
                f"every device returns all of it, and an argument like it is split{over}: with the result split "
                f"alike (out_shardings or with_sharding_constraint), {part} of it is dropped before reducing"
            )
        verb = "gathering" if row.kind is Kind.ALL_GATHER else "reducing"
        return f"{part} of it is dropped{over}: slice before {verb}"
    if resharding.is_regathered:
        return (
            "it gathers what a reduce-scatter just split: psum is one collective with the same bytes, or leave the "
            "array split if the code after it can work on shards"
        )
    match row.kind:
        case Kind.ALL_GATHER if resharding.argument is not None:
            return (
                f"pass {resharding.argument} whole (no {row.axis} in its PartitionSpec) if the memory allows, or "
                f"split the other operand so that the line contracts over {row.axis}"
            )
        case Kind.ALL_GATHER:
            return f"{constrain}, if the code after it can work on shards"
        case Kind.ALL_REDUCE if (
            inf if row.payload_bytes is None else row.payload_bytes
        ) <= _SMALL_BYTES:
            return "no annotation avoids it; compute this value in fewer steps, or on the host"
        case Kind.ALL_REDUCE:
            sends = "a reduce-scatter sends half the bytes, if the code after it can work on shards"
            return f"{constrain}: {sends}"
        case Kind.ALL_TO_ALL if resharding.argument is not None:
            return f"pass {resharding.argument} split along the dimension that this line wants"
        case _:
            return None
