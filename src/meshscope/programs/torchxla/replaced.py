"""Modules of transformers in a form that can be split, and in a fixed shape.

The experts of gpt-oss have columns [E, D, 2F] that alternate between gate and up; here they are as in other families.

Compressed attention of DeepSeek-V4 has a window, and entries of earlier positions. transformers collects keys and
entries in arrays that grow, which a program for all steps cannot have. The arrays and their order match the JAX
program (`programs/jax/compressed.py`): ring buffers of the latest positions, and in decode the entry of the current
window is computed again in every step. Heads are split over tp; keys, entries and the indexer are the same on all
its devices. The indexer of sparse layers gives a mask. transformers scatters indices into one, which a TPU does
element by element; here the mask selects the scores above the lowest of the best, as in the JAX program.

DeepSeek-V4 also has several residual streams, whose products keep sequences and positions apart.

Shapes: B batch, S positions of this step, T keys or entries, N heads or streams, H width of a head, E entries, M the
positions in an entry, C channels of a position (twice an entry's if entries include the window before), G groups of
heads, I width of a group, R rank of a group.
"""

# pyright: reportMissingImports=false

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from meshscope.events.enums import Part
from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.mechanisms.compressed import CompressedAttention, compressed_of
from meshscope.programs.jax.attention import AttentionScores
from meshscope.programs.jax.numerics import MASKED, causal_mask
from meshscope.programs.torchxla.caching import States
from meshscope.programs.torchxla.context import PartialSoftmax, partial_softmax
from meshscope.programs.torchxla.tensors import Replacement, Tensors, scope

Keys = tuple[Any, Any]  # keys [B, T, H], which are also the values, and their mask [.., S, T]


