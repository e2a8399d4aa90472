"""The compiler's estimates of square bf16 products beside published measurements.

The range of the last column is `cycles_interval` in `hardware/compiler_facts.json`. Compiles for TPU
without one.
Published: Ironwood (accelerator-microbenchmarks v1.1-legacy, GEMM, TFLOP/s a device) and Trillium
(matmul of 8192^3: 827.47 and 754.22 TFLOP/s).
"""

import re
from collections.abc import Iterator

from meshscope.backends.compile.worker import set_environment
from meshscope.hardware.chips import Chip, chip_of

set_environment()
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
# Chip, slice, n of n x n products, measured TFLOP/s of one device.
MEASURED = (
    ("tpu7x", "tpu7x:2x2x1", 128, 2.59),
    ("tpu7x", "tpu7x:2x2x1", 256, 18.29),
    ("tpu7x", "tpu7x:2x2x1", 512, 105.08),
    ("tpu7x", "tpu7x:2x2x1", 1024, 349.73),
    ("tpu7x", "tpu7x:2x2x1", 2048, 679.28),
    ("tpu7x", "tpu7x:2x2x1", 4096, 892.94),
    ("tpu7x", "tpu7x:2x2x1", 16384, 950.13),
    ("tpu7x", "tpu7x:2x2x1", 32768, 956.38),
    ("v6e", "v6e:2x2", 8192, 827.47),
    ("v6e", "v6e:2x2", 8192, 754.22),
)


def estimated_s(chip: Chip, topology: str, n: int) -> float:
    """Seconds of one product, from the compiler's cycles and the chip's clock."""
    import jax  # noqa: PLC0415  after the environment
    import jax.numpy as jnp  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415
    from jax.experimental import topologies  # noqa: PLC0415
    from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: PLC0415

    description = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, chips_per_host_bounds=(2, 2, 1)
    )
    one = NamedSharding(Mesh(np.array(description.devices[:1]), ("x",)), PartitionSpec())
    array = jax.ShapeDtypeStruct((n, n), jnp.bfloat16, sharding=one)
    text = str(jax.jit(lambda a, b: a @ b).lower(array, array).compile().as_text())
    cycles = sum(map(int, _CYCLES.findall(text[text.index("ENTRY") :])))
    assert chip.clock_hz is not None
    return cycles / chip.clock_hz


def rows() -> Iterator[str]:
    """One line per published product."""
    for name, topology, n, tera in MEASURED:
        measured_s = 2 * n**3 / (tera * 1e12)
        estimate_s = estimated_s(chip_of(name), topology, n)
        yield (
            f"{name:6} {n:6} {measured_s * 1e6:12,.2f} {estimate_s * 1e6:12,.2f} "
            f"{measured_s / estimate_s:8.2f}"
        )


def main() -> None:
    """Prints the table."""
    print(f"{'chip':6} {'n':>6} {'measured us':>12} {'estimated us':>12} {'ratio':>8}")
    for row in rows():
        print(row)


if __name__ == "__main__":
    main()
