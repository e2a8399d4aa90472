"""Published peak figures of chips, each with its source.

Achieved rates are measurements; runs and profiles hold them.
"""

from dataclasses import dataclass
from enum import StrEnum

from meshscope.errors import SpecError, nearest

GIB = 2**30

SCALING_BOOK = "How to Scale Your Model, part 2 (jax-ml/scaling-book@0819a7d, tpus.md)"
CLOUD = "cloud.google.com/tpu/docs"
TPU7X_PAGE = "cloud.google.com/tpu/docs/tpu7x, quoted 2026-02 by yangwhale/gpu-tpu-pedia tpu_v7_benchmark_report.md"

HOPPER_SOURCE = "NVLink 450 GB/s one direction: an author of NCCL in NVIDIA/nccl-tests issue 212"


class ChipKind(StrEnum):
    """The type of accelerator."""

    TPU = "tpu"
    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Published peaks of one chip; None if no figure is published."""

    name: str
    kind: ChipKind
    devices_per_chip: int  # as listed by JAX
    n_grid_dims: int  # 2: a 2D torus, 3: a 3D torus, 1: no torus
    chips_per_host: int
    hbm_bytes: int | None
    hbm_bytes_per_s: float | None
    bf16_flops_per_s: float | None
    link_bytes_per_s: float | None  # one link, ONE direction
    # An axis wraps around if its size is a multiple of this. A 3D torus wraps only if all three
    # sizes are: optical switches connect whole cubes (same page).
    wraps_from: int | None
    source: str
    pod_chips: int | None = None  # chips of a pod, the most that ICI connects
    clock_hz: float | None = None  # clock of the cycles in the compiler's estimates
    mxu_dim: int | None = None  # rows and columns of one matrix unit
    compiler_config: str | None = None  # libtpu's chip configuration, if not its default
    die_bytes_per_s: float | None = None  # between the two cores of a chip, one direction

    # HBM of one device that programs may use; libtpu 0.0.42.1 reserves the rest (the limit that it
    # states when a program exceeds it).
    program_hbm_bytes: int | None = None

    @property
    def device_hbm_bytes(self) -> int | None:
        """HBM of one device that programs may use, in bytes; all of it if no limit is known."""
        if self.hbm_bytes is None or self.program_hbm_bytes is not None:
            return self.program_hbm_bytes
        return self.hbm_bytes // self.devices_per_chip


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            kind=ChipKind.TPU,
            devices_per_chip=1,  # megacore: programs use both cores as one device, as JAX lists them
            n_grid_dims=3,
            chips_per_host=4,
            hbm_bytes=32 * GIB,
            program_hbm_bytes=int(30.75 * GIB),
            hbm_bytes_per_s=1.2e12,
            bf16_flops_per_s=2.75e14,
            link_bytes_per_s=4.5e10,
            wraps_from=4,
            pod_chips=4096,
            source=SCALING_BOOK,
            compiler_config="megacore",
            mxu_dim=128,
            clock_hz=1.05e9,  # 1050 MHz: Jouppi et al., arXiv 2304.01433, table 4; 8 MXUs of 128x128 give the peak
        ),
        Chip(
            name="v5e",
            kind=ChipKind.TPU,
            devices_per_chip=1,
            n_grid_dims=2,
            chips_per_host=4,
            hbm_bytes=16 * GIB,
            program_hbm_bytes=int(15.75 * GIB),
            hbm_bytes_per_s=8.19e11,
            bf16_flops_per_s=1.97e14,
            link_bytes_per_s=4.5e10,
            wraps_from=16,
            pod_chips=256,
            source=f"{SCALING_BOOK}; HBM rate: {CLOUD}/v5e",
            mxu_dim=128,
            clock_hz=1.5e9,  # 4 MXUs of 128x128 at 2 flops per cell and cycle give the published peak
        ),
        Chip(
            name="v5p",
            kind=ChipKind.TPU,
            devices_per_chip=1,
            n_grid_dims=3,
            chips_per_host=4,
            hbm_bytes=95 * GIB,
            program_hbm_bytes=int(95.74 * GIB),
            hbm_bytes_per_s=2.765e12,
            bf16_flops_per_s=4.59e14,
            # 1200 GB/s per chip, both directions, over six links. The book's 9e10 is below measured
            # all-gathers: 3/4 x 131,072,000 B over one link in 983.4 us are 1.0e11 B/s.
            link_bytes_per_s=1e11,
            wraps_from=4,
            pod_chips=8960,
            source=f"{SCALING_BOOK}; HBM 95 GiB and ICI: {TPU7X_PAGE}; HBM rate: {CLOUD}/v5p-training",
            mxu_dim=128,
            clock_hz=1.75e9,  # 8 MXUs of 128x128 on two cores give the published peak
        ),
        Chip(
            name="v6e",
            kind=ChipKind.TPU,
            devices_per_chip=1,
            n_grid_dims=2,
            chips_per_host=4,
            hbm_bytes=32 * GIB,
            program_hbm_bytes=int(31.25 * GIB),
            hbm_bytes_per_s=1.638e12,
            bf16_flops_per_s=9.18e14,
            link_bytes_per_s=9e10,
            wraps_from=16,
            pod_chips=256,
            source=f"{SCALING_BOOK}; HBM rate and FLOPs: plane statistics of XPlanes of v6e",
            mxu_dim=256,
            clock_hz=1.75e9,  # 4 x 256x256 cells give 918e12 flops/s, the peak stated in XPlanes of v6e
        ),
        Chip(
            name="tpu7x",
            kind=ChipKind.TPU,
            devices_per_chip=2,
            n_grid_dims=3,
            chips_per_host=4,
            hbm_bytes=192 * GIB,
            program_hbm_bytes=int(94.75 * GIB),
            hbm_bytes_per_s=7.38e12,
            bf16_flops_per_s=2.307e15,
            # 1200 GB/s per chip, both directions, over the six links of a 3D torus.
            link_bytes_per_s=1e11,
            wraps_from=4,
            pod_chips=9216,
            source=TPU7X_PAGE,
            die_bytes_per_s=6e11,  # six times an ICI link, by the same page
            mxu_dim=256,
            clock_hz=2.2e9,  # 4 x 256x256 cells on each of two cores give the published peak
        ),
        Chip(
            name="h100",
            kind=ChipKind.GPU,
            devices_per_chip=1,
            n_grid_dims=1,
            chips_per_host=8,
            hbm_bytes=80 * 10**9,
            hbm_bytes_per_s=3.35e12,
            bf16_flops_per_s=9.89e14,
            link_bytes_per_s=4.5e11,
            wraps_from=None,
            source=f"{HOPPER_SOURCE}; HBM 3.35e12 B/s and half of 1.979e15 flops with sparsity: scaling "
            "book, part 1 (roofline.md)",
        ),
        Chip(
            name="h200",
            kind=ChipKind.GPU,
            devices_per_chip=1,
            n_grid_dims=1,
            chips_per_host=8,
            hbm_bytes=141 * 10**9,
            hbm_bytes_per_s=4.8e12,
            bf16_flops_per_s=9.89e14,
            link_bytes_per_s=4.5e11,
            wraps_from=None,
            source=f"{HOPPER_SOURCE}; 141 GB of HBM3e: mlcommons/inference_results_v4.1, NVIDIA's system "
            "H200-SXM-141GBx8; 4.8 TB/s and compute as an H100's: aiwiki.ai/wiki/nvidia_h200, quoting "
            "NVIDIA's announcement of 2023-11-13",
        ),
        Chip(
            name="a100",
            kind=ChipKind.GPU,
            devices_per_chip=1,
            n_grid_dims=1,
            chips_per_host=8,
            hbm_bytes=80 * 10**9,
            hbm_bytes_per_s=2.039e12,
            bf16_flops_per_s=3.12e14,
            link_bytes_per_s=3e11,
            wraps_from=None,
            source="A100 80G SXM4: glennklockwood.com/garden/processors/A100, quoting NVIDIA's datasheet "
            "1758950 r4: NVLink 300+300 GB/s",
        ),
        Chip(
            name="cpu",
            kind=ChipKind.CPU,
            devices_per_chip=1,
            n_grid_dims=1,
            chips_per_host=1,
            hbm_bytes=None,
            hbm_bytes_per_s=None,
            bf16_flops_per_s=None,
            link_bytes_per_s=None,
            wraps_from=None,
            source="virtual CPU devices of XLA; no published figures",
        ),
    )
}

CHIP_ALIASES: dict[str, str] = {
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "trillium": "v6e",
    "v7x": "tpu7x",
    "tpuv7x": "tpu7x",
    "ironwood": "tpu7x",
}


def chip_of(name: str) -> Chip:
    """The chip with this name or alias; SpecError suggests the nearest names."""
    key = CHIP_ALIASES.get(name.lower(), name.lower())
    if key not in CHIPS:
        raise SpecError(f"unknown chip '{name}'. {nearest(name, [*CHIPS, *CHIP_ALIASES])}")
    return CHIPS[key]
