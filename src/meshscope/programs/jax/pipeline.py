"""Pipeline parallelism: one program for all stages, which pass microbatches to each other.

Source: GPipe (Huang et al., arXiv 1811.06965). The program loops over ticks. In each tick, a stage
with a microbatch takes the branch with its layers, and an idle stage an empty branch; then all stages
send their activations to the next, idle ones too. All devices of a stage take the same branch, so collectives inside
a branch are safe.

Stages also send what layers of later stages read of earlier layers: embeddings of the layers after the
first stage, the positions that an indexer chose, and the cache entries of the step that later layers share, which a
stage keeps in its own cache, in a slot of their kind of layer that it does not use.

Shapes: B batch, S positions of this step, D residual width (streams times residual width with
hyper-connections), V vocabulary; b local batch, m local microbatch, P stages; T positions attended to,
L layers, E width of an embedding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshscope.events.enums import Part
from meshscope.model.layers import Layer, unrolled
from meshscope.plans.stages import (
    StageRun,
    StageSends,
    caches_before,
    n_ticks,
    shared_slot,
    stage_sends,
)
from meshscope.programs.jax.collectives import ShardLayout, scope
from meshscope.programs.jax.decoder import Decoder, StepInputs
from meshscope.programs.jax.numerics import Array
from meshscope.programs.jax.state import LayerCache

# "inputs" [b, S, L, E] of layers, "chosen" [b, S, T], "caches" by kind and name.
StageValues = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageExchange:
    """Reads and writes what the stages of a decoder send; `positions` are the step's."""

    decoder: Decoder
    stage: Array
    sends: StageSends
    positions: Array
    n_sequences: int

    def empty(self, x: Array, cache: Any, tokens: Array) -> StageValues:
        """Zeros of all arrays, for a microbatch of tokens [b, S] with the residual stream x."""
        values: StageValues = {}
        inputs = self.decoder.model.layer_inputs
        if inputs is not None:
            shape = (*x.shape[:-1], self.sends.n_inputs, inputs.width)
            values["inputs"] = jnp.zeros(shape, x.dtype)
        if self.sends.has_choice:
            values["chosen"] = self.decoder.none_chosen(cache, self.positions, tokens)
        if self.sends.caches:
            values["caches"] = self._entries(cache, 0)
        return values

    def whole(self, values: StageValues) -> StageValues:
        """Received values, with zeros for the embeddings of the first stage's layers, which do not travel."""
        if "inputs" not in values:
            return values
        n_first = self.decoder.model.n_layers - self.sends.n_inputs
        before = ((0, 0), (0, 0), (n_first, 0), (0, 0))
        return {**values, "inputs": jnp.pad(values["inputs"], before)}

    def cut(self, values: StageValues) -> StageValues:
        """The inverse of `whole`."""
        if "inputs" not in values:
            return values
        return {**values, "inputs": values["inputs"][:, :, -self.sends.n_inputs :]}

    def received(self, cache: Any, values: StageValues, run: StageRun, first_row: Array) -> Any:
        """The cache with the entries that layers of these stages, or of later ones, share."""
        for kind in caches_before(self.decoder.model, run.first_layer):
            entries = self._layer_cache(cache, kind, first_row)
            new = values["caches"][kind.name]
            written = self.decoder.context.written(entries, new, self.positions)
            cache = {**cache, kind.name: dict(written.arrays)}
        return cache

    def sent(
        self, cache: Any, values: StageValues, chosen: Array | None, first_row: Array
    ) -> StageValues:
        """The `whole` values for the next stage, after the layers of this one."""
        if self.sends.has_choice:
            values = {**values, "chosen": chosen}
        if self.sends.caches:
            values = {**values, "caches": self._entries(cache, first_row)}
        return values

    def _entries(self, cache: Any, first_row: Array | int) -> Mapping[str, Mapping[str, Array]]:
        stored, n = self.decoder.context.stored, self.n_sequences
        return {
            kind.name: stored(self._layer_cache(cache, kind, first_row), self.positions, n_rows=n)
            for kind in self.sends.caches
        }

    def _layer_cache(self, cache: Any, kind: Layer, first_row: Array | int) -> LayerCache:
        index = shared_slot(self.decoder.model, kind, self.decoder.n_stages)
        return self.decoder.context.layer_cache(
            cache[kind.name], self.positions, index=index, first_row=first_row
        )


