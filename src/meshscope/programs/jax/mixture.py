"""Mixture-of-experts layers with explicit collectives, or with annotations for the partitioner.

With explicit collectives, the plan decides the communication. Experts over tp (whole ones, or a
shard of each) reduce partial sums and send no tokens. Experts over the data axis exchange rows by
all-to-alls. Experts over both axes: each tp device routes its own share of the tokens.

Shapes: B batch, S positions of this step, T tokens, D residual width, E experts, C slots of an
expert, F width of an expert, G groups of tokens, K experts of a token.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshscope.events.enums import Part
from meshscope.model.arrays import Dim
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
from meshscope.programs.jax.experts import Experts, local_mixture
from meshscope.programs.jax.numerics import Array
from meshscope.programs.jax.state import LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A mixture on local arrays with explicit collectives, or on global arrays with a one-hot mask."""

    experts: Experts  # without their weights
    plan: Plan
    layout: ShardLayout
    collectives: MeshCollectives
    form: DispatchForm
    capacity_factor: float | None

    def __call__(self, x: Array, w: LayerWeights, ids: Array) -> Array:
        """The output for a normed input, both sharded like the residual stream; `ids` [B, S] are the tokens on all tp devices."""
        is_manual = isinstance(self.collectives, ShardMapCollectives)
        if is_manual and "tp" in exchange_axes(self.plan):
            return self._over_tokens(x, w, ids)
        with scope(Part.MOE_DISPATCH):
            x = self.collectives.gather_activations(x)
        tokens, inner, experts = x.reshape(-1, x.shape[-1]), None, replace(self.experts, weights=w)
        with scope(Part.MOE_ROUTER):
            routed = experts.routed(tokens, ids.reshape(-1))
        if not is_manual:
            out = self._one_hot(*routed, experts)
        elif (dispatch := self._dispatch(tokens.shape[0])) is not None:
            # Two dots of the shared experts can hide the dispatch, the third the combine.
            has_shared = experts.moe.shared_ffn is not None
            meanwhile = partial(experts.shared_inner, x) if has_shared else None
            out, inner = exchange_mixture(
                *routed, self._local(experts), dispatch, meanwhile=meanwhile
            )
        else:
            n_local = experts.moe.n_experts // self.plan.ep
            first = lax.axis_index("tp") * n_local if self.plan.expert_axes else 0
            with scope(Part.MOE_EXPERTS):
                out = local_mixture(*routed, self._local(experts), first=first, n_local=n_local)
        with scope(Part.MOE_COMBINE):
            out = experts.widened(out).reshape(x.shape)
            if is_manual and x.shape[1] == 1:  # else XLA may compile the reduction as one of [B, D]
                out = lax.optimization_barrier(out)
        if experts.moe.shared_ffn is not None:
            with scope(Part.MOE_SHARED):
                shared = experts.shared(x, inner)
            with scope(Part.MOE_COMBINE):
                out = out + shared
        with scope(Part.MOE_COMBINE):
            return self.collectives.reduce_output(out)

    def _over_tokens(self, x: Array, w: LayerWeights, ids: Array) -> Array:
        # Each tp device routes its share of the tokens; shared experts take all, as a dense MLP does.
        is_split, experts = self.layout.split_dim is not None, replace(self.experts, weights=w)
        tokens = x.reshape(-1, x.shape[-1])
        n_tokens = tokens.shape[0] if is_split else routed_tokens(self.plan, tokens.shape[0])
        with scope(Part.MOE_ROUTER):
            if is_split:
                local, local_ids = tokens, self.collectives.split_activations(ids).reshape(-1)
            else:
                local, local_ids = _share(tokens, n_tokens), _share(ids.reshape(-1), n_tokens)
            local, expert_ids, shares = experts.routed(local, local_ids)
            if not is_split:  # the padding tokens of the last device have no expert
                place = lax.axis_index("tp") * n_tokens + jnp.arange(n_tokens)
                is_token = (place < tokens.shape[0])[:, None]
                expert_ids = jnp.where(is_token, expert_ids, experts.moe.n_experts)
        dispatch = self._dispatch(n_tokens)
        assert dispatch is not None
        out, _ = exchange_mixture(local, expert_ids, shares, self._local(experts), dispatch)
        with scope(Part.MOE_COMBINE):
            if not is_split:
                out = lax.all_gather(out, "tp", axis=0, tiled=True)[: tokens.shape[0]]
            out = experts.widened(out).reshape(x.shape)
        if experts.moe.shared_ffn is not None:
            with scope(Part.MOE_SHARED):
                whole = self.collectives.gather_activations(x)
                shared = self.collectives.reduce_output(experts.shared(whole))
            with scope(Part.MOE_COMBINE):
                out = out + shared
        return out

    def _local(self, experts: Experts) -> Experts:
        """With the bias of the down-projection on one device alone, if tp splits each expert."""
        is_partial = self.plan.tp > 1 and "tp" not in self.plan.expert_axes
        if not is_partial:
            return experts
        is_first = lax.axis_index("tp") == 0
        return replace(experts, bias_share=is_first.astype(experts.weights.dtype))

    def _dispatch(self, n_tokens: int) -> Dispatch | None:
        options: Any = {"form": self.form, "capacity_factor": self.capacity_factor}
        return dispatch_of(self.experts.moe, self.plan, n_tokens=n_tokens, **options)

    def _annotated(self, x: Array, *dims: object) -> Array:
        assert isinstance(self.collectives, GspmdCollectives)
        return self.collectives.annotated(x, P(*dims))

    def _one_hot(self, tokens: Array, expert_ids: Array, shares: Array, experts: Experts) -> Array:
        """Dispatch and combine as dots with a mask [G, T, E, C] (GShard, arXiv 2006.16668), G groups of tokens of a device.

        Rows are annotated by expert only, so the compiler computes them from gathered tokens.
        """

        def product(x: Array, letter: str) -> Array:  # of each expert with its slots [E, G, C, D]
            out = w.einsum("egcx,exy->egcy", x, f"experts_w_{letter}")
            bias = f"experts_b_{letter}"
            return out + w(bias)[:, None, None, :] if bias in w else out

        w, moe, n_groups, data = experts.weights, experts.moe, self.plan.data_size, self.layout.data
        by_expert = self.layout.split(Dim.EXPERT)
        tokens = self._annotated(tokens.reshape(n_groups, -1, tokens.shape[-1]), data, None, None)
        expert_ids = expert_ids.reshape(n_groups, -1, moe.n_active)
        n_slots = tokens.shape[1]
        if self.capacity_factor is not None:
            mean = n_slots * moe.n_active / moe.n_experts
            n_slots = min(n_slots, max(1, round(mean * self.capacity_factor)))
        with scope(Part.MOE_DISPATCH):
            hot = jax.nn.one_hot(expert_ids, moe.n_experts, dtype=jnp.int32)  # [G, T, K, E]
            flat = hot.reshape(n_groups, -1, moe.n_experts)
            slot = ((jnp.cumsum(flat, axis=1) - 1) * flat).sum(axis=-1).reshape(expert_ids.shape)
            place = jax.nn.one_hot(slot, n_slots, dtype=tokens.dtype)  # zeros if it is full
            kept = hot.astype(tokens.dtype)
            mask = jnp.einsum("gtke,gtkc->gtec", kept, place)
            rows = jnp.einsum("gtec,gtd->egcd", mask, tokens)
            rows = self._annotated(rows, by_expert, None, None, None)
        with scope(Part.MOE_EXPERTS):
            gate = product(rows, "gate") if moe.activation.is_gated else rows
            inner = experts.gated(gate, product(rows, "up"), experts.limits[0])
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
