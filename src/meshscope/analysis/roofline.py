"""How near a step came to what a chip can do at best."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.events.enums import Phase
from meshscope.events.measured import StepCost
from meshscope.spec.hardware.chips import Chip


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One step of a phase on one device: what it takes at the chip's peaks, and what it took.

    `hbm_frac` and `flops_frac` are the rates reached, of the peaks of memory and of bf16 matrix
    units; the larger of the two says what bounds the step. Null where a figure is not known.
    """

    phase: Phase
    step_s: float
    accessed_bytes: float | None
    flops: float | None
    hbm_frac: float | None
    flops_frac: float | None


def roofline_of(cost: StepCost, step_s: float, chip: Chip) -> Roofline:
    """What a step took on one device, against what it would take at the peaks of the chip.

    `hbm_frac` and `flops_frac` are the rates reached, as shares of the peaks of memory and of bf16 matrix
    units; the larger says what bounds the step. FLOPs and bytes are those that the compiler counts.

    Source: Williams et al., "Roofline: An Insightful Visual Performance Model" (2009); costs: XLA's cost
    analysis of the compiled program; peaks: `meshscope.spec.hardware.chips`.
    """
    share = 1 / chip.devices_per_chip
    return Roofline(
        phase=cost.phase,
        step_s=step_s,
        accessed_bytes=cost.accessed_bytes,
        flops=cost.flops,
        hbm_frac=_frac(cost.accessed_bytes, step_s, chip.hbm_bytes_per_s, share),
        flops_frac=_frac(cost.flops, step_s, chip.bf16_flops_per_s, share),
    )


def _frac(
    amount: float | None, step_s: float, peak_per_s: float | None, share: float
) -> float | None:
    if amount is None or peak_per_s is None:
        return None
    return amount / step_s / (peak_per_s * share)


def rooflines(
    costs: tuple[StepCost, ...], step_s: Mapping[Phase, float | None], chip: Chip
) -> list[Roofline]:
    """Those of the phases whose step was timed; none for a chip without published peaks."""
    if chip.hbm_bytes_per_s is None:
        return []
    timed = [(cost, step_s.get(cost.phase)) for cost in costs]
    return [roofline_of(cost, seconds, chip) for cost, seconds in timed if seconds]
