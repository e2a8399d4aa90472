"""Runs the experiments of a sweep file, each as a run of its own, and resumes an interrupted sweep."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

from meshscope.api.idle_options import check_prediction_options
from meshscope.api.options import (
    NO_CONDITIONS,
    Option,
    changed_options,
    known_option,
    option,
    option_words,
    request,
    request_of,
)
from meshscope.api.request import (
    CompileRequest,
    ExperimentRequest,
    LiveRequest,
    run_folder,
)
from meshscope.errors import MeshscopeError, RunError, SpecError, nearest
from meshscope.plans.experiment import Experiment
from meshscope.reports.sweep import Row, summary_frame, summary_row
from meshscope.store.folder import RUNS, safe_name
from meshscope.store.read import read_run
from meshscope.store.write import write_table
from meshscope.sweep.document import read_document
from meshscope.sweep.expansion import COMMAND, SweepEntry, entries_of
from meshscope.sweep.folder import SUMMARY, SweepFolder, check_is_sweep, locked_folder
from meshscope.sweep.local_queue import LocalQueue
from meshscope.sweep.planned import PlannedRun, RunCommand, run_name
from meshscope.sweep.queue import CommandQueue, Queue
from meshscope.sweep.ray_queue import RayQueue
from meshscope.sweep.tpu_queue import TpuQueue, TpuSlice
from meshscope.sweep.work import SweepListener, make_runs

MAX_LISTED = 20  # faults or failures in one message; the others are counted

# Options that the sweep sets itself, or that make no sense in one.
NOT_IN_A_SWEEP = NO_CONDITIONS | {"coordinator", "process_id", "n_processes"}

REQUESTS: dict[RunCommand, type[ExperimentRequest]] = {
    RunCommand.PREDICT: ExperimentRequest,
    RunCommand.COMPILE: CompileRequest,
    RunCommand.RUN: LiveRequest,
}

# Shows the runs that are made; called with those left to do, and how many are made at a time.
ShowProgress = Callable[[Sequence[PlannedRun], int], AbstractContextManager[SweepListener]]


class SweepState(StrEnum):
    """The state of an experiment."""

    DONE = "done"
    FAILED = "failed"
    TO_DO = "to do"


QUEUE = Option(
    help="Where to make the runs: on this machine, or on a Ray cluster, which needs the extra ray."
)
ADDRESS = Option(
    help="Address of the Ray cluster.",
    metavar="HOST:PORT",
    shown="a running one, else one on this machine",
)


RETRY = Option(help="Retry experiments that failed before.")
REPLACE = Option(help="Replace damaged runs and runs of other experiments.")
FOLDER = Option(help="Folder of the runs.", metavar="DIR", shown="runs/<FILE>")


@request
class SweepOptions:
    """How to run a sweep: what to replace, what to retry, where, and how many runs at a time.

    A `tpu` makes all runs.
    """

    n_jobs: int | None = option(
        "Runs in parallel; live ones run one by one.",
        default=None,
        flags=("--jobs",),
        metavar="N",
        least=1,
        shown="all cores",
    )
    queue: Queue = option(QUEUE, default=Queue.LOCAL)
    address: str | None = option(ADDRESS, default=None)
    retry_failed: bool = option(RETRY, default=False)
    force: bool = option(REPLACE, default=False)
    tpu: TpuSlice | None = option("A slice of Google Cloud.", default=None, is_for_python=True)

    def __post_init__(self) -> None:
        """SpecError for an address without a cluster."""
        if self.address is not None and self.queue is Queue.LOCAL:
            raise SpecError("--address has no effect with --queue local. Use --queue ray.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """The checked experiments of a sweep, each once; `file` is None if they come from no file."""

    file: Path | None
    runs: tuple[PlannedRun, ...]
    n_repeated: int  # experiments that the file lists again


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepExperiment:
    """An experiment, its state, why it failed, and its row of the summary if it is done."""

    planned: PlannedRun
    state: SweepState
    failure: str | None
    summary: Row | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The experiments of a sweep in the order of its file."""

    folder: Path
    experiments: tuple[SweepExperiment, ...]

    def count(self, state: SweepState) -> int:
        """The number of experiments in this state."""
        return sum(one.state is state for one in self.experiments)

    def check(self) -> None:
        """RunError if an experiment failed or was interrupted."""
        failed = [one for one in self.experiments if one.state is SweepState.FAILED]
        if failed:
            raise RunError(
                f"{len(failed)} of {len(self.experiments)} experiments failed; the others are done. "
                "Retry them with --retry-failed.\n"
                f"{listed([f'  {one.planned}: {one.failure}' for one in failed])}"
            )
        if self.count(SweepState.TO_DO):
            raise RunError("Interrupted. Rerun the command to resume.")


