"""Experts with static dispatch, registered with transformers: shapes do not depend on the routing.

If the data axis shards the experts, a manual region exchanges rows. Every device has a fixed number
of slots per expert (GShard, arXiv 2006.16668); one all-to-all sends rows to their experts, another
returns them. No row counts are exchanged, and rows without a slot are dropped. Otherwise every
device applies its experts to all tokens of its tp group, weights unselected experts with zero, and
partial sums are reduced.

Shapes: T tokens, D residual width, K experts a token, E experts, e of one device, C slots of an
expert, n devices of the exchange, F width of an expert.
"""

# pyright: reportMissingImports=false
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import transformers.integrations.moe as registry

from meshscope.events.enums import Part, Phase
from meshscope.model.arrays import Dim
from meshscope.model.layers import Layer, MlpKind
from meshscope.model.mechanisms.mixture import Activation, MixtureOfExperts
from meshscope.plans.dispatch import exchange_axes, slots_of_expert
from meshscope.plans.experiment import Experiment
from meshscope.programs.torchxla.layouts import Layouts, Spec, residual_specs
from meshscope.programs.torchxla.tensors import (
    Tensors,
    all_gather,
    all_reduce,
    all_to_all,
    gathered,
    scope,
)

NAME = "meshscope_experts"


def register_experts(experiment: Experiment, phase: Phase, tensors: Tensors) -> str:
    """Register the plan's dispatch with transformers; returns its name."""
    moe = experiment.model.moe
    assert moe is not None
    is_exchanged = bool(exchange_axes(experiment.plan))
    dispatch = (
        _Exchange(experiment=experiment, phase=phase, tensors=tensors) if is_exchanged else None
    )

    axes = token_axes(experiment, phase, tensors.layouts)

    def mixed(module: Any, x: Any, chosen: Any, shares: Any) -> Any:
        if dispatch is None:
            return _everywhere(module, x, chosen, shares, tensors, moe, of_tokens=axes)
        return dispatch(module, x, chosen, shares)

    registry.ALL_EXPERTS_FUNCTIONS.register(NAME, mixed)
    return NAME


def _everywhere(  # noqa: PLR0913, PLR0917  tokens, their routing, the experts
    module: Any,
    x: Any,
    chosen: Any,
    shares: Any,
    tensors: Tensors,
    moe: MixtureOfExperts,
    *,
    of_tokens: tuple[str, ...],
) -> Any:
    """[T, D] -> [T, D]: all experts process all tokens, and the partitioner reduces their outputs."""
    layouts = tensors.layouts
    of_experts, of_ffn = layouts.split(Dim.EXPERT), layouts.split(Dim.EXPERT_FFN)
    with scope(Part.MOE_EXPERTS.value):
        gates, downs = _stacked(module, "gate_up_proj"), gathered(module.down_proj)
        inner = torch.einsum("td,ehfd->ethf", x, gates)
        if moe.has_bias:
            inner = inner + _stacked_bias(module)[:, None]
        inner = _gated(module, inner[:, :, 0], inner[:, :, 1], moe)
        # [E, T, F] is sharded like the weights.
        tensors.annotate(inner, (of_experts, of_tokens, of_ffn))
    with scope(Part.MOE_COMBINE.value):
        hot = (chosen[..., None] == _own_experts(module, tensors)).to(x.dtype)
        share_of = (hot * shares.to(x.dtype)[..., None]).sum(dim=1)  # [T, E]
        # Weighting first lets one product sum over experts and their width, so the partitioner
        # reduces [T, D] instead of [E, T, D].
        inner = inner * share_of.t()[..., None]
        out = torch.einsum("etf,edf->td", inner, downs)
        if moe.has_bias:
            out = out + torch.einsum("te,ed->td", share_of, module.down_proj_bias)
        return tensors.annotate(out, (of_tokens, ()))


def _own_experts(module: Any, tensors: Tensors) -> Any:
    """Indices of the experts: all [E], or the local ones [e] in a manual region."""
    axes = tensors.layouts.split(Dim.EXPERT) if tensors.is_inside else ()
    numbers = torch.arange(module.num_experts, device=torch_xla.device())
    return tensors.entered(numbers, (axes,)) if axes else numbers


def _stacked(module: Any, name: str) -> Any:
    """The fused gate and up weights as [E, 2, F, D]."""
    weight = gathered(getattr(module, name))  # Llama 4's module is not called
    return weight.reshape(weight.shape[0], 2, -1, weight.shape[2])


