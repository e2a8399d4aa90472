"""Linear attention by the gated delta rule, with its matrices split by heads and its state as an argument.

transformers joins queries, keys, values and gates in one matrix and convolves them as one array. Splitting rows
of the whole would not split each part by heads, so the parts are separate here. The rule is that of the JAX
program (`programs/jax/linear.py`); as in transformers, a prompt is a sequence of chunks without a loop.

Shapes: B batch, S positions of this step, D residual width, N key heads, V value heads, K width of a key,
H width of a value, C positions of a chunk, W positions of the convolution.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from meshscope.events.enums import Phase
from meshscope.model.mechanisms.linear import LINEAR_CHUNK, LinearAttention
from meshscope.programs.torchxla.tensors import Tensors

L2_EPS = 1e-6  # of transformers' l2norm
CONVOLVED = ("conv_q", "conv_k", "conv_v")
STATE = "state"
# Products of more than one batch dimension: merging those would hide from the partitioner how they are split.
PRODUCT, OVERLAP = "nbvce,nbveh->nbvch", "nbvck,nbvek->nbvce"
NEVER = -1e30  # the logarithm of a decay to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """How arrays of linear attention are split in one phase: heads over tp."""

    phase: Phase
    tensors: Tensors

    def by_heads(self, x: Any) -> Any:
        """Annotates an array [B, S, heads, ...]."""
        layouts = self.tensors.layouts
        spec = (layouts.data, (), layouts.axes("tp"), *((),) * (x.dim() - 3))
        return self.tensors.annotate(x, spec)


class Channels(torch.nn.Module):
    """The weights [heads * width, W] of one part of the convolution."""

    def __init__(self, n_channels: int, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(n_channels, width))

    def forward(self, n_heads: int) -> Any:
        """The weights [heads, width, W]."""
        return self.weight.reshape(n_heads, -1, self.weight.shape[-1])


class DeltaAttention(torch.nn.Module):
    """Linear attention of one layer of Qwen3-Next or Qwen3.5, which replaces the module of transformers."""

    def __init__(self, replaced: Any, n_inputs: int, of: LinearAttention) -> None:
        super().__init__()
        keys, values = of.n_key_heads * of.key_dim, of.n_value_heads * of.value_dim
        sizes = {"q": keys, "k": keys, "v": values, "z": values}
        sizes |= dict.fromkeys("ba", of.n_value_heads)
        # By the tensors of the checkpoint, of which these are parts.
        for tensor, parts in (
            ("qkvz", "qkvz"),
            ("ba", "ba"),
            ("qkv", "qkv"),
            ("z", "z"),
            ("b", "b"),
            ("a", "a"),
        ):
            if not hasattr(replaced, f"in_proj_{tensor}"):
                continue
            linears = {p: torch.nn.Linear(n_inputs, sizes[p], bias=False) for p in parts}
            whole = torch.nn.ModuleDict(linears) if len(parts) > 1 else linears[parts]
            self.add_module(f"in_proj_{tensor}", whole)
        self.is_fused = hasattr(replaced, "in_proj_qkvz")
        channels = dict(zip(CONVOLVED, (keys, keys, values), strict=True))
        self.conv1d = torch.nn.ModuleDict(
            {name: Channels(size, of.conv_width) for name, size in channels.items()}
        )
        self.A_log, self.dt_bias = replaced.A_log, replaced.dt_bias
        self.norm, self.out_proj = replaced.norm, replaced.out_proj
        self.layer_idx, self.of = replaced.layer_idx, of
        self.placing: Placing | None = None

    def forward(self, hidden_states: Any, cache_params: Any, **_: Any) -> Any:
        """[B, S, D] -> [B, S, D], and the states of the cache's layer replaced."""
        x, of, placing = hidden_states, self.of, self.placing
        assert placing is not None
        projected = {
            letter: placing.by_heads(self._linear(letter)(x).reshape(*x.shape[:2], n_heads, -1))
            for letter, n_heads in self._heads().items()
        }
        steps = torch.nn.functional.softplus(projected["a"].float()[..., 0] + self.dt_bias.float())
        arrays = {name: projected[name[-1]] for name in CONVOLVED} | {
            "rate": torch.sigmoid(projected["b"].float())[..., 0],
            "log_decay": -torch.exp(self.A_log.float()) * steps,
        }
        weights = {name: self.conv1d[name](arrays[name].shape[2]) for name in CONVOLVED}
        step = DeltaStep(of=of, placing=placing, weights=weights)
        states = cache_params.layers[self.layer_idx]
        out, states.arrays = step(arrays, states.arrays)
        out = self.norm(placing.by_heads(out).to(x.dtype), projected["z"])
        return self.out_proj(placing.by_heads(out).reshape(*x.shape[:2], -1))

    def _heads(self) -> dict[str, int]:
        n_keys, n_values = self.of.n_key_heads, self.of.n_value_heads
        return {"q": n_keys, "k": n_keys} | dict.fromkeys("vzba", n_values)

    def _linear(self, letter: str) -> Any:
        """The projection to queries, keys, values, gates, rates (b) or decays (a)."""
        joined = ("qkvz" if letter in "qkvz" else "ba") if self.is_fused else "qkv"
        if letter in joined:
            return getattr(self, f"in_proj_{joined}")[letter]
        return getattr(self, f"in_proj_{letter}")


