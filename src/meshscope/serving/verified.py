"""Choices of a search after compilation: compiled and predicted times, and the corrected order."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshscope.analysis.agreement import TimeAgreement, time_agreements
from meshscope.analysis.roofline import why_sentences
from meshscope.cost.predicted import predicted_times
from meshscope.events.enums import REQUEST_PHASES, Phase, Source
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.serving.objective import Objective
from meshscope.serving.search import Choice
from meshscope.store.run import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedChoice:
    """A compiled choice; `failure` is the compiler's message if it refused the program.

    Times come from the simulated schedule, and `why` says what binds it. `fits` is the compiler's account.
    `misses` compares each step with its prediction, cause by cause.
    """

    choice: Choice
    folder: str
    failure: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    tokens_per_s_per_chip: float | None = None
    fits: bool | None = None
    why: dict[Phase, str] | None = None
    misses: tuple[TimeAgreement, ...] = ()

    @property
    def missed(self) -> str | None:
        """By what factors the compiled steps differ from the predicted ones; None without compiled times."""
        if self.ttft_s is None or self.tpot_s is None:
            return None
        ratios = (self.ttft_s / self.choice.ttft_s, self.tpot_s / self.choice.tpot_s)
        return f"prefill {ratios[0]:.2f} x, decode {ratios[1]:.2f} x the prediction"


def verified_choice(
    choice: Choice, run: RunRecord, folder: str, profile: ChipProfile | None = None
) -> VerifiedChoice:
    """The choice with the compiled figures of its run; a run of an earlier version is compared, too."""
    steps = {time.phase: time.step.value_s for time in run.times_of(Source.COMPILED)}
    memory = run.memory.get(Source.COMPILED)
    if set(steps) != set(REQUEST_PHASES):
        return VerifiedChoice(choice=choice, folder=folder, failure="the run has no compiled times")
    workload = choice.experiment.workload
    e2e_s = steps[Phase.PREFILL] + workload.n_decode_steps * steps[Phase.DECODE]
    n_chips = choice.experiment.topology.n_chips
    times = (*predicted_times(choice.experiment, profile), *run.times_of(Source.COMPILED))
    predicted_anew = replace(run, times=times)
    return VerifiedChoice(
        choice=choice,
        folder=folder,
        ttft_s=steps[Phase.PREFILL],
        tpot_s=steps[Phase.DECODE],
        e2e_s=e2e_s,
        tokens_per_s_per_chip=workload.batch * workload.output / e2e_s / n_chips,
        fits=None if memory is None else memory.fits,
        why=why_sentences(run),
        misses=time_agreements(predicted_anew, Source.PREDICTED, Source.COMPILED),
    )


def corrected_order(
    choices: Iterable[VerifiedChoice], objective: Objective
) -> tuple[VerifiedChoice, ...]:
    """The choices by their compiled figures: those that fit and meet the limits first, failures last."""

    def rank(verified: VerifiedChoice) -> tuple[bool, bool, bool, float]:
        ttft_s, tpot_s = verified.ttft_s, verified.tpot_s
        if ttft_s is None or tpot_s is None:
            return (True, True, True, 0.0)
        rate = verified.tokens_per_s_per_chip or 0.0
        cost = objective.cost(verified.e2e_s or 0.0, rate)
        return (False, verified.fits is False, not objective.meets(ttft_s, tpot_s), cost)

    return tuple(sorted(choices, key=rank))
