"""What a device keeps of each sequence: its share of the positions under cp, and the cache arrays of each layer.

Under cp, a device has a contiguous block of the prompt in its first slots, followed by every cp-th generated token,
so that decode is balanced across devices.
"""

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from math import prod

from meshscope.events.collective import Groups
from meshscope.events.enums import Phase
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.topology import Topology
from meshscope.model.arrays import LANES, CacheArray
from meshscope.model.layers import Layer
from meshscope.model.model import Model
from meshscope.plans.plan import Plan
from meshscope.plans.stages import stored_layers
from meshscope.plans.workload import Workload
from meshscope.units import DTYPE_BITS

CACHED_RINGS = 64  # of large slices: a search asks for the same ring of many plans


class ContextForm(StrEnum):
    """How prefill shares keys and values between the blocks of a prompt."""

    AUTO = "auto"  # ring if supported, else allgather
    RING = "ring"  # ring permutes; partial softmaxes are merged
    ALLGATHER = "allgather"  # every device gathers all keys and values


def local_tokens(plan: Plan, phase: Phase, n_tokens: int) -> int:
    """Tokens per cp device out of a step's `n_tokens` per sequence: prefill splits them, in decode all devices have the same."""
    return n_tokens // plan.cp if phase is Phase.PREFILL else n_tokens


def cache_slots(plan: Plan, workload: Workload, model: Model | None = None) -> int:
    """Cache positions per sequence on one device: its prompt block plus its share of the output, or all."""
    cp = 1 if model is not None and model.attention.has_whole_caches else plan.cp
    return workload.prompt // cp + -(-workload.output // cp)


@lru_cache(maxsize=CACHED_RINGS)
def ring_pairs(groups: Groups) -> Groups:
    """(source, target) pairs of one ring step: each device sends to the next one in its group."""
    rings = (zip(group, (*group[1:], group[0]), strict=True) for group in groups)
    return tuple(pair for ring in rings for pair in ring)


def ring_sends(cp: int, n_local: int, window: int | None) -> int:
    """Times that each block moves on: a block of `n_local` positions beyond the window need not arrive."""
    return cp - 1 if window is None else min(cp - 1, -(-(window - 1) // n_local))


def why_no_ring(model: Model, plan: Plan, topology: Topology) -> str | None:
    """The reason why ring attention is not supported; None if it is."""
    # XLA on CPU matches permutes across all devices of the program, whatever branches they are in.
    confused = "XLA on CPU confuses ring permutes with the sends between pipeline stages"
    is_confused = plan.pp > 1 and topology.chip.kind is ChipKind.CPU
    return model.attention.why_no_ring or (confused if is_confused else None)


class CacheLayout(StrEnum):
    """Whose cache arrays are counted: our programs', or the pages of a serving engine on TPU."""

    OWN = "own"
    VLLM_TPU = "vllm-tpu"
    SGLANG_JAX = "sglang-jax"


PACKED_BITS = 32  # elements of a cache are packed into words


def paged_bytes(
    model: Model, plan: Plan, layer: Layer, workload: Workload, layout: CacheLayout
) -> int | None:
    """Bytes of a layer's cache for one sequence in the pages of a serving engine on one device; None without pages.

    Keys and values of the heads are packed into words, and rows are padded to whole registers. Left out: the rest of the
    last page. Source: get_kv_cache_shape in tpu_inference/kernels of tpu-inference b8692ff0
    (ragged_paged_attention/v3/kernel.py, kernel_hd64.py, mla/v2/kernel.py), and MHATokenToKVPool and
    MLATokenToKVPool in sgl_jax/srt/mem_cache/memory_pool.py of SGLang-JAX cddbf6f1.
    """
    attention, bits = model.attention, DTYPE_BITS[workload.cache_dtype]
    n_elements = model.attention_of(layer).page_elements(
        layer.attention, plan.tp, PACKED_BITS // bits, has_half_rows=layout is CacheLayout.VLLM_TPU
    )
    if n_elements is None:
        return None
    keeps_all = layout is CacheLayout.VLLM_TPU and model.family.traits.keeps_whole_context
    window = None if keeps_all else attention.paged_window(layer.attention)
    n_positions = workload.context if window is None else min(workload.context, window)
    return n_positions * n_elements * bits // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeWindows:
    """What the cache of one sequence keeps on a device beyond the windows of layers, in bytes."""

    window: int  # the longest
    n_bytes: int
    cache_bytes: int  # of all layers


def whole_windows(
    model: Model, plan: Plan, workload: Workload, layout: CacheLayout
) -> WholeWindows | None:
    """What a cache in this layout keeps beyond the windows of layers, which another engine frees; None if nothing."""
    one = replace(workload, batch=plan.data_size)
    longest = n_bytes = 0
    for layer, n in stored_layers(model, plan.pp).items():
        window = model.attention_of(layer).window_of(layer.attention)
        if window is None or window >= workload.context or layer.shares_cache:
            continue
        seen = replace(one, prompt=max(window - 1, 1), output=1, prefill_chunk=None)
        whole, kept = (
            device_cache_bytes(model, plan, size, (layer,), layout=layout) for size in (one, seen)
        )
        if whole > kept:
            longest = max(longest, window)
            n_bytes += n * (whole - kept)
    if not n_bytes:
        return None
    cache_bytes = device_cache_bytes(model, plan, one, layout=layout)
    return WholeWindows(window=longest, n_bytes=n_bytes, cache_bytes=cache_bytes)


def joined_narrow_heads(arrays: tuple[CacheArray, ...]) -> tuple[CacheArray, ...]:
    """Keys and values as one array "kv" if both fit in one padded row, else unchanged."""
    by_name = {array.name: array for array in arrays}
    key = by_name.get("k")
    if key is None or 2 * key.shape[-1] > LANES or by_name["v"].shape != key.shape:
        return arrays
    others = (array for array in arrays if array.name not in {"k", "v"})
    return (replace(key, name="kv", shape=(*key.shape[:-1], 2 * key.shape[-1])), *others)


def layer_cache(
    model: Model, plan: Plan, layer: Layer, *, n_tokens: int = 1
) -> tuple[CacheArray, ...]:
    """The cache arrays that one layer writes in a decode step of `n_tokens`; none if it shares an earlier layer's."""
    if layer.shares_cache:
        return ()
    return tuple(model.attention_of(layer).cache(layer.attention, plan.tp, n_tokens))


def device_cache_bytes(
    model: Model,
    plan: Plan,
    workload: Workload,
    layers: tuple[Layer, ...] | None = None,
    *,
    layout: CacheLayout = CacheLayout.OWN,
) -> int:
    """Cache bytes on one device for prompt and output, of these layers or all that the device allocates."""
    counts = stored_layers(model, plan.pp) if layers is None else Counter(layers)
    n_positions, dtype, total = cache_slots(plan, workload, model), workload.cache_dtype, 0
    for layer, n_layers in counts.items():
        arrays = layer_cache(model, plan, layer, n_tokens=workload.decode_tokens)
        is_paged = layout is not CacheLayout.OWN and arrays
        n_bytes = paged_bytes(model, plan, layer, workload, layout) if is_paged else None
        if n_bytes is None:
            n_bits = sum(
                prod(a.local_shape(plan)) * a.n_slots(n_positions) * a.bits(dtype) for a in arrays
            )
            n_bytes = n_bits // 8
        total += n_layers * n_bytes
    return workload.batch // plan.data_size * total
