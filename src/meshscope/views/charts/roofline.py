"""Where the parts of a step stand below the roof of a chip."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshscope.analysis.metric_inputs import MetricInputs
from meshscope.events.enums import Phase, Source

WHOLE_STEP = "whole step"


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePoint:
    """FLOPs a byte, and FLOPs a second, of a part of the model while one device computes it."""

    source: Source
    phase: Phase
    part: str
    flops_per_byte: float
    flops_per_s: float
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineChart:
    """The peaks of one device, and the parts of a step below them."""

    flops_per_s: float
    hbm_bytes_per_s: float
    points: tuple[RooflinePoint, ...]


def roofline_chart(subject: MetricInputs) -> RooflineChart | None:
    """The roof and its points; None without published peaks, or where no part has FLOPs and time.

    A point is FLOPs over compute time, communication and waiting left out: those of a modelled part, or
    of a whole step that was measured.
    """
    chip = None if subject.topology is None else subject.topology.chip
    if chip is None or chip.bf16_flops_per_s is None or chip.hbm_bytes_per_s is None:
        return None
    points = (*_modelled(subject), *_measured(subject))
    if not points:
        return None
    share = 1 / chip.devices_per_chip
    return RooflineChart(
        flops_per_s=chip.bf16_flops_per_s * share,
        hbm_bytes_per_s=chip.hbm_bytes_per_s * share,
        points=points,
    )


def _modelled(subject: MetricInputs) -> Iterator[RooflinePoint]:
    for time in subject.times:
        for part in time.parts:
            if part.flops and part.hbm_bytes and part.compute_s > 0:
                yield RooflinePoint(
                    source=time.source,
                    phase=time.phase,
                    part=part.part or "between parts",
                    flops_per_byte=part.flops / part.hbm_bytes,
                    flops_per_s=part.flops / part.compute_s,
                    compute_s=part.compute_s,
                )


def _measured(subject: MetricInputs) -> Iterator[RooflinePoint]:
    if subject.measured is None:
        return
    seconds = {s.phase: s.step_s for s in subject.steps if s.source is Source.MEASURED}
    for cost in subject.measured.costs:
        step_s = seconds.get(cost.phase)
        if cost.flops and cost.accessed_bytes and step_s:
            yield RooflinePoint(
                source=Source.MEASURED,
                phase=cost.phase,
                part=WHOLE_STEP,
                flops_per_byte=cost.flops / cost.accessed_bytes,
                flops_per_s=cost.flops / step_s,
                compute_s=step_s,
            )
