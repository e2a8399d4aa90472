"""Peak rates of one device, what operations and the closed form reach of them, and times of operations.

`tools/fit_closed_form.py` fits the constants of the closed form; `compiler_facts.fitted_constants` stores them
with their sources.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cache
from operator import attrgetter

from meshscope.errors import SpecError
from meshscope.events.step_time import TimeBasis, TimeEstimate
from meshscope.hardware.chips import Chip, ChipKind
from meshscope.hardware.compiler_facts import (
    OPERATIONS,
    CompilerFacts,
    PeakEfficiency,
    compiler_facts,
    fitted_constants,
)
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.model.arrays import LANES
from meshscope.serialize import picked

SCALAR_BYTES = 8  # scalars are in registers
TPU = OPERATIONS.tpu_efficiency
_value_s = attrgetter("seconds.value_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayTraffic:
    """Bytes moved, by memory; `hbm_written_bytes` is the written part of `hbm_bytes`."""

    hbm_bytes: int = 0
    vmem_bytes: int = 0
    hbm_written_bytes: int = 0

    def __add__(self, other: "ArrayTraffic") -> "ArrayTraffic":
        return ArrayTraffic(
            hbm_bytes=self.hbm_bytes + other.hbm_bytes,
            vmem_bytes=self.vmem_bytes + other.vmem_bytes,
            hbm_written_bytes=self.hbm_written_bytes + other.hbm_written_bytes,
        )

    @property
    def hbm_read_bytes(self) -> int:
        """Bytes read from HBM."""
        return self.hbm_bytes - self.hbm_written_bytes

    @property
    def n_bytes(self) -> int:
        """Bytes in both memories."""
        return self.hbm_bytes + self.vmem_bytes


NO_TRAFFIC = ArrayTraffic()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """Time of one operation alone, the part of it that the HBM is busy, and its basis."""

    seconds: TimeEstimate
    basis: TimeBasis
    hbm_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Peaks of one device, in units per second."""

    flops_per_s: float
    hbm_bytes_per_s: float
    clock_hz: float | None
    mxu_dim: int | None = None
    # That matrix units multiply at `narrow_speedup` x `flops_per_s`.
    narrow_dtypes: tuple[str, ...] = ()
    narrow_speedup: float = 1.0
    efficiency: PeakEfficiency = TPU
    facts: CompilerFacts = field(default_factory=compiler_facts)

    def cycles(self, n: float, *, moved: ArrayTraffic = NO_TRAFFIC) -> OpTime:
        """Time of the compiler's cycles, which include the transfers."""
        assert self.clock_hz is not None
        seconds = scaled(n / self.clock_hz, self.facts.cycles_interval)
        return OpTime(
            seconds=seconds, basis=TimeBasis.COMPILER_CYCLES, hbm_s=self.hbm_busy_s(moved)
        )

    def speedup(self, dtype: str) -> float:
        """Peak rate of products of two operands of this dtype, relative to bf16."""
        return self.narrow_speedup if dtype in self.narrow_dtypes else 1.0

    def hbm(self, moved: ArrayTraffic) -> TimeEstimate:
        """Time in which the HBM serves the bytes alone."""
        peak = self.efficiency
        read_s = moved.hbm_read_bytes / peak.hbm
        written_s = moved.hbm_written_bytes / peak.hbm_write
        slow, fast = peak.hbm_interval
        return scaled((read_s + written_s) / self.hbm_bytes_per_s, (1 / fast, 1 / slow))

    def hbm_busy_s(self, moved: ArrayTraffic) -> float:
        """Seconds in which the HBM serves the bytes among other transfers."""
        return self.hbm(moved).value_s * (self.efficiency.hbm / self.efficiency.hbm_busy)

    def roofline(
        self,
        *,
        flops: float = 0.0,
        moved: ArrayTraffic = NO_TRAFFIC,
        flops_frac: float | None = None,
        flops_interval: tuple[float, float] | None = None,
    ) -> OpTime:
        """The longer of compute and memory time; compute at the matmul efficiency by default."""
        peak = self.efficiency
        frac = peak.matmul if flops_frac is None else flops_frac
        slow, fast = peak.matmul_interval if flops_interval is None else flops_interval
        flops_s = flops / self.flops_per_s
        compute = TimeEstimate(value_s=flops_s / frac, low_s=flops_s / fast, high_s=flops_s / slow)
        seconds = longest(compute, self.hbm(moved), self._vmem(moved))
        return OpTime(seconds=seconds, basis=TimeBasis.ROOFLINE, hbm_s=self.hbm_busy_s(moved))

    def elementwise(self, cycles: float, moved: ArrayTraffic) -> OpTime:
        """Time of an op without products for which the compiler estimates `cycles`."""
        assert self.clock_hz is not None
        vector_s = self._work(cycles) / self.clock_hz * self.facts.vector_factor
        work = scaled(vector_s, self.facts.vector_interval)
        estimated = self.cycles(cycles, moved=moved)
        return min(estimated, self._on_vector_units(work, moved), key=_value_s)

    def vector_product(self, n_products: float, moved: ArrayTraffic) -> OpTime:
        """Time of a product of one row with `n_products` weights on the vector units, by its bundles."""
        work = self.loop_s(n_products * self.facts.vector_product_cycles)
        return self._on_vector_units(work, moved)

    def loop_s(self, cycles: float) -> TimeEstimate:
        """Time of a loop by the cycles of its bundles."""
        return scaled(cycles / (self.clock_hz or 1e9), OPERATIONS.model_interval)

    def _on_vector_units(self, work: TimeEstimate, moved: ArrayTraffic) -> OpTime:
        """Time of an op that first starts and reads, works while the rest moves, and writes its last results."""
        ends_s = OPERATIONS.launch_s
        ends_s += OPERATIONS.read_latency_s * (moved.hbm_read_bytes > SCALAR_BYTES)
        ends_s += OPERATIONS.write_latency_s * (moved.hbm_written_bytes > SCALAR_BYTES)
        ends = scaled(ends_s, OPERATIONS.latency_interval)
        seconds = longest(self.hbm(moved), work, self._vmem(moved)) + ends
        return OpTime(seconds=seconds, basis=TimeBasis.ROOFLINE, hbm_s=self.hbm_busy_s(moved))

    def product(self, cycles: float, flops: float, moved: ArrayTraffic) -> OpTime:
        """Time of matrix products for which the compiler estimates `cycles`.

        Its estimates hold for products bound by the matrix units, and for operands in VMEM. They are too
        long for products bound by the HBM, which take the time of their bytes.
        """
        assert self.clock_hz is not None
        launch_cycles = OPERATIONS.launch_s * self.clock_hz
        estimated = self.cycles(self._work(cycles) + launch_cycles, moved=moved)
        bound = self.roofline(flops=flops, moved=moved)
        is_hbm_bound = self.hbm(moved).value_s >= bound.seconds.value_s
        return min(estimated, bound, key=_value_s) if is_hbm_bound else estimated

    def loop(self, cycles: float, moved: ArrayTraffic) -> OpTime:
        """Time of a loop of known cycles, or of its bytes where they take longer.

        Without a clock, only the bytes count.
        """
        bound = self.roofline(moved=moved)
        if self.clock_hz is None:
            return bound
        seconds = longest(self.loop_s(cycles), bound.seconds)
        return OpTime(seconds=seconds, basis=TimeBasis.KERNEL_MODEL, hbm_s=bound.hbm_s)

    def is_small(self, time: OpTime, moved: ArrayTraffic) -> bool:
        """Whether an op without products takes more than twice its bytes' time, and a few us at most."""
        bytes_s = max(self.hbm(moved).value_s, self._vmem(moved).value_s)
        return 2 * bytes_s < time.seconds.value_s < OPERATIONS.small_s

    def _vmem(self, moved: ArrayTraffic) -> TimeEstimate:
        return scaled(moved.vmem_bytes / OPERATIONS.vmem_over_hbm / self.hbm_bytes_per_s)

    def _work(self, cycles: float) -> float:
        """The compiler's cycles without its launch, which the estimates of some ops lack."""
        launch = self.facts.launch_cycles
        return cycles - launch if cycles > launch else cycles

    def unknown(self, moved: ArrayTraffic) -> OpTime:
        """Time of an op without a cost model: its bytes at the HBM rate, with a wide interval."""
        s = moved.n_bytes / self.hbm_bytes_per_s / self.efficiency.hbm
        return OpTime(seconds=scaled(s, OPERATIONS.unknown_factors), basis=TimeBasis.ROOFLINE)


