"""Context-parallel attention in the manual region of the layers: ring or all-gather in prefill, merge in decode.

Algorithm and layout match the JAX program (`programs/jax/context_parallel.py`,
`plans/caches.py`): a device has a contiguous block of the prompt and round-robin generated
tokens. Prefill permutes or gathers keys and values, or the latents of both; decode merges partial softmaxes with
two all-reduces.

The attention of transformers multiplies [B*N, S, H]. An annotation cannot split the inner part of
the merged dimension, so the partitioner gathers queries, keys and values. `--partitioner auto`
keeps that attention.

Shapes: B batch, N query heads, K key and value heads, G = N/K query heads of each, S queries, T keys or slots,
H width of a head.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
import torch_xla
import transformers

from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.mechanisms.grouped import grouped_of
from meshscope.plans.caches import ContextForm, cache_slots, ring_pairs
from meshscope.plans.experiment import Experiment
from meshscope.programs.jax.attention import AttentionScores, PartialAttention
from meshscope.programs.jax.numerics import MASKED, causal_mask
from meshscope.programs.torchxla.tensors import (
    TORCH_DTYPES,
    Tensors,
    all_gather,
    all_reduce,
    gathered,
    permuted,
)

NAME = "meshscope_attention"


class PartialSoftmax(PartialAttention):
    """Of torch's tensors: `numerator` [B, K, G, S, H], `total` and `largest` [B, K, G, S]; sinks are [K, G, 1]."""

    xp = torch


def scores_of(products: Any, of: AttentionScores) -> Any:
    """The scores of products of queries and keys, at most the soft cap in magnitude."""
    scores = products * of.scale
    return scores if of.softcap is None else torch.tanh(scores / of.softcap) * of.softcap


def mask_of(experiment: Experiment, positions: Any, kind: AttentionKind) -> Any:
    """[1, 1, S, T] for layers of a kind: zero for visible slots, the lowest number for masked ones."""
    plan, workload = experiment.plan, experiment.workload
    dtype = TORCH_DTYPES[workload.activation_dtype]
    slots = torch.arange(cache_slots(plan, workload) * plan.cp, device=torch_xla.device())
    window = experiment.model.attention.window_of(kind)
    is_hidden = ~causal_mask(positions, slots, window)
    return (is_hidden.to(dtype) * torch.finfo(dtype).min)[None, None]


def _partly(
    q: Any, keys: tuple[Any, Any], places: tuple[Any, Any], of: AttentionScores
) -> PartialSoftmax:
    """Attention of q [B, N, S, H] over keys and values [B, K, T, H], which are at the `places` [S] and [T]."""
    (k, v), seen = keys, causal_mask(*places, of.window)
    return partial_softmax(q.unflatten(1, (k.shape[1], -1)), k, v, seen, of)


