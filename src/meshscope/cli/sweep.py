"""`meshscope sweep`: many experiments of one file, each a run, whatever interrupts it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from meshscope.cli.options import JsonOption
from meshscope.cli.output import new_console, note, print_all, print_json
from meshscope.cli.sweep_arguments import option_names, planned_of
from meshscope.cli.sweep_progress import SweepProgress
from meshscope.errors import MeshscopeError, RunError, SpecError
from meshscope.store.folder_names import RUNS, safe_name
from meshscope.store.read import read_run
from meshscope.store.write import write_table
from meshscope.sweep.document import read_document
from meshscope.sweep.expansion import Asked, experiments_of
from meshscope.sweep.folder import SUMMARY, SweepFolder, check_is_sweep, locked_folder
from meshscope.sweep.planned import PlannedRun
from meshscope.sweep.work import make_runs
from meshscope.views.plain import plain
from meshscope.views.sweep import Row, basis_lines, summary_frame, summary_row, summary_table
from meshscope.views.tables import new_table, rich_table

MAX_TOLD = 20  # faults or failures in one message; the others are counted


class State(StrEnum):
    """What has become of an experiment."""

    DONE = "done"
    FAILED = "failed"
    TO_DO = "to do"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """How the sweep goes about it."""

    force: bool
    retry_failed: bool
    n_jobs: int


def command(  # noqa: PLR0913  the options of the command
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Experiments, in YAML.")],
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder of the runs.", show_default="runs/<FILE>"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all and list what is left to do.")
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Runs made side by side; live ones go one by one."),
    ] = 1,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try again what failed before.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace runs that are damaged or of something else.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make many runs, resuming after interruptions.

    All are checked before the first starts. A run that is whole is never made again; what fails is
    told at the end and stops nothing.
    """
    path = out or RUNS / safe_name(file.stem)
    planned = _planned(file)
    ways = _Ways(force=force, retry_failed=retry_failed, n_jobs=jobs)
    rows: dict[str, Row] = {}
    if dry_run:
        check_is_sweep(path)
        folder = SweepFolder(path)
        _check_in_the_way(folder, planned, ways)
    else:
        with locked_folder(path) as folder:
            _check_in_the_way(folder, planned, ways)
            folder.write_mark({"file": str(file), "experiments": [_kept(one) for one in planned]})
            _make(folder, planned, ways)
            rows = _rows(folder, planned)
            _write_summary(folder, rows.values())
    _tell(folder, planned, rows, is_dry=dry_run, as_json=as_json)


def _planned(file: Path) -> list[PlannedRun]:
    """The runs that the file asks for, each once; one message with every fault."""
    asked = experiments_of(read_document(file), known=option_names())
    found: dict[str, PlannedRun] = {}
    faults: list[str] = []
    for one in asked:
        try:
            planned = planned_of(one)
        except MeshscopeError as error:
            faults.append(f"  {one}: {error}")
        else:
            found.setdefault(planned.name, planned)
    if faults:
        n = "one experiment" if len(faults) == 1 else f"{len(faults)} experiments"
        raise SpecError(
            f"{file}: {n} of {len(asked)} cannot be; nothing was started.\n{_some(faults)}"
        )
    _note_repeated(asked, found)
    return list(found.values())


def _note_repeated(asked: Sequence[Asked], found: dict[str, PlannedRun]) -> None:
    n = len(asked) - len(found)
    if n:
        note(f"{n} of {len(asked)} experiments are in the file more than once; each is made once")


def _some(lines: Sequence[str]) -> str:
    more = [f"  and {len(lines) - MAX_TOLD} more"] if len(lines) > MAX_TOLD else []
    return "\n".join([*lines[:MAX_TOLD], *more])


def _check_in_the_way(folder: SweepFolder, planned: Sequence[PlannedRun], ways: _Ways) -> None:
    """RunError when places of runs hold something else, unless it is to be replaced."""
    faults: list[str] = []
    for one in planned:
        try:
            folder.is_done(one)
        except RunError as error:
            faults.append(f"  {error}")
    if faults and not ways.force:
        n = "one run" if len(faults) == 1 else f"{len(faults)} runs"
        raise RunError(
            f"{n} in '{folder.path}' cannot stay; nothing was started.\n{_some(faults)}\n"
            "Use --force to make them again in their place."
        )


