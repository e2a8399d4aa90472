"""Predicted memory: weights and cache against the device's HBM, temporary buffers against the compiler's analysis."""

from collections.abc import Callable
from typing import Any

import pytest
from made import experiment_with
from memory_grid import JudgedCase, judged_cases
from tables import table

from meshscope.api.options import request_of
from meshscope.api.request import ExperimentRequest
from meshscope.cost.memory import capacity_of, predicted_memory, temp_parts, why_no_estimate
from meshscope.events.enums import Phase
from meshscope.model.model import Model
from meshscope.plans.caches import device_cache_bytes
from meshscope.plans.experiment import Experiment
from meshscope.plans.memory import FitState, Memory, TempBasis
from meshscope.plans.program import Engine
from meshscope.plans.weights import device_weight_bytes

Make = Callable[..., Experiment]


def test_llama_70b_on_v5e_needs_the_memory_of_the_scaling_book(make: Make) -> None:
    """Scaling book, applied-inference.md: int8 cache of 32 x 8192 tokens plus 70e9 bytes of weights, 112 GB.

    The book rounds to 160e3 bytes per token.
    """
    sizes = {"batch": 32, "prompt": 8064, "output": 128, "prefill_chunk": 8064}
    dtypes = {"weight_dtype": "s8", "cache_dtype": "s8"}
    experiment = make("Llama-3.1-70B", "tp=8", topology="v5e-8", **sizes, **dtypes)
    memory = predicted_memory(experiment)
    assert memory.kv_cache_bytes * 8 == pytest.approx(41.9e9, rel=0.03)
    assert (memory.weights_bytes + memory.kv_cache_bytes) * 8 == pytest.approx(112e9, rel=0.02)
    assert memory.fits is True  # 13.0 of 15.75 GiB, before temporary buffers


@table
def test_what_exceeds_the_hbm_does_not_fit(topology, plan, sizes, hbm_gib, fits, *, make) -> None:
    memory = predicted_memory(make("Qwen3-32B", plan, topology=topology, **{"batch": 8} | sizes))
    assert (memory.hbm_bytes, memory.fits) == (hbm_gib and hbm_gib * 2**30, fits)


@pytest.mark.parametrize("engine", Engine)
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Llama-3.2-3B"])
def test_without_a_pipeline_a_device_holds_its_share_of_the_whole_model(
    engine, model, make
) -> None:
    experiment = make(model, "tp=8", engine=engine)
    plan, workload = experiment.plan, experiment.workload
    memory = predicted_memory(experiment)
    assert memory.weights_bytes == device_weight_bytes(experiment.model, plan, "bf16")
    assert memory.kv_cache_bytes == device_cache_bytes(experiment.model, plan, workload)
    assert (memory.temp_bytes, memory.total_bytes, memory.fit) == (None, None, FitState.UNKNOWN)


# Elements of Llama-3.2-3B, stored in bf16: a layer 2 x 3072 x 3072 + 2 x 3072 x 1024 + 3 x 3072 x 8192
# + 2 x 3072 of norms; the tied embedding 128256 x 3072; a layer of cache 2 x 256 x 8 x 128.
LAYER = 2 * 3072 * 3072 + 2 * 3072 * 1024 + 3 * 3072 * 8192 + 2 * 3072
TABLE, NORM, CACHE = 128256 * 3072, 3072, 2 * 256 * 1024


@pytest.mark.parametrize(
    ("model", "plan", "weights", "cache"),
    [
        ("Llama-3.2-3B", "pp=2", 14 * LAYER + TABLE + NORM, 14 * CACHE),  # last: tied table and norm
        ("Llama-3.2-3B", "pp=4", 7 * LAYER + TABLE + NORM, 7 * CACHE),
        ("Llama-3.2-3B", "pp=3", 9 * LAYER + TABLE + NORM, 9 * CACHE),  # 9, 10, 9: a table outweighs a layer
        ("Llama-3.2-3B", "pp=28", LAYER + TABLE + NORM, CACHE),
        # 163.8e6 parameters of a table, 317e6 of a layer; 13, 14, 13 layers
        ("Llama-2-13B", "pp=3", 14 * (4 * 5120 * 5120 + 3 * 5120 * 13824 + 2 * 5120), 14 * 5 * CACHE),
    ],
)  # fmt: skip
def test_a_pipeline_counts_its_largest_stage(model, plan, weights, cache, make) -> None:
    memory = predicted_memory(make(model, plan, engine=Engine.VLLM))
    assert (memory.weights_bytes, memory.kv_cache_bytes) == (2 * weights, 2 * cache)


@pytest.mark.parametrize(("plan", "n_stored"), [("pp=2", 14), ("pp=3", 10), ("pp=28", 1)])
def test_every_stage_allocates_the_largest_number_of_layers_and_both_tables(
    plan, n_stored, make
) -> None:
    """28 layers over three stages are 9, 10, 9: one program allocates 10 on each stage."""
    memory = predicted_memory(make("Llama-3.2-3B", plan))
    held = (2 * (n_stored * LAYER + TABLE + NORM), 2 * n_stored * CACHE)
    assert (memory.weights_bytes, memory.kv_cache_bytes) == held


def test_each_kind_of_layer_is_allocated_separately(make: Make) -> None:
    """DeepSeek-V2-Lite: one dense layer and 26 of experts; 14 and 13 layers."""
    memory = predicted_memory(make("DeepSeek-V2-Lite", "pp=2"))
    assert memory.kv_cache_bytes == 2 * (1 + 13) * 256 * (512 + 64)


def test_vllm_stores_a_vocabulary_padded_to_64(make: Make, small: Model) -> None:
    ours, vllm = (predicted_memory(make(small, "tp=1", engine=engine)) for engine in Engine)
    assert vllm.weights_bytes - ours.weights_bytes == 2 * (128 - 101) * 64 * 2  # embedding and head


