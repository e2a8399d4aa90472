"""The residual stream: a single one, or several that hyper-connections mix around every block.

Mixing is local to each token with replicated weights, so it needs no collective, and tokens may be
sharded in any way.

Shapes: B batch, S positions of this step, D residual width, N streams, C coefficients of a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshscope.model.mechanisms.streams import StreamGates, Streams
from meshscope.programs.jax.numerics import Array, rms_norm, unscaled_rms_norm
from meshscope.programs.jax.state import LayerWeights

AddOutput = Callable[[Array], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """A stream [B, S, D], or N streams [B, S, N, D] (mHC, arXiv 2512.24880; as in transformers' DeepSeek-V4)."""

    hyper: Streams | None
    norm_eps: float
    norm_offset: float = 0.0
    scale: float = 1.0  # of what a block adds to a single stream

    @property
    def stream_dims(self) -> tuple[int, ...]:
        """The dims between positions and width."""
        return () if self.hyper is None else (self.hyper.n_streams,)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Zeros for tokens [B, S] and width D of `shape`, in the form of `expand`."""
        *tokens, width = shape
        streams = jnp.zeros((*tokens, *self.stream_dims, width), dtype)
        if self.hyper is None or not self.hyper.is_delayed:
            return streams
        return streams, jnp.zeros(streams.shape[:-1], jnp.float32)

    def expand(self, x: Array) -> Array:
        """The embeddings, copied to every stream; delayed ones with the weights of the first input, its first stream."""
        if self.hyper is None:
            return x
        x = _keep_shape(x)
        shape = (*x.shape[:2], *self.stream_dims, x.shape[2])
        streams = jnp.broadcast_to(x[:, :, None, :], shape)
        if not self.hyper.is_delayed:
            return streams
        first = jnp.arange(self.hyper.n_streams) == 0
        return streams, jnp.broadcast_to(first.astype(jnp.float32), shape[:-1])

    def read(self, x: Array, w: LayerWeights, block: str) -> tuple[Array, AddOutput]:
        """The input of a block [B, S, D], and a function that adds its output to the stream or streams.

        The input is a weighted sum of the streams; each new stream mixes all and adds the weighted output. Delayed
        streams come with the weights [B, S, N] of the input, which the block before computed.
        """
        if self.hyper is None:
            scale = self.scale
            return x, lambda out: x + (out if scale == 1.0 else out * scale)
        if isinstance(self.hyper, StreamGates):
            h, normed = self._gated(x, w, block)
            weights = 2 * jax.nn.sigmoid(w.dot(normed, f"{block}_inject") / self.hyper.n_streams)
            return h, lambda out: x + weights[..., None] * _keep_shape(out)[:, :, None]
        before = None
        if self.hyper.is_delayed:
            x, before = x
        n, eps = self.hyper.n_streams, self.hyper.eps
        coefficients = self._projected(x, w(f"{block}_mixing"))  # [B, S, C]
        scale = w(f"{block}_mixing_scale").astype(jnp.float32)
        bias = w(f"{block}_mixing_bias").astype(jnp.float32)
        scale = jnp.repeat(scale, np.array([n, n, n * n]), total_repeat_length=bias.shape[0])
        into, out_of, mixed = jnp.split(coefficients * scale + bias, [n, 2 * n], axis=-1)
        post = 2 * jax.nn.sigmoid(out_of).astype(x.dtype)

        # Matrices [B, S, N, N] with unit row and column sums, by Sinkhorn-Knopp iteration.
        def normalized(matrix: Array, axis: int) -> Array:
            return matrix / (matrix.sum(axis=axis, keepdims=True) + eps)

        mixture = lax.fori_loop(
            0,
            self.hyper.n_iterations - 1,
            lambda _, matrix: normalized(normalized(matrix, -1), -2),
            normalized(
                jax.nn.softmax(mixed.reshape(*mixed.shape[:2], n, n), axis=-1) + self.hyper.eps, -2
            ),
        )
        mixture = mixture.astype(x.dtype)

        into = jax.nn.sigmoid(into) + eps

        def add(out: Array) -> Array:
            mixed_streams = jnp.einsum("bsnm,bsnd->bsmd", mixture, x)
            streams = post[..., None] * _keep_shape(out)[:, :, None, :] + mixed_streams
            return streams if before is None else (streams, into)

        return _weighted_sum(x, into if before is None else before), add

    def collapse(self, x: Array, outer: LayerWeights) -> Array:
        """The input of the output head, of which the last position counts: a weighted sum of the streams [B, 1, D]."""
        if self.hyper is None:
            return x
        if self.hyper.is_delayed:
            streams, weights = jax.tree.map(lambda one: one[:, -1:], x)
            return _keep_shape(_weighted_sum(streams, weights))
        x = x[:, -1:]
        if isinstance(self.hyper, StreamGates):
            return _keep_shape(self._gated(x, outer, "collapse")[0])
        if self.hyper.has_mean:
            return _keep_shape(x.mean(axis=2))
        coefficients = self._projected(x, outer("collapse"))
        scale, bias = (outer(f"collapse_{name}").astype(jnp.float32) for name in ("scale", "bias"))
        return _keep_shape(
            _weighted_sum(x, jax.nn.sigmoid(coefficients * scale + bias) + self.hyper.eps)
        )

    def _gated(self, x: Array, w: LayerWeights, name: str) -> tuple[Array, Array]:
        """The mean [B, S, D] of the gated norms of streams, and these norms as [B, S, N*D]."""
        assert self.hyper is not None
        n = self.hyper.n_streams
        scale = w(f"{name}_stream_norm").reshape(n, -1)
        normed = rms_norm(x, scale, self.norm_eps, offset=self.norm_offset)
        flat = normed.reshape(*x.shape[:2], -1)
        down = jax.nn.silu(w.dot(flat, f"{name}_gate_down") / n)
        gates = jax.nn.sigmoid(w.dot(down, f"{name}_gate_up"))
        return (gates.reshape(normed.shape) * normed).mean(axis=2), flat

    def _projected(self, x: Array, matrix: Array) -> Array:
        """Norms [B, S, N, D] over N and D and multiplies by [N*D, C], in float32."""
        flat = x.reshape(*x.shape[:2], -1).astype(jnp.float32)
        return unscaled_rms_norm(flat, self.norm_eps) @ matrix.astype(jnp.float32)


def _keep_shape(x: Array) -> Array:
    """[B, S, D] unchanged; keeps XLA from reshaping the reduction before it if S is 1."""
    return lax.optimization_barrier(x)


def _weighted_sum(x: Array, weights: Array) -> Array:  # of [B, S, N, D] by [B, S, N]
    return (x.astype(jnp.float32) * weights[..., None]).sum(axis=2).astype(x.dtype)
