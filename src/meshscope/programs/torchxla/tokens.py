"""The order of tokens in mixtures of experts if cp splits a prompt: those of one device stay together.

Mixtures of transformers merge sequences and positions into one dimension. If a device has a block of each of
several sequences, its tokens are not neighbors there, and the partitioner would gather them.

Shapes: B batch, S positions, d devices of the data axis, c of cp, b sequences and s positions of one device.
"""

# pyright: reportMissingImports=false
from dataclasses import dataclass
from typing import Any

from meshscope.events.enums import Part, Phase
from meshscope.model.layers import Layer, MlpKind
from meshscope.plans.experiment import Experiment
from meshscope.programs.torchxla.layouts import Layouts
from meshscope.programs.torchxla.tensors import Tensors, scope


def token_axes(experiment: Experiment, phase: Phase, layouts: Layouts) -> tuple[str, ...]:
    """The mesh axes that split the tokens of mixtures, outermost first."""
    # Experts beside an MLP read the residual stream themselves, in its order.
    is_beside = any(layer.mlp is MlpKind.DENSE_AND_MOE for layer in experiment.model.layers)
    has_blocks = phase is Phase.PREFILL and not is_beside
    return (*layouts.data, *layouts.axes("cp")) if has_blocks else layouts.data


def order_tokens(
    block: Any, layer: Layer, experiment: Experiment, phase: Phase, tensors: Tensors
) -> None:
    """Reorder the inputs and the output of a layer's block by hooks if it is a mixture whose tokens cp splits."""
    axes = token_axes(experiment, phase, tensors.layouts)
    plan = experiment.plan
    is_together = (
        plan.pp > 1 or axes == tensors.layouts.data
    )  # stages have the tokens of a device only
    if is_together or not layer.has_experts:
        return
    n_sequences = experiment.workload.batch
    order = _Order(
        tensors=tensors, n_sequences=n_sequences, n_groups=plan.data_size, n_blocks=plan.cp
    )
    block.register_forward_pre_hook(order.before)
    block.register_forward_hook(order.behind)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """The order in which the tokens of each device are together, for one mixture."""

    tensors: Tensors
    n_sequences: int
    n_groups: int
    n_blocks: int

    def before(self, _module: Any, given: Any) -> Any:
        """The inputs of the mixture, reordered."""
        with scope(Part.MOE_ROUTER.value):
            return tuple(self._together(x) for x in given)

    def behind(self, _module: Any, _given: Any, output: Any) -> Any:
        """The output of the mixture, as the residual stream has it."""
        with scope(Part.MOE_COMBINE.value):
            if isinstance(output, tuple):
                return (self._apart(output[0]), *output[1:])
            return self._apart(output)

    def _together(self, x: Any) -> Any:
        """[B, S, ...] -> [d * c, b * s, ...]."""
        layouts, rest = self.tensors.layouts, ((),) * (x.dim() - 2)
        data, context = layouts.data, layouts.axes("cp")
        sizes = (self.n_groups, x.shape[0] // self.n_groups, self.n_blocks, -1)
        x = self.tensors.annotate(x.reshape(*sizes, *x.shape[2:]), (data, (), context, (), *rest))
        x = self.tensors.annotate(x.transpose(1, 2), (data, context, (), (), *rest))
        x = x.reshape(self.n_groups * self.n_blocks, -1, *x.shape[4:])
        return self.tensors.annotate(x, ((*data, *context), (), *rest))

    def _apart(self, x: Any) -> Any:
        """[d * c, b * s, D] -> [B, S, D]."""
        layouts = self.tensors.layouts
        data, context = layouts.data, layouts.axes("cp")
        n_tokens, n_sequences = x.shape[0] * x.shape[1], self.n_sequences
        n_each = n_sequences // self.n_groups
        x = x.reshape(self.n_groups, self.n_blocks, n_each, -1, x.shape[-1])
        x = self.tensors.annotate(x, (data, context, (), (), ()))
        x = self.tensors.annotate(x.transpose(1, 2), (data, (), context, (), ()))
        x = x.reshape(n_sequences, n_tokens // n_sequences, -1)
        return self.tensors.annotate(x, (data, context, ()))
