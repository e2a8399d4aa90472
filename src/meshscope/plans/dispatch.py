"""Dispatch of tokens to experts: axes, form, buffer sizes and traffic.

A device routes `n_tokens` tokens to `n_active` experts each: `n_rows` rows. If an axis splits both
experts and tokens, rows are sent to the device of their expert and back.
"""

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from math import ceil, sqrt

from meshscope.model.mechanisms.mixture import MixtureOfExperts
from meshscope.plans.plan import Plan

# Room of a buffer, if the worst routing needs more: rows beyond it take another round. Random routing
# exceeds the mean by more than six standard deviations (of a Poisson distribution) once in a billion
# loads; at least a quarter of the mean is left for experts that are chosen more often than others.
ROUND_ROOM = Fraction(5, 4)
ROUND_DEVIATIONS = 6
# Buffers of few rows cost little, and few rows vary more: one round for the worst routing.
MIN_ROUND_ROWS = 512
ROWS_STEP = 8  # of grouped matmuls
TILE_ELEMENTS = 1024  # of a TPU's tile of 8 x 128
# Tokens of a device in a block of a fused kernel, as tuned for Qwen3-30B-A3B on v6e; fewer if there are fewer.
FUSED_BLOCK_TOKENS = 512
ROUNDS_SCOPE = "exchange_rounds"  # names the loop over rounds in the program


def fills_tiles(width: int) -> bool:
    """Whether rows of `width` elements can be stored as whole tiles, each contiguous in memory."""
    return width % TILE_ELEMENTS == 0


class DispatchForm(StrEnum):
    """How rows are exchanged: in their actual number, or in a fixed number of slots."""

    AUTO = "auto"  # ragged if XLA supports it, else capacity; one_hot with the auto partitioner
    RAGGED = "ragged"  # ragged all-to-all of the actual rows
    CAPACITY = "capacity"  # all-to-all of a fixed number of slots per device
    ONE_HOT = "one_hot"  # auto partitioner: einsums with a dispatch mask (GShard)
    FUSED = "fused"  # one kernel of a serving engine exchanges and multiplies rows (predicted only)
    # vLLM on TPU: all devices gather the tokens of all ranks, and scatter the sums (predicted only).
    ALLGATHER = "allgather"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """The exchange of rows in one layer of one step, per device."""

    form: DispatchForm
    axes: tuple[str, ...]
    n_ranks: int
    n_tokens: int
    n_active: int
    n_local_experts: int
    n_buffer_rows: int  # capacity of the receive buffer
    n_slots: int | None  # rows for each sending device; None if ragged
    n_expert_slots: int | None = None  # slots of an expert; None if experts share them
    has_rounds: bool = False  # for rows beyond the capacity, which else are dropped

    @property
    def n_rows(self) -> int:
        """Rows that one device sends, including those to itself."""
        return self.n_tokens * self.n_active

    @property
    def n_worst_rows(self) -> int:
        """Rows that one device receives if all tokens of all devices choose its experts."""
        return self.n_ranks * self.n_tokens * min(self.n_active, self.n_local_experts)

    @property
    def n_worst_dropped(self) -> int:
        """Rows for one device that are dropped under the worst routing: all tokens choose the same experts."""
        room = self.n_buffer_rows
        if self.n_expert_slots is not None:
            room = self.n_ranks * min(self.n_active, self.n_local_experts) * self.n_expert_slots
        return 0 if self.has_rounds else max(0, self.n_worst_rows - room)

    def received_rows(self, skew: float) -> Fraction:
        """Rows that the most loaded device receives from others, if its experts are chosen `skew` times as often as the mean."""
        if self.n_slots is not None:
            return Fraction((self.n_ranks - 1) * self.n_slots)
        most = self.n_worst_rows if self.has_rounds else min(self.n_worst_rows, self.n_buffer_rows)
        rows = min(Fraction(skew) * self.n_rows, Fraction(most))
        return rows * Fraction(self.n_ranks - 1, self.n_ranks)

    def device_load(self, skew: float) -> float:
        """Rows that the most loaded device computes over the mean; slots of experts are computed, filled or not."""
        if self.n_expert_slots is not None:
            return 1.0
        return skew if self.has_rounds else min(skew, self.n_buffer_rows / self.n_rows)

    def exchange_load(self, skew: float) -> float:
        """Time of the exchange for the most loaded device, in rows or whole rounds, over the time under balanced routing."""
        if self.n_slots is None:
            return float(self.received_rows(skew) / self.received_rows(1.0))
        return float(ceil(skew * self.n_rows / self.n_buffer_rows)) if self.has_rounds else 1.0

    @property
    def n_most_rows(self) -> Fraction:
        """Rows that a device receives from others if all tokens choose its experts."""
        if self.n_slots is not None:
            return Fraction((self.n_ranks - 1) * self.n_slots)
        from_others = Fraction(self.n_worst_rows * (self.n_ranks - 1), self.n_ranks)
        return from_others if self.has_rounds else min(Fraction(self.n_buffer_rows), from_others)

    @property
    def rounds_note(self) -> str:
        """What the time of an exchange in rounds assumes about the routing."""
        limit = f"{self.n_buffer_rows:,} rows to a device"
        if self.n_slots is not None:
            limit = f"{self.n_slots:,} rows from one device to another"
        return (
            "the expert exchange counts as one round, as under balanced routing: if routing sends more "
            f"than {limit}, it takes further rounds and more time"
        )


