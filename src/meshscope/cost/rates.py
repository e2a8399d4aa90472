"""Peak rates of one device, and the fractions of them that large operations reach.

The fractions and intervals are published measurements, each with its source; none was measured on a TPU
by this project.
"""

from dataclasses import dataclass

from meshscope.cost.array_traffic import NO_TRAFFIC, ArrayTraffic
from meshscope.cost.measured_rates import MeasuredRates, measured_rates
from meshscope.errors import SpecError
from meshscope.events.step_time import NO_TIME, TimeBasis, TimeEstimate
from meshscope.interconnect.profile import ChipProfile
from meshscope.spec.hardware.chips import Chip, ChipKind
from meshscope.spec.hardware.compiler_facts import compiler_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakEfficiency:
    """Fraction of the published peaks that large operations reach, with the measured range.

    `hbm` is that of one op that reads, `hbm_write` of one that writes, `hbm_busy` that of reads by several
    transfers at a time. `hbm_interval` is relative to all three.
    """

    matmul: float
    matmul_interval: tuple[float, float]
    hbm: float
    hbm_write: float
    hbm_busy: float
    hbm_interval: tuple[float, float]


# HBM: the rates of ops that only read or only write, of which v5e, v5p and v6e have eight in
# benchmarks/pass_cycles.py. Copies then reach 83 % (measured: v5e 82 %, v6e 83 %, tpu7x 75 to 87 %).
# Large bf16 products: tpu7x 83 % (16384) and v6e 82 and 90 % (8192^3, 754 and 827 of 918 TFLOP/s); 97 %
# is the best of tpu7x.
TPU_EFFICIENCY = PeakEfficiency(
    matmul=0.86,
    matmul_interval=(0.7, 1.0),
    hbm=0.91,
    hbm_write=0.76,
    hbm_busy=0.95,
    hbm_interval=(0.8, 1.1),
)

# HBM, the better of reads and a triad: A100 80 GB 1,794 of 2,039 GB/s, A100 40 GB 1,500 of 1,555, H100
# PCIe 1,942 of 2,039, GH200 3,783 of 4,000 (RRZE-HPC/gpu-benches@1038c5d, gpu-stream): 88 to 96 %. bf16
# products at their best shapes: A100 SXM 87 %, GH200 84 %, A100 PCIe 81 %, H100 SXM 80 %
# (stas00/ml-engineering@b9e2972, compute/accelerator). The values are medians; the intervals also allow
# for less favorable shapes.
GPU_EFFICIENCY = PeakEfficiency(
    matmul=0.82,
    matmul_interval=(0.7, 0.9),
    hbm=0.95,
    hbm_write=0.95,
    hbm_busy=0.95,
    hbm_interval=(0.9, 1.05),
)

# Rates that were measured by shape on the device itself. The interval is an assumption.
MEASURED_EFFICIENCY = PeakEfficiency(
    matmul=1.0,
    matmul_interval=(0.85, 1.15),
    hbm=1.0,
    hbm_write=1.0,
    hbm_busy=1.0,
    hbm_interval=(0.85, 1.15),
)

# Fraction of the matmul peak in attention kernels: ragged paged attention reaches 73 % in prefill on
# tpu7x, 63 % if masked blocks count as work (arXiv 2604.15464); older kernels reach about half.
KERNEL_FRAC = 0.55
KERNEL_INTERVAL = (0.4, 0.75)

# VMEM reads 23,296 GB/s beside an HBM of 1,638 GB/s (plane statistics of a v6e profile).
VMEM_OVER_HBM = 14.0

