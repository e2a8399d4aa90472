"""Linear attention: a prompt in chunks gives the state and the outputs of one position after the other."""

from dataclasses import replace

import numpy as np
import pytest

from meshscope.errors import PlanError
from meshscope.spec.experiment import Experiment, experiment_of
from meshscope.spec.hardware.topology import parse_topology
from meshscope.spec.model.config import read_model
from meshscope.spec.model.flops import attention_flops, chunked_flops, linear_of
from meshscope.spec.model.model import AttentionKind, GroupedAttention
from meshscope.spec.plan.caches import device_cache_bytes, layer_cache
from meshscope.spec.plan.plan import parse_plan
from meshscope.spec.workload import Workload

jax = pytest.importorskip("jax", reason="the programs need JAX")

NAME = "Qwen/Qwen3-Next-80B-A3B-Instruct"


@pytest.mark.parametrize("n_positions", [1, 5, 16, 37])
def test_chunks_equal_single_positions(n_positions: int) -> None:
    from meshscope.programs.jax.linear import chunked_delta_rule, delta_step  # noqa: PLC0415  imports JAX

    generator = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return generator.standard_normal((2, n_positions, 3, *shape)).astype(np.float32)

    q, k, v = random(4), random(4), random(6)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay, rate = -np.abs(random()) / 4, 1 / (1 + np.exp(-random()))
    state = start = generator.standard_normal((2, 3, 4, 6)).astype(np.float32)
    outs = []
    for at in range(n_positions):
        parts = (y[:, at : at + 1] for y in (q, k, v, log_decay, rate))
        out, state = delta_step(*parts, state)
        outs.append(out)

    got, got_state = chunked_delta_rule(q, k, v, log_decay, rate, start, chunk=8)

    np.testing.assert_allclose(got, np.concatenate(outs, axis=1), atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(got_state, state, atol=2e-5, rtol=2e-5)


def test_the_inverse_is_accurate_for_equal_keys() -> None:
    """Powers of the triangle would grow to 1e17 and cancel."""
    from meshscope.programs.jax.linear import unit_lower_inverse  # noqa: PLC0415  imports JAX

    lower = np.tril(np.ones((64, 64), np.float32), -1)

    inverse = np.asarray(unit_lower_inverse(lower))

    np.testing.assert_allclose(inverse @ (lower + np.eye(64)), np.eye(64), atol=1e-5)


def experiment(plan: str, *, prompt: int = 1024) -> Experiment:
    return experiment_of(
        model=read_model(NAME),
        plan=parse_plan(plan),
        topology=parse_topology("v6e-8"),
        workload=Workload(batch=8, prompt=prompt, output=64),
    )


def test_cp_is_refused() -> None:
    with pytest.raises(
        PlanError, match="cp=2 is not supported for Qwen/Qwen3-Next-80B-A3B-Instruct"
    ):
        experiment("cp=2,tp=4")


def test_tp_beyond_the_key_heads_is_refused() -> None:
    model = read_model(NAME)
    linear = replace(linear_of(model.attention), n_key_heads=4)
    assert isinstance(model.attention, GroupedAttention)
    with pytest.raises(PlanError, match=r"tp splits wq .* 8 ways, but 8 does not divide 4"):
        experiment_of(
            model=replace(model, attention=replace(model.attention, linear=linear)),
            plan=parse_plan("tp=8"),
            topology=parse_topology("v6e-8"),
            workload=Workload(batch=8, prompt=128, output=2),
        )


def test_states_do_not_grow_with_the_context() -> None:
    """36 states of 32 x 128 x 128 and 3 x 8,192 inputs in float32; 12 caches of 2 x 2 x 256 in bf16."""
    ones = [experiment("dp=8", prompt=prompt) for prompt in (1024, 2048)]
    sizes = [device_cache_bytes(one.model, one.plan, one.workload) for one in ones]
    states = 36 * (32 * 128 * 128 + 3 * 8192) * 4
    of_position = 12 * 2 * 2 * 256 * 2

    assert sizes[1] - sizes[0] == 1024 * of_position
    assert 0 <= sizes[0] - states - 1024 * of_position <= 64 * of_position


def test_states_are_split_over_tp_by_heads() -> None:
    one = experiment("tp=8")
    linear = one.model.layers[0]
    shapes = {a.name: a.local_shape(one.plan) for a in layer_cache(one.model, one.plan, linear)}
    assert shapes == {"state": (4, 128), "conv_q": (2, 128), "conv_k": (2, 128), "conv_v": (4, 128)}


def test_flops_of_a_token_do_not_grow_with_the_context() -> None:
    """Three products of a key or query with a state of 128 x 128 in 32 heads, and the convolution."""
    attention = read_model(NAME).attention
    expected = 32 * 6 * 128 * 128 + 2 * 4 * 8192
    assert attention_flops(attention, AttentionKind.LINEAR, 100_000) == expected
    assert chunked_flops(linear_of(attention)) > expected
