"""The mixture of experts between two norms, in each of its ways: by hand, or left to the compiler.

By hand, a plan decides what moves. Experts split over tp (whole experts, or a share of each): no
token moves, partial sums are added up. Experts over the data axis: rows travel there and back.
Over both: each device of tp routes its own share of the tokens.

Shapes: B batch, S positions of this step, T tokens, D residual width, E experts, C slots of an
expert, F width of an expert.
"""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshscope.events.enums import Part
from meshscope.programs.jax.collectives import MeshCollectives, scope
from meshscope.programs.jax.exchange import exchanged_beside, exchanged_mixture
from meshscope.programs.jax.experts import (
    Experts,
    counted,
    gated,
    local_mixture,
    routing,
    summed_rows,
    unsorted,
)
from meshscope.programs.jax.layout import ShardLayout
from meshscope.programs.jax.numerics import Array
from meshscope.programs.jax.state import LayerWeights
from meshscope.spec.model.model import Activation, MixtureOfExperts
from meshscope.spec.plan.dispatch import (
    Dispatch,
    DispatchForm,
    dispatch_of,
    exchange_axes,
    routed_tokens,
)
from meshscope.spec.plan.plan import Plan
from meshscope.spec.plan.weights import Dim


class Mixture(Protocol):
    """What stands in for the MLP of a layer with experts."""

    def __call__(self, x: Array, w: LayerWeights, ids: Array) -> Array:
        """The normed residual stream in, what is added to it out; both laid out like it.

        `ids` [B, S] are the tokens of the step, never split over tp.
        """
        ...


def shared_experts(
    x: Array, w: LayerWeights, moe: MixtureOfExperts, inner: Array | None = None
) -> Array:
    """The gated MLP of the shared experts: this device's part of a sum over tp.

    `inner` is what `inner_of_shared` makes, where that was done before.
    """
    return (inner_of_shared(x, w, moe) if inner is None else inner) @ w("shared_w_down")


def inner_of_shared(x: Array, w: LayerWeights, moe: MixtureOfExperts) -> Array:
    """The first two of the three products of the shared experts."""
    with scope(Part.MOE_SHARED):
        gate, up = x @ w("shared_w_gate"), x @ w("shared_w_up")
        is_limited = moe.activation is Activation.LIMITED_SWIGLU
        return gated(gate, up, moe) if is_limited else jax.nn.silu(gate) * up


