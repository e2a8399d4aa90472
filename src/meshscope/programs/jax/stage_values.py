"""What pipeline stages send beside the residual stream: what layers of later stages read of earlier layers.

These are embeddings of the layers that follow the first stage, the positions that an indexer chose, and the
cache entries of the step that layers of later stages share. A stage keeps received entries in its own cache,
in a slot of their kind of layer that it does not use.

Shapes: b rows of a microbatch, S positions of this step, T positions attended to, L layers, E width of an
embedding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshscope.model.layers import Layer
from meshscope.plans.stages import StageRun, StageSends, caches_before, shared_slot
from meshscope.programs.jax.decoder import Decoder
from meshscope.programs.jax.numerics import Array
from meshscope.programs.jax.state import LayerCache

StageValues = dict[
    str, Any
]  # "inputs" [b, S, L, E] of layers, "chosen" [b, S, T], "caches" by kind and name


@dataclass(frozen=True, slots=True, kw_only=True)
class StageExchange:
    """Reads and writes what the stages of a decoder send; `positions` are those of the step."""

    decoder: Decoder
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
        """Received values, with zeros for the embeddings of the first stage's layers."""
        if "inputs" not in values:
            return values
        n_first = self.decoder.model.n_layers - self.sends.n_inputs
        before = ((0, 0), (0, 0), (n_first, 0), (0, 0))
        return {**values, "inputs": jnp.pad(values["inputs"], before)}

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

    def cut(self, values: StageValues) -> StageValues:
        """The arrays that travel: without the embeddings of the first stage's layers."""
        if "inputs" not in values:
            return values
        return {**values, "inputs": values["inputs"][:, :, -self.sends.n_inputs :]}

    @staticmethod
    def inputs_of(values: StageValues, run: StageRun, stage: Array) -> Array | None:
        """The embeddings [b, S, layers, E] of the layers of this stage."""
        if "inputs" not in values:
            return None
        n_layers = len(run.kinds)
        first = run.first_layer + (stage - run.stages[0]) * n_layers
        return lax.dynamic_slice_in_dim(values["inputs"], first, n_layers, axis=2)

    def _entries(self, cache: Any, first_row: Array | int) -> Mapping[str, Mapping[str, Array]]:
        stored, n = self.decoder.context.stored, self.n_sequences
        return {
            kind.name: stored(self._layer_cache(cache, kind, first_row), self.positions, n_rows=n)
            for kind in self.sends.caches
        }

    def _layer_cache(self, cache: Any, kind: Layer, first_row: Array | int) -> LayerCache:
        context, positions = self.decoder.context, self.positions
        return LayerCache(
            arrays=cache[kind.name],
            start=context.slot(positions),
            index=shared_slot(self.decoder.model, kind, self.decoder.n_stages),
            is_local=context.is_local(positions),
            first_row=first_row,
        )
