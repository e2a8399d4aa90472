"""Kernels against plain attention and products, in the TPU compiler's cycles; the tables of docs/kernels.md.

Run: python benchmarks/kernels.py [prefill] [decode] [experts]. Each line is one part of one layer on one
device under v6e-8, tp=8, compiled alone. The compiler states cycles for fusions and copies but not for
kernels. A separate column therefore gives a kernel's lower bound: its products at half the peak (a causal
mask skips half of the blocks) or, in decode, its cache at the full HBM rate.
"""

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from meshscope.backends.compile.worker import set_environment

set_environment()  # libtpu reads the environment when JAX is imported
# ruff: noqa: E402

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshscope.events.enums import Phase
from meshscope.hardware.topology import parse_topology
from meshscope.plans.plan import parse_plan
from meshscope.plans.workload import Workload
from meshscope.programs.jax.decode_attention import DecodeInputs, decode_attention
from meshscope.programs.jax.kernels import PrefillKernel
from meshscope.programs.jax.layout import layout_of
from meshscope.programs.jax.numerics import causal_mask, dot_product_attention

CHIP = parse_topology("v6e-8").chip
CLOCK_HZ = 1.75e9  # of v6e: the compiler's cycles match the published peak


class Measured(NamedTuple):
    """The compiler's estimate of one program."""

    cycles: int
    temp_bytes: int
    n_kernels: int


class Heads(NamedTuple):
    """Attention heads of a model on one device."""

    model: str
    queries: int
    kv: int
    width: int
    value_width: int
    window: int | None = None
    has_sinks: bool = False
    cache: Any = jnp.bfloat16
    is_latent: bool = False  # the values are the first channels of the keys


LLAMA = Heads("Llama-3.1-8B", 4, 1, 128, 128)
QWEN = Heads("Qwen3-32B", 8, 1, 128, 128)
PREFILLS = [
    (heads, batch, prompt) for heads in (LLAMA, QWEN) for batch, prompt in ((8, 1024), (1, 8192))
]
PREFILLS += [
    (Heads("DeepSeek-V3.1", 16, 16, 192, 128), 8, 1024),
    (Heads("gpt-oss-120b, full", 8, 1, 64, 64, None, has_sinks=True), 8, 1024),
    (Heads("gpt-oss-120b, sliding", 8, 1, 64, 64, 128, has_sinks=True), 8, 1024),
]
DECODES = [
    *((heads, batch, 1152) for heads in (LLAMA, QWEN) for batch in (1, 8, 64)),
    (LLAMA, 8, 8320),
    (QWEN, 8, 8320),
    (Heads("Llama-3.1-8B, tp=1", 32, 8, 128, 128), 8, 1152),
    (Heads("Llama-3.1-70B, s8 cache", 8, 1, 128, 128, cache=jnp.int8), 32, 2304),
    (Heads("gpt-oss-120b, sliding", 8, 1, 128, 128, 128), 64, 2304),  # 64 of keys, 64 of values
    (Heads("DeepSeek-V3.1, latent", 16, 1, 576, 512, is_latent=True), 8, 2304),
    (Heads("DeepSeek-V3.1, latent", 128, 1, 576, 512, is_latent=True), 8, 2304),
]
# Rows, residual width, local expert width, local experts.
EXPERTS = [
    (8192, 2048, 768, 16),
    (8192, 2048, 96, 128),
    (100, 2048, 768, 16),
    (4, 2880, 360, 128),
    (8, 2880, 360, 128),
]