@dataclass(frozen=True, slots=True, kw_only=True)
class ManualMixture:
    """Every exchange written out; arrays are one device's share."""

    moe: MixtureOfExperts
    plan: Plan
    layout: ShardLayout
    points: MeshCollectives
    form: DispatchForm
    capacity_factor: float | None
    has_kernel: bool = False

    def __call__(self, x: Array, w: LayerWeights, ids: Array) -> Array:
        """As `Mixture`."""
        if "tp" in exchange_axes(self.plan):
            return self._over_tokens(x, w, ids)
        return self._over_tp(x, w, ids)

    def _over_tp(self, x: Array, w: LayerWeights, ids: Array) -> Array:
        """All devices of tp hold the same tokens; what each adds is summed over tp once."""
        with scope(Part.MOE_DISPATCH):
            x = self.points.entered(x)
        tokens = x.reshape(-1, x.shape[-1])
        with scope(Part.MOE_ROUTER):
            chosen, shares = routing(tokens, w, self.moe, ids.reshape(-1))
        dispatch, inner = self._dispatch(tokens.shape[0]), None
        if dispatch is not None:
            # The dispatch can hide behind two products of the shared experts, the combine behind one.
            meanwhile = (
                partial(inner_of_shared, x, w, self.moe)
                if self.moe.shared_ffn is not None
                else None
            )
            experts = self._experts(w)
            out, inner = exchanged_beside(
                tokens, chosen, shares, experts, dispatch, meanwhile=meanwhile
            )
        else:
            n_local = self.moe.n_experts // self.plan.ep
            first = lax.axis_index("tp") * n_local if self.plan.expert_axes else 0
            with scope(Part.MOE_EXPERTS):
                experts = self._experts(w)
                out = local_mixture(tokens, chosen, shares, experts, first=first, n_local=n_local)
        with scope(Part.MOE_COMBINE):
            out = out.reshape(x.shape)
            if x.shape[1] == 1:  # else the sum behind it is sometimes compiled as one of [B, D]
                out = lax.optimization_barrier(out)
        if self.moe.shared_ffn is not None:
            with scope(Part.MOE_SHARED):
                shared = shared_experts(x, w, self.moe, inner)
            with scope(Part.MOE_COMBINE):
                out = out + shared
        with scope(Part.MOE_COMBINE):
            return self.points.summed(out)

    def _over_tokens(self, x: Array, w: LayerWeights, ids: Array) -> Array:
        """Each device of tp routes its own tokens; shared experts see them all, as a dense MLP does."""
        is_split = self.layout.split_dim is not None
        tokens = x.reshape(-1, x.shape[-1])
        n_tokens = tokens.shape[0] if is_split else routed_tokens(self.plan, tokens.shape[0])
        with scope(Part.MOE_ROUTER):
            own = tokens if is_split else _share(tokens, n_tokens)
            own_ids = self._split(ids) if is_split else _share(ids.reshape(-1), n_tokens)
            chosen, shares = routing(own, w, self.moe, own_ids.reshape(-1))
            if not is_split:
                chosen = self._without_padding(chosen, tokens.shape[0])
        dispatch = self._dispatch(n_tokens)
        assert dispatch is not None
        out = exchanged_mixture(own, chosen, shares, self._experts(w), dispatch)
        if not is_split:
            with scope(Part.MOE_COMBINE):
                out = lax.all_gather(out, "tp", axis=0, tiled=True)[: tokens.shape[0]]
        with scope(Part.MOE_COMBINE):
            out = out.reshape(x.shape)
        if self.moe.shared_ffn is not None:
            with scope(Part.MOE_SHARED):
                whole = self.points.entered(x)
                shared = self.points.summed(shared_experts(whole, w, self.moe))
            with scope(Part.MOE_COMBINE):
                out = out + shared
        return out

    def _experts(self, w: LayerWeights) -> Experts:
        """This device's experts; one device of tp adds the bias where each holds a share of all."""
        is_partial = self.plan.tp > 1 and "tp" not in self.plan.expert_axes
        share = (lax.axis_index("tp") == 0).astype(w.dtype) if is_partial else 1.0
        return Experts(moe=self.moe, weights=w, bias_share=share, has_kernel=self.has_kernel)

    def _split(self, ids: Array) -> Array:
        """This tp device's part of the ids [B, S], as sp splits the residual stream."""
        dim = self.layout.split_dim
        assert dim is not None
        n_own = ids.shape[dim] // self.plan.tp
        return lax.dynamic_slice_in_dim(ids, lax.axis_index("tp") * n_own, n_own, axis=dim)

    def _without_padding(self, chosen: Array, n_tokens: int) -> Array:
        """No expert for the tokens that only fill the last device's share."""
        place = lax.axis_index("tp") * chosen.shape[0] + jnp.arange(chosen.shape[0])
        return jnp.where((place < n_tokens)[:, None], chosen, self.moe.n_experts)

    def _dispatch(self, n_tokens: int) -> Dispatch | None:
        return dispatch_of(
            self.moe,
            self.plan,
            n_tokens=n_tokens,
            form=self.form,
            capacity_factor=self.capacity_factor,
        )


