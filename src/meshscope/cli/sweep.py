"""`meshscope sweep`: the experiments of a file, each a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from meshscope.api.sweep import (
    SweepExperiment,
    SweepOptions,
    SweepResult,
    SweepState,
    check_queue,
    plan_sweep,
    run_sweep,
    sweep_folder,
    sweep_states,
)
from meshscope.cli.options import JsonOption, ReplaceOption, RetryOption, RunsOption
from meshscope.cli.output import new_console, note, print_all, print_json
from meshscope.cli.queue_options import AddressOption, QueueOption
from meshscope.cli.sweep_progress import SweepProgress
from meshscope.reports.plain import plain
from meshscope.reports.sweep import basis_lines, summary_table
from meshscope.reports.tables import new_table, rich_table
from meshscope.sweep.planned import PlannedRun
from meshscope.sweep.queue import Queue


def command(  # noqa: PLR0913  the options of the command
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Experiments, in YAML.")],
    *,
    out: RunsOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all experiments and list their states.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Runs in parallel; live ones run one by one.",
            show_default="all cores",
        ),
    ] = None,
    queue: QueueOption = Queue.LOCAL,
    address: AddressOption = None,
    retry_failed: RetryOption = False,
    force: ReplaceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run many experiments, and resume after interruptions.

    All experiments are checked before the first starts. Complete runs are not repeated;
    failures are reported at the end and do not stop the other runs.
    """
    plan = plan_sweep(file)
    if plan.n_repeated:
        n_listed = len(plan.runs) + plan.n_repeated
        note(
            f"{plan.n_repeated} of {n_listed} experiments are repeated in the file; each runs once"
        )
    path, options = (
        sweep_folder(file, out),
        SweepOptions(
            force=force, retry_failed=retry_failed, n_jobs=jobs, queue=queue, address=address
        ),
    )
    check_queue(plan, options)
    if dry_run:
        _print(sweep_states(plan, path, options), _states_table, as_json=as_json)
        return

    result = run_sweep(plan, path, options, note=note, show=show_progress)
    print_results(result, as_json=as_json)
    result.check()


def show_progress(left: Sequence[PlannedRun], n_jobs: int) -> SweepProgress:
    """The progress of the runs that are made."""
    return SweepProgress(left, n_jobs=n_jobs)


def print_results(result: SweepResult, *, as_json: bool = False) -> None:
    """The runs of a sweep with their figures, as a table or as one document."""
    _print(result, _results_table, as_json=as_json)


def _print(result: SweepResult, table: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(_document(result))
        return
    rows = [one.summary for one in result.experiments if one.summary is not None]
    counts = [f"{result.count(s)} {s}" for s in SweepState if result.count(s)]
    summary = f"{len(result.experiments)} experiments: {', '.join(counts)}; in {result.folder}"
    print_all(new_console(), [table(result), Text(""), *basis_lines(rows), Text(summary)])


def _results_table(result: SweepResult) -> RenderableType:
    done = [(one.planned, one.summary) for one in result.experiments if one.summary is not None]
    return rich_table(
        summary_table([row for _, row in done], [planned.options for planned, _ in done])
    )


def _states_table(result: SweepResult) -> RenderableType:
    table = new_table("", "experiment", n_words=2)
    for one in result.experiments:
        table.add_row(one.state.value, plain(str(one.planned)))
    return table


def _document(result: SweepResult) -> dict[str, Any]:
    return {
        "sweep": str(result.folder),
        "experiments": [_experiment(one, result.folder) for one in result.experiments],
    }


def _experiment(one: SweepExperiment, folder: Path) -> dict[str, Any]:
    return {
        "state": one.state.value,
        "command": one.planned.command.value,
        "options": dict(one.planned.options),
        "run": str(folder / one.planned.name) if one.state is SweepState.DONE else None,
        "failure": one.failure,
        "summary": one.summary,
    }
