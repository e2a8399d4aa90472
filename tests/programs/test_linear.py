"""Linear attention and state spaces: a prompt in chunks gives the state and the outputs of one position after the other."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from made import experiment_with

from meshscope.cost.collectives import predict
from meshscope.errors import PlanError
from meshscope.events.enums import Kind, Phase
from meshscope.model.config import read_model
from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.grouped import GroupedAttention
from meshscope.model.mechanisms.linear import FLOAT32_PASSES, LINEAR_CHUNK, linear_of
from meshscope.plans.caches import ContextForm, device_cache_bytes, layer_cache
from meshscope.plans.experiment import Experiment
from meshscope.programs.jax.context_parallel import Context
from meshscope.programs.jax.linear import (
    chunked_delta_rule,
    delta_step,
    split_delta_rule,
    unit_lower_inverse,
)
from meshscope.programs.jax.state_space import chunked_states, split_states, state_step

NAME = "Qwen/Qwen3-Next-80B-A3B-Instruct"


class Inputs(NamedTuple):
    """Inputs of the rule for positions of two sequences and three heads."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_decay: np.ndarray
    rate: np.ndarray
    state: np.ndarray

    def at(self, positions: slice) -> tuple[np.ndarray, ...]:
        """Those of some positions, without the state."""
        return tuple(y[:, positions] for y in self[:-1])


def random_inputs(n_positions: int) -> Inputs:
    generator = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return generator.standard_normal((2, n_positions, 3, *shape)).astype(np.float32)

    q, k, v = random(4), random(4), random(6)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay, rate = -np.abs(random()) / 4, 1 / (1 + np.exp(-random()))
    state = generator.standard_normal((2, 3, 4, 6)).astype(np.float32)
    return Inputs(q, k, v, log_decay, rate, state)


def of_states(inputs: Inputs) -> tuple[np.ndarray, ...]:
    """Those of a state space, whose three heads share a key and a query, and that has no rates."""
    q, k, v, log_decay, _, state = inputs
    return q[:, :, :1], k[:, :, :1], v, log_decay, state


