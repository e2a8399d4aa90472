"""Peak rates of one device, and the fractions of them that large operations reach.

The fractions and intervals are published measurements, each with its source; none was measured on a TPU
by this project.
"""

from dataclasses import dataclass

from meshscope.cost.measured_rates import MeasuredRates, measured_rates
from meshscope.errors import SpecError
from meshscope.events.step_time import TimeBasis, TimeEstimate
from meshscope.interconnect.profile import ChipProfile
from meshscope.spec.hardware.chips import Chip, ChipKind
from meshscope.spec.hardware.compiler_facts import compiler_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakEfficiency:
    """Fraction of the published peaks that large operations reach, with the measured range."""

    matmul: float
    matmul_interval: tuple[float, float]
    hbm: float
    hbm_interval: tuple[float, float]


# HBM: tpu7x reaches 87 % (Ironwood HBM microbenchmark from 512 MiB on, 6,400 of 7,380 GB/s) and v6e 83 %
# (Trillium, 32 MiB, 1,359.6 of 1,638 GB/s); Ironwood at 16 MiB reaches 75 %. Large bf16 products: tpu7x
# 83 % (16384) and v6e 82 and 90 % (8192^3, 754 and 827 of 918 TFLOP/s); 97 % is the best of tpu7x.
TPU_EFFICIENCY = PeakEfficiency(
    matmul=0.86, matmul_interval=(0.7, 1.0), hbm=0.85, hbm_interval=(0.75, 1.0)
)

# HBM, the better of reads and a triad: A100 80 GB 1,794 of 2,039 GB/s, A100 40 GB 1,500 of 1,555, H100
# PCIe 1,942 of 2,039, GH200 3,783 of 4,000 (RRZE-HPC/gpu-benches@1038c5d, gpu-stream): 88 to 96 %. bf16
# products at their best shapes: A100 SXM 87 %, GH200 84 %, A100 PCIe 81 %, H100 SXM 80 %
# (stas00/ml-engineering@b9e2972, compute/accelerator). The values are medians; the intervals also allow
# for less favorable shapes.
GPU_EFFICIENCY = PeakEfficiency(
    matmul=0.82, matmul_interval=(0.7, 0.9), hbm=0.95, hbm_interval=(0.85, 1.0)
)

# Rates that were measured by shape on the device itself. The interval is an assumption.
MEASURED_EFFICIENCY = PeakEfficiency(
    matmul=1.0, matmul_interval=(0.85, 1.15), hbm=1.0, hbm_interval=(0.85, 1.15)
)

# Fraction of the matmul peak in attention kernels: ragged paged attention reaches 73 % in prefill on
# tpu7x, 63 % if masked blocks count as work (arXiv 2604.15464); older kernels reach about half.
KERNEL_FRAC = 0.55
KERNEL_INTERVAL = (0.4, 0.75)

# Fraction of the HBM rate in large elementwise ops without a relayout: the median of every second of 22
# measured ops in benchmarks/pass_cycles.py. The other eleven are within 20 % of it, half of them within
# 11 %; the interval covers all 22.
ELEMENTWISE_FRAC = 0.76
ELEMENTWISE_INTERVAL = (0.58, 0.90)

# VMEM reads 23,296 GB/s beside an HBM of 1,638 GB/s (plane statistics of a v6e profile).
VMEM_OVER_HBM = 14.0

