"""Published times of elementwise ops beside the compiler's estimates and their bytes.

    python benchmarks/pass_cycles.py            the fractions of the HBM rate
    python benchmarks/pass_cycles.py compile    with the compiler's estimates; needs no TPU

The fractions of the HBM rate in reads and writes in `hardware.operation_rates` are those of ops that do
only one of them; ops that do both are held out.
Sources: openxla/xprof@01d85deb6a7a, test_xplanes/tpu_inference_2.xplane.pb (v6e); openxla/xprof@5fe358978e59,
golden hlo_stats of a MaxText step on 4 v5p chips; AI-Hypercomputer's HBM microbenchmarks of Trillium
(tpu-recipes) and Ironwood (accelerator-microbenchmarks). The v5p lines are one of each
type among the 98 fusions of the step; v5e: vllm-project/tpu-inference issue 3127.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from meshscope.backends.compile.worker import set_environment
from meshscope.hardware.chips import chip_of
from meshscope.hardware.compiler_facts import OPERATIONS

_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
MB = 1e6


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One op: bytes read and written, and its time on one device."""

    chip: str
    name: str
    n_read: float
    n_written: float
    seconds: float
    program: str | None = None  # its name in _programs, if it can be compiled

    @property
    def bytes_per_s(self) -> float:
        """The published HBM rate of one device."""
        chip = chip_of(self.chip)
        assert chip.hbm_bytes_per_s is not None
        return chip.hbm_bytes_per_s / chip.devices_per_chip

    @property
    def frac(self) -> float:
        """The fraction of the published HBM rate."""
        return (self.n_read + self.n_written) / self.seconds / self.bytes_per_s

    @property
    def ends_s(self) -> float:
        """Launch, first read and last write."""
        reads, writes = self.n_read > 0, self.n_written > 0
        ends_s = OPERATIONS.launch_s + OPERATIONS.read_latency_s * reads
        return ends_s + OPERATIONS.write_latency_s * writes

    def error(self, read_frac: float, write_frac: float) -> float:
        """Modeled over measured time, minus 1."""
        moved_s = (self.n_read / read_frac + self.n_written / write_frac) / self.bytes_per_s
        return (moved_s + self.ends_s) / self.seconds - 1


def _op(  # noqa: PLR0913, PLR0917  a line of a table
    chip: str, name: str, read_mb: float, written_mb: float, us: float, program: str | None = None
) -> Measured:
    return Measured(
        chip=chip,
        name=name,
        n_read=read_mb * MB,
        n_written=written_mb * MB,
        seconds=us * 1e-6,
        program=program,
    )


MEASURED = (
    _op("v6e", "broadcast f32[5,1024,1024,256]", 0, 5368.7, 4443.8, "fill"),
    _op("v6e", "broadcast_add_fusion, the same array", 5368.7, 5368.7, 7917.5, "add"),
    _op("v6e", "copy of 32 MiB at 1,359.6 GB/s", 33.55, 33.55, 49.36, "copy"),
    _op("v5e", "copy f32[512,256000]", 524.3, 524.3, 1561.98),
    _op("v5e", "convert bf16 to f32 [512,256000]", 262.1, 524.3, 1236.7),
    _op("v5e", "argmax over f32[512,256000]", 524.3, 0, 696.2),
    _op("v5p", "fusion.339: optimizer, 7 arrays f32[512,16,7168]", 939.6, 704.6, 961.7),
    _op("v5p", "fusion.372: optimizer, f32[16,16,128,512]", 268.4, 201.4, 198.1),
    _op(
        "v5p",
        "fusion.336: f32[512,16,7168] to bf16[16,512,7168]",
        234.9,
        117.4,
        150.2,
        "transposing",
    ),
    _op("v5p", "broadcast.548: f32[16,512,7168]", 0, 234.9, 110.6, "fill"),
    _op("v5p", "fusion.323: f32[2048,32000] to f32[2048]", 262.2, 0, 107.0),
    _op("v5p", "fusion.331: f32[16,512,7168] to f32[]", 234.9, 0, 93.9, "squares"),
    _op("v5p", "broadcast.549: f32[16,7168,512]", 0, 234.9, 98.0),
    _op("v5p", "convert.658: f32[512,32000] to bf16", 65.5, 32.8, 60.3, "convert"),
    _op("v5p", "fusion.601: bf16[2048,7168], three in, one out", 88.1, 29.4, 53.1, "three"),
    _op("v5p", "fusion.369: f32 to bf16[16,512,16,128]", 67.1, 33.6, 46.6),
    _op("v5p", "convert.181: f32[32000,512] to bf16", 65.5, 32.8, 45.7, "convert_long"),
    _op("v5p", "fusion.605: norm of bf16[1,2048,2048]", 25.2, 8.4, 16.1),
    _op("v5p", "fusion.571: rotary embedding, bf16[1,2048,16,64]", 17.3, 16.8, 15.2),
    _op("v5p", "fusion.408: bf16[1,2048,2048]", 16.8, 8.4, 12.0),
    _op("v5p", "fusion.636: bf16 to f32[1,512,7168]", 7.3, 14.7, 9.4),
    _op("v5p", "broadcast.552: f32[16,16,128,512]", 0, 67.1, 32.9),
    _op("v5p", "copy.478: transpose of bf16[16,2048,128]", 8.39, 8.39, 8.86),
    _op("v5p", "copy.482: transpose of f32[16,2048,128]", 16.78, 16.78, 14.29),
    _op("v5p", "copy.367: f32[16,16,128,512] to bf16, transposed", 67.1, 33.6, 43.2),
    _op("v5p", "fusion.558: a slice of bf16[16,512,16,128]", 2.1, 2.1, 3.17),
    _op("v5p", "fusion.587: a slice of bf16[16,512,7168]", 7.34, 7.34, 6.45),
    _op("tpu7x", "copy of 16 MiB at 5,514 GB/s a chip", 16.8, 16.8, 12.17, "copy"),
    _op("tpu7x", "copy of 64 MiB at 6,194 GB/s a chip", 67.1, 67.1, 43.33),
    _op("tpu7x", "copy of 512 MiB at 6,400 GB/s a chip", 536.9, 536.9, 335.5, "copy_large"),
)