# Ops without products in a training step on v5p (openxla/xprof@5fe358978e59, golden hlo_stats): arrays of
# some kilobytes take 0.51 to 0.63 us to be written (14 ops) and 1.02 to 1.25 us to be read and written
# (30 ops), whatever their size. The launch is assumed: more than the 0.07 us of a buffer allocation.
LAUNCH_S = 0.2e-6
READ_LATENCY_S = 0.58e-6
WRITE_LATENCY_S = 0.34e-6
SMALL_S = 3e-6  # above all of these operations
SCALAR_BYTES = 8  # scalars are in registers
LATENCY_INTERVAL = (0.8, 2.0)
# The compiler estimates 1,820 cycles and more for the smallest op. Beyond them, its estimates are 3.4
# times too long if the vector unit bounds the op: two relayouts of 14.7 MB to tiles of one row are
# estimated at 79.7 us and take 23.5 and 24.0 us (same source, libtpu 0.0.42.1).
LAUNCH_CYCLES = 1820
VECTOR_FACTOR = 0.3
VECTOR_INTERVAL = (0.5, 1.5)

# Range for ops without a cost model: from zero to ten times the time of their bytes.
UNKNOWN_FACTORS = (0.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """Time of one operation alone, the part of it that the HBM is busy, and its basis."""

    seconds: TimeEstimate
    basis: TimeBasis
    hbm: TimeEstimate = NO_TIME


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Peaks of one device, in units per second."""

    flops_per_s: float
    hbm_bytes_per_s: float
    clock_hz: float | None
    mxu_dim: int | None = None
    efficiency: PeakEfficiency = TPU_EFFICIENCY
    cycles_interval: tuple[float, float] = compiler_facts().cycles_interval.value
    measured: MeasuredRates | None = None

    def cycles(
        self,
        n: float,
        basis: TimeBasis = TimeBasis.COMPILER_CYCLES,
        *,
        moved: ArrayTraffic = NO_TRAFFIC,
    ) -> OpTime:
        """Time of the compiler's cycles, which include the transfers."""
        assert self.clock_hz is not None
        seconds = _scaled(n / self.clock_hz, self.cycles_interval)
        return OpTime(seconds=seconds, basis=basis, hbm=self.hbm_busy(moved))

    def hbm(self, moved: ArrayTraffic) -> TimeEstimate:
        """Time in which the HBM serves the bytes alone."""
        peak = self.efficiency
        read_s = moved.hbm_read_bytes / peak.hbm
        written_s = moved.hbm_written_bytes / peak.hbm_write
        slow, fast = peak.hbm_interval
        return _scaled((read_s + written_s) / self.hbm_bytes_per_s, (1 / fast, 1 / slow))

    def hbm_busy(self, moved: ArrayTraffic) -> TimeEstimate:
        """Time in which the HBM serves the bytes among other transfers."""
        return self.hbm(moved) * (self.efficiency.hbm / self.efficiency.hbm_busy)

    def roofline(
        self,
        *,
        flops: float = 0.0,
        moved: ArrayTraffic = NO_TRAFFIC,
        flops_frac: float | None = None,
        flops_interval: tuple[float, float] | None = None,
    ) -> OpTime:
        """The longer of compute and memory time; compute at the matmul efficiency by default.

        Measured rates add the launch and, to ops at the default efficiency, the slowdown of their shape.
        """
        peak = self.efficiency
        frac = peak.matmul if flops_frac is None else flops_frac
        slow, fast = peak.matmul_interval if flops_interval is None else flops_interval
        is_default = flops_frac is None
        factor, launch_s = self._measured_overhead(flops, moved.hbm_bytes, is_default=is_default)
        flops_s = flops / self.flops_per_s
        compute = TimeEstimate(value_s=flops_s / frac, low_s=flops_s / fast, high_s=flops_s / slow)
        hbm = self.hbm(moved)
        seconds = longest(compute, hbm, self._vmem(moved)) * factor
        return OpTime(
            seconds=seconds + exactly(launch_s), basis=TimeBasis.ROOFLINE, hbm=self.hbm_busy(moved)
        )

    def _measured_overhead(
        self, flops: float, hbm_bytes: float, *, is_default: bool
    ) -> tuple[float, float]:
        """Slowdown against the roofline, and seconds of the launch."""
        if self.measured is None:
            return 1.0, 0.0
        factor = self.measured.factor(flops, hbm_bytes) if is_default else 1.0
        return factor, self.measured.launch_s

    def elementwise(self, cycles: float, moved: ArrayTraffic) -> OpTime:
        """Time of an op without products for which the compiler estimates `cycles`.

        It starts, reads what it needs first, works while the rest moves, and writes its last results.
        """
        assert self.clock_hz is not None
        hbm = self.hbm(moved)
        work = _scaled(_work(cycles) / self.clock_hz * VECTOR_FACTOR, VECTOR_INTERVAL)
        ends_s = LAUNCH_S
        ends_s += READ_LATENCY_S * (moved.hbm_read_bytes > SCALAR_BYTES)
        ends_s += WRITE_LATENCY_S * (moved.hbm_written_bytes > SCALAR_BYTES)
        seconds = longest(hbm, work, self._vmem(moved)) + _scaled(ends_s, LATENCY_INTERVAL)
        modeled = OpTime(seconds=seconds, basis=TimeBasis.ROOFLINE, hbm=self.hbm_busy(moved))
        estimated = self.cycles(cycles, moved=moved)
        return modeled if _is_shorter(modeled, estimated) else estimated

    def product(self, cycles: float, flops: float, moved: ArrayTraffic) -> OpTime:
        """Time of matrix products for which the compiler estimates `cycles`.

        Its estimates hold for products bound by the matrix units, and for operands in VMEM. Those of
        products bound by the HBM are too long: they take the time of their bytes.
        """
        assert self.clock_hz is not None
        estimated = self.cycles(_work(cycles) + LAUNCH_S * self.clock_hz, moved=moved)
        bound = self.roofline(flops=flops, moved=moved)
        is_hbm_bound = self.hbm(moved).value_s >= bound.seconds.value_s
        return bound if is_hbm_bound and _is_shorter(bound, estimated) else estimated

    def is_small(self, time: OpTime, moved: ArrayTraffic) -> bool:
        """Whether an op without products takes more than twice its bytes' time, and a few us at most."""
        bytes_s = max(self.hbm(moved).value_s, self._vmem(moved).value_s)
        return 2 * bytes_s < time.seconds.value_s < SMALL_S

    def _vmem(self, moved: ArrayTraffic) -> TimeEstimate:
        return exactly(moved.vmem_bytes / VMEM_OVER_HBM / self.hbm_bytes_per_s)

    def unknown(self, moved: ArrayTraffic) -> OpTime:
        """Time of an op without a cost model: that of its bytes, with a wide interval."""
        s = moved.n_bytes / self.hbm_bytes_per_s / self.efficiency.hbm
        return OpTime(seconds=_scaled(s, UNKNOWN_FACTORS), basis=TimeBasis.ROOFLINE)


def _is_shorter(one: OpTime, other: OpTime) -> bool:
    return one.seconds.value_s < other.seconds.value_s


def _work(cycles: float) -> float:
    """The compiler's cycles without its launch, which the estimates of some ops lack."""
    return cycles - LAUNCH_CYCLES if cycles > LAUNCH_CYCLES else cycles


def exactly(s: float) -> TimeEstimate:
    """A duration without uncertainty."""
    return TimeEstimate(value_s=s, low_s=s, high_s=s)


def longest(*times: TimeEstimate) -> TimeEstimate:
    """The longest of several durations, bound by bound."""
    return TimeEstimate(
        value_s=max(time.value_s for time in times),
        low_s=max(time.lower_s for time in times),
        high_s=max(time.upper_s for time in times),
    )


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
        mxu_dim=chip.mxu_dim,
        efficiency=peak_efficiency(chip),
        cycles_interval=compiler_facts(chip.name).cycles_interval.value,
    )


def peak_efficiency(chip: Chip) -> PeakEfficiency:
    """The efficiency of large operations on a chip of this kind."""
    return GPU_EFFICIENCY if chip.kind is ChipKind.GPU else TPU_EFFICIENCY
