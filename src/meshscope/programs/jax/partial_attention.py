"""Attention to a part of the positions, and the merge of parts by their sums.

Shapes: B batch, S query positions, T key positions, N query heads, K key and value heads, H width of
a value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from meshscope.programs.jax.kernels import PrefillKernel
from meshscope.programs.jax.numerics import MASKED, Array, soft_capped


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialAttention:
    """Unnormalized attention to a subset of the positions, in float32.

    `numerator` [B, S, N, H] and `total` [B, S, N] are sums of exp(score - largest), with `largest`
    [B, S, N] the maximum score. If all positions are masked, `largest` is MASKED and a merge drops
    the sums.
    """

    numerator: Array
    total: Array
    largest: Array

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """Numerator, total and largest."""
        return self.numerator, self.total, self.largest

    @classmethod
    def of_normalized(cls, out: Array, logarithms: Array) -> "PartialAttention":
        """From an output [B, S, N, H] and the logarithms [B, S, N] of the sums of exp(score).

        Kernels leave the output undefined where a query attends to no position.
        """
        has_any = logarithms > MASKED
        return cls(
            numerator=jnp.where(has_any[..., None], out.astype(jnp.float32), 0),
            total=jnp.ones_like(logarithms),
            largest=jnp.where(has_any, logarithms, MASKED),
        )

    def rescaled(self, largest: Array) -> "PartialAttention":
        """Rescales the sums to a larger maximum."""
        factor = jnp.exp(self.largest - largest)
        return PartialAttention(
            numerator=self.numerator * factor[..., None],
            total=self.total * factor,
            largest=largest,
        )

    def merged(self, other: "PartialAttention") -> "PartialAttention":
        """Merges attention to disjoint positions."""
        largest = jnp.maximum(self.largest, other.largest)
        one, two = self.rescaled(largest), other.rescaled(largest)
        return PartialAttention(
            numerator=one.numerator + two.numerator, total=one.total + two.total, largest=largest
        )

    def with_sinks(self, sinks: Array | None) -> "PartialAttention":
        """Adds a position with logits [N] and no value."""
        if sinks is None:
            return self
        logits = jnp.broadcast_to(sinks.astype(jnp.float32), self.largest.shape)
        sink = PartialAttention(
            numerator=jnp.zeros_like(self.numerator),
            total=jnp.ones_like(self.total),
            largest=logits,
        )
        return self.merged(sink)

    def normalized(self, dtype: Any) -> Array:
        """The normalized attention output [B, S, N, H]."""
        return (self.numerator / self.total[..., None]).astype(dtype)


def partial_attention(  # noqa: PLR0913  the inputs of attention
    q: Array, k: Array, v: Array, mask: Array, *, scale: float, softcap: float | None = None
) -> PartialAttention:
    """Unnormalized attention of q [B, S, N, Hk] to k [B, T, K, Hk] and v [B, T, K, H].

    `mask` is [S, T] or [B, S, T].
    """
    batch, n_queries, n_heads = q.shape[:3]
    q = q.reshape(batch, n_queries, k.shape[2], n_heads // k.shape[2], q.shape[3])
    scores = jnp.einsum("bskgh,btkh->bskgt", q, k, preferred_element_type=jnp.float32) * scale
    scores = soft_capped(scores, softcap)
    mask = jnp.broadcast_to(mask, (batch, *mask.shape[-2:]))
    scores = jnp.where(mask[:, :, None, None, :], scores, MASKED)
    largest = scores.max(axis=-1)
    shares = jnp.exp(scores - largest[..., None])
    numerator = jnp.einsum(
        "bskgt,btkh->bskgh", shares.astype(q.dtype), v, preferred_element_type=jnp.float32
    )
    return PartialAttention(
        numerator=numerator.reshape(batch, n_queries, n_heads, -1),
        total=shares.sum(axis=-1).reshape(batch, n_queries, n_heads),
        largest=largest.reshape(batch, n_queries, n_heads),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """The attention of one layer, independent of which device has the keys.

    `keys` maps cached or received arrays [B, T, ...] to k [B, T, K, Hk] and v [B, T, K, Hv];
    `mask_of` maps their positions [T] to the mask [S, T] or [B, S, T]; `project` is linear and maps
    [B, S, N, Hv] to [B, S, N, H], which may be narrower. The `kernel` of prefill needs no mask but the
    number of positions that a query attends to, `window`.
    """

    q: Array
    keys: Callable[..., tuple[Array, Array]]
    mask_of: Callable[[Array], Array]
    scale: float
    softcap: float | None = None
    sinks: Array | None = None
    project: Callable[[Array], Array] = lambda x: x
    kernel: PrefillKernel | None = None
    window: int | None = None

    def block(self, local: Sequence[Array], offset: int) -> PartialAttention:
        """By the kernel: attention to the arrays of a device `offset` positions before this one."""
        assert self.kernel is not None
        k, v = self.keys(*local)
        out, sums = self.kernel.part(
            self.q,
            k,
            v,
            offset=offset,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )
        return PartialAttention.of_normalized(out, sums)

    def part(self, local: Sequence[Array], positions: Array) -> PartialAttention:
        """Unnormalized attention to arrays at these positions."""
        k, v = self.keys(*local)
        mask = self.mask_of(positions)
        return partial_attention(self.q, k, v, mask, scale=self.scale, softcap=self.softcap)
