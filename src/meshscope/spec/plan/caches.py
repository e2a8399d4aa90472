"""Cache arrays of each layer: keys and values, latents, or compressed entries."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import assert_never

from meshscope.spec.model.model import (
    AttentionKind,
    CompressedAttention,
    GroupedAttention,
    LatentAttention,
    Layer,
    Model,
)
from meshscope.spec.plan.context_form import cache_slots
from meshscope.spec.plan.plan import Plan
from meshscope.spec.plan.stages import stored_layers
from meshscope.spec.plan.weights import Dim, local_shape, stored_kv_heads
from meshscope.spec.workload import Workload
from meshscope.units import DTYPE_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheArray:
    """One array of a layer's cache, [batch, *heads, slots, width]; `shape` is (*heads, width).

    `dims` are the logical axes of `shape`. It has one slot per `rate` positions, or a fixed number of slots that are reused cyclically.
    `dtype` is set if it differs from that of the cache.
    """

    name: str
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    rate: int = 1
    n_fixed_slots: int | None = None
    dtype: str | None = None

    def bits(self, cache_dtype: str) -> int:
        """Bits of an element if the cache is stored in `cache_dtype`."""
        return DTYPE_BITS[self.dtype or cache_dtype]

    def n_slots(self, n_positions: int) -> int:
        """Slots for `n_positions` of one sequence; a fixed window counts in full."""
        return self.n_fixed_slots or -(-n_positions // self.rate)

    def local_shape(self, plan: Plan) -> tuple[int, ...]:
        """Shape per position on one device, in elements."""
        return local_shape(self.dims, self.shape, plan)


LANES = 128  # of a register; a TPU pads the rows of an array in memory to a multiple of them


def joined_narrow_heads(arrays: tuple[CacheArray, ...]) -> tuple[CacheArray, ...]:
    """Keys and values as one array "kv" if both fit in one padded row, else unchanged."""
    by_name = {array.name: array for array in arrays}
    key = by_name.get("k")
    if key is None or 2 * key.shape[-1] > LANES:
        return arrays
    return (replace(key, name="kv", shape=(*key.shape[:-1], 2 * key.shape[-1])),)


def layer_cache(
    model: Model, plan: Plan, layer: Layer, *, n_tokens: int = 1
) -> tuple[CacheArray, ...]:
    """The cache arrays that one layer writes; none if it shares those of an earlier layer.

    `n_tokens` are those of a sequence in a decode step, of which only the first is certain.
    """
    return () if layer.shares_cache else attended_cache(model, plan, layer, n_tokens=n_tokens)


def attended_cache(
    model: Model, plan: Plan, layer: Layer, *, n_tokens: int = 1
) -> tuple[CacheArray, ...]:
    """The cache arrays that one layer reads."""
    return tuple(_arrays(model, plan, layer, n_tokens))


def _arrays(model: Model, plan: Plan, layer: Layer, n_tokens: int) -> Iterator[CacheArray]:
    attention = model.attention
    match attention:
        case GroupedAttention() if layer.attention is AttentionKind.LINEAR:
            yield from _linear_arrays(attention, n_tokens)
        case GroupedAttention():
            of_layer = attention.of(layer.attention)
            shape = (stored_kv_heads(of_layer, plan), of_layer.head_dim)
            for name in ("k", "v"):
                yield CacheArray(name=name, dims=(Dim.KV_HEADS, Dim.HEAD_DIM), shape=shape)
        case LatentAttention():
            width = attention.kv_rank + attention.rope_dim
            yield CacheArray(name="latent", dims=(Dim.NORM,), shape=(width,))
            if attention.indexer is not None and layer.attention is not AttentionKind.SHARED:
                yield CacheArray(
                    name="index_k", dims=(Dim.NORM,), shape=(attention.indexer.head_dim,)
                )
        case CompressedAttention():
            yield from _compressed_arrays(attention, layer, n_tokens)
        case _:
            assert_never(attention)


def _linear_arrays(attention: GroupedAttention, n_tokens: int) -> Iterator[CacheArray]:
    """The state [key_dim, value_dim] of each value head, and the last inputs of the convolution.

    Both are float32: the state adds up all positions. A step of several tokens keeps the state after each
    and as many more inputs, from which the next step takes those of the last accepted token, as vLLM does
    (vllm/model_executor/layers/mamba/mamba_utils.py: k + 1 states, conv_kernel - 1 + num_spec inputs).
    """
    linear = attention.linear
    assert linear is not None
    values = (linear.n_value_heads, linear.value_dim)
    keys = (linear.n_key_heads, linear.key_dim)
    n_inputs = linear.conv_width - 1 + n_tokens - 1
    for name, shape, n_slots in (
        ("state", values, n_tokens * linear.key_dim),
        ("conv_q", keys, n_inputs),
        ("conv_k", keys, n_inputs),
        ("conv_v", values, n_inputs),
    ):
        dims = (Dim.HEADS, Dim.HEAD_DIM)
        yield CacheArray(name=name, dims=dims, shape=shape, n_fixed_slots=n_slots, dtype="f32")


def n_open_windows(rate: int, n_tokens: int) -> int:
    """The most windows of `rate` positions in which `n_tokens` successive positions are."""
    return (n_tokens - 1 + rate - 1) // rate + 1


def _compressed_arrays(
    attention: CompressedAttention, layer: Layer, n_tokens: int
) -> Iterator[CacheArray]:
    """Keys of the window, compressed entries, and the positions of the entries that a step may change."""
    width, n_window = attention.head_dim, attention.window + n_tokens - 1
    yield CacheArray(name="window", dims=(Dim.NORM,), shape=(width,), n_fixed_slots=n_window)
    match layer.attention:
        case AttentionKind.COMPRESSED_SPARSE:
            rate = attention.sparse_rate
            n_open = (
                n_open_windows(rate, n_tokens) + 1
            ) * rate  # entries include the window before
            yield from _entry_arrays("entry", rate, (width, 2 * width), n_open)
            width = attention.indexer.head_dim
            yield from _entry_arrays("index", rate, (width, 2 * width), n_open)
        case AttentionKind.HEAVILY_COMPRESSED:
            rate = attention.heavy_rate
            n_open = n_open_windows(rate, n_tokens) * rate
            yield from _entry_arrays("entry", rate, (width, width), n_open)
        case _:
            pass


def _entry_arrays(
    name: str, rate: int, widths: tuple[int, int], n_open: int
) -> Iterator[CacheArray]:
    """Entries and the last `n_open` positions; `widths` are those of an entry and of a position."""
    entry_width, position_width = widths
    yield CacheArray(name=name, dims=(Dim.NORM,), shape=(entry_width,), rate=rate)
    for part in ("kv", "gate"):
        yield CacheArray(
            name=f"{name}_{part}", dims=(Dim.NORM,), shape=(position_width,), n_fixed_slots=n_open
        )


def device_cache_bytes(
    model: Model, plan: Plan, workload: Workload, layers: tuple[Layer, ...] | None = None
) -> int:
    """Cache bytes on one device for prompt and output.

    `layers` defaults to all layers that the device allocates.
    """
    n_positions, dtype = cache_slots(plan, workload), workload.cache_dtype
    counts = stored_layers(model, plan.pp) if layers is None else Counter(layers)
    bits = sum(
        n * prod(array.local_shape(plan)) * array.n_slots(n_positions) * array.bits(dtype)
        for layer, n in counts.items()
        for array in layer_cache(model, plan, layer, n_tokens=workload.decode_tokens)
    )
    return bits * (workload.batch // plan.data_size) // 8
