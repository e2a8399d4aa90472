"""The tables of step costs against the prediction of whole steps."""

from dataclasses import replace

import numpy as np
import pytest
from constant_server import placed
from tables import table

from meshscope.api.predict import predict
from meshscope.cost.memory import predicted_memory
from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.plans.caches import CacheLayout
from meshscope.plans.memory import Memory
from meshscope.plans.plan import parse_plan
from meshscope.serving.step_costs import (
    BLOCK_TOKENS,
    StepCosts,
    cache_blocks,
    past_of,
    tabulated_costs,
)

MODEL = "Qwen/Qwen3-32B"


def costs(plan: str = "tp=8") -> StepCosts:
    return tabulated_costs(
        placed("v6e-8", plan), max_sequences=64, max_step_tokens=2048, max_context=4096
    )


@pytest.mark.parametrize("plan", ["tp=8", "dp=2,tp=4", "tp=8,sp", "pp=2,tp=4", "cp=2,tp=4"])
@pytest.mark.parametrize(("batch", "context"), [(1, 1025), (8, 1025), (32, 2001), (24, 705)])
def test_decode_steps_are_those_of_predict(plan: str, batch: int, context: int) -> None:
    size = parse_plan(plan).data_size
    run = predict(
        MODEL, topology="v6e-8", plan=plan, batch=batch * size, prompt=context - 1, output=2
    )
    (seconds,) = costs(plan).decode_s(batch, np.array([float(context)]))
    # 2 %: interpolation between points a factor of 1.4 apart
    assert seconds == pytest.approx(run.time.decode_step_s, rel=0.02)


@pytest.mark.parametrize("plan", ["tp=8", "tp=8,sp", "pp=2,tp=4", "cp=2,tp=4"])
@pytest.mark.parametrize("prompt", [256, 1024, 2048])
def test_a_whole_prompt_alone_takes_the_prefill_of_predict(plan: str, prompt: int) -> None:
    run = predict(MODEL, topology="v6e-8", plan=plan, prompt=prompt, prefill_chunk="off")
    assert costs(plan).mixed_s(0, 0.0, prompt, 0.0) == pytest.approx(run.time.prefill_s, rel=0.02)


def test_the_chunks_of_a_prompt_take_the_prefill_in_chunks() -> None:
    run = predict(MODEL, topology="v6e-8", plan="tp=8", prompt=4096, prefill_chunk=512)
    of_chunks = sum(costs().mixed_s(0, 0.0, 512, past) for past in range(0, 4096, 512))
    assert of_chunks == pytest.approx(run.time.prefill_s, rel=0.03)


def test_versions_of_a_server_sort_rows_and_read_experts_in_their_own_way() -> None:
    """One-hot products of June 2026 grow with the square of the tokens, up to 32,768 rows of 10 experts."""
    april, june, august = (
        tabulated_costs(
            placed("tpu7x-8", "tp=8,ep=8", "Qwen/Qwen3.5-397B-A17B"),
            max_sequences=16,
            max_step_tokens=4096,
            max_context=4096,
            experts=f"vllm-2026.{month}",
        )
        for month in ("04", "06", "08")
    )
    (quick_s,), (slow_s,) = (one.decode_s(16, np.array([1000.0])) for one in (august, june))
    assert quick_s < 0.95 * slow_s
    small, gathered, large = (june.mixed_s(0, 0.0, n, 0.0) for n in (1024, 4112, 2048))
    assert large > 1.8 * small
    assert gathered < 1.5 * large
    assert august.mixed_s(0, 0.0, 4112, 0.0) < april.mixed_s(0, 0.0, 4112, 0.0)
    assert august.mixed_s(0, 0.0, 2048, 0.0) < 0.7 * large


def test_mixed_steps_cost_more_than_their_prefill_and_less_than_both() -> None:
    table = costs()
    (decode_s,) = table.decode_s(32, np.array([2000.0]))
    prefill_s = table.mixed_s(0, 0.0, 512, 0.0)
    mixed_s = table.mixed_s(32, 2000.0, 512, 0.0)
    assert prefill_s < mixed_s < prefill_s + decode_s


@table
def test_chunks_count_by_the_pairs_of_their_attention(chunks, past) -> None:
    assert past_of(chunks) == pytest.approx(past)


def test_sp_splits_steps_of_at_least_tp_sequences() -> None:
    """Fewer sequences take the time of tp alone; 11 are padded to 16."""
    split, whole = costs("tp=8,sp"), costs("tp=8")
    context = np.array([1024.0])
    assert split.decode_s(4, context) == pytest.approx(whole.decode_s(4, context), rel=1e-3)
    assert split.decode_s(11, context) == split.decode_s(16, context)
    assert whole.decode_s(11, context) < whole.decode_s(16, context)


