"""Predicted memory: weights and cache, against the device's HBM."""

from collections.abc import Callable

import pytest
from made import experiment_with
from tables import table

from meshscope.cost.memory import predicted_memory
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


def test_vllm_stores_a_vocabulary_padded_to_64(make: Make, small: Model) -> None:
    ours, vllm = (predicted_memory(make(small, "tp=1", engine=engine)) for engine in Engine)
    assert vllm.weights_bytes - ours.weights_bytes == 2 * (128 - 101) * 64 * 2  # embedding and head


def test_an_estimate_of_temporary_buffers_has_an_interval(make: Make) -> None:
    memory = predicted_memory(make("Qwen3-32B", "tp=8", topology="v6e-8", batch=8, prompt=1024))
    assert 0 < memory.temp_low_bytes <= memory.temp_bytes <= memory.temp_high_bytes
    assert memory.temp_basis is TempBasis.ESTIMATE
    held = memory.weights_bytes + memory.kv_cache_bytes
    assert memory.total_bytes == held + memory.temp_bytes


@pytest.mark.parametrize("options", [{"engine": Engine.VLLM}, {"topology": "h100:8"}], ids=str)
def test_without_formulas_the_temporary_buffers_are_unknown(make, options) -> None:
    memory = predicted_memory(make("Llama-3.1-8B", "tp=8", **{"topology": "v6e-8"} | options))
    assert (memory.temp_bytes, memory.fits, memory.fit) == (None, None, FitState.UNKNOWN)
    assert memory.fit_reason == "the size of temporary buffers is unknown"


@pytest.mark.parametrize(
    ("hbm_bytes", "fits", "fit"),
    [(20, True, "yes"), (16, True, "yes"), (15, None, "close"), (12, None, "close"), (11, False, "no")],
)  # fmt: skip
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


def test_deepseek_v4_1_has_no_temporaries_without_a_program_and_fits_where_it_may() -> None:
    """A device has a thirty-second of its tables and experts, and all other weights; an eighth of its tables alone never fits."""
    stored = {"weight_dtype": "f8e4m3fn_block32_f4e2m1fn_experts", "batch": 32}
    whole, split = (
        predicted_memory(experiment_with("DeepSeek-V4.1-Flash", plan, topology, **stored))
        for plan, topology in (("dp=8", "v6e-8"), ("dp=32,ep=32", "v6e-32"))
    )
    assert (whole.temp_bytes, whole.fits) == (None, False)
    assert (split.temp_bytes, split.total_bytes, split.fits) == (None, None, None)
    assert split.kv_cache_bytes == 890 * 256 + 2_703_360 + 24_576
    tables = 264 * (-(-384_006_168 // 32) + -(-384_016_682 // 32))
    experts = 40 * 384 // 32 * 18_800_640
    others = 501_382_611_408 - 264 * (384_006_168 + 384_016_682) - 40 * 384 * 18_800_640
    assert split.weights_bytes == tables + experts + others