def dispatch_of(  # noqa: PLR0913  the parameters of an exchange
    moe: MixtureOfExperts,
    plan: Plan,
    *,
    n_tokens: int,
    form: DispatchForm,
    capacity_factor: float | None,
    has_expert_slots: bool = False,
) -> Dispatch | None:
    """The exchange for one device's `n_tokens`; None if no rows are exchanged.

    Without a capacity factor, no row is dropped: buffers fit the worst routing, or in rounds somewhat more than the mean.
    """
    axes, n_ranks = exchange_axes(plan, form), plan.ep
    if not axes:
        return None
    n_local = moe.n_experts // n_ranks
    worst, n_rows = n_tokens * min(moe.n_active, n_local), n_tokens * moe.n_active
    n_slots = n_expert_slots = None
    if has_expert_slots:
        n_expert_slots = moe.n_slots(n_tokens, capacity_factor)
        n_slots = n_local * n_expert_slots
        room = worst = n_ranks * n_slots
    elif form in {DispatchForm.RAGGED, DispatchForm.FUSED}:
        worst *= n_ranks
        room = _room(worst, n_rows, capacity_factor, least=MIN_ROUND_ROWS)
    else:
        mean, least = Fraction(n_rows, n_ranks), -(-MIN_ROUND_ROWS // n_ranks)
        n_slots = _room(worst, mean, capacity_factor, least=least)
        room, worst = n_ranks * n_slots, n_ranks * worst
    return Dispatch(
        form=form,
        axes=axes,
        n_ranks=n_ranks,
        n_tokens=n_tokens,
        n_active=moe.n_active,
        n_local_experts=n_local,
        n_buffer_rows=room,
        n_slots=n_slots,
        n_expert_slots=n_expert_slots,
        has_rounds=capacity_factor is None and room < worst,
    )


def _room(worst: int, mean: Fraction | int, capacity_factor: float | None, *, least: int) -> int:
    """Rows of a buffer: the capacity factor times the mean, or room for one round."""
    if capacity_factor is not None:
        return min(worst, ceil(mean * Fraction(capacity_factor)))
    rows = max(ceil(mean * ROUND_ROOM), ceil(mean + ROUND_DEVIATIONS * sqrt(mean)), least)
    return min(worst, -(-rows // ROWS_STEP) * ROWS_STEP)


def exchange_axes(plan: Plan, form: DispatchForm = DispatchForm.AUTO) -> tuple[str, ...]:
    """The axes of the dispatch all-to-all; () if the experts are sharded over tp only, whose devices have the same tokens."""
    # A fused kernel splits the tokens over tp.
    is_exchanged = form is DispatchForm.FUSED or plan.data_axis in plan.expert_axes
    return plan.expert_axes if is_exchanged and form is not DispatchForm.ALLGATHER else ()


def gathered_ranks(plan: Plan, form: DispatchForm) -> int:
    """Data-parallel ranks whose tokens each device gathers for its experts; 1 if it has its own alone."""
    is_gathered = form is DispatchForm.ALLGATHER and plan.data_axis in plan.expert_axes
    return plan.data_size if is_gathered else 1


def routed_tokens(plan: Plan, n_local_tokens: int, form: DispatchForm = DispatchForm.AUTO) -> int:
    """Tokens of its tp group that one device routes: a share, rounded up, if the dispatch includes tp."""
    return -(-n_local_tokens // plan.tp) if "tp" in exchange_axes(plan, form) else n_local_tokens
