"""Compiles the best choices of a search; runs that exist are read again."""

from pathlib import Path

from meshscope.api.compile import compile_request
from meshscope.api.request import CompileRequest
from meshscope.errors import CompileError, RunError
from meshscope.planner.search import Choice, PlanSearch
from meshscope.planner.verified import VerifiedChoice, corrected_order, verified_choice
from meshscope.store.read import read_run
from meshscope.store.run import RunRecord
from meshscope.workers.spawn import Progress


def verified_choices(
    search: PlanSearch, *, model: str, n_choices: int, out: Path, progress: Progress | None = None
) -> tuple[VerifiedChoice, ...]:
    """The best choice of each of the best plans, compiled into folders below `out`, the best first."""
    choices = search.best[:n_choices]
    return corrected_order(
        (_verified(choice, model, out, progress) for choice in choices), search.objective
    )


def _verified(choice: Choice, model: str, out: Path, progress: Progress | None) -> VerifiedChoice:
    folder = out / _name(choice)
    try:
        run = _run(choice, model, folder, progress)
    except CompileError as error:  # a plan that the compiler refuses is a result
        return VerifiedChoice(choice=choice, folder=str(folder), failure=str(error))
    return verified_choice(choice, run, str(folder))


def _run(choice: Choice, model: str, folder: Path, progress: Progress | None) -> RunRecord:
    if not folder.exists():
        request = _request(choice, model)
        return compile_request(request, out=folder, force=False, progress=progress).record
    run = read_run(folder)
    if run.manifest.experiment != choice.experiment.record:
        raise RunError(
            f"'{folder}' holds a run of another experiment. Use another --out, or remove the folder."
        )
    return run


def _request(choice: Choice, model: str) -> CompileRequest:
    experiment, workload = choice.experiment, choice.experiment.workload
    return CompileRequest(
        model=model,
        topology=experiment.topology.name,
        plan=str(experiment.plan),
        batch=workload.batch,
        prompt=workload.prompt,
        output=workload.output,
        weight_dtype=workload.weight_dtype,
        cache_dtype=workload.cache_dtype,
        prefill_chunk=str(workload.prefill_chunk or "off"),
    )


def _name(choice: Choice) -> str:
    workload = choice.experiment.workload
    plan = str(choice.experiment.plan).replace("=", "").replace(",", "-")
    chunk = f"chunk{workload.prefill_chunk}" if workload.prefill_chunk else "whole"
    return f"{plan}-b{workload.batch}-{workload.weight_dtype}-{workload.cache_dtype}-{chunk}"
