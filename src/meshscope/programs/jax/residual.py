"""The residual stream: one, or several in parallel that hyper-connections mix around every block.

What mixes streams is on every device and works on each token alone, so that no device meets another
here, and the stream may be split over tokens in any way.

Shapes: B batch, S positions of this step, D residual width, N streams, C coefficients of a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshscope.programs.jax.numerics import Array, unscaled_rms_norm
from meshscope.programs.jax.state import LayerWeights
from meshscope.spec.model.model import HyperConnections

Added = Callable[[Array], Array]


class ResidualStreams(Protocol):
    """How blocks read from the residual stream and write to it."""

    @property
    def between(self) -> tuple[int, ...]:
        """The dimensions of the residual stream between positions and width: [B, S, *between, D]."""
        ...

    def opened(self, x: Array) -> Array:
        """The residual stream of embeddings [B, S, D]."""
        ...

    def read(self, x: Array, w: LayerWeights, block: str) -> tuple[Array, Added]:
        """What this block of a layer reads, [B, S, D], and how its output becomes the new stream."""
        ...

    def closed(self, x: Array, outer: LayerWeights) -> Array:
        """What the output head reads, [B, S, D]; only the last position counts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleStream:
    """One stream, to which every block adds."""

    @property
    def between(self) -> tuple[int, ...]:
        """None: [B, S, D]."""
        return ()

    def opened(self, x: Array) -> Array:
        """The embeddings."""
        return x

    def read(self, x: Array, w: LayerWeights, block: str) -> tuple[Array, Added]:  # noqa: ARG002  all blocks alike
        """The stream, and addition to it."""
        return x, lambda out: x + out

    def closed(self, x: Array, outer: LayerWeights) -> Array:  # noqa: ARG002  nothing is learned
        """The stream."""
        return x


SINGLE_STREAM = SingleStream()


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperStreams:
    """N streams [B, S, N, D] (mHC, arXiv 2512.24880; as transformers' DeepSeek-V4 has it)."""

    hyper: HyperConnections
    norm_eps: float

    @property
    def between(self) -> tuple[int, ...]:
        """The streams: [B, S, N, D]."""
        return (self.hyper.n_streams,)

    def opened(self, x: Array) -> Array:
        """The embeddings in every stream."""
        x = _as_it_came(x)
        shape = (*x.shape[:2], *self.between, x.shape[2])
        return jnp.broadcast_to(x[:, :, None, :], shape)

    def read(self, x: Array, w: LayerWeights, block: str) -> tuple[Array, Added]:
        """A weighted sum of the streams; the output goes to each by a weight, over their mixture."""
        n, eps = self.hyper.n_streams, self.hyper.eps
        coefficients = self._projected(x, w(f"{block}_mixing"))  # [B, S, C]
        scale = w(f"{block}_mixing_scale").astype(jnp.float32)
        bias = w(f"{block}_mixing_bias").astype(jnp.float32)
        scale = jnp.repeat(scale, np.array([n, n, n * n]), total_repeat_length=bias.shape[0])
        into, out_of, mixed = jnp.split(coefficients * scale + bias, [n, 2 * n], axis=-1)
        post = 2 * jax.nn.sigmoid(out_of).astype(x.dtype)
        mixture = self._doubly_stochastic(mixed.reshape(*mixed.shape[:2], n, n)).astype(x.dtype)

        def added(out: Array) -> Array:
            kept = jnp.einsum("bsnm,bsnd->bsmd", mixture, x)
            return post[..., None] * _as_it_came(out)[:, :, None, :] + kept

        return _collapsed(x, jax.nn.sigmoid(into) + eps), added

    def closed(self, x: Array, outer: LayerWeights) -> Array:
        """A weighted sum of the streams at the last position, [B, 1, D]."""
        x = x[:, -1:]
        coefficients = self._projected(x, outer("collapse"))
        scale, bias = (outer(f"collapse_{name}").astype(jnp.float32) for name in ("scale", "bias"))
        return _as_it_came(
            _collapsed(x, jax.nn.sigmoid(coefficients * scale + bias) + self.hyper.eps)
        )

    def _projected(self, x: Array, matrix: Array) -> Array:
        """[B, S, N, D] normed over N and D together, times [N*D, C], in float32."""
        flat = x.reshape(*x.shape[:2], -1).astype(jnp.float32)
        return unscaled_rms_norm(flat, self.norm_eps) @ matrix.astype(jnp.float32)

    def _doubly_stochastic(self, logits: Array) -> Array:
        """[B, S, N, N]: rows and columns that sum to one, by the iteration of Sinkhorn and Knopp."""
        eps = self.hyper.eps

        def scaled(matrix: Array, axis: int) -> Array:
            return matrix / (matrix.sum(axis=axis, keepdims=True) + eps)

        matrix = scaled(jax.nn.softmax(logits, axis=-1) + eps, -2)
        return lax.fori_loop(
            0,
            self.hyper.n_iterations - 1,
            lambda _, matrix: scaled(scaled(matrix, -1), -2),
            matrix,
        )


def _as_it_came(x: Array) -> Array:
    """[B, S, D] as it is: in decode the compiler would give the sum before, where S is 1, another shape."""
    return lax.optimization_barrier(x)


def _collapsed(x: Array, shares: Array) -> Array:
    """[B, S, D]: the streams [B, S, N, D] times their shares [B, S, N], added up in float32."""
    return (x.astype(jnp.float32) * shares[..., None]).sum(axis=2).astype(x.dtype)