class EntryAttention(Replacement):
    """The attention of one layer of DeepSeek-V4, which replaces the module of transformers."""

    def __init__(
        self,
        replaced: Any,
        kind: AttentionKind,
        of: CompressedAttention,
        tensors: Tensors,
        decoder: Any,
    ) -> None:
        super().__init__(
            replaced, "q_a_proj", "q_a_norm", "q_b_proj", "q_b_norm", "kv_proj", "kv_norm"
        )
        self.keep(replaced, "o_a_proj", "o_b_proj", "sinks", "compressor")
        self.layer_idx, self.kind, self.of = replaced.layer_idx, kind, of
        if self.compressor is not None:
            del self.compressor.rotary_emb
            if kind is AttentionKind.COMPRESSED_SPARSE:
                del self.compressor.indexer.rotary_emb
        self.tensors = tensors
        self._around = (decoder,)  # in a tuple, so it is not a submodule

    def forward(
        self,
        hidden_states: Any,
        position_embeddings: dict[str, tuple[Any, Any]],
        position_ids: Any,
        past_key_values: Any,
        **_: Any,
    ) -> tuple[Any, None]:
        """[B, S, D] -> [B, S, D], and the arrays of the cache's layer replaced."""
        x, positions = hidden_states, position_ids[0]
        is_plain = self.kind is AttentionKind.SLIDING
        cos, sin = position_embeddings["main" if is_plain else "compress"]
        states: States = past_key_values.layers[self.layer_idx]
        q_latent = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(q_latent).reshape(*x.shape[:2], -1, self.of.head_dim)
        q = self.tensors.by_heads(apply_rotary_pos_emb(self.q_b_norm(q), cos, sin, unsqueeze_dim=2))
        now = positions if self.tensors.is_decode else None
        kv = apply_rotary_pos_emb(self.kv_norm(self.kv_proj(x))[:, None], cos, sin)[:, 0]
        states.write_latest("window", kv, now)
        places = positions
        if now is not None:
            kv = states.arrays["window"].to(x.dtype)
            # Negative before the first position.
            places = now - (now - torch.arange(kv.shape[1], device=x.device)) % kv.shape[1]
        seen = causal_mask(positions, places, self.of.window) & (places >= 0)
        parts: list[Keys] = [(kv, seen)]
        if not is_plain:
            parts += self._entries(x, q_latent, states, positions, (cos, sin))
        out = self._attended(q, parts)
        # Values rotate like keys; this rotates back.
        out = self.tensors.by_heads(apply_rotary_pos_emb(out, cos, -sin, unsqueeze_dim=2))
        weight = self.o_a_proj.weight.reshape(self.of.n_groups, self.of.group_rank, -1)
        out = self.tensors.by_heads(out.reshape(*x.shape[:2], self.of.n_groups, -1))
        out = self.tensors.by_heads(torch.einsum("bsgi,gri->bsgr", out, weight))
        return self.o_b_proj(out.reshape(*x.shape[:2], -1)), None

    def _whole(self, x: Any) -> Any:
        layouts = self.tensors.layouts
        return self.tensors.annotate(x, (layouts.data, *((),) * (x.dim() - 1)))

    def _attended(self, q: Any, parts: list[Keys]) -> Any:
        """Attention of q [B, S, N, H] to the parts, with the sinks of heads."""
        annotate, layouts = self.tensors.annotate, self.tensors.layouts
        heads = layouts.axes("tp")
        scores = AttentionScores(scale=self.of.head_dim**-0.5)
        grouped = annotate(q.transpose(1, 2)[:, None], (layouts.data, (), heads, (), ()))
        partials = [
            partial_softmax(grouped, kv[:, None], kv[:, None], seen[..., None, None, :, :], scores)
            for kv, seen in parts
        ]
        sinks = annotate(self.sinks[None], ((), heads)).float()[..., None]
        out = reduce(PartialSoftmax.merged, partials).with_sinks(sinks).mean
        return self.tensors.by_heads(out[:, 0].transpose(1, 2).to(q.dtype))

    def _entries(
        self, x: Any, q_latent: Any, states: States, positions: Any, angles: tuple[Any, Any]
    ) -> list[Keys]:
        """The entries of complete windows that queries see; none before the first one."""
        indexer: Any = getattr(self.compressor, "indexer", None)
        of = self.of.indexer
        entries = self._compressed("entry", self.compressor, x, states, positions)
        keys: Any = indexer and self._compressed("index", indexer, x, states, positions)
        if not entries.shape[1]:
            return []
        n_full = (positions + 1) // self._rate
        seen = torch.arange(entries.shape[1], device=x.device) < n_full[:, None]
        if indexer is not None:
            q = self._whole(indexer.q_b_proj(q_latent).reshape(*x.shape[:2], of.n_heads, -1))
            # In this order of dimensions no operation is also one of the layer's queries, which tp splits.
            q = self._whole(apply_rotary_pos_emb(q.transpose(1, 2), *angles).transpose(1, 2))
            weights = self._whole(indexer.scorer.weights_proj(x)).float() * of.n_heads**-0.5
            scores = torch.einsum("bsnh,bth->bsnt", q.float(), keys.float()) * of.head_dim**-0.5
            scores = torch.einsum("bsn,bsnt->bst", weights, torch.relu(scores))
            scores = self._whole(torch.where(seen, scores, MASKED))
            seen = seen & best(scores, of.top_k)
        return [(entries, seen)]

    @property
    def _rate(self) -> int:
        return self.of.entry_rate(self.kind)

    def _compressed(self, name: str, of: Any, x: Any, states: States, positions: Any) -> Any:
        """Entries [B, E, H] of the prompt, or in decode all of the cache."""
        parts, is_decode = (of.kv_proj(x), of.gate_proj(x)), self.tensors.is_decode
        names = [f"{name}_kv", f"{name}_gate"]
        for part, new in zip(names, parts, strict=True):
            states.write_latest(part, new, positions if is_decode else None)
        if not is_decode:
            kv, gate = (_windows(y, self._rate) for y in parts)
            entries = self._pooled(of, kv, gate, torch.arange(kv.shape[1], device=x.device))
            states.write(name, entries)
            return entries
        # The windows [B, E, M, C] of the ring buffers, the current one last.
        kv, gate = (_windows(states.arrays[part].to(x.dtype), self._rate) for part in names)
        n_windows, now = kv.shape[1], positions // self._rate
        order = (now + 1 + torch.arange(n_windows, device=x.device)) % n_windows
        windows = now - torch.arange(n_windows - 1, -1, -1, device=x.device)
        kv, gate = (y.index_select(1, order) for y in (kv, gate))
        states.write(name, self._pooled(of, kv, gate, windows)[:, -1:], windows[-1:])
        return states.arrays[name].to(x.dtype)

    def _pooled(self, of: Any, kv: Any, gate: Any, windows: Any) -> Any:
        """Entries [B, E, H] of windows [B, E, M, C] with numbers [E]: weighted sums, normed and rotated."""
        width = of.kv_norm.weight.shape[0]
        gate = gate + of.position_bias
        if kv.shape[-1] > width:  # the first channels belong to the entry after this one
            before = [
                torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1)[..., :width]
                for y in (kv, gate)
            ]
            before[1] = torch.where((windows > 0)[:, None, None], before[1], MASKED)
            kv, gate = (
                torch.cat([first, y[..., width:]], dim=2)
                for first, y in zip(before, (kv, gate), strict=True)
            )
        shares = torch.softmax(gate.float(), dim=2).to(kv.dtype)
        entries = of.kv_norm((kv * shares).sum(dim=2))
        cos, sin = self._around[0].rotary_emb(
            entries, (windows * self._rate)[None], layer_type="compress"
        )
        return apply_rotary_pos_emb(entries[:, None], cos, sin)[:, 0]


def _windows(x: Any, rate: int) -> Any:
    """The complete windows, [B, S, C] -> [B, E, M, C]."""
    n_windows = x.shape[1] // rate
    return x[:, : n_windows * rate].reshape(x.shape[0], n_windows, rate, x.shape[-1])


def best(scores: Any, n_best: int) -> Any:
    """The mask [B, S, T] of the `n_best` highest scores; ties go to the first."""
    n_best = min(n_best, scores.shape[-1])
    least = torch.topk(scores, n_best, dim=-1).values[..., -1:]
    is_above, is_equal = scores > least, scores == least
    n_left = n_best - is_above.sum(dim=-1, keepdim=True)
    return is_above | (is_equal & (torch.cumsum(is_equal.int(), dim=-1) <= n_left))


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
