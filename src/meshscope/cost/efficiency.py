"""Efficiency of each model part relative to the peaks of a chip, fitted to compiled programs.

`tools/fit_closed_form.py` fits the constants; `compiler_facts.fitted_constants` stores them.
"""

from dataclasses import dataclass
from functools import cache

from meshscope.cost.rates import TPU_EFFICIENCY, PeakEfficiency, peak_efficiency
from meshscope.events.enums import Part
from meshscope.spec.hardware.chips import Chip, ChipKind
from meshscope.spec.hardware.compiler_facts import fitted_constants


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEfficiency:
    """Fractions of the peaks that a part reaches, and its cycles per shuffled tile and per run.

    `vector` is relative to the matrix units' peak. `matvec` replaces `weight` on a device with a single
    token, which the vector units multiply. A fraction below that of the HBM means that arrays are read
    several times or relaid out.
    """

    matmul: float
    vector: float
    weight: float
    matvec: float
    cache: float
    act: float
    wide: float
    tile_cycles: float = 0.0
    run_cycles: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipEfficiency:
    """The efficiency of each part, `default` for parts without a fit.

    `spread` is the factor that covers 90 % of the holdout errors; without compiled programs it is None
    and the intervals of `peak` apply.
    """

    default: PartEfficiency
    peak: PeakEfficiency = TPU_EFFICIENCY
    parts: tuple[tuple[Part, PartEfficiency], ...] = ()
    spread: float | None = None
    source: str = ""

    def of_part(self, part: Part) -> PartEfficiency:
        """The efficiency of a part."""
        return dict(self.parts).get(part, self.default)


def _uniform(*, flops: float, n_bytes: float) -> PartEfficiency:
    by_bytes = dict.fromkeys(("weight", "matvec", "cache", "act", "wide"), n_bytes)
    return PartEfficiency(matmul=flops, vector=flops, **by_bytes)


PEAKS = ChipEfficiency(
    default=_uniform(flops=1.0, n_bytes=1.0), source="published peaks at full efficiency"
)


@cache
def efficiency_of(chip: Chip) -> ChipEfficiency:
    """The fitted efficiency of a TPU, and the measured efficiency of large operations on a GPU."""
    peak = peak_efficiency(chip)
    default = _uniform(flops=peak.matmul, n_bytes=peak.hbm)
    if chip.kind is not ChipKind.TPU:
        source = f"{peak.matmul:.0%} of the matmul peak, {peak.hbm:.0%} of the HBM rate"
        return ChipEfficiency(default=default, peak=peak, source=source)
    fit = fitted_constants(chip.name)
    return ChipEfficiency(
        default=default,
        parts=tuple((Part(part), PartEfficiency(**values)) for part, values in fit.parts.items()),
        spread=fit.spread,
        source=f"efficiencies fitted to {fit.n_fitted} steps compiled with libtpu {fit.libtpu}",
    )
