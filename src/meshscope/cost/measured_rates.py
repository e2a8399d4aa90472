"""Kernel rates of one device from a calibration: slowdown against the roofline, and launch time."""

from bisect import bisect_left
from dataclasses import dataclass
from math import log

from meshscope.interconnect.profile import ChipProfile

# Arithmetic intensity (flops per byte) below which an op counts as elementwise. The product of one row
# with 16-bit weights has 1.
ELEMENTWISE_INTENSITY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """Measured time over roofline time by arithmetic intensity, and seconds per launch.

    `factors` are (flops per byte, factor), ascending. Factors are interpolated over log intensity and
    constant beyond both ends.
    """

    factors: tuple[tuple[float, float], ...]
    launch_s: float

    def factor(self, flops: float, n_bytes: float) -> float:
        """The factor of a kernel; 1 for elementwise ops and for kernels that move no bytes."""
        if not n_bytes or flops / n_bytes < ELEMENTWISE_INTENSITY or not self.factors:
            return 1.0
        intensity = flops / n_bytes
        after = bisect_left([at for at, _ in self.factors], intensity)
        if after == 0:
            return self.factors[0][1]
        if after == len(self.factors):
            return self.factors[-1][1]
        (low, first), (high, second) = self.factors[after - 1 : after + 1]
        share = log(intensity / low) / log(high / low)
        return first + share * (second - first)


def measured_rates(profile: ChipProfile) -> MeasuredRates | None:
    """The rates of a profile with product and launch times; None without them."""
    flops_per_s, bytes_per_s = profile.flops_per_s, profile.memory_bytes_per_s
    if not profile.products or profile.launch_s is None or not flops_per_s or not bytes_per_s:
        return None
    by_intensity: dict[float, list[float]] = {}
    for product in profile.products:
        roofline_s = max(product.flops / flops_per_s, product.n_bytes / bytes_per_s)
        factor = max(product.seconds - profile.launch_s, 0.0) / roofline_s
        by_intensity.setdefault(round(product.flops / product.n_bytes, 3), []).append(factor)
    factors = sorted((at, sum(values) / len(values)) for at, values in by_intensity.items())
    return MeasuredRates(factors=tuple(factors), launch_s=profile.launch_s)
