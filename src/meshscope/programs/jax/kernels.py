"""Prefill attention kernels: splash attention on TPUs, cuDNN's flash attention on GPUs.

Source of splash attention: jax.experimental.pallas.ops.tpu.splash_attention,
`make_splash_mha_single_device`. It supports grouped heads without repeating them, values narrower
than keys, and the sinks of gpt-oss.

Shapes: B batch, S positions of the prompt, N query heads, K key and value heads, H head width,
V width of a value.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from meshscope.plans.kernel_choice import WHOLE_BLOCK_SCOPE, Kernel, splash_block
from meshscope.programs.jax.layout import ShardLayout
from meshscope.programs.jax.numerics import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillKernel:
    """Blockwise causal attention over a whole prompt, without scores in memory.

    For global arrays, `mesh` is required: the compiler cannot partition a kernel, which therefore
    runs under `shard_map` over the batch and the heads. `is_interpreted` runs the kernel on a CPU.
    """

    layout: ShardLayout
    kernel: Kernel = Kernel.SPLASH
    mesh: Mesh | None = None
    is_interpreted: bool = False

    def __call__(  # noqa: PLR0913  the inputs of attention
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        """Attention [B, S, N, V] of q [B, S, N, H] to k [B, S, K, H] and v [B, S, K, V].

        A query attends to `window` positions including its own; `sinks` [N] are logits of a position
        without a value.
        """

        def local(q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
            if self.kernel is Kernel.CUDNN:
                assert sinks is None
                assert softcap is None
                return cudnn_attention(q, k, v, scale=scale, window=window)
            return splash_attention(
                q,
                k,
                v,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                is_interpreted=self.is_interpreted,
            )

        if self.mesh is None:
            return local(q, k, v, sinks)
        tp = self.layout.axis("tp")
        heads = P(self.layout.data, None, tp, None)
        in_specs = (heads, heads, heads, None if sinks is None else P(tp))
        mapped = jax.shard_map(
            local, mesh=self.mesh, in_specs=in_specs, out_specs=heads, check_vma=False
        )
        return mapped(q, k, v, sinks)

    def part(  # noqa: PLR0913  the inputs of attention
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        offset: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> tuple[Array, Array]:
        """As `partial_splash_attention`, on one device."""
        assert self.kernel is Kernel.SPLASH
        return partial_splash_attention(
            q,
            k,
            v,
            offset=offset,
            scale=scale,
            window=window,
            softcap=softcap,
            is_interpreted=self.is_interpreted,
        )


class Band(masks.LocalMask):
    """A causal or windowed mask that returns uniform blocks as one broadcastable element.

    Splash attention classifies every block on the host: 65,536 blocks for 131,072 positions, of which
    only 256 are on the diagonal. Keys from `n_keys` on are padding, which no query attends to.
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


def cudnn_attention(q: Array, k: Array, v: Array, *, scale: float, window: int | None) -> Array:
    """Flash attention [B, S, N, V] by cuDNN on one device; JAX lowers it only for CUDA devices."""
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


def splash_attention(  # noqa: PLR0913  the inputs of attention
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Array | None,
    is_interpreted: bool,
) -> Array:
    """Splash attention [B, S, N, V] on one device to T positions, of which the last S are the queries'.

    S and T are padded to multiples of the block size.
    """
    n_positions, n_keys = q.shape[1], k.shape[1]
    q, k, v = _in_blocks(q, k, v)
    seen = Band((q.shape[1], k.shape[1]), window=window, offset=n_keys - n_positions, n_keys=n_keys)
    kernel = _splash_kernel(
        seen, q, n_positions=n_positions, softcap=softcap, is_interpreted=is_interpreted
    )
    attend: Callable[..., Array] = jax.vmap(lambda q, k, v: kernel(q, k, v, sinks=sinks))
    return attend(*_by_head(q, k, v, scale)).swapaxes(1, 2)[:, :n_positions]


def partial_splash_attention(  # noqa: PLR0913  the inputs of attention
    q: Array,
    k: Array,
    v: Array,
    *,
    offset: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    is_interpreted: bool,
) -> tuple[Array, Array]:
    """Attention [B, S, N, V] to a block of T keys that starts `offset` positions before the queries.

    Also returns the logarithms [B, S, N] of the sums of exp(score), with which parts can be merged.
    """
    n_positions, n_keys = q.shape[1], k.shape[1]
    q, k, v = _in_blocks(q, k, v)
    shape = (q.shape[1], k.shape[1])
    is_whole = offset >= n_keys and (window is None or offset + n_positions < window)
    seen = (
        masks.FullMask(shape)
        if is_whole and shape == (n_positions, n_keys)
        else Band(shape, window=window, offset=offset, n_keys=n_keys)
    )
    kernel = _splash_kernel(
        seen,
        q,
        n_positions=n_positions,
        softcap=softcap,
        is_interpreted=is_interpreted,
        save_residuals=True,
    )
    with jax.named_scope(WHOLE_BLOCK_SCOPE) if is_whole else nullcontext():
        out, (sums,) = jax.vmap(kernel)(*_by_head(q, k, v, scale))
    return out.swapaxes(1, 2)[:, :n_positions], sums.swapaxes(1, 2)[:, :n_positions]


def _in_blocks(q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    """Pads queries, keys and values [B, positions, heads, width] to whole blocks for the queries' length."""
    block = splash_block(q.shape[1])
    assert block is not None
    return tuple(jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0))) for x in (q, k, v))


def _splash_kernel(
    seen: masks.Mask,
    q: Array,
    *,
    n_positions: int,
    softcap: float | None,
    is_interpreted: bool,
    **options: Any,
) -> Callable[..., Any]:
    """The kernel for queries [B, S, N, H], padded from `n_positions`, under a mask that all heads share."""
    n_heads = q.shape[2]
    block = splash_block(n_positions)
    assert block is not None
    return splash.make_splash_mha_single_device(
        masks.MultiHeadMask([seen] * n_heads),
        block_sizes=splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block),
        attn_logits_soft_cap=softcap,
        interpret=is_interpreted,
        **options,
    )


def _by_head(q: Array, k: Array, v: Array, scale: float) -> tuple[Array, ...]:
    """[B, heads, positions, width] of scaled queries, keys and values.

    The kernel has no scale argument, so queries are scaled and rounded to their dtype again.
    """
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    return tuple(x.swapaxes(1, 2) for x in (scaled, k, v))
