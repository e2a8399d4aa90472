"""The roofline of one device: its peaks, the bounds below them, and where a step spends more than its floor.

The model is Williams et al., "Roofline: An Insightful Visual Performance Model" (2009), with the
links as a third bound. Each bound is work over a peak rate, so none includes latency or schedules.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import Activity, PartCost, StepTime
from meshscope.files import own_table
from meshscope.hardware.chips import Chip, peak_dtype, product_speedup
from meshscope.store.run import RunRecord
from meshscope.units import format_seconds

OTHER = "other"
BETWEEN_PARTS = "between parts"
PADDING = "padding of matmuls"
SLOW_HBM = "HBM below peak"
ROUNDING = 1e-9
_EXPOSED_OVER = "exposed over "
_MIN_FRAC = 0.01  # of the step; smaller causes are added up
_MAX_CAUSES = 2
REASONS: dict[str, str] = own_table("analysis/reasons.toml")


class BindingResource(StrEnum):
    """A resource that can bound a step."""

    COMPUTE = "compute"
    HBM = "hbm"
    INTERCONNECT = "interconnect"


RESOURCES = {
    BindingResource.COMPUTE: "compute",
    BindingResource.HBM: "HBM",
    BindingResource.INTERCONNECT: "link",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeaks:
    """Peak rates of one device: matrix FLOPs, HBM bandwidth, and all links of its chip in one direction."""

    flops_per_s: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float

    def bounds_s(self, parts: Iterable[PartCost]) -> dict[BindingResource, float]:
        """Least seconds of the parts by resource, the one that binds first: their work at its peak rate."""
        work = [(p.flops or 0.0, p.hbm_bytes or 0.0, p.wire_bytes or 0.0) for p in parts]
        peaks = (self.flops_per_s, self.hbm_bytes_per_s, self.link_bytes_per_s)
        sums = [sum(amounts) for amounts in zip(*work, strict=True)] or [0.0] * len(peaks)
        seconds = [amount / peak for amount, peak in zip(sums, peaks, strict=True)]
        bounds = zip(BindingResource, seconds, strict=True)
        return dict(sorted(bounds, key=lambda bound: -bound[1]))


def device_peaks(chip: Chip, weight_dtype: str | None = None) -> DevicePeaks | None:
    """A device's share of the chip's published peaks; None if the peaks are not published.

    The FLOP rate is for bf16 products, or for products with weights in `weight_dtype`.
    """
    flops_per_s, hbm_bytes_per_s = chip.bf16_flops_per_s, chip.hbm_bytes_per_s
    link_bytes_per_s = chip.all_links_bytes_per_s
    if flops_per_s is None or hbm_bytes_per_s is None or link_bytes_per_s is None:
        return None
    speedup = 1.0 if weight_dtype is None else product_speedup(weight_dtype, chip)
    return DevicePeaks(
        flops_per_s=speedup * flops_per_s / chip.devices_per_chip,
        hbm_bytes_per_s=hbm_bytes_per_s / chip.devices_per_chip,
        link_bytes_per_s=link_bytes_per_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineBound:
    """Lower bounds of one part of a step by resource, in seconds, and the modeled time.

    `binding` is the resource with the largest bound, `factor` the ratio of that bound to the next one
    (null if that is 0), and `roof_frac` the ratio of the bound to the modeled time `taken_s`: 1 if it runs at its
    bound. It is null where the bound exceeds the time: weights arrive, or collectives run, during other parts, or
    arrays stay in VMEM.
    """

    part: str
    compute_s: float
    hbm_s: float
    interconnect_s: float
    taken_s: float
    binding: BindingResource
    factor: float | None
    roof_frac: float | None


def roofline_bounds(
    time: StepTime, chip: Chip, weight_dtype: str | None = None
) -> list[RooflineBound]:
    """Bounds of the whole step, then of its parts, the costliest first; empty without published peaks.

    The largest bound of the step is its floor.
    """
    if (peaks := device_peaks(chip, weight_dtype)) is None:
        return []
    rows: list[tuple[str, Iterable[PartCost], float]] = [("step", time.parts, time.step.value_s)]
    rows += [(p.part or OTHER, (p,), p.compute_s + p.exposed_s) for p in time.parts]
    bounds: list[RooflineBound] = []
    for name, parts, taken_s in rows:
        of_part = peaks.bounds_s(parts)
        (binding, first_s), (_, second_s), _ = of_part.items()
        is_elsewhere = first_s > taken_s  # in VMEM, or during other parts
        if taken_s > 0 or not bounds:
            bounds.append(
                RooflineBound(
                    part=name,
                    **{f"{resource}_s": seconds for resource, seconds in of_part.items()},
                    taken_s=taken_s,
                    binding=binding,
                    factor=first_s / second_s if second_s else None,
                    roof_frac=first_s / taken_s if taken_s and not is_elsewhere else None,
                )
            )
    return bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorCause:
    """Seconds beyond the floor in which one activity leaves the binding resource unused."""

    cause: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """Lower bounds of a step on one device in seconds; the largest is its floor.

    `link_s` assumes all links of the chip at once. The `causes` are positive, the longest first, and add up
    to the step minus its floor; a step that is not longer than its floor has none.
    """

    hbm_s: float
    compute_s: float
    link_s: float
    binding: BindingResource
    causes: tuple[FloorCause, ...]
    peak: str = "bf16"  # whose products count at their peak

    @property
    def floor_s(self) -> float:
        """The largest bound."""
        return max(self.hbm_s, self.compute_s, self.link_s)


def step_floor(time: StepTime, chip: Chip, weight_dtype: str | None = None) -> StepFloor | None:
    """The floor of a modeled step; None without published peaks or without the work of its parts.

    Bounds are HBM bytes / HBM rate, FLOPs / matrix peak and wire bytes / link rate, of one device. A cause
    is the time of an activity in which the binding resource is not used: less FLOPs / peak where compute
    binds, less the time in which the HBM is busy where the HBM does, less wire bytes / link rate where links
    do. Work of the resource that overlaps activities unseen shortens all causes alike. The time in which the
    HBM is busy beyond bytes / peak is a cause of its own. An activity whose products fill tiles of the matrix
    units with padding yields these FLOPs to `PADDING`.

    Source: Williams et al., "Roofline: An Insightful Visual Performance Model" (2009).
    """
    peaks = device_peaks(chip, weight_dtype)
    if peaks is None or not any(p.hbm_bytes for p in time.parts):
        return None
    bounds = peaks.bounds_s(time.parts)
    binding, floor_s = next(iter(bounds.items()))
    causes: defaultdict[str, float] = defaultdict(float)
    has_experts = any((part.part or "").startswith("moe.") for part in time.parts)
    for spent in time.activities:
        padding_s = 0.0
        match binding:
            case BindingResource.HBM:
                used_s = spent.hbm_busy_s
            case BindingResource.COMPUTE:
                used_s = spent.flops / peaks.flops_per_s
                padding_s = spent.padding_flops / peaks.flops_per_s
            case BindingResource.INTERCONNECT:
                used_s = spent.wire_bytes / peaks.link_bytes_per_s
        unused_s = max(0.0, spent.seconds - used_s)
        padding_s = min(unused_s, padding_s)
        causes[PADDING] += padding_s
        cause = cause_of(spent.activity, spent.axis, has_experts=has_experts)
        causes[cause] += unused_s - padding_s
    return StepFloor(
        hbm_s=bounds[BindingResource.HBM],
        compute_s=bounds[BindingResource.COMPUTE],
        link_s=bounds[BindingResource.INTERCONNECT],
        binding=binding,
        peak="bf16" if weight_dtype is None else peak_dtype(weight_dtype, chip),
        causes=tuple(_ranked(causes, time.step.value_s, floor_s, binding)),
    )


def cause_of(activity: Activity, axis: str | None = None, *, has_experts: bool = False) -> str:
    """Why the time of an activity, as far as it does not use the binding resource, is beyond the floor."""
    match activity:
        case Activity.MATMUL:
            return "matmuls below peak"
        case Activity.KERNEL:
            return f"attention {'and expert ' if has_experts else ''}kernels below peak"
        case Activity.OTHER_KERNEL:
            return f"{activity.value} below peak"
        case Activity.EXPOSED if axis:
            return f"{_EXPOSED_OVER}{axis}"
        case _:
            return activity.value


def _ranked(
    causes: Mapping[str, float], step_s: float, floor_s: float, binding: BindingResource
) -> Iterator[FloorCause]:
    """The causes, the longest first, scaled to the time beyond the floor if they exceed it.

    The rest is a busy HBM if it binds; causes below _MIN_FRAC are added to the unknown time.
    """
    beyond_s = step_s - floor_s
    if beyond_s <= 0:
        return
    unused_s = sum(causes.values())
    scale = min(1.0, beyond_s / unused_s) if unused_s else 1.0
    scaled = {cause: scale * seconds for cause, seconds in causes.items()}
    if binding is BindingResource.HBM and scaled:
        scaled[SLOW_HBM] = max(0.0, beyond_s - unused_s)
    large = {cause: s for cause, s in scaled.items() if s >= _MIN_FRAC * step_s}
    for cause in sorted(large, key=lambda cause: -large[cause]):
        yield FloorCause(cause=cause, seconds=large[cause])
    rest_s = beyond_s - sum(large.values())
    if rest_s > ROUNDING * beyond_s:
        yield FloorCause(cause=OTHER, seconds=rest_s)


def why_sentences(run: RunRecord) -> dict[Phase, str]:
    """A sentence for each modeled phase of the strongest source that has times."""
    experiment = run.manifest.experiment
    chip, weight_dtype = experiment.chip, experiment.weight_dtype
    times = next((times for source in reversed(Source) if (times := run.times_of(source))), ())
    return {time.phase: why_sentence(time, chip, weight_dtype) for time in times}


def why_sentence(
    time: StepTime,
    chip: Chip | None,
    weight_dtype: str | None = None,
    *,
    max_causes: int = _MAX_CAUSES,
) -> str:
    """What binds the step and where its time beyond the floor goes.

    `decode takes 28.8 ms, 1.22 x its HBM floor of 23.6 ms: 3.3 ms HBM below peak, 1.85 ms matmuls below peak`.
    The seconds add up to the time beyond the floor.
    """
    head = f"{time.phase} takes {format_seconds(time.step.value_s)}"
    floor = None if chip is None else step_floor(time, chip, weight_dtype)
    if floor is None or not floor.floor_s:
        return head
    ratio = time.step.value_s / floor.floor_s  # below 1 if bytes or FLOPs exceed the peaks
    times = f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}"
    is_narrow = floor.peak != "bf16" and floor.binding is BindingResource.COMPUTE
    at_peak = f" at the {floor.peak} peak" if is_narrow else ""
    of_floor = f"{RESOURCES[floor.binding]} floor of {format_seconds(floor.floor_s)}{at_peak}"
    clauses = ", ".join(_clauses(floor, max_causes))
    return f"{head}, {times} x its {of_floor}{': ' if clauses else ''}{clauses}"


def reasons_in(sentences: Iterable[str]) -> Iterator[str]:
    """What the device does for each reason that the sentences name, and what changes it."""
    text = " ".join(sentences)
    named = (
        (match.start(), f"{match[1]}: {meaning}")
        for reason, meaning in REASONS.items()
        if (match := re.search(f"s ({reason})", text))
    )
    yield from (said for _, said in sorted(named))


def main_costs(sentences: Iterable[str], *, n_meanings: int = 2) -> Iterator[str]:
    """`prefill takes 3.71 x its compute floor: 108 ms pipeline bubble (it waits for ...), ...`, without other seconds.

    A reason has its meaning the first time that it is named, and so many reasons have one.
    """
    explained = set[str]()
    for sentence in sentences:
        head, separator, costs = sentence.partition(": ")
        first, *others = costs.split(", ")
        short_head = re.sub(r" takes [^,]+, (.+? floor) of .+", r" takes \1", head)
        meaning = next(reasons_in([f"{separator}{first}"]), "").partition(": ")[2]
        is_shown = meaning and meaning not in explained and len(explained) < n_meanings
        explained.add(meaning)
        said = f" ({meaning})" if is_shown else ""
        yield f"{short_head}{separator}{first}{said}{', ...' if others else ''}"


def _clauses(floor: StepFloor, max_causes: int) -> Iterator[str]:
    """The largest causes with their seconds, `1.66 ms exposed tp communication`, and the sum of the others."""
    shown = [cause for cause in floor.causes if cause.cause != OTHER][:max_causes]
    for cause in shown:
        noun = cause.cause
        if noun.startswith(_EXPOSED_OVER):
            noun = f"exposed {noun.removeprefix(_EXPOSED_OVER)} communication"
        yield f"{format_seconds(cause.seconds)} {noun}"
    rest_s = sum(cause.seconds for cause in floor.causes if cause not in shown)
    if rest_s > _MIN_FRAC * sum(cause.seconds for cause in floor.causes):
        yield f"{format_seconds(rest_s)} {OTHER if shown else 'of unknown cause'}"
