"""Routing and expert computation of a mixture of experts on one device.

Shapes: T tokens, D residual width, E experts of the model, e local experts, K experts of a token,
F width of an expert, R rows (one for each pair of a token and an expert).
"""

from dataclasses import dataclass
from math import prod
from typing import assert_never

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.events.enums import Part
from meshscope.model.mechanisms.mixture import Activation, GroupScore, MixtureOfExperts, Scoring
from meshscope.plans.kernel_choice import MAX_STACKED_EXPERTS, RAGGED_DOT_ROWS
from meshscope.programs.jax.collectives import scope
from meshscope.programs.jax.grouped_matmul import GroupedKernel
from meshscope.programs.jax.matrix import MAX_BLOCK_ROWS, narrowed, total_dtype
from meshscope.programs.jax.numerics import Array, soft_capped
from meshscope.programs.jax.state import LayerWeights

ROWS_OF_TILE = 8
CLAMPED_SWIGLU_ALPHA = 1.702  # transformers GptOssConfig.swiglu_alpha


def chosen_scores(scores: Array, experts: Array) -> Array:
    """The scores [T, K] of the chosen experts, of all [T, E]; XLA would gather them one by one."""
    is_chosen = experts[..., None] == jnp.arange(scores.shape[-1])
    return jnp.where(is_chosen, scores[:, None], 0).sum(axis=-1)