@pytest.mark.parametrize("options", [{"engine": Engine.VLLM}, {"topology": "h100:8"}], ids=str)
def test_without_formulas_the_temporary_buffers_are_unknown(make, options) -> None:
    memory = predicted_memory(make("Llama-3.1-8B", "tp=8", **{"topology": "v6e-8"} | options))
    assert (memory.temp_bytes, memory.fits, memory.fit) == (None, None, FitState.UNKNOWN)
    assert memory.fit_reason == "the size of temporary buffers is unknown"


@table
def test_an_interval_that_contains_the_limit_is_close(hbm_bytes, fits, fit) -> None:
    """10 bytes of weights and cache, and an estimate of 4, or 2 to 6."""
    held = {"weights_bytes": 6, "kv_cache_bytes": 4, "total_bytes": 14}
    temp = {"temp_bytes": 4, "temp_low_bytes": 2, "temp_high_bytes": 6}
    basis = {"temp_basis": TempBasis.ESTIMATE}
    memory = Memory(hbm_bytes=hbm_bytes, fits=fits, **held, **temp, **basis)
    assert (memory.fit, memory.fit_reason is not None) == (fit, fit == "close")


def test_the_plan_close_to_its_limit_is_neither_yes_nor_no(make: Make) -> None:
    """The batches between those that fit and those that do not are close."""
    fits = [
        predicted_memory(make("Llama-3.1-8B", "tp=1", topology="v6e:1x1", batch=n, prompt=1024)).fit
        for n in range(16, 160)
    ]
    assert list(dict.fromkeys(fits)) == [FitState.YES, FitState.CLOSE, FitState.NO]


def test_deepseek_v4_1_fits_where_its_tables_and_experts_do() -> None:
    """A device has a thirty-second of its tables and experts, and all other weights; an eighth of its tables alone never fits."""
    stored = {"weight_dtype": "f8e4m3fn_block32_f4e2m1fn_experts", "batch": 32}
    whole, split = (
        predicted_memory(experiment_with("DeepSeek-V4.1-Flash", plan, topology, **stored))
        for plan, topology in (("dp=8", "v6e-8"), ("dp=32,ep=32", "v6e-32"))
    )
    assert (whole.fits, split.fits) == (False, True)
    assert split.kv_cache_bytes == 890 * 256 + 2_703_360 + 24_576
    tables = 264 * 16 * (-(-384_006_168 // 512) + -(-384_016_682 // 512))
    experts = 40 * 384 // 32 * 18_800_640
    others = 501_382_611_408 - 264 * (384_006_168 + 384_016_682) - 40 * 384 * 18_800_640
    assert split.weights_bytes == tables + experts + others
    of_host = experiment_with("DeepSeek-V4.1-Flash", "dp=32,ep=32,tables=host", "v6e-32", **stored)
    assert predicted_memory(of_host).weights_bytes == experts + others


def experiment(plan: str = "tp=8", **options: int | str) -> Experiment:
    values = {"model": "Llama-3.1-8B", "topology": "v6e-8", "batch": 8, "prompt": 1024, **options}
    return request_of(ExperimentRequest, {"plan": plan, **values}).experiment()


@pytest.mark.parametrize("judged", judged_cases(), ids=lambda judged: judged.case.line)
def test_the_interval_contains_the_figure_of_the_compiler(judged: JudgedCase) -> None:
    """Weights and cache with their padding are the arguments of the program.

    DeepSeek-V2-Lite with tp=8: experts of 1,408 / 8 = 176 columns in rows of 256, 1.09 GB of padding.
    """
    assert judged.is_inside
    memory = predicted_memory(judged.case.experiment)
    assert memory.temp_low_bytes <= memory.temp_bytes <= memory.temp_high_bytes
    assert memory.total_bytes == memory.resident_bytes + memory.temp_bytes
    assert memory.temp_basis is TempBasis.ESTIMATE
    assert 0 <= judged.argument_bytes - memory.resident_bytes < INPUT_BYTES


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


@pytest.mark.parametrize(
    ("options", "compiled_bytes"),
    [
        ({"plan": "dp=8,tp=8,ep=64", "layers": 3}, 4_006_586_848),  # libtpu 0.0.42.1, 24 rows of each of 65,536 tokens
        ({"plan": "dp=8,tp=8,ep=64,tables=host", "layers": 2}, 2_610_316_000),  # of 8,192 tokens
        ({"plan": "dp=4,tp=4,ep=16", "topology": "v6e:4x4", "layers": 2, "batch": 16, "prompt": 2048}, 2_756_212_032),  # judges
    ],
)  # fmt: skip
def test_rows_of_tables_are_temporary_buffers(options, compiled_bytes) -> None:
    """A device looks up the rows of all tokens of the axis dp, and gets those of its own from a host."""
    sizes = {"topology": "v6e:8x8", "batch": 64, "prompt": 1024, "output": 1, **options}
    memory = predicted_memory(experiment(model="deepseek-ai/DeepSeek-V4.1-Flash", **sizes))
    assert memory.temp_low_bytes < compiled_bytes < memory.temp_high_bytes


def test_a_cache_that_does_not_grow_limits_no_context() -> None:
    """The first two layers of DeepSeek-V4.1 have windows alone."""
    model = {"model": "deepseek-ai/DeepSeek-V4.1-Flash", "topology": "v6e:8x8", "layers": 2}
    capacity = capacity_of(experiment("dp=8,tp=8,ep=64", batch=64, prompt=1024, **model))
    assert capacity.n_cache_tokens == 64 * capacity.largest_context


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
