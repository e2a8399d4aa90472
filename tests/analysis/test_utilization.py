"""Shares of peaks, against published arithmetic."""

import pytest
from made import experiment_with
from tables import table

from meshscope.analysis.utilization import (
    active_parameters,
    bubble_frac,
    mbu,
    mfu,
    model_flops,
    n_parameters,
)
from meshscope.cost.predicted import predicted_times
from meshscope.events.enums import Phase
from meshscope.hardware.chips import CHIPS
from meshscope.model.config import read_model
from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.compressed import CompressedAttention
from meshscope.plans.workload import Workload

LLAMA = "meta-llama/Llama-3.1-8B"


def test_parameters_are_those_of_the_model_card_and_a_token_uses_two_of_eight_experts() -> None:
    """8,030,261,248 in the safetensors index of Llama-3.1-8B; the embedding is 128,256 x 4,096.

    Mixtral: 46.7 billion, 12.9 billion a token (Jiang et al., arXiv 2401.04088, section 1: 47B, 13B).
    """
    assert n_parameters(read_model(LLAMA)) == (8_030_261_248, 8_030_261_248, 128_256 * 4096)
    total, met, _ = n_parameters(read_model("mistralai/Mixtral-8x7B-v0.1"))
    assert (total, met) == pytest.approx((46.7e9, 12.9e9), rel=0.002)


def test_flops_of_a_dense_model_are_two_per_parameter_plus_attention() -> None:
    model, workload = read_model(LLAMA), Workload(batch=8, prompt=1024, output=128)
    n_matrix = 8_030_261_248 - 128_256 * 4096 * 2 - 65 * 4096
    attention = 4 * 32 * 32 * 128 * (1024 + 1) / 2  # a token sees those before it
    expected = 8 * (1024 * (2 * n_matrix + attention) + 2 * 128_256 * 4096)
    assert model_flops(model, workload, Phase.PREFILL) == pytest.approx(expected)


def test_decode_uses_the_mean_context() -> None:
    model, workload = read_model(LLAMA), Workload(batch=2, prompt=10, output=4)
    contexts = [11, 12, 13]
    n_matrix = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    expected = 2 * (2 * n_matrix + 4 * 32 * 32 * 128 * sum(contexts) / 3)
    assert model_flops(model, workload, Phase.DECODE) == pytest.approx(expected)


def test_an_indexer_scores_all_positions_and_selects_2048() -> None:
    """DeepSeek-V3.2: 128 heads of 192 + 128 over its choice, 64 indexer heads of 128 over everything."""
    model, plain = (read_model(f"deepseek-ai/DeepSeek-{v}") for v in ("V3.2", "V3.1-Base"))
    workload = Workload(batch=1, prompt=8192, output=4)
    for phase, contexts in ((Phase.PREFILL, range(1, 8193)), (Phase.DECODE, range(8193, 8196))):
        n_new, mean = (8192 if phase is Phase.PREFILL else 1), sum(contexts) / len(contexts)
        indexer = 7168 * 128 + 1536 * 64 * 128 + 7168 * 64  # key, queries, weights of heads
        chosen = sum(min(context, 2048) for context in contexts) / len(contexts)
        attention = 2 * 128 * 320 * (chosen - mean) + 2 * 64 * (128 + 1) * mean
        expected = model_flops(plain, workload, phase) + n_new * 61 * (2 * indexer + attention)
        assert model_flops(model, workload, phase) == pytest.approx(expected, rel=1e-12)


V41_ACTIVE = {Phase.PREFILL: 7_895_220_224, Phase.DECODE: 16_129_982_464}


def test_deepseek_v4_1_has_the_published_active_parameters() -> None:
    """8B in prefill and 16B in decode of its report: the sums of its matrices; the total as the Hub counts it."""
    model = read_model("deepseek-ai/DeepSeek-V4.1-Flash")
    assert {phase: active_parameters(model, phase) for phase in V41_ACTIVE} == V41_ACTIVE
    total, active, _ = n_parameters(model)
    assert (total, active) == (763_205_315_794, V41_ACTIVE[Phase.DECODE])


