"""Serving engines by name: what they bring, buckets, hidden host time, ranks that step together, published runs."""

from statistics import median

import pytest
from constant_server import DECODE_S, PREFILL_S, ROOMY, at_once, pool
from published_serving import error, published_serving
from tables import table

import meshscope
from meshscope.errors import SpecError
from meshscope.serving.engine import EnginePolicy, bucket
from meshscope.serving.servers import ENGINES, serving_engine
from meshscope.serving.simulation import served_whole

QWEN = {"topology": "v6e-4", "plan": "tp=4", "requests": 8, "max_concurrency": 4, "output": 8}
TOGETHER = EnginePolicy(max_sequences=4, max_step_tokens=1000, steps_together=True)


def test_a_name_alone_is_the_newest_version() -> None:
    assert str(serving_engine("vllm-tpu")) == "vllm-tpu@0.32"
    assert all(serving_engine(str(engine)) == engine for engine in ENGINES)


@table
def test_another_server_is_refused_with_the_nearest(server: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        serving_engine(server)


def test_a_server_excludes_another_host_time() -> None:
    with pytest.raises(SpecError, match="Omit host_overhead="):
        meshscope.serve_sim("Qwen/Qwen3-8B", server="vllm-tpu", host_overhead=0.01, **QWEN)


@table
def test_a_bucket_is_a_power_of_two(n: int, least: int | None, expected: int) -> None:
    assert bucket(n, least) == expected


def test_the_host_is_added_to_decode_steps_and_hidden_by_prefill() -> None:
    policy = EnginePolicy(host_s=0.003, host_sequence_s=0.001, host_token_s=1e-6, hides_host=True)
    assert policy.step_s([0.01], 4, 0) == pytest.approx([0.017])
    assert policy.step_s([0.01], 4, 100) == pytest.approx([0.01])
    assert policy.step_s([0.001], 0, 1000) == pytest.approx([0.004])


def test_ranks_step_together() -> None:
    """Two ranks, one request each: a prefill, then two decode steps, at the same times."""
    requests, engines = served_whole(at_once(2, output=3), pool(TOGETHER, n_engines=2))
    assert requests.first_token_s == pytest.approx([PREFILL_S] * 2)
    assert requests.finish_s == pytest.approx([PREFILL_S + 2 * DECODE_S] * 2)
    assert [one.n_steps for one in engines] == [3, 3]


def test_a_rank_that_decodes_waits_for_one_that_prefills() -> None:
    """Of two ranks with one request in flight each, one has a prompt of two chunks: the other decodes meanwhile."""
    load = at_once(2, output=3)
    load.n_prompt[1] = 2000
    requests, _ = served_whole(load, pool(TOGETHER, n_engines=2))
    # steps: both prefill; a decode of the first waits for the second chunk; then decode steps alone
    assert requests.first_token_s == pytest.approx([PREFILL_S, 2 * PREFILL_S])
    assert requests.finish_s == pytest.approx(
        [2 * PREFILL_S + DECODE_S, 2 * PREFILL_S + 2 * DECODE_S]
    )


def test_every_request_of_a_closed_loop_is_served_by_ranks_together() -> None:
    load = at_once(50, output=7)
    requests, engines = served_whole(load, pool(TOGETHER, ROOMY, n_engines=3), max_concurrency=6)
    assert requests.n_tokens == int(load.n_output.sum())
    assert [one.n_free for one in engines] == [ROOMY.n_blocks] * 3


def test_a_server_takes_longer_than_an_ideal_engine() -> None:
    def itl_s(server: str | None) -> float:
        itl = meshscope.serve_sim("Qwen/Qwen3-8B", server=server, **QWEN).outcome.result.figures.itl
        assert itl is not None
        return itl.p50_s

    engine = serving_engine("sglang-jax@2026.01")
    assert itl_s(str(engine)) - itl_s(None) >= engine.host_s


@pytest.mark.slow
@table
def test_the_judging_half_is_met(server: str, name: str, typical: float, worst: float) -> None:
    """docs/serving.md states these errors, as they are today."""
    errors = [
        abs(one)
        for run in published_serving()
        if run.server == server and not (run.is_fitted or run.is_inference_x)
        if (one := error(run, name)) is not None
    ]
    assert median(errors) <= typical
    assert max(errors) <= worst
