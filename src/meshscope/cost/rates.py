"""What a device of a chip reaches: its published peaks, and the shares of them that work gets.

Shares and intervals are measurements of others, each with its source; nothing here was measured by
us on a TPU.
"""

from dataclasses import dataclass

from meshscope.cost.measured_rates import MeasuredRates, measured_rates
from meshscope.errors import SpecError
from meshscope.events.step_time import TimeBasis, TimeEstimate
from meshscope.interconnect.profile import ChipProfile
from meshscope.spec.hardware.chips import Chip, ChipKind

# Measured over estimated time of bf16 products of n x n matrices, where the estimate is that of
# libtpu 0.0.42.1 at the clock of the chip: tpu7x 1024 0.96, 2048 1.22, 4096 1.07, 16384 1.03, 32768
# 1.06; v6e 8192 0.78 and 0.86 (benchmarks/matmul_cycles.py, which names the sources). The interval
# is that of these seven; single products below a microsecond (tpu7x 128 to 512) come out at 0.6 to 0.8.
CYCLES_INTERVAL = (0.78, 1.22)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What large operations reach of the published peaks, with the range of what was measured."""

    matmul: float
    matmul_interval: tuple[float, float]
    hbm: float
    hbm_interval: tuple[float, float]


# HBM: tpu7x reaches 87 % (Ironwood HBM microbenchmark from 512 MiB on, 6,400 of 7,380 GB/s) and v6e 83 %
# (Trillium, 32 MiB, 1,359.6 of 1,638 GB/s); 75 % is what Ironwood has at 16 MiB. Large bf16 products: 83 %
# and 97 % for tpu7x (16384) and v6e (8192^3: 754 and 827 of 918 TFLOP/s are 82 and 90 %).
USUAL_REACH = Reach(matmul=0.86, matmul_interval=(0.7, 1.0), hbm=0.85, hbm_interval=(0.75, 1.0))

# HBM, the better of reading and a triad: A100 80 GB 1,794 of 2,039 GB/s, A100 40 GB 1,500 of 1,555, H100
# PCIe 1,942 of 2,039, GH200 3,783 of 4,000 (RRZE-HPC/gpu-benches@1038c5d, gpu-stream): 88 to 96 %. bf16
# products at their best shapes: A100 SXM 87 %, GH200 84 %, A100 PCIe 81 %, H100 SXM 80 %
# (stas00/ml-engineering@b9e2972, compute/accelerator). Medians of both; the intervals are wider than what
# was measured, by shapes that are not the best.
GPU_REACH = Reach(matmul=0.82, matmul_interval=(0.7, 0.9), hbm=0.95, hbm_interval=(0.85, 1.0))

# Of rates that were measured by shape on the device itself; the interval is a guess until steps judge it.
MEASURED_REACH = Reach(matmul=1.0, matmul_interval=(0.85, 1.15), hbm=1.0, hbm_interval=(0.85, 1.15))

# Of the peak, in attention kernels: ragged paged attention reaches 73 % in prefill on tpu7x, 63 % where
# masked blocks count as work (arXiv 2604.15464); older kernels about half.
KERNEL_FRAC = 0.55
KERNEL_INTERVAL = (0.4, 0.75)

# Of the HBM's rate, in large passes over arrays that lie alike: the median of every second of 22 measured
# passes in benchmarks/pass_cycles.py; the other eleven lie within 20 % of it, half of them within 11 %,
# and the interval is that of all.
PASS_FRAC = 0.76
PASS_INTERVAL = (0.58, 0.90)

# VMEM reads 23,296 GB/s beside an HBM of 1,638 GB/s (plane statistics of a v6e profile).
VMEM_OVER_HBM = 14.0

# What nobody prices: from nothing to ten times what reading and writing its arrays takes.
UNKNOWN_FACTORS = (0.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """What an operation takes, and where the figure comes from."""

    seconds: TimeEstimate
    basis: TimeBasis


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Peaks of one device, in units per second."""

    flops_per_s: float
    hbm_bytes_per_s: float
    clock_hz: float | None
    reach: Reach = USUAL_REACH
    measured: MeasuredRates | None = None

    def cycles(self, n: float, basis: TimeBasis = TimeBasis.COMPILER_CYCLES) -> OpCost:
        """The compiler's cycles as time."""
        assert self.clock_hz is not None
        low, high = CYCLES_INTERVAL
        s = n / self.clock_hz
        return OpCost(seconds=TimeEstimate(value_s=s, low_s=s * low, high_s=s * high), basis=basis)

    def roofline(
        self,
        *,
        flops: float = 0.0,
        hbm_bytes: float = 0.0,
        vmem_bytes: float = 0.0,
        flops_frac: float | None = None,
        flops_interval: tuple[float, float] | None = None,
    ) -> OpCost:
        """The longer of computing and moving bytes; products at the chip's reach unless told otherwise."""
        usual = self.reach
        frac = usual.matmul if flops_frac is None else flops_frac
        interval = usual.matmul_interval if flops_interval is None else flops_interval
        launch_s, factor = 0.0, 1.0
        if self.measured is not None:
            launch_s = self.measured.launch_s
            is_kernel = flops_frac is not None
            factor = 1.0 if is_kernel else self.measured.factor(flops, hbm_bytes)

        def at(flops_share: float, hbm_share: float) -> float:
            of_bytes = (hbm_bytes + vmem_bytes / VMEM_OVER_HBM) / self.hbm_bytes_per_s / hbm_share
            return max(flops / self.flops_per_s / flops_share, of_bytes) * factor + launch_s

        return OpCost(
            seconds=TimeEstimate(
                value_s=at(frac, usual.hbm),
                low_s=at(interval[1], usual.hbm_interval[1]),
                high_s=at(interval[0], usual.hbm_interval[0]),
            ),
            basis=TimeBasis.ROOFLINE,
        )

    def passing(self, *, hbm_bytes: float, vmem_bytes: float, vector_s: float) -> OpCost:
        """A pass over arrays: the longer of moving its bytes and of its work on the vector unit."""

        def at(share: float) -> float:
            of_bytes = (hbm_bytes + vmem_bytes / VMEM_OVER_HBM) / self.hbm_bytes_per_s / share
            return max(vector_s, of_bytes)

        low, high = PASS_INTERVAL
        return OpCost(
            seconds=TimeEstimate(value_s=at(PASS_FRAC), low_s=at(high), high_s=at(low)),
            basis=TimeBasis.ROOFLINE,
        )

    def unknown(self, *, n_bytes: float) -> OpCost:
        """An operation that nobody prices: something between nothing and ten times its bytes."""
        s = n_bytes / self.hbm_bytes_per_s / self.reach.hbm
        low, high = UNKNOWN_FACTORS
        return OpCost(
            seconds=TimeEstimate(value_s=s, low_s=s * low, high_s=s * high),
            basis=TimeBasis.ROOFLINE,
        )


