"""Modules of transformers in a form that can be split.

The experts of gpt-oss have columns [E, D, 2F] that alternate between gate and up; here they are as in other families.
DeepSeek-V4 has attention over entries of positions (`compressed.py`) and several residual streams, whose products
keep sequences and positions apart.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable
from typing import Any

import torch

from meshscope.events.enums import Part
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.mechanisms.compressed import compressed_of
from meshscope.programs.torchxla.compressed import EntryAttention
from meshscope.programs.torchxla.tensors import Replacement, Tensors, scope


def replace_modules(model: Any, tensors: Tensors) -> None:
    """Replace modules of the model by this file's."""
    described, decoder = tensors.experiment.model, model.model
    for layer, kind in zip(decoder.layers, described.layers, strict=True):
        if (
            described.family.traits.fused_experts is not None
        ):  # [E, 2F, D] and [E, D, F], all gates before all ups
            for name in ("gate_up_proj", "down_proj"):
                shape = getattr(layer.mlp.experts, name).transpose(1, 2).shape
                setattr(layer.mlp.experts, name, torch.nn.Parameter(torch.empty(shape)))
        if described.attention.mechanism is Mechanism.COMPRESSED:
            of = compressed_of(described.attention)
            layer.self_attn = EntryAttention(layer.self_attn, kind.attention, of, tensors, decoder)
    if described.hyper is not None:
        layers = (MixedLayer(layer, tensors) for layer in decoder.layers)
        decoder.layers = torch.nn.ModuleList(layers)
        decoder.hc_head = Collapse(decoder.hc_head, tensors)


class MixedLayer(Replacement):
    """A layer of DeepSeek-V4, which replaces transformers' layer."""

    def __init__(self, replaced: Any, tensors: Tensors) -> None:
        super().__init__(
            replaced, "self_attn", "mlp", "input_layernorm", "post_attention_layernorm"
        )
        mixed = (replaced.attn_hc, replaced.ffn_hc)
        self.attn_hc, self.ffn_hc = (Mixing(module, tensors) for module in mixed)
        self.tensors = tensors

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
            return self.tensors.annotate(x, (*self.tensors.streams.residual[:2], (), ()))


class Mixing(Replacement):
    """The coefficients of the streams around one block (mHC, arXiv 2512.24880)."""

    def __init__(self, replaced: Any, tensors: Tensors) -> None:
        super().__init__(replaced, "fn", "base", "scale", "input_norm")
        self.hyper: Any = tensors.experiment.model.hyper

    def forward(self, streams: Any) -> tuple[Any, Any, Any]:
        """The block's input [B, S, D], the shares of its output [B, S, N], and the mixture [B, S, N, N]."""
        n, eps = self.hyper.n_streams, self.hyper.eps
        sizes = [n, n, n * n]
        projected = _projected(streams, self.fn, self.input_norm).split(sizes, dim=-1)
        scales, bases = self.scale.unbind(0), self.base.split(sizes)
        into, out_of, mixed = (
            x * scale + base for x, scale, base in zip(projected, scales, bases, strict=True)
        )
        mixture = torch.softmax(mixed.reshape(*mixed.shape[:2], n, n), dim=-1) + eps
        mixture = mixture / (mixture.sum(dim=-2, keepdim=True) + eps)
        for _ in range(self.hyper.n_iterations - 1):
            mixture = mixture / (mixture.sum(dim=-1, keepdim=True) + eps)
            mixture = mixture / (mixture.sum(dim=-2, keepdim=True) + eps)
        inputs = _weighted_sum(streams, torch.sigmoid(into) + eps)
        return inputs, 2 * torch.sigmoid(out_of), mixture


class Collapse(Replacement):
    """The weighted sum of the streams before the last norm."""

    def __init__(self, replaced: Any, tensors: Tensors) -> None:
        super().__init__(replaced, "hc_fn", "hc_base", "hc_scale", "input_norm")
        self.hyper: Any = tensors.experiment.model.hyper

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
