"""The exchange drops exactly the rows beyond capacity and none in rounds, against a loop over rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
import pytest

from meshscope.events.enums import Phase
from meshscope.model.arrays import Dim, Weight
from meshscope.model.mechanisms.mixture import MixtureOfExperts, Scoring
from meshscope.plans.dispatch import Dispatch, DispatchForm, dispatch_of
from meshscope.plans.plan import Plan
from meshscope.programs.jax.collectives import ShardLayout, ShardMapCollectives
from meshscope.programs.jax.exchange import exchange_mixture
from meshscope.programs.jax.experts import Experts
from meshscope.programs.jax.state import LayerWeights

N_DEVICES, N_TOKENS, HIDDEN, FFN = 8, 6, 4, 4
MOE = MixtureOfExperts(
    n_experts=16,
    n_active=3,
    ffn=FFN,
    shared_ffn=None,
    scoring=Scoring.SOFTMAX,
    is_normalized=True,
)


class Routed(NamedTuple):
    """Tokens [n, T, D], expert IDs [n, T, K] and routing weights [n, T, K] of all devices."""

    tokens: np.ndarray
    chosen: np.ndarray
    shares: np.ndarray


def _routed(seed: int, *, is_skewed: bool) -> Routed:
    random = np.random.default_rng(seed)
    favour = 1 / np.arange(1, 17) ** 2 if is_skewed else np.ones(16)
    chosen = [
        random.choice(16, MOE.n_active, replace=False, p=favour / favour.sum())
        for _ in range(N_DEVICES * N_TOKENS)
    ]
    return Routed(
        tokens=random.normal(size=(N_DEVICES, N_TOKENS, HIDDEN)).astype(np.float32),
        chosen=np.array(chosen, np.int32).reshape(N_DEVICES, N_TOKENS, MOE.n_active),
        shares=random.uniform(size=(N_DEVICES, N_TOKENS, MOE.n_active)).astype(np.float32),
    )


def _weights(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = {"gate": (HIDDEN, FFN), "up": (HIDDEN, FFN), "down": (FFN, HIDDEN)}
    return {
        f"experts_w_{name}": random.normal(size=(16, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def _expert(token: np.ndarray, weights: dict[str, np.ndarray], expert: int) -> np.ndarray:
    gate = token @ weights["experts_w_gate"][expert]
    up = token @ weights["experts_w_up"][expert]
    return (gate / (1 + np.exp(-gate)) * up) @ weights["experts_w_down"][expert]


def _by_walking(
    routed: Routed, weights: dict[str, np.ndarray], dispatch: Dispatch
) -> tuple[np.ndarray, int]:
    """The output of every token and the number of dropped rows, with slots filled by expert."""
    out, n_dropped = np.zeros_like(routed.tokens), 0
    for device in range(N_DEVICES):
        used = dict.fromkeys(range(N_DEVICES), 0)
        rows = [(e, t, k) for t in range(N_TOKENS) for k, e in enumerate(routed.chosen[device, t])]
        for expert, token, k in sorted(rows, key=lambda row: row[0]):
            peer = expert // dispatch.n_local_experts
            if dispatch.has_rounds or dispatch.n_slots is None or used[peer] < dispatch.n_slots:
                used[peer] += 1
                value = _expert(routed.tokens[device, token], weights, expert)
                out[device, token] += routed.shares[device, token, k] * value
            else:
                n_dropped += 1
    return out, n_dropped


def _ragged_all_to_all(  # noqa: PLR0917  as in JAX
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What JAX's documentation says, by all-gathers: XLA has no ragged all-to-all for CPUs.

    NaN if a receiver expects another size than the sender's.
    """
    jnp, lax = jax.numpy, jax.lax
    gathered = [lax.all_gather(x, axis_name) for x in (input_offsets, send_sizes, output_offsets)]
    operands = lax.all_gather(operand, axis_name)
    n_devices = operands.shape[0]
    n_slices = send_sizes.shape[0] // n_devices
    first = lax.axis_index(axis_name) * n_slices
    place = jnp.arange(output.shape[0])
    for sender in range(n_devices):
        for at in range(n_slices):
            begin, size, into = (x[sender, first + at] for x in gathered)
            value = operands[sender][jnp.clip(place - into + begin, 0, operand.shape[0] - 1)]
            value = jnp.where(size == recv_sizes[sender * n_slices + at], value, jnp.nan)
            is_written = (place >= into) & (place < into + size)
            output = jnp.where(is_written.reshape(-1, *(1,) * (output.ndim - 1)), value, output)
    return output


def _exchange(weights: dict[str, np.ndarray], dispatch: Dispatch) -> Callable[..., jax.Array]:
    """The compiled exchange of `Routed`, whatever the routing."""
    plan = Plan(dp=N_DEVICES, ep=N_DEVICES)
    collectives = ShardMapCollectives(plan=plan, layout=ShardLayout(plan=plan, phase=Phase.PREFILL))
    dims = (Dim.EXPERT, Dim.EXPERT_HIDDEN, Dim.EXPERT_FFN)
    specs = {
        name: Weight(name=name, dims=dims, shape=array.shape, checkpoint=name)
        for name, array in weights.items()
    }

    def on_device(tokens, chosen, shares, arrays):
        held = LayerWeights(arrays=arrays, specs=specs, collectives=collectives, dtype=np.float32)
        experts = Experts(moe=MOE, weights=held)
        return exchange_mixture(tokens[0], chosen[0], shares[0], experts, dispatch)[0][None]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:N_DEVICES]), ("dp",))
    split = jax.sharding.PartitionSpec("dp")
    step = jax.shard_map(
        on_device, mesh=mesh, in_specs=(split,) * 4, out_specs=split, check_vma=False
    )
    return jax.jit(step)


CAPACITY, RAGGED = DispatchForm.CAPACITY, DispatchForm.RAGGED


@pytest.mark.parametrize(
    ("form", "factor", "room"),
    [
        (CAPACITY, 1.0, None),
        (CAPACITY, 2.0, None),
        *((form, None, room) for form in (CAPACITY, RAGGED) for room in (None, 1, 2, 7)),
    ],
)
def test_only_rows_beyond_capacity_are_dropped_and_none_in_rounds(
    form, factor, room, monkeypatch
) -> None:
    """Buffers of `room` rows, or slots, take several rounds; those of the worst routing take one."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", _ragged_all_to_all)
    plan = Plan(dp=N_DEVICES, ep=N_DEVICES)
    dispatch = dispatch_of(MOE, plan, n_tokens=N_TOKENS, form=form, capacity_factor=factor)
    assert dispatch is not None
    if room is not None:
        slots = None if form is RAGGED else room
        n_rows = room if slots is None else N_DEVICES * room
        dispatch = replace(dispatch, n_buffer_rows=n_rows, n_slots=slots, has_rounds=True)
    weights = _weights(4)
    exchange = _exchange(weights, dispatch)
    for is_skewed in (False, True):
        routed = _routed(3, is_skewed=is_skewed)
        expected, n_dropped = _by_walking(routed, weights, dispatch)
        got = np.asarray(exchange(*routed, weights))
        assert (n_dropped > 0) is (factor is not None)
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-5)