def longest(*times: TimeEstimate) -> TimeEstimate:
    """The longest of several durations, bound by bound."""
    return TimeEstimate(
        value_s=max(time.value_s for time in times),
        low_s=max(time.lower_s for time in times),
        high_s=max(time.upper_s for time in times),
    )


def scaled(s: float, interval: tuple[float, float] = (1.0, 1.0)) -> TimeEstimate:
    """A duration with bounds that are these factors of it; by default without uncertainty."""
    low, high = interval
    return TimeEstimate(value_s=s, low_s=s * low, high_s=s * high)


def rates_of(chip: Chip, profile: ChipProfile | None = None) -> Rates:
    """The rates of one device; SpecError for a chip without published peaks and without a profile."""
    if profile is not None and chip.bf16_flops_per_s is None:
        flops_per_s, bytes_per_s = profile.flops_per_s, profile.memory_bytes_per_s
        if flops_per_s is not None and bytes_per_s is not None:
            return Rates(
                flops_per_s=flops_per_s,
                hbm_bytes_per_s=bytes_per_s,
                clock_hz=None,
            )
    if chip.bf16_flops_per_s is None or chip.hbm_bytes_per_s is None:
        raise SpecError(
            f"'{chip.name}' has no published peaks, so its step time cannot be estimated. "
            "Use a TPU or GPU topology, or measure it with 'meshscope calibrate' and give --profile."
        )
    n, is_gpu = chip.devices_per_chip, chip.kind is ChipKind.GPU
    return Rates(
        flops_per_s=chip.bf16_flops_per_s / n,
        hbm_bytes_per_s=chip.hbm_bytes_per_s / n,
        **picked(chip, "clock_hz", "mxu_dim", "narrow_dtypes", "narrow_speedup"),
        efficiency=OPERATIONS.gpu_efficiency if is_gpu else TPU,
        facts=compiler_facts(chip.name),
    )


