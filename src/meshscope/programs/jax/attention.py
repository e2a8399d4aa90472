"""Attention to keys and values: by plain operations, by a kernel in prefill, whole or in parts.

Source of splash attention: jax.experimental.pallas.ops.tpu.splash_attention,
`make_splash_mha_single_device`. It supports grouped heads without repeating them, values narrower
than keys, and the sinks of gpt-oss.

Shapes: B batch, S query positions, T key positions, N query heads, K key and value heads, H head width,
V width of a value.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from meshscope.plans.kernel_choice import WHOLE_BLOCK_SCOPE, Kernel, splash_block
from meshscope.programs.jax.collectives import ShardLayout
from meshscope.programs.jax.numerics import MASKED, Array, Arrays, soft_capped


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionScores:
    """How products of queries and keys become weights of values."""

    scale: float
    softcap: float | None = None  # limits scores
    sinks: Array | None = None  # [N] logits of a position without a value
    window: int | None = None  # positions that a query attends to, for kernels; others have masks


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillKernel:
    """Blockwise causal attention over a whole prompt, without scores in memory.

    For global arrays, `mesh` is required: the compiler cannot partition a kernel, which therefore
    runs under `shard_map` over the batch and the heads. `is_interpreted` runs it on a CPU.
    """

    layout: ShardLayout
    kernel: Kernel = Kernel.SPLASH
    mesh: Mesh | None = None
    is_interpreted: bool = False

    def __call__(self, q: Array, k: Array, v: Array, scores: AttentionScores) -> Array:
        """Attention [B, S, N, V] of q [B, S, N, H], the last S of T positions, to k [B, T, K, H] and v [B, T, K, V]."""

        def local(q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
            if self.kernel is Kernel.CUDNN:
                assert sinks is scores.softcap is None
                window = None if scores.window is None else (scores.window - 1, 0)
                options: Any = {"is_causal": True, "local_window_size": window}
                options |= {"scale": scores.scale, "implementation": "cudnn"}
                return jax.nn.dot_product_attention(q, k, v, **options)
            offset = k.shape[1] - q.shape[1]
            of_heads, shape = _in_blocks(q, k, v, scores.scale)
            seen = Band(shape, window=scores.window, offset=offset, n_keys=k.shape[1])
            kernel = self._splash(seen, q, scores)
            attend: Any = jax.vmap(lambda q, k, v: kernel(q, k, v, sinks=sinks))
            return attend(*of_heads).swapaxes(1, 2)[:, : q.shape[1]]

        if self.mesh is None:
            return local(q, k, v, scores.sinks)
        tp = self.layout.axis("tp")
        heads = P(self.layout.data, None, tp, None)
        in_specs = (heads, heads, heads, None if scores.sinks is None else P(tp))
        mapped = jax.shard_map(
            local, mesh=self.mesh, in_specs=in_specs, out_specs=heads, check_vma=False
        )
        return mapped(q, k, v, scores.sinks)

    def part(
        self, q: Array, k: Array, v: Array, scores: AttentionScores, *, offset: int
    ) -> "PartialAttention":
        """On one device: attention to a block of T keys that starts `offset` positions before the queries."""
        assert self.kernel is Kernel.SPLASH
        n_positions, n_keys, window = q.shape[1], k.shape[1], scores.window
        of_heads, shape = _in_blocks(q, k, v, scores.scale)
        is_whole = offset >= n_keys and (window is None or offset + n_positions < window)
        seen = (
            masks.FullMask(shape)
            if is_whole and shape == (n_positions, n_keys)
            else Band(shape, window=window, offset=offset, n_keys=n_keys)
        )
        kernel = self._splash(seen, q, scores, save_residuals=True)
        with jax.named_scope(WHOLE_BLOCK_SCOPE) if is_whole else nullcontext():
            out, (sums,) = jax.vmap(kernel)(*of_heads)
        parts = (x.swapaxes(1, 2)[:, :n_positions] for x in (out, sums))
        return PartialAttention.of_normalized(*parts)

    def _splash(self, seen: masks.Mask, q: Array, scores: AttentionScores, **options: Any) -> Any:
        block = splash_block(q.shape[1])
        assert block is not None
        return splash.make_splash_mha_single_device(
            masks.MultiHeadMask([seen] * q.shape[2]),
            block_sizes=splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block),
            attn_logits_soft_cap=scores.softcap,
            interpret=self.is_interpreted,
            **options,
        )


class Band(masks.LocalMask):
    """A causal or windowed mask that returns uniform blocks as one broadcastable element.

    Splash attention classifies every block on the host: 65,536 blocks for 131,072 positions, only 256
    of them on the diagonal. Keys from `n_keys` on are padding, which no query attends to.
    """

    def __init__(
        self, shape: tuple[int, int], *, window: int | None, offset: int, n_keys: int
    ) -> None:
        super().__init__(shape, (None if window is None else window - 1, 0), offset=offset)
        self.n_keys = n_keys
        within_band = self.mask_function
        if n_keys < shape[1]:
            self.mask_function = lambda queries, keys: within_band(queries, keys) & (keys < n_keys)

    def __eq__(self, other: object) -> bool:
        """Whether the masks are equal; splash attention keeps what it made of a mask."""
        return isinstance(other, Band) and super().__eq__(other) and self.n_keys == other.n_keys

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.n_keys))

    def __getitem__(self, idx: Any) -> np.ndarray:
        """The mask of a block of queries and keys."""
        queries, keys = idx
        left, _ = self.window_size
        first, last = queries.start + self.offset, queries.stop - 1 + self.offset
        is_hidden = keys.start > last or keys.start >= self.n_keys
        mask = keys.stop - 1 <= first and keys.stop <= self.n_keys
        if left is not None:
            is_hidden |= keys.stop - 1 < first - left
            mask &= keys.start >= last - left
        if mask or is_hidden:
            return np.full((1, 1), mask)
        return super().__getitem__(idx)


def _in_blocks(
    q: Array, k: Array, v: Array, scale: float
) -> tuple[tuple[Array, ...], tuple[int, int]]:
    block = splash_block(q.shape[1])
    assert block is not None
    # The kernel has no scale argument, so queries are scaled and rounded to their dtype again.
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    padded = [
        jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0))) for x in (scaled, k, v)
    ]
    return tuple(x.swapaxes(1, 2) for x in padded), (padded[0].shape[1], padded[1].shape[1])


def dot_product_attention(q: Array, k: Array, v: Array, mask: Array, of: AttentionScores) -> Array:
    """[B, S, N, Hv]: attention of q [B, S, N, H] over k [B, T, K, H] and v [B, T, K, Hv], with a mask [S, T], [B, S, T] or [B, K, S, T]."""
    n_groups = q.shape[2] // k.shape[2]
    q = q.reshape(*q.shape[:2], k.shape[2], n_groups, q.shape[3])
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k, preferred_element_type=jnp.float32) * of.scale
    scores = soft_capped(scores, of.softcap)
    if mask.ndim > 2:
        mask = mask[:, :, None] if mask.ndim > 3 else mask[:, None, None]
    scores = jnp.where(mask, scores, MASKED)
    if of.sinks is None:
        shares = jax.nn.softmax(scores, axis=-1)
    else:
        sink = of.sinks.astype(jnp.float32).reshape(1, k.shape[2], n_groups, 1, 1)
        highest = jnp.maximum(scores.max(axis=-1, keepdims=True), sink)
        # A softmax of the scores with another column would make a second array of their size.
        weights = jnp.exp(scores - highest)
        shares = weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - highest))
    out = jnp.einsum("bkgst,btkh->bskgh", shares.astype(q.dtype), v)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PartialAttention:
    """Unnormalized attention to a subset of the positions, in float32; if all are masked, a merge drops the sums."""

    numerator: Array  # [B, S, N, H] and
    total: Array  # [B, S, N], sums of exp(score - largest)
    largest: Array  # [B, S, N], the maximum score
    xp: ClassVar[Any] = jnp  # the library of the arrays

    @classmethod
    def of_normalized(cls, out: Array, logarithms: Array) -> "PartialAttention":
        """From an output [B, S, N, H] and the logarithms [B, S, N] of the sums of exp(score)."""
        has_any = logarithms > MASKED  # kernels leave the others undefined
        return cls(
            numerator=jnp.where(has_any[..., None], out.astype(jnp.float32), 0),
            total=jnp.ones_like(logarithms),
            largest=jnp.where(has_any, logarithms, MASKED),
        )

    def rescaled(self, largest: Array) -> Self:
        """Rescales the sums to a larger maximum."""
        factor = self.xp.exp(self.largest - largest)
        numerator = self.numerator * factor[..., None]
        return replace(self, numerator=numerator, total=self.total * factor, largest=largest)

    def merged(self, other: Self) -> Self:
        """Merges attention to disjoint positions."""
        largest = self.xp.maximum(self.largest, other.largest)
        one, two = self.rescaled(largest), other.rescaled(largest)
        numerator = one.numerator + two.numerator
        return replace(one, numerator=numerator, total=one.total + two.total)

    def with_sinks(self, sinks: Array | None) -> Self:
        """Adds a position with float32 logits [N] and no value."""
        if sinks is None:
            return self
        part = self.rescaled(self.xp.maximum(self.largest, sinks))
        return replace(part, total=part.total + self.xp.exp(sinks - part.largest))

    @property
    def mean(self) -> Array:
        """The normalized output [B, S, N, H] in float32."""
        return self.numerator / self.total[..., None]

    def normalized(self, dtype: Any) -> Array:
        """The normalized output [B, S, N, H]."""
        return self.mean.astype(dtype)


def partial_attention(
    q: Array, k: Array, v: Array, mask: Array, of: AttentionScores
) -> PartialAttention:
    """Unnormalized attention of q [B, S, N, Hk] to k [B, T, K, Hk] and v [B, T, K, H], with a mask as above, without sinks."""
    batch, n_queries, n_heads = q.shape[:3]
    q = q.reshape(batch, n_queries, k.shape[2], n_heads // k.shape[2], q.shape[3])
    scores = jnp.einsum("bskgh,btkh->bskgt", q, k, preferred_element_type=jnp.float32) * of.scale
    scores = soft_capped(scores, of.softcap)
    if mask.ndim > 3:
        mask = mask.swapaxes(1, 2)[:, :, :, None]
    else:
        mask = jnp.broadcast_to(mask, (batch, *mask.shape[-2:]))[:, :, None, None, :]
    scores = jnp.where(mask, scores, MASKED)
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
    """The attention of one layer, independent of which device has the keys."""

    q: Array
    keys: Callable[..., tuple[Array, Array]]  # of cached or received arrays [B, T, ...]: k and v
    mask_of: Callable[[Array], Array]  # of their positions [T], as above
    scores: AttentionScores
    project: Callable[[Array], Array] = lambda x: x  # linear, [B, S, N, Hv] to narrower outputs
    kernel: PrefillKernel | None = None  # needs no mask

    def block(self, local: Arrays, offset: int) -> PartialAttention:
        """By the kernel: attention to the arrays of a device `offset` positions before this one."""
        assert self.kernel is not None
        return self.kernel.part(self.q, *self.keys(*local), self.scores, offset=offset)

    def part(self, local: Arrays, positions: Array) -> PartialAttention:
        """Unnormalized attention to arrays at these positions."""
        mask = self.mask_of(positions)
        return partial_attention(self.q, *self.keys(*local), mask, self.scores)
