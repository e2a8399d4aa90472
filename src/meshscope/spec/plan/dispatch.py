"""How tokens reach their experts: over which axes, in which form, and how much of it at most.

A device routes `n_tokens` tokens to `n_active` experts each: `n_rows` rows. Where the experts lie
over axes that also split the tokens, rows travel to the device of their expert and back.
"""

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from math import ceil

from meshscope.spec.model.model import MixtureOfExperts
from meshscope.spec.plan.plan import Plan


class DispatchForm(StrEnum):
    """How rows travel: as many as there are, or a fixed number to each device."""

    AUTO = "auto"  # chosen by Experiment.dispatch_form
    RAGGED = "ragged"
    CAPACITY = "capacity"
    ONE_HOT = "one_hot"  # auto partitioner: einsums with a dispatch mask (GShard)
    ONE_HOT_PINNED = "one_hot_pinned"  # the same, rows annotated on both sides of the exchange
    GATHERED = "gathered"  # auto partitioner: rows gathered by index, grouped matmul


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One device's part in the exchange of rows, in one layer of one step.

    `n_buffer_rows` is what a device can receive; `n_slots` of them from each device where every
    pair of devices has the same fixed number, None where rows lie as they come. `n_expert_slots` of
    those are for each expert, where a slot is for one expert alone and not for any of its device.
    """

    form: DispatchForm
    axes: tuple[str, ...]
    n_ranks: int
    n_tokens: int
    n_active: int
    n_local_experts: int
    n_buffer_rows: int
    n_slots: int | None
    n_expert_slots: int | None = None

    @property
    def n_rows(self) -> int:
        """Rows that one device sends, those to itself included."""
        return self.n_tokens * self.n_active

    @property
    def n_worst_rows(self) -> int:
        """Rows that one device receives when every token of all devices chooses its experts."""
        return self.n_ranks * self.n_tokens * min(self.n_active, self.n_local_experts)

    @property
    def n_worst_dropped(self) -> int:
        """Rows that one device may have to drop of those sent to it, in the worst routing.

        With slots for experts: all tokens choose the same ones of its experts.
        """
        if self.n_expert_slots is not None:
            n_room = self.n_ranks * min(self.n_active, self.n_local_experts) * self.n_expert_slots
            return max(0, self.n_worst_rows - n_room)
        return max(0, self.n_worst_rows - self.n_buffer_rows)

    def received_rows(self, skew: float) -> Fraction:
        """Rows that the most loaded device gets from others, its experts chosen `skew` times the mean.

        More than its buffer holds, or than there are choices, it does not get. A fixed number of
        slots travels whatever the routing.
        """
        if self.n_slots is not None:
            return Fraction((self.n_ranks - 1) * self.n_slots)
        share = Fraction(self.n_ranks - 1, self.n_ranks)
        return min(Fraction(skew) * self.n_rows, Fraction(self._n_room)) * share

    @property
    def n_most_rows(self) -> Fraction:
        """Rows that a device gets from others when all tokens choose its experts."""
        if self.n_slots is not None:
            return Fraction((self.n_ranks - 1) * self.n_slots)
        return min(
            Fraction(self.n_buffer_rows),
            Fraction(self.n_worst_rows * (self.n_ranks - 1), self.n_ranks),
        )

    @property
    def _n_room(self) -> int:
        return min(self.n_worst_rows, self.n_buffer_rows)


def dispatch_of(  # noqa: PLR0913  what travels, how, and how much of it
    moe: MixtureOfExperts,
    plan: Plan,
    *,
    n_tokens: int,
    form: DispatchForm,
    capacity_factor: float | None,
    has_expert_slots: bool = False,
) -> Dispatch | None:
    """The exchange of one device's `n_tokens`; None where no row travels.

    Without a capacity factor there is room for the worst routing, and nothing is ever dropped.
    With one, a device has room for that many times the mean; or each expert has, at least one slot
    of every device, where slots are for experts.
    """
    axes = exchange_axes(plan)
    if not axes:
        return None
    n_local = moe.n_experts // plan.ep
    n_choices = min(moe.n_active, n_local)
    worst = n_tokens * n_choices
    n_rows = n_tokens * moe.n_active
    n_expert_slots = None
    if has_expert_slots:
        n_expert_slots = slots_of_expert(moe, n_tokens, capacity_factor)
        n_slots = n_local * n_expert_slots
        room = plan.ep * n_slots
    elif form is DispatchForm.RAGGED:
        room = plan.ep * worst
        if capacity_factor is not None:
            room = min(room, ceil(n_rows * capacity_factor))
        n_slots = None
    else:
        n_slots = worst
        if capacity_factor is not None:
            n_slots = min(worst, ceil(n_rows * capacity_factor / plan.ep))
        room = plan.ep * n_slots
    return Dispatch(
        form=form,
        axes=axes,
        n_ranks=plan.ep,
        n_tokens=n_tokens,
        n_active=moe.n_active,
        n_local_experts=n_local,
        n_buffer_rows=room,
        n_slots=n_slots,
        n_expert_slots=n_expert_slots,
    )


def slots_of_expert(moe: MixtureOfExperts, n_tokens: int, capacity_factor: float | None) -> int:
    """Of one device for one expert: room for all its tokens, or the factor times the mean, at least 1."""
    if capacity_factor is None:
        return n_tokens
    return min(n_tokens, max(1, ceil(n_tokens * moe.n_active * capacity_factor / moe.n_experts)))


def exchange_axes(plan: Plan) -> tuple[str, ...]:
    """The axes over which rows travel: none where the experts lie over tp alone."""
    return plan.expert_axes if plan.data_axis in plan.expert_axes else ()


def routed_tokens(plan: Plan, n_local_tokens: int) -> int:
    """Tokens that one device routes, of `n_local_tokens` that its tp group holds together.

    Where rows travel over tp too, each device of the group routes its share, rounded up.
    """
    return -(-n_local_tokens // plan.tp) if "tp" in exchange_axes(plan) else n_local_tokens