Arrays = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaStep:
    """Convolutions and delta rule of one layer in one step; `weights` [heads, width, W] are those of the convolutions.

    Arrays are the inputs [B, S, heads, width] of the convolutions by name, and `rate` and `log_decay` [B, S, V].
    States are the last inputs [B, heads, W - 1, width] of the convolutions by name, and `state` [B, V, K, H].
    """

    of: LinearAttention
    placing: Placing
    weights: Arrays

    def __call__(self, arrays: Arrays, states: Arrays) -> tuple[Any, Arrays]:
        """The output [B, S, V, H] in float32, and the new states."""
        of, by_heads = self.of, self.placing.by_heads
        inputs = {name: arrays[name] for name in CONVOLVED}
        before, new = self._before(inputs, states)
        q, k, v = (self._convolved(name, x, before[name]) for name, x in inputs.items())
        q, k = (_l2_normed(y).repeat_interleave(of.group, dim=2) for y in (q, k))
        q, v = q * of.key_dim**-0.5, v.float()
        given = [by_heads(y) for y in (q, k, v, arrays["log_decay"], arrays["rate"])]
        state = states[STATE]
        if self.placing.phase is Phase.PREFILL:
            state = q.new_zeros(v.shape[0], v.shape[2], of.key_dim, of.value_dim)
        rule: Callable[..., tuple[Any, Any]] = delta_step if q.shape[1] == 1 else chunked_delta_rule
        out, new[STATE] = rule(*given, state)
        return out, {name: new[name] for name in states}

    def _before(self, inputs: Arrays, states: Arrays) -> tuple[Arrays, Arrays]:
        """The W - 1 inputs [B, W - 1, heads, width] before those of this step, and the last ones as states."""
        before, new = {}, {}
        for name, x in inputs.items():
            before[name] = x.new_zeros(x.shape[0], self.of.conv_width - 1, *x.shape[2:])
            if self.placing.phase is Phase.DECODE:
                before[name] = states[name].to(x.dtype).transpose(1, 2)
            every = self.placing.by_heads(torch.cat([before[name], x], dim=1))
            new[name] = every[:, x.shape[1] :].transpose(1, 2).to(states[name].dtype)
        return before, new

    def _convolved(self, name: str, x: Any, before: Any) -> Any:
        """SiLU of the causal convolution of x [B, S, heads, width] after the inputs before it."""
        inputs = self.placing.by_heads(torch.cat([before, x], dim=1))
        weight, n_new = self.weights[name], x.shape[1]
        width = weight.shape[-1]
        parts = [inputs[:, at : at + n_new] * weight[..., at] for at in range(width)]
        return self.placing.by_heads(torch.nn.functional.silu(reduce(torch.add, parts)))


