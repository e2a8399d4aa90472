"""Modules of transformers in a form that can be split: contiguous shares of matrices, experts with a dispatch.

Phi-3 has queries, keys and values in one matrix, and gate and up projections in another. Splitting the rows of
the whole over devices would not split the parts by heads or columns, so they become separate parameters. The
experts of gpt-oss have columns [E, D, 2F] that alternate between gate and up; here they are as in other families.
Llama 4 lets all experts process all tokens; here it has the dispatch of other families, too.
"""

# pyright: reportMissingImports=false
from typing import Any

import torch
import transformers.integrations.moe as registry

from meshscope.events.enums import Part
from meshscope.programs.torchxla.experts import NAME
from meshscope.programs.torchxla.tensors import scope
from meshscope.spec.model.model import Family, GroupedAttention, Model


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
    if described.family is Family.GPT_OSS:
        for layer in model.model.layers:
            _store_experts(layer.mlp.experts)
    if described.family is Family.LLAMA4:
        for number, layer in enumerate(model.model.layers):
            if described.layers[number].has_experts:
                layer.feed_forward = OneExpert(layer.feed_forward)
    if described.family is not Family.PHI3:
        return
    attention = described.attention
    assert isinstance(attention, GroupedAttention)
    width = attention.head_dim
    heads = {"q": attention.n_heads, "k": attention.n_kv_heads, "v": attention.n_kv_heads}
    for layer in model.model.layers:
        sizes = {name: n_heads * width for name, n_heads in heads.items()}
        layer.self_attn.qkv_proj = Joined(described.hidden, sizes)
        assert described.ffn is not None
        sizes = {"gate": described.ffn, "up": described.ffn}
        layer.mlp.gate_up_proj = Joined(described.hidden, sizes)
