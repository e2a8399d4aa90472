"""Tiny programs behind the golden HLO files: a decoder under every plan, and rare forms.

They use the scopes that the reader parses (`prefill|decode / layer{i} / part`) and no code of the
project, so golden files change only on purpose.
"""

from typing import Any

import jax
import jax.numpy as jnp
from goldens import HEAD_DIM, Golden
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Manual:
    """Explicit collectives, in shard_map."""

    def __init__(self, golden: Golden) -> None:
        self.g = golden

    def weight(self, w: Any, dim: int) -> Any:
        return jax.lax.all_gather(w, self.g.fsdp, axis=dim, tiled=True) if self.g.fsdp else w

    def enter(self, x: Any) -> Any:
        return jax.lax.all_gather(x, self.g.tp, axis=1, tiled=True) if self.g.sequence else x

    def leave(self, x: Any) -> Any:
        if self.g.sequence:
            return jax.lax.psum_scatter(x, self.g.tp, scatter_dimension=1, tiled=True)
        return jax.lax.psum(x, self.g.tp) if self.g.tp else x

    def split(self, x: Any) -> Any:
        return x

    def embed(self, table: Any, tokens: Any) -> Any:
        if not self.g.tp:
            return table[tokens]
        n_rows = self.g.vocab // self.g.n_tp
        here = tokens - jax.lax.axis_index(self.g.tp) * n_rows
        is_here = (here >= 0) & (here < n_rows)
        return self.leave(jnp.where(is_here[..., None], table[jnp.where(is_here, here, 0)], 0))

    def logits(self, x: Any) -> Any:
        return jax.lax.all_gather(x, self.g.tp, axis=1, tiled=True) if self.g.tp else x


class Auto:
    """Annotations only: the partitioner inserts the collectives."""

    def __init__(self, golden: Golden, mesh: Mesh) -> None:
        self.g, self.mesh = golden, mesh

    def _constrain(self, x: Any, *spec: str | None) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def weight(self, w: Any, _: int) -> Any:
        return w

    def enter(self, x: Any) -> Any:
        return self._constrain(x, self.g.data, None, None)

    def leave(self, x: Any) -> Any:
        return self._constrain(x, self.g.data, self.g.sequence, None)

    def split(self, x: Any) -> Any:
        return self._constrain(x, self.g.data, None, self.g.tp)

    def embed(self, table: Any, tokens: Any) -> Any:
        return self.leave(table[tokens])

    def logits(self, x: Any) -> Any:
        return self._constrain(x, self.g.data, None)


def decoder(golden: Golden, mesh: Mesh) -> tuple[Any, list[Any]]:
    """A jitted decoder and the shapes of its arguments."""
    meet = Auto(golden, mesh) if golden.is_auto else Manual(golden)
    arguments = _arguments(golden)
    specs = _mapped(lambda _, spec: spec, arguments)
    shapes = _mapped(
        lambda shape, spec: jax.ShapeDtypeStruct(
            shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)
        ),
        arguments,
    )
    tokens = jax.ShapeDtypeStruct(shapes[0].shape, jnp.int32, sharding=shapes[0].sharding)
    caches = specs[2][-1] if golden.is_scanned else [layer[-1] for layer in specs[2]]
    out_specs = (P(golden.data, None), caches)

    def run(*inputs: Any) -> Any:
        return _forward(golden, meet, *inputs)

    if golden.is_auto:
        out = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), out_specs, is_leaf=lambda x: isinstance(x, P)
        )
        return jax.jit(run, out_shardings=out), [tokens, *shapes[1:]]
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped), [tokens, *shapes[1:]]


def _arguments(g: Golden) -> tuple[Any, ...]:
    """(shape, spec) of every argument: tokens, embedding table, layers, head."""
    weights = (
        ((g.hidden, 3 * g.heads * HEAD_DIM), (g.fsdp, g.tp)),
        ((g.heads * HEAD_DIM, g.hidden), (g.tp, g.fsdp)),
        ((g.hidden, g.ffn), (g.fsdp, g.tp)),
        ((g.hidden, g.ffn), (g.fsdp, g.tp)),
        ((g.ffn, g.hidden), (g.tp, g.fsdp)),
        ((2, g.batch, g.prompt, g.heads, HEAD_DIM), (None, g.data, None, g.tp, None)),
    )
    if g.is_scanned:
        layers: Any = tuple(((g.layers, *shape), P(None, *spec)) for shape, spec in weights)
    else:
        layers = [tuple((shape, P(*spec)) for shape, spec in weights)] * g.layers
    return (
        ((g.batch, g.steps), P(g.data, None)),
        ((g.vocab, g.hidden), P(g.tp, None)),
        layers,
        ((g.hidden, g.vocab), P(None, g.tp)),
    )


