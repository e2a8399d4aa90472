"""What a step reaches of the peaks of a chip: the constants of the closed form.

`tools/fit_closed_form.py` fits them; `compiler_facts.fitted_constants` stores them with their sources.
"""

from dataclasses import dataclass
from functools import cache

from meshscope.cost.rates import GPU_EFFICIENCY, MEASURED_EFFICIENCY, PeakEfficiency, Rates
from meshscope.events.enums import Phase
from meshscope.spec.hardware.chips import Chip, ChipKind
from meshscope.spec.hardware.compiler_facts import fitted_constants


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedConstants:
    """The constants of the closed form on one chip.

    `matmul` and `attention` are fractions of the matmul peak, in products with weights and in attention
    kernels over prompts. The others are fractions of the HBM rate: for weights that stream in, for the
    cache that decode attention reads, for element-wise passes, and for rows sorted by expert. `op_s` is
    the time of a small operation. With `streams_weights`, weights of coming products arrive while the
    core waits in collectives and small operations, and products wait for the rest; otherwise each product
    overlaps with its weights only.
    """

    matmul: float
    attention: float
    weights: float
    cache: float
    passes: float
    routed: float
    op_s: float
    streams_weights: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipEfficiency:
    """The constants of a chip, and by phase the factor that covers 90 % of their errors."""

    constants: ClosedConstants
    spreads: tuple[tuple[Phase, float], ...] = ()
    source: str = ""

    def spread(self, phase: Phase) -> float:
        """The factor that covers 90 % of the errors of a phase; 1 without known errors."""
        return dict(self.spreads).get(phase, 1.0)


def _uniform(*, flops: float, hbm: float) -> ClosedConstants:
    return ClosedConstants(
        matmul=flops,
        attention=flops,
        weights=hbm,
        cache=hbm,
        passes=hbm,
        routed=hbm,
        op_s=0.0,
        streams_weights=False,
    )


PEAKS = ChipEfficiency(
    constants=_uniform(flops=1.0, hbm=1.0), source="published peaks at full efficiency"
)


def _at_peaks(peak: PeakEfficiency, source: str) -> ChipEfficiency:
    """Large operations at these fractions; the interval is that of the wider of compute and memory."""
    low = min(peak.matmul / peak.matmul_interval[1], peak.hbm / peak.hbm_interval[1])
    high = max(peak.matmul / peak.matmul_interval[0], peak.hbm / peak.hbm_interval[0])
    spread = max(1 / low, high)
    return ChipEfficiency(
        constants=_uniform(flops=peak.matmul, hbm=peak.hbm),
        spreads=tuple((phase, spread) for phase in Phase),
        source=source,
    )


def efficiency_of(chip: Chip, rates: Rates) -> ChipEfficiency:
    """The fitted efficiency of a TPU, that of large operations on a GPU, and peaks for measured rates."""
    if rates.measured is not None:
        return _at_peaks(MEASURED_EFFICIENCY, "rates measured on the devices")
    if chip.kind is ChipKind.TPU:
        return _fitted(chip.name)
    peak = GPU_EFFICIENCY
    source = f"{peak.matmul:.0%} of the matmul peak, {peak.hbm:.0%} of the HBM rate"
    return _at_peaks(peak, source)


@cache
def _fitted(chip: str) -> ChipEfficiency:
    fit = fitted_constants(chip)
    return ChipEfficiency(
        constants=ClosedConstants(**fit.closed_form),
        spreads=tuple((Phase(phase), spread) for phase, spread in fit.spreads.items()),
        source=f"constants fitted to {fit.n_fitted} published steps",
    )
