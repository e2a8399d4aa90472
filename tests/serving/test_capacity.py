"""The largest batch and context, against the memory of every smaller and larger one."""

from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from meshscope.api.predict import predict
from meshscope.api.request import ExperimentRequest
from meshscope.cost.memory import Capacity, capacity_of, predicted_memory
from meshscope.plans.experiment import Experiment
from meshscope.plans.memory import FitState
from meshscope.plans.workload import MAX_BATCH
from meshscope.reports.answer import fit_of


def experiment(plan: str = "tp=1", **options: int | str) -> Experiment:
    """Llama-3.1-8B on v6e, prompts of one chunk."""
    values = {"model": "Llama-3.1-8B", "topology": "v6e:1x1", "prompt": 8192, "batch": 2, **options}
    return ExperimentRequest(plan=plan, output=128, **values).experiment()  # type: ignore[arg-type]


def capacity(of: Experiment) -> Capacity:
    result = capacity_of(of)
    assert result is not None
    return result


def resized(of: Experiment, **sizes: int) -> Experiment:
    """The experiment with another batch or prompt, and the default chunk."""
    workload = replace(of.workload, prefill_chunk=None, **sizes)
    return replace(of, workload=workload).with_auto_chunk()


def fitting(of: Experiment, name: str, sizes: range) -> Iterator[int]:
    for size in sizes:
        if predicted_memory(resized(of, **{name: size})).fit is FitState.YES:
            yield size


@pytest.mark.parametrize(
    ("plan", "topology"), [("tp=1", "v6e:1x1"), ("dp=2,tp=2", "v6e:2x2"), ("fsdp=4", "v6e:2x2")]
)
def test_the_largest_batch_is_the_last_multiple_of_the_data_axis_that_fits(plan, topology) -> None:
    of = experiment(plan, topology=topology, batch=4)
    step = of.plan.data_size
    result = capacity(of)
    assert result.batch_step == step
    assert result.largest_batch == max(fitting(of, "batch", range(step, 200, step)))


def test_the_largest_context_is_the_last_multiple_of_a_block_that_fits() -> None:
    """Chunks of 8,192: prompts that it does not divide have shorter chunks, and need less."""
    of = experiment(batch=12, topology="v6e:1x1")
    result = capacity(of)
    last = max(fitting(of, "prompt", range(8192, 65536, 8192)))
    assert result.context_step == 128
    assert last <= result.largest_context - 128 < last + 8192


@pytest.mark.parametrize(
    ("plan", "step"), [("cp=4", 512), ("tp=4,sp", 128), ("cp=2,tp=2", 256), ("tp=4", 128)]
)
def test_a_context_is_a_multiple_of_what_the_plan_splits(plan: str, step: int) -> None:
    result = capacity(experiment(plan, topology="v6e:2x2", batch=64))
    assert result.context_step == step
    assert (result.largest_context - 128) % step == 0
    assert not result.is_context_of_model


def test_the_model_or_a_workload_limits_what_memory_does_not() -> None:
    """A pod has room for more sequences than a workload may have."""
    result = capacity(experiment("tp=8", topology="v6e-8", batch=1))
    assert result.is_context_of_model
    assert 131072 - 128 < result.largest_context <= 131072
    of = experiment("dp=768,tp=8", topology="v5p:16x16x24", batch=768, prompt=128)
    assert capacity(of).largest_batch == MAX_BATCH // 768 * 768


def test_a_padded_prompt_may_be_longer_than_one_that_does_not_surely_fit() -> None:
    """A prompt that is no multiple of 128 has other kernels, and may need more than a longer one."""
    of = experiment("tp=8", model="Qwen3-4B", topology="v6e-8", batch=1, prompt=40_000)
    of = resized(replace(of, model=replace(of.model, max_position=None)), prompt=1_000_000)
    memory, result = predicted_memory(of), capacity(of)
    assert (memory.fit, result.largest_batch) == (FitState.CLOSE, 0)
    assert result.largest_context > 1_000_000 + 128
    longest = resized(of, prompt=result.largest_context - 128)
    assert predicted_memory(longest).fit is FitState.YES
    padding = fit_of(memory, result, of.workload).padding
    assert padding == " with prompts padded to 128"


@pytest.mark.parametrize("prompt", [100_000, 100_096])
def test_the_room_of_a_long_prompt_is_that_of_whole_blocks(prompt: int) -> None:
    """Only the padded prompt fits, and both have the same room for context."""
    of = experiment(batch=1, prompt=prompt)
    assert (predicted_memory(of).fit is FitState.YES) is (prompt == 100_096)
    assert capacity(of).largest_context == capacity(experiment(batch=1)).largest_context


def test_what_does_not_surely_fit_has_room_for_less_or_none() -> None:
    of = experiment(batch=64, prompt=8192)
    assert predicted_memory(of).fit is not FitState.YES
    assert 0 < capacity(of).largest_context < 8192 + 128
    none = capacity(experiment(model="Qwen3-14B", topology="v5e:1x1"))  # 29 GB of weights
    assert (none.largest_batch, none.largest_context, none.n_cache_tokens) == (0, 0, 0)


def test_cache_tokens_are_the_free_bytes_over_those_of_a_position() -> None:
    """A position of Llama-3.1-8B takes 2 x 32 layers x 8 heads x 128 x 2 bytes."""
    of = experiment()
    memory, result = predicted_memory(of), capacity(of)
    free = memory.hbm_bytes - memory.weights_bytes - memory.temp_high_bytes
    assert result.n_cache_tokens == free // (2 * 32 * 8 * 128 * 2)
    assert result.n_cache_tokens_left == result.n_cache_tokens - 2 * (8192 + 128)


def test_without_formulas_for_buffers_the_capacity_is_an_upper_bound() -> None:
    """And devices without a limit have none."""
    known = capacity(experiment("tp=4", topology="v6e:2x2"))
    bound = capacity(experiment("tp=4", topology="v6e:2x2", engine="vllm"))
    assert (known.is_upper_bound, bound.is_upper_bound) == (False, True)
    assert bound.largest_batch >= known.largest_batch
    assert capacity_of(experiment("tp=4", topology="cpu:4")) is None


def test_a_run_has_a_capacity() -> None:
    run = predict("Llama-3.1-8B", topology="v6e-8", plan="tp=8", batch=8, prompt=1024)
    assert run.capacity.largest_batch > 8
    document = run.as_dict()
    assert document["capacity"] == asdict(run.capacity)
    assert document["fit"]["largest_batch"] == run.capacity.largest_batch
    assert f", room for batch {run.capacity.largest_batch:,} or context" in run.text()


def test_what_fits_has_room_for_itself() -> None:
    """Longer or shorter prompts of whole blocks may have other chunks, which need more."""
    of = experiment(model="Qwen3-8B", batch=92, prompt=1001)
    assert predicted_memory(of).fit is FitState.YES
    result = capacity(of)
    assert result.largest_batch >= 92
    assert result.largest_context >= 1001 + 128