def step_by_step(step: Any, arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The outputs of one position after the other, and the last state."""
    *inputs, state = arrays
    outs, step = [], jax.jit(step)
    for at in range(inputs[0].shape[1]):
        out, state = step(*(y[:, at : at + 1] for y in inputs), state)
        outs.append(out)
    return np.concatenate(outs, axis=1), np.asarray(state)


def over_cp(size: int, n_prompt: int, rule: Any = split_delta_rule, n_inputs: int = 5) -> Any:
    """The rule over a prompt in blocks of `size` devices, compiled for arrays of the whole prompt."""
    gather, prefill = ContextForm.ALLGATHER, Phase.PREFILL
    context = Context(size=size, form=gather, phase=prefill, n_prompt=n_prompt)
    mesh = jax.make_mesh((size,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    rule = jax.shard_map(
        partial(rule, context=context),
        mesh=mesh,
        in_specs=(*[P(None, "cp")] * n_inputs, P()),
        out_specs=(P(None, "cp"), P()),
        check_vma=False,
    )
    return jax.jit(rule)


@pytest.mark.parametrize(
    ("size", "n_positions"), [*((1, n) for n in (1, 5, 16, 37)), *((4, n) for n in (4, 12, 80))]
)
def test_chunks_and_blocks_over_cp_equal_single_positions(size: int, n_positions: int) -> None:
    """A block of four devices has one position, part of a chunk, or several chunks."""
    inputs = random_inputs(n_positions)
    whole, split = (partial(rule, chunk=8) for rule in (chunked_delta_rule, split_delta_rule))
    rule = jax.jit(whole) if size == 1 else over_cp(size, n_positions, split)
    for got, expected in zip(rule(*inputs), step_by_step(delta_step, inputs), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("size", "n_positions"), [(1, 5), (1, 37), (4, 4), (4, 80)])
def test_decays_of_channels_equal_single_positions(size: int, n_positions: int) -> None:
    """The second half of the channels forgets, which products of exponentials over a chunk would overflow."""
    *inputs, log_decay, rate, state = random_inputs(n_positions)
    of_channels = log_decay[..., None] * np.array([1, 2, 100, 200], np.float32)
    arrays = (*inputs, of_channels, rate, state)
    rule = jax.jit(chunked_delta_rule) if size == 1 else over_cp(size, n_positions)
    for got, expected in zip(rule(*arrays), step_by_step(delta_step, arrays), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("size", "n_positions"), [(1, 5), (1, 300), (4, 4), (4, 1200)])
def test_chunks_and_blocks_of_state_spaces_equal_single_positions(
    size: int, n_positions: int
) -> None:
    arrays = of_states(random_inputs(n_positions))
    rule = jax.jit(chunked_states) if size == 1 else over_cp(size, n_positions, split_states, 4)
    for got, expected in zip(rule(*arrays), step_by_step(state_step, arrays), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


def test_flops_of_a_chunk_and_of_blocks_are_those_that_xla_counts() -> None:
    """One head of 128, one chunk on each of four devices; XLA counts a product in float32 once."""
    linear = linear_of(read_model(NAME).attention.of(AttentionKind.LINEAR))
    one_head = replace(linear, n_key_heads=1, n_value_heads=1)

    def counted(rule: Any, n_positions: int) -> float:
        wide, gate = (1, n_positions, 1, 128), (1, n_positions, 1)
        shapes = (wide, wide, wide, gate, gate, (1, 1, 128, 128))
        arguments = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
        return rule.lower(*arguments).compile().cost_analysis()["flops"]

    whole = counted(jax.jit(chunked_delta_rule), LINEAR_CHUNK)
    of_convolution = 2 * linear.conv_width * one_head.n_channels
    assert whole / LINEAR_CHUNK == pytest.approx(one_head.chunked_flops - of_convolution, rel=0.1)
    block = counted(over_cp(4, 4 * LINEAR_CHUNK), 4 * LINEAR_CHUNK)

    work = one_head.prompt_work(AttentionKind.LINEAR, 4)
    passed_on = work.sequence_flops / FLOAT32_PASSES
    expected = LINEAR_CHUNK * work.split_flops + passed_on
    assert block - whole == pytest.approx(expected, rel=0.02)  # with sums and decays


def test_the_inverse_is_accurate_for_equal_keys() -> None:
    """Powers of the triangle would grow to 1e17 and cancel."""
    lower = np.tril(np.ones((64, 64), np.float32), -1)

    inverse = np.asarray(unit_lower_inverse(lower))

    np.testing.assert_allclose(inverse @ (lower + np.eye(64)), np.eye(64), atol=1e-5)


def experiment(plan: str, *, prompt: int = 1024) -> Experiment:
    return experiment_with(NAME, plan, "v6e-8", batch=8, prompt=prompt, output=64)


@pytest.mark.parametrize("prompt", [1024, 2048])
def test_what_blocks_pass_on_does_not_grow_with_the_prompt(prompt: int) -> None:
    """Four sequences: the last 3 of 8,192 inputs, and 32 maps of 128 x (128 + 128), over tp=2."""
    rows = predict(experiment("dp=2,cp=2,tp=2", prompt=prompt))
    of_first = [row for row in rows if row.axis == "cp" and row.layer == 0]

    assert [(row.phase, row.kind, row.dtype, row.shape) for row in of_first] == [
        (Phase.PREFILL, Kind.ALL_GATHER, "bf16", (4, 6, 4096)),
        (Phase.PREFILL, Kind.ALL_GATHER, "f32", (4, 32, 128, 256)),
    ]


def test_tp_beyond_the_key_heads_is_refused() -> None:
    model = read_model(NAME)
    linear = replace(linear_of(model.attention.of(AttentionKind.LINEAR)), n_key_heads=4)
    assert isinstance(model.attention, GroupedAttention)
    with pytest.raises(PlanError, match=r"tp splits wq .* 8 ways, but 8 does not divide 4"):
        experiment_with(
            replace(model, attention=replace(model.attention, linear=linear)), "tp=8", "v6e-8"
        )


def test_states_do_not_grow_with_the_context_and_are_split_over_tp_by_heads() -> None:
    """36 states of 32 x 128 x 128 and 3 x 8,192 inputs in float32; 12 caches of 2 x 2 x 256 in bf16."""
    ones = [experiment("dp=8", prompt=prompt) for prompt in (1024, 2048)]
    sizes = [device_cache_bytes(one.model, one.plan, one.workload) for one in ones]
    states = 36 * (32 * 128 * 128 + 3 * 8192) * 4
    of_position = 12 * 2 * 2 * 256 * 2

    assert sizes[1] - sizes[0] == 1024 * of_position
    assert 0 <= sizes[0] - states - 1024 * of_position <= 64 * of_position

    one = experiment("tp=8")
    cache = layer_cache(one.model, one.plan, one.model.layers[0])
    shapes = {a.name: a.local_shape(one.plan) for a in cache}
    assert shapes == {"state": (4, 128), "conv_q": (2, 128), "conv_k": (2, 128), "conv_v": (4, 128)}


def test_flops_of_a_token_do_not_grow_with_the_context() -> None:
    """Three products of a key or query with a state of 128 x 128 in 32 heads, and the convolution."""
    linear = linear_of(read_model(NAME).attention.of(AttentionKind.LINEAR))
    expected = 32 * 6 * 128 * 128 + 2 * 4 * 8192
    assert linear.flops(AttentionKind.LINEAR, 100_000) == 100_000 * expected
    assert linear.chunked_flops > expected
