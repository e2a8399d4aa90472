"""The indexer of sparse attention: a mask of the positions that it chooses, and the cache of its keys.

transformers scatters the indices of the best positions into a mask, which a TPU does element by element; here
the mask is that of the scores above the lowest of the best, as in the JAX program (`programs/jax/latent.py`).
With cp, a manual region gathers the keys of all blocks of a prompt, and in decode the best scores of each device.

Shapes: B batch, S queries, T slots of the cache, N heads of the indexer, H their width.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from meshscope.events.enums import Phase
from meshscope.programs.torchxla.context import LOWEST, cached_positions, is_seen
from meshscope.programs.torchxla.layouts import Spec
from meshscope.programs.torchxla.tensors import Tensors, all_gather
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.model import Indexer, LatentAttention


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
        self.context: ContextIndexer | None = None  # with cp

    def forward(  # noqa: PLR0913, PLR0917  the interface of transformers
        self,
        hidden_states: Any,
        q_resid: Any,
        position_embeddings: tuple[Any, Any],
        attention_mask: Any,
        position_ids: Any,  # noqa: ARG002
        past_key_values: Any,
    ) -> Any:
        """The mask [B, S, T] of the best positions that `attention_mask` [1, S, T] does not hide.

        With cp, prefill chooses among the T positions of the prompt, and the mask is not used.
        """
        assert self.tensors is not None
        cos, sin = (x[:, :, None, : self.rope_dim // 2] for x in position_embeddings)
        q = self.wq_b(q_resid).reshape(*q_resid.shape[:2], self.of.n_heads, -1)
        q = self._turned(q, cos, sin)
        k = self._turned(self.k_norm(self.wk(hidden_states))[:, :, None], cos, sin)[:, :, 0]
        k = past_key_values.update_indexer(k, self.layer_idx).to(q.dtype)
        weights = self.weights_proj(hidden_states)
        if self.context is not None:
            return self.context(q, k, weights, self.of)
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

    torch_xla traces that of torch as a batch norm. XLA expands it into operations without a sharding, at which the
    partitioner crashes in a stage.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextIndexer:
    """Chooses positions in one phase with the sequence split over cp."""

    experiment: Experiment
    phase: Phase
    tensors: Tensors

    def __call__(self, q: Any, k: Any, weights: Any, of: Indexer) -> Any:
        """The mask [B, S, T] of the best keys [B, T, H]; in prefill S is split, in decode T is."""
        layouts, local = self.tensors.layouts, self.tensors.local
        context, rank = layouts.axes("cp"), self.tensors.rank("cp")
        groups, is_prefill = self.tensors.groups("cp"), self.phase is Phase.PREFILL
        of_queries = context if is_prefill else ()
        q = local(q, (layouts.data, of_queries, (), ()))
        k = local(k, (layouts.data, context, ()))
        weights = local(weights, (layouts.data, of_queries, ()))
        if is_prefill:
            k = all_gather(k, 1, groups)
            queries = rank * q.shape[1] + torch.arange(q.shape[1], device=q.device)
            keys = torch.arange(k.shape[1], device=q.device)
        else:
            queries = self.tensors.entered(self.tensors.position, ()).reshape(1)
            keys = cached_positions(self.experiment, rank)
        seen = is_seen(queries, keys, None)
        scores = torch.where(seen, index_scores(q, k, weights, of), LOWEST)
        if is_prefill:
            chosen = best(scores, of.top_k)
        else:
            chosen = best_of_all(scores, of.top_k, rank, lambda x: all_gather(x, 2, groups))
        spec: Spec = (layouts.data, of_queries, () if is_prefill else context)
        return self.tensors.whole(chosen & seen, spec)


def best_of_all(scores: Any, n_best: int, rank: Any, gathered: Callable[[Any], Any]) -> Any:
    """As `best`, for scores whose last dimension is split over devices: each proposes its own best ones.

    `gathered` joins the proposals [B, S, n] of all devices, and `rank` [1] is that of this one.
    """
    n_each = min(n_best, scores.shape[-1])
    proposed = gathered(torch.topk(scores, n_each, dim=-1).values)
    least = torch.topk(proposed, min(n_best, proposed.shape[-1]), dim=-1).values[..., -1:]
    is_earlier = torch.arange(proposed.shape[-1], device=scores.device) < rank * n_each
    n_before = ((proposed == least) & is_earlier).sum(dim=-1, keepdim=True)
    n_left = n_best - (proposed > least).sum(dim=-1, keepdim=True) - n_before
    is_equal = scores == least
    return (scores > least) | (is_equal & (torch.cumsum(is_equal.int(), dim=-1) <= n_left))