def _state(folder: SweepFolder, planned: PlannedRun) -> State:
    try:
        if folder.is_done(planned):
            return State.DONE
    except RunError:
        return State.TO_DO
    return State.FAILED if planned.name in folder.failures else State.TO_DO


def _make(folder: SweepFolder, planned: Sequence[PlannedRun], ways: _Ways) -> None:
    """Makes what is left to do."""
    for one in planned:
        if ways.retry_failed or _state(folder, one) is State.DONE:
            folder.forget_failure(one)
    states = {one.name: _state(folder, one) for one in planned}
    left = [one for one in planned if states[one.name] is State.TO_DO]
    if len(left) < len(planned):
        n_done, n_failed = (list(states.values()).count(s) for s in (State.DONE, State.FAILED))
        note(f"of {len(planned)} experiments, {n_done} are done and {n_failed} have failed before")
    if left:
        with SweepProgress(left, n_jobs=ways.n_jobs) as progress:
            make_runs(left, folder, n_jobs=ways.n_jobs, force=ways.force, progress=progress)


def _kept(planned: PlannedRun) -> dict[str, Any]:
    """What the folder keeps of an experiment."""
    return {"run": planned.name, "command": ["meshscope", planned.command, *planned.words]}


def _rows(folder: SweepFolder, planned: Sequence[PlannedRun]) -> dict[str, Row]:
    """The figures of the runs that are there, by name."""
    return {
        one.name: summary_row(one.name, read_run(folder.path / one.name))
        for one in planned
        if _state(folder, one) is State.DONE
    }


def _write_summary(folder: SweepFolder, rows: Iterable[Row]) -> None:
    partial = folder.path / f".{SUMMARY}.partial"
    write_table(summary_frame(list(rows)), partial)
    partial.replace(folder.path / SUMMARY)


def _tell(
    folder: SweepFolder,
    planned: Sequence[PlannedRun],
    rows: dict[str, Row],
    *,
    is_dry: bool,
    as_json: bool,
) -> None:
    """The table or the document; MeshscopeError when something failed."""
    states = {one.name: _state(folder, one) for one in planned}
    if as_json:
        print_json(_document(folder, planned, states, rows))
    else:
        console = new_console()
        table = _plan_table(planned, states) if is_dry else _results_table(planned, rows)
        told = [Text(""), *basis_lines(list(rows.values())), Text(_count(folder, states))]
        print_all(console, [table, *told])
    if not is_dry:
        _complain(planned, states, folder.failures)


def _results_table(planned: Sequence[PlannedRun], rows: dict[str, Row]) -> RenderableType:
    done = [one for one in planned if one.name in rows]
    return rich_table(summary_table([rows[one.name] for one in done], [one.told for one in done]))


def _count(folder: SweepFolder, states: dict[str, State]) -> str:
    found = list(states.values())
    counts = [f"{found.count(state)} {state}" for state in State if state in found]
    return f"{len(found)} experiments: {', '.join(counts)}; in {folder.path}"


def _plan_table(planned: Sequence[PlannedRun], states: dict[str, State]) -> RenderableType:
    table = new_table("", "experiment", n_words=2)
    for one in planned:
        table.add_row(states[one.name].value, plain(str(one)))
    return table


def _document(
    folder: SweepFolder,
    planned: Sequence[PlannedRun],
    states: dict[str, State],
    rows: dict[str, Row],
) -> dict[str, Any]:
    failures = folder.failures
    return {
        "sweep": str(folder.path),
        "experiments": [
            {
                "state": states[one.name].value,
                "command": one.command.value,
                "options": dict(one.told),
                "run": str(folder.path / one.name) if states[one.name] is State.DONE else None,
                "failure": failures.get(one.name) if states[one.name] is State.FAILED else None,
                "summary": rows.get(one.name),
            }
            for one in planned
        ],
    }


def _complain(
    planned: Sequence[PlannedRun], states: dict[str, State], failures: Mapping[str, str]
) -> None:
    """RunError when a run is not there."""
    faults = [
        f"  {one}: {failures[one.name]}" for one in planned if states[one.name] is State.FAILED
    ]
    if faults:
        raise RunError(
            f"{len(faults)} of {len(planned)} experiments failed; the others are done. Try these again "
            f"with --retry-failed.\n{_some(faults)}"
        )
    if State.TO_DO in states.values():
        raise RunError(
            "some runs were interrupted from outside. Start the sweep again: it goes on."
        )
