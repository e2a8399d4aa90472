"""Prefill in chunks over cp: the collectives of every chunk, and the balance of its attention."""

import pytest

import meshscope
from meshscope.events.enums import Kind, Phase


def _predicted(chunk: int | str, **options: str) -> meshscope.Run:
    plan = options.pop("plan", "cp=4,tp=2")
    return meshscope.predict(
        "meta-llama/Llama-3.1-8B",
        topology="v6e-8",
        plan=plan,
        prompt=65536,
        prefill_chunk=chunk,
        **options,
    )


def test_each_chunk_gathers_queries_and_returns_outputs_and_sums() -> None:
    """16 chunks of 4,096 positions in 32 layers; 16 of 32 heads on each device, of 128 channels."""
    rows = [r for r in _predicted(4096).record.rows if r.axis == "cp" and r.layer is not None]
    prefill = {(r.kind, r.dtype, r.shape): r.count for r in rows if r.phase is Phase.PREFILL}

    assert prefill == {
        (Kind.ALL_GATHER, "bf16", (1, 4096, 16, 128)): 16,
        (Kind.ALL_TO_ALL, "bf16", (4, 1, 1024, 2048)): 16,
        (Kind.ALL_TO_ALL, "f32", (4, 1, 1024, 16)): 16,
    }


def test_chunks_share_the_work_that_the_last_device_has_for_a_whole_prompt() -> None:
    """The last of four devices has 7/4 of the mean in a whole prompt, in 16 chunks 1 + 3/4/16 of it."""
    whole, chunks = (
        next(part.flops for part in _predicted(chunk).record.times[0].parts if part.part == "attn")
        for chunk in ("off", 4096)
    )
    mean_pairs = 65536**2 / 2 / 4
    flops_of_pair = 4 * 128 * 16 * 32  # two products, 128 channels, 16 heads of a device, 32 layers
    expected = flops_of_pair * mean_pairs * (3 / 4 - 3 / 4 / 16)
    assert whole - chunks == pytest.approx(expected, rel=0.02)  # blocks on the diagonal are whole


def test_sequences_in_chunks_of_whole_prompts_keep_the_ring() -> None:
    options = {"topology": "v6e-8", "plan": "cp=2,tp=4", "batch": 4, "prompt": 1024}
    chunked, whole = (
        meshscope.predict("meta-llama/Llama-3.1-8B", **options, prefill_chunk=chunk)
        for chunk in (2048, "off")
    )
    permutes = [
        [(r.shape, r.count) for r in run.record.rows if r.kind is Kind.PERMUTE]
        for run in (chunked, whole)
    ]
    assert set(permutes[0]) == {((2, 512, 2, 128), 2)}
    assert set(permutes[1]) == {((4, 512, 2, 128), 1)}


def test_blocks_of_linear_attention_compute_how_they_map_the_state() -> None:
    """4,096 tokens of a device in three linear layers: 32 heads of keys and values of 128, over tp=4."""
    whole, split = (
        meshscope.predict(
            "Qwen/Qwen3.5-9B", topology="v6e-8", plan=plan, batch=2, prompt=4096, layers=3
        )
        for plan in ("dp=2,tp=4", "cp=2,tp=4")
    )
    flops = [
        next(part.flops for part in run.record.times[0].parts if part.part == "attn")
        for run in (whole, split)
    ]
    of_token = 32 * (6 * 128**2 + 2 * 64 * 128 + 2 * 128**2)  # chunks of 64 tokens
    of_sequence = 6 * 2 * 32 * 2 * 128**3  # two blocks, in six passes of bfloat16
    assert flops[1] - flops[0] == pytest.approx(3 * (4096 * of_token + 2 * of_sequence) / 4)
