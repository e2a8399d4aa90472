"""Dispatch to experts: buffers, dropped rows and traffic against explicit arithmetic."""

from fractions import Fraction

import pytest
from tables import table

from meshscope.model.config import read_model
from meshscope.plans.dispatch import Dispatch, DispatchForm, dispatch_of, routed_tokens
from meshscope.plans.plan import parse_plan

DEEPSEEK = read_model("DeepSeek-V3").moe  # 256 experts, 8 of them a token
RAGGED, CAPACITY = DispatchForm.RAGGED, DispatchForm.CAPACITY


def _dispatch(
    plan: str,
    n_tokens: int,
    form: DispatchForm = RAGGED,
    factor: float | None = None,
    **slots: bool,
) -> Dispatch:
    parsed = parse_plan(plan)
    return dispatch_of(
        DEEPSEEK, parsed, n_tokens=n_tokens, form=form, capacity_factor=factor, **slots
    )


@table
def test_only_a_capacity_factor_drops_rows(
    form: DispatchForm, factor, n_buffer_rows, n_slots, n_worst_dropped
) -> None:
    dispatch = _dispatch("dp=8,tp=8,ep=64", 128, form, factor)
    assert dispatch.n_rows == 1024
    assert (dispatch.n_buffer_rows, dispatch.n_slots) == (n_buffer_rows, n_slots)
    assert dispatch.n_worst_dropped == n_worst_dropped


def test_a_note_says_which_routing_takes_further_rounds() -> None:
    assert "1,280 rows to a device" in _dispatch("dp=8,tp=8,ep=64", 128).rounds_note
    capacity = _dispatch("dp=8,tp=8,ep=64", 128, CAPACITY)
    assert "40 rows from one device to another" in capacity.rounds_note


def test_few_tokens_have_room_for_the_worst_routing() -> None:
    """A decode step of 64 sequences on 64 devices: all tokens may choose the same four experts."""
    dispatch = _dispatch("dp=8,tp=8,ep=64", 1)
    assert (dispatch.n_buffer_rows, dispatch.has_rounds) == (64 * 4, False)


@pytest.mark.parametrize("plan", ["tp=8", "tp=8,ep=8", "dp=2,tp=4,ep=4"])
def test_no_rows_are_exchanged_if_all_expert_devices_have_the_same_tokens(plan: str) -> None:
    assert _dispatch(plan, 8) is None


@table
def test_axes_and_tokens_of_an_exchange(plan, axes, n_tokens) -> None:
    assert routed_tokens(parse_plan(plan), 100) == n_tokens
    assert list(_dispatch(plan, n_tokens).axes) == axes


def test_received_rows_grow_with_the_skew_up_to_the_buffer_and_all_rows() -> None:
    dispatch = _dispatch("dp=8,tp=8,ep=64", 128)
    assert dispatch.received_rows(1) == Fraction(1024 * 63, 64)
    assert dispatch.received_rows(1.5) == Fraction(3, 2) * dispatch.received_rows(1)
    assert dispatch.received_rows(1e9) == dispatch.n_most_rows == 128 * 4 * 63
    bounded = _dispatch("dp=8,tp=8,ep=64", 128, RAGGED, 1.25)
    assert bounded.received_rows(1e9) == Fraction(1280 * 63, 64)


def test_fixed_slots_are_sent_for_any_routing() -> None:
    dispatch = _dispatch("dp=8,ep=8", 10, CAPACITY, 2.0)
    assert dispatch.n_slots == 20
    assert {dispatch.received_rows(skew) for skew in (1, 2, 100)} == {Fraction(7 * 20)}
    assert dispatch.n_most_rows == 7 * 20


@table
def test_expert_slots_are_reserved_for_one_expert(factor, n_expert_slots, n_worst_dropped) -> None:
    dispatch = _dispatch("dp=8,ep=8", 10, CAPACITY, factor, has_expert_slots=True)
    assert dispatch.n_expert_slots == n_expert_slots
    assert dispatch.n_slots == 32 * n_expert_slots
    assert dispatch.n_buffer_rows == 8 * 32 * n_expert_slots
    assert dispatch.n_worst_dropped == n_worst_dropped