def _mapped(function: Any, arguments: Any) -> Any:
    def is_leaf(x: Any) -> bool:
        return isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], P)

    return jax.tree.map(lambda leaf: function(*leaf), arguments, is_leaf=is_leaf)


def _forward(g: Golden, meet: Any, *inputs: Any) -> Any:
    tokens, table, layers, head = inputs

    def layer(x: Any, weights: Any) -> tuple[Any, Any]:
        wqkv, wo, gate, up, down, cache = weights
        with jax.named_scope("attn"):
            out, cache = _attention(g, meet, meet.enter(x), wqkv, cache)
            x = x + meet.leave(out @ meet.weight(wo, 1))
        with jax.named_scope("mlp"):
            h = meet.enter(x)
            h = jax.nn.silu(h @ meet.weight(gate, 0)) * (h @ meet.weight(up, 0))
            x = x + meet.leave(meet.split(h) @ meet.weight(down, 1))
        return x, cache

    with jax.named_scope(g.phase):
        with jax.named_scope("embed"):
            x = meet.embed(table, tokens)
        if g.is_scanned:
            with jax.named_scope(f"layers0-{g.layers - 1}"):
                x, caches = jax.lax.scan(layer, x, layers)
        else:
            caches = []
            for i, weights in enumerate(layers):
                with jax.named_scope(f"layer{i}"):
                    x, cache = layer(x, weights)
                    caches.append(cache)
        with jax.named_scope("lm_head"):
            return meet.logits(meet.enter(x)[:, -1] @ head), caches


def _attention(g: Golden, meet: Any, x: Any, wqkv: Any, cache: Any) -> tuple[Any, Any]:
    b, s, _ = x.shape
    qkv = meet.split(x @ meet.weight(wqkv, 0)).reshape(b, s, -1, 3 * HEAD_DIM)
    q, k, v = jnp.split(qkv, 3, axis=-1)
    start = (0, 0, g.prompt - s, 0, 0)
    cache = jax.lax.dynamic_update_slice(cache, jnp.stack((k, v)), start)
    keys, values = cache
    scores = jnp.einsum("bsnh,btnh->bnst", q, keys).astype(jnp.float32)
    out = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores, -1).astype(x.dtype), values)
    return out.reshape(b, s, -1), cache


def combined(_: Golden, mesh: Mesh) -> tuple[Any, list[Any]]:
    """Three all-reduces of different layers and parts, small enough to be combined."""

    def run(x: Any, y: Any, z: Any) -> Any:
        with jax.named_scope("decode"):
            with jax.named_scope("layer0/attn"):
                a = jax.lax.psum(x * 2, "tp")
            with jax.named_scope("layer0/mlp"):
                b = jax.lax.psum(y * 2, "tp")
            with jax.named_scope("layer1/attn"):
                c = jax.lax.psum(z * 2, "tp")
        return a, b, c

    return _replicated(run, mesh, (8, 256), (8, 512), (16, 128))


def several(_: Golden, mesh: Mesh) -> tuple[Any, list[Any]]:
    """An all-to-all, a ring permute, and reductions over one axis, the other, and both."""

    def run(x: Any, y: Any, z: Any) -> Any:
        n = mesh.shape["tp"]
        with jax.named_scope("prefill/layer0"):
            with jax.named_scope("moe.dispatch"):
                a = jax.lax.all_to_all(x * 2, "tp", 0, 0, tiled=True)
            with jax.named_scope("attn"):
                b = jax.lax.ppermute(y * 2, "tp", [(i, (i + 1) % n) for i in range(n)])
            with jax.named_scope("moe.router"):
                c = jax.lax.pmax(z * 2, tuple(mesh.axis_names))
            with jax.named_scope("mlp"):
                d = jax.lax.psum(y * 3, "dp")
        return a, b, c, d

    return _replicated(run, mesh, (64, 256), (8, 512), (16, 128))