def _scores(logits: Array, moe: MixtureOfExperts) -> Array:
    match moe.scoring:
        case Scoring.SOFTMAX:
            return jax.nn.softmax(logits, axis=-1)
        case Scoring.SIGMOID:
            return jax.nn.sigmoid(logits)
        case Scoring.SQRT_SOFTPLUS:
            return jnp.sqrt(jax.nn.softplus(logits))
        case _:
            assert_never(moe.scoring)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of one device, which kernels read in place in a stack, their router and the shared experts."""

    moe: MixtureOfExperts
    weights: LayerWeights
    limits: tuple[float | None, float | None] = (None, None)  # of the layer
    bias_share: Array | float = 1.0  # of the down-projection: 0 on all devices but one of an expert
    has_kernel: bool = False  # XLA's ragged dot, which needs padded rows
    grouped_kernel: GroupedKernel | None = None  # also applies the scales

    def routed(self, tokens: Array, ids: Array) -> tuple[Array, Array, Array]:
        """Inputs [T, D] of the experts, expert IDs [T, K] and shares [T, K] for tokens [T, D] with IDs [T].

        Source: the routers of transformers' Mixtral, Qwen3-MoE, gpt-oss, Gemma 4, DeepSeek-V2, -V3 and -V4.
        """
        w, moe, x = self.weights, self.moe, tokens.astype(jnp.float32)
        if moe.has_scales:
            x = x * (w("router_scale").astype(jnp.float32) * x.shape[-1] ** -0.5)
        logits = x @ w("router").astype(jnp.float32)
        scores = _scores(soft_capped(w.biased(logits, "router_bias"), moe.router_softcap), moe)
        experts = w("router_table")[ids] if "router_table" in w else self._best(scores)
        shares = chosen_scores(scores, experts)
        if moe.is_normalized:
            shares = shares / (shares.sum(axis=-1, keepdims=True) + 1e-20)
        if moe.has_scales:
            of_experts = w("expert_scale").astype(shares.dtype)
            shares = shares * chosen_scores(jnp.broadcast_to(of_experts, scores.shape), experts)
        shares = shares * moe.scale
        if moe.has_scales:
            tokens = tokens * w("experts_norm").astype(tokens.dtype)
        if moe.scales_inputs:
            tokens, shares = (tokens * shares).astype(tokens.dtype), jnp.ones_like(shares)
        if moe.latent is not None:
            tokens = w.dot(tokens, "experts_latent_in")
        return tokens, experts.astype(jnp.int32), shares

    def _best(self, scores: Array) -> Array:
        """The experts [T, K] with the best scores of all [T, E], in the best groups."""
        moe, corrected = self.moe, self.weights.biased(scores, "router_correction")
        if moe.n_active_groups < moe.n_groups:
            grouped = corrected.reshape(corrected.shape[0], moe.n_groups, -1)
            match moe.group_score:
                case GroupScore.MAX:
                    group_scores = grouped.max(axis=-1)
                case GroupScore.TOP2_SUM:
                    group_scores = lax.top_k(grouped, 2)[0].sum(axis=-1)
                case _:
                    assert_never(moe.group_score)
            best = lax.top_k(group_scores, moe.n_active_groups)[1]
            is_best = jax.nn.one_hot(best, moe.n_groups, dtype=bool).any(axis=1)
            corrected = jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(corrected.shape)
        return lax.top_k(corrected, moe.n_active)[1]

    def widened(self, out: Array) -> Array:
        """Sums of experts in the width of the residual stream."""
        return out if self.moe.latent is None else self.weights.dot(out, "experts_latent_out")

    def shared(self, x: Array, inner: Array | None = None) -> Array:
        """The gated MLP of the shared experts, a partial sum over tp; `inner` is `shared_inner`, if already computed."""
        w = self.weights
        out = w.dot(self.shared_inner(x) if inner is None else inner, "shared_w_down")
        out = out if self.moe.shared_scale == 1.0 else out * self.moe.shared_scale
        return out * jax.nn.sigmoid(x @ w("shared_gate")) if self.moe.has_shared_gate else out

    def shared_inner(self, x: Array) -> Array:
        """The gate and up projections of the shared experts, with their activation; one product if many tokens pass converted ones."""
        w, names = self.weights, ("shared_w_gate", "shared_w_up")
        with scope(Part.MOE_SHARED):
            if not self.moe.activation.is_gated:
                return self.gated(x, w.dot(x, names[1]))
            if w.block(names[0]) is None or prod(x.shape[:-1]) <= MAX_BLOCK_ROWS:
                gate, up = (w.dot(x, name) for name in names)
            else:
                both = jnp.stack([w.matrix(name).whole() for name in names], axis=1)
                out = jnp.einsum("bsd,dif->bsif", x, both)
                gate, up = out[:, :, 0], out[:, :, 1]
            return self.gated(gate, up, self.limits[1])

    def __call__(self, rows: Array, group_sizes: Array) -> Array:
        """The outputs [R, D] for rows sorted by expert, `group_sizes` [e] rows for each; arbitrary values for rows beyond."""
        n_rows = rows.shape[0]
        if self.has_kernel:
            rows = jnp.pad(rows, ((0, -n_rows % RAGGED_DOT_ROWS), (0, 0)))
        place, ends = jnp.arange(rows.shape[0])[:, None], jnp.cumsum(group_sizes)
        is_of_expert = (place >= ends - group_sizes) & (place < ends)  # [R, e]

        def product(x: Array, letter: str, share: Array | float = 1.0) -> Array:
            out = self._scaled(x, f"experts_w_{letter}", group_sizes, is_of_expert)
            if f"experts_b_{letter}" not in self.weights:
                return out
            bias = self.weights(f"experts_b_{letter}") * share
            return out + is_of_expert.astype(bias.dtype) @ bias

        gate = product(rows, "gate") if self.moe.activation.is_gated else rows
        inner = self.gated(gate, product(rows, "up"), self.limits[0])
        return product(inner, "down", self.bias_share)[:n_rows]

    def gated(self, gate: Array, up: Array, most: float | None = None) -> Array:
        """The expert's activation function of its gate, if it has one, and up projections, each limited to `most`."""
        moe, limit = self.moe, self.moe.activation_limit
        match moe.activation:
            case Activation.SWIGLU:
                return limited_swiglu(gate, up, most)
            case Activation.RELU2:
                return jnp.square(jax.nn.relu(up))
            case Activation.GEGLU:
                return jax.nn.gelu(gate, approximate=True) * up
            case Activation.LIMITED_SWIGLU | Activation.CLAMPED_SWIGLU:
                assert limit is not None
                gate = jnp.minimum(gate, limit)
                if moe.activation is Activation.LIMITED_SWIGLU:
                    return jax.nn.silu(gate) * jnp.clip(up, -limit, limit)
                up = jnp.clip(up, -limit, limit) + 1
                return up * gate * jax.nn.sigmoid(gate * CLAMPED_SWIGLU_ALPHA)
            case Activation.XIELU:
                raise AssertionError("no mixture has this activation")
            case _:
                assert_never(moe.activation)

    def _scaled(self, x: Array, name: str, group_sizes: Array, is_of_expert: Array) -> Array:
        """Each row times the matrix of its expert and its scales, [R, Y]; 8-bit rows have their own scales."""
        narrow, rows, of_rows = self.weights.narrow_dtype, x, None
        if narrow is not None:
            rows, of_rows = narrowed(x, (1,), narrow)
        out = self._grouped(rows, name, group_sizes)
        scale, factors = self.weights.scale(name), None
        if scale is not None and self.grouped_kernel is None and scale.ndim == 2:
            of_channels, is_of = scale.astype(jnp.float32), is_of_expert.astype(jnp.float32)
            factors = jnp.matmul(is_of, of_channels, precision=lax.Precision.HIGHEST)
        if of_rows is not None:
            factors = of_rows[:, None] if factors is None else factors * of_rows[:, None]
        return out if factors is None else (out.astype(jnp.float32) * factors).astype(x.dtype)

    def _grouped(self, x: Array, name: str, group_sizes: Array) -> Array:
        """Each row times the stored matrix of its expert, [R, Y].

        Kernels skip experts without rows; without one, XLA multiplies all rows by every expert. XLA's kernel multiplies 8-bit
        rows by stored weights of their dtype; otherwise, both are converted.
        """
        w, kernel = self.weights, self.grouped_kernel
        if kernel is not None:
            matrices, first = w.kernel_operand(name)
            scale = w.scale(name, of_stack=first is not None)
            first = 0 if first is None else first
            return kernel(x.astype(w.dtype), matrices, group_sizes, scale=scale, first=first)
        matrices, first = w.kernel_operand(name, MAX_STACKED_EXPERTS if self.has_kernel else 0)
        if first is not None:
            of_stack = jnp.zeros(matrices.shape[0], group_sizes.dtype)
            group_sizes = lax.dynamic_update_slice(of_stack, group_sizes, (first,))
        is_narrow = x.dtype == w.narrow_dtype == matrices.dtype
        rows = x if is_narrow else x.astype(w.dtype)
        total = total_dtype(rows.dtype) if is_narrow else rows.dtype
        return lax.ragged_dot(rows, matrices, group_sizes, preferred_element_type=total)


