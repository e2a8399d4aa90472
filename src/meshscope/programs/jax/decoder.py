"""The decoder of all model families and plans; prefill and decode share all code but attention.

The same code runs on global arrays (partitioned by the compiler) and on local arrays (under
`shard_map`): sizes come from the arrays, never from the model.

Shapes: B batch, S positions of this step, D residual width, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.events.enums import Part, Phase
from meshscope.model.arrays import Weight
from meshscope.model.layers import AttentionKind, Layer, MlpKind, Repeat
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.mechanisms.drafts import DraftHead
from meshscope.model.mechanisms.mixture import XIELU, Activation
from meshscope.model.mechanisms.ngrams import ENGRAM
from meshscope.model.model import Model
from meshscope.plans.stages import shared_slot
from meshscope.programs.jax.attention import PrefillKernel
from meshscope.programs.jax.collectives import MeshCollectives, ShardMapCollectives, scope
from meshscope.programs.jax.compressed import compressed_attention
from meshscope.programs.jax.context_parallel import Context, LayerStep
from meshscope.programs.jax.decode_attention import DecodeKernel
from meshscope.programs.jax.experts import Experts, limited_swiglu
from meshscope.programs.jax.grouped import grouped_attention
from meshscope.programs.jax.latent import latent_attention, seen_positions
from meshscope.programs.jax.linear import kimi_delta_attention, linear_attention
from meshscope.programs.jax.matrix import Matrix
from meshscope.programs.jax.mixture import Mixture
from meshscope.programs.jax.ngrams import hashes, with_convolved_rows, with_rows
from meshscope.programs.jax.numerics import (
    Array,
    layer_norm,
    rms_norm,
    soft_capped,
    unscaled_rms_norm,
)
from meshscope.programs.jax.residual import Residual
from meshscope.programs.jax.reused import prompt_entries, reused_attention
from meshscope.programs.jax.state import LayerCache, LayerWeights
from meshscope.programs.jax.state_space import state_space

# The attention of a layer by its mechanism.
ATTENTION = {
    Mechanism.GROUPED: grouped_attention,
    Mechanism.LINEAR: linear_attention,
    Mechanism.STATE_SPACE: state_space,
    Mechanism.KIMI_DELTA: kimi_delta_attention,
    Mechanism.LATENT: latent_attention,
    Mechanism.COMPRESSED: compressed_attention,
    Mechanism.REUSED: reused_attention,
}

# The residual stream or streams, the cache, and the positions that an indexer chose or what layers share.
Carry = tuple[Any, Any, Any]
TOKENS = "tokens"  # the last ids of each sequence in the cache, for n-grams


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The positions and tokens of a step."""

    positions: Array  # [S]
    tokens: Array  # [B, S] ids
    of_layers: Array | None = None  # [B, S, L, E] embeddings of each layer
    of_tables: Mapping[int, Array] = field(
        default_factory=dict
    )  # [B, S, R*W] rows of n-grams, by layer
    outer: LayerWeights | None = None  # the weights that take these rows in

    def of_part(self, number: Array, n_parts: int) -> "StepInputs":
        """Those with the rows of tables of one of `n_parts` micro-batches."""
        of_tables = {
            layer: rows.reshape(n_parts, -1, *rows.shape[1:])[number]
            for layer, rows in self.of_tables.items()
        }
        return replace(self, of_tables=of_tables)

    def last(self, n: int, n_positions: int) -> "StepInputs":
        """Those of the last `n` of `n_positions`, if only they pass through a layer; no table of ids is in these."""
        positions = n_positions - n + jnp.arange(n)
        return replace(
            self, positions=positions, tokens=jnp.zeros((len(self.tokens), n), jnp.int32)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The decoder of one phase."""

    model: Model
    phase: Phase
    collectives: MeshCollectives
    weights: LayerWeights  # how arrays are stored and read, without arrays
    mixture: Mixture | None
    context: Context
    residual: Residual
    specs: Mapping[str, Mapping[str, Weight]]  # by kind of layer; "" outside the layers
    repeats: tuple[Repeat, ...]  # the layers in loops
    n_stages: int = 1
    first_row: Array | int = 0  # of a chunk or microbatch in the cache
    attention_kernel: PrefillKernel | DecodeKernel | None = None

    def step(
        self, weights: Mapping[str, Any], tokens: Array, cache: Any, position: Array | int
    ) -> Any:
        """One step of the phase: next tokens [B], logits [B, V] and the new cache.

        `tokens` is [B, S], `position` the index of the first one. Decode of several tokens has results for each,
        [B*S]. A draft takes a mapping of `tokens` and the hidden states before them, `hidden` [B, 1, D], and also
        returns one. With tables of n-grams on hosts, the mapping has the rows that a host read, [B, S, R, W]. `weights["layers"]` and `cache` have an entry per layer, or per kind with a leading layer dim.
        """
        outer, hidden = self.outer(weights), None
        given: Any = tokens if isinstance(tokens, Mapping) else {"tokens": tokens}
        tokens, hidden = given["tokens"], given.get("hidden")
        rows = self.rows(tokens)
        with scope(self.phase.value):
            with scope(Part.EMBED):
                table = outer.matrix("embed")
                x = self.embedded(table, rows)
                if hidden is not None and isinstance(self.model.draft_head, DraftHead):
                    drafted = self.collectives.split_activations(hidden.astype(x.dtype))
                    if self.model.draft_head.has_norms:
                        x = self._norm(x, outer("draft_embed_norm"))
                        drafted = self._norm(drafted, outer("draft_hidden_norm"))
                    x = outer.dot(jnp.concatenate([x, drafted], axis=-1), "draft_join")
                of_layers = self.layer_inputs(outer, x, rows)
                of_tables, cache = self.table_inputs(outer, cache, rows, given)
            positions = self.context.positions(position, tokens.shape[1])
            inputs = StepInputs(
                positions=positions,
                tokens=rows,
                of_layers=of_layers,
                of_tables=of_tables,
                outer=outer,
            )
            carry = (self.residual.expand(x), cache, self.none_chosen(cache, positions, rows))
            x, cache, _ = self.layers(carry, weights["layers"], inputs)
            with scope(Part.LM_HEAD):
                if self._has_head:
                    x = self.last_hidden(outer, x)
                    is_tied = self.model.has_tied_embeddings
                    logits = self.logits(outer, x, table if is_tied else None)
                else:
                    logits = jnp.zeros((rows.shape[0], self.model.vocab), self.weights.dtype)
            with scope(Part.SAMPLE):
                next_tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if hidden is not None:
            next_tokens = {"tokens": next_tokens, "hidden": x}
        return next_tokens, logits, cache

    @property
    def _has_head(self) -> bool:
        """Whether a step has logits: not in chunks of prompts without the last tokens, if only they pass all layers."""
        return self.context.ends_prompt or self.model.n_replayed is None

    def rows(self, tokens: Array) -> Array:
        """Tokens [B, S] of a step as the residual stream has them: each decode token is its own row."""
        is_single = self.phase is Phase.PREFILL or tokens.shape[1] == 1
        return tokens if is_single else tokens.reshape(-1, 1)

    def embedded(self, table: Matrix, tokens: Array) -> Array:
        """The embeddings [B, S, D] of tokens."""
        x, scale = self.collectives.embed(table, tokens), self.model.embed_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)

    def layer_inputs(self, outer: LayerWeights, x: Array, tokens: Array) -> Array | None:
        """Inputs [B, S, L, E] of each layer, if any: rows of a table plus a projection of x (Gemma4TextModel of transformers)."""
        inputs = self.model.layer_inputs
        if inputs is None:
            return None
        shape = (*x.shape[:2], -1, inputs.width)
        of_tokens = self.collectives.embed(outer.matrix("layer_embed"), tokens).reshape(shape)
        projected = outer.einsum("bsd,de->bse", x, "layer_embed_proj") * self.model.hidden**-0.5
        normed = self._norm(projected.reshape(shape), outer("layer_embed_norm"))
        return (normed + of_tokens * inputs.width**0.5) * 2**-0.5

    def table_inputs(
        self, outer: LayerWeights, cache: Any, tokens: Array, given: Mapping[str, Array]
    ) -> tuple[dict[int, Array], Any]:
        """Rows of the tables of n-grams by layer, perhaps `given`, and the cache with the last ids; none for most models."""
        engram = self.model.engram
        if engram is None:
            return {}, cache
        names = {layer: f"{ENGRAM}{layer}" for layer in self.model.tables}
        if set(names.values()) & set(given):
            flat = {name: rows.reshape(-1, rows.shape[-1]) for name, rows in given.items()}
            outer = replace(outer, arrays=flat)
            return {
                at: outer(name).reshape(*given[name].shape[:2], -1) for at, name in names.items()
            }, cache
        key = TOKENS if isinstance(cache, Mapping) else len(cache) - 1
        stored, new = cache[key][TOKENS], tokens + 1  # 0 is no token
        if self.context.splits_step:  # n-grams begin in the block before
            new = self.context.gathered(new)
        is_decode = self.phase is Phase.DECODE
        if is_decode:
            before = stored
        elif self.context.n_cached:
            before = lax.dynamic_slice_in_dim(stored, self.first_row, len(new))
        else:
            before = jnp.zeros((len(new), engram.n_orders), new.dtype)
        every = jnp.concatenate([before, new], axis=1)
        last = lax.dynamic_update_slice(stored, every[:, -engram.n_orders :], (self.first_row, 0))
        layers, cache = self.model.tables, _with(cache, key, {TOKENS: last})
        if not layers:
            return {}, cache
        assert isinstance(self.collectives, ShardMapCollectives)
        if self.context.splits_step and "cp" not in self.collectives.plan.table_axes:
            n_local = tokens.shape[1]
            start = self.context.rank * n_local
            every = lax.dynamic_slice_in_dim(every, start, engram.n_orders + n_local, axis=1)
        tables = {layer: outer.matrix(names[layer]) for layer in layers}
        return self.collectives.table_rows(tables, hashes(engram, every, layers)), cache

    def outer(self, weights: Mapping[str, Any]) -> LayerWeights:
        """The weights outside the layers."""
        return replace(self.weights, arrays=weights, specs=self.specs[""])

    def last_hidden(self, outer: LayerWeights, x: Array) -> Array:
        """The residual stream of the last position, [B, S, D] -> [B, D], on all devices of tp and cp."""
        n_end = self.model.n_replayed
        is_whole = n_end is not None and n_end < self.context.n_new
        return self.collectives.last_token(self.residual.collapse(x, outer), is_whole=is_whole)

    def logits(self, outer: LayerWeights, x: Array, table: Matrix | None) -> Array:
        """Logits, [B, D] -> [B, V], without vocabulary padding; `table` is the embedding if the head is tied to it."""
        x = self._norm(x, outer("final_norm")) if "final_norm" in outer else x
        head = outer.matrix("lm_head") if table is None else table
        logits = head.einsum("bd,vd->bv", x)
        scale, softcap = self.model.logit_scale, self.model.logit_softcap
        logits = soft_capped(logits if scale == 1.0 else logits * scale, softcap)
        return self.collectives.logits(logits)[:, : self.model.vocab]

    def _norm(self, x: Array, scale: Array) -> Array:
        if self.model.has_mean_norms:
            return layer_norm(x, scale, None, self.model.norm_eps)
        return rms_norm(x, scale, self.model.norm_eps, offset=self.model.norm_offset)

    def _before(self, x: Array, w: LayerWeights, block: str) -> Array:
        name = f"{block}_norm"
        return self._norm(x, w(name)) if name in w else x

    def _after(self, x: Array, w: LayerWeights, block: str) -> Array:
        name = f"{block}_post_norm"
        return self._norm(x, w(name)) if name in w else x

    def layers(self, carry: Carry, layers: Any, inputs: StepInputs) -> Carry:
        """Runs all layers, repeated ones in loops; `layers` are their weights."""
        n_before: dict[str, int] = {}
        for repeat in self.repeats:
            first = repeat.body[0]
            n_end = self.model.attention_of(first).n_replayed(first.attention, self.context.n_new)
            is_full = first.attention is AttentionKind.DECODER_FULL
            if not self._has_head and not is_full and n_end is not None:
                continue
            carry = self._repeat(carry, layers, inputs, repeat, n_before)
            for layer in repeat.body:
                n_before[layer.name] = n_before.get(layer.name, 0) + repeat.times
        return carry

    def none_chosen(self, cache: Any, positions: Array, tokens: Array) -> Array | None:
        """The mask [B, S, T] of positions before an indexer chooses any; None unless layers share its choice."""
        if not self.model.has(AttentionKind.SHARED):
            return None
        entry = next(iter(cache.values())) if isinstance(cache, Mapping) else cache[0]
        mask = seen_positions(positions, entry["latent"], self.context)[1]
        return jnp.zeros((tokens.size // positions.shape[0], *mask.shape), dtype=bool)

    def _repeat(
        self,
        start: Carry,
        layers: Any,
        inputs: StepInputs,
        repeat: Repeat,
        n_before: Mapping[str, int],
    ) -> Carry:
        names, is_stacked = [layer.name for layer in repeat.body], isinstance(layers, Mapping)

        def body(carry: Carry, time: Array | int) -> tuple[Carry, None]:
            x, cache, chosen = carry
            step_inputs = inputs
            decoder, first = self, repeat.body[0]
            if (n_end := self._n_end(first)) and first.attention is not AttentionKind.DECODER_FULL:
                decoder, step_inputs = self.at_end(inputs, n_end)
            for position, layer in enumerate(repeat.body):
                name = layer.name
                of_kind = n_before.get(name, 0) + time * names.count(name)
                of_kind = of_kind + names[:position].count(name)
                key, index = (name, of_kind) if is_stacked else (repeat.first + position, None)
                with scope(layers_scope(repeat.layers_at(position))):
                    w = replace(
                        self.weights, arrays=layers[key], specs=self.specs[name], index=index
                    )
                    # The entry of an earlier layer, and its index in a stack.
                    if layer.shares_cache:
                        source, every = self.model.cache_layer(layer), self.model.layers
                        key, index = max(n for n, one in enumerate(every) if one == source), None
                        if is_stacked:
                            index = shared_slot(self.model, source, self.n_stages)
                            key = source.name
                    layer_cache = decoder.context.layer_cache(
                        cache[key],
                        step_inputs.positions,
                        index=index,
                        first_row=self.first_row,
                        chosen=chosen,
                        source=self._chosen_from(cache, layer, is_stacked=is_stacked),
                    )
                    if repeat.first in inputs.of_tables:  # a layer of its own
                        with scope(Part.ATTN):
                            given = (w, layer_cache, step_inputs, repeat)
                            x, layer_cache = decoder.with_rows(x, *given)
                    x, layer_cache = decoder.one_layer(x, w, layer_cache, step_inputs, layer)
                    if inputs.of_layers is not None:
                        number = repeat.first - self.repeats[0].first + position
                        number = number + time * len(repeat.body)
                        # The embeddings of the layer, times a gate and projected.
                        with scope(Part.MLP):
                            of_layer = lax.dynamic_index_in_dim(
                                inputs.of_layers, number, axis=2, keepdims=False
                            )
                            gate = jax.nn.gelu(w.dot(x, "layer_input_gate"), approximate=True)
                            out = w.dot(gate * of_layer.astype(x.dtype), "layer_input_out")
                            x = x + self._norm(out, w("layer_input_norm"))
                    if "layer_scale" in w:
                        with scope(_last_part(layer)):
                            x = x * w("layer_scale").astype(x.dtype)
                cache, chosen = _with(cache, key, layer_cache.arrays), layer_cache.chosen
            return (x, cache, chosen), None

        if repeat.times == 1:
            return body(start, 0)[0]
        return lax.scan(body, start, jnp.arange(repeat.times))[0]

    def with_rows(
        self, x: Any, w: LayerWeights, cache: LayerCache, inputs: StepInputs, of: Repeat
    ) -> tuple[Any, LayerCache]:
        """The streams with rows of the table of n-grams before a layer, and the layer's cache."""
        rows, layer = inputs.of_tables[of.first], of.body[0]
        if layer.attention is AttentionKind.NGRAM_LINEAR:
            return with_convolved_rows(x, rows, w, cache, self.layer_step(layer, inputs))
        assert inputs.outer is not None
        (streams, weights), eps = x, self.model.norm_eps
        return (with_rows(streams, rows, inputs.outer, of.first, eps), weights), cache

    def _n_end(self, layer: Layer) -> int | None:
        """The last tokens of a prompt, if only they pass through a layer and the step has more or ends before them."""
        if self.phase is Phase.DECODE:
            return None
        n_new = self.context.n_new
        n_end = self.model.attention_of(layer).n_replayed(layer.attention, n_new)
        return n_end if n_end is not None and (n_end < n_new or not self._has_head) else None

    def at_end(self, inputs: StepInputs, n: int) -> tuple["Decoder", StepInputs]:
        """The decoder of the last `n` tokens of prompts, which all devices of cp have, and its inputs."""
        context = self.context
        inputs = inputs.last(n, context.n_cached + context.n_new)
        return replace(self, context=replace(context, size=1)), inputs

    def layer_step(self, layer: Layer, inputs: StepInputs) -> LayerStep:
        """What the attention of a layer takes."""
        return LayerStep(
            model=self.model,
            layer=layer,
            context=self.context,
            positions=inputs.positions,
            kernel=self.attention_kernel,
        )

    def one_layer(
        self, x: Array, w: LayerWeights, cache: LayerCache, inputs: StepInputs, layer: Layer
    ) -> tuple[Array, LayerCache]:
        """The residual stream or streams after a layer, and its new cache."""
        step = self.layer_step(layer, inputs)
        is_full = layer.attention is AttentionKind.DECODER_FULL
        n_end = self._n_end(layer) if is_full else None
        if n_end:
            assert isinstance(self.collectives, ShardMapCollectives)
            with scope(Part.ATTN):
                h = self._before(self.residual.read(x, w, "attn")[0], w, "attn")
                cache = prompt_entries(self.collectives.gather_activations(h), w, cache, step)
                if not self._has_head:
                    return x, cache
                x = jax.tree.map(partial(self.collectives.last_positions, n=n_end), x)
            decoder, inputs = self.at_end(inputs, n_end)
            step = replace(step, positions=inputs.positions, context=decoder.context)
        if layer.has_attention:
            x, cache = self._attended(x, w, cache, step)
        if self.model.is_parallel or layer.mlp is MlpKind.NONE:
            return x, cache
        return self._feed_forward(x, w, inputs, layer), cache

    def _attended(
        self, x: Array, w: LayerWeights, cache: LayerCache, step: LayerStep
    ) -> tuple[Array, LayerCache]:
        """The residual stream after attention, and after an MLP in parallel with it, and the new cache."""
        attend = ATTENTION[self.model.attention_of(step.layer).mechanism]
        with scope(Part.ATTN):
            h, add = self.residual.read(x, w, "attn")
            inner = self.collectives.gather_activations(self._before(h, w, "attn"))
            h, cache = attend(inner, w, cache, step)
            if not self.model.is_parallel:
                out = w.biased(self.collectives.reduce_output(h), "bo")
                return add(self._after(out, w, "attn")), cache
        with scope(Part.MLP):
            most = step.layer.limits[1]
            out = self.collectives.reduce_output(h + _mlp(inner, w, self.model, most))
            return add(w.biased(out, "bo")), cache

    def _feed_forward(self, x: Array, w: LayerWeights, inputs: StepInputs, layer: Layer) -> Array:
        with scope(Part.MLP if layer.has_mlp else Part.MOE_ROUTER):
            h, add = self.residual.read(x, w, "mlp")
        out: Any = None
        if layer.has_mlp:
            with scope(Part.MLP):
                inner = self.collectives.gather_activations(self._before(h, w, "mlp"))
                out = self.collectives.reduce_output(_mlp(inner, w, self.model, layer.limits[1]))
                out = w.biased(out, "b_down")
        if layer.has_experts:
            if out is not None:  # else XLA may merge the reductions of both
                out, h = lax.optimization_barrier((out, h))
            assert self.mixture is not None
            with scope(Part.MOE_ROUTER):  # router and experts may each scale what it normed
                eps, has_scales = self.model.norm_eps, self.mixture.experts.moe.has_scales
                h = unscaled_rms_norm(h, eps) if has_scales else self._before(h, w, "mlp")
            experts = replace(self.mixture.experts, limits=layer.limits)
            of_experts = replace(self.mixture, experts=experts)(h, w, inputs.tokens)
            with scope(Part.MOE_COMBINE):
                if out is None:
                    out = of_experts
                else:
                    dense = self._norm(out, w("dense_post_norm"))
                    out = dense + self._norm(of_experts, w("experts_post_norm"))
        with scope(_last_part(layer)):
            return add(self._after(out, w, "mlp"))

    def _chosen_from(self, cache: Any, layer: Layer, *, is_stacked: bool) -> LayerCache | None:
        """The cache of the layer that made the entries of a layer that chooses again, in decode."""
        if layer.attention is not AttentionKind.DECODER_REINDEX or self.phase is Phase.PREFILL:
            return None
        kinds = [one.attention for one in self.model.layers]
        number = kinds.index(AttentionKind.DECODER_FULL)
        key, index = (self.model.layers[number].name, 0) if is_stacked else (number, None)
        return LayerCache(arrays=cache[key], start=0, index=index)


def _last_part(layer: Layer) -> Part:
    return Part.MOE_COMBINE if layer.has_experts else Part.MLP


def layers_scope(layers: range) -> str:
    """The scope that names layers to the readers: `layer3`, `layers0-31`, or `layers1-35by2` for every second one."""
    if len(layers) == 1:
        return f"layer{layers[0]}"
    by = "" if layers.step == 1 else f"by{layers.step}"
    return f"layers{layers[0]}-{layers[-1]}{by}"


def _mlp(x: Array, w: LayerWeights, model: Model, most: float | None) -> Array:
    activation = model.activation
    if activation is Activation.RELU2:
        return w.dot(jnp.square(jax.nn.relu(w.dot(x, "w_up"))), "w_down")
    if activation is Activation.XIELU:  # arXiv 2411.13010, as in transformers
        up = w.dot(x, "w_up")
        p, n, beta, eps = (w(f"xielu_{name}").astype(up.dtype) for name in XIELU)
        below = (jnp.expm1(jnp.minimum(up, eps)) - up) * (beta + jax.nn.softplus(n))
        inner = jnp.where(up > 0, jax.nn.softplus(p) * up * up, below) + beta * up
        return w.dot(inner, "w_down")
    gate, up = (w.biased(w.dot(x, f"w_{name}"), f"b_{name}") for name in ("gate", "up"))
    if activation is Activation.GEGLU:
        return w.dot(jax.nn.gelu(gate, approximate=True) * up, "w_down")
    if activation in {Activation.LIMITED_SWIGLU, Activation.CLAMPED_SWIGLU}:  # as experts
        assert model.moe is not None
        return w.dot(Experts(moe=model.moe, weights=w).gated(gate, up, None), "w_down")
    return w.dot(limited_swiglu(gate, up, most), "w_down")


def _with(cache: Any, key: Any, arrays: Mapping[str, Array]) -> Any:
    if isinstance(cache, Mapping):
        return {**cache, key: dict(arrays)}
    return [dict(arrays) if index == key else entry for index, entry in enumerate(cache)]
