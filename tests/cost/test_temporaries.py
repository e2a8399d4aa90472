"""Estimated temporary buffers, against the compiler's memory analysis of the programs of a grid."""

import pytest
from memory_grid import JudgedCase, judged_cases

from meshscope.api.options import request_of
from meshscope.api.request import ExperimentRequest
from meshscope.cost.memory import predicted_memory, temp_parts, why_no_estimate
from meshscope.events.enums import Phase
from meshscope.plans.experiment import Experiment


def experiment(plan: str = "tp=8", **options: int | str) -> Experiment:
    values = {"model": "Llama-3.1-8B", "topology": "v6e-8", "batch": 8, "prompt": 1024, **options}
    return request_of(ExperimentRequest, {"plan": plan, **values}).experiment()


@pytest.mark.parametrize("judged", judged_cases(), ids=lambda judged: judged.case.line)
def test_the_interval_contains_the_figure_of_the_compiler(judged: JudgedCase) -> None:
    assert judged.is_inside


INPUT_BYTES = 2_000_000  # tokens and positions of a step, and the padding of vectors


@pytest.mark.parametrize("judged", judged_cases(), ids=lambda judged: judged.case.line)
def test_weights_and_cache_with_their_padding_are_the_arguments_of_the_program(judged) -> None:
    """DeepSeek-V2-Lite with tp=8: experts of 1,408 / 8 = 176 columns in rows of 256, 1.09 GB of padding."""
    resident = predicted_memory(judged.case.experiment).resident_bytes
    assert 0 <= judged.argument_bytes - resident < INPUT_BYTES


def test_the_parts_of_a_dense_model_are_its_activations() -> None:
    """8,192 tokens of 4,096 channels; an MLP of 14,336 / 8; heads of 128: 4 of queries, 1 of keys."""
    parts = temp_parts(experiment(), Phase.PREFILL)
    assert parts.residual == 8192 * 4096 * 2
    assert parts.mlp == 2 * 8192 * 14336 // 8 * 2
    assert parts.attention == 8192 * (2 * 4 + 2 * 1) * 128 * 2
    assert (parts.scores, parts.experts, parts.gathered, parts.layer) == (0, 0, 0, 0)
    assert parts.converted == 0


def test_linear_attention_keeps_float32_arrays_twice() -> None:
    """8,192 tokens; 12,288 inputs in bf16; 32 value heads of queries, keys, values and outputs, each of 128."""
    of = experiment(model="Qwen/Qwen3.5-9B")
    parts = temp_parts(of, Phase.PREFILL)
    assert parts.attention == 8192 * (12288 * 2 + 2 * 4 * 32 * 128 * 4) // 8
    assert why_no_estimate(of) is None


def test_blocks_of_linear_attention_have_wider_outputs_and_the_maps_of_all() -> None:
    """4,096 tokens a device; 8 sequences with 2 + 1 maps of 128 x (128 + 128) in each of 32 heads."""
    split = experiment("cp=2,tp=4", model="Qwen/Qwen3.5-9B")
    of_tokens = 4096 * (12288 * 2 + 2 * 5 * 32 * 128 * 4)
    of_maps = 8 * 3 * 32 * 128 * 256 * 4

    assert temp_parts(split, Phase.PREFILL).attention == (of_tokens + of_maps) // 4


