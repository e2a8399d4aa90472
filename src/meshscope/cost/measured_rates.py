"""What a calibration says of one device's kernels: how far from the roofline, and what each start takes."""

from bisect import bisect_left
from dataclasses import dataclass
from math import log

from meshscope.interconnect.profile import ChipProfile

# Where a product is as bound by memory as a pass over arrays is, in flops per byte. The product of one
# row with 16-bit weights has 1.
PASS_INTENSITY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """Time of a kernel over its time by the measured peaks, at some flops per byte; seconds per launch.

    `factors` are (flops per byte, factor), ascending. Between them the factor is interpolated over the
    logarithm of flops per byte, beyond them it stays that of the nearest.
    """

    factors: tuple[tuple[float, float], ...]
    launch_s: float

    def factor(self, flops: float, n_bytes: float) -> float:
        """The factor of a kernel; 1 for a pass over arrays and for one that moves no bytes."""
        if not n_bytes or flops / n_bytes < PASS_INTENSITY or not self.factors:
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
    """The rates by flops per byte of a profile with products and a launch time; None without them."""
    flops_per_s, bytes_per_s = profile.flops_per_s, profile.memory_bytes_per_s
    if not profile.products or profile.launch_s is None or not flops_per_s or not bytes_per_s:
        return None
    by_intensity: dict[float, list[float]] = {}
    for product in profile.products:
        ideal_s = max(product.flops / flops_per_s, product.n_bytes / bytes_per_s)
        factor = max(product.seconds - profile.launch_s, 0.0) / ideal_s
        by_intensity.setdefault(round(product.flops / product.n_bytes, 3), []).append(factor)
    factors = sorted((at, sum(values) / len(values)) for at, values in by_intensity.items())
    return MeasuredRates(factors=tuple(factors), launch_s=profile.launch_s)
