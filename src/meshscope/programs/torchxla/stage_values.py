"""What pipeline stages send beside the residual stream: what layers of later stages read of earlier layers.

These are the positions that an indexer chose, and the keys and values of the step that layers of later stages share.
As in the JAX program (`programs/jax/stage_values.py`), a stage writes those that it receives to the cache of a layer
that it does not have. All stages compute the embeddings of layers, so these are not sent.

Shapes: m sequences of a micro-batch, S positions of this step on one device, T positions attended to, K key and value
heads, H width of a head.
"""

# pyright: reportMissingImports=false
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla

from meshscope.events.enums import Phase
from meshscope.programs.torchxla.configs import LAYER_TYPES
from meshscope.programs.torchxla.staged_caches import ARRAYS, StageArrays, StageLayer
from meshscope.spec.experiment import Experiment
from meshscope.spec.model.model import Layer
from meshscope.spec.plan.context_form import cache_slots
from meshscope.spec.plan.stages import StageRun, StageSends, caches_before, shared_slot, stage_sends

# The residual stream, "chosen" [m, S, T], and keys and values [m, K, S, H] of kinds of layers.
Values = dict[str, Any]
CHOSEN = "chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierValues:
    """Reads and writes what stages send in one phase; `caches` are those of layers, by index."""

    experiment: Experiment
    phase: Phase
    caches: Sequence[StageArrays]

    @property
    def sends(self) -> StageSends:
        """What the stages send."""
        return stage_sends(self.experiment.model, self.experiment.plan.pp)

    def empty(self, n_sequences: int, n_positions: int) -> Values:
        """Zeros for `n_sequences` m and `n_positions` S, which the first stage gets."""
        values, device = Values(), torch_xla.device()
        if self.sends.has_choice:
            shape = (n_sequences, n_positions, self._n_chosen)
            values[CHOSEN] = torch.zeros(shape, dtype=torch.bool, device=device)
        for kind in self.sends.caches:
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

    def chosen(self, values: Values, mask: Any) -> Any:
        """The received choice among all slots of `mask` [1, 1, S, T], of which prefill sends those of the prompt."""
        if CHOSEN not in values:
            return None
        n_more = 0 if self.experiment.plan.cp > 1 else mask.shape[-1] - self._n_chosen
        return torch.nn.functional.pad(values[CHOSEN], (0, n_more))

    def sent(self, values: Values, run: StageRun, chosen: Any) -> Values:
        """The values for the next stage, after the layers of this one."""
        sent = dict(values)
        if CHOSEN in values:
            sent[CHOSEN] = chosen[..., : self._n_chosen]
        for kind in self.sends.caches:
            slot = shared_slot(self.experiment.model, kind, self.experiment.plan.pp)
            if run.kinds.count(kind) > slot:
                cache = self._source(kind)
                for name, new in zip(ARRAYS, cache.new, strict=True):
                    sent[_name(kind, name)] = new.to(cache.local[name].dtype)
        return sent

    @property
    def _n_chosen(self) -> int:
        """The positions among which an indexer chooses on one device: a prompt, or all slots in decode."""
        plan, workload = self.experiment.plan, self.experiment.workload
        is_prefill = self.phase is Phase.PREFILL
        return workload.prompt if is_prefill else cache_slots(plan, workload)

    def _source(self, kind: Layer) -> StageLayer:
        """The cache of the last layer of a kind, which later layers share."""
        layers = self.experiment.model.layers
        cache = self.caches[len(layers) - 1 - layers[::-1].index(kind)]
        assert isinstance(cache, StageLayer)
        return cache


def _name(kind: Layer, array: str) -> str:
    return f"{kind.name}.{array}"