def _stacked_bias(module: Any) -> Any:
    """The biases of gate and up as [E, 2, F]."""
    bias = module.gate_up_proj_bias
    return bias.reshape(bias.shape[0], 2, -1)


def _gated(module: Any, gate: Any, up: Any, moe: MixtureOfExperts) -> Any:
    limit = moe.activation_limit
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if moe.activation is Activation.CLAMPED_SWIGLU:
        return (up + 1) * gate * torch.sigmoid(gate * module.alpha)
    return module.act_fn(gate) * up


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """The experts' weights on one device: [e, 2, F, D] and [e, D, F]; biases [e, 2, F] and [e, D], or None."""

    gates: Any
    downs: Any
    gate_bias: Any
    down_bias: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """The exchange of rows in a manual region over all devices."""

    experiment: Experiment
    phase: Phase
    tensors: Tensors

    def __call__(self, module: Any, x: Any, chosen: Any, shares: Any) -> Any:
        """[T, D] -> [T, D]; tokens are split over the axes of the exchange and the data axis."""
        if self.tensors.is_inside:  # in a pipeline stage all tensors are local
            return self._of_stage(module, x, chosen, shares)
        n_tokens = x.shape[0]
        layouts, entered = self.tensors.layouts, self.tensors.entered
        axes = token_axes(self.experiment, self.phase, layouts)
        for tensor in (
            x,
            chosen,
            shares,
        ):  # keeps the region's sharding from propagating to attention
            self.tensors.annotate(tensor, (axes, ()))
        missing = -n_tokens % self._n_token_parts
        x, shares = _padded(x, missing), _padded(shares, missing)
        chosen = _padded(chosen, missing, module.num_experts)  # no expert
        tokens: Spec = (self._token_axes, ())
        with scope(Part.MOE_DISPATCH.value):
            x, shares = entered(x, tokens), entered(shares, tokens)
            chosen = entered(chosen, tokens)
        with scope(Part.MOE_EXPERTS.value):
            weights = self._entered(self._stored(module))
        out = self._local(module, x, chosen, shares, weights)
        with scope(Part.MOE_COMBINE.value):
            out = self.tensors.left(out, tokens)
            out = out[:n_tokens] if missing else out
            return self.tensors.annotate(out, (axes, ()))

    def _of_stage(self, module: Any, x: Any, chosen: Any, shares: Any) -> Any:
        """[t, D] -> [t, D] in a manual region; if tp is in the exchange, each of its devices routes a part of the tokens.

        With sp they are those of its residual stream, and no others are here.
        """
        plan = self.experiment.plan
        with scope(Part.MOE_EXPERTS.value):
            weights = self._stored(module)
        has_part = residual_specs(self.experiment, self.phase, self.tensors.layouts).is_split
        if has_part or "tp" not in exchange_axes(plan):
            return self._local(module, x, chosen, shares, weights)
        n_tokens, rank = x.shape[0], self.tensors.rank("tp")

        def of_device(y: Any, no_token: float = 0) -> Any:
            padded = _padded(y, -n_tokens % plan.tp, no_token)
            return padded.reshape(plan.tp, -1, y.shape[1]).index_select(0, rank)[0]

        with scope(Part.MOE_DISPATCH.value):
            x, shares = of_device(x), of_device(shares)
            chosen = of_device(chosen, module.num_experts)  # no expert
        out = self._local(module, x, chosen, shares, weights)
        with scope(Part.MOE_COMBINE.value):
            return all_gather(out, 0, self.tensors.groups("tp"))[:n_tokens]

    def _stored(self, module: Any) -> _Weights:
        assert self.experiment.model.moe is not None
        has_bias = self.experiment.model.moe.has_bias
        return _Weights(
            gates=_stacked(module, "gate_up_proj"),
            downs=gathered(module.down_proj),
            gate_bias=_stacked_bias(module) if has_bias else None,
            down_bias=module.down_proj_bias if has_bias else None,
        )

    def _entered(self, weights: _Weights) -> _Weights:
        """This device's share, with the bias that follows the sum over tp on the first device only."""
        layouts, entered = self.tensors.layouts, self.tensors.entered
        experts, ffn = layouts.split(Dim.EXPERT), layouts.split(Dim.EXPERT_FFN)
        hidden = ()  # fsdp gathers what it split
        gate_bias, down_bias = weights.gate_bias, weights.down_bias
        if down_bias is not None:
            gate_bias = entered(gate_bias, (experts, (), ffn))
            down_bias = entered(down_bias, (experts, hidden))
            if self._is_partial:
                down_bias = down_bias * (self.tensors.rank("tp") == 0).to(down_bias.dtype)
        return _Weights(
            gates=entered(weights.gates, (experts, (), ffn, hidden)),
            downs=entered(weights.downs, (experts, hidden, ffn)),
            gate_bias=gate_bias,
            down_bias=down_bias,
        )

    @property
    def _is_partial(self) -> bool:
        """Whether tp splits each expert, so that its devices add up their outputs."""
        plan = self.experiment.plan
        return plan.tp > 1 and "tp" not in plan.expert_axes

    @property
    def _token_axes(self) -> tuple[str, ...]:
        """The axes that split the tokens: those of mixtures, and tp if the exchange includes it."""
        layouts = self.tensors.layouts
        of_mixture = token_axes(self.experiment, self.phase, layouts)
        has_tp = "tp" in exchange_axes(self.experiment.plan)
        return (*of_mixture, *(layouts.axes("tp") if has_tp else ()))

    @property
    def _n_token_parts(self) -> int:
        n_parts = 1
        for axis in self._token_axes:
            n_parts *= self.tensors.layouts.mesh.size(axis)
        return n_parts

    def _local(self, module: Any, x: Any, chosen: Any, shares: Any, weights: _Weights) -> Any:
        """[t, D] -> [t, D] on one device."""
        plan, device = self.experiment.plan, torch_xla.device()
        n_tokens, n_active = chosen.shape
        n_experts = module.num_experts
        groups = self.tensors.groups(*exchange_axes(plan))
        moe = self.experiment.model.moe
        assert moe is not None
        n_ranks = len(groups[0])
        n_slots = slots_of_expert(moe, n_tokens, self.experiment.capacity_factor)
        with scope(Part.MOE_DISPATCH.value):
            flat = chosen.reshape(-1)
            hot = torch.nn.functional.one_hot(flat, n_experts + 1)[:, :n_experts]
            before = ((torch.cumsum(hot, dim=0) - 1) * hot).sum(dim=1)
            is_kept = (before < n_slots) & (flat < n_experts)
            nowhere = n_experts * n_slots
            place = torch.where(is_kept, flat * n_slots + before, nowhere)  # [t*K]
            # The token in each slot; the last entry takes dropped rows.
            numbers = torch.arange(n_tokens * n_active, device=device) // n_active
            token_of = torch.full((nowhere + 1,), n_tokens, dtype=numbers.dtype, device=device)
            token_of = token_of.scatter(0, place, numbers)[:nowhere]
            rows = _padded(x, 1)[token_of]  # [E*C, D], zeros where a slot is empty
            rows = all_to_all(rows.reshape(n_ranks, -1, rows.shape[1]), groups)
        with scope(Part.MOE_EXPERTS.value):
            # [n, e*C, D] -> [e, n*C, D]
            rows = rows.reshape(n_ranks, -1, n_slots, rows.shape[-1]).transpose(0, 1)
            rows = rows.reshape(rows.shape[0], n_ranks * n_slots, -1)
            gate = torch.einsum("ecd,efd->ecf", rows, weights.gates[:, 0])
            up = torch.einsum("ecd,efd->ecf", rows, weights.gates[:, 1])
            if weights.gate_bias is not None:
                gate = gate + weights.gate_bias[:, None, 0]
                up = up + weights.gate_bias[:, None, 1]
            out = torch.einsum("ecf,edf->ecd", _gated(module, gate, up, moe), weights.downs)
            if weights.down_bias is not None:
                out = out + weights.down_bias[:, None]
            out = out.reshape(out.shape[0], n_ranks, n_slots, -1).transpose(0, 1)
        with scope(Part.MOE_COMBINE.value):
            back = all_to_all(out.reshape(n_ranks, -1, out.shape[-1]), groups)
            back = _padded(back.reshape(nowhere, -1), 1)[place]  # [t*K, D]
            weighted = back.reshape(n_tokens, n_active, -1) * shares.to(back.dtype)[..., None]
            summed = weighted.sum(dim=1)
            # In a stage, partial sums of all experts are added up behind the block.
            is_summed = self._is_partial and not self.tensors.is_inside
            return all_reduce(summed, self.tensors.groups("tp")) if is_summed else summed


def _padded(x: Any, n_more: int, value: float = 0) -> Any:
    """More rows of one value behind those of x [T, ...]."""
    if not n_more:
        return x
    more = torch.full((n_more, *x.shape[1:]), value, dtype=x.dtype, device=x.device)
    return torch.cat([x, more])


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
