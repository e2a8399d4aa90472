"""The arrays that a step keeps for later steps: keys and values, or latents, of every layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import assert_never

from meshscope.arch.model import GroupedAttention, LatentAttention, Layer, Model
from meshscope.plan.context import cache_slots
from meshscope.plan.plan import Plan
from meshscope.plan.stages import stored_layers
from meshscope.plan.weights import Dim, mesh_axes_of, stored_kv_heads
from meshscope.plan.workload import Workload
from meshscope.units import DTYPE_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheArray:
    """One array of a layer's cache: [batch, positions, *shape], the dims of `shape` as in weights."""

    name: str
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]

    def local_shape(self, plan: Plan) -> tuple[int, ...]:
        """What one device holds of each position, in elements."""
        sizes = dict(plan.mesh.axes)
        return tuple(
            size // prod(sizes.get(axis, 1) for axis in mesh_axes_of(dim, plan))
            for dim, size in zip(self.dims, self.shape, strict=True)
        )


def layer_cache(model: Model, plan: Plan, layer: Layer) -> tuple[CacheArray, ...]:
    """The cache of one layer."""
    return tuple(_arrays(model, plan, layer))


def _arrays(model: Model, plan: Plan, layer: Layer) -> Iterator[CacheArray]:  # noqa: ARG001  kinds of attention may differ
    attention = model.attention
    match attention:
        case GroupedAttention():
            shape = (stored_kv_heads(attention, plan), attention.head_dim)
            for name in ("k", "v"):
                yield CacheArray(name=name, dims=(Dim.KV_HEADS, Dim.HEAD_DIM), shape=shape)
        case LatentAttention():
            width = attention.kv_rank + attention.rope_dim
            yield CacheArray(name="latent", dims=(Dim.NORM,), shape=(width,))
            if attention.indexer is not None:
                yield CacheArray(
                    name="index_k", dims=(Dim.NORM,), shape=(attention.indexer.head_dim,)
                )
        case _:
            assert_never(attention)


def device_cache_bytes(
    model: Model, plan: Plan, workload: Workload, layers: tuple[Layer, ...] | None = None
) -> int:
    """Bytes of cache that one device holds for these layers, prompt and output.

    By default for all that it has room for.
    """
    positions = workload.batch // plan.data_size * cache_slots(plan, workload)
    elements = sum(
        prod(array.local_shape(plan))
        for layer in (stored_layers(model.layers, plan.pp) if layers is None else layers)
        for array in layer_cache(model, plan, layer)
    )
    return elements * positions * DTYPE_BITS[workload.cache_dtype] // 8
