"""Cache arrays of each layer: keys and values, latents, or compressed entries."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import assert_never

from meshscope.model.model import (
    AttentionKind,
    CompressedAttention,
    Family,
    GroupedAttention,
    LatentAttention,
    Layer,
    Model,
)
from meshscope.plans.context_form import cache_slots
from meshscope.plans.plan import Plan
from meshscope.plans.stages import stored_layers
from meshscope.plans.weights import Dim, local_shape, stored_kv_heads
from meshscope.plans.workload import Workload
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


class CacheLayout(StrEnum):
    """Whose cache arrays are counted: those of our programs, or the pages of a serving engine on TPU."""

    OWN = "own"
    VLLM_TPU = "vllm-tpu"
    SGLANG_JAX = "sglang-jax"


# Families that tpu-inference runs by models of its own, which keep the whole context in every layer
# (tpu_inference/runner/kv_cache_manager.py, get_kv_cache_spec, commit b8692ff0). Its other models limit
# layers with a window to it, if the heads of all layers have one size.
_WHOLE_CONTEXT = frozenset(
    {Family.LLAMA, Family.LLAMA4, Family.QWEN2, Family.QWEN3, Family.GPT_OSS, Family.GEMMA4}
)
PACKED_BITS = 32  # elements of a cache are packed into words
HALF_LANES = 64  # heads of this size: vLLM on TPU stores key and value in one row


def paged_bytes(
    model: Model, plan: Plan, layer: Layer, workload: Workload, layout: CacheLayout
) -> int | None:
    """Bytes of a layer's cache for one sequence in the pages of a serving engine on one device.

    Keys and values of the heads are packed into words, whose empty parts count, and rows are padded to whole
    registers. None for layers without keys and values of each position. Left out: the rest of the last page.
    Source: get_kv_cache_shape in tpu_inference/kernels of tpu-inference b8692ff0
    (ragged_paged_attention/v3/kernel.py, kernel_hd64.py, mla/v2/kernel.py), and MHATokenToKVPool and
    MLATokenToKVPool in sgl_jax/srt/mem_cache/memory_pool.py of SGLang-JAX cddbf6f1.
    """
    attention, bits = model.attention, DTYPE_BITS[workload.cache_dtype]
    n_positions, packing = workload.context, PACKED_BITS // bits
    match attention:
        case LatentAttention():
            has_indexer = attention.indexer is not None
            has_index = has_indexer and layer.attention is not AttentionKind.SHARED
            widths = [attention.kv_rank, attention.rope_dim]
            if attention.indexer is not None and has_index:
                widths.append(attention.indexer.head_dim)
            n_elements = sum(_aligned(width, LANES) for width in widths)
        case GroupedAttention() if layer.attention is not AttentionKind.LINEAR:
            heads = attention.of(layer.attention)
            n_heads, width = stored_kv_heads(heads, plan) // plan.tp, heads.head_dim
            if layout is CacheLayout.VLLM_TPU and width == HALF_LANES:
                n_elements = _aligned(n_heads, packing) * LANES
            else:
                n_elements = _aligned(2 * n_heads, packing) * _aligned(width, LANES)
            is_windowed = layer.attention is AttentionKind.SLIDING and _frees_pages(model, layout)
            if is_windowed and attention.window is not None:
                n_positions = min(n_positions, attention.window)
        case _:
            return None
    return n_positions * n_elements * bits // 8


def _frees_pages(model: Model, layout: CacheLayout) -> bool:
    """Whether an engine frees the pages that the window of a layer has left: if all heads have one size."""
    attention = model.attention
    has_one_size = isinstance(attention, GroupedAttention) and attention.full_heads is None
    is_whole = layout is CacheLayout.VLLM_TPU and model.family in _WHOLE_CONTEXT
    return has_one_size and not is_whole


def _aligned(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


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
    model: Model,
    plan: Plan,
    workload: Workload,
    layers: tuple[Layer, ...] | None = None,
    *,
    layout: CacheLayout = CacheLayout.OWN,
) -> int:
    """Cache bytes on one device for prompt and output.

    `layers` defaults to all layers that the device allocates.
    """
    counts = stored_layers(model, plan.pp) if layers is None else Counter(layers)
    n_sequences = workload.batch // plan.data_size
    return n_sequences * sum(
        n * _layer_bytes(model, plan, layer, workload, layout) for layer, n in counts.items()
    )


def _layer_bytes(
    model: Model, plan: Plan, layer: Layer, workload: Workload, layout: CacheLayout
) -> int:
    """Cache bytes of a layer for one sequence on one device."""
    arrays = layer_cache(model, plan, layer, n_tokens=workload.decode_tokens)
    if layout is not CacheLayout.OWN and arrays:
        paged = paged_bytes(model, plan, layer, workload, layout)
        if paged is not None:
            return paged
    n_positions, dtype = cache_slots(plan, workload), workload.cache_dtype
    bits = (
        prod(array.local_shape(plan)) * array.n_slots(n_positions) * array.bits(dtype)
        for array in arrays
    )
    return sum(bits) // 8
