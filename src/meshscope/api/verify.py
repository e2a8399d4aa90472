"""Compiles the best choices of a search, as a sweep does; runs that exist are read again."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from meshscope.api.compile import compilable_experiment
from meshscope.api.options import changed_options, option_words
from meshscope.api.request import AUTO, CompileRequest
from meshscope.api.sweep import (
    SweepExperiment,
    SweepOptions,
    SweepPlan,
    SweepState,
    run_sweep,
)
from meshscope.errors import RunError
from meshscope.interconnect.placement import order_text
from meshscope.interconnect.profile import ChipProfile
from meshscope.model.quantization import UNQUANTIZED_DTYPE
from meshscope.planner.search import Choice, PlanSearch
from meshscope.planner.verified import VerifiedChoice, corrected_order, verified_choice
from meshscope.store.read import read_run
from meshscope.sweep.planned import PlannedRun, RunCommand, run_name
from meshscope.sweep.work import Outcome
from meshscope.workers import Progress


class CompileProgress:
    """Forwards the events of a sweep to a progress callback, each message once."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._last: dict[str, str] = {}

    def started(self, planned: PlannedRun) -> None:
        """The compilation starts."""
        self.reported(planned, "started")

    def reported(self, planned: PlannedRun, message: str) -> None:
        """The last line that the command wrote."""
        if self._progress is not None and message and self._last.get(planned.name) != message:
            self._last[planned.name] = message
            self._progress(planned.name, message, None)

    def ended(self, planned: PlannedRun, outcome: Outcome, seconds: float) -> None:
        """The compilation ended."""
        del seconds
        self.reported(planned, outcome.value)


def verified_choices(  # noqa: PLR0913  a search, and how to compile its choices
    search: PlanSearch,
    *,
    model: str,
    layers: int | None = None,
    n_choices: int,
    out: Path,
    options: SweepOptions,
    progress: Progress | None = None,
) -> tuple[VerifiedChoice, ...]:
    """The best choice of each of the best plans, compiled into folders below `out`, the best first."""
    choices = search.best[:n_choices]
    plan = SweepPlan(
        file=None,
        runs=tuple(_planned(choice, _request(choice, model, layers)) for choice in choices),
        n_repeated=0,
    )

    def show(left: Sequence[PlannedRun], n_jobs: int) -> nullcontext[CompileProgress]:
        del left, n_jobs
        return nullcontext(CompileProgress(progress))

    result = run_sweep(plan, out, options, note=lambda _: None, show=show)
    if result.count(SweepState.TO_DO):
        raise RunError("Interrupted. Rerun the command to resume.")
    pairs = zip(choices, result.experiments, strict=True)
    profile = search.space.profile
    return corrected_order((_verified(c, one, out, profile) for c, one in pairs), search.objective)


def _verified(
    choice: Choice, experiment: SweepExperiment, out: Path, profile: ChipProfile | None
) -> VerifiedChoice:
    folder = out / experiment.planned.name
    if experiment.failure is not None:  # a plan that the compiler refuses is a result
        return VerifiedChoice(choice=choice, folder=str(folder), failure=experiment.failure)
    return verified_choice(choice, read_run(folder), str(folder), profile)


def _planned(choice: Choice, request: CompileRequest) -> PlannedRun:
    """The compilation of the choice; SpecError if no compiler can take it."""
    changed = changed_options(request)
    words = tuple(option_words(changed))
    return PlannedRun(
        name=run_name(_name(choice), RunCommand.COMPILE, words),
        command=RunCommand.COMPILE,
        words=words,
        experiment=compilable_experiment(request).record,
        options=changed,
    )


def _request(choice: Choice, model: str, layers: int | None) -> CompileRequest:
    experiment, workload = choice.experiment, choice.experiment.workload
    wide = workload.activation_dtype
    return CompileRequest(
        model=model,
        topology=experiment.topology.name,
        plan=str(experiment.plan),
        batch=workload.batch,
        prompt=workload.prompt,
        output=workload.output,
        dtype=AUTO if wide == UNQUANTIZED_DTYPE else wide,
        weight_dtype=workload.weight_dtype,
        cache_dtype=workload.cache_dtype,
        layers=layers,
        device_order=order_text(experiment.mesh, experiment.topology),
        prefill_chunk=str(workload.prefill_chunk or "off"),
    )


def _name(choice: Choice) -> str:
    workload = choice.experiment.workload
    plan = str(choice.experiment.plan).replace("=", "").replace(",", "-")
    chunk = f"chunk{workload.prefill_chunk}" if workload.prefill_chunk else "whole"
    return f"{plan}-b{workload.batch}-{workload.weight_dtype}-{workload.cache_dtype}-{chunk}"