# Range for ops without a cost model: from zero to ten times the time of their bytes.
UNKNOWN_FACTORS = (0.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """Time of one operation and its basis."""

    seconds: TimeEstimate
    basis: TimeBasis


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Peaks of one device, in units per second."""

    flops_per_s: float
    hbm_bytes_per_s: float
    clock_hz: float | None
    efficiency: PeakEfficiency = TPU_EFFICIENCY
    cycles_interval: tuple[float, float] = compiler_facts().cycles_interval.value
    measured: MeasuredRates | None = None

    def cycles(self, n: float, basis: TimeBasis = TimeBasis.COMPILER_CYCLES) -> OpTime:
        """Time of the compiler's cycles."""
        assert self.clock_hz is not None
        return OpTime(seconds=_scaled(n / self.clock_hz, self.cycles_interval), basis=basis)

    def roofline(
        self,
        *,
        flops: float = 0.0,
        hbm_bytes: float = 0.0,
        vmem_bytes: float = 0.0,
        flops_frac: float | None = None,
        flops_interval: tuple[float, float] | None = None,
    ) -> OpTime:
        """The longer of compute and memory time; compute at the matmul efficiency by default.

        Measured rates add the launch and, to ops at the default efficiency, the slowdown of their shape.
        """
        peak = self.efficiency
        frac = peak.matmul if flops_frac is None else flops_frac
        interval = peak.matmul_interval if flops_interval is None else flops_interval
        is_default = flops_frac is None
        factor, launch_s = self._measured_overhead(flops, hbm_bytes, is_default=is_default)
        memory_s = self._memory_s(hbm_bytes, vmem_bytes)

        def at(flops_frac: float, hbm_frac: float) -> float:
            longer_s = max(flops / self.flops_per_s / flops_frac, memory_s / hbm_frac)
            return longer_s * factor + launch_s

        seconds = TimeEstimate(
            value_s=at(frac, peak.hbm),
            low_s=at(interval[1], peak.hbm_interval[1]),
            high_s=at(interval[0], peak.hbm_interval[0]),
        )
        return OpTime(seconds=seconds, basis=TimeBasis.ROOFLINE)

    def _measured_overhead(
        self, flops: float, hbm_bytes: float, *, is_default: bool
    ) -> tuple[float, float]:
        """Slowdown against the roofline, and seconds of the launch."""
        if self.measured is None:
            return 1.0, 0.0
        factor = self.measured.factor(flops, hbm_bytes) if is_default else 1.0
        return factor, self.measured.launch_s

    def elementwise(self, *, hbm_bytes: float, vmem_bytes: float, vector_s: float) -> OpTime:
        """Time of an elementwise op: the longer of its memory time and `vector_s` on the vector unit."""
        memory_s = self._memory_s(hbm_bytes, vmem_bytes)
        low, high = ELEMENTWISE_INTERVAL
        seconds = TimeEstimate(
            value_s=max(vector_s, memory_s / ELEMENTWISE_FRAC),
            low_s=max(vector_s, memory_s / high),
            high_s=max(vector_s, memory_s / low),
        )
        return OpTime(seconds=seconds, basis=TimeBasis.ROOFLINE)

    def _memory_s(self, hbm_bytes: float, vmem_bytes: float) -> float:
        return (hbm_bytes + vmem_bytes / VMEM_OVER_HBM) / self.hbm_bytes_per_s

    def unknown(self, *, n_bytes: float) -> OpTime:
        """Time of an op without a cost model: that of its bytes, with a wide interval."""
        s = n_bytes / self.hbm_bytes_per_s / self.efficiency.hbm
        return OpTime(seconds=_scaled(s, UNKNOWN_FACTORS), basis=TimeBasis.ROOFLINE)


def _scaled(s: float, interval: tuple[float, float]) -> TimeEstimate:
    low, high = interval
    return TimeEstimate(value_s=s, low_s=s * low, high_s=s * high)


def rates_of(chip: Chip, profile: ChipProfile | None = None) -> Rates:
    """The rates of one device; SpecError for a chip without published peaks and without a profile.

    A profile with products by shape takes precedence over published peaks, except on TPUs, whose
    compiler states cycles.
    """
    is_tpu = chip.kind is ChipKind.TPU
    by_shape = None if profile is None or is_tpu else measured_rates(profile)
    if profile is not None and (chip.bf16_flops_per_s is None or by_shape is not None):
        flops_per_s, bytes_per_s = profile.flops_per_s, profile.memory_bytes_per_s
        if flops_per_s is not None and bytes_per_s is not None:
            return Rates(
                flops_per_s=flops_per_s,
                hbm_bytes_per_s=bytes_per_s,
                clock_hz=None,
                efficiency=TPU_EFFICIENCY if by_shape is None else MEASURED_EFFICIENCY,
                measured=by_shape,
            )
    return _published_rates(chip)


def _published_rates(chip: Chip) -> Rates:
    if chip.bf16_flops_per_s is None or chip.hbm_bytes_per_s is None:
        raise SpecError(
            f"'{chip.name}' has no published peaks, so its step time cannot be estimated. "
            "Use a TPU or GPU topology, or measure it with 'meshscope calibrate' and give --profile."
        )
    n = chip.devices_per_chip
    return Rates(
        flops_per_s=chip.bf16_flops_per_s / n,
        hbm_bytes_per_s=chip.hbm_bytes_per_s / n,
        clock_hz=chip.clock_hz,
        efficiency=peak_efficiency(chip),
        cycles_interval=compiler_facts(chip.name).cycles_interval.value,
    )


def peak_efficiency(chip: Chip) -> PeakEfficiency:
    """The efficiency of large operations on a chip of this kind."""
    return GPU_EFFICIENCY if chip.kind is ChipKind.GPU else TPU_EFFICIENCY
