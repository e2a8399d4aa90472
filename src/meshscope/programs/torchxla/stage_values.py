"""What pipeline stages send beside the residual stream: what layers of later stages read of earlier layers.

These are the keys and values of the step that layers of later stages share.
As in the JAX program (`programs/jax/stage_values.py`), a stage writes those that it receives to the cache of a layer
that it does not have. All stages compute the embeddings of layers, so these are not sent.

Shapes: m sequences of a micro-batch, S positions of this step on one device, K key and value heads, H width of a head.
"""

# pyright: reportMissingImports=false
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla

from meshscope.model.layers import Layer
from meshscope.plans.experiment import Experiment
from meshscope.plans.stages import StageRun, caches_before, shared_slot, stage_sends
from meshscope.programs.torchxla.configs import LAYER_TYPES
from meshscope.programs.torchxla.staged_caches import ARRAYS, StageLayer

Values = dict[str, Any]  # the residual stream, and keys and values [m, K, S, H] of kinds of layers


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierValues:
    """Reads and writes what stages send; `caches` are those of layers, by index."""

    experiment: Experiment
    caches: Sequence[StageLayer]

    @property
    def kinds(self) -> tuple[Layer, ...]:
        """The kinds of layers whose keys and values the stages send."""
        return stage_sends(self.experiment.model, self.experiment.plan.pp).caches

    def empty(self, n_sequences: int, n_positions: int) -> Values:
        """Zeros for `n_sequences` m and `n_positions` S, which the first stage gets."""
        values, device = Values(), torch_xla.device()
        for kind in self.kinds:
            for name in ARRAYS:
                held = self._source(kind).local[name]
                shape = (n_sequences, held.shape[1], n_positions, held.shape[3])
                values[_name(kind, name)] = torch.zeros(shape, dtype=held.dtype, device=device)
        return values

    def shared(self, values: Values, run: StageRun, rows: Any) -> dict[str, tuple[Any, Any]]:
        """The keys and values by kind that layers of these stages share with earlier stages; writes them to the cache."""
        shared: dict[str, tuple[Any, Any]] = {}
        for kind in caches_before(self.experiment.model, run.first_layer):
            cache = self._source(kind)
            cache.start(rows)
            received = (values[_name(kind, name)] for name in ARRAYS)
            shared[LAYER_TYPES[kind.attention]] = cache.update(*received)
        return shared

    def sent(self, values: Values, run: StageRun) -> Values:
        """The values for the next stage, after the layers of this one."""
        sent = dict(values)
        for kind in self.kinds:
            slot = shared_slot(self.experiment.model, kind, self.experiment.plan.pp)
            if run.kinds.count(kind) > slot:
                cache = self._source(kind)
                for name, new in zip(ARRAYS, cache.new, strict=True):
                    sent[_name(kind, name)] = new.to(cache.local[name].dtype)
        return sent

    def _source(self, kind: Layer) -> StageLayer:
        """The cache of the last layer of a kind, which later layers share."""
        layers = self.experiment.model.layers
        return self.caches[len(layers) - 1 - layers[::-1].index(kind)]


def _name(kind: Layer, array: str) -> str:
    return f"{kind.name}.{array}"
