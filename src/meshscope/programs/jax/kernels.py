"""Attention of a prompt by a kernel: splash attention on TPUs, cuDNN's flash attention on GPUs.

Source of splash attention: jax.experimental.pallas.ops.tpu.splash_attention, `make_splash_mha_single_device`; it takes
fewer key and value heads than query heads (none is repeated), values narrower than keys, and the
sinks of gpt-oss.

Shapes: B batch, S positions of the prompt, N query heads, K key and value heads, H head width,
V width of a value.
"""

from collections.abc import Callable
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

from meshscope.programs.jax.layout import ShardLayout
from meshscope.programs.jax.numerics import Array
from meshscope.spec.plan.kernel_choice import Kernel, splash_block


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillKernel:
    """Causal attention of a whole prompt to itself, by blocks; scores never reach memory.

    `mesh` is given where arrays are global: the compiler cannot partition a kernel, so that it
    runs under a `shard_map` of its own, over the batch and the heads. `is_interpreted` runs the
    kernel's text on a CPU.
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
        sinks: Array | None = None,
    ) -> Array:
        """[B, S, N, V] of q [B, S, N, H] over k [B, S, K, H] and v [B, S, K, V].

        `window` is how many positions a query sees, its own included; `sinks` [N] are logits of a
        position without a value.
        """

        def local(q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
            if self.kernel is Kernel.CUDNN:
                assert sinks is None
                return cudnn_attended(q, k, v, scale=scale, window=window)
            return splash_attended(
                q,
                k,
                v,
                scale=scale,
                window=window,
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


class Band(masks.LocalMask):
    """A mask of JAX's whose blocks that are all alike are one element, which broadcasts.

    The kernel's preparation asks of every block whether it has a position to see and one to hide:
    65,536 blocks of 131,072 positions, of which only 256 lie on the diagonal.
    """

    def __getitem__(self, idx: Any) -> np.ndarray:
        """The mask of a block of queries and keys."""
        queries, keys = idx
        left, _ = self.window_size
        is_hidden = keys.start > queries.stop - 1
        is_seen = keys.stop - 1 <= queries.start
        if left is not None:
            is_hidden |= keys.stop - 1 < queries.start - left
            is_seen &= keys.start >= queries.stop - 1 - left
        if is_seen or is_hidden:
            return np.full((1, 1), is_seen)
        return super().__getitem__(idx)


def cudnn_attended(q: Array, k: Array, v: Array, *, scale: float, window: int | None) -> Array:
    """[B, S, N, V] on one device, by cuDNN's flash attention; JAX lowers it for CUDA devices only."""
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


def splash_attended(  # noqa: PLR0913  the inputs of attention
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    window: int | None,
    sinks: Array | None,
    is_interpreted: bool,
) -> Array:
    """[B, S, N, V] on one device; S is a multiple of a block."""
    n_positions, n_heads = q.shape[1:3]
    block = splash_block(n_positions)
    assert block is not None
    seen = Band((n_positions, n_positions), (None if window is None else window - 1, 0), offset=0)
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([seen] * n_heads),
        block_sizes=splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block),
        interpret=is_interpreted,
    )
    # The kernel has no scale of its own: queries carry it, rounded to their dtype once more.
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    by_head = (x.swapaxes(1, 2) for x in (scaled, k, v))
    attend: Callable[..., Array] = jax.vmap(lambda q, k, v: kernel(q, k, v, sinks=sinks))
    return attend(*by_head).swapaxes(1, 2)
