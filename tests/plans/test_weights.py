"""Shapes and bytes of weights against explicit arithmetic."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from made import TINY, experiment_with
from tables import stored, table

import meshscope
from meshscope.model.arrays import stored_arrays
from meshscope.model.catalog import catalog
from meshscope.model.config import model_from_config, read_model
from meshscope.model.quantization import FP8_BLOCKS
from meshscope.plans.caches import (
    CacheLayout,
    cache_slots,
    device_cache_bytes,
    layer_cache,
    paged_bytes,
    ring_pairs,
)
from meshscope.plans.mesh import Mesh
from meshscope.plans.plan import Plan, parse_plan
from meshscope.plans.weights import (
    device_weight_bytes,
    draft_block_weights,
    layer_bytes,
    layer_weights,
    outer_weights,
)
from meshscope.plans.workload import Workload

QWEN = read_model("Qwen3-32B")  # L64 D5120 F25600 N64 K8 H128 V151936, q and k norms, not tied
V41 = read_model("DeepSeek-V4.1-Flash")
LLAMA_3B = read_model("Llama-3.2-3B")  # L28 D3072 F8192 N24 K8 H128 V128256, tied


def test_qwen2_biases_are_split_with_their_heads() -> None:
    config = TINY | {"model_type": "qwen2", "mlp_bias": True}  # heads of 8, four of them, and two
    model, plan = model_from_config(config, name="small", source="test"), Plan(tp=2)
    weights = layer_weights(model, plan, model.layers[0])
    biases = {w.name: w.local_shape(plan) for w in weights if w.name.startswith("b")}
    heads = {"bq": (2, 8), "bk": (1, 8), "bv": (1, 8)}
    assert biases == heads | {"b_gate": (32,), "b_up": (32,), "b_down": (32,)}


@pytest.mark.parametrize("name", catalog())
def test_every_weight_reads_a_distinct_part_of_the_checkpoint(name: str) -> None:
    model = read_model(name)
    outer = outer_weights(model, Plan())
    for layer in set(model.layers):
        weights = [*layer_weights(model, Plan(), layer), *outer]
        parts = {(w.checkpoint, w.columns) for w in weights}
        assert len(parts) == len({w.name for w in weights}) == len(weights)
        assert all(("{layer}" in w.checkpoint) == (w not in outer) for w in weights)


# Explicit, in elements. Qwen3-32B, one layer: q and o 2 x 5120 x 64 x 128, k and v 2 x 5120 x 8 x 128,
# MLP 3 x 5120 x 25600, norms 2 x 5120 + 2 x 128; outside: 2 x 151936 x 5120 + 5120.
QWEN_MATRICES = 64 * (2 * 5120 * 8192 + 2 * 5120 * 1024 + 3 * 5120 * 25600) + 2 * 151936 * 5120
QWEN_NORMS = 64 * (2 * 5120 + 2 * 128) + 5120
QWEN_KV_MATRICES = 64 * 2 * 5120 * 1024


@pytest.mark.parametrize(
    ("plan", "n_elements"),
    [
        *((plan, QWEN_MATRICES + QWEN_NORMS) for plan in ("tp=1", "dp=8")),
        *(
            (plan, QWEN_MATRICES // 8 + QWEN_NORMS)
            for plan in ("tp=8", "tp=8,sp", "fsdp=8", "fsdp=2,tp=4")
        ),
        # 16 KV heads are stored instead of 8
        ("tp=16", (QWEN_MATRICES + QWEN_KV_MATRICES) // 16 + QWEN_NORMS),
    ],
)
@pytest.mark.parametrize(("dtype", "n_bytes"), [("bf16", 2), ("f32", 4)])
def test_a_device_holds_its_share_of_the_matrices_and_all_norms(
    plan, n_elements, dtype, n_bytes
) -> None:
    assert device_weight_bytes(QWEN, parse_plan(plan), dtype) == n_elements * n_bytes


# Output channels of Qwen3-32B: those of q, k, v, gate and up are split over tp with the vocabulary,
# those of o and down are not; fsdp splits none.
SPLIT_CHANNELS = 64 * ((64 + 2 * 8) * 128 + 2 * 25600) + 2 * 151936
WHOLE_CHANNELS = 64 * 2 * 5120


@pytest.mark.parametrize("dtype", ["s8", "f8e4m3fn"])
@pytest.mark.parametrize(("plan", "tp"), [("tp=1", 1), ("tp=8", 8), ("fsdp=2,tp=4", 4)])
def test_8_bit_matrices_have_float32_scales_per_output_channel(plan, tp, dtype) -> None:
    """Norms stay in bfloat16."""
    n_devices = parse_plan(plan).n_devices
    scale_bytes = 4 * (SPLIT_CHANNELS // tp + WHOLE_CHANNELS)
    device_bytes = device_weight_bytes(QWEN, parse_plan(plan), dtype)
    assert device_bytes == QWEN_MATRICES // n_devices + 2 * QWEN_NORMS + scale_bytes


@table
def test_4_bit_matrices_have_scales_per_block_of_inputs(dtype, bits, table_bits) -> None:
    """AWQ, GPTQ and MXFP4A16 of compressed-tensors leave embedding and head in 16 bits."""
    device_bytes = device_weight_bytes(QWEN, Plan(tp=8), dtype)
    n_tables = 2 * QWEN.vocab * QWEN.hidden
    n_bits = (QWEN_MATRICES - n_tables) * bits + n_tables * table_bits
    assert device_bytes == n_bits / 8 / 8 + 2 * QWEN_NORMS


def test_int4_by_channel_has_bfloat16_scales_per_output_channel() -> None:
    device_bytes = device_weight_bytes(QWEN, Plan(tp=8), "s4_channel")
    n_tables = 2 * QWEN.vocab * QWEN.hidden
    n_scales = SPLIT_CHANNELS // 8 + WHOLE_CHANNELS - 2 * QWEN.vocab // 8
    matrices = (QWEN_MATRICES - n_tables) / 2 + n_tables * 2
    assert device_bytes == matrices / 8 + 2 * n_scales + 2 * QWEN_NORMS


def test_mxfp4_of_gpt_oss_is_that_of_its_experts() -> None:
    """The model card: 60.8 GiB of checkpoint; arXiv 2508.10925, table 1: 114.71e9 of 116.83e9 in MLPs."""
    whole = device_weight_bytes(read_model("openai/gpt-oss-120b"), Plan(), "f4e2m1fn_experts")
    assert whole / 2**30 == pytest.approx(60.8, rel=0.005)


def test_a_tied_embedding_is_stored_once() -> None:
    tied = device_weight_bytes(LLAMA_3B, Plan(), "bf16")
    untied = device_weight_bytes(replace(LLAMA_3B, has_tied_embeddings=False), Plan(), "bf16")
    assert untied - tied == 128256 * 3072 * 2


def test_cache_bytes_per_token_equal_the_published_ones() -> None:
    """Scaling book, applied-inference.md: LLaMA-3-70B (L80 K8 H128) with an int8 cache, 160 kB per token."""
    workload = Workload(batch=1, prompt=1, output=1, cache_dtype="s8")
    cache_bytes = device_cache_bytes(read_model("Llama-3.1-70B"), Plan(), workload)
    assert cache_bytes / workload.context == 160 * 1024


@table
def test_batch_and_heads_split_the_cache_and_no_device_holds_less_than_a_head(plan, share) -> None:
    """Qwen3-32B: 2 x 64 layers x 1152 positions x 128 x 2 bytes for a head of a sequence; 8 x 8 of them."""
    workload = Workload(batch=8, prompt=1024, output=128)
    one_eighth = 2 * 64 * 1152 * 128 * 2 * 8
    assert device_cache_bytes(QWEN, parse_plan(plan), workload) == share * one_eighth


def test_compressed_caches_grow_with_their_rates_and_are_replicated_over_tp() -> None:
    """DeepSeek-V4-Flash at 1040 positions: window 128, heads of 512, indexer of 128, rates 4 and 128.

    All layers keep the window; 21 have 260 entries twice and 8 open positions of two halves, 20
    have 9 entries and 128 open positions. Open positions are kept with their gates.
    """
    window = 128 * 512
    sparse = 260 * (512 + 128) + 2 * 8 * 2 * (512 + 128)
    heavy = 9 * 512 + 2 * 128 * 512
    n_elements = 43 * window + 21 * sparse + 20 * heavy
    workload = Workload(batch=8, prompt=1024, output=16)
    for plan, n_sequences in (("tp=8", 8), ("dp=2,tp=4", 4)):
        device_bytes = device_cache_bytes(read_model("DeepSeek-V4"), parse_plan(plan), workload)
        assert device_bytes == n_elements * n_sequences * 2
    over_cp = 43 * window + 21 * (sparse - 195 * (512 + 128)) + 20 * (heavy - 6 * 512)
    device_bytes = device_cache_bytes(read_model("DeepSeek-V4"), parse_plan("cp=4,tp=2"), workload)
    assert device_bytes == over_cp * 8 * 2  # of 260 and 9 entries, room for 65 and 3


V41_SIZES: dict[str, Any] = stored(Path(__file__).with_suffix(".yaml"))["v41"]


def test_deepseek_v4_1_has_the_published_parameters_and_bytes() -> None:
    """The backbone includes the encoder of images, and the projections of tables."""
    dtype = V41.default_weight_dtype
    layers = [w for layer in V41.layers for w in layer_weights(V41, Plan(), layer)]
    model, drafts = (*outer_weights(V41, Plan()), *layers), draft_block_weights(V41)
    n_drafts, n_all = (sum(prod(w.shape) for w in of) for of in (drafts, (*model, *drafts)))
    drafts_bytes, all_bytes = (
        sum(w.local_bytes(Plan(), dtype) for w in of) for of in (drafts, (*model, *drafts))
    )
    assert n_all + V41_SIZES["images"] == sum(V41_SIZES["parameters"].values()) == 763_205_315_794
    assert n_drafts == V41_SIZES["parameters"]["drafts"]
    assert V41.images.n_parameters(V41.hidden) == V41_SIZES["images"]
    assert all_bytes + 2 * V41_SIZES["images"] == V41_SIZES["bytes"]
    assert drafts_bytes == 7_932_874_632
    layer_sizes = {one.name: layer_bytes(V41, Plan(), one, dtype) for one in V41.layers}
    assert layer_sizes == V41_SIZES["layer_bytes"]


def test_glm_5_3_flash_has_the_published_bytes_and_caches_pools_of_keys() -> None:
    """The headers of its 62 shards, without the layer for multi-token prediction and the tower for images.

    A token has a latent in 11 layers, and a fourth of a key of the indexer; a sequence, states in 34 layers.
    """
    glm = read_model("zai-org/GLM-5.3-Flash")
    whole, drafts, images = 328_326_771_576, 7_493_399_168, 1_127_254_016
    n_bytes = device_weight_bytes(glm, Plan(), glm.default_weight_dtype)
    assert n_bytes == whole - drafts - images
    of_token, open_pools = 11 * (512 + 128 // 4) * 2, 11 * 2 * 4 * 128 * 2
    states = 34 * (64 * 128 * 128 + 3 * 8192 * 3) * 4
    for context in (1024, 1_048_576):
        workload = Workload(batch=1, prompt=context - 4, output=4)
        cached = device_cache_bytes(glm, Plan(), workload)
        assert cached == of_token * context + open_pools + states


@pytest.mark.parametrize("plan", ["tp=8", "dp=8,ep=8", "dp=8,tp=4,ep=32", "fsdp=16,ep=16"])
def test_rows_of_tables_are_split_over_all_devices_in_fp8(plan: str) -> None:
    """A row has 256 numbers and 8 scales of one byte; the rows are padded to equal parts, of 16 rows that share a row of scales."""
    parsed = parse_plan(plan)
    n_parts = parsed.data_size * parsed.tp
    weights = {weight.name: weight for weight in outer_weights(V41, parsed)}
    for name, n_rows in (("engram_1", 384_006_168), ("engram_14", 384_016_682)):
        local = weights[name].local_bytes(parsed, V41.default_weight_dtype)
        assert local == -(-n_rows // (16 * n_parts)) * 16 * 264
        scale = weights[name].scale(V41.default_weight_dtype)
        assert scale.local_shape(parsed) == (local // (16 * 264), 128)
        assert weights[name].fsdp_dim(parsed) is None


@pytest.mark.parametrize(
    ("plan", "n_sequences"), [("tp=8", 16), ("dp=4,tp=2", 4), ("dp=16,ep=16", 1)]
)
def test_deepseek_v4_1_caches_890_bytes_a_token(plan: str, n_sequences: int) -> None:
    """And a window of 128 slots of 528 bytes in 40 layers, with two open positions in float32 in three of them."""
    window, open_groups = 2_703_360, 24_576
    assert window == 40 * 128 * 528
    assert open_groups == 3 * 2 * 2 * 512 * 4
    for context in (1024, 1_048_576):
        workload = Workload(batch=16, prompt=context - 2, output=2)
        of_sequence = 890 * context + window + open_groups
        assert device_cache_bytes(V41, parse_plan(plan), workload) == n_sequences * of_sequence


def test_several_tokens_in_a_step_need_more_of_the_windows_and_open_groups() -> None:
    """128 + 5 slots for six tokens, which touch four pairs of positions."""
    kinds = {layer.name: layer for layer in V41.layers}
    arrays = layer_cache(V41, Plan(), kinds["encoder_full/moe"], n_tokens=6)
    slots = {array.name: array.n_fixed_slots for array in arrays}
    assert slots == {
        **dict.fromkeys(("window", "window_scale"), 133),
        **dict.fromkeys(("entry", "entry_scale", "index", "index_scale")),
        **dict.fromkeys(("entry_kv", "entry_gate"), 8),
    }
    of_decoder = layer_cache(V41, Plan(), kinds["decoder_full/moe"], n_tokens=6)
    assert [array.name for array in of_decoder if "_kv" in array.name] == []


def test_an_expert_table_is_replicated_and_keeps_its_dtype() -> None:
    """DeepSeek-V4-Flash: six experts for each of 129280 tokens, s32, whatever the other weights are."""
    model = read_model("DeepSeek-V4")
    weights = {w.name: w for w in layer_weights(model, Plan(tp=8), model.layers[0])}
    assert weights["router_table"].local_bytes(Plan(tp=8), "s4") == 129280 * 6 * 4
    assert "router_correction" not in weights  # there is no choice to correct


def test_scales_of_blocks_are_split_with_whole_blocks() -> None:
    """DeepSeek-V3: 128 x 128 values share a scale; tables stay in bfloat16."""
    model, plan = read_model("DeepSeek-V3.1-Base"), parse_plan("fsdp=2,tp=4,ep=8")
    arrays = list(stored_arrays(layer_weights(model, plan, model.layers[-1]), FP8_BLOCKS))
    scales = {w.name: (w.shape, w.local_shape(plan)) for w in arrays if w.dtype == "f32"}
    assert scales == {
        "wq_a.scale": ((56, 12), (56, 12)),
        "wq_b.scale": ((12, 192), (12, 48)),
        "wkv_a.scale": ((56, 5), (56, 5)),  # 576 outputs
        "w_uk.scale": ((4, 128), (4, 32)),
        "w_uv.scale": ((4, 128), (4, 32)),
        "wo.scale": ((128, 56), (32, 56)),
        "experts_w_gate.scale": ((256, 56, 16), (32, 56, 16)),
        "experts_w_up.scale": ((256, 56, 16), (32, 56, 16)),
        "experts_w_down.scale": ((256, 16, 56), (32, 16, 56)),
        "shared_w_gate.scale": ((56, 16), (56, 4)),
        "shared_w_up.scale": ((56, 16), (56, 4)),
        "shared_w_down.scale": ((16, 56), (4, 56)),
    }
    outer = outer_weights(model, plan)
    assert {w.stored_dtype(FP8_BLOCKS) for w in outer} == {"bf16"}
    assert {w.stored_dtype(FP8_BLOCKS) for w in arrays if w.inputs} == {"f8e4m3fn"}


def test_a_plan_may_keep_blocks_whole() -> None:
    """test_experiment.py has those that split one."""
    workload = Workload(weight_dtype=FP8_BLOCKS, batch=4)
    experiment = experiment_with("DeepSeek-V3.1-Base", "tp=16,dp=4", "v5e-64", workload=workload)
    assert experiment.workload.weight_dtype == FP8_BLOCKS


@table
def test_cache_slots_are_the_block_plus_a_rounded_share(plan, prompt, output, n_slots) -> None:
    workload = Workload(prompt=prompt, output=output)
    assert cache_slots(parse_plan(plan), workload) == n_slots
    bytes_a_slot = 36 * 2 * 8 * 128 * 2 // parse_plan(plan).tp  # L36 K8 H128
    cache_bytes = device_cache_bytes(read_model("Qwen3-4B"), parse_plan(plan), workload)
    assert cache_bytes == n_slots * bytes_a_slot


def test_a_ring_passes_through_each_group() -> None:
    groups = Mesh(axes=(("cp", 3), ("tp", 2))).groups("cp")
    assert ring_pairs(groups) == ((0, 2), (2, 4), (4, 0), (1, 3), (3, 5), (5, 1))


TPU = CacheLayout.VLLM_TPU


@table
def test_a_page_has_the_bytes_of_the_engine(
    *, model, plan, cache_dtype, page, layout: CacheLayout, n_bytes
) -> None:
    """The bytes are of a page of one layer on one device."""
    read = read_model(model)
    of_page, more = (
        paged_bytes(read, parse_plan(plan), read.layers[0], workload, layout)
        for n in (1, 2)
        for workload in [Workload(prompt=n * page, output=1, cache_dtype=cache_dtype)]
    )
    assert more - of_page == n_bytes


def test_the_blocks_of_a_public_log_fit_and_twice_as_many_do_not() -> None:
    """tpu-inference issue 757: 4,338 blocks of 128 tokens; 8,676 before heads were packed."""
    run = meshscope.predict(
        "meta-llama/Llama-3.1-70B",
        topology="v6e-8",
        plan="tp=8",
        engine="vllm",
        weight_dtype="int8",
        cache_dtype="fp8",
    )
    memory = run.memory
    free_bytes = memory.hbm_bytes - memory.weights_bytes
    per_token = memory.kv_cache_bytes / 256
    assert per_token == 40_960
    assert 4_338 * 128 < free_bytes / per_token < 1.15 * 4_338 * 128


@table
def test_layers_with_a_window_free_pages_if_the_engine_does(model: str, n_whole: int) -> None:
    read, plan = read_model(model), parse_plan("tp=4")
    sizes = [Workload(prompt=n - 1, output=1) for n in (8192, 16384)]
    grown = [
        paged_bytes(read, plan, layer, sizes[0], TPU) != paged_bytes(read, plan, layer, sizes[1], TPU)
        for layer in read.layers
    ]  # fmt: skip
    assert sum(grown) == n_whole
    total = device_cache_bytes(read, plan, sizes[0], layout=TPU)
    assert total == sum(paged_bytes(read, plan, layer, sizes[0], TPU) for layer in read.layers)
