"""Modules of transformers in a form that can be split: contiguous shares of matrices, experts with a dispatch.

Qwen3-Next and Qwen3.5 have linear attention (`linear.py`), and in other layers a gate for each query head.
Phi-3 has queries, keys and values in one matrix, and gate and up projections in another. Splitting the rows of
the whole over devices would not split the parts by heads or columns, so they become separate parameters. The
experts of gpt-oss have columns [E, D, 2F] that alternate between gate and up; here they are as in other families.
If a score scales the input of experts, transformers lets all process all tokens; here they have other families' dispatch.
DeepSeek-V3.2 and GLM-5 have an indexer (`compressed.py`), DeepSeek-V4 attention over entries of positions
(`compressed.py`) and several residual streams (`replaced.py`).
"""

# pyright: reportMissingImports=false
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
import transformers.integrations.moe as registry

from meshscope.events.enums import Part
from meshscope.model.families import HYBRID_FAMILIES, SPARSE_FAMILIES, Family
from meshscope.model.layers import Layer
from meshscope.model.mechanisms.compressed import compressed_of
from meshscope.model.mechanisms.grouped import grouped_of
from meshscope.model.mechanisms.latent import latent_of
from meshscope.model.mechanisms.streams import HyperConnections
from meshscope.plans.plan import Plan
from meshscope.programs.torchxla.compressed import ChosenPositions, EntryAttention
from meshscope.programs.torchxla.experts import NAME
from meshscope.programs.torchxla.linear import DeltaAttention
from meshscope.programs.torchxla.tensors import Replacement, Tensors, scope


class Joined(torch.nn.Module):
    """Linear layers of one input, whose outputs are joined; XLA removes the join where they are separated again."""

    def __init__(self, n_inputs: int, sizes: dict[str, int]) -> None:
        super().__init__()
        self.names = tuple(sizes)
        for name, size in sizes.items():
            self.add_module(name, torch.nn.Linear(n_inputs, size, bias=False))

    def forward(self, x: Any) -> Any:
        """[..., inputs] -> [..., outputs of all parts]."""
        return torch.cat([getattr(self, name)(x) for name in self.names], dim=-1)


class QueriesAndGates(torch.nn.Module):
    """Projections to the queries and to the gates of heads, which transformers separates by head again."""

    def __init__(self, n_inputs: int, n_heads: int, width: int) -> None:
        super().__init__()
        self.q = torch.nn.Linear(n_inputs, n_heads * width, bias=False)
        self.q_gate = torch.nn.Linear(n_inputs, n_heads * width, bias=False)
        self.n_heads = n_heads

    def forward(self, x: Any) -> Any:
        """[..., inputs] -> [..., heads * 2 * width]: each head's query, then its gate."""
        parts = [y.reshape(*y.shape[:-1], self.n_heads, -1) for y in (self.q(x), self.q_gate(x))]
        return torch.cat(parts, dim=-1).reshape(*x.shape[:-1], -1)


class GatedExpert(Replacement):
    """An MLP whose output is scaled for each token by a gate of the enclosing mixture."""

    def __init__(self, expert: Any, mixture: Any) -> None:
        super().__init__(expert, "gate_proj", "up_proj", "down_proj", "act_fn")
        self._around = (mixture,)  # in a tuple, so it is not a submodule

    def forward(self, x: Any) -> Any:
        """[B, S, D] -> [B, S, D]."""
        (mixture,) = self._around
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner * torch.sigmoid(mixture.shared_expert_gate(x)))


class GatedExperts(Replacement):
    """The mixture of Qwen3-Next and Qwen3.5, whose gate scales the shared expert within it.

    transformers scales the expert's output, which tp would have to reduce on its own before it is scaled.
    """

    def __init__(self, mixture: Any) -> None:
        super().__init__(mixture, "gate", "experts", "shared_expert_gate")
        self.shared_expert = GatedExpert(mixture.shared_expert, self)

    def forward(self, x: Any) -> Any:
        """[B, S, D] -> [B, S, D]."""
        flat = x.reshape(-1, x.shape[-1])
        _, shares, chosen = self.gate(flat)
        routed = self.experts(flat, chosen, shares)
        with scope(Part.MOE_SHARED.value):
            shared = self.shared_expert(x)
        with scope(Part.MOE_COMBINE.value):
            return routed.reshape(x.shape) + shared


def _store_experts(module: Any) -> None:
    """Give experts the matrices [E, 2F, D] and [E, D, F], all gates before all ups."""
    for name in ("gate_up_proj", "down_proj"):
        shape = getattr(module, name).transpose(1, 2).shape
        setattr(module, name, torch.nn.Parameter(torch.empty(shape)))


