"""The engine against closed results of queueing theory, the scaling book, published runs, and its conservation laws."""

import numpy as np
import pytest
from constant_server import DECODE_S, ONE, PREFILL_S, ROOMY, ConstantCosts, at_once, poisson, pool
from made import experiment_with
from tables import table

from meshscope.plans.experiment import Experiment
from meshscope.reports.serving import even_ratio
from meshscope.serving.engine import BatchingEngine, EnginePolicy, run_engines
from meshscope.serving.load import Lengths, Load
from meshscope.serving.objective import Objective
from meshscope.serving.served_requests import ServedRequests, arriving
from meshscope.serving.simulation import (
    decode_rate,
    prefill_rate,
    saturated_rate,
    served_alone,
    simulated_load,
)
from meshscope.serving.step_costs import BLOCK_TOKENS, CacheBlocks, cache_blocks, sequence_bytes

SMALL_CACHE = CacheBlocks(
    n_blocks=8 * (-(-140 // BLOCK_TOKENS))
)  # eight sequences of 140 positions


def served(
    load: Load, policy: EnginePolicy = ONE, blocks: CacheBlocks = ROOMY
) -> tuple[ServedRequests, BatchingEngine]:
    return served_alone(load, pool(policy, blocks))


@pytest.mark.slow
@pytest.mark.parametrize("utilization", [0.3, 0.6, 0.8])
def test_waits_of_equal_requests_are_those_of_m_d_1(utilization: float) -> None:
    """Pollaczek-Khinchine for constant service: W = rho s / (2 (1 - rho))."""
    load = poisson(utilization / PREFILL_S, 40_000)
    done, _ = served(load, ONE)
    waits_s = done.first_token_s - done.arrival_s - PREFILL_S
    expected_s = utilization * PREFILL_S / (2 * (1 - utilization))
    # 40,000 correlated waits: 8 % is three standard errors at 80 % utilization
    assert float(waits_s.mean()) == pytest.approx(expected_s, rel=0.08)


@pytest.mark.slow
def test_waits_of_requests_of_random_length_are_those_of_m_g_1() -> None:
    """Pollaczek-Khinchine: W = lambda E[S^2] / (2 (1 - rho)), with geometric output lengths."""
    load = poisson(2.0, 40_000, output=21, lengths=Lengths.GEOMETRIC)
    done, _ = served(load, ONE)
    service_s = PREFILL_S + (load.n_output - 1) * DECODE_S
    rho = 2.0 * float(service_s.mean())
    expected_s = 2.0 * float((service_s**2).mean()) / (2 * (1 - rho))
    waits_s = done.first_token_s - done.arrival_s - PREFILL_S
    assert float(waits_s.mean()) == pytest.approx(expected_s, rel=0.08)
    assert done.finish_s - done.first_token_s == pytest.approx((load.n_output - 1) * DECODE_S)


@pytest.mark.slow
def test_the_busy_share_is_the_offered_load() -> None:
    result = simulated_load(poisson(5.0, 20_000), pool(), Objective())
    (engine,) = result.pools
    assert engine.busy_frac == pytest.approx(0.5, rel=0.02)
    assert engine.mean_running == pytest.approx(0.5, rel=0.02)
    assert result.figures.requests_per_s == pytest.approx(5.0, rel=0.02)


@pytest.mark.parametrize("until_s", [0.05, 1.0, 7.3, 50.0])
@pytest.mark.parametrize("n_blocks", [40, 100, 10_000])
def test_requests_in_are_requests_done_running_or_waiting(until_s: float, n_blocks: int) -> None:
    blocks = CacheBlocks(n_blocks=n_blocks)
    policy = EnginePolicy(max_sequences=16, max_step_tokens=64)
    load = poisson(10.0, 200, output=40)
    log = ServedRequests(load=load)
    engine = BatchingEngine(pool=pool(policy, blocks), requests=log, inbox=arriving(load))
    run_engines([engine], until_s)
    n_done = int((~np.isnan(log.finish_s)).sum())
    n_arrived = load.n_requests - len(engine.inbox)
    assert n_arrived == n_done + engine.n_admitted + len(engine.waiting)
    held = sum(s.n_blocks for s in (*engine.running, *engine.filling))
    assert engine.n_free + held == n_blocks
    assert engine.n_free >= 0
    to_come = (*engine.running, *engine.filling, *engine.waiting, *(s for *_, s in engine.inbox))
    assert log.n_tokens + sum(s.n_left for s in to_come) == load.n_output.sum()


def test_a_small_cache_preempts_and_still_finishes_every_request() -> None:
    """Sixteen sequences of 140 positions in room for eight: all tokens come, some twice computed."""
    policy = EnginePolicy(max_sequences=16, max_step_tokens=256)
    load = poisson(1000.0, 64, output=40)
    done, trace = served(load, policy, SMALL_CACHE)
    assert trace.n_preemptions > 0
    assert not np.isnan(done.finish_s).any()
    assert done.n_tokens == 64 * 40
    assert int(done.weighted_gaps[1].sum()) == 64 * 39  # between the tokens of a request
    assert trace.samples[:, 3].max() <= SMALL_CACHE.n_blocks
    assert trace.samples[-1, 1:].tolist() == [0, 0, 0, 0, 0]  # idle and empty at the end
    assert served(load, policy)[1].n_preemptions == 0


def test_the_same_seed_gives_the_same_result_and_another_another() -> None:
    first, second = (served(poisson(5.0, 500), ONE)[0] for _ in range(2))
    assert first.finish_s.tolist() == second.finish_s.tolist()
    other, _ = served(poisson(5.0, 500, seed=2))
    assert other.finish_s.tolist() != first.finish_s.tolist()


@pytest.mark.parametrize(("rate_per_s", "is_stable"), [(8.0, True), (12.0, False)])
def test_arrivals_faster_than_service_are_unstable(rate_per_s: float, is_stable: bool) -> None:  # noqa: FBT001
    result = simulated_load(poisson(rate_per_s, 3000), pool(), Objective(ttft_s=0.5))
    assert result.saturated_per_s == pytest.approx(10.0, rel=2e-3)
    assert result.is_stable is is_stable
    assert (result.figures.goodput_frac > 0.5) is is_stable


def test_rates_beyond_service_are_unstable_until_ranks_share_the_requests() -> None:
    load = poisson(16.0, 4000)
    one, two = (simulated_load(load, pool(n_engines=n), Objective()) for n in (1, 2))
    assert (one.is_stable, two.is_stable) == (False, True)
    assert two.saturated_per_s == pytest.approx(2 * one.saturated_per_s, rel=2e-3)
    assert two.figures.n_requests == 2000
    load = poisson(1.0, 200, output=11)
    rate = saturated_rate(load, pool())
    assert rate == pytest.approx(1 / (PREFILL_S + 10 * DECODE_S), rel=0.01)


def test_ranks_without_a_request_serve_none() -> None:
    """20 requests at once, 3 on the first of 8 engines: its 3 requests take as long as all do."""
    load = poisson(1.0, 20).only(slice(None))
    load.arrival_s[:] = 0.0
    for n in (8, 20):
        one_rank, _ = served_alone(load.only(slice(None, None, n)), pool(n_engines=n))
        every = simulated_load(load, pool(n_engines=n), Objective())
        expected = 20 / float(one_rank.finish_s.max())
        assert every.figures.requests_per_s == pytest.approx(expected)
    spread = poisson(1.0, 5)
    figures = simulated_load(spread, pool(n_engines=8), Objective()).figures
    assert figures.requests_per_s < 5 / float(spread.arrival_s[-1] - spread.arrival_s[0])


def test_cached_prefixes_shorten_prefill_and_host_time_lengthens_steps() -> None:
    class ByToken(ConstantCosts):
        def mixed_s(self, n_sequences: int, context: float, n_tokens: int, past: float) -> float:
            assert (n_sequences, context, past >= 0) == (0, 0.0, True)
            return n_tokens * 1e-3

    def first_s(policy: EnginePolicy) -> float:
        done, _ = served_alone(poisson(0.1, 1), pool(policy, costs=ByToken()))
        return float(done.first_token_s[0] - done.arrival_s[0])

    assert first_s(EnginePolicy()) == pytest.approx(0.1)
    assert first_s(EnginePolicy(prefix_hit_frac=0.5)) == pytest.approx(0.05)
    assert first_s(EnginePolicy(host_s=0.01)) == pytest.approx(0.11)
    short = EnginePolicy(max_sequences=1, max_step_tokens=25, host_s=0.01)
    assert first_s(short) == pytest.approx(0.1 + 4 * 0.01)


def test_a_delay_before_the_scheduler_leaves_the_rate_that_can_be_served() -> None:
    load = poisson(1.0, 4, output=3)
    rates = [saturated_rate(load, pool(EnginePolicy(host_request_s=s))) for s in (0.0, 5.0)]
    assert rates[0] == pytest.approx(rates[1])


@pytest.mark.parametrize("max_concurrency", [1, 3, 20])
def test_a_client_keeps_so_many_requests_in_flight(max_concurrency: int) -> None:
    """Little's law: requests in flight are the rate times the time of a request."""
    policy = EnginePolicy(max_sequences=8, max_step_tokens=100)
    load = at_once(400, output=6)
    done, _ = served_alone(load, pool(policy), max_concurrency=max_concurrency)
    changes = sorted([(t, 1) for t in done.arrival_s] + [(t, -1) for t in done.finish_s])
    assert max(np.cumsum([change for _, change in changes])) == max_concurrency
    mean_s = float((done.finish_s - done.arrival_s).mean())
    # The last requests leave the client with fewer in flight.
    in_flight = mean_s * load.n_requests / float(done.finish_s.max())
    assert in_flight == pytest.approx(max_concurrency, rel=0.03)


def test_separate_steps_never_prefill_and_decode_at_once() -> None:
    load = poisson(8.0, 300, output=20)
    policies = [
        EnginePolicy(max_sequences=16, max_step_tokens=100, has_mixed_steps=mixes)
        for mixes in (True, False)
    ]
    (mixed, mixed_trace), (done, trace) = (served(load, policy) for policy in policies)
    assert (mixed_trace.samples[:, 4:] > 0).all(axis=1).any()
    assert not (trace.samples[:, 4:] > 0).all(axis=1).any()
    for requests in (mixed, done):
        assert requests.n_tokens == load.n_output.sum()
        gaps_s, n_gaps = requests.weighted_gaps
        assert int(n_gaps.sum()) == (load.n_output - 1).sum()
        later_s = float((requests.finish_s - requests.first_token_s).sum())
        assert float(gaps_s @ n_gaps) == pytest.approx(later_s)


def test_reserved_outputs_are_never_preempted() -> None:
    load = poisson(1000.0, 64, output=40)
    policy = EnginePolicy(max_sequences=16, max_step_tokens=256, reserved_frac=1.0)
    done, trace = served(load, policy, SMALL_CACHE)
    assert trace.n_preemptions == 0
    assert np.isfinite(done.finish_s).all()
    assert trace.samples[:, 1].max() == 8  # as many as the cache holds to their end


@pytest.mark.parametrize("n_requests", [2, 3, 10])
@pytest.mark.parametrize("n_engines", [1, 2])
def test_few_requests_are_not_served_faster_than_they_arrive(
    n_requests: int, n_engines: int
) -> None:
    """The last of n requests ends before the next would come, so n of them take n gaps."""
    result = simulated_load(poisson(0.1, n_requests), pool(n_engines=n_engines), Objective())
    assert result.offered_per_s is not None
    assert result.figures.requests_per_s <= result.offered_per_s * (1 + 1e-9)


CHIP_BYTES_PER_S = 8.2e11
CONTEXT = 8192
OUTPUT = 20


class BookCosts(ConstantCosts):
    """Decode steps that read these weights, and the cache of CONTEXT positions of each sequence."""

    def __init__(self, weights_bytes: float, token_bytes: float, n_chips: int) -> None:
        self.weights_bytes, self.token_bytes, self.n_chips = weights_bytes, token_bytes, n_chips

    def decode_s(self, n_sequences: int, contexts: np.ndarray) -> np.ndarray:
        n_bytes = self.weights_bytes + n_sequences * CONTEXT * self.token_bytes
        return np.full(len(contexts), n_bytes / (self.n_chips * CHIP_BYTES_PER_S))


def llama_13b() -> Experiment:
    return experiment_with("meta-llama/Llama-2-13B", "tp=8", "v5e:2x4", batch=1, prompt=1024)


@table
def test_llama_2_13b_on_eight_v5e(batch, share, step_s, tokens_per_s) -> None:
    """Part 7: steps and tokens/s at contexts of 8,192, and with a cache of a fifth of the size."""
    _, device_bytes = sequence_bytes(llama_13b())
    costs = BookCosts(26e9, 8 * device_bytes / share, 8)
    policy = EnginePolicy(max_sequences=batch, max_step_tokens=1 << 20, has_mixed_steps=False)
    requests, trace = served_alone(
        at_once(batch, prompt=CONTEXT, output=OUTPUT), pool(policy, ROOMY, costs=costs)
    )
    decode_s = trace.now_s - float(requests.first_token_s.max())
    assert decode_s / (OUTPUT - 1) == pytest.approx(step_s, rel=0.01)
    # The book rounds weights and cache, to three digits
    assert batch * (OUTPUT - 1) / decode_s == pytest.approx(tokens_per_s, rel=0.01)


def test_sixteen_contexts_of_8192_fit_and_no_more() -> None:
    """Part 7: "KV cache memory + param memory" exceeds 8 v5e beyond a batch of 16."""
    blocks = cache_blocks(llama_13b(), memory_frac=1.0)
    assert blocks.n_blocks // blocks.of(CONTEXT) == 16


@pytest.mark.parametrize(
    ("batch", "n_chips", "per_chip"), [(43, 16, 0.27), (52, 8, 0.66), (67, 4, 1.72)]
)
def test_requests_a_second_of_llama_3_70b(batch: int, n_chips: int, per_chip: float) -> None:
    """Part 8: caches of 8k fill the HBM, a step takes 19 ms, and a request decodes 512 tokens."""
    full = BookCosts(n_chips * CHIP_BYTES_PER_S * 0.019, 0.0, n_chips)
    engines = pool(EnginePolicy(max_sequences=batch), costs=full)
    rate = decode_rate(at_once(batch, prompt=CONTEXT, output=513), engines)
    assert rate / n_chips == pytest.approx(per_chip, rel=0.03)  # two digits


def test_three_prefill_servers_for_each_decode_server() -> None:
    """Part 8: 0.91 s for a prompt of 8,192, and batches of 32 that decode 512 tokens at 19 ms."""
    load = at_once(64, prompt=CONTEXT, output=513)
    full = BookCosts(16 * CHIP_BYTES_PER_S * 0.019, 0.0, 16)
    decode = decode_rate(load, pool(EnginePolicy(max_sequences=32), costs=full))

    class Prefill(ConstantCosts):
        def mixed_s(self, n_sequences: int, context: float, n_tokens: int, past: float) -> float:
            return super().mixed_s(n_sequences, context, n_tokens, past) * 9.1  # 0.1 s each

    one = EnginePolicy(max_sequences=1, max_step_tokens=CONTEXT)
    assert even_ratio(prefill_rate(load, pool(one, costs=Prefill())), decode) == (3, 1)
