"""Which slice: what fits on each, with every serving plan tried, and prices that lack a chip."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from made import experiment_with

from meshscope.cost.memory import largest_batch, predicted_memory
from meshscope.errors import MeshscopeError, SpecError
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.model.config import read_model
from meshscope.plans.chunks import ChunkRule
from meshscope.plans.memory import FitState
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload
from meshscope.serving.slices import (
    parse_prices,
    parse_slices,
    price_per_hour,
    slice_fit,
    slice_fits,
)

WORKLOAD = Workload(prompt=1024, output=128)
LLAMA = read_model("meta-llama/Llama-3.3-70B")


def batches(topology: Topology) -> Iterator[tuple[int, str]]:
    """The largest batch of every tp x dp, one plan after the other."""
    n = topology.n_devices
    for tp in range(1, n + 1):
        if n % tp:
            continue
        plan = parse_plan(f"tp={tp},dp={n // tp}")
        workload = Workload(batch=n // tp, prompt=1024, output=128)
        try:
            experiment = experiment_with(LLAMA, plan, topology, workload=workload)
        except MeshscopeError:
            continue
        yield largest_batch(experiment), str(plan)


@pytest.mark.parametrize("name", ["v6e-8", "v6e-16", "v5p-8", "v5e-16"])
def test_the_plan_of_a_slice_has_the_largest_batch_of_all(name: str) -> None:
    fit = slice_fit(LLAMA, parse_topology(name), WORKLOAD)
    assert (fit.largest_batch, str(fit.plan)) == max(batches(parse_topology(name)))
    assert fit.memory.fit is FitState.YES


def test_a_slice_that_is_too_small_has_no_batch() -> None:
    """141 GB of weights on 4 x 31.25 GiB."""
    fit = slice_fit(LLAMA, parse_topology("v6e-4"), WORKLOAD)
    assert (fit.memory.fit, fit.largest_batch, str(fit.plan)) == (FitState.NO, 0, "tp=4")


def test_a_batch_that_is_given_shortens_the_context() -> None:
    one, many = (slice_fit(LLAMA, parse_topology("v6e-8"), WORKLOAD, batch=n) for n in (None, 64))
    assert one.context.is_of_model
    assert many.context.positions < one.context.positions
    assert one.largest_batch == many.largest_batch


def test_a_mixture_spreads_its_experts() -> None:
    """DeepSeek-V3.1 in bf16, 1.3 TB, on 64 chips of 31.25 GiB."""
    deepseek = read_model("deepseek-ai/DeepSeek-V3.1-Base")
    fit = slice_fit(deepseek, parse_topology("v6e-64"), WORKLOAD)
    assert fit.plan.ep == 64
    assert fit.largest_batch > 0


@pytest.mark.parametrize("chunk", [ChunkRule.AUTO, 1024])
@pytest.mark.parametrize("batch", [8, 64, 256])
@pytest.mark.parametrize("name", ["v6e-8", "v5e-16", "v5p-8"])
def test_a_batch_that_is_given_is_answered_for(name, batch, chunk) -> None:
    """The memory is that of `predict`, and the batch fits where it is no larger than the largest."""
    topology, long = parse_topology(name), replace(WORKLOAD, prompt=8192, cache_dtype="s8")
    fit = slice_fit(LLAMA, topology, long, batch=batch, chunk=chunk)
    size = None if chunk is ChunkRule.AUTO else chunk
    workload = replace(long, batch=batch, prefill_chunk=size)
    alone = experiment_with(LLAMA, fit.plan, topology, workload=workload)
    alone = alone.with_auto_chunk() if size is None else alone
    assert fit.memory == predicted_memory(alone)
    assert (fit.memory.fit is FitState.YES) == (batch <= fit.largest_batch)


def test_slices_that_no_plan_fills_are_named_with_the_reason() -> None:
    """28 heads take tp=4, and an odd batch no dp."""
    qwen = read_model("Qwen/Qwen2.5-7B-Instruct")
    answers = slice_fits(qwen, parse_slices("v6e-4,v6e-8,cpu:8"), [WORKLOAD], batch=7)
    assert [fit.name for fit in answers.fits] == ["v6e-4"]
    assert "tp=8 does not divide n_heads=28" in answers.refused["v6e-8"]
    assert "HBM of cpu is unknown" in answers.refused["cpu:8"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("v6e-8,v5p-8", ["v6e:2x4", "v5p:2x2x1"]),
        ("v6e-8, v6e:2x4", ["v6e:2x4"]),
        ("V6E", [f"v6e:{g}" for g in ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")]),
    ],
)
def test_slices_are_a_list_or_all_of_a_chip(text: str, names: list[str]) -> None:
    assert [topology.name for topology in parse_slices(text)] == names


def test_any_slice_is_up_to_a_pod_of_v6e() -> None:
    slices = parse_slices("any")
    assert max(topology.n_chips for topology in slices) == 256
    assert {topology.chip.name for topology in slices} == {"v4", "v5e", "v5p", "v6e", "tpu7x"}


def test_a_slice_costs_its_chips_or_their_price() -> None:
    (v5p, v6e) = parse_slices("v5p-16,v6e-16")
    prices = parse_prices("v6e=2.7,v5e=1.2")
    assert price_per_hour(v6e, None) == 16
    assert price_per_hour(v6e, prices) == pytest.approx(16 * 2.7)
    assert price_per_hour(v5p, prices) is None


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("v6e=2.7,v5e=free", "v5e='free' is no positive price"),
        ("v6e=2.7,v5e=-1", "v5e='-1' is no positive price"),
        ("v6e=2.7,v5e=1,v5e=2", "v5e appears twice"),
        ("v6e=2.7,v55=1", "unknown chip 'v55'"),
    ],
)
def test_prices_that_are_no_numbers_are_refused(text: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        parse_prices(text)
