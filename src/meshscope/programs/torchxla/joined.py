"""Matrices that transformers fuses, in a form whose shares of a device are contiguous.

Phi-3 has queries, keys and values in one matrix, and gate and up projections in another. Splitting the rows of
the whole over devices would not split the parts by heads or columns, so they become separate parameters. The
experts of gpt-oss have columns [E, D, 2F] that alternate between gate and up; here they are as in other families.
"""

# pyright: reportMissingImports=false
from typing import Any

import torch

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


def separate_fused(model: Any, described: Model) -> None:
    """Replace fused matrices of the model by their parts."""
    if described.family is Family.GPT_OSS:
        for layer in model.model.layers:
            _store_experts(layer.mlp.experts)
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
