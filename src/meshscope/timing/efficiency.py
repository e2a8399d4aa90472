"""Which share of its peaks the closed form grants a chip: constants fitted to compiled programs."""

from dataclasses import dataclass

from meshscope.hardware.chips import Chip, ChipKind
from meshscope.table.kinds import Part
from meshscope.timing.rates import HBM_FRAC, MATMUL_FRAC


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the peaks, and cycles that a part takes each time it runs, however small it is.

    `vector_frac` is of the matrix units' peak; `matvec_frac` is that of `weight_frac` where a device
    has a single token, which the vector units multiply. `spread` is the factor within which 90 of 100 compiled programs that were not fitted lie; None
    where none was compiled.
    """

    matmul_frac: float
    vector_frac: float
    weight_frac: float
    matvec_frac: float
    cache_frac: float
    act_frac: float
    run_cycles: tuple[tuple[Part, float], ...] = ()
    spread: float | None = None
    source: str = ""


PEAKS = Efficiency(
    matmul_frac=1.0,
    vector_frac=1.0,
    weight_frac=1.0,
    matvec_frac=1.0,
    cache_frac=1.0,
    act_frac=1.0,
    source="published peaks, reached in full",
)
USUAL = Efficiency(
    matmul_frac=MATMUL_FRAC,
    vector_frac=1.0,
    weight_frac=HBM_FRAC,
    matvec_frac=HBM_FRAC,
    cache_frac=HBM_FRAC,
    act_frac=HBM_FRAC,
    source="shares that large products and copies reach on TPUs (timing/rates.py)",
)

FITTED: dict[str, Efficiency] = {}


def efficiency_of(chip: Chip) -> Efficiency:
    """The constants of a chip: fitted ones where there are, else what large operations usually reach."""
    if chip.kind is ChipKind.TPU:
        return FITTED.get(chip.name, USUAL)
    return USUAL
