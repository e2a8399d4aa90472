"""DeepSeek-V4.1 token by token in plain NumPy, float32: an oracle for its programs.

Written from the published description of the model (technical report and inference/model.py of
deepseek-ai/DeepSeek-V4.1-Flash), with nothing of the programs: keys of the config, tensors [out, in], lists of keys and
entries. Rows of n-gram tables are given, as their hashes have constants of the tokenizer.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

Array = Any
F32 = np.float32


def normed(x: Array, eps: float) -> Array:
    return (x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps)).astype(F32)


def sigmoid(x: Array) -> Array:
    return (1 / (1 + np.exp(-x))).astype(F32)


def rounded(x: Array, n_each: int, dtype: Any, largest_exponent: int | None) -> Array:
    """Through the stored form: groups with a power of two, or with an e4m3 scale that makes the largest number 6."""
    groups = x.reshape(-1, n_each).astype(F32)
    most = np.abs(groups).max(axis=1, keepdims=True)
    if largest_exponent is None:
        scale = (most / F32(6)).astype(ml_dtypes.float8_e4m3fn).astype(F32)
    else:
        scale = np.exp2(np.floor(np.log2(np.maximum(most, 1e-37))) - largest_exponent).astype(F32)
    limit = float(ml_dtypes.finfo(dtype).max)
    inner = np.clip(groups / np.where(scale == 0, 1, scale), -limit, limit)
    return (inner.astype(dtype).astype(F32) * scale).reshape(x.shape)


def as_window(x: Array) -> Array:
    return rounded(x, 32, ml_dtypes.float8_e4m3fn, 8)


def as_entry(x: Array) -> Array:
    return rounded(x, 16, ml_dtypes.float4_e2m1fn, None)


def as_index(x: Array) -> Array:
    return rounded(x, 32, ml_dtypes.float4_e2m1fn, 2)


class Oracle:
    """One sequence; `step` takes its tokens in order and returns logits, or None for tokens that only pass half."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tensor: Callable[[str], Array],
        rows: Callable[[int, list[int]], Array],
        n_prompt: int,
    ) -> None:
        self.c, self.tensor, self.rows = config, tensor, rows
        n = config["num_hidden_layers"]
        self.first = config["candidate_source_layer_id"]
        self.n_replayed_from = max(0, n_prompt - config["sliding_window"])
        self.windows: list[list[Array]] = [[] for _ in range(n)]
        self.open: list[list[tuple[Array, Array]]] = [[] for _ in range(n)]
        self.entries: dict[int, list[Array]] = {}
        self.keys: dict[int, list[Array]] = {}
        self.ids: list[int] = []

    def w(self, layer: int, name: str) -> Array:
        return self.tensor(f"model.layers.{layer}.{name}")

    def source(self, layer: int, key: str) -> int:
        return max(one for one in self.c[key] if one <= layer)

    def ratio(self, layer: int) -> int:
        return self.c["compress_ratios"][layer]

    def rotated(self, x: Array, position: int, layer: int, *, back: bool = False) -> Array:
        c, width = self.c, self.c["qk_rope_head_dim"]
        has_entries = self.ratio(layer) > 0
        theta = c["compress_rope_theta"] if has_entries else c.get("rope_theta", 10000)
        frequencies = theta ** (-np.arange(0, width, 2) / width)
        yarn = c.get("rope_scaling")
        if has_entries and yarn:

            def channel(turns: float) -> float:
                positions = yarn["original_max_position_embeddings"] / (turns * 2 * np.pi)
                return width * np.log(positions) / (2 * np.log(theta))

            low = max(np.floor(channel(yarn["beta_fast"])), 0)
            high = min(np.ceil(channel(yarn["beta_slow"])), width - 1)
            span = max(high - low, 0.001)
            ramp = np.clip((np.arange(width // 2) - low) / span, 0, 1)
            frequencies = frequencies / yarn["factor"] * ramp + frequencies * (1 - ramp)
        angle = F32(position) * frequencies.astype(F32) * (-1 if back else 1)
        out = x.astype(F32).copy()
        even, odd = x[..., -width::2], x[..., -width + 1 :: 2]
        out[..., -width::2] = even * np.cos(angle) - odd * np.sin(angle)
        out[..., -width + 1 :: 2] = odd * np.cos(angle) + even * np.sin(angle)
        return out

    def step(self, token: int) -> Array | None:
        c, position = self.c, len(self.ids)
        self.ids.append(token)
        streams = np.repeat(self.tensor("model.embed_tokens.weight")[token][None], c["hc_mult"], 0)
        pre = np.eye(c["hc_mult"], dtype=F32)[0]
        chosen: dict[int, list[int]] = {}
        for layer in range(c["num_hidden_layers"]):
            if layer in c["engram_layer_ids"]:
                streams = self.with_engram(streams, layer)
            if layer == self.first and position < self.n_replayed_from:
                x = normed(pre @ streams, c["rms_norm_eps"]) * self.w(layer, "attn_norm.weight")
                self.make_entry(x, position, layer)
                return None
            attention = partial(self.attention, position=position, layer=layer, chosen=chosen)
            streams, pre = self.block(streams, pre, layer, "attn", attention)
            experts = partial(self.experts, layer=layer)
            streams, pre = self.block(streams, pre, layer, "ffn", experts)
        out = normed(pre @ streams, c["rms_norm_eps"]) * self.tensor("model.norm.weight")
        return self.tensor("head.weight") @ out

    def block(self, streams: Array, pre: Array, layer: int, name: str, inner: Any) -> Any:
        c, n = self.c, self.c["hc_mult"]
        flat = normed(streams.reshape(-1), c["rms_norm_eps"])
        of = self.w(layer, f"hc_{name}_fn") @ flat
        scale, base = self.w(layer, f"hc_{name}_scale"), self.w(layer, f"hc_{name}_base")
        of = of * np.repeat(scale, [n, n, n * n]) + base
        new_pre = sigmoid(of[:n]) + F32(c["hc_eps"])
        post = 2 * sigmoid(of[n : 2 * n])
        comb = np.exp(of[2 * n :].reshape(n, n))
        comb = comb / comb.sum(axis=1, keepdims=True) + F32(c["hc_eps"])
        comb = comb / (comb.sum(axis=0, keepdims=True) + c["hc_eps"])
        for _ in range(c["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(axis=1, keepdims=True) + c["hc_eps"])
            comb = comb / (comb.sum(axis=0, keepdims=True) + c["hc_eps"])
        x = normed(pre @ streams, c["rms_norm_eps"]) * self.w(layer, f"{name}_norm.weight")
        out = inner(x)
        return (comb.T @ streams + post[:, None] * out[None]).astype(F32), new_pre

    def make_entry(self, x: Array, position: int, layer: int) -> None:
        eps, ratio = self.c["rms_norm_eps"], self.ratio(layer)
        value = self.w(layer, "attn.compressor.wkv.weight") @ x
        if ratio > 1:
            gate = self.w(layer, "attn.compressor.wgate.weight") @ x
            self.open[layer].append((value, gate))
            if len(self.open[layer]) < ratio:
                return
            values, gates = (np.stack(part) for part in zip(*self.open[layer], strict=True))
            self.open[layer] = []
            shares = np.exp(gates - gates.max(axis=0))
            value = (values * shares / shares.sum(axis=0)).sum(axis=0)
        entry = normed(value, eps) * self.w(layer, "attn.compressor.norm.weight")
        key = normed(self.w(layer, "attn.indexer.wk.weight") @ entry, eps)
        key = key * self.w(layer, "attn.indexer.k_norm.weight")
        start = position - ratio + 1
        self.entries.setdefault(layer, []).append(as_entry(self.rotated(entry, start, layer)))
        self.keys.setdefault(layer, []).append(as_index(self.rotated(key, start, layer)))

    def choose(self, x: Array, q_latent: Array, position: int, layer: int, chosen: Any) -> None:
        c, source = self.c, self.source(layer, "kv_source_layer_ids")
        keys = self.keys.get(source, [])
        q = (self.w(layer, "attn.indexer.wq_b.weight") @ q_latent).reshape(c["index_n_heads"], -1)
        q = as_index(self.rotated(q, position, layer))
        weights = self.w(layer, "attn.indexer.weights_proj.weight") @ x
        scale = c["index_head_dim"] ** -0.5 * c["index_n_heads"] ** -0.5
        scores = [float((np.maximum(q @ key, 0) * weights).sum() * scale) for key in keys]
        candidates = list(range(len(keys)))
        if layer > self.first:
            candidates = chosen["candidates"]
        best = sorted(candidates, key=lambda e: -scores[e])[: c["index_topk"]]
        chosen["entries"] = sorted(best)
        if layer == self.first:
            size = c["candidate_block_size"]
            blocks = {e // size for e in candidates}
            newest = max(blocks)
            worth = {b: max(scores[b * size : b * size + size]) for b in blocks}
            order = sorted(blocks, key=lambda b: (b != newest, -worth[b]))
            kept = order[: c["candidate_topk_blocks"]]
            chosen["candidates"] = [e for e in candidates if e // size in kept]

    def attention(self, x: Array, position: int, layer: int, chosen: Any) -> Array:
        c, eps, has_entries = self.c, self.c["rms_norm_eps"], self.ratio(layer) > 0
        n_heads, width = c["num_attention_heads"], c["head_dim"]
        q_latent = normed(self.w(layer, "attn.wq_a.weight") @ x, eps)
        q_latent = q_latent * self.w(layer, "attn.q_norm.weight")
        q = (self.w(layer, "attn.wq_b.weight") @ q_latent).reshape(n_heads, width)
        q = self.rotated(q, position, layer)
        kv = normed(self.w(layer, "attn.wkv.weight") @ x, eps) * self.w(
            layer, "attn.kv_norm.weight"
        )
        window = self.windows[layer]
        window.append(as_window(self.rotated(kv, position, layer)))
        del window[: -c["sliding_window"]]
        keys = list(window)
        if layer in c["kv_source_layer_ids"]:
            self.make_entry(x, position, layer)
        if layer in c["index_source_layer_ids"]:
            self.choose(x, q_latent, position, layer, chosen)
        if has_entries:
            entries = self.entries.get(self.source(layer, "kv_source_layer_ids"), [])
            keys += [entries[e] for e in chosen["entries"]]
        every = np.stack(keys)
        scores = q @ every.T * F32(width**-0.5)
        sink = self.w(layer, "attn.attn_sink")
        most = np.maximum(scores.max(axis=1), sink)
        weights = np.exp(scores - most[:, None])
        weights = weights / (weights.sum(axis=1) + np.exp(sink - most))[:, None]
        out = self.rotated(weights @ every, position, layer, back=True)
        groups = out.reshape(c["o_groups"], -1)
        wo_a = self.w(layer, "attn.wo_a.weight").reshape(c["o_groups"], c["o_lora_rank"], -1)
        low = np.einsum("gri,gi->gr", wo_a, groups)
        return self.w(layer, "attn.wo_b.weight") @ low.reshape(-1)

    def experts(self, x: Array, layer: int) -> Array:
        c, limit = self.c, self.c["swiglu_limit"]

        def gated(base: str) -> Array:
            gate, up = (self.w(layer, f"{base}.{one}.weight") @ x for one in ("w1", "w3"))
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            return self.w(layer, f"{base}.w2.weight") @ (gate * sigmoid(gate) * up)

        logits = self.w(layer, "ffn.gate.weight") @ x
        scores = np.sqrt(np.logaddexp(0, logits))
        best = np.argsort(-(scores + self.w(layer, "ffn.gate.bias")), kind="stable")
        best = best[: c["num_experts_per_tok"]]
        shares = scores[best] / scores[best].sum() * c["routed_scaling_factor"]
        routed = sum(s * gated(f"ffn.experts.{e}") for s, e in zip(shares, best, strict=True))
        return (routed + gated("ffn.shared_experts")).astype(F32)

    def with_engram(self, streams: Array, layer: int) -> Array:
        eps, n, d = self.c["rms_norm_eps"], *streams.shape
        table = self.w(layer, "engram.embed.weight")
        rows = table[self.rows(layer, self.ids)].reshape(-1)
        out = (self.w(layer, "engram.wkv.weight") @ rows).reshape(n + 1, d)
        keys, value = out[:n], out[n]
        keys = normed(keys, eps) * self.w(layer, "engram.k_weight")
        queries = normed(streams, eps) * self.w(layer, "engram.q_weight")
        product = (keys * queries).sum(axis=1) / np.sqrt(d)
        gate = sigmoid(np.sign(product) * np.sqrt(np.abs(product)))
        return streams + gate[:, None] * value[None]
