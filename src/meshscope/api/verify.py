"""Compiles the best choices of a search, as a sweep does; runs that exist are read again."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from meshscope.api.compile import compilable_experiment
from meshscope.api.request import AUTO, CompileRequest
from meshscope.api.sweep import SweepOptions, SweepPlan, planned_of, run_sweep
from meshscope.backends.sweep.folder import PlannedRun, RunCommand
from meshscope.backends.sweep.queue import Outcome
from meshscope.model.quantization import UNQUANTIZED_DTYPE
from meshscope.plans.placement import order_text
from meshscope.serving.search import Choice, PlanSearch
from meshscope.serving.verified import VerifiedChoice, corrected_order, verified_choice
from meshscope.store.read import read_run
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
    runs = tuple(_planned(choice, model, layers) for choice in choices)

    def show(left: Sequence[PlannedRun], n_jobs: int) -> nullcontext[CompileProgress]:
        del left, n_jobs
        return nullcontext(CompileProgress(progress))

    plan = SweepPlan(file=None, runs=runs, n_repeated=0)
    result = run_sweep(plan, out, options, note=lambda _: None, show=show)
    result.check_complete()
    verified: list[VerifiedChoice] = []
    for choice, one in zip(choices, result.experiments, strict=True):
        folder = out / one.planned.name
        if one.failure is not None:  # a plan that the compiler refuses is a result
            failed = VerifiedChoice(choice=choice, folder=str(folder), failure=one.failure)
            verified.append(failed)
            continue
        profile = search.space.profile
        verified.append(verified_choice(choice, read_run(folder), str(folder), profile))
    return corrected_order(verified, search.objective)


def _planned(choice: Choice, model: str, layers: int | None) -> PlannedRun:
    """The compilation of the choice; SpecError if no compiler can take it."""
    experiment, workload = choice.experiment, choice.experiment.workload
    wide, chunk = workload.activation_dtype, workload.prefill_chunk
    request = CompileRequest(
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
        prefill_chunk=str(chunk or "off"),
    )
    plan = str(experiment.plan).replace("=", "").replace(",", "-")
    dtypes = f"{workload.weight_dtype}-{workload.cache_dtype}"
    name = f"{plan}-b{workload.batch}-{dtypes}-{f'chunk{chunk}' if chunk else 'whole'}"
    return planned_of(RunCommand.COMPILE, request, compilable_experiment(request), name)