def rates_of(chip: Chip, profile: ChipProfile | None = None) -> Rates:
    """The rates of one device; SpecError for a chip without published peaks and without a profile.

    A profile with products by shape counts before the published peaks.
    """
    measured = None if profile is None else (profile.flops_per_s, profile.memory_bytes_per_s)
    is_tpu = chip.kind is ChipKind.TPU  # whose compiler states cycles
    by_shape = None if profile is None or is_tpu else measured_rates(profile)
    is_unpublished = chip.bf16_flops_per_s is None or by_shape is not None
    if is_unpublished and measured is not None and None not in measured:
        flops_per_s, bytes_per_s = (rate or 0.0 for rate in measured)
        return Rates(
            flops_per_s=flops_per_s,
            hbm_bytes_per_s=bytes_per_s,
            clock_hz=None,
            reach=USUAL_REACH if by_shape is None else MEASURED_REACH,
            measured=by_shape,
        )
    if chip.bf16_flops_per_s is None or chip.hbm_bytes_per_s is None:
        raise SpecError(
            f"'{chip.name}' has no published peaks, so that no time can be told for it. "
            "Use a TPU or GPU topology, or measure it with 'meshscope calibrate' and give --profile."
        )
    n = chip.devices_per_chip
    return Rates(
        flops_per_s=chip.bf16_flops_per_s / n,
        hbm_bytes_per_s=chip.hbm_bytes_per_s / n,
        clock_hz=chip.clock_hz,
        reach=reach_of(chip),
    )


def reach_of(chip: Chip) -> Reach:
    """What large operations usually reach on a chip of this kind."""
    return GPU_REACH if chip.kind is ChipKind.GPU else USUAL_REACH
