"""What a step reaches of the peaks of a chip: the constants of the closed form.

`tools/fit_closed_form.py` fits them; `compiler_facts.fitted_constants` stores them with their sources.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache

from meshscope.cost.rates import Rates
from meshscope.hardware.chips import Chip, ChipKind
from meshscope.hardware.compiler_facts import (
    GPU_EFFICIENCY,
    MEASURED_EFFICIENCY,
    OWN_OP_S,
    TPU_EFFICIENCY,
    PeakEfficiency,
    fitted_constants,
)


class ModeledProgram(StrEnum):
    """The program whose step the closed form gives.

    They differ in the routing of experts and in the time of small operations: a published step contains the
    sorts and gathers of its program, the simulated schedule of meshscope's own has arrays in VMEM.
    """

    PUBLISHED = "published"  # published steps, to which the constants are fitted
    OWN = "own"  # meshscope's, as `compile` simulates its schedule


_UNBOUNDED = {"gathers", "op_s"}  # no fractions of a peak


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedConstants:
    """The constants of the closed form on one chip.

    `matmul`, `attention` and `experts` are fractions of the matmul peak: in products with weights, in
    attention kernels over prompts, and in kernels that multiply rows with the weights of experts. Others are
    fractions of the HBM rate: for weights that stream in, for the cache that decode attention reads, and for
    element-wise passes. `gathers` is the compiler's time for row gathers over the real one, and `op_s` the time
    of a small operation. `overlap` is the share of a product during which the weights of later ones stream in.
    """

    matmul: float
    attention: float
    experts: float
    weights: float
    cache: float
    passes: float
    gathers: float
    op_s: float
    overlap: float

    def faster(self, spreads: Mapping[str, float]) -> "ClosedConstants":
        """Every constant better by its factor in `spreads`; below 1 for worse. Nothing exceeds a peak."""
        values = {name: value * spreads[name] for name, value in asdict(self).items()}
        fracs = {name: min(1.0, value) for name, value in values.items() if name not in _UNBOUNDED}
        return replace(self, **fracs, gathers=values["gathers"], op_s=self.op_s / spreads["op_s"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipEfficiency:
    """The constants of a chip, and their values at the bounds of a step's interval.

    With `streams_weights`, weights of coming products arrive while the core waits in collectives and
    small operations, and products wait for the rest; otherwise each product overlaps with its own
    weights only. An interval reaches at least from 1 / `model_spread` to `model_spread` times the step:
    the error for a model without fitted steps.
    """

    constants: ClosedConstants
    fast: ClosedConstants
    slow: ClosedConstants
    streams_weights: bool
    model_spread: float = 1.0
    source: str = ""

    @property
    def of_own_program(self) -> "ChipEfficiency":
        """The efficiency of meshscope's own program, whose small operations work on arrays in VMEM."""
        if not self.constants.op_s:
            return self
        scale = OWN_OP_S.value / self.constants.op_s
        fast, constants, slow = (
            replace(c, op_s=scale * c.op_s) for c in (self.fast, self.constants, self.slow)
        )
        return replace(self, fast=fast, constants=constants, slow=slow)


def _uniform(*, flops: float, hbm: float) -> ClosedConstants:
    by_bytes = dict.fromkeys(("weights", "cache", "passes", "gathers"), hbm)
    return ClosedConstants(
        matmul=flops, attention=flops, experts=flops, op_s=0.0, overlap=0.0, **by_bytes
    )


def _of_large_operations(peak: PeakEfficiency, source: str) -> ChipEfficiency:
    (slow_matmul, fast_matmul), (slow_hbm, fast_hbm) = peak.matmul_interval, peak.hbm_interval
    return ChipEfficiency(
        constants=_uniform(flops=peak.matmul, hbm=peak.hbm),
        fast=_uniform(flops=fast_matmul, hbm=min(1.0, peak.hbm * fast_hbm)),
        slow=_uniform(flops=slow_matmul, hbm=peak.hbm * slow_hbm),
        streams_weights=False,
        source=source,
    )


_FULL = (1.0, 1.0)
PEAKS = _of_large_operations(
    replace(TPU_EFFICIENCY.value, matmul=1.0, matmul_interval=_FULL, hbm=1.0, hbm_interval=_FULL),
    "published peaks at full efficiency",
)


def efficiency_of(chip: Chip, rates: Rates) -> ChipEfficiency:
    """The fitted efficiency of a TPU, or that of large operations on a GPU or of measured rates."""
    if rates.measured is not None:
        return _of_large_operations(MEASURED_EFFICIENCY.value, "rates measured on the devices")
    if chip.kind is ChipKind.TPU:
        return _fitted(chip.name)
    peak = GPU_EFFICIENCY.value
    source = f"{peak.matmul:.0%} of the matmul peak, {peak.hbm:.0%} of the HBM rate"
    return _of_large_operations(peak, source)


@cache
def _fitted(chip: str) -> ChipEfficiency:
    fit = fitted_constants(chip)
    constants = ClosedConstants(**fit.closed_form["constants"])
    spreads: Mapping[str, float] = fit.closed_form["spreads"]
    return ChipEfficiency(
        constants=constants,
        fast=constants.faster(spreads),
        slow=constants.faster({name: 1 / spread for name, spread in spreads.items()}),
        streams_weights=True,
        model_spread=fit.closed_form["model_spread"],
        source=f"constants fitted to {fit.n_fitted} published steps"
        + ("" if fit.closed_form["is_fitted"] else f" of other chips; none of {chip} is known"),
    )