def limited_swiglu(gate: Array, up: Array, most: float | None) -> Array:
    """SwiGLU whose activated gate is at most `most`, and whose up projection is at most that large."""
    gate = jax.nn.silu(gate)
    return gate * up if most is None else jnp.minimum(gate, most) * jnp.clip(up, -most, most)


def local_mixture(  # noqa: PLR0913  tokens, their routing, and the experts
    x: Array,
    expert_ids: Array,
    shares: Array,
    experts: Experts,
    *,
    first: Array | int,
    n_local: int,
) -> Array:
    """The weighted sum [T, D] over experts `first` to `first + n_local` for each token.

    No token is sent: the caller reduces over devices with other experts, or other parts of them.
    """
    n_tokens, n_active = expert_ids.shape
    n_rows = n_tokens * min(n_active, n_local)  # the maximum for these experts
    local = expert_ids.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < n_local), local, n_local)
    order = jnp.argsort(local, stable=True)
    rows = x[order[:n_rows] // n_active]
    counts = count_values(local, n_local)
    return combine_rows(experts(rows, counts), order, shares, n_used=counts.sum())


def count_values(values: Array, n_values: int) -> Array:
    """The number of occurrences of each of 0..n_values-1, as int32; ignores larger values."""
    return jnp.zeros(n_values + 1, jnp.int32).at[values].add(1)[:n_values]


def combine_rows(rows: Array, order: Array, shares: Array, *, n_used: Array | None = None) -> Array:
    """The sum [T, ...] of each token's rows, weighted by its shares [T, K].

    `rows` [R, ...] are in the order of the permutation `order` [T*K], in which those from `n_used` on
    count as zeros. Each of the K rows of a token is gathered on its own: an array [T, K, D] with few K is mostly padding.
    For few tokens, a mask of all rows makes XLA sum in a fusion: it may gather a plain dot's result as [T, 1, D].
    """
    places = jnp.argsort(order)
    is_short = shares.shape[0] < ROWS_OF_TILE
    limit = rows.shape[0] if n_used is None and is_short else n_used

    def taken(place: Array) -> Array:
        chosen = rows[jnp.minimum(place, rows.shape[0] - 1)]
        if limit is None:
            return chosen
        is_used = (place < limit).reshape(-1, *(1,) * (rows.ndim - 1))
        return jnp.where(is_used, chosen, jnp.zeros((), rows.dtype))

    if is_short:
        of_tokens = taken(places).reshape(*shares.shape, *rows.shape[1:])
        return jnp.einsum("tk...,tk->t...", of_tokens, shares.astype(rows.dtype))
    out = jnp.zeros((shares.shape[0], *rows.shape[1:]), jnp.float32)
    for place, share in zip(places.reshape(shares.shape).T, shares.T, strict=True):
        out += taken(place).astype(jnp.float32) * share.reshape(-1, *(1,) * (rows.ndim - 1))
    return out.astype(rows.dtype)
