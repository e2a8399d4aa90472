"""Predicted times and memory of many experiments, from one joint evaluation of the closed form."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.cost.closed_form import NO_LIMIT, ClosedSteps, PlanForm, closed_steps, plan_batch
from meshscope.cost.closed_form import plan_form as form_of
from meshscope.cost.predicted import step_time
from meshscope.events.enums import Phase
from meshscope.events.step_time import StepTime, TimeEstimate
from meshscope.interconnect.profile import ChipProfile
from meshscope.plans.experiment import Experiment
from meshscope.plans.memory import Memory
from meshscope.prediction.memory import predicted_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The predicted steps and memory of an experiment; `tpot_s` is None for one output token."""

    experiment: Experiment
    times: tuple[StepTime, ...]  # without intervals
    memory: Memory

    @property
    def ttft_s(self) -> float:
        """Seconds of the prefill step."""
        return self.times[0].step.value_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds of the mean decode step."""
        return self.times[1].step.value_s if len(self.times) > 1 else None

    @property
    def e2e_s(self) -> float:
        """Seconds of the request: prefill and all decode steps."""
        n_steps = self.experiment.workload.n_decode_steps
        return self.ttft_s + n_steps * (self.tpot_s or 0.0)


def estimates_of(
    experiments: Sequence[Experiment], profile: ChipProfile | None = None
) -> tuple[Estimate, ...]:
    """The estimate of each experiment; SpecError for a chip without published figures or profile."""
    forms = [
        (at, form_of(experiment, phase, profile=profile))
        for at, experiment in enumerate(experiments)
        for phase in experiment.phases
    ]
    steps = _steps([form for _, form in forms], [experiments[at] for at, _ in forms])
    times: list[list[StepTime]] = [[] for _ in experiments]
    for number, (at, form) in enumerate(forms):
        seconds = TimeEstimate(value_s=float(steps.step_s[number]), low_s=None, high_s=None)
        times[at].append(step_time(form, steps, seconds, at=number))
    return tuple(
        Estimate(experiment=experiment, times=tuple(of), memory=predicted_memory(experiment))
        for experiment, of in zip(experiments, times, strict=True)
    )


def _steps(forms: Sequence[PlanForm], experiments: Sequence[Experiment]) -> ClosedSteps:
    """The step of each form for the workload of its experiment."""
    workloads = [experiment.workload for experiment in experiments]
    sizes = {
        name: np.array([getattr(workload, name) for workload in workloads], dtype=float)
        for name in ("batch", "prompt", "output")
    }
    sizes["chunk"] = np.array([float(w.prefill_chunk or NO_LIMIT) for w in workloads])
    return closed_steps(plan_batch(forms), np.arange(len(forms)), **sizes)


def phase_of(estimate: Estimate, phase: Phase) -> StepTime | None:
    """The step of a phase; None for decode of one output token."""
    return next((time for time in estimate.times if time.phase is phase), None)
