"""One sentence for each phase: what binds its step, and where the rest of its time goes."""

from collections.abc import Iterator

from meshscope.analysis.floor import OTHER, SLOW_HBM, FloorCause, StepFloor, step_floor
from meshscope.analysis.roofline import BindingResource
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import StepTime
from meshscope.spec.hardware.chips import Chip
from meshscope.store.run import RunRecord
from meshscope.units import format_bytes, format_seconds

MAX_CAUSES = 2
NEAR_FLOOR = (
    1.5  # times the floor; a step below it is described by its rate, others by their causes
)
MIN_SHARE = 0.05  # of the step; smaller causes are not worth a clause
DOMINANT = 0.5  # of the step; a larger cause is named first
EXPOSED_OVER = "exposed over "


def why_sentences(run: RunRecord) -> dict[Phase, str]:
    """A sentence for each modeled phase of the strongest source that has times."""
    chip = run.manifest.experiment.chip
    sources = [source for source in Source if run.times_of(source)]
    times = run.times_of(sources[-1]) if sources else ()
    return {time.phase: why_sentence(time, chip) for time in times}


def why_sentence(time: StepTime, chip: Chip | None) -> str:
    """What binds the step and where its time beyond the floor goes, with seconds and shares."""
    floor = None if chip is None else step_floor(time, chip)
    if floor is None or not floor.floor_s:
        return f"{time.phase} takes {format_seconds(time.step.value_s)}"
    causes = sorted(_named(floor), key=lambda cause: -cause.seconds)
    if causes and causes[0].seconds >= DOMINANT * time.step.value_s:
        return _by_cause(time, floor, causes)
    if time.step.value_s <= NEAR_FLOOR * floor.floor_s:
        head, separator = _by_rate(time, floor), "; beyond it "
        causes = [cause for cause in causes if cause.cause != SLOW_HBM]  # the rate says it
    else:
        head, separator = f"{time.phase} takes {_of_floor(time, floor)}", ": "
    clauses = ", ".join(_clauses(time, causes))
    return f"{head}{separator}{clauses}" if clauses else head


def _named(floor: StepFloor) -> Iterator[FloorCause]:
    """The causes that lengthen the step; runs of older versions know only `other`."""
    return (cause for cause in floor.causes if cause.seconds > 0 and cause.cause != OTHER)


def _by_cause(time: StepTime, floor: StepFloor, causes: list[FloorCause]) -> str:
    """The sentence of a step with one cause that takes most of it."""
    first, *rest = causes
    seconds, step = format_seconds(first.seconds), format_seconds(time.step.value_s)
    clauses = list(_clauses(time, rest))
    clauses.append(f"the {_RESOURCES[floor.binding]} floor is {format_seconds(floor.floor_s)}")
    return f"{seconds} of the {step} of {time.phase} are {_noun(first)}; {', '.join(clauses)}"


def _by_rate(time: StepTime, floor: StepFloor) -> str:
    """The work of a step near its floor, and the fraction of the peak rate that it reaches."""
    rate = f"{floor.floor_s / time.step.value_s:.0%}"
    match floor.binding:
        case BindingResource.HBM:
            n_bytes = format_bytes(time.hbm_bytes)
            return f"{time.phase} reads and writes {n_bytes} a device at {rate} of the HBM rate"
        case BindingResource.COMPUTE:
            return f"{time.phase} runs at {rate} of the bf16 peak"
        case BindingResource.INTERCONNECT:
            n_bytes = format_bytes(time.wire_bytes)
            return f"{time.phase} sends {n_bytes} a device at {rate} of the rate of all links"


_RESOURCES = {
    BindingResource.HBM: "HBM",
    BindingResource.COMPUTE: "compute",
    BindingResource.INTERCONNECT: "link",
}


def _of_floor(time: StepTime, floor: StepFloor) -> str:
    """`3.7 x its HBM floor of 9.1 ms`."""
    ratio = f"{time.step.value_s / floor.floor_s:.1f} x its {_RESOURCES[floor.binding]} floor"
    return f"{ratio} of {format_seconds(floor.floor_s)}"


def _clauses(time: StepTime, causes: list[FloorCause]) -> Iterator[str]:
    """The largest causes with their seconds, `1.66 ms exposed tp communication`."""
    large = [c for c in causes if c.seconds >= MIN_SHARE * time.step.value_s]
    for cause in large[:MAX_CAUSES]:
        yield f"{format_seconds(cause.seconds)} {_noun(cause)}"


def _noun(cause: FloorCause) -> str:
    """The cause as the words after its seconds."""
    if cause.cause.startswith(EXPOSED_OVER):
        return f"exposed {cause.cause.removeprefix(EXPOSED_OVER)} communication"
    return cause.cause