@pytest.mark.parametrize("prompt", [5, 128, 129, 1500, 40_000])
def test_only_the_last_128_tokens_of_a_prompt_pass_through_the_decoder_of_deepseek_v4_1(
    prompt: int,
) -> None:
    """Every pair counted by the rules of its report: 64 heads of 512, 512 entries at most, 32 index heads of 128."""
    model = read_model("deepseek-ai/DeepSeek-V4.1-Flash")
    pair, scored = 4 * 64 * 512, 2 * 32 * 129
    full, reuse, total = (0.0, 0.0, 0.0)
    for at in range(1, prompt + 1):
        of_window = min(at, 128)
        reuse += 3 * 6 * pair * (of_window + min(at // 2, 512)) + 2 * pair * of_window
        full += 3 * scored * (at // 2)
        if at > prompt - 128:  # the replay starts its windows again
            seen = at - max(0, prompt - 128)
            total += 20 * pair * (seen + min(at, 512)) + scored * (at + 4 * min(at, 16_384))
    in_decoder = 20 * 377_290_752 + 5 * (4096 * 1280 + 32 * 5120)
    head, n = 129_280 * 5120, min(prompt, 128)
    products = 2 * (prompt * V41_ACTIVE[Phase.PREFILL] + n * in_decoder + head)
    got = model_flops(model, Workload(prompt=prompt, output=2), Phase.PREFILL)
    assert got == pytest.approx(products + full + reuse + total, rel=1e-12)


def test_a_decoded_token_of_deepseek_v4_1_passes_through_all_layers() -> None:
    """Published arithmetic at a million tokens: 21.5 GFLOP of scores in the full layers, 83.9 MFLOP of attention a layer."""
    model, n = read_model("deepseek-ai/DeepSeek-V4.1-Flash"), 1_048_575
    got = model_flops(model, Workload(prompt=n - 1, output=2), Phase.DECODE)
    attention = 38 * 4 * 64 * 512 * 640 + 2 * 4 * 64 * 512 * 128
    scores = 2 * 32 * 129 * (3 * (n // 2) + n + 4 * 16_384)
    assert got == pytest.approx(2 * V41_ACTIVE[Phase.DECODE] + attention + scores, rel=1e-12)


def test_each_query_attends_to_its_window_entries_and_selection() -> None:
    """DeepSeek-V4, decode: every position and entry that a query may see, counted one by one.

    Two contexts apart, so that the weights, which are the same, fall out.
    """
    model = read_model("deepseek-ai/DeepSeek-V4")
    of = model.attention
    assert isinstance(of, CompressedAttention)

    def products(kind: AttentionKind, at: int) -> int:
        """Multiplications of one query at this position."""
        keys = sum(at - of.window < position <= at for position in range(at + 1))
        rate = of.sparse_rate if kind is AttentionKind.COMPRESSED_SPARSE else of.heavy_rate
        entries = [] if kind is AttentionKind.SLIDING else range(at + 1)
        seen = [e for e in entries if (e + 1) * rate <= at + 1]
        if kind is not AttentionKind.COMPRESSED_SPARSE:
            return of.n_heads * 2 * of.head_dim * (keys + len(seen))
        indexed = len(seen) * of.indexer.n_heads * (of.indexer.head_dim + 1)
        chosen = seen[: of.indexer.top_k]
        return of.n_heads * 2 * of.head_dim * (keys + len(chosen)) + indexed

    def of_all(prompt: int) -> float:
        places = [(layer, at) for layer in model.layers for at in range(prompt, prompt + 5)]
        return 2 * 3 * sum(products(layer.attention, at) for layer, at in places) / 5

    def counted(prompt: int) -> float:
        return model_flops(model, Workload(batch=3, prompt=prompt, output=6), Phase.DECODE)

    assert len({layer.attention for layer in model.layers}) == 3
    assert counted(2100) - counted(90) == pytest.approx(of_all(2100) - of_all(90), rel=1e-12)


def test_attention_of_a_prompt_is_causal() -> None:
    """Llama-2-7B, 4 x 8192 tokens: MaxText counts 211.1 TFLOP of attention for a training step (pull request 1988)."""
    model = read_model("meta-llama/Llama-2-7B")
    flops = [
        model_flops(model, Workload(batch=batch, prompt=prompt, output=1), Phase.PREFILL)
        for batch, prompt in ((4, 8192), (4 * 8192, 1))
    ]
    of_one = 4 * 8192 * 4 * 32 * 32 * 128  # each query of the second batch sees itself alone
    head = 2 * 32_000 * 4096 * (4 * 8192 - 4)  # and has logits of its own
    attention = flops[0] - flops[1] + of_one + head
    assert attention == pytest.approx(211.1e12 / 3, rel=1e-3)


@table
def test_mfu_is_at_most_one(model, topology, plan, sizes, weights) -> None:
    """Llama-3.1-8B on v5p had 1.117 with the half of attention that the mask removes."""
    experiment = experiment_with(
        model, plan, topology, batch=sizes[0], prompt=sizes[1], output=8, weight_dtype=weights
    )
    chip, workload = experiment.topology.chip, experiment.workload
    for time in predicted_times(experiment):
        flops = model_flops(experiment.model, workload, time.phase)
        frac = mfu(flops, time.step.value_s, experiment.topology.n_chips, chip, weights)
        assert 0 < frac < 1


def test_mfu_of_an_8192_token_step_of_ccl_bench() -> None:
    """2 x 8.03e9 x 8192 FLOPs in 221.8 ms on one v6e chip of 918 TFLOP/s are 64.6 %; our peak is 920."""
    assert mfu(2 * 8.03e9 * 8192, 0.2218, 1, CHIPS["v6e"]) == pytest.approx(0.646, rel=0.005)
    assert mfu(1.0, 1.0, 1, CHIPS["cpu"]) is None


def test_mbu_of_the_scaling_books_decode_step() -> None:
    """LLaMA-3-70B in int8, batch 32, context 8192 on v5e 4x2: 112 GB in 17 ms (applied-inference.md).

    The step is what 8 x 8.1e11 bytes/s need: MBU is 1, within the two figures of 17 ms.
    """
    each = (70e9 + 41.9e9) / 8
    assert mbu(each, 0.017, CHIPS["v5e"]) == pytest.approx(1, rel=0.03)
    assert mbu(each, 0.017, CHIPS["cpu"]) is None


def test_the_bubble_is_the_idle_part_of_a_drawn_pipeline() -> None:
    for p in range(1, 6):
        for m in range(1, 6):
            cells = {(stage, stage + i) for stage in range(p) for i in range(m)}
            n_ticks = 1 + max(tick for _, tick in cells)
            assert bubble_frac(p, m) == pytest.approx(1 - len(cells) / (p * n_ticks))
