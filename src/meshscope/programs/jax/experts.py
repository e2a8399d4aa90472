"""A mixture of experts on one device: which experts a token goes to, and what they compute.

Shapes: T tokens, D residual width, E experts of the model, e experts of this device, K experts a
token, F width of an expert, R rows (a row is a token on its way to one expert).
"""

from dataclasses import dataclass
from typing import assert_never

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.programs.jax.numerics import Array
from meshscope.programs.jax.state import LayerWeights
from meshscope.spec.model.model import Activation, GroupScore, MixtureOfExperts, Scoring
from meshscope.spec.plan.kernel_choice import MAX_STACKED_EXPERTS, RAGGED_DOT_ROWS

CLAMPED_SWIGLU_ALPHA = 1.702  # transformers GptOssConfig.swiglu_alpha


def routing(x: Array, w: LayerWeights, moe: MixtureOfExperts, ids: Array) -> tuple[Array, Array]:
    """Experts [T, K] and their shares [T, K] float32 of tokens [T, D] with these ids [T].

    Source: the routers of transformers' Mixtral, Qwen3-MoE, gpt-oss, DeepSeek-V2, -V3 and -V4.
    """
    logits = x.astype(jnp.float32) @ w("router").astype(jnp.float32)
    scores = _scores(w.biased(logits, "router_bias"), moe)
    experts = w("router_table")[ids] if "router_table" in w else _chosen(scores, w, moe)
    shares = jnp.take_along_axis(scores, experts, axis=-1)
    if moe.is_normalized:
        shares = shares / (shares.sum(axis=-1, keepdims=True) + 1e-20)
    return experts.astype(jnp.int32), shares * moe.scale


def _chosen(scores: Array, w: LayerWeights, moe: MixtureOfExperts) -> Array:
    """[T, K]: the experts with the highest scores [T, E]."""
    for_choice = w.biased(scores, "router_correction")
    if moe.n_active_groups < moe.n_groups:
        for_choice = _limited(for_choice, moe)
    return lax.top_k(for_choice, moe.n_active)[1]


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


def _limited(scores: Array, moe: MixtureOfExperts) -> Array:
    """Scores with all but the best groups of experts out of the choice."""
    grouped = scores.reshape(scores.shape[0], moe.n_groups, -1)
    match moe.group_score:
        case GroupScore.MAX:
            of_group = grouped.max(axis=-1)
        case GroupScore.TOP2_SUM:
            of_group = lax.top_k(grouped, 2)[0].sum(axis=-1)
        case _:
            assert_never(moe.group_score)
    best = lax.top_k(of_group, moe.n_active_groups)[1]
    is_best = jax.nn.one_hot(best, moe.n_groups, dtype=bool).any(axis=1)
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(scores.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of this device; `bias_share` of the last bias is added here.

    Where tp splits the width of an expert, one device adds the bias and the others do not.
    The kernel of a ragged dot wants its rows filled up, and reads experts where they lie.
    """

    moe: MixtureOfExperts
    weights: LayerWeights
    bias_share: Array | float = 1.0
    has_kernel: bool = False

    def __call__(self, rows: Array, n_rows_of: Array) -> Array:
        """[R, D]: the outputs for rows sorted by expert, the first `n_rows_of[0]` for the first.

        Rows beyond the sum of `n_rows_of` [e] come out as zeros.
        """
        n_rows = rows.shape[0]
        if self.has_kernel:
            rows = jnp.pad(rows, ((0, -n_rows % RAGGED_DOT_ROWS), (0, 0)))
        ends = jnp.cumsum(n_rows_of)
        place = jnp.arange(rows.shape[0])
        expert = jnp.searchsorted(ends, place, side="right")  # e for rows beyond the last

        def product(x: Array, letter: str, share: Array | float = 1.0) -> Array:
            out = self._grouped(x, f"experts_w_{letter}", n_rows_of)
            if f"experts_b_{letter}" not in self.weights:
                return out
            bias = self.weights(f"experts_b_{letter}") * share
            return out + bias[jnp.minimum(expert, bias.shape[0] - 1)]

        inner = gated(product(rows, "gate"), product(rows, "up"), self.moe)
        out = product(inner, "down", self.bias_share)
        return jnp.where((place < ends[-1])[:, None], out, jnp.zeros((), out.dtype))[:n_rows]

    def _grouped(self, x: Array, name: str, n_rows_of: Array) -> Array:
        """[R, Y]: each row times the matrix of its expert.

        The kernel passes over experts without rows, those of other layers in a stack among them. As a
        plain product, every expert would take all rows.
        """
        stacked = self.weights.stacked(name) if self.has_kernel else None
        if stacked is None or stacked[0].shape[0] > MAX_STACKED_EXPERTS:
            return lax.ragged_dot(x, self.weights(name), n_rows_of)
        weights, first = stacked
        n_rows_of_all = jnp.zeros(weights.shape[0], n_rows_of.dtype)
        return lax.ragged_dot(
            x, weights, lax.dynamic_update_slice(n_rows_of_all, n_rows_of, (first,))
        )


def gated(gate: Array, up: Array, moe: MixtureOfExperts) -> Array:
    """The expert's activation of its two projections."""
    match moe.activation:
        case Activation.SWIGLU:
            return jax.nn.silu(gate) * up
        case Activation.LIMITED_SWIGLU:
            limit = moe.activation_limit
            assert limit is not None
            return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
        case Activation.CLAMPED_SWIGLU:
            limit = moe.activation_limit
            assert limit is not None
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
            return (up + 1) * gate * jax.nn.sigmoid(gate * CLAMPED_SWIGLU_ALPHA)
        case _:
            assert_never(moe.activation)


def local_mixture(  # noqa: PLR0913  tokens, their routing, and the experts
    x: Array,
    chosen: Array,
    shares: Array,
    experts: Experts,
    *,
    first: Array | int,
    n_local: int,
) -> Array:
    """[T, D]: the shares of experts `first` to `first + n_local`, summed for each token.

    No token moves: where other devices hold other experts, or other parts of the same, the outputs
    of all are to be added up.
    """
    n_tokens, n_active = chosen.shape
    n_rows = n_tokens * min(n_active, n_local)  # no more rows can be meant for these experts
    local = chosen.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < n_local), local, n_local)
    order = jnp.argsort(local, stable=True)
    rows = x[order[:n_rows] // n_active]
    out = experts(rows, counted(local, n_local))
    return summed_rows(unsorted(out, order), shares)


def counted(values: Array, n_values: int) -> Array:
    """[n_values] int32: how often each of 0..n_values-1 occurs; larger values are not counted."""
    return jnp.zeros(n_values + 1, jnp.int32).at[values].add(1)[:n_values]


def unsorted(rows: Array, order: Array) -> Array:
    """Rows back where `order` took them from; zeros where it names more than there are."""
    inverse = jnp.argsort(order)
    found = rows[jnp.minimum(inverse, rows.shape[0] - 1)]
    return jnp.where((inverse < rows.shape[0])[:, None], found, jnp.zeros((), rows.dtype))


def summed_rows(rows: Array, shares: Array) -> Array:
    """[T, D]: the rows [T*K, D] of each token times its shares [T, K], added up."""
    rows = rows.reshape(*shares.shape, -1)
    return jnp.einsum("tkd,tk->td", rows, shares.astype(rows.dtype))
