"""The indexer of sparse attention: a mask of the positions that it chooses, and the cache of its keys.

transformers scatters the indices of the best positions into a mask, which a TPU does element by element; here
the mask is that of the scores above the lowest of the best, as in the JAX program (`programs/jax/latent.py`).

Shapes: B batch, S queries, T slots of the cache, N heads of the indexer, H their width.
"""

# pyright: reportMissingImports=false
from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from meshscope.model.mechanisms.attention import Indexer
from meshscope.model.mechanisms.latent import LatentAttention
from meshscope.programs.torchxla.tensors import Tensors


class IndexedLayer(StaticLayer):
    """A static cache layer with the keys [B, T, H] of the indexer, too."""

    def __init__(self, n_slots: int, position: Any, index_keys: Any) -> None:
        super().__init__(max_cache_len=n_slots)
        self.position, self.index_keys = position, index_keys

    def update_indexer(self, indexer_key_states: Any) -> Any:
        """All keys, with those of this step written at its positions."""
        n_new = indexer_key_states.shape[1]
        places = self.position + torch.arange(n_new, device=self.position.device)
        new = indexer_key_states.to(self.index_keys.dtype)
        self.index_keys = self.index_keys.index_copy(1, places, new)
        return self.index_keys


class ChosenPositions(torch.nn.Module):
    """The indexer of transformers' DeepSeek-V3.2 and GLM-5, which returns a mask instead of indices."""

    def __init__(self, replaced: Any, attention: LatentAttention) -> None:
        super().__init__()
        self.wq_b, self.wk, self.k_norm = replaced.wq_b, replaced.wk, KeyNorm(replaced.k_norm)
        self.weights_proj, self.layer_idx = replaced.weights_proj, replaced.layer_idx
        assert attention.indexer is not None
        self.of: Indexer = attention.indexer
        self.rope_dim = attention.rope_dim
        self.tensors: Tensors | None = None

    def forward(  # noqa: PLR0913, PLR0917  the interface of transformers
        self,
        hidden_states: Any,
        q_resid: Any,
        position_embeddings: tuple[Any, Any],
        attention_mask: Any,
        position_ids: Any,  # noqa: ARG002
        past_key_values: Any,
    ) -> Any:
        """The mask [B, S, T] of the best positions that `attention_mask` [1, S, T] does not hide."""
        assert self.tensors is not None
        cos, sin = (x[:, :, None, : self.rope_dim // 2] for x in position_embeddings)
        q = self.wq_b(q_resid).reshape(*q_resid.shape[:2], self.of.n_heads, -1)
        q = self._turned(q, cos, sin)
        k = self._turned(self.k_norm(self.wk(hidden_states))[:, :, None], cos, sin)[:, :, 0]
        k = past_key_values.update_indexer(k, self.layer_idx).to(q.dtype)
        weights = self.weights_proj(hidden_states)
        scores = index_scores(q, k, weights, self.of)
        scores = scores + attention_mask.float()
        self.tensors.annotate(scores, (self.tensors.layouts.data, (), ()))
        return best(scores, self.of.top_k) & (attention_mask >= 0)

    def _turned(self, x: Any, cos: Any, sin: Any) -> Any:
        """Turn the first channels of x [B, S, heads, H], as pairs or as halves."""
        turning, rest = x[..., : self.rope_dim], x[..., self.rope_dim :]
        half = self.rope_dim // 2
        low, high = turning[..., :half], turning[..., half:]
        if self.of.is_interleaved:
            low, high = turning[..., 0::2], turning[..., 1::2]
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)


class KeyNorm(torch.nn.Module):
    """A layer norm of elementary operations.

    torch_xla traces that of torch as a batch norm, which XLA expands into operations without a sharding.
    """

    def __init__(self, replaced: torch.nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = replaced.weight, replaced.bias, replaced.eps

    def forward(self, x: Any) -> Any:
        """[..., H] -> [..., H]."""
        wide = x.float()
        centered = wide - wide.mean(dim=-1, keepdim=True)
        variance = (centered * centered).mean(dim=-1, keepdim=True)
        normed = centered * torch.rsqrt(variance + self.eps)
        return (normed * self.weight.float() + self.bias.float()).to(x.dtype)


def index_scores(q: Any, k: Any, weights: Any, of: Indexer) -> Any:
    """The scores [B, S, T] of keys [B, T, H] for queries [B, S, N, H], whose heads have weights [B, S, N]."""
    scores = torch.einsum("bsnh,bth->bsnt", q.float(), k.float()) * of.head_dim**-0.5
    weights = weights.float() * of.n_heads**-0.5
    return torch.einsum("bsn,bsnt->bst", weights, torch.relu(scores))


def best(scores: Any, n_best: int) -> Any:
    """The mask [B, S, T] of the `n_best` highest scores; ties go to the first."""
    n_best = min(n_best, scores.shape[-1])
    least = torch.topk(scores, n_best, dim=-1).values[..., -1:]
    is_above, is_equal = scores > least, scores == least
    n_left = n_best - is_above.sum(dim=-1, keepdim=True)
    return is_above | (is_equal & (torch.cumsum(is_equal.int(), dim=-1) <= n_left))