def across_slices(_: Golden, mesh: Mesh) -> tuple[Any, list[Any]]:
    """Every kind of collective over an axis across slices."""

    def run(w: Any, x: Any, y: Any, z: Any) -> Any:
        n = mesh.shape["dp"]
        with jax.named_scope("prefill/layer0/mlp"):
            a = jax.lax.psum(w * 2, "dp")
            b = jax.lax.psum_scatter(x * 2, "dp", tiled=True)
            c = jax.lax.all_to_all(y * 2, "dp", 0, 0, tiled=True)
            d = jax.lax.ppermute(z * 2, "dp", [(i, (i + 1) % n) for i in range(n)])
        return a, b, c, d

    return _replicated(run, mesh, *[(1024, 512)] * 4)


def windowed(golden: Golden, mesh: Mesh) -> tuple[Any, list[Any]]:
    """A scanned dot with a row-sharded operand, which a ring gathers."""
    rows, cols = NamedSharding(mesh, P("tp", None)), NamedSharding(mesh, P(None, None, "tp"))
    n, d = golden.hidden, golden.ffn

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        with jax.named_scope("mlp"):
            y = jnp.einsum("td,te->ed", x, w)
            return jax.lax.with_sharding_constraint(y, rows), None

    def run(x: Any, ws: Any) -> Any:
        with jax.named_scope("prefill"), jax.named_scope(f"layers0-{golden.layers - 1}"):
            return jax.lax.scan(layer, x, ws)[0]

    return jax.jit(run, out_shardings=rows), [
        jax.ShapeDtypeStruct((n, d), jnp.bfloat16, sharding=rows),
        jax.ShapeDtypeStruct((golden.layers, n, n), jnp.bfloat16, sharding=cols),
    ]


def kernel(_: Golden, mesh: Mesh) -> tuple[Any, list[Any]]:
    """A Pallas kernel that copies to the next chip, with and without a cost estimate."""

    def copy_to_next(x_ref: Any, out_ref: Any, send: Any, received: Any) -> None:
        following = jax.lax.rem(jax.lax.axis_index("tp") + 1, mesh.shape["tp"])
        copy = pltpu.make_async_remote_copy(
            src_ref=x_ref,
            dst_ref=out_ref,
            send_sem=send,
            recv_sem=received,
            device_id=(following,),
            device_id_type=pl.DeviceIdType.MESH,
        )
        copy.start()
        copy.wait()

    def call(x: Any, cost: Any) -> Any:
        return pl.pallas_call(
            copy_to_next,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
            compiler_params=pltpu.CompilerParams(has_side_effects=True),
            cost_estimate=cost,
        )(x)

    def run(x: Any) -> Any:
        stated = pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=0, remote_bytes_transferred=x.size * 2
        )
        with jax.named_scope("prefill/layer0/mlp"):
            return call(call(x, stated), None)

    return _replicated(run, mesh, (8, 1024))


def local_kernels(_: Golden, mesh: Mesh) -> tuple[Any, list[Any]]:
    """Local kernels (splash attention, XLA's ragged dot, megablox) and one all-reduce."""
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((128, 128))] * 2)

    def run(x: Any, rows: Any, experts: Any) -> Any:
        attend = splash_attention_kernel.make_splash_mha_single_device(mask)
        sizes = jnp.full((4,), 16, jnp.int32) + jax.lax.axis_index("tp")
        with jax.named_scope("prefill/layer0"):
            with jax.named_scope("attn"):
                x = jax.lax.psum(attend(x, x, x), "tp")
            with jax.named_scope("moe.experts"):
                rows = jax.lax.ragged_dot(rows, experts, sizes)
                rows = gmm(rows, experts, sizes, jnp.bfloat16, (64, 128, 128))
        return x, rows

    return _replicated(run, mesh, (2, 128, 128), (64, 128), (4, 128, 128))


def _replicated(run: Any, mesh: Mesh, *shapes: tuple[int, ...]) -> tuple[Any, list[Any]]:
    everywhere = NamedSharding(mesh, P())
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped), [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=everywhere) for shape in shapes
    ]


PROGRAMS = {
    "decoder": decoder,
    "combined": combined,
    "several": several,
    "windowed": windowed,
    "across_slices": across_slices,
    "kernel": kernel,
    "local_kernels": local_kernels,
}
