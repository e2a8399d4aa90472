"""The time of a request from its steps, modeled and measured: parts sum to the whole, and steps to the request."""

import pytest
from made import estimate, part_cost
from made import step_time as compiled_step

from meshscope.analysis.overlap import exposed_by_axis, part_costs, step_time
from meshscope.analysis.request import basis_of, latency_of, modeled_request_time
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Request
from meshscope.events.step_time import StepTime


def _step(phase: Phase, s: float, by_basis: dict[str, float]) -> StepTime:
    return compiled_step(phase, estimate(s, s / 2, s * 2), s, by_basis_s=by_basis)


PREFILL = _step(Phase.PREFILL, 0.5, {"compiler_cycles": 0.5})
DECODE = _step(Phase.DECODE, 0.01, {"roofline": 0.007, "interconnect_model": 0.003})


def test_request_is_its_prefill_and_all_decode_steps():
    request = modeled_request_time([PREFILL, DECODE], n_decode_steps=127)
    assert (request.ttft, request.tpot) == (PREFILL.step, DECODE.step)
    assert (request.e2e.value_s, request.e2e.low_s) == pytest.approx((0.5 + 1.27, 0.25 + 0.635))
    assert request.basis == "compiler_cycles+roofline+interconnect_model"


@pytest.mark.parametrize(
    ("steps", "n", "ttft", "tpot", "e2e"),
    [
        ([PREFILL], 0, PREFILL.step, None, PREFILL.step),  # a single token
        ([PREFILL, DECODE], None, PREFILL.step, DECODE.step, None),
        ([PREFILL], 3, PREFILL.step, None, None),
        ([], 3, None, None, None),
    ],
    ids=["one token", "unknown tokens", "no decode step", "no step"],
)
def test_what_is_missing_leaves_a_time_unknown(steps, n, ttft, tpot, e2e):
    request = modeled_request_time(steps, n_decode_steps=n)
    assert (request.ttft, request.tpot, request.e2e) == (ttft, tpot, e2e)
    assert bool(steps) or basis_of(steps) is None


def made(phase: Phase, *, source: Source = Source.COMPILED, scale: float = 1.0) -> StepTime:
    parts = (
        part_cost("attn", 2 * scale, collective_s=1.5 * scale, exposed_s=1 * scale),
        part_cost("mlp", 1 * scale, collective_s=0.5 * scale, exposed_s=0.5 * scale),
    )
    return compiled_step(
        phase, estimate(5 * scale, 4 * scale, 7 * scale), 3 * scale,
        source=source, exposed_s=1.5 * scale, idle_s=0.5 * scale, bubble_s=0.25 * scale,
        collective_s=2 * scale, exposed_by_axis_s={"tp": 1 * scale, "dp": 0.5 * scale},
        by_basis_s={"compiler_cycles": 3 * scale, "interconnect_model": 1.5 * scale}, parts=parts,
    )  # fmt: skip


TIMES = (made(Phase.PREFILL), made(Phase.DECODE, scale=0.1))


def test_activities_axes_and_parts_sum_to_the_step() -> None:
    for row in step_time(TIMES).iter_rows(named=True):
        assert row["compute_s"] + row["exposed_s"] + row["idle_s"] == pytest.approx(row["step_s"])
        assert row["overlap_frac"] == pytest.approx(0.25)
        assert row["exposed_frac"] == pytest.approx(0.3)
        assert row["collective_compute_ratio"] == pytest.approx(2 / 3)
        assert row["time_basis"] == "compiler_cycles+interconnect_model"
    steps = {row["phase"]: row for row in step_time(TIMES).iter_rows(named=True)}
    for table in (exposed_by_axis(TIMES), part_costs(TIMES)):
        for phase, step in steps.items():
            assert table.filter(phase=phase)["exposed_s"].sum() == pytest.approx(step["exposed_s"])


REQUESTS = (
    Request(prefill_s=1.0, decode_s=(0.1, 0.3)),
    Request(prefill_s=3.0, decode_s=(0.2, 0.2)),
)


def test_latency_of_a_worked_example() -> None:
    latency = latency_of(REQUESTS, batch=4, prompt=8)
    assert (latency.ttft.mean_s, latency.e2e.mean_s) == pytest.approx((2.0, 2.4))
    assert (latency.tpot.mean_s, latency.tpot.n) == (pytest.approx(0.2), 2)
    assert (latency.itl.p50_s, latency.itl.n) == (pytest.approx(0.2), 4)
    rates = ("output_tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s")
    expected = [4 * 3 / 2.4, 4 * 8 / 2.0, 4 * 2 / 0.4]
    assert [getattr(latency, name) for name in rates] == pytest.approx(expected)


def test_a_request_of_one_token_has_no_latency_between_tokens() -> None:
    latency = latency_of((Request(prefill_s=1.0, decode_s=()),), batch=2, prompt=8)
    assert (latency.itl, latency.tpot, latency.decode_tokens_per_s) == (None, None, None)
    assert latency.output_tokens_per_s == pytest.approx(2.0)
