"""Linear attention by the gated delta rule, with its matrices split by heads and its state as an argument.

transformers joins queries, keys, values and gates in one matrix and convolves them as one array. Splitting rows
of the whole would not split each part by heads, so the parts are separate here. The rule is that of the JAX
program (`programs/jax/linear.py`); as in transformers, a prompt is a sequence of chunks without a loop.
If cp splits a prompt, a manual region has two all-gathers, as in the JAX program: the last inputs of the convolutions
in each block, and how the block maps the state.

Shapes: B batch, S positions of this step, D residual width, N key heads, V value heads, K width of a key,
H width of a value, C positions of a chunk, W positions of the convolution; n devices of cp.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch

from meshscope.events.enums import Phase
from meshscope.programs.torchxla.layouts import Spec
from meshscope.programs.torchxla.tensors import Tensors, all_gather
from meshscope.spec.model.flops import LINEAR_CHUNK
from meshscope.spec.model.model import LinearAttention

L2_EPS = 1e-6  # of transformers' l2norm
CONVOLVED = ("conv_q", "conv_k", "conv_v")
STATE = "state"
# Products of more than one batch dimension: merging those would hide from the partitioner how they are split.
PRODUCT, OVERLAP = "nbvce,nbveh->nbvch", "nbvck,nbvek->nbvce"
NEVER = -1e30  # the logarithm of a decay to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """How arrays of linear attention are split in one phase: heads over tp, and the positions of a prompt over cp."""

    phase: Phase
    tensors: Tensors

    @property
    def context(self) -> tuple[str, ...]:
        """The mesh axes that split the positions of this step."""
        return self.tensors.layouts.axes("cp") if self.phase is Phase.PREFILL else ()

    def by_heads(self, x: Any) -> Any:
        """Annotates an array [B, S, heads, ...]."""
        return self.tensors.annotate(x, self.of_positions(x))

    def of_positions(self, x: Any) -> Spec:
        """The spec of an array [B, S, heads, ...]."""
        layouts = self.tensors.layouts
        return (layouts.data, self.context, layouts.axes("tp"), *((),) * (x.dim() - 3))

    def of_states(self, x: Any) -> Spec:
        """The spec of an array [B, heads, ...], which all devices of cp have."""
        layouts = self.tensors.layouts
        return (layouts.data, layouts.axes("tp"), *((),) * (x.dim() - 2))


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
        is_outside = placing.context and not placing.tensors.is_inside
        out, states.arrays = (step.of_blocks if is_outside else step)(arrays, states.arrays)
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

    def of_blocks(self, arrays: Arrays, states: Arrays) -> tuple[Any, Arrays]:
        """As `__call__`, in a manual region in which a device has a block of the prompt."""
        placing, tensors = self.placing, self.placing.tensors
        heads: Spec = (tensors.layouts.axes("tp"), (), ())
        weights = {name: tensors.entered(y, heads) for name, y in self.weights.items()}
        local = {
            name: tensors.entered(placing.by_heads(y), placing.of_positions(y))
            for name, y in arrays.items()
        }
        with tensors.inside():
            out, new = replace(self, weights=weights)(local, states)
        out = tensors.left(out, placing.of_positions(out))
        return out, {name: tensors.left(y, placing.of_states(y)) for name, y in new.items()}

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
        out, new[STATE] = self._rule(q.shape[1])(*given, state)
        return out, {name: new[name] for name in states}

    def _rule(self, n_positions: int) -> Callable[..., tuple[Any, Any]]:
        """The rule for one position, for a prompt, or for a block of one over cp."""
        if self.placing.context:
            return partial(split_delta_rule, tensors=self.placing.tensors)
        return delta_step if n_positions == 1 else chunked_delta_rule

    def _before(self, inputs: Arrays, states: Arrays) -> tuple[Arrays, Arrays]:
        """The W - 1 inputs [B, W - 1, heads, width] before those of this device, and the last ones as states."""
        n_before, tails = self.of.conv_width - 1, inputs
        if self.placing.context:
            tails = gathered_tails(inputs, n_before, self.placing.tensors)
        before, new = {}, {}
        for name, tail in tails.items():
            first = tail.new_zeros(tail.shape[0], n_before, *tail.shape[2:])
            if self.placing.phase is Phase.DECODE:
                first = states[name].to(tail.dtype).transpose(1, 2)
            every = self.placing.by_heads(torch.cat([first, tail], dim=1))
            before[name] = first
            if self.placing.context:
                tensors = self.placing.tensors
                start = tensors.rank("cp") * (tail.shape[1] // tensors.layouts.plan.cp)
                places = start + torch.arange(n_before, device=tail.device)
                before[name] = every.index_select(1, places)
            new[name] = every[:, tail.shape[1] :].transpose(1, 2).to(states[name].dtype)
        return before, new

    def _convolved(self, name: str, x: Any, before: Any) -> Any:
        """SiLU of the causal convolution of x [B, S, heads, width] after the inputs before it."""
        inputs = self.placing.by_heads(torch.cat([before, x], dim=1))
        weight, n_new = self.weights[name], x.shape[1]
        width = weight.shape[-1]
        parts = [inputs[:, at : at + n_new] * weight[..., at] for at in range(width)]
        return self.placing.by_heads(torch.nn.functional.silu(reduce(torch.add, parts)))


def gathered_tails(inputs: Arrays, n_last: int, tensors: Tensors) -> Arrays:
    """The last `n_last` inputs [B, n * n_last, heads, width] of all blocks, or whole blocks if they are shorter.

    One all-gather brings those of queries, keys and values.
    """
    tails = {name: x[:, max(0, x.shape[1] - n_last) :] for name, x in inputs.items()}
    flat = torch.cat([tail.flatten(2) for tail in tails.values()], dim=-1)
    gathered = all_gather(flat, 1, tensors.groups("cp"))
    sizes = [tail[0, 0].numel() for tail in tails.values()]
    parts = gathered.split(sizes, dim=-1)
    return {
        name: part.reshape(*part.shape[:2], *tail.shape[2:])
        for (name, tail), part in zip(tails.items(), parts, strict=True)
    }


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
    # Columns of the state beyond those of values decay and are corrected, but learn no values.
    new_values = torch.nn.functional.pad(new_values, (0, state.shape[-1] - v.shape[-1]))
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


def split_delta_rule(  # noqa: PLR0913, PLR0917  as the rule over a prompt
    q: Any, k: Any, v: Any, log_decay: Any, rate: Any, state: Any, *, tensors: Tensors
) -> tuple[Any, Any]:
    """As `chunked_delta_rule` for this device's block of a prompt that cp splits, after the same `state` on all.

    The new state is that after all blocks.
    """
    n_values, n_heads = v.shape[-1], v.shape[2]
    identity = torch.eye(k.shape[-1], device=k.device).expand(*state.shape[:-1], -1)
    start = torch.cat([torch.zeros_like(state), identity], dim=-1)
    out, block = chunked_delta_rule(q, k, v, log_decay, rate, start)
    blocks = all_gather(block, 1, tensors.groups("cp"))  # [B, n*V, K, H+K]
    maps = blocks.split(n_heads, dim=1)
    before, after = passed_on(state, maps, tensors.rank("cp"))
    read = torch.einsum("bsvk,bvkh->bsvh", out[..., n_values:], before)
    return out[..., :n_values] + read, after


def passed_on(state: Any, maps: Sequence[Any], rank: Any) -> tuple[Any, Any]:
    """The states [B, V, K, H] before the block of this rank and after all; a map of one is [B, V, K, H+K].

    Sums of products are in float32, which a TPU's matrix product would not be: each maps the whole state.
    """
    before, n_values = state, state.shape[-1]
    for number, block in enumerate(maps):
        before = torch.where(rank == number, state, before)
        added, kept = block[..., :n_values], block[..., n_values:]
        state = added + (kept[..., None] * state[..., None, :, :]).sum(dim=-2)
    return before, state


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
