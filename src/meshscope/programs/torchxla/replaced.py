"""Modules of transformers in a form that can be split: contiguous shares of matrices, experts with a dispatch.

Qwen3-Next and Qwen3.5 have linear attention (`linear.py`), and in other layers a gate beside each query head.
Phi-3 has queries, keys and values in one matrix, and gate and up projections in another. Splitting the rows of
the whole over devices would not split the parts by heads or columns, so they become separate parameters. The
experts of gpt-oss have columns [E, D, 2F] that alternate between gate and up; here they are as in other families.
Llama 4 lets all experts process all tokens; here it has the dispatch of other families, too.
DeepSeek-V3.2 and GLM-5 have an indexer (`indexer.py`), DeepSeek-V4 attention over entries of positions
(`compressed.py`) and several residual streams (`streams.py`).
"""

# pyright: reportMissingImports=false
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
from meshscope.model.model import Model
from meshscope.plans.plan import Plan
from meshscope.programs.torchxla.compressed import EntryAttention
from meshscope.programs.torchxla.experts import NAME
from meshscope.programs.torchxla.indexer import ChosenPositions
from meshscope.programs.torchxla.linear import DeltaAttention
from meshscope.programs.torchxla.streams import Collapse, MixedLayer
from meshscope.programs.torchxla.tensors import scope


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


class GatedExpert(torch.nn.Module):
    """An MLP whose output a gate, a layer of the mixture around it, scales for each token."""

    def __init__(self, expert: Any, mixture: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = expert.gate_proj, expert.up_proj
        self.down_proj, self.act_fn = expert.down_proj, expert.act_fn
        self._around = (mixture,)  # in a tuple, as it is no module of this one

    def forward(self, x: Any) -> Any:
        """[B, S, D] -> [B, S, D]."""
        (mixture,) = self._around
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner * torch.sigmoid(mixture.shared_expert_gate(x)))


class GatedExperts(torch.nn.Module):
    """The mixture of Qwen3-Next and Qwen3.5, whose gate scales the shared expert within it.

    transformers scales the expert's output, which tp would have to reduce on its own before it is scaled.
    """

    def __init__(self, mixture: Any) -> None:
        super().__init__()
        self.gate, self.experts = mixture.gate, mixture.experts
        self.shared_expert_gate = mixture.shared_expert_gate
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
    """Give experts the matrices [E, 2F, D] and [E, D, F], those of all gates before those of all ups."""
    for name in ("gate_up_proj", "down_proj"):
        shape = getattr(module, name).transpose(1, 2).shape
        setattr(module, name, torch.nn.Parameter(torch.empty(shape)))


class OneExpert(torch.nn.Module):
    """The mixture of Llama 4: a token's score for its one expert scales the input of it."""

    def __init__(self, mixture: Any) -> None:
        super().__init__()
        n_experts, n_inputs = mixture.router.weight.shape
        self.router = torch.nn.Linear(n_inputs, n_experts, bias=False)
        self.experts, self.shared_expert = mixture.experts, mixture.shared_expert
        _store_experts(self.experts)

    def forward(self, x: Any) -> tuple[Any, None]:
        """[B, S, D] -> [B, S, D]; transformers returns the logits of the router, too."""
        flat = x.reshape(-1, x.shape[-1])
        with scope(Part.MOE_ROUTER.value):
            logits, chosen = self.router(flat).max(dim=-1, keepdim=True)
            scores = torch.sigmoid(logits.float()).to(x.dtype)
        dispatch = registry.ALL_EXPERTS_FUNCTIONS[NAME]
        out = dispatch(self.experts, flat * scores, chosen, torch.ones_like(scores))
        shared = self.shared_expert(x)
        with scope(Part.MOE_COMBINE.value):
            return out.reshape(x.shape) + shared, None


def replace_modules(model: Any, described: Model) -> None:
    """Replace modules of the model by those of this file."""
    for layer, kind in zip(model.model.layers, described.layers, strict=True):
        match described.family:
            case Family.GPT_OSS:
                _store_experts(layer.mlp.experts)
            case Family.LLAMA4 if kind.has_experts:
                layer.feed_forward = OneExpert(layer.feed_forward)
            case Family.PHI3:
                _separate_joined(layer, described)
            case Family.DEEPSEEK_V4:
                _replace_compressed(layer, kind, described)
            case family if family in SPARSE_FAMILIES:
                _replace_indexer(layer.self_attn, described)
            case family if family in HYBRID_FAMILIES:
                _replace_attention(layer, described)
                if kind.has_experts:
                    layer.mlp = GatedExperts(layer.mlp)
            case _:
                pass
    if described.hyper is not None:
        _mix_streams(model.model, described.hyper)


def _mix_streams(decoder: Any, hyper: HyperConnections) -> None:
    """Let the layers of a decoder mix their residual streams without merging batch and positions."""
    decoder.layers = torch.nn.ModuleList(MixedLayer(layer, hyper) for layer in decoder.layers)
    decoder.hc_head = Collapse(decoder.hc_head, hyper)


def _replace_indexer(attention: Any, described: Model) -> None:
    """Let the indexer of a layer, if it has one, return a mask."""
    if attention.indexer is not None:
        attention.indexer = ChosenPositions(attention.indexer, latent_of(described.attention))


def _replace_compressed(layer: Any, kind: Layer, described: Model) -> None:
    """Give a layer of DeepSeek-V4 the attention over a cache of fixed shape."""
    attention = compressed_of(described.attention)
    layer.self_attn = EntryAttention(layer.self_attn, kind.attention, attention)


def _separate_joined(layer: Any, described: Model) -> None:
    """Separate queries, keys and values, and gate and up projections, of a layer of Phi-3."""
    attention, ffn = grouped_of(described.attention), described.ffn
    assert ffn is not None
    heads = {"q": attention.n_heads, "k": attention.n_kv_heads, "v": attention.n_kv_heads}
    sizes = {name: n_heads * attention.head_dim for name, n_heads in heads.items()}
    layer.self_attn.qkv_proj = Joined(described.hidden, sizes)
    layer.mlp.gate_up_proj = Joined(described.hidden, {"gate": ffn, "up": ffn})


def with_local_heads(attention: Any, plan: Plan) -> None:
    """Let modules that count heads count those of one device of tp: in a manual region it has no others."""
    if hasattr(attention, "qkv_proj"):
        of_all = attention.config
        attention.config = copy(of_all)
        attention.config.num_attention_heads = of_all.num_attention_heads // plan.tp
        attention.num_key_value_heads = max(1, of_all.num_key_value_heads // plan.tp)


def _replace_attention(layer: Any, described: Model) -> None:
    """Separate the projections of a layer with linear attention or with gates."""
    attention = grouped_of(described.attention)
    assert attention.linear is not None
    if hasattr(layer, "linear_attn"):
        of = attention.linear
        layer.linear_attn = DeltaAttention(layer.linear_attn, described.hidden, of)
    else:
        heads = (attention.n_heads, attention.head_dim)
        layer.self_attn.q_proj = QueriesAndGates(described.hidden, *heads)
