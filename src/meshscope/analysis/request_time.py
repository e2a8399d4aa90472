"""What a request takes, from the modelled time of its steps."""

from collections.abc import Iterable
from dataclasses import dataclass

from meshscope.events.enums import Phase
from meshscope.events.step_time import NO_TIME, StepTime, TimeBasis, TimeEstimate

ASSUMPTION = (
    "the device alone: no host, no queue, no tokenizer; all sequences start together and every "
    "decode step takes the same time"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTime:
    """Durations of a request under ASSUMPTION; null where its steps are not known.

    `ttft` is the prefill step, which makes the first token; `tpot` a decode step; `e2e` the prefill
    step and all decode steps. `basis` names where the steps' time comes from, the larger part first.
    """

    ttft: TimeEstimate | None
    tpot: TimeEstimate | None
    e2e: TimeEstimate | None
    basis: str | None


def request_time(times: Iterable[StepTime], *, n_decode_steps: int | None) -> RequestTime:
    """The request whose phases have these step times; None where nobody said how many tokens it makes."""
    by_phase = {time.phase: time for time in times}
    prefill, decode = (by_phase.get(phase) for phase in (Phase.PREFILL, Phase.DECODE))
    e2e = None
    if prefill is not None and n_decode_steps is not None and (decode or not n_decode_steps):
        e2e = prefill.step + (decode.step * n_decode_steps if decode else NO_TIME)
    return RequestTime(
        ttft=None if prefill is None else prefill.step,
        tpot=None if decode is None else decode.step,
        e2e=e2e,
        basis=basis_of(by_phase.values()),
    )


def basis_of(times: Iterable[StepTime]) -> str | None:
    """The sources of the steps' time, joined by `+`, the one with the largest share first."""
    total: dict[str, float] = {}
    for time in times:
        for basis, seconds in time.by_basis_s.items():
            share = seconds / time.step.value_s if time.step.value_s else 0.0
            total[str(basis)] = total.get(str(basis), 0.0) + share
    names = sorted(total, key=lambda name: -total[name])
    return "+".join(TimeBasis(name).value for name in names) or None
