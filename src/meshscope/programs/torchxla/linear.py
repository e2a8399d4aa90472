"""Linear attention by the gated delta rule, with its matrices split by heads and its state as an argument.

transformers joins queries, keys, values and gates in one matrix and convolves them as one array. Splitting rows
of the whole would not split each part by heads, so the parts are separate here. The rule is the JAX
program's (`programs/jax/linear.py`); as in transformers, a prompt is a sequence of chunks without a loop.

Shapes: B batch, S positions of this step, D residual width, N key heads, V value heads, K width of a key,
H width of a value, C positions of a chunk, W positions of the convolution.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch

from meshscope.model.mechanisms.linear import LINEAR_CHUNK, LinearAttention
from meshscope.programs.jax.linear import L2_EPS
from meshscope.programs.jax.linear import delta_step as of_step
from meshscope.programs.torchxla.tensors import Replacement, Tensors

CONVOLVED = ("conv_q", "conv_k", "conv_v")
STATE = "state"
# Products of more than one batch dimension: merging those would hide from the partitioner how they are split.
PRODUCT, OVERLAP = "nbvce,nbveh->nbvch", "nbvck,nbvek->nbvce"
NEVER = -1e30  # the logarithm of a decay to nothing

Arrays = dict[str, Any]


class Channels(torch.nn.Module):
    """The weights [heads * width, W] of one part of the convolution."""

    def __init__(self, n_channels: int, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(n_channels, width))

    def forward(self, n_heads: int) -> Any:
        """The weights [heads, width, W]."""
        return self.weight.reshape(n_heads, -1, self.weight.shape[-1])


class DeltaAttention(Replacement):
    """Linear attention of one layer of Qwen3-Next or Qwen3.5, which replaces the module of transformers."""

    def __init__(self, replaced: Any, n_inputs: int, of: LinearAttention, tensors: Tensors) -> None:
        super().__init__(replaced)
        keys, values = of.n_key_heads * of.key_dim, of.n_value_heads * of.value_dim
        sizes = {"q": keys, "k": keys, "v": values, "z": values}
        sizes |= dict.fromkeys("ba", of.n_value_heads)
        # By the checkpoint's tensors, which join these parts.
        for tensor in ("qkvz", "ba", "qkv", "z", "b", "a"):
            if not hasattr(replaced, f"in_proj_{tensor}"):
                continue
            linears = {p: torch.nn.Linear(n_inputs, sizes[p], bias=False) for p in tensor}
            whole = torch.nn.ModuleDict(linears) if len(tensor) > 1 else linears[tensor]
            self.add_module(f"in_proj_{tensor}", whole)
        self.is_fused = hasattr(replaced, "in_proj_qkvz")
        channels = dict(zip(CONVOLVED, (keys, keys, values), strict=True))
        self.conv1d = torch.nn.ModuleDict(
            {name: Channels(size, of.conv_width) for name, size in channels.items()}
        )
        self.keep(replaced, "A_log", "dt_bias", "norm", "out_proj", "layer_idx")
        self.of, self.tensors = of, tensors

    def forward(self, hidden_states: Any, cache_params: Any, **_: Any) -> Any:
        """[B, S, D] -> [B, S, D], and the states of the cache's layer replaced."""
        x, of = hidden_states, self.of
        by_heads = self.tensors.by_heads
        heads = {"q": of.n_key_heads, "k": of.n_key_heads}
        heads |= dict.fromkeys("vzba", of.n_value_heads)
        projected = {
            letter: by_heads(self._linear(letter)(x).reshape(*x.shape[:2], n_heads, -1))
            for letter, n_heads in heads.items()
        }
        steps = torch.nn.functional.softplus(projected["a"].float()[..., 0] + self.dt_bias.float())
        rate = torch.sigmoid(projected["b"].float())[..., 0]
        log_decay = -torch.exp(self.A_log.float()) * steps
        arrays = {name: projected[name[-1]] for name in CONVOLVED}
        weights = {name: self.conv1d[name](y.shape[2]) for name, y in arrays.items()}
        states = cache_params.layers[self.layer_idx]
        out, states.arrays = self._step(arrays, weights, (log_decay, rate), states.arrays)
        out = self.norm(by_heads(out).to(x.dtype), projected["z"])
        return self.out_proj(by_heads(out).reshape(*x.shape[:2], -1))

    def _linear(self, letter: str) -> Any:
        """The projection to queries, keys, values, gates, rates (b) or decays (a)."""
        joined = ("qkvz" if letter in "qkvz" else "ba") if self.is_fused else "qkv"
        if letter in joined:
            return getattr(self, f"in_proj_{joined}")[letter]
        return getattr(self, f"in_proj_{letter}")

    def _step(
        self, arrays: Arrays, weights: Arrays, gates: tuple[Any, Any], states: Arrays
    ) -> tuple[Any, Arrays]:
        """The output [B, S, V, H] in float32, and the new states.

        `arrays` are the inputs [B, S, heads, width] of the convolutions by name, and `gates` the logarithms of decays
        and the rates [B, S, V]. States are the last inputs [B, heads, W - 1, width] of the convolutions by name, and
        `state` [B, V, K, H].
        """
        of, by_heads, is_decode = self.of, self.tensors.by_heads, self.tensors.is_decode
        before, new, convolved = {}, {}, list[Any]()
        for name, x in arrays.items():
            before[name] = x.new_zeros(x.shape[0], of.conv_width - 1, *x.shape[2:])
            if is_decode:
                before[name] = states[name].to(x.dtype).transpose(1, 2)
            every = by_heads(torch.cat([before[name], x], dim=1))
            new[name] = every[:, x.shape[1] :].transpose(1, 2).to(states[name].dtype)
        for name, x in arrays.items():  # SiLU of the causal convolution
            inputs = by_heads(torch.cat([before[name], x], dim=1))
            weight, n_new = weights[name], x.shape[1]
            parts = [inputs[:, at : at + n_new] * weight[..., at] for at in range(weight.shape[-1])]
            convolved.append(by_heads(torch.nn.functional.silu(reduce(torch.add, parts))))
        q, k, v = convolved
        q, k = (_l2_normed(y).repeat_interleave(of.group, dim=2) for y in (q, k))
        q, v = q * of.key_dim**-0.5, v.float()
        given = [by_heads(y) for y in (q, k, v, *gates)]
        state = states[STATE]
        if not is_decode:
            state = q.new_zeros(v.shape[0], v.shape[2], of.key_dim, of.value_dim)
        rule: Callable[..., tuple[Any, Any]] = delta_step if q.shape[1] == 1 else chunked_delta_rule
        out, new[STATE] = rule(*given, state)
        return out, {name: new[name] for name in states}


def _l2_normed(x: Any) -> Any:
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) + L2_EPS)


delta_step = partial(of_step, xp=torch)


def chunked_delta_rule(*arrays: Any) -> tuple[Any, Any]:
    """As `delta_step` for S positions; only the state passes from chunk to chunk."""
    *inputs, state = arrays
    n_positions = inputs[0].shape[1]
    q, k, v, log_decay, rate = (_chunks(y) for y in inputs)
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