def plan_sweep(file: Path) -> SweepPlan:
    """The runs that the file asks for; SpecError with every fault of its experiments."""
    entries = entries_of(read_document(file), known=option_names())
    runs: dict[str, PlannedRun] = {}
    faults: list[str] = []
    for entry in entries:
        try:
            planned = planned_run(entry)
        except MeshscopeError as error:
            faults.append(f"  {entry}: {error}")
        else:
            runs.setdefault(planned.name, planned)
    if faults:
        n = "one experiment" if len(faults) == 1 else f"{len(faults)} experiments"
        raise SpecError(
            f"{file}: {n} of {len(entries)} cannot run; nothing was started.\n{listed(faults)}"
        )
    return SweepPlan(file=file, runs=tuple(runs.values()), n_repeated=len(entries) - len(runs))


def check_queue(plan: SweepPlan, options: SweepOptions) -> None:
    """SpecError if the queue cannot make a run of the plan."""
    if options.queue is Queue.LOCAL:
        return
    live = next((one for one in plan.runs if one.command is RunCommand.RUN), None)
    if live is not None:
        raise SpecError(
            f"--queue ray: '{live}' measures the devices of this machine. "
            "Move it to a sweep with --queue local."
        )


def sweep_folder(file: Path, out: Path | None) -> Path:
    """`out`, or `runs/<name of the file>`."""
    return out or RUNS / safe_name(file.stem)


def sweep_states(plan: SweepPlan, path: Path, options: SweepOptions) -> SweepResult:
    """The states of the experiments in the folder; makes and changes nothing."""
    check_is_sweep(path)
    folder = SweepFolder(path)
    _check_places(folder, plan.runs, options)
    return _result(folder, plan.runs, {})


def run_sweep(
    plan: SweepPlan,
    path: Path,
    options: SweepOptions,
    *,
    note: Callable[[str], None],
    show: ShowProgress,
) -> SweepResult:
    """Makes the runs that the folder lacks, and its summary; a failure does not stop the others."""
    with locked_folder(path) as folder:
        _check_places(folder, plan.runs, options)
        experiments = [_stored(one) for one in plan.runs]
        file = None if plan.file is None else str(plan.file)
        folder.write_mark({"file": file, "experiments": experiments})
        _make(folder, plan.runs, options, note=note, show=show)
        rows = _summary_rows(folder, plan.runs)
        _write_summary(folder, rows.values())
        return _result(folder, plan.runs, rows)


def option_names() -> list[str]:
    """The options that an experiment of a sweep may have, over all commands."""
    names = (field.name for kind in REQUESTS.values() for field in fields(kind))
    return [name for name in dict.fromkeys(names) if name not in NOT_IN_A_SWEEP]


def planned_run(entry: SweepEntry) -> PlannedRun:
    """The checked run of an entry; MeshscopeError if it is impossible."""
    command = _command(entry)
    request = _request(command, entry)
    if command is RunCommand.PREDICT:
        check_prediction_options(request.loop)
    experiment = _checked_experiment(command, request)
    options = changed_options(request)
    words = tuple(option_words(options))
    return PlannedRun(
        name=run_name(run_folder(request, experiment).name, command, words),
        command=command,
        words=words,
        experiment=experiment.record,
        options={n: str(v) if isinstance(v, Path) else v for n, v in options.items()},
    )


def _command(entry: SweepEntry) -> RunCommand:
    name = entry.values.get(COMMAND, RunCommand.PREDICT.value)
    if name not in set(REQUESTS):
        raise SpecError(f"command '{name}' makes no run. {nearest(str(name), REQUESTS)}")
    return RunCommand(str(name))


def _request(command: RunCommand, entry: SweepEntry) -> ExperimentRequest:
    kind = REQUESTS[command]
    known = {f.name: f for f in fields(kind) if f.name not in NOT_IN_A_SWEEP}
    values = {n: v for n, v in entry.values.items() if n != COMMAND and v is not None}
    for name in values:
        known_option(name, list(known), command)
    missing = [n for n, f in known.items() if f.default is MISSING and n not in values]
    if missing:
        raise SpecError(f"{command} needs {' and '.join(missing)}.")
    return request_of(kind, values)


