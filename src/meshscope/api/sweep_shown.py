"""`meshscope sweep`: the experiments of a file, each a run, with their progress and their table."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Self

from rich.console import RenderableType
from rich.progress import BarColumn, SpinnerColumn, TaskID, TimeElapsedColumn
from rich.text import Text

from meshscope.api.console import (
    Display,
    new_console,
    note,
    print_all,
    print_json,
    text_column,
    time_left_text,
)
from meshscope.api.options import JsonOption, Option
from meshscope.api.sweep import (
    FOLDER,
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
from meshscope.reports.plain import plain
from meshscope.reports.sweep import basis_lines, summary_table
from meshscope.reports.tables import new_table, rich_table
from meshscope.sweep.planned import PlannedRun, RunCommand
from meshscope.sweep.work import Outcome, time_left_s

MAX_MESSAGE = 60  # characters of a command's last line, behind its bar


class SweepProgress(Display):
    """On a terminal a bar for the sweep and a row for each run; elsewhere a line for each finished run."""

    def __init__(self, planned: Iterable[PlannedRun], n_jobs: int) -> None:
        super().__init__(SpinnerColumn(), text_column(), BarColumn(20), TimeElapsedColumn())
        self._waiting = {one.name: one.command for one in planned}
        self._n_all, self._n_jobs, self._n_failed = len(self._waiting), n_jobs, 0
        self._durations: list[tuple[RunCommand, float]] = []
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        """Starts the display with the bar of the sweep."""
        super().__enter__()
        if self.bars is not None:
            self._tasks[""] = self.bars.add_task(self._summary(), total=self._n_all)
        return self

    def started(self, planned: PlannedRun) -> None:
        """A run starts."""
        if self.bars is not None:
            self._tasks[planned.name] = self.bars.add_task(f"  {planned}", total=None)

    def reported(self, planned: PlannedRun, message: str) -> None:
        """The last line that the command wrote."""
        if self.bars is not None and message:
            description = f"  {planned}: {plain(message)[:MAX_MESSAGE]}"
            self.bars.update(self._tasks[planned.name], description=description)

    def ended(self, planned: PlannedRun, outcome: Outcome, seconds: float) -> None:
        """A run ended, after `seconds`."""
        del self._waiting[planned.name]
        self._n_failed += outcome is Outcome.FAILED
        if outcome is Outcome.DONE:
            self._durations.append((planned.command, seconds))
        if self.bars is None:
            self.write(f"{planned}: {outcome} in {seconds:.1f} s; {self._summary()}")
            return
        self.bars.remove_task(self._tasks.pop(planned.name))
        n_ended = self._n_all - len(self._waiting)
        self.bars.update(self._tasks[""], completed=n_ended, description=self._summary())

    def _summary(self) -> str:
        n_ended = self._n_all - len(self._waiting)
        failed = f", {self._n_failed} failed" if self._n_failed else ""
        left_s = time_left_s(self._durations, list(self._waiting.values()), n_jobs=self._n_jobs)
        left = f", {time_left_text(left_s)}" if left_s else ""
        return f"{n_ended} of {self._n_all}{failed}{left}"


FileArgument = Annotated[
    Path, Option(help="Experiments, in YAML.", metavar="FILE", is_argument=True)
]


def command(
    file: FileArgument,
    options: SweepOptions,
    *,
    out: Annotated[Path | None, FOLDER] = None,
    dry_run: Annotated[bool, Option(help="Check all experiments and list their states.")] = False,
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
    path = sweep_folder(file, out)
    check_queue(plan, options)
    if dry_run:
        _print(sweep_states(plan, path, options), _states_table, as_json=as_json)
        return
    result = run_sweep(plan, path, options, note=note, show=SweepProgress)
    print_results(result, as_json=as_json)
    result.check()


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