def measured(
    function: Callable[..., Any], *shapes: tuple[tuple[int, ...], Any], n_donated: int = 0
) -> Measured:
    """The compiler's estimate of a function compiled for one v6e chip.

    The first `n_donated` arguments and results are one array each, in a layout of the compiler's choice.
    """
    description = topologies.get_topology_desc(
        platform="tpu", topology_name="v6e:1x1", chips_per_host_bounds=(1, 1, 1)
    )
    everywhere = NamedSharding(Mesh(np.array(description.devices), ("x",)), PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=everywhere) for shape in shapes]
    free = Format(Layout.AUTO, everywhere)
    formats = [free if index < n_donated else everywhere for index in range(len(shapes))]
    n_results = len(jax.tree.leaves(jax.eval_shape(function, *arguments)))
    results = [free if index < n_donated else everywhere for index in range(n_results)]
    jitted = jax.jit(
        function,
        in_shardings=formats,
        out_shardings=tuple(results) if n_results > 1 else everywhere,
        donate_argnums=tuple(range(n_donated)),
    )
    compiled = jitted.lower(*arguments).compile()
    text = compiled.as_text()
    stated = [int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', text)]
    return Measured(
        cycles=sum(n for n in stated if n < 2**62),  # a loop with an unknown bound has 2**63 - 1
        temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
        n_kernels=text.count('custom_call_target="tpu_custom_call"'),
    )


def prefill(heads: Heads, batch: int, prompt: int) -> Iterator[tuple[str, Measured, float]]:
    """Plain and splash attention, each with the lower bound of its kernel in seconds."""
    layout = layout_of(parse_plan("tp=1"), Workload(), Phase.PREFILL)
    shapes = [
        ((batch, prompt, n, width), jnp.bfloat16)
        for n, width in (
            (heads.queries, heads.width),
            (heads.kv, heads.width),
            (heads.kv, heads.value_width),
        )
    ]
    shapes.append(((heads.queries,), jnp.bfloat16))
    settings: dict[str, Any] = {"scale": heads.width**-0.5}

    def plain(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        positions = jnp.arange(prompt)
        is_seen = causal_mask(positions, positions, heads.window)
        return dot_product_attention(
            q, k, v, is_seen, **settings, sinks=sinks if heads.has_sinks else None
        )

    def kernel(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        sinks = sinks if heads.has_sinks else None
        return PrefillKernel(layout=layout)(q, k, v, **settings, window=heads.window, sinks=sinks)

    pairs = prompt * (prompt / 2 if heads.window is None else heads.window)
    flops = 2 * batch * heads.queries * pairs * (heads.width + heads.value_width)
    peak = CHIP.bf16_flops_per_s
    assert peak is not None
    yield "plain", measured(plain, *shapes), 0.0
    yield "splash", measured(kernel, *shapes), flops / (peak / 2)


def decode(heads: Heads, batch: int, context: int) -> Iterator[tuple[str, Measured, float]]:
    """Plain attention and the kernel at the end of the static cache, both writing the new position."""
    n_rows = 1 if heads.is_latent else 2
    new = [((batch, heads.kv, 1, heads.width), jnp.bfloat16)] * n_rows
    caches = [((1, batch, heads.kv, context, heads.width), heads.cache)] * n_rows
    query = ((batch, heads.kv, heads.queries // heads.kv, heads.width), jnp.bfloat16)
    shapes = [*caches, query, *new, ((), jnp.int32)]

    def inputs(*arrays: Any) -> DecodeInputs:
        return DecodeInputs(
            q=arrays[n_rows],
            new=arrays[n_rows + 1 : -1],
            caches=arrays[:n_rows],
            value_width=heads.value_width,
            layer=0,
            position=arrays[-1],
            scale=heads.width**-0.5,
            window=heads.window,
        )

    def kernel(*arrays: Any) -> Any:
        out, *caches = decode_attention(inputs(*arrays), mean_context=context)
        return *caches, out

    def plain(*arrays: Any) -> Any:
        step = inputs(*arrays)
        caches = [
            jax.lax.dynamic_update_slice(
                cache, x.astype(cache.dtype)[None], (0, 0, 0, step.position, 0)
            )
            for cache, x in zip(step.caches, step.new, strict=True)
        ]
        k, v = (caches[i][0].swapaxes(1, 2).astype(jnp.bfloat16) for i in (0, -1))
        is_seen = causal_mask(step.position + jnp.arange(1), jnp.arange(context), heads.window)
        q = step.q.reshape(batch, 1, heads.queries, heads.width)
        v = v[..., : heads.value_width]
        return *caches, dot_product_attention(q, k, v, is_seen, scale=step.scale)

    n_seen = min(context, heads.window or context)
    cache_bytes = n_rows * batch * n_seen * heads.kv * heads.width * jnp.dtype(heads.cache).itemsize
    bound_s = cache_bytes / (CHIP.hbm_bytes_per_s or np.inf)
    yield "plain", measured(plain, *shapes, n_donated=n_rows), 0.0
    yield "kernel", measured(kernel, *shapes, n_donated=n_rows), bound_s


def experts(rows: int, hidden: int, ffn: int, n: int) -> Iterator[tuple[str, Measured, float]]:
    """One product per expert: XLA's ragged dot, the same padded to 8 rows, and megablox."""
    shapes = [((rows, hidden), jnp.bfloat16), ((n, hidden, ffn), jnp.bfloat16), ((n,), jnp.int32)]
    tiling = (min(512, -(-rows // 8) * 8), min(hidden, 1024), min(ffn, 1024))
    missing = -rows % 8

    def padded(x: Any, w: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot(jnp.pad(x, ((0, missing), (0, 0))), w, sizes)[:rows]

    def megablox(x: Any, w: Any, sizes: Any) -> Any:
        x = jnp.pad(x, ((0, -rows % tiling[0]), (0, 0)))
        return gmm(x, w, sizes, jnp.bfloat16, tiling)[:rows]

    yield "ragged dot", measured(jax.lax.ragged_dot, *shapes), 0.0
    if missing:
        yield "ragged dot, padded", measured(padded, *shapes), 0.0
    yield "megablox gmm", measured(megablox, *shapes), 0.0


TABLES: dict[str, tuple[Callable[..., Any], list[Any], str]] = {
    "prefill": (prefill, PREFILLS, "batch {1}, prompt {2}"),
    "decode": (decode, DECODES, "batch {1}, context {2}"),
    "experts": (experts, EXPERTS, "[{0}, {1}] x [{3}, {1}, {2}]"),
}


def main(wanted: list[str]) -> None:
    """Prints one Markdown table per requested part."""
    for name in wanted or list(TABLES):
        function, cases, words = TABLES[name]
        print(
            f"\n{name}\n\n| case | path | kernels | kcycles | us | kernel bound, us | temporary, MB |"
        )
        print("|---|---|---|---|---|---|---|")
        for case in cases:
            head = f"{case[0].model}, " if isinstance(case[0], Heads) else ""
            for path, estimate, bound_s in function(*case):
                print(
                    f"| {head}{words.format(*case)} | {path} | {estimate.n_kernels} "
                    f"| {estimate.cycles / 1e3:.0f} | {estimate.cycles / CLOCK_HZ * 1e6:.0f} "
                    f"| {bound_s * 1e6:.0f} | {estimate.temp_bytes / 1e6:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