def _share(tokens: Array, n_tokens: int) -> Array:
    """This tp device's share [n_tokens, ...] of the tokens, zeros beyond the last."""
    missing = -tokens.shape[0] % n_tokens
    padded = jnp.pad(tokens, ((0, missing), *((0, 0),) * (tokens.ndim - 1)))
    return lax.dynamic_slice_in_dim(padded, lax.axis_index("tp") * n_tokens, n_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoMixture:
    """Annotations alone; arrays are global. The ways that programs write it down."""

    moe: MixtureOfExperts
    plan: Plan
    layout: ShardLayout
    points: MeshCollectives
    mesh: Mesh
    form: DispatchForm
    capacity_factor: float | None
    has_kernel: bool = False

    def __call__(self, x: Array, w: LayerWeights, ids: Array) -> Array:
        """As `Mixture`."""
        with scope(Part.MOE_DISPATCH):
            x = self.points.entered(x)
        tokens = x.reshape(-1, x.shape[-1])
        with scope(Part.MOE_ROUTER):
            chosen, shares = routing(tokens, w, self.moe, ids.reshape(-1))
        by_form = self._gathered if self.form is DispatchForm.GATHERED else self._one_hot
        out = by_form(tokens, chosen, shares, w).reshape(x.shape)
        if self.moe.shared_ffn is not None:
            with scope(Part.MOE_SHARED):
                shared = shared_experts(x, w, self.moe)
            with scope(Part.MOE_COMBINE):
                out = out + shared
        with scope(Part.MOE_COMBINE):
            return self.points.summed(out)

    def _annotated(self, x: Array, *dims: object) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*dims)))

    def _one_hot(self, tokens: Array, chosen: Array, shares: Array, w: LayerWeights) -> Array:
        """Dispatch and combine as products with a mask [G, T, E, C] (GShard, arXiv 2006.16668).

        Tokens are taken in groups, one a data-parallel device, so that slots are filled locally.
        Annotated by expert alone, the rows are made from gathered tokens; annotated by group first
        and by expert then (`one_hot_pinned`), they are exchanged.
        """
        n_groups, n_experts, data = self.plan.data_size, self.moe.n_experts, self.layout.data
        by_expert = self.layout.split(Dim.EXPERT)
        tokens = self._annotated(tokens.reshape(n_groups, -1, tokens.shape[-1]), data, None, None)
        chosen = chosen.reshape(n_groups, -1, self.moe.n_active)
        n_slots = self._slots(tokens.shape[1])
        with scope(Part.MOE_DISPATCH):
            hot = jax.nn.one_hot(chosen, n_experts, dtype=jnp.int32)  # [G, T, K, E]
            flat = hot.reshape(n_groups, -1, n_experts)
            slot = ((jnp.cumsum(flat, axis=1) - 1) * flat).sum(axis=-1).reshape(chosen.shape)
            place = jax.nn.one_hot(slot, n_slots, dtype=tokens.dtype)  # zeros if it is full
            kept = hot.astype(tokens.dtype)
            mask = jnp.einsum("gtke,gtkc->gtec", kept, place)
            rows = jnp.einsum("gtec,gtd->egcd", mask, tokens)
            if self.form is DispatchForm.ONE_HOT_PINNED:
                rows = self._annotated(rows, None, data, None, None)
            rows = self._annotated(rows, by_expert, None, None, None)
        with scope(Part.MOE_EXPERTS):
            out = self._experts_of_slots(rows, w)
        with scope(Part.MOE_COMBINE):
            weighted = kept * shares.reshape(chosen.shape)[..., None].astype(tokens.dtype)
            combine = jnp.einsum("gtke,gtkc->gtec", weighted, place)
            if self.form is DispatchForm.ONE_HOT_PINNED:
                out = self._annotated(out, by_expert, None, None, None)
                out = self._annotated(out, None, data, None, None)
            out = jnp.einsum("gtec,egcd->gtd", combine, out)
            return self._annotated(out, data, None, None).reshape(-1, out.shape[-1])

    def _experts_of_slots(self, rows: Array, w: LayerWeights) -> Array:
        """[E, G, C, D] -> the same shape, each expert on its own slots."""

        def product(x: Array, letter: str) -> Array:
            out = jnp.einsum("egcx,exy->egcy", x, w(f"experts_w_{letter}"))
            bias = f"experts_b_{letter}"
            return out + w(bias)[:, None, None, :] if bias in w else out

        return product(gated(product(rows, "gate"), product(rows, "up"), self.moe), "down")

    def _slots(self, n_tokens: int) -> int:
        """Slots of an expert for the tokens of one group: all of them, or the factor times the mean."""
        if self.capacity_factor is None:
            return n_tokens
        mean = n_tokens * self.moe.n_active / self.moe.n_experts
        return min(n_tokens, max(1, round(mean * self.capacity_factor)))

    def _gathered(self, tokens: Array, chosen: Array, shares: Array, w: LayerWeights) -> Array:
        """Rows gathered by index, sorted by expert, through a grouped matmul: never more than there are."""
        flat = chosen.reshape(-1)
        with scope(Part.MOE_DISPATCH):
            order = jnp.argsort(flat, stable=True)
            rows = tokens[order // self.moe.n_active]
        with scope(Part.MOE_EXPERTS):
            experts = Experts(moe=self.moe, weights=w, has_kernel=self.has_kernel)
            out = experts(rows, counted(flat, self.moe.n_experts))
        with scope(Part.MOE_COMBINE):
            return summed_rows(unsorted(out, order), shares)
