"""Predicted memory: weights and cache, against the device's HBM."""

from collections.abc import Callable

import pytest

from meshscope.prediction.memory import predicted_memory
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.model import Model
from meshscope.spec.plan.caches import device_cache_bytes
from meshscope.spec.plan.memory import Memory
from meshscope.spec.plan.weights import device_weight_bytes
from meshscope.spec.program import Engine

Make = Callable[..., Experiment]
GIB = 2**30


def test_llama_70b_on_v5e_needs_the_memory_of_the_scaling_book(make: Make) -> None:
    """Scaling book, applied-inference.md: int8 cache of 32 x 8192 tokens plus 70e9 bytes of weights, 112 GB."""
    experiment = make(
        "Llama-3.1-70B",
        "tp=8",
        topology="v5e-8",
        batch=32,
        prompt=8191,
        output=1,
        weight_dtype="s8",
        cache_dtype="s8",
    )
    memory = predicted_memory(experiment)
    assert memory.kv_cache_bytes * 8 == pytest.approx(
        41.9e9, rel=0.03
    )  # the book rounds to 160e3 bytes per token
    assert (memory.weights_bytes + memory.kv_cache_bytes) * 8 == pytest.approx(112e9, rel=0.02)
    assert memory.fits is None


@pytest.mark.parametrize(
    ("topology", "plan", "hbm_bytes", "fits"),
    [
        ("v6e-8", "tp=8", 31.25 * GIB, None),  # 8.2 GB of weights: may fit
        ("v5e-4", "tp=4", 15.75 * GIB, None),  # 16.4 GB of 16.9 GB; the cache is negligible
        ("v5e-4", "dp=4", 15.75 * GIB, False),  # 65.5 GB
        ("v6e-1", "tp=1", 31.25 * GIB, False),
        ("tpu7x:1x1x1", "tp=2", 94.75 * GIB, None),  # two devices share a chip's HBM
        ("cpu:8", "dp=8", None, None),
    ],
)
def test_a_plan_whose_weights_exceed_the_hbm_does_not_fit_and_others_are_unknown(
    make: Make, *, topology: str, plan: str, hbm_bytes: float | None, fits: bool | None
) -> None:
    memory = predicted_memory(make("Qwen3-32B", plan, topology=topology, batch=8))
    assert (memory.hbm_bytes, memory.fits) == (hbm_bytes, fits)


def test_the_cache_counts_against_the_hbm(make: Make) -> None:
    with_cache = predicted_memory(
        make("Qwen3-32B", "tp=8", topology="v6e-8", batch=512, prompt=4096)
    )
    assert with_cache.weights_bytes < with_cache.kv_cache_bytes
    assert with_cache.fits is False


@pytest.mark.parametrize("engine", Engine)
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Llama-3.2-3B"])
def test_without_a_pipeline_a_device_holds_its_share_of_the_whole_model(
    engine: Engine, model: str, make: Make
) -> None:
    experiment = make(model, "tp=8", engine=engine)
    plan, workload = experiment.plan, experiment.workload
    assert predicted_memory(experiment) == Memory(
        weights_bytes=device_weight_bytes(experiment.model, plan, "bf16"),
        kv_cache_bytes=device_cache_bytes(experiment.model, plan, workload),
        temp_bytes=None,
        total_bytes=None,
        hbm_bytes=None,
        fits=None,
    )


# Elements of Llama-3.2-3B, stored in bf16: a layer 2 x 3072 x 3072 + 2 x 3072 x 1024 + 3 x 3072 x 8192
# + 2 x 3072 of norms; the tied embedding 128256 x 3072; a layer of cache 2 x 256 x 8 x 128.
LAYER = 2 * 3072 * 3072 + 2 * 3072 * 1024 + 3 * 3072 * 8192 + 2 * 3072
TABLE, NORM, CACHE = 128256 * 3072, 3072, 2 * 256 * 1024


@pytest.mark.parametrize(
    ("plan", "weights", "cache"),
    [
        (
            "pp=2",
            14 * LAYER + TABLE + NORM,
            14 * CACHE,
        ),  # the last stage: the tied table and the norm
        ("pp=4", 7 * LAYER + TABLE + NORM, 7 * CACHE),
        ("pp=3", 9 * LAYER + TABLE + NORM, 9 * CACHE),  # 9, 10, 9: a table outweighs a layer
        ("pp=28", LAYER + TABLE + NORM, CACHE),
    ],
)
def test_a_pipeline_counts_its_largest_stage(
    plan: str, weights: int, cache: int, make: Make
) -> None:
    memory = predicted_memory(make("Llama-3.2-3B", plan, engine=Engine.VLLM))
    assert (memory.weights_bytes, memory.kv_cache_bytes) == (2 * weights, 2 * cache)


def test_a_middle_stage_can_be_the_largest(make: Make) -> None:
    """Llama-2-13B: 163.8e6 parameters of a table, 317e6 of a layer; 13, 14, 13 layers."""
    memory = predicted_memory(make("Llama-2-13B", "pp=3", engine=Engine.VLLM))
    layer = 4 * 5120 * 5120 + 3 * 5120 * 13824 + 2 * 5120
    assert memory.weights_bytes == 2 * 14 * layer


def test_vllm_stores_a_vocabulary_padded_to_64(make: Make, small: Model) -> None:
    ours, vllm = (predicted_memory(make(small, "tp=1", engine=engine)) for engine in Engine)
    assert vllm.weights_bytes - ours.weights_bytes == 2 * (128 - 101) * 64 * 2  # embedding and head