class OneExpert(torch.nn.Module):
    """A mixture in which a token's score for its one expert scales its input."""

    def __init__(self, mixture: Any) -> None:
        super().__init__()
        n_experts, n_inputs = mixture.router.weight.shape
        self.router = torch.nn.Linear(n_inputs, n_experts, bias=False)
        self.experts, self.shared_expert = mixture.experts, mixture.shared_expert
        _store_experts(self.experts)

    def forward(self, x: Any) -> tuple[Any, None]:
        """[B, S, D] -> [B, S, D]; transformers also returns the router's logits."""
        flat = x.reshape(-1, x.shape[-1])
        with scope(Part.MOE_ROUTER.value):
            logits, chosen = self.router(flat).max(dim=-1, keepdim=True)
            scores = torch.sigmoid(logits.float()).to(x.dtype)
        dispatch = registry.ALL_EXPERTS_FUNCTIONS[NAME]
        out = dispatch(self.experts, flat * scores, chosen, torch.ones_like(scores))
        shared = self.shared_expert(x)
        with scope(Part.MOE_COMBINE.value):
            return out.reshape(x.shape) + shared, None


def replace_modules(model: Any, tensors: Tensors) -> None:
    """Replace modules of the model by this file's."""
    described = tensors.experiment.model
    family, moe = described.family, described.moe
    replace = next((way for families, way in REPLACED.items() if family in families), None)
    for layer, kind in zip(model.model.layers, described.layers, strict=True):
        if replace is not None:
            replace(layer, kind, tensors, model.model)
        if moe is not None and moe.scales_inputs and kind.has_experts:
            layer.feed_forward = OneExpert(layer.feed_forward)
    hyper = described.hyper
    if hyper is not None:  # mix the residual streams without merging batch and positions
        layers = (MixedLayer(layer, hyper, tensors) for layer in model.model.layers)
        model.model.layers = torch.nn.ModuleList(layers)
        model.model.hc_head = Collapse(model.model.hc_head, hyper)


def _of_phi3(layer: Any, _: Layer, tensors: Tensors, __: Any) -> None:
    """Separate queries, keys and values, and gate and up projections."""
    described = tensors.experiment.model
    attention, ffn = grouped_of(described.attention), described.ffn
    assert ffn is not None
    heads = {"q": attention.n_heads, "k": attention.n_kv_heads, "v": attention.n_kv_heads}
    sizes = {name: n_heads * attention.head_dim for name, n_heads in heads.items()}
    layer.self_attn.qkv_proj = Joined(described.hidden, sizes)
    layer.mlp.gate_up_proj = Joined(described.hidden, {"gate": ffn, "up": ffn})


def _of_deepseek_v4(layer: Any, kind: Layer, tensors: Tensors, decoder: Any) -> None:
    of = compressed_of(tensors.experiment.model.attention)
    layer.self_attn = EntryAttention(layer.self_attn, kind.attention, of, tensors, decoder)


def _with_indexer(layer: Any, _: Layer, tensors: Tensors, __: Any) -> None:
    """Let the indexer, if the layer has one, return a mask."""
    attention = layer.self_attn
    if attention.indexer is not None:
        of = latent_of(tensors.experiment.model.attention)
        attention.indexer = ChosenPositions(attention.indexer, of, tensors)


def _hybrid(layer: Any, kind: Layer, tensors: Tensors, _: Any) -> None:
    """Separate the projections of linear attention or of queries and gates."""
    described = tensors.experiment.model
    attention, n_inputs = grouped_of(described.attention), described.hidden
    assert attention.linear is not None
    if hasattr(layer, "linear_attn"):
        of = (layer.linear_attn, n_inputs, attention.linear)
        layer.linear_attn = DeltaAttention(*of, tensors)
    else:
        heads = (attention.n_heads, attention.head_dim)
        layer.self_attn.q_proj = QueriesAndGates(n_inputs, *heads)
    if kind.has_experts:
        layer.mlp = GatedExperts(layer.mlp)


# How the layers of families are replaced.
REPLACED: dict[frozenset[Family], Callable[[Any, Layer, Tensors, Any], None]] = {
    frozenset({Family.GPT_OSS}): lambda layer, *_: _store_experts(layer.mlp.experts),
    frozenset({Family.PHI3}): _of_phi3,
    frozenset({Family.DEEPSEEK_V4}): _of_deepseek_v4,
    frozenset(SPARSE_FAMILIES): _with_indexer,
    frozenset(HYBRID_FAMILIES): _hybrid,
}


def with_local_heads(attention: Any, plan: Plan) -> None:
    """Let modules that count heads count one tp device's heads: a manual region has no others."""
    if hasattr(attention, "qkv_proj"):
        of_all = attention.config
        attention.config = copy(of_all)
        attention.config.num_attention_heads = of_all.num_attention_heads // plan.tp
        attention.num_key_value_heads = max(1, of_all.num_key_value_heads // plan.tp)


class MixedLayer(Replacement):
    """A layer of DeepSeek-V4, which replaces transformers' layer."""

    def __init__(self, replaced: Any, hyper: HyperConnections, tensors: Tensors) -> None:
        super().__init__(
            replaced, "self_attn", "mlp", "input_layernorm", "post_attention_layernorm"
        )
        self.attn_hc, self.ffn_hc = (Mixing(x, hyper) for x in (replaced.attn_hc, replaced.ffn_hc))
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

    def __init__(self, replaced: Any, hyper: HyperConnections) -> None:
        super().__init__(replaced, "fn", "base", "scale", "input_norm")
        self.hyper = hyper

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

    def __init__(self, replaced: Any, hyper: HyperConnections) -> None:
        super().__init__(replaced, "hc_fn", "hc_base", "hc_scale", "input_norm")
        self.hyper = hyper

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