def row_cycles(width: int, facts: CompilerFacts, *, is_in_hbm: bool) -> float:
    """Cycles to gather one row of `width` elements."""
    per_row, per_tile = facts.gathered_row_cycles if is_in_hbm else facts.gathered_vmem_row_cycles
    return per_row + per_tile * -(-width // LANES)


def row_s(rates: Rates, width: int, element_bytes: float, *, is_in_hbm: bool = True) -> float:
    """Seconds to gather one row; without a clock, to read and write its bytes."""
    if rates.clock_hz is None:
        return 2 * width * element_bytes / rates.hbm_bytes_per_s
    return row_cycles(width, rates.facts, is_in_hbm=is_in_hbm) / rates.clock_hz


class ModeledProgram(StrEnum):
    """The program whose step the closed form gives.

    They differ in the routing of experts and in the time of small operations: a published step contains the
    sorts and gathers of its program, the simulated schedule of meshscope's own has arrays in VMEM.
    """

    PUBLISHED = "published"  # published steps, to which the constants are fitted
    OWN = "own"  # meshscope's, as `compile` simulates its schedule


_SECONDS = ("op_s", "groups_s", "row_s")
_UNBOUNDED = {"gathers", "paged", *_SECONDS}  # no fractions of a peak


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedConstants:
    """The constants of the closed form on one chip.

    `matmul`, `attention` and `experts` are fractions of the matmul peak: in products with weights, in splash
    attention, and in kernels that multiply rows with the weights of experts. `paged` is the time of the bundles of a
    server's attention over the real one. Others are
    fractions of the HBM rate: for weights that stream in, for the cache that decode attention reads, and for
    element-wise passes. `gathers` is the compiler's time for row gathers over the real one. `op_s` is the time of
    a small operation, `groups_s` of a layer's routing by groups, and `row_s` of a row in the kernel for few rows of
    int8 experts. `overlap` is the share of a product during which the weights of later ones stream in.
    """

    matmul: float
    attention: float
    paged: float
    experts: float
    weights: float
    cache: float
    passes: float
    gathers: float
    op_s: float
    overlap: float
    groups_s: float
    row_s: float

    def faster(self, spreads: Mapping[str, float]) -> "ClosedConstants":
        """Every constant better by its factor in `spreads`; below 1 for worse. Nothing exceeds a peak."""
        values = {name: value * spreads[name] for name, value in asdict(self).items()}
        fracs = {name: min(1.0, value) for name, value in values.items() if name not in _UNBOUNDED}
        seconds = {name: getattr(self, name) / spreads[name] for name in _SECONDS}
        return replace(self, **fracs, gathers=values["gathers"], paged=values["paged"], **seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipEfficiency:
    """The constants of a chip, and their values at the bounds of a step's interval.

    With `streams_weights`, weights of coming products arrive while the core waits in collectives and
    small operations, and products wait for the rest; otherwise each product overlaps with its own
    weights only. An interval reaches at least from 1 / `model_spread` to `model_spread` times the step:
    the error for a model without fitted steps. Steps of a kind (phase, dtype of the weights, dense or mixture) that
    is not in `fitted_kinds` take `other_spread`; None for constants that no steps were fitted to.
    """

    constants: ClosedConstants
    fast: ClosedConstants
    slow: ClosedConstants
    streams_weights: bool
    model_spread: float = 1.0
    other_spread: float = 1.0
    fitted_kinds: frozenset[tuple[str, str, str]] | None = None
    source: str = ""

    def for_kind(self, phase: str, weight_dtype: str, *, has_experts: bool) -> "ChipEfficiency":
        """The efficiency with the interval of this kind of step."""
        kind = (phase, weight_dtype, "mixture of experts" if has_experts else "dense")
        if self.fitted_kinds is None or kind in self.fitted_kinds:
            return self
        note = f"; no published {phase} with {weight_dtype} weights of a {kind[2]} model was fitted"
        wider = max(self.model_spread, self.other_spread)
        source = f"{self.source}{note}, so its interval comes from another chip"
        return replace(self, model_spread=wider, source=source)

    @property
    def of_own_program(self) -> "ChipEfficiency":
        """The efficiency of meshscope's own program, whose small operations work on arrays in VMEM."""
        if not self.constants.op_s:
            return self
        scale = OPERATIONS.own_op_s / self.constants.op_s
        fast, constants, slow = (
            replace(c, op_s=scale * c.op_s) for c in (self.fast, self.constants, self.slow)
        )
        return replace(self, fast=fast, constants=constants, slow=slow)


def of_large_operations(peak: PeakEfficiency, source: str) -> ChipEfficiency:
    """The efficiency of devices whose operations all reach what large ones do."""

    def uniform(flops: float, hbm: float) -> ClosedConstants:
        by_flops = dict.fromkeys(("matmul", "attention", "paged", "experts"), flops)
        by_bytes = dict.fromkeys(("weights", "cache", "passes", "gathers"), hbm)
        none = dict.fromkeys((*_SECONDS, "overlap"), 0.0)
        return ClosedConstants(**by_flops, **by_bytes, **none)

    (slow_matmul, fast_matmul), (slow_hbm, fast_hbm) = peak.matmul_interval, peak.hbm_interval
    return ChipEfficiency(
        constants=uniform(peak.matmul, peak.hbm),
        fast=uniform(fast_matmul, min(1.0, peak.hbm * fast_hbm)),
        slow=uniform(slow_matmul, peak.hbm * slow_hbm),
        streams_weights=False,
        source=source,
    )


def efficiency_of(chip: Chip) -> ChipEfficiency:
    """The fitted efficiency of a TPU; GPUs have the efficiency of large operations."""
    if chip.kind is ChipKind.TPU:
        return _fitted(chip.name)
    peak = OPERATIONS.gpu_efficiency
    source = f"{peak.matmul:.0%} of the matmul peak, {peak.hbm:.0%} of the HBM rate"
    return of_large_operations(peak, source)


@cache
def _fitted(chip: str) -> ChipEfficiency:
    stored = fitted_constants(chip)
    fit, constants = stored["closed_form"], ClosedConstants(**stored["closed_form"]["constants"])
    spreads: Mapping[str, float] = fit["spreads"]
    return ChipEfficiency(
        constants=constants,
        fast=constants.faster(spreads),
        slow=constants.faster({name: 1 / spread for name, spread in spreads.items()}),
        streams_weights=True,
        model_spread=fit["model_spread"],
        other_spread=fit["other_spread"],
        fitted_kinds=frozenset(map(tuple, fit["fitted_kinds"])),
        source=f"constants fitted to {stored['n_fitted']} published steps"
        + ("" if fit["is_fitted"] else f" of other chips; none of {chip} is known"),
    )