def test_scanned_layers_of_linear_attention_copy_their_projections() -> None:
    """24 layers of 4,096 x 12,288: 16 x 128 of queries and keys, 32 x 128 of values and gates."""
    scanned, unrolled = (
        temp_parts(experiment(model="Qwen/Qwen3.5-9B", loop=loop), Phase.DECODE).stacked
        for loop in ("scan", "unroll")
    )
    assert (scanned, unrolled) == (24 * 4096 * 12288 // 8 * 2, 0)
    assert temp_parts(experiment(loop="scan"), Phase.DECODE).stacked == 0


def test_sequence_parallelism_splits_the_residual_stream() -> None:
    whole, split = (temp_parts(experiment(plan), Phase.PREFILL) for plan in ("tp=8", "tp=8,sp"))
    assert whole.residual == 8 * split.residual
    assert whole.mlp == split.mlp


def test_plain_attention_keeps_its_scores() -> None:
    """8 sequences of 1,024 queries and keys, 4 heads of float32."""
    assert temp_parts(experiment(kernels="off"), Phase.PREFILL).scores == 8 * 4 * 1024**2 * 4


@pytest.mark.parametrize(
    ("prompt", "chunk", "compiled_bytes"),
    [(65_536, 2048, 1_679_911_104), (1_047_552, 256, 2_448_090_080)],  # libtpu 0.0.42.1
)
def test_compressed_attention_keeps_the_scores_of_a_window_and_all_entries(
    prompt, chunk, compiled_bytes
) -> None:
    values = {"model": "deepseek-ai/DeepSeek-V4-Flash", "topology": "v6e-8", "plan": "tp=8"}
    sizes = {"prompt": prompt, "output": 1024, "prefill_chunk": str(chunk), "layers": 3}
    options = values | sizes | {"dtype": "bf16", "loop": "unroll"}
    memory = predicted_memory(request_of(ExperimentRequest, options).experiment())
    assert memory.temp_low_bytes < compiled_bytes < memory.temp_high_bytes


def test_sums_of_8_bit_rows_have_32_bits() -> None:
    """65,536 rows of 2,048 channels and an eighth of 768: libtpu keeps sums and outputs, 0.75 GiB in all."""
    wide, narrow = (
        temp_parts(
            experiment(model="Qwen/Qwen3-30B-A3B", weight_dtype=dtype), Phase.PREFILL
        ).experts
        for dtype in ("int8", "w8a8")
    )
    assert wide == 65536 * 2 * (2048 + 96) * 2
    assert narrow - wide == 65536 * 2048 * 2


def test_weights_of_8_bits_are_converted_for_the_head() -> None:
    """The table has 128,256 rows of 4,096, an eighth on each device."""
    parts = temp_parts(experiment(weight_dtype="s8"), Phase.PREFILL)
    assert parts.converted == 128256 * 4096 // 8 * 2


def test_the_stages_of_a_pipeline_copy_the_cache() -> None:
    """16 layers, 8 sequences of 1,152 positions, 2 of 8 heads of 128 channels, keys and values."""
    parts = temp_parts(experiment("pp=2,tp=4"), Phase.DECODE)
    assert parts.branches == 2 * 16 * 8 * 1152 * 2 * 128 * 2 * 2


def test_fsdp_gathers_the_embedding_whole() -> None:
    parts = temp_parts(experiment("fsdp=8"), Phase.PREFILL)
    assert parts.gathered == 128256 * 4096 * 2


def test_a_dispatch_has_buffers_for_a_quarter_more_than_the_mean() -> None:
    """1,024 tokens of a device choose 8 experts each: 8,192 rows of 2,048 channels, room for 10,240."""
    of = experiment("tp=8,ep=8", model="Qwen3-30B-A3B", topology="v6e-8")
    dispatch = of.dispatch(Phase.PREFILL)
    rows = of.prefill_chunks.n_tokens * 8
    parts = temp_parts(of, Phase.PREFILL)
    assert dispatch is None  # over tp alone, every device has all tokens
    assert parts.experts == rows * 2 * (2048 + 768) * 2
    spread = experiment("dp=8,ep=8", model="Qwen3-30B-A3B", topology="v6e-8")
    assert (
        temp_parts(spread, Phase.PREFILL).experts
        == (2 * (8192 + 10240) * 2048 + 2 * 10240 * 768) * 2
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"engine": "vllm"}, "--engine vllm"),
        ({"topology": "h100:8"}, "not h100"),
        ({"model": "Qwen3-30B-A3B", "partitioner": "auto"}, "--partitioner auto"),
        ({}, None),
    ],
    ids=["engine", "chip", "partitioner", "estimated"],
)
def test_programs_without_formulas_say_why(options: dict[str, str], reason: str | None) -> None:
    stated = why_no_estimate(experiment(**options))
    assert stated is reason if reason is None else reason in (stated or "")
