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

from meshscope.events.enums import Part
from meshscope.model.arrays import Dim
from meshscope.model.mechanisms.mixture import Activation
from meshscope.plans.dispatch import exchange_axes
from meshscope.plans.plan import Plan
from meshscope.programs.torchxla.layouts import Spec
from meshscope.programs.torchxla.tensors import (
    Tensors,
    all_gather,
    all_reduce,
    all_to_all,
    gathered,
    scope,
)

NAME = "meshscope_experts"


def register_experts(tensors: Tensors) -> str:
    """Register the plan's dispatch with transformers; returns its name."""
    mixture = _Mixture(tensors)
    is_exchanged = bool(exchange_axes(tensors.experiment.plan))
    dispatch = mixture.exchanged if is_exchanged else mixture.everywhere
    registry.ALL_EXPERTS_FUNCTIONS.register(NAME, dispatch)
    return NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """The experts' weights: [E, 2, F, D] and [E, D, F]; biases [E, 2, F] and [E, D], or None."""

    gates: Any
    downs: Any
    gate_bias: Any
    down_bias: Any


@dataclass(frozen=True, slots=True)
class _Mixture:
    """One phase's experts, with all tokens on all their devices or exchanged in a manual region over all devices."""

    tensors: Tensors

    @property
    def _plan(self) -> Plan:
        return self.tensors.experiment.plan

    def _weights(self, module: Any) -> _Weights:
        gates, gate_bias, down_bias = gathered(module.gate_up_proj), None, None
        if hasattr(module, "gate_up_proj_bias"):
            gate_bias, down_bias = module.gate_up_proj_bias, module.down_proj_bias
            gate_bias = gate_bias.reshape(gate_bias.shape[0], 2, -1)
        return _Weights(
            gates=gates.reshape(gates.shape[0], 2, -1, gates.shape[2]),
            downs=gathered(module.down_proj),
            gate_bias=gate_bias,
            down_bias=down_bias,
        )

    def _gated(self, module: Any, gate: Any, up: Any) -> Any:
        moe = self.tensors.experiment.model.moe
        assert moe is not None
        if (limit := moe.activation_limit) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        if moe.activation is Activation.CLAMPED_SWIGLU:
            return (up + 1) * gate * torch.sigmoid(gate * module.alpha)
        return module.act_fn(gate) * up

    def everywhere(self, module: Any, x: Any, chosen: Any, shares: Any) -> Any:
        """[T, D] -> [T, D]: all experts process all tokens, and the partitioner reduces their outputs."""
        tensors, layouts = self.tensors, self.tensors.layouts
        of_tokens = layouts.data
        of_experts, of_ffn = layouts.split(Dim.EXPERT), layouts.split(Dim.EXPERT_FFN)
        with scope(Part.MOE_EXPERTS.value):
            weights = self._weights(module)
            inner = torch.einsum("td,ehfd->ethf", x, weights.gates)
            if weights.gate_bias is not None:
                inner = inner + weights.gate_bias[:, None]
            inner = self._gated(module, inner[:, :, 0], inner[:, :, 1])
            # [E, T, F] is sharded like the weights.
            tensors.annotate(inner, (of_experts, of_tokens, of_ffn))
        with scope(Part.MOE_COMBINE.value):
            # The experts: all [E], or the local ones [e] in a manual region.
            local = torch.arange(module.num_experts, device=torch_xla.device())
            if tensors.is_inside and of_experts:
                local = tensors.entered(local, (of_experts,))
            hot = (chosen[..., None] == local).to(x.dtype)
            share_of = (hot * shares.to(x.dtype)[..., None]).sum(dim=1)  # [T, E]
            # Weighting first lets one product sum over experts and their width, so the partitioner
            # reduces [T, D] instead of [E, T, D].
            inner = inner * share_of.t()[..., None]
            out = torch.einsum("etf,edf->td", inner, weights.downs)
            if weights.down_bias is not None:
                out = out + torch.einsum("te,ed->td", share_of, weights.down_bias)
            return tensors.annotate(out, (of_tokens, ()))

    def exchanged(self, module: Any, x: Any, chosen: Any, shares: Any) -> Any:
        """[T, D] -> [T, D]; tokens are split over the axes of the exchange and the data axis."""
        if self.tensors.is_inside:  # in a pipeline stage all tensors are local
            return self._of_stage(module, x, chosen, shares)
        n_tokens = x.shape[0]
        layouts, entered = self.tensors.layouts, self.tensors.entered
        axes = layouts.data
        for tensor in (x, chosen, shares):  # else the region's sharding propagates to attention
            self.tensors.annotate(tensor, (axes, ()))
        has_tp = "tp" in exchange_axes(self._plan)
        of_tokens = (*axes, *(layouts.axes("tp") if has_tp else ()))
        missing = -n_tokens % layouts.n_parts(of_tokens)
        x, shares = _padded(x, missing), _padded(shares, missing)
        chosen = _padded(chosen, missing, module.num_experts)  # no expert
        tokens: Spec = (of_tokens, ())
        with scope(Part.MOE_DISPATCH.value):
            x, shares = entered(x, tokens), entered(shares, tokens)
            chosen = entered(chosen, tokens)
        with scope(Part.MOE_EXPERTS.value):
            weights = self._entered(self._weights(module))
        out = self._local(module, x, chosen, shares, weights)
        with scope(Part.MOE_COMBINE.value):
            out = self.tensors.left(out, tokens)
            out = out[:n_tokens] if missing else out
            return self.tensors.annotate(out, (axes, ()))

    def _of_stage(self, module: Any, x: Any, chosen: Any, shares: Any) -> Any:
        """[t, D] -> [t, D] in a manual region; if tp is in the exchange, each of its devices routes some tokens.

        With sp, a device has only its residual stream's tokens.
        """
        plan = self._plan
        with scope(Part.MOE_EXPERTS.value):
            weights = self._weights(module)
        if self.tensors.streams.split_dim is not None or "tp" not in exchange_axes(plan):
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
        plan = self._plan
        return plan.tp > 1 and "tp" not in plan.expert_axes

    def _local(self, module: Any, x: Any, chosen: Any, shares: Any, weights: _Weights) -> Any:
        """[t, D] -> [t, D] on one device."""
        plan, device = self._plan, torch_xla.device()
        n_tokens, n_active = chosen.shape
        n_experts = module.num_experts
        groups = self.tensors.groups(*exchange_axes(plan))
        moe, n_ranks = self.tensors.experiment.model.moe, len(groups[0])
        assert moe is not None
        n_slots = moe.n_slots(n_tokens, self.tensors.experiment.capacity_factor)
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
            out = torch.einsum("ecf,edf->ecd", self._gated(module, gate, up), weights.downs)
            if weights.down_bias is not None:
                out = out + weights.down_bias[:, None]
            out = out.reshape(out.shape[0], n_ranks, n_slots, -1).transpose(0, 1)
        with scope(Part.MOE_COMBINE.value):
            back = all_to_all(out.reshape(n_ranks, -1, out.shape[-1]), groups)
            back = _padded(back.reshape(nowhere, -1), 1)[place]  # [t*K, D]
            weighted = back.reshape(n_tokens, n_active, -1) * shares.to(back.dtype)[..., None]
            summed = weighted.sum(dim=1)
            # In a stage, partial sums of all experts are added up after the block.
            is_summed = self._is_partial and not self.tensors.is_inside
            return all_reduce(summed, self.tensors.groups("tp")) if is_summed else summed


def _padded(x: Any, n_more: int, value: float = 0) -> Any:
    """Rows x [T, ...] and more rows of one value."""
    if not n_more:
        return x
    more = torch.full((n_more, *x.shape[1:]), value, dtype=x.dtype, device=x.device)
    return torch.cat([x, more])
