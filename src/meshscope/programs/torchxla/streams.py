"""Parallel residual streams of DeepSeek-V4, mixed without merging batch and positions.

The products of transformers flatten both into one dimension, of which sp splits the inner part.

Shapes: B batch, S positions of this step, N streams, D residual width, C coefficients of a token.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable
from typing import Any

import torch

from meshscope.events.enums import Part
from meshscope.model.mechanisms.streams import HyperConnections
from meshscope.programs.torchxla.layouts import Spec
from meshscope.programs.torchxla.tensors import Tensors, scope


class MixedLayer(torch.nn.Module):
    """A layer of DeepSeek-V4, which replaces that of transformers."""

    def __init__(self, replaced: Any, hyper: HyperConnections) -> None:
        super().__init__()
        self.self_attn, self.mlp = replaced.self_attn, replaced.mlp
        self.input_layernorm = replaced.input_layernorm
        self.post_attention_layernorm = replaced.post_attention_layernorm
        self.attn_hc, self.ffn_hc = (Mixing(x, hyper) for x in (replaced.attn_hc, replaced.ffn_hc))
        self.tensors: Tensors | None = None
        self.residual: Spec = ()

    def forward(self, hidden_states: Any, input_ids: Any = None, **given: Any) -> Any:
        """[B, S, N, D] -> [B, S, N, D]."""

        def attended(x: Any) -> Any:
            return self.self_attn(self.input_layernorm(x), **given)[0]

        def mixture(x: Any) -> Any:
            return self.mlp(self.post_attention_layernorm(x), input_ids=input_ids)

        x = self._around(hidden_states, self.attn_hc, attended, Part.ATTN)
        return self._around(x, self.ffn_hc, mixture, Part.MOE_COMBINE)

    def _around(self, x: Any, mixing: Any, block: Callable[[Any], Any], part: Part) -> Any:
        """The streams after a block: all mixed, and its output added to each."""
        inputs, shares, mixture = mixing(x)
        out = block(inputs)
        with scope(part.value):
            mixed = torch.einsum("bsnm,bsnd->bsmd", mixture.to(x.dtype), x)
            x = shares.to(x.dtype)[..., None] * out[:, :, None] + mixed
            assert self.tensors is not None
            return self.tensors.annotate(x, (*self.residual[:2], (), ()))


class Mixing(torch.nn.Module):
    """The coefficients of the streams around one block (mHC, arXiv 2512.24880)."""

    def __init__(self, replaced: Any, hyper: HyperConnections) -> None:
        super().__init__()
        self.fn, self.base, self.scale = replaced.fn, replaced.base, replaced.scale
        self.input_norm, self.hyper = replaced.input_norm, hyper

    def forward(self, streams: Any) -> tuple[Any, Any, Any]:
        """The block's input [B, S, D], the shares of its output [B, S, N], and the mixture [B, S, N, N]."""
        n, eps = self.hyper.n_streams, self.hyper.eps
        sizes = [n, n, n * n]
        into, out_of, mixed = (
            coefficients * scale + base
            for coefficients, scale, base in zip(
                _projected(streams, self.fn, self.input_norm).split(sizes, dim=-1),
                self.scale.unbind(0),
                self.base.split(sizes),
                strict=True,
            )
        )
        mixture = torch.softmax(mixed.reshape(*mixed.shape[:2], n, n), dim=-1) + eps
        mixture = mixture / (mixture.sum(dim=-2, keepdim=True) + eps)
        for _ in range(self.hyper.n_iterations - 1):
            mixture = mixture / (mixture.sum(dim=-1, keepdim=True) + eps)
            mixture = mixture / (mixture.sum(dim=-2, keepdim=True) + eps)
        inputs = _weighted_sum(streams, torch.sigmoid(into) + eps)
        return inputs, 2 * torch.sigmoid(out_of), mixture


class Collapse(torch.nn.Module):
    """The weighted sum of the streams before the last norm."""

    def __init__(self, replaced: Any, hyper: HyperConnections) -> None:
        super().__init__()
        self.hc_fn, self.hc_base, self.hc_scale = (
            replaced.hc_fn,
            replaced.hc_base,
            replaced.hc_scale,
        )
        self.input_norm, self.hyper = replaced.input_norm, hyper

    def forward(self, streams: Any) -> Any:
        """[B, S, N, D] -> [B, S, D]."""
        coefficients = _projected(streams, self.hc_fn, self.input_norm)
        shares = torch.sigmoid(coefficients * self.hc_scale.float() + self.hc_base.float())
        return _weighted_sum(streams, shares + self.hyper.eps)


def _projected(streams: Any, matrix: Any, norm: Any) -> Any:
    """The product [B, S, C] of the normed streams and a matrix [C, N * D], in float32."""
    flat = norm(streams.reshape(*streams.shape[:2], -1).float())
    return torch.einsum("bsx,cx->bsc", flat, matrix.float())


def _weighted_sum(streams: Any, shares: Any) -> Any:
    """The sum [B, S, D] of the streams with shares [B, S, N]."""
    return (shares[..., None] * streams).sum(dim=2).to(streams.dtype)
