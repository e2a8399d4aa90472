"""What `meshscope.compile` of a function, and so the pytest plugin, adds to lowering and compiling it with JAX.

Run: make bench. Both sides are warm, without the cache, and alternate in one run. The ratio of the processor
seconds, which other work on the machine does not change much, should stay at or below 1.10; the wall seconds are
the least of each side. The last line is JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshscope
from meshscope.api.compile import described_devices
from meshscope.backends.compile.function import function_compiler
from meshscope.hardware.topology import parse_topology

N_PAIRS = 3
TOPOLOGY, AXIS = "v6e-8", "tp"
N_LAYERS, WIDTH, HIDDEN, ROWS = 8, 4096, 16384, 1024
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Seconds = tuple[float, float]  # processor time, wall time


def step(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Layers of two matrices each, split as in tensor parallelism."""
    for layer in range(N_LAYERS):
        x = x + jax.nn.relu(x @ up[layer]) @ down[layer]
    return x


def arguments() -> list[Any]:
    """The shapes and shardings of the step."""
    devices = np.array(described_devices(parse_topology(TOPOLOGY)), dtype=object)
    mesh = Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
    specs = {(ROWS, WIDTH): P(), (N_LAYERS, WIDTH, HIDDEN): P(None, None, AXIS)}
    specs[N_LAYERS, HIDDEN, WIDTH] = P(None, AXIS)
    return [
        jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for dims, spec in specs.items()
    ]


def worker_s() -> float:
    """Processor seconds of the process that owns the compiler, from Linux's /proc."""
    pid = function_compiler().worker.process.pid
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def timed(work: Callable[[], object]) -> Seconds:
    """Seconds of the work, in this process and in the compiler's."""
    jax.clear_caches()
    since = time.process_time() + worker_s(), time.perf_counter()
    work()
    return time.process_time() + worker_s() - since[0], time.perf_counter() - since[1]


def main() -> None:
    """Alternates the two and prints the seconds and the ratios."""
    shapes = arguments()
    works = {
        "bare": lambda: jax.jit(step).lower(*shapes).compile(),
        "meshscope": lambda: meshscope.compile(step, *shapes, topology=TOPOLOGY, cache=False),
    }
    seconds: dict[str, list[Seconds]] = {name: [] for name in works}
    for number in range(N_PAIRS + 1):
        for name, work in works.items():
            measured = timed(work)
            if number:  # the first pair imports and starts
                seconds[name].append(measured)
    figures = {f"{name}_cpu_s": min(cpu_s for cpu_s, _ in s) for name, s in seconds.items()}
    figures |= {f"{name}_wall_s": min(wall_s for _, wall_s in s) for name, s in seconds.items()}
    for clock in ("cpu", "wall"):
        figures[f"{clock}_ratio"] = figures[f"meshscope_{clock}_s"] / figures[f"bare_{clock}_s"]
    sys.stdout.write(f"{json.dumps(figures)}\n")


if __name__ == "__main__":
    main()