def _programs() -> dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], str]]]]:
    import jax.numpy as jnp  # noqa: PLC0415  after the environment

    whole, optimizer = (5, 1024, 1024, 256), (16, 512, 7168)
    return {
        "v6e fill": (lambda: jnp.full(whole, 1.0, jnp.float32), []),
        "v6e add": (lambda a: a + 1, [(whole, "float32")]),
        "v6e copy": (lambda a: a.copy(), [((4096, 4096), "bfloat16")]),
        "v5p fill": (lambda: jnp.full(optimizer, 1.0, jnp.float32), []),
        "v5p transposing": (
            lambda a: jnp.transpose(a, (1, 0, 2)).astype(jnp.bfloat16),
            [((512, 16, 7168), "float32")],
        ),
        "v5p squares": (lambda a: jnp.sum(a * a), [(optimizer, "float32")]),
        "v5p convert": (lambda a: a.astype(jnp.bfloat16), [((512, 32000), "float32")]),
        "v5p convert_long": (lambda a: a.astype(jnp.bfloat16), [((32000, 512), "float32")]),
        "v5p three": (lambda a, b, c: a * b + c, [((2048, 7168), "bfloat16")] * 3),
        "tpu7x copy": (lambda a: a.copy(), [((2048, 4096), "bfloat16")]),
        "tpu7x copy_large": (lambda a: a.copy(), [((65536, 4096), "bfloat16")]),
    }


SLICES = {"v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}


def estimated_s(measured: Measured) -> float | None:
    """Seconds from the compiler's cycles and the chip's clock; None without a program."""
    if measured.program is None:
        return None
    set_environment()
    import jax  # noqa: PLC0415  after the environment
    import numpy as np  # noqa: PLC0415
    from jax.experimental import topologies  # noqa: PLC0415
    from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: PLC0415

    description = topologies.get_topology_desc(
        platform="tpu", topology_name=SLICES[measured.chip], chips_per_host_bounds=(2, 2, 1)
    )
    one = NamedSharding(Mesh(np.array(description.devices[:1]), ("x",)), PartitionSpec())
    function, shapes = _programs()[f"{measured.chip} {measured.program}"]
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=one) for shape, dtype in shapes]
    placed = jax.jit(function, out_shardings=None if shapes else one)
    text = str(placed.lower(*arrays).compile().as_text())
    cycles = sum(map(int, _CYCLES.findall(text[text.index("ENTRY") :])))
    clock_hz = chip_of(measured.chip).clock_hz
    assert clock_hz is not None
    return cycles / clock_hz


def fitted_fracs() -> tuple[float, float]:
    """The median fractions of the HBM rate in ops that only read, and in ops that only write."""
    reads = (m for m in MEASURED if not m.n_written)
    writes = (m for m in MEASURED if not m.n_read)
    read = median(m.n_read / (m.seconds - m.ends_s) / m.bytes_per_s for m in reads)
    return read, median(m.n_written / (m.seconds - m.ends_s) / m.bytes_per_s for m in writes)


def main() -> None:
    """Prints the table and the constants that follow from it."""
    is_compiling = "compile" in sys.argv
    in_use = OPERATIONS.tpu_efficiency.hbm, OPERATIONS.tpu_efficiency.hbm_write
    for measured in MEASURED:
        estimate_s = estimated_s(measured) if is_compiling else None
        ratio = f" estimated / measured {estimate_s / measured.seconds:.2f}" if estimate_s else ""
        line = f"{measured.chip:6} {measured.name:50} {measured.frac:5.1%} of the HBM rate"
        print(
            f"{line} {measured.seconds * 1e6:9,.1f} us, modeled {measured.error(*in_use):+.0%}{ratio}"
        )
    print("reads {:.3f}, writes {:.3f} of the HBM rate".format(*fitted_fracs()))
    fitted = [m for m in MEASURED if not (m.n_read and m.n_written)]
    holdout = [m for m in MEASURED if m.n_read and m.n_written]
    for half, ops in (("fitted", fitted), ("holdout", holdout)):
        errors = sorted(abs(m.error(*in_use)) for m in ops)
        print(
            f"{len(ops)} {half} differ by {median(errors):.1%} (median), at most {errors[-1]:.1%}"
        )


if __name__ == "__main__":
    main()