def _l2_normed(x: Any) -> Any:
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) + L2_EPS)


def delta_step(  # noqa: PLR0913, PLR0917  as the rule over a prompt
    q: Any, k: Any, v: Any, log_decay: Any, rate: Any, state: Any
) -> tuple[Any, Any]:
    """One position, [B, 1, V, K], [B, 1, V, H], [B, 1, V] and the state [B, V, K, H], all float32.

    Returns the output [B, 1, V, H] and the new state.
    """
    q, k, v, log_decay, rate = (y[:, 0] for y in (q, k, v, log_decay, rate))
    state = state * torch.exp(log_decay)[..., None, None]
    predicted = (state * k[..., None]).sum(dim=-2)
    correction = (v - predicted) * rate[..., None]
    state = state + k[..., None] * correction[..., None, :]
    return (state * q[..., None]).sum(dim=-2)[:, None], state


def chunked_delta_rule(  # noqa: PLR0913, PLR0917  three projections, two gates and the state
    q: Any, k: Any, v: Any, log_decay: Any, rate: Any, state: Any
) -> tuple[Any, Any]:
    """As `delta_step` for S positions; only the state passes from chunk to chunk."""
    n_positions = q.shape[1]
    q, k, v, log_decay, rate = (_chunks(y) for y in (q, k, v, log_decay, rate))
    total = torch.cumsum(log_decay, dim=-1)
    places = torch.arange(LINEAR_CHUNK, device=q.device)
    is_before = places[None, :] <= places[:, None]
    between = total[..., :, None] - total[..., None, :]
    decay = torch.exp(torch.where(is_before, between, NEVER))
    learned = k * rate[..., None]
    overlap = torch.einsum(OVERLAP, learned, k) * decay
    inverse = unit_lower_inverse(torch.where(places[None, :] < places[:, None], overlap, 0.0))
    new_values = torch.einsum(PRODUCT, inverse, v * rate[..., None])
    read_keys = torch.einsum(PRODUCT, inverse, learned * torch.exp(total)[..., None])
    scores = torch.einsum(OVERLAP, q, k) * decay
    queries = q * torch.exp(total)[..., None]
    last = total[..., -1:]
    kept, decayed = k * torch.exp(last - total)[..., None], torch.exp(last)[..., None]
    outputs: list[Any] = []
    for n in range(q.shape[0]):
        corrections = new_values[n] - torch.einsum("bvck,bvkh->bvch", read_keys[n], state)
        out = torch.einsum("bvck,bvkh->bvch", queries[n], state)
        out = out + torch.einsum("bvce,bveh->bvch", scores[n], corrections)
        state = state * decayed[n] + torch.einsum("bvck,bvch->bvkh", kept[n], corrections)
        outputs.append(out.transpose(1, 2))
    return torch.cat(outputs, dim=1)[:, :n_positions], state


def _chunks(x: Any) -> Any:
    """[B, S, V, ...] -> [chunks, B, V, C, ...], zero-padded: zeros neither decay nor change the state."""
    missing = -x.shape[1] % LINEAR_CHUNK
    x = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    x = x.reshape(x.shape[0], -1, LINEAR_CHUNK, *x.shape[2:])
    return x.transpose(0, 1).transpose(2, 3)


def unit_lower_inverse(lower: Any) -> Any:
    """The inverses of the identity plus strictly lower triangles [N, B, V, C, C]; C is a power of two."""
    n, half = lower.shape[0], lower.shape[-1] // 2
    if not half:
        return torch.ones_like(lower)
    blocks = torch.cat([lower[..., :half, :half], lower[..., half:, half:]])
    inverses = unit_lower_inverse(blocks)
    first, second = inverses[:n], inverses[n:]
    corner = torch.einsum(PRODUCT, second, torch.einsum(PRODUCT, lower[..., half:, :half], first))
    top = torch.cat([first, torch.zeros_like(first)], dim=-1)
    return torch.cat([top, torch.cat([-corner, second], dim=-1)], dim=-2)
