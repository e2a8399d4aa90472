"""The time of a request from its steps."""

import pytest

from meshscope.analysis.request import basis_of, modeled_request_time
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import StepTime, TimeEstimate


def _step(phase: Phase, s: float, by_basis: dict[str, float]) -> StepTime:
    return StepTime(
        source=Source.COMPILED,
        phase=phase,
        step=TimeEstimate(value_s=s, low_s=s / 2, high_s=s * 2),
        compute_s=s,
        exposed_s=0.0,
        idle_s=0.0,
        bubble_s=0.0,
        collective_s=0.0,
        exposed_by_axis_s={},
        by_basis_s=by_basis,
        parts=(),
    )


PREFILL = _step(Phase.PREFILL, 0.5, {"compiler_cycles": 0.5})
DECODE = _step(Phase.DECODE, 0.01, {"roofline": 0.007, "interconnect_model": 0.003})


def test_request_is_its_prefill_and_all_decode_steps():
    request = modeled_request_time([PREFILL, DECODE], n_decode_steps=127)
    assert request.ttft == PREFILL.step
    assert request.tpot == DECODE.step
    assert request.e2e is not None
    assert request.e2e.value_s == pytest.approx(0.5 + 1.27)
    assert request.e2e.low_s == pytest.approx(0.25 + 0.635)
    assert request.basis == "compiler_cycles+roofline+interconnect_model"


def test_request_of_one_token_has_no_time_per_token():
    request = modeled_request_time([PREFILL], n_decode_steps=0)
    assert (request.tpot, request.e2e) == (None, PREFILL.step)


def test_an_unknown_number_of_tokens_has_no_end_to_end_time():
    request = modeled_request_time([PREFILL, DECODE], n_decode_steps=None)
    assert (request.ttft, request.tpot, request.e2e) == (PREFILL.step, DECODE.step, None)


def test_a_missing_step_leaves_the_time_unknown():
    assert modeled_request_time([PREFILL], n_decode_steps=3).e2e is None
    assert modeled_request_time([], n_decode_steps=3).ttft is None
    assert basis_of([]) is None