def partial_softmax(q: Any, k: Any, v: Any, seen: Any, of: AttentionScores) -> PartialSoftmax:
    """Attention of q [B, K, G, S, H] over the `seen` [..., S, T] positions of k, v [B, K, T, H]."""
    scores = scores_of(torch.einsum("bkgsh,bkth->bkgst", q, k).float(), of)
    scores = torch.where(seen, scores, torch.full_like(scores, MASKED))
    largest = scores.amax(dim=-1)
    shares = torch.exp(scores - largest[..., None])
    return PartialSoftmax(
        numerator=torch.einsum("bkgst,bkth->bkgsh", shares.to(q.dtype), v).float(),
        total=shares.sum(dim=-1),
        largest=largest,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What each position has: keys and values, or one array of both that is `expanded` where it is read."""

    arrays: tuple[Any, ...]
    expanded: Callable[..., tuple[Any, Any]] = lambda k, v: (k, v)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextAttention:
    """Attention of one phase with the sequence split over cp, in the manual region."""

    tensors: Tensors

    def __call__(self, q: Any, held: Held, scores: AttentionScores) -> Any:
        """[B, N, S, H] and arrays of T positions -> [B, S, N, H]; in prefill S and T are split, in decode T is."""
        way = self._merged if self.tensors.is_decode else self._of_blocks
        part = way(q, held, self.tensors.rank("cp"), scores)
        sinks = None if scores.sinks is None else scores.sinks.float()[..., None]
        out = part.with_sinks(sinks).mean.to(q.dtype)
        return out.reshape(*q.shape[:3], -1).transpose(1, 2)

    def _of_blocks(self, q: Any, held: Held, rank: Any, scores: AttentionScores) -> PartialSoftmax:
        """Attention of a block of queries over the keys of all blocks."""
        groups, size = self.tensors.groups("cp"), self.tensors.experiment.plan.cp
        n_local = q.shape[2]
        places = torch.arange(n_local, device=torch_xla.device())
        query_positions = rank * n_local + places
        if self.tensors.experiment.context_form is ContextForm.ALLGATHER:
            arrays = [all_gather(x, 2, groups) for x in held.arrays]
            every = torch.arange(size * n_local, device=torch_xla.device())
            return _partly(q, held.expanded(*arrays), (query_positions, every), scores)
        parts: list[PartialSoftmax] = []
        arrays = held.arrays
        for number in range(size):
            source = (rank + size - number) % size
            seen_from = (query_positions, source * n_local + places)
            parts.append(_partly(q, held.expanded(*arrays), seen_from, scores))
            if number < size - 1:  # the last step sends nothing
                arrays = tuple(permuted(x, ring_pairs(groups)) for x in arrays)
        return reduce(PartialSoftmax.merged, parts)

    def _merged(self, q: Any, held: Held, rank: Any, scores: AttentionScores) -> PartialSoftmax:
        """Attention of one token over all devices' positions: an all-reduce max and an all-reduce sum."""
        groups = self.tensors.groups("cp")
        size, n_prompt = self.tensors.experiment.plan.cp, self.tensors.experiment.workload.prompt
        n_block = n_prompt // size
        n_slots = n_block + -(-self.tensors.experiment.workload.output // size)
        slots = torch.arange(n_slots, device=torch_xla.device())
        generated = n_prompt + (slots - n_block) * size + rank
        at = torch.where(slots < n_block, rank * n_block + slots, generated)  # of each slot
        position = self.tensors.entered(self.tensors.position, ())
        part = _partly(q, held.expanded(*held.arrays), (position.reshape(1), at), scores)
        part = part.rescaled(all_reduce(part.largest, groups, "max"))
        batch, n_total = part.total.shape[0], part.total[0].numel()
        flat = [x.reshape(batch, 1, -1) for x in (part.numerator, part.total)]
        both = all_reduce(torch.cat(flat, dim=-1), groups)
        return PartialSoftmax(
            numerator=both[..., :-n_total].reshape(part.numerator.shape),
            total=both[..., -n_total:].reshape(part.total.shape),
            largest=part.largest,
        )


def held_latents(module: Any, latent: Any, rope: Any) -> Held:
    """The latents [B, 1, T, R] and rotary keys [B, 1, T, P] of positions, expanded to heads as in transformers."""
    widths = (module.qk_nope_head_dim, module.v_head_dim)
    matrix = gathered(module.kv_b_proj.weight).reshape(-1, sum(widths), latent.shape[-1])

    def expanded(both: Any) -> tuple[Any, Any]:
        latent, rope = both.split([matrix.shape[-1], both.shape[-1] - matrix.shape[-1]], dim=-1)
        k, v = torch.einsum("btr,nhr->bnth", latent[:, 0], matrix).split(widths, dim=-1)
        return torch.cat([k, rope.expand(-1, k.shape[1], -1, -1)], dim=-1), v

    return Held(arrays=(torch.cat([latent, rope], dim=-1),), expanded=expanded)


def register_attention(tensors: Tensors) -> str:
    """Register the attention with transformers; returns its name."""
    layouts, experiment = tensors.layouts, tensors.experiment
    attention = experiment.model.attention
    is_split = experiment.plan.cp > 1
    is_grouped = attention.mechanism is Mechanism.GROUPED
    softcap = grouped_of(attention).softcap if is_grouped else None
    of_context = ContextAttention(tensors=tensors)
    heads = layouts.axes("tp")

    def attended(  # noqa: PLR0913, PLR0917  the interface of transformers
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float,
        dropout: float = 0.0,
        s_aux: Any = None,
        **_: Any,
    ) -> tuple[Any, None]:
        del dropout  # of training
        kind = experiment.model.layers[module.layer_idx].attention
        scores = AttentionScores(scale=scaling, softcap=softcap, window=attention.window_of(kind))
        of_keys = layouts.kv_heads
        of_copies = tuple(axis for axis in heads if axis not in of_keys)
        if s_aux is not None:
            sinks = tensors.annotate(s_aux.reshape(key.shape[1], -1), (of_keys, of_copies))
            scores = replace(scores, sinks=sinks)
        if is_split:
            held = Held(arrays=(key, value))
            if attention.mechanism is Mechanism.LATENT:
                held = held_latents(module, key, value)
            return of_context(query, held, scores), None
        batch, n_heads, n_queries, width = query.shape
        n_shared = key.shape[1]
        q = query.reshape(batch, n_shared, n_heads // n_shared, n_queries, width)
        tensors.annotate(q, (layouts.data, of_keys, of_copies, (), ()))
        out = plain_attention(q, key, value, attention_mask, scores)
        out = out.reshape(batch, n_queries, n_heads, value.shape[-1])
        return tensors.annotate(out, (layouts.data, (), heads, ())), None

    transformers.AttentionInterface.register(NAME, attended)
    return NAME


def plain_attention(q: Any, k: Any, v: Any, mask: Any, of: AttentionScores) -> Any:
    """[B, K, G, S, H], [B, K, T, H], [B, K, T, Hv] -> [B, S, K, G, Hv], as in transformers' `eager`.

    The mask also has the window.
    """
    scores = scores_of(torch.einsum("bkgsh,bkth->bkgst", q, k), of) + mask[:, :, None]
    if of.sinks is None:
        shares = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        scores, sinks = scores.float(), of.sinks.float()[None, :, :, None, None]
        largest = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
        shares = torch.exp(scores - largest)
        shares = shares / (shares.sum(dim=-1, keepdim=True) + torch.exp(sinks - largest))
    return torch.einsum("bkgst,bkth->bskgh", shares.to(q.dtype), v)