def _checked_experiment(command: RunCommand, request: ExperimentRequest) -> Experiment:
    """The experiment after the checks of its command, whose module is imported only if it is used."""
    match command:
        case RunCommand.PREDICT:
            return request.experiment()
        case RunCommand.COMPILE:
            return import_module("meshscope.api.compile").compilable_experiment(request)
        case RunCommand.RUN:
            return import_module("meshscope.api.live").prepared_run(request).experiment
        case RunCommand.IMPORT:
            raise AssertionError("a sweep file asks for no imports")


def _check_places(folder: SweepFolder, runs: Sequence[PlannedRun], options: SweepOptions) -> None:
    """RunError if a run's folder holds something else, unless it is to be replaced."""
    faults: list[str] = []
    for planned in runs:
        try:
            folder.is_done(planned)
        except RunError as error:
            faults.append(f"  {error}")
    if faults and not options.force:
        n = "one run" if len(faults) == 1 else f"{len(faults)} runs"
        raise RunError(
            f"{n} in '{folder.path}' must be replaced; nothing was started.\n{listed(faults)}\n"
            "Use --force to replace them."
        )


def _state(folder: SweepFolder, planned: PlannedRun) -> SweepState:
    try:
        if folder.is_done(planned):
            return SweepState.DONE
    except RunError:
        return SweepState.TO_DO
    return SweepState.FAILED if planned.name in folder.failures else SweepState.TO_DO


def _make(
    folder: SweepFolder,
    runs: Sequence[PlannedRun],
    options: SweepOptions,
    *,
    note: Callable[[str], None],
    show: ShowProgress,
) -> None:
    """Makes the runs that are left to do."""
    for planned in runs:
        if options.retry_failed or _state(folder, planned) is SweepState.DONE:
            folder.forget_failure(planned)
    states = [_state(folder, planned) for planned in runs]
    pairs = zip(runs, states, strict=True)
    left = [planned for planned, state in pairs if state is SweepState.TO_DO]
    if len(left) < len(runs):
        n_done, n_failed = (states.count(s) for s in (SweepState.DONE, SweepState.FAILED))
        note(f"{len(runs)} experiments: {n_done} done before, {n_failed} failed before")
    if left:
        queue = _queue(folder, options)
        n_jobs = options.n_jobs or queue.n_jobs(left)
        with show(left, n_jobs) as listener:
            make_runs(left, folder, queue, n_jobs=n_jobs, listener=listener)


def _queue(folder: SweepFolder, options: SweepOptions) -> CommandQueue:
    if options.tpu is not None:
        return TpuQueue(folder, options.tpu, force=options.force)
    match options.queue:
        case Queue.LOCAL:
            return LocalQueue(folder, force=options.force)
        case Queue.RAY:
            return RayQueue(folder, force=options.force, address=options.address)


def _stored(planned: PlannedRun) -> dict[str, Any]:
    """An experiment in sweep.json."""
    command = ["meshscope", planned.command.value, *planned.words]
    return {"run": planned.name, "command": command}


def _summary_rows(folder: SweepFolder, runs: Sequence[PlannedRun]) -> dict[str, Row]:
    """The figures of the runs that are done, by name."""
    return {
        planned.name: summary_row(planned.name, read_run(folder.path / planned.name))
        for planned in runs
        if _state(folder, planned) is SweepState.DONE
    }


def _write_summary(folder: SweepFolder, rows: Iterable[Row]) -> None:
    partial = folder.path / f".{SUMMARY}.partial"
    write_table(summary_frame(list(rows)), partial)
    partial.replace(folder.path / SUMMARY)


def _result(
    folder: SweepFolder, runs: Sequence[PlannedRun], rows: Mapping[str, Row]
) -> SweepResult:
    return SweepResult(folder=folder.path, experiments=tuple(_experiments(folder, runs, rows)))


def _experiments(
    folder: SweepFolder, runs: Sequence[PlannedRun], rows: Mapping[str, Row]
) -> Iterator[SweepExperiment]:
    failures = folder.failures
    for planned in runs:
        state = _state(folder, planned)
        failure = failures.get(planned.name) if state is SweepState.FAILED else None
        row = rows.get(planned.name)
        yield SweepExperiment(planned=planned, state=state, failure=failure, summary=row)


def listed(lines: Sequence[str]) -> str:
    """The lines, at most so many, and the number of the others."""
    more = [f"  and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    return "\n".join([*lines[:MAX_LISTED], *more])
