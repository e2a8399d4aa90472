"""Estimated temporary buffers, against the compiler's memory analysis of the programs of a grid."""

from typing import Any

import pytest
from memory_grid import JudgedCase, judged_cases
from tables import table

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
    """Weights and cache with their padding are the arguments of the program.

    DeepSeek-V2-Lite with tp=8: experts of 1,408 / 8 = 176 columns in rows of 256, 1.09 GB of padding.
    """
    assert judged.is_inside
    resident = predicted_memory(judged.case.experiment).resident_bytes
    assert 0 <= judged.argument_bytes - resident < INPUT_BYTES


INPUT_BYTES = 2_000_000  # tokens and positions of a step, and the padding of vectors


def parts_of(plan: str = "tp=8", phase: Phase = Phase.PREFILL, **options: int | str) -> Any:
    return temp_parts(experiment(plan, **options), phase)


def test_the_parts_of_a_dense_model_are_its_activations() -> None:
    """8,192 tokens of 4,096 channels; an MLP of 14,336 / 8; heads of 128: 4 of queries, 1 of keys.

    Sequence parallelism splits the residual stream alone.
    """
    parts, split = parts_of(), parts_of("tp=8,sp")
    assert parts.residual == 8192 * 4096 * 2 == 8 * split.residual
    assert parts.mlp == 2 * 8192 * 14336 // 8 * 2 == split.mlp
    assert parts.attention == 8192 * (2 * 4 + 2 * 1) * 128 * 2
    others = ("scores", "experts", "gathered", "layer", "converted")
    assert [getattr(parts, name) for name in others] == [0] * 5


HYBRID = "Qwen/Qwen3.5-9B"


def test_linear_attention_keeps_float32_arrays_twice() -> None:
    """8,192 tokens; 12,288 inputs in bf16; 32 value heads of queries, keys, values and outputs, each of 128.

    Blocks over cp have wider outputs and 8 sequences with 2 + 1 maps of 128 x (128 + 128) in each head.
    """
    assert parts_of(model=HYBRID).attention == 8192 * (12288 * 2 + 2 * 4 * 32 * 128 * 4) // 8
    assert why_no_estimate(experiment(model=HYBRID)) is None
    of_tokens = 4096 * (12288 * 2 + 2 * 5 * 32 * 128 * 4)
    of_maps = 8 * 3 * 32 * 128 * 256 * 4
    assert parts_of("cp=2,tp=4", model=HYBRID).attention == (of_tokens + of_maps) // 4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": HYBRID, "loop": "scan"}, 24 * 4096 * 12288 // 8 * 2),
        ({"model": HYBRID, "loop": "unroll"}, 0),
        ({"loop": "scan"}, 0),
    ],
)
def test_scanned_layers_of_linear_attention_copy_their_projections(options, expected) -> None:
    """24 layers of 4,096 x 12,288: 16 x 128 of queries and keys, 32 x 128 of values and gates."""
    assert parts_of(phase=Phase.DECODE, **options).stacked == expected


@pytest.mark.parametrize(
    ("plan", "options", "part", "expected"),
    [
        # 8 sequences of 1,024 queries and keys, 4 heads of float32
        ("tp=8", {"kernels": "off"}, "scores", 8 * 4 * 1024**2 * 4),
        # the table has 128,256 rows of 4,096, an eighth on each device
        ("tp=8", {"weight_dtype": "s8"}, "converted", 128256 * 4096 // 8 * 2),
        # 16 layers, 8 sequences of 1,152 positions, 2 of 8 heads of 128 channels, keys and values
        ("pp=2,tp=4", {"phase": Phase.DECODE}, "branches", 2 * 16 * 8 * 1152 * 2 * 128 * 2 * 2),
        ("fsdp=8", {}, "gathered", 128256 * 4096 * 2),
    ],
    ids=["plain attention", "8-bit head", "cache of stages", "embedding over fsdp"],
)
def test_further_buffers_have_the_size_of_their_arrays(plan, options, part, expected) -> None:
    assert getattr(parts_of(plan, **options), part) == expected


@pytest.mark.parametrize(
    ("prompt", "chunk", "compiled_bytes"),
    [(65_536, 2048, 1_679_911_104), (1_047_552, 256, 2_448_090_080)],  # libtpu 0.0.42.1
)
def test_compressed_attention_keeps_the_scores_of_a_window_and_all_entries(
    prompt, chunk, compiled_bytes
) -> None:
    sizes = {"batch": 1, "prompt": prompt, "output": 1024, "prefill_chunk": str(chunk), "layers": 3}
    options = sizes | {"dtype": "bf16", "loop": "unroll"}
    memory = predicted_memory(experiment(model="deepseek-ai/DeepSeek-V4-Flash", **options))
    assert memory.temp_low_bytes < compiled_bytes < memory.temp_high_bytes


def test_sums_of_8_bit_rows_have_32_bits() -> None:
    """65,536 rows of 2,048 channels and an eighth of 768: libtpu keeps sums and outputs, 0.75 GiB in all."""
    model = "Qwen/Qwen3-30B-A3B"
    wide, narrow = (parts_of(model=model, weight_dtype=d).experts for d in ("int8", "w8a8"))
    assert wide == 65536 * 2 * (2048 + 96) * 2
    assert narrow - wide == 65536 * 2048 * 2


def test_a_dispatch_has_buffers_for_a_quarter_more_than_the_mean() -> None:
    """1,024 tokens of a device choose 8 experts each: 8,192 rows of 2,048 channels, room for 10,240."""
    of = experiment("tp=8,ep=8", model="Qwen3-30B-A3B")
    assert of.dispatch(Phase.PREFILL) is None  # over tp alone, every device has all tokens
    rows = of.prefill_chunks.n_tokens * 8
    assert temp_parts(of, Phase.PREFILL).experts == rows * 2 * (2048 + 768) * 2
    expected = (2 * (8192 + 10240) * 2048 + 2 * 10240 * 768) * 2
    assert parts_of("dp=8,ep=8", model="Qwen3-30B-A3B").experts == expected


@table
def test_programs_without_formulas_say_why(options: dict[str, str], reason: str | None) -> None:
    stated = why_no_estimate(experiment(**options))
    assert stated is reason if reason is None else reason in (stated or "")