# Received activations [m, S, D] and other values, cache, last positions [b, 1, D].
_Carry = tuple[Array, StageValues, Any, Array]
_Branch = Callable[[Array, StageValues, Any], tuple[Array, StageValues, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProgram:
    """A decoder in stages; each of `runs` is a range of stages with the same layer kinds."""

    decoder: Decoder
    layout: ShardLayout
    n_stages: int
    runs: tuple[StageRun, ...]
    n_microbatches: int
    is_scanned: bool

    def step(self, weights: Mapping[str, Any], tokens: Array, cache: Any, position: Array) -> Any:
        """Next tokens [b], logits [1, b, V] (valid on the last stage) and the new cache, as `Decoder.step` on local arrays.

        Weights and cache are stacked by kind of layer and cover the layers of the local stage.
        """
        decoder, n_parts = self.decoder, self.n_microbatches
        given: Any = tokens if isinstance(tokens, Mapping) else {"tokens": tokens}
        tokens = given["tokens"]
        with scope(decoder.phase.value):
            stage = lax.axis_index("pp")
            ticks = jnp.arange(n_ticks(n_parts, self.n_stages))
            rows = decoder.rows(tokens)
            parts = rows.reshape(n_parts, -1, rows.shape[1])
            positions = decoder.context.positions(position, tokens.shape[1])
            outer = decoder.outer(weights)
            with scope(Part.EMBED):  # all stages have a part of the tables
                of_tables, cache = decoder.table_inputs(outer, cache, rows, given)
            inputs = StepInputs(
                positions=positions, tokens=parts[0], of_tables=of_tables, outer=outer
            )
            exchange = StageExchange(
                decoder=decoder,
                stage=stage,
                sends=stage_sends(decoder.model, self.n_stages),
                positions=positions,
                n_sequences=parts[0].size // positions.shape[0],
            )

            def tick(carry: _Carry, time: Array) -> tuple[_Carry, None]:
                return self._tick(carry, time - stage, weights, parts, exchange, inputs), None

            shape = [*parts.shape[1:], decoder.model.hidden]
            if self.layout.split_dim is not None:
                shape[self.layout.split_dim] //= self.layout.plan.tp
            x = decoder.residual.empty(tuple(shape), decoder.weights.dtype)
            shape = [n_parts * shape[0], 1, shape[2]]
            lasts = decoder.residual.empty(tuple(shape), decoder.weights.dtype)
            start = (x, exchange.empty(x, cache, parts[0]), cache, lasts)
            (_, _, cache, lasts), _ = lax.scan(tick, start, ticks)
            logits = self._logits(weights, lasts, stage, rows.shape[0])
            with scope(Part.SAMPLE):
                next_tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
                is_last = stage == self.n_stages - 1
                next_tokens = lax.psum(jnp.where(is_last, next_tokens, 0), "pp")
        return next_tokens, logits[None], cache

    def _tick(  # noqa: PLR0913, PLR0917  what a step consists of
        self,
        carry: _Carry,
        index: Array,
        weights: Mapping[str, Any],
        parts: Array,
        exchange: StageExchange,
        inputs: StepInputs,
    ) -> _Carry:
        """One tick; `index` is the microbatch of this stage, out of range if the stage is idle.

        The last stage is idle only before its first microbatch, which overwrites the last positions of idle ticks.
        """
        (x, values, cache, lasts), stage = carry, exchange.stage
        is_busy = (index >= 0) & (index < self.n_microbatches)
        index = jnp.clip(index, 0, self.n_microbatches - 1)

        def embedded(_: Array, values: StageValues) -> tuple[Array, StageValues]:
            with scope(Part.EMBED):
                outer = self.decoder.outer(weights)
                rows = self.decoder.embedded(outer.matrix("embed"), parts[index])
                inputs = self.decoder.layer_inputs(outer, rows, parts[index])
            x = self.decoder.residual.expand(rows)
            return x, values if inputs is None else {**values, "inputs": inputs}

        def received(x: Array, values: StageValues) -> tuple[Array, StageValues]:
            return x, exchange.whole(values)

        def idle(x: Array, values: StageValues, cache: Any) -> tuple[Array, StageValues, Any]:
            return x, values, cache

        with scope(stages_scope(range(1))), scope(self._microbatch_scope):
            x, values = lax.cond(is_busy & (stage == 0), embedded, received, x, values)
        first_row = index * exchange.n_sequences
        given = (weights, exchange, replace(inputs, tokens=parts[index]), first_row)
        branches = [idle, *(self._branch(run, *given) for run in self.runs)]
        run_of = [number for number, run in enumerate(self.runs) for _ in run.stages]
        branch = jnp.where(is_busy, 1 + jnp.array(run_of)[stage], 0)
        x, values, cache = lax.switch(branch, branches, x, values, cache)
        lasts = jax.tree.map(
            lambda all_, one: lax.dynamic_update_slice_in_dim(
                all_, one[:, -1:], index * one.shape[0], axis=0
            ),
            lasts,
            x,
        )
        with scope(stages_scope(range(self.n_stages - 1))), scope(Part.STAGE):
            pairs = [(sender, sender + 1) for sender in range(self.n_stages - 1)]
            sent = (x, exchange.cut(values))
            x, values = jax.tree.map(lambda array: lax.ppermute(array, "pp", pairs), sent)
        return x, values, cache, lasts

    @property
    def _microbatch_scope(self) -> str:
        return f"microbatches{self.n_microbatches}of{n_ticks(self.n_microbatches, self.n_stages)}"

    def _branch(
        self,
        run: StageRun,
        weights: Mapping[str, Any],
        exchange: StageExchange,
        inputs: StepInputs,
        first_row: Array,
    ) -> _Branch:
        n_layers, model = len(run.kinds), self.decoder.model
        layers = range(run.first_layer, run.first_layer + n_layers)
        repeats = model.repeats(layers) if self.is_scanned else unrolled(run.kinds, first=layers[0])
        decoder = replace(self.decoder, repeats=repeats, first_row=first_row)
        inputs = inputs.of_part(first_row // exchange.n_sequences, self.n_microbatches)

        def branch(x: Array, values: StageValues, cache: Any) -> tuple[Array, StageValues, Any]:
            stages = stages_scope(run.stages, n_layers=n_layers)
            with scope(stages), scope(self._microbatch_scope):
                cache = exchange.received(cache, values, run, first_row)
                chosen, of_layers = values.get("chosen"), None
                if chosen is None:
                    chosen = decoder.none_chosen(cache, exchange.positions, inputs.tokens)
                if "inputs" in values:
                    first = run.first_layer + (exchange.stage - run.stages[0]) * n_layers
                    of_layers = lax.dynamic_slice_in_dim(values["inputs"], first, n_layers, axis=2)
                given = replace(inputs, of_layers=of_layers)
                start = (x, cache, chosen)
                out, cache, chosen = decoder.layers(start, weights["layers"], given)
                x = jax.tree.map(_at_end, out, x)
                return x, exchange.sent(cache, values, chosen, first_row), cache

        return branch

    def _logits(
        self, weights: Mapping[str, Any], lasts: Array, stage: Array, n_sequences: int
    ) -> Array:
        """[b, 1, D] -> [b, V] on the last stage, zeros on the others."""
        model = self.decoder.model

        def logits(x: Array) -> Array:
            with scope(Part.LM_HEAD):
                outer = self.decoder.outer(weights)
                table = outer.matrix("embed") if model.has_tied_embeddings else None
                return self.decoder.logits(outer, self.decoder.last_hidden(outer, x), table)

        def none(x: Array) -> Array:
            return jnp.zeros((n_sequences, model.vocab), jax.tree.leaves(x)[0].dtype)

        with scope(stages_scope(range(self.n_stages - 1, self.n_stages))):
            return lax.cond(stage == self.n_stages - 1, logits, none, lasts)


def _at_end(x: Array, like: Array) -> Array:
    """X [m, s, ...] of the last tokens of prompts, padded before them to the tokens of `like`."""
    n_missing = like.shape[1] - x.shape[1]
    return jnp.pad(x, ((0, 0), (n_missing, 0), *((0, 0),) * (x.ndim - 2))) if n_missing else x


def stages_scope(stages: range, *, n_layers: int | None = None) -> str:
    """The scope that names the stages of an operation to the readers.

    `stage0`; `stages0-1`; `stages0-1by16` around layers, whose scopes name the first stage's layers:
    each later stage has the next 16 layers.
    """
    if len(stages) == 1:
        return f"stage{stages[0]}"
    by = "" if n_layers is None else f"by{n_layers}"
    return f"stages{stages[0]}-{stages[-1]}{by}"
