"""What single operations reach of a chip's peaks, and their fixed times: published measurements.

`compiler_facts` has what depends on the compiler, `fitted_constants.json` what was fitted to whole steps. No
figure was measured on a TPU by this project.
"""

from dataclasses import dataclass

from meshscope.spec.hardware.compiler_facts import Fact

Interval = tuple[float, float]  # factors, or fractions, at the bounds of a range


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakEfficiency:
    """Fraction of the published peaks that large operations reach, with the measured range.

    `hbm` is that of one op that reads, `hbm_write` of one that writes, `hbm_busy` that of reads by several
    transfers at a time. `hbm_interval` is relative to all three.
    """

    matmul: float
    matmul_interval: Interval
    hbm: float
    hbm_write: float
    hbm_busy: float
    hbm_interval: Interval


TPU_EFFICIENCY = Fact(
    value=PeakEfficiency(
        matmul=0.86,
        matmul_interval=(0.7, 1.0),
        hbm=0.91,
        hbm_write=0.76,
        hbm_busy=0.95,
        hbm_interval=(0.8, 1.1),
    ),
    source="HBM: the rates of ops that only read or only write, of which v5e, v5p and v6e have eight in "
    "benchmarks/pass_cycles.py; copies then reach 83 % (measured: v5e 82 %, v6e 83 %, tpu7x 75 to 87 %). "
    "Several transfers: Llama-3.1-70B on 16 v5e leaves no room for less than 93 % (docs/time.md). "
    "Large bf16 products: tpu7x 83 % (16384) and v6e 82 and 90 % (8192^3, 754 and 827 of 918 TFLOP/s); "
    "97 % is the best of tpu7x",
)

GPU_EFFICIENCY = Fact(
    value=PeakEfficiency(
        matmul=0.82,
        matmul_interval=(0.7, 0.9),
        hbm=0.95,
        hbm_write=0.95,
        hbm_busy=0.95,
        hbm_interval=(0.9, 1.05),
    ),
    source="HBM, the better of reads and a triad: A100 80 GB 1,794 of 2,039 GB/s, A100 40 GB 1,500 of 1,555, "
    "H100 PCIe 1,942 of 2,039, GH200 3,783 of 4,000 (RRZE-HPC/gpu-benches@1038c5d, gpu-stream): 88 to 96 %. "
    "bf16 products at their best shapes: A100 SXM 87 %, GH200 84 %, A100 PCIe 81 %, H100 SXM 80 % "
    "(stas00/ml-engineering@b9e2972, compute/accelerator). The values are medians; the intervals also allow "
    "for less favorable shapes",
)

MEASURED_EFFICIENCY = Fact(
    value=PeakEfficiency(
        matmul=1.0,
        matmul_interval=(0.85, 1.15),
        hbm=1.0,
        hbm_write=1.0,
        hbm_busy=1.0,
        hbm_interval=(0.85, 1.15),
    ),
    source="rates that were measured by shape on the device itself; the interval is an assumption",
)

KERNEL_FRAC = Fact(
    value=0.55,
    source="fraction of the matmul peak in attention kernels: ragged paged attention reaches 73 % in prefill "
    "on tpu7x, 63 % if masked blocks count as work (arXiv 2604.15464); older kernels reach about half",
)
KERNEL_INTERVAL: Fact[Interval] = Fact(value=(0.4, 0.75), source=KERNEL_FRAC.source)
MODEL_INTERVAL: Fact[Interval] = Fact(
    value=(0.75, 1.6),
    source="assumed factor of kernels whose algorithm is known: nothing checks them on a chip, and bundles "
    "leave out stalls",
)
BYTES_INTERVAL: Fact[Interval] = Fact(
    value=(0.25, 4.0),
    source="assumed factor of kernels of which only the operands are known: they may read a part of them, or "
    "several times the same",
)

VMEM_OVER_HBM = Fact(
    value=14.0,
    source="VMEM reads 23,296 GB/s beside an HBM of 1,638 GB/s (plane statistics of a v6e profile)",
)

_TRAINING_STEP = (
    "ops without products in a training step on v5p (openxla/xprof@5fe358978e59, golden hlo_stats)"
)
READ_LATENCY_S = Fact(
    value=0.58e-6,
    source=f"{_TRAINING_STEP}: arrays of some kilobytes take 1.02 to 1.25 us to be read and written (30 ops), "
    "whatever their size",
)
WRITE_LATENCY_S = Fact(
    value=0.34e-6, source=f"{_TRAINING_STEP}: they take 0.51 to 0.63 us to be written (14 ops)"
)
LAUNCH_S = Fact(
    value=0.2e-6, source="assumed: more than the 0.07 us of a buffer allocation in the same step"
)
LATENCY_INTERVAL: Fact[Interval] = Fact(value=(0.8, 2.0), source="assumed")
# An op below this, of which launch and latency take more than half, is a small one.
SMALL_S = Fact(value=3e-6, source="above all small ops of the same step; used to name them only")

CORE_SHARE = Fact(
    value=4.0,
    source="HBM share of the op on the core beside a share of 1 for copies: an op keeps two windows of each of "
    "two operands in flight, copies one transfer. The decode step of Llama-3.1-70B on v5e with DP2 x TP8, "
    "whose fusions read weights beside copies: 12.6 ms simulated and 11.85 ms published, against 14.3 ms "
    "with equal shares",
)

UNKNOWN_FACTORS: Fact[Interval] = Fact(
    value=(0.0, 10.0), source="assumed for ops without a cost model, of the time of their bytes"
)
SPREAD = Fact(
    value=1.2,
    source="factor that covers the errors of published steps other than those of their kernels and "
    "collectives (tests/published)",
)
