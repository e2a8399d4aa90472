"""Mixture-of-experts layers with explicit collectives, or with annotations for the partitioner.

With explicit collectives, the plan decides the communication. Experts over tp (whole ones, or a
shard of each) reduce partial sums and send no tokens. Experts over the data axis exchange rows by
all-to-alls. Experts over both axes: each tp device routes its own share of the tokens.

Shapes: B batch, S positions of this step, T tokens, D residual width, E experts, C slots of an
expert, F width of an expert, G groups of tokens, K experts of a token.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshscope.events.enums import Part
from meshscope.model.arrays import Dim
from meshscope.model.mechanisms.mixture import Activation, MixtureOfExperts
from meshscope.plans.dispatch import (
    Dispatch,
    DispatchForm,
    dispatch_of,
    exchange_axes,
    routed_tokens,
)
from meshscope.plans.plan import Plan
from meshscope.programs.jax.collectives import (
    GspmdCollectives,
    MeshCollectives,
    ShardLayout,
    ShardMapCollectives,
    scope,
)
from meshscope.programs.jax.exchange import exchange_mixture
from meshscope.programs.jax.experts import (
    Experts,
    gated,
    local_mixture,
    routing,
    scaled_inputs,
)
from meshscope.programs.jax.grouped_matmul import GroupedKernel
from meshscope.programs.jax.matrix import MAX_BLOCK_ROWS
from meshscope.programs.jax.numerics import Array
from meshscope.programs.jax.state import LayerWeights


def shared_experts(
    x: Array, w: LayerWeights, moe: MixtureOfExperts, inner: Array | None = None
) -> Array:
    """The gated MLP of the shared experts, a partial sum over tp; `inner` is `shared_inner`, if already computed."""
    out = w.dot(shared_inner(x, w, moe) if inner is None else inner, "shared_w_down")
    return out * jax.nn.sigmoid(x @ w("shared_gate")) if moe.has_shared_gate else out


def shared_inner(x: Array, w: LayerWeights, moe: MixtureOfExperts) -> Array:
    """The gate and up projections of the shared experts, with their activation; one product if many tokens pass converted ones."""
    names = ("shared_w_gate", "shared_w_up")
    is_limited = moe.activation is Activation.LIMITED_SWIGLU
    with scope(Part.MOE_SHARED):
        if w.block(names[0]) is None or prod(x.shape[:-1]) <= MAX_BLOCK_ROWS:
            gate, up = (w.dot(x, name) for name in names)
        else:
            both = jnp.stack([w.matrix(name).whole() for name in names], axis=1)
            out = jnp.einsum("bsd,dif->bsif", x, both)
            gate, up = out[:, :, 0], out[:, :, 1]
        return gated(gate, up, moe) if is_limited else jax.nn.silu(gate) * up


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A mixture on local arrays with explicit collectives, or on global arrays with a one-hot mask."""

    moe: MixtureOfExperts
    plan: Plan
    layout: ShardLayout
    collectives: MeshCollectives
    form: DispatchForm
    capacity_factor: float | None
    has_kernel: bool = False
    grouped_kernel: GroupedKernel | None = None

    def __call__(self, x: Array, w: LayerWeights, ids: Array) -> Array:
        """The output for a normed input, both sharded like the residual stream; `ids` [B, S] are the tokens on all tp devices."""
        is_manual = isinstance(self.collectives, ShardMapCollectives)
        if is_manual and "tp" in exchange_axes(self.plan):
            return self._over_tokens(x, w, ids)
        with scope(Part.MOE_DISPATCH):
            x = self.collectives.gather_activations(x)
        tokens, inner = x.reshape(-1, x.shape[-1]), None
        with scope(Part.MOE_ROUTER):
            expert_ids, shares = routing(tokens, w, self.moe, ids.reshape(-1))
            tokens, shares = scaled_inputs(tokens, shares, w, self.moe)
        routed = (tokens, expert_ids, shares)
        if not is_manual:
            out = self._one_hot(*routed, w)
        elif (dispatch := self._dispatch(tokens.shape[0])) is not None:
            # Two dots of the shared experts can hide the dispatch, the third the combine.
            has_shared = self.moe.shared_ffn is not None
            meanwhile = partial(shared_inner, x, w, self.moe) if has_shared else None
            out, inner = exchange_mixture(*routed, self._experts(w), dispatch, meanwhile=meanwhile)
        else:
            n_local = self.moe.n_experts // self.plan.ep
            first = lax.axis_index("tp") * n_local if self.plan.expert_axes else 0
            with scope(Part.MOE_EXPERTS):
                out = local_mixture(*routed, self._experts(w), first=first, n_local=n_local)
        with scope(Part.MOE_COMBINE):
            out = out.reshape(x.shape)
            if is_manual and x.shape[1] == 1:  # else XLA may compile the reduction as one of [B, D]
                out = lax.optimization_barrier(out)
        if self.moe.shared_ffn is not None:
            with scope(Part.MOE_SHARED):
                shared = shared_experts(x, w, self.moe, inner)
            with scope(Part.MOE_COMBINE):
                out = out + shared
        with scope(Part.MOE_COMBINE):
            return self.collectives.reduce_output(out)

    def _over_tokens(self, x: Array, w: LayerWeights, ids: Array) -> Array:
        # Each tp device routes its share of the tokens; shared experts take all, as a dense MLP does.
        is_split = self.layout.split_dim is not None
        tokens = x.reshape(-1, x.shape[-1])
        n_tokens = tokens.shape[0] if is_split else routed_tokens(self.plan, tokens.shape[0])
        with scope(Part.MOE_ROUTER):
            if is_split:
                local, local_ids = tokens, self.collectives.split_activations(ids).reshape(-1)
            else:
                local, local_ids = _share(tokens, n_tokens), _share(ids.reshape(-1), n_tokens)
            expert_ids, shares = routing(local, w, self.moe, local_ids)
            local, shares = scaled_inputs(local, shares, w, self.moe)
            if not is_split:  # the padding tokens of the last device have no expert
                place = lax.axis_index("tp") * n_tokens + jnp.arange(n_tokens)
                is_token = (place < tokens.shape[0])[:, None]
                expert_ids = jnp.where(is_token, expert_ids, self.moe.n_experts)
        dispatch = self._dispatch(n_tokens)
        assert dispatch is not None
        out, _ = exchange_mixture(local, expert_ids, shares, self._experts(w), dispatch)
        with scope(Part.MOE_COMBINE):
            if not is_split:
                out = lax.all_gather(out, "tp", axis=0, tiled=True)[: tokens.shape[0]]
            out = out.reshape(x.shape)
        if self.moe.shared_ffn is not None:
            with scope(Part.MOE_SHARED):
                whole = self.collectives.gather_activations(x)
                shared = self.collectives.reduce_output(shared_experts(whole, w, self.moe))
            with scope(Part.MOE_COMBINE):
                out = out + shared
        return out

    def _experts(self, w: LayerWeights) -> Experts:
        is_partial = self.plan.tp > 1 and "tp" not in self.plan.expert_axes
        return Experts(
            moe=self.moe,
            weights=w,
            bias_share=(lax.axis_index("tp") == 0).astype(w.dtype) if is_partial else 1.0,
            has_kernel=self.has_kernel,
            grouped_kernel=self.grouped_kernel,
        )

    def _dispatch(self, n_tokens: int) -> Dispatch | None:
        options: Any = {"form": self.form, "capacity_factor": self.capacity_factor}
        return dispatch_of(self.moe, self.plan, n_tokens=n_tokens, **options)

    def _annotated(self, x: Array, *dims: object) -> Array:
        assert isinstance(self.collectives, GspmdCollectives)
        return self.collectives.annotated(x, P(*dims))

    def _one_hot(self, tokens: Array, expert_ids: Array, shares: Array, w: LayerWeights) -> Array:
        """Dispatch and combine as dots with a mask [G, T, E, C] (GShard, arXiv 2006.16668), G groups of tokens of a device.

        Rows are annotated by expert only, so the compiler computes them from gathered tokens.
        """

        def product(x: Array, letter: str) -> Array:  # of each expert with its slots [E, G, C, D]
            out = w.einsum("egcx,exy->egcy", x, f"experts_w_{letter}")
            bias = f"experts_b_{letter}"
            return out + w(bias)[:, None, None, :] if bias in w else out

        n_groups, n_experts, data = self.plan.data_size, self.moe.n_experts, self.layout.data
        by_expert = self.layout.split(Dim.EXPERT)
        tokens = self._annotated(tokens.reshape(n_groups, -1, tokens.shape[-1]), data, None, None)
        expert_ids = expert_ids.reshape(n_groups, -1, self.moe.n_active)
        n_slots = tokens.shape[1]
        if self.capacity_factor is not None:
            mean = n_slots * self.moe.n_active / n_experts
            n_slots = min(n_slots, max(1, round(mean * self.capacity_factor)))
        with scope(Part.MOE_DISPATCH):
            hot = jax.nn.one_hot(expert_ids, n_experts, dtype=jnp.int32)  # [G, T, K, E]
            flat = hot.reshape(n_groups, -1, n_experts)
            slot = ((jnp.cumsum(flat, axis=1) - 1) * flat).sum(axis=-1).reshape(expert_ids.shape)
            place = jax.nn.one_hot(slot, n_slots, dtype=tokens.dtype)  # zeros if it is full
            kept = hot.astype(tokens.dtype)
            mask = jnp.einsum("gtke,gtkc->gtec", kept, place)
            rows = jnp.einsum("gtec,gtd->egcd", mask, tokens)
            rows = self._annotated(rows, by_expert, None, None, None)
        with scope(Part.MOE_EXPERTS):
            inner = gated(product(rows, "gate"), product(rows, "up"), self.moe)
            out = product(inner, "down")
        with scope(Part.MOE_COMBINE):
            weighted = kept * shares.reshape(expert_ids.shape)[..., None].astype(tokens.dtype)
            combine = jnp.einsum("gtke,gtkc->gtec", weighted, place)
            out = jnp.einsum("gtec,egcd->gtd", combine, out)
            return self._annotated(out, data, None, None).reshape(-1, out.shape[-1])


def _share(tokens: Array, n_tokens: int) -> Array:
    """The local share [n_tokens, ...] of the tokens over tp, zero-padded."""
    missing = -tokens.shape[0] % n_tokens
    padded = jnp.pad(tokens, ((0, missing), *((0, 0),) * (tokens.ndim - 1)))
    return lax.dynamic_slice_in_dim(padded, lax.axis_index("tp") * n_tokens, n_tokens)
