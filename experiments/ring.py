"""A matmul with reduce-scattered partial sums: one operation, an explicit ring, or the compiler's choice.

The down projection of Llama-3.1-8B's MLP over 8 chips: T tokens, F MLP width, D residual
width, n devices that split F; each device ends with T/n of the summed tokens.
"""

import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshscope.backends.compile.worker import set_environment

T, F, D = 8192, 14336, 4096
AXIS = "tp"
GRID = "v5e:2x4"
ORDER = (0, 2, 4, 6, 7, 5, 3, 1)  # a ring of neighbors on the 2x4 grid
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "ring"

Program = Callable[[Any, Any], Any]


def after_the_matmul(x: Any, w: Any) -> Any:
    """[T, f] x [f, D] -> [T/n, D]: the matmul, then one reduce-scatter."""
    from jax import lax  # noqa: PLC0415  after set_environment

    return lax.psum_scatter(x @ w, AXIS, scatter_dimension=0, tiled=True)


def ring(x: Any, w: Any) -> Any:
    """As a ring: n partial matmuls, with the partial sum moving to the next device between them."""
    return _ring(x, w, step=1)


def both_ways(x: Any, w: Any) -> Any:
    """As two rings in opposite directions, each with half of the columns."""
    import jax.numpy as jnp  # noqa: PLC0415

    half = w.shape[1] // 2
    halves = (_ring(x, w[:, :half], step=1), _ring(x, w[:, half:], step=-1))
    return jnp.concatenate(halves, axis=1)


def _ring(x: Any, w: Any, *, step: int) -> Any:
    """Device i adds its part of chunk i + step*(n-1-s) at step s, so that chunk i ends on device i."""
    from jax import lax  # noqa: PLC0415

    n = lax.axis_size(AXIS)
    me, n_rows = lax.axis_index(AXIS), x.shape[0] // n
    pairs = [(i, (i + step) % n) for i in range(n)]
    total = None
    for s in range(n):
        chunk = (me + step * (n - 1 - s)) % n
        part = lax.dynamic_slice_in_dim(x, chunk * n_rows, n_rows) @ w
        total = part if total is None else lax.ppermute(total, AXIS, pairs) + part
    return total


WAYS: dict[str, tuple[Program | None, str]] = {
    "matmul, then psum_scatter": (after_the_matmul, ""),
    "ring of ppermutes": (ring, ""),
    "two rings": (both_ways, ""),
    "annotations only": (None, ""),
}


def lowered(way: str, devices: list[Any]) -> Any:
    """The program of a variant, lowered for these devices without allocating anything."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415
    from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: PLC0415
    from jax.sharding import PartitionSpec as P  # noqa: PLC0415

    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    specs = (P(None, AXIS), P(AXIS, None))
    program = WAYS[way][0]
    if program is None:
        run = jax.jit(lambda x, w: x @ w, out_shardings=NamedSharding(mesh, P(AXIS, None)))
    else:
        run = jax.jit(
            jax.shard_map(
                program, mesh=mesh, in_specs=specs, out_specs=P(AXIS, None), check_vma=False
            )
        )
    shapes = ((T, F), (F, D))
    arguments = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )
    return run.lower(*arguments)


def compile_ways() -> Iterator[tuple[str, Path]]:
    """Compiles every variant that is not stored; yields each with its scheduled HLO."""
    set_environment()
    for way in WAYS:
        path = FOLDER / f"{way.replace(',', '').replace(' ', '_')}.hlo.txt.gz"
        if not path.exists():
            _compile(way, path)
        yield way, path


def _compile(way: str, path: Path) -> None:
    from jax.experimental import topologies  # noqa: PLC0415

    started = time.monotonic()
    topology = topologies.get_topology_desc(platform="tpu", topology_name=GRID)
    compiled = lowered(way, [topology.devices[i] for i in ORDER]).compile()
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = {name: version(name) for name in ("jax", "libtpu")}
    path.with_suffix(".json").write_text(json.dumps(versions), encoding="utf-8")
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(compiled.as_text())
    sys.stderr.write(f"{way}: {time.monotonic() - started:.0f} s\n")


if __name__ == "__main__":
    for _ in compile_ways():
        pass
