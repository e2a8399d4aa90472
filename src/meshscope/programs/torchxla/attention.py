"""Attention with separate batch and head dimensions, registered with transformers.

The attention of transformers multiplies [B*N, S, H]. An annotation cannot split the inner part of
the merged dimension, so the partitioner gathers queries, keys and values. `--partitioner auto`
keeps that attention.

Shapes: B batch, N query heads, K key and value heads, G = N/K, S queries, T slots, H width of a head.
"""

# pyright: reportMissingImports=false
from typing import Any

import torch
import transformers

from meshscope.events.enums import Phase
from meshscope.programs.torchxla.context import ContextAttention
from meshscope.programs.torchxla.layouts import KV_AXES
from meshscope.programs.torchxla.tensors import Tensors
from meshscope.spec.experiment import Experiment

NAME = "meshscope_attention"


def register_attention(experiment: Experiment, phase: Phase, tensors: Tensors) -> str:
    """Register the attention with transformers; returns its name."""
    layouts = tensors.layouts
    is_split = experiment.plan.cp > 1
    of_context = ContextAttention(experiment=experiment, phase=phase, tensors=tensors)
    heads = layouts.axes("tp")

    def attended(  # noqa: PLR0913, PLR0917  the interface of transformers
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float,
        dropout: float = 0.0,
        **_: Any,
    ) -> tuple[Any, None]:
        del module, dropout  # of training
        if is_split:
            return of_context(query, key, value, scaling), None
        of_keys = tuple(axis for axis in heads if axis != KV_AXES[1])
        of_copies = tuple(axis for axis in heads if axis == KV_AXES[1])
        batch, n_heads, n_queries, width = query.shape
        n_shared = key.shape[1]
        q = query.reshape(batch, n_shared, n_heads // n_shared, n_queries, width)
        tensors.annotate(q, (layouts.data, of_keys, of_copies, (), ()))
        out = plain_attention(q, key, value, attention_mask, scaling)
        out = out.reshape(batch, n_queries, n_heads, value.shape[-1])
        return tensors.annotate(out, (layouts.data, (), heads, ())), None

    transformers.AttentionInterface.register(NAME, attended)
    return NAME


def plain_attention(q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
    """[B, K, G, S, H], [B, K, T, H], [B, K, T, Hv] -> [B, S, K, G, Hv], as in transformers' `eager`."""
    scores = torch.einsum("bkgsh,bkth->bkgst", q, k) * scale + mask[:, :, None]
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.einsum("bkgst,bkth->bskgh", shares, v)