def test_a_pipeline_holds_a_batch_in_each_stage() -> None:
    """Two stages hold half of the layers and half of the cache each, and share it between two batches."""
    one, two = (
        cache_blocks(placed("v6e-8", plan), memory_frac=0.9) for plan in ("tp=8", "pp=2,tp=4")
    )
    assert two.n_blocks == pytest.approx(one.n_blocks / 2, rel=0.03)


def test_the_cache_takes_what_the_weights_leave() -> None:
    """Qwen3-32B on tp=8: 64 layers x 2 x 1 KV head x 128 x 2 B a token and device."""
    one = placed("v6e-8", "tp=8")
    memory: Memory = predict(MODEL, topology="v6e-8", plan="tp=8").memory
    free_bytes = 0.9 * memory.hbm_bytes - memory.weights_bytes
    blocks = cache_blocks(one, memory_frac=0.9)
    assert blocks.n_fixed == 0
    assert blocks.n_blocks == int(free_bytes / (BLOCK_TOKENS * 64 * 2 * 128 * 2))


def test_what_does_not_grow_with_the_context_takes_blocks_of_its_own() -> None:
    """DeepSeek-V4 keeps a window of positions beside the entries that it compresses."""
    blocks = cache_blocks(placed("v6e:8x8", "dp=8,tp=8,ep=64", "DeepSeek-V4"), memory_frac=0.9)
    assert blocks.n_fixed > 0
    assert blocks.of(BLOCK_TOKENS) == 1 + blocks.n_fixed


def test_a_cache_of_windows_alone_has_a_block_for_each_sequence() -> None:
    """Mistral-7B-v0.1: 32 layers x 4,096 positions x 2 x 8 KV heads x 128 x 2 B, over tp=8."""
    one = placed("v5e-8", "tp=8", "mistralai/Mistral-7B-v0.1")
    memory = predicted_memory(one)
    blocks = cache_blocks(one, memory_frac=0.9, layout=CacheLayout("sglang-jax"))
    free_bytes = 0.9 * (memory.hbm_bytes or 0) - (memory.weights_bytes or 0)
    assert blocks.n_blocks == free_bytes // (32 * 4096 * 2 * 128 * 2)
    assert (blocks.of(1), blocks.of(32768)) == (1, 1)
    run = predict(one.model.name, topology="v5e-8", plan="tp=8", batch=8, server="sglang-jax")
    served = run.record.manifest.served
    assert served is not None
    assert served.n_fitting == served.n_cache_tokens // 32768


def test_the_cache_of_a_server_has_the_tokens_of_its_public_log() -> None:
    """tpu-inference issue 757: 4,338 blocks of 128 tokens, as pages of 8 bits pack four heads."""
    run = predict(
        "meta-llama/Llama-3.1-70B",
        topology="v6e-8",
        plan="tp=8",
        weight_dtype="int8",
        cache_dtype="fp8",
        server="vllm-tpu",
    )
    served = run.record.manifest.served
    assert served is not None
    assert served.n_cache_tokens == pytest.approx(4_338 * 128, rel=0.1)
    text = " ".join(run.text(full=True).split())
    n_fitting = served.n_cache_tokens // (128 + 128)
    fits = f"fits yes: the server's cache holds {served.n_cache_tokens:,} tokens, {n_fitting:,} requests"
    assert f"{fits} own program yes: " in text


def test_requests_beyond_the_cache_of_a_server_do_not_fit() -> None:
    """The line had the memory of our own program, which fits or not whatever the server does."""
    asked = {"topology": "v6e-8", "plan": "tp=8", "batch": 256, "prompt": 4096, "output": 1024}
    run = predict("Qwen/Qwen3-32B", server="vllm-tpu", **asked)
    served = run.record.manifest.served
    assert served is not None
    assert served.n_fitting == served.n_cache_tokens // 5120 < 256
    text = " ".join(run.text().split())
    assert f"{served.n_fitting} of 256 requests; the others wait own program" in text
    old = replace(served, n_fitting=None)
    assert old.fits is None


def test_weights_without_room_for_a_cache_are_refused() -> None:
    with pytest.raises(SpecError, match=r"leave no room for a cache.*Use more devices"):
        cache_blocks(placed("v6e-1", "tp=1"), memory_frac=0.9)


def test_compiled_times_scale_the_sizes_and_those_between() -> None:
    closed = costs()
    scaled = closed.scaled({Phase.DECODE: {1: 1.5, 4: 0.5}})
    for n, ratio in ((1, 1.5), (2, 1.0), (4, 0.5), (16, 0.5)):
        seconds = ratio * closed.decode_step_s(n, 300.0)
        assert scaled.decode_step_s(n, 300.0) == pytest.approx(seconds)
    assert scaled.mixed_s(0, 0.0, 64, 0.0) == closed.mixed_s(0, 0.0, 64, 0.0)
    decoded = [(Phase.DECODE, n) for n in (1, 2, 4, 16)]
    assert sorted(closed.reached) == [*decoded, (Phase.PREFILL, 64)]
