"""Which share of its peaks the closed form grants each part of a model: constants fitted to compiled programs.

`python benchmarks/closed_form.py fit` writes `fitted.json`, and in it which programs were fitted.
"""

from dataclasses import dataclass
from functools import cache

from meshscope.cost.rates import USUAL_REACH, Reach, reach_of
from meshscope.cost.shares import Shares
from meshscope.events.enums import Part
from meshscope.spec.hardware.chips import Chip, ChipKind
from meshscope.spec.hardware.compiler_facts import fitted_constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The shares of each part; `usual` for parts without their own.

    `spread` is the factor within which 90 of 100 compiled steps that were not fitted lie; None where
    none was compiled, and the range of `reach` stands for it.
    """

    usual: Shares
    reach: Reach = USUAL_REACH
    parts: tuple[tuple[Part, Shares], ...] = ()
    spread: float | None = None
    source: str = ""

    def of(self, part: Part) -> Shares:
        """The shares of a part."""
        return dict(self.parts).get(part, self.usual)


def _even(*, flops: float, n_bytes: float) -> Shares:
    return Shares(
        matmul=flops,
        vector=flops,
        weight=n_bytes,
        matvec=n_bytes,
        cache=n_bytes,
        act=n_bytes,
        wide=n_bytes,
    )


PEAKS = Efficiency(usual=_even(flops=1.0, n_bytes=1.0), source="published peaks, reached in full")


def _usual(reach: Reach) -> Efficiency:
    return Efficiency(
        usual=_even(flops=reach.matmul, n_bytes=reach.hbm),
        reach=reach,
        source=f"{reach.matmul:.0%} of the peak in products, {reach.hbm:.0%} of the HBM's rate",
    )


@cache
def efficiency_of(chip: Chip) -> Efficiency:
    """The constants of a chip: fitted ones where there are, else what large operations usually reach."""
    usual = _usual(reach_of(chip))
    if chip.kind is not ChipKind.TPU:
        return usual
    fit = fitted_constants(chip.name)
    return Efficiency(
        usual=usual.usual,
        parts=tuple((Part(part), Shares(**shares)) for part, shares in fit.parts.items()),
        spread=fit.spread,
        source=f"efficiencies fitted to {fit.n_fitted} steps compiled with libtpu {fit.libtpu}",
    )
