"""`meshscope sweep`: the experiments of a file, each a run of its own; an interrupted sweep is resumed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshscope.api.console import Shown, WorkProgress, note, reporting
from meshscope.api.options import (
    NO_CONDITIONS,
    Option,
    changed_options,
    option,
    option_words,
    request,
    request_of,
)
from meshscope.api.request import (
    CompileRequest,
    ExperimentRequest,
    LiveRequest,
    PredictRequest,
    check_prediction_options,
    run_folder,
)
from meshscope.backends.sweep.file import COMMAND, SweepEntry, entries_of, read_document
from meshscope.backends.sweep.folder import (
    SUMMARY,
    PlannedRun,
    RunCommand,
    RunState,
    SweepFolder,
    check_is_sweep,
    locked_folder,
    run_name,
)
from meshscope.backends.sweep.installation import BUCKET
from meshscope.backends.sweep.queue import LocalQueue, Queue, RayQueue, make_runs
from meshscope.backends.sweep.tpu_queue import TpuQueue, TpuSlice
from meshscope.errors import MeshscopeError, RunError, SpecError, UsageError, nearest
from meshscope.hardware.topology import parse_topology
from meshscope.plans.experiment import Experiment
from meshscope.reports.model import plain
from meshscope.reports.sweep import Row, basis_of_rows, summary_frame, summary_row, summary_table
from meshscope.reports.tables import new_table, rich_table, with_first_block
from meshscope.serialize import picked, to_plain
from meshscope.serving.prices import LIST, LIST_NOTE, PRICES_HELP, batch_prices, parse_prices
from meshscope.store.folder import RUNS, safe_name
from meshscope.store.read import read_run
from meshscope.store.write import write_table
from meshscope.workers import Progress

MAX_LISTED = 20  # faults or failures in one message; the others are counted

# Options that the sweep sets itself, or that make no sense in one.
NOT_IN_A_SWEEP = NO_CONDITIONS | {"coordinator", "process_id", "n_processes"}

REQUESTS: dict[RunCommand, type[ExperimentRequest]] = {
    RunCommand.PREDICT: PredictRequest,
    RunCommand.COMPILE: CompileRequest,
    RunCommand.RUN: LiveRequest,
}

FILE = "FILE: Experiments, in YAML."
FOLDER = Option(help="Folder of the runs.", metavar="DIR", shown="runs/<FILE>")


@request
class SweepOptions:
    """How to run a sweep: what to replace, what to retry, where, and how many runs at a time.

    A `tpu` makes all runs.
    """

    n_jobs: int | None = option(
        "N: Runs in parallel; live ones run one by one.",
        default=None,
        flags=("--jobs",),
        least=1,
        shown="all cores",
    )
    queue: Queue = option(
        "Where to make the runs: on this machine, or on a Ray cluster, which needs the extra ray.",
        default=Queue.LOCAL,
    )
    address: str | None = option(
        "HOST:PORT: Address of the Ray cluster.",
        default=None,
        shown="a running one, else one on this machine",
    )
    retry_failed: bool = option("Retry experiments that failed before.", default=False)
    force: bool = option("Replace damaged runs and runs of other experiments.", default=False)
    tpu: TpuSlice | None = option("A slice of Google Cloud.", default=None, is_for_python=True)

    def __post_init__(self) -> None:
        """SpecError for an address without a cluster."""
        if self.address is not None and self.queue is Queue.LOCAL:
            raise SpecError("--address has no effect with --queue local. Use --queue ray.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepExperiment:
    """An experiment, its state, why it failed, and its row of the summary if it is done."""

    planned: PlannedRun
    state: RunState
    failure: str | None
    summary: Row | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The experiments of a sweep in the order of its file."""

    folder: Path
    experiments: tuple[SweepExperiment, ...]

    @property
    def rows(self) -> list[Row]:
        """The summary of each complete run."""
        return [one.summary for one in self.experiments if one.summary is not None]

    def check(self) -> None:
        """RunError if an experiment failed or was interrupted."""
        failed = [one for one in self.experiments if one.state is RunState.FAILED]
        if failed:
            raise RunError(
                f"{len(failed)} of {len(self.experiments)} experiments failed; the others are done. "
                "Retry them with --retry-failed.\n"
                f"{listed([f'  {one.planned}: {one.failure}' for one in failed])}"
            )
        if any(one.state is RunState.TO_DO for one in self.experiments):
            raise RunError("Interrupted. Rerun the command to resume.")

    def as_dict(self) -> dict[str, Any]:
        """The document of `--json`."""
        experiments = [
            {
                "state": one.state.value,
                "command": one.planned.command.value,
                "options": dict(one.planned.options),
                "run": str(self.folder / one.planned.name) if one.state is RunState.DONE else None,
                **picked(one, "failure", "summary"),
            }
            for one in self.experiments
        ]
        return {"sweep": str(self.folder), "experiments": experiments}


def planned_runs(file: Path, *, has_buckets: bool = False) -> tuple[list[PlannedRun], int]:
    """The runs that the file asks for, each once, and how often it repeats one; SpecError with every fault.

    With `has_buckets`, a checkpoint may be `gs://BUCKET/FOLDER`, which only the workers read.
    """
    names = (field.name for kind in REQUESTS.values() for field in fields(kind))
    known = [name for name in dict.fromkeys(names) if name not in NOT_IN_A_SWEEP]
    entries = entries_of(read_document(file), known=known)
    runs: dict[str, PlannedRun] = {}
    faults: list[str] = []
    for entry in entries:
        try:
            planned = planned_run(entry, has_buckets=has_buckets)
        except MeshscopeError as error:
            faults.append(f"  {entry}: {error}")
        else:
            runs.setdefault(planned.name, planned)
    if faults:
        n = "one experiment" if len(faults) == 1 else f"{len(faults)} experiments"
        raise SpecError(
            f"{file}: {n} of {len(entries)} cannot run; nothing was started.\n{listed(faults)}"
        )
    return list(runs.values()), len(entries) - len(runs)


def planned_run(entry: SweepEntry, *, has_buckets: bool = False) -> PlannedRun:
    """The checked run of an entry; MeshscopeError if it is impossible."""
    command = str(entry.values.get(COMMAND, RunCommand.PREDICT.value))
    if command not in set(REQUESTS):
        raise SpecError(f"command '{command}' makes no run. {nearest(command, REQUESTS)}")
    command = RunCommand(command)
    kind = REQUESTS[command]
    known = {f.name: f for f in fields(kind) if f.name not in NOT_IN_A_SWEEP}
    values = {n: v for n, v in entry.values.items() if n != COMMAND and v is not None}
    for name in values:
        if name not in known:
            raise SpecError(f"'{name}' is not an option of {command}. {nearest(name, known)}")
    missing = [n for n, f in known.items() if f.default is MISSING and n not in values]
    if missing:
        raise SpecError(f"{command} needs {' and '.join(missing)}.")
    bucket = {n: str(v) for n, v in values.items() if str(v).startswith(BUCKET)}
    if bucket and not (has_buckets and list(bucket) == ["checkpoint"]):
        name, value = bucket.popitem()
        raise SpecError(
            f"{name} '{value}' is in a bucket. Only 'meshscope tpu sweep' mounts buckets, for checkpoints; "
            "copy it, and name the copy."
        )
    request = request_of(kind, {n: v for n, v in values.items() if n not in bucket})
    if command is RunCommand.COMPILE:  # imported only if it is used
        experiment = import_module("meshscope.api.compile").compilable_experiment(request)[0]
    elif command is RunCommand.RUN:
        experiment = import_module("meshscope.api.live").prepared_run(request)[0]
    else:
        check_prediction_options(request.loop)
        experiment = request.experiment()
    readable = run_folder(request, experiment).name
    return planned_of(command, request, experiment, readable, more=bucket)


def planned_of(
    command: RunCommand,
    request: ExperimentRequest,
    experiment: Experiment,
    readable: str,
    *,
    more: Mapping[str, str] | None = None,
) -> PlannedRun:
    """The run of a checked request and `more` options, with a readable name for its folder."""
    options = {**changed_options(request), **(more or {})}
    words = tuple(option_words(options))
    return PlannedRun(
        name=run_name(readable, command, words),
        command=command,
        words=words,
        experiment=experiment.record,
        options={n: str(v) if isinstance(v, Path) else v for n, v in options.items()},
    )


def sweep_folder(file: Path, out: Path | None) -> Path:
    """`out`, or `runs/<name of the file>`."""
    return out or RUNS / safe_name(file.stem)


def run_sweep(
    runs: Sequence[PlannedRun],
    path: Path,
    options: SweepOptions,
    *,
    file: Path | None = None,
    note: Callable[[str], None] = lambda _: None,
    progress: Progress | None,
) -> SweepResult:
    """Makes the runs of a file that the folder lacks, and its summary; a failure does not stop the others."""
    with locked_folder(path) as folder:
        states = _states(folder, runs, force=options.force)
        commands = {one.name: ["meshscope", one.command.value, *one.words] for one in runs}
        experiments = [{"run": name, "command": words} for name, words in commands.items()]
        folder.write_mark({"file": file and str(file), "experiments": experiments})
        for one, state in zip(runs, states, strict=True):
            if options.retry_failed or state is RunState.DONE:
                folder.set_failure(one, None)
        states = _states(folder, runs, force=True)
        left = [one for one, state in zip(runs, states, strict=True) if state is RunState.TO_DO]
        if len(left) < len(runs):
            n_done, n_failed = (states.count(s) for s in (RunState.DONE, RunState.FAILED))
            note(f"{len(runs)} experiments: {n_done} done before, {n_failed} failed before")
        if left:
            if options.tpu is not None:
                queue = TpuQueue(folder, options.tpu, force=options.force)
            elif options.queue is Queue.LOCAL:
                queue = LocalQueue(folder, force=options.force)
            else:
                queue = RayQueue(folder, force=options.force, address=options.address)
            n_jobs = options.n_jobs or queue.n_jobs(left)
            make_runs(left, queue, n_jobs=n_jobs, progress=reporting(progress))
        result = SweepResult(folder=path, experiments=_experiments(folder, runs))
        partial = folder.path / f".{SUMMARY}.partial"
        write_table(summary_frame(result.rows), partial)
        partial.replace(folder.path / SUMMARY)
        return result


def _states(folder: SweepFolder, runs: Sequence[PlannedRun], *, force: bool) -> list[RunState]:
    """The state of each run; RunError if a run's folder holds something else, unless it is replaced."""
    states: list[RunState] = []
    faults: list[str] = []
    for one in runs:
        try:
            states.append(folder.state(one))
        except RunError as error:
            states.append(RunState.TO_DO)
            faults.append(f"  {error}")
    if faults and not force:
        n = "one run" if len(faults) == 1 else f"{len(faults)} runs"
        raise RunError(
            f"{n} in '{folder.path}' must be replaced; nothing was started.\n{listed(faults)}\n"
            "Use --force to replace them."
        )
    return states


def _experiments(
    folder: SweepFolder, runs: Sequence[PlannedRun], *, has_summary: bool = True
) -> tuple[SweepExperiment, ...]:
    experiments: list[SweepExperiment] = []
    for one, state in zip(runs, _states(folder, runs, force=True), strict=True):
        failure = folder.failures[one.name] if state is RunState.FAILED else None
        summary = None
        if has_summary and state is RunState.DONE:
            summary = summary_row(one.name, read_run(folder.path / one.name))
        experiments.append(
            SweepExperiment(planned=one, state=state, failure=failure, summary=summary)
        )
    return tuple(experiments)


def listed(lines: Sequence[str]) -> str:
    """The lines, up to the limit, and the number of the others."""
    more = [f"  and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    return "\n".join([*lines[:MAX_LISTED], *more])


def command(
    *,
    file: Path = option(FILE, kw_only=False),
    options: SweepOptions,
    out: Path | None = option(FOLDER, default=None),
    dry_run: bool = option("Check all experiments and list their states.", default=False),
    prices: str | None = option(f"{PRICES_HELP}, for the price of tokens.", default=None),
) -> Shown:
    """Run many experiments, and resume after interruptions.

    All experiments are checked before the first starts. Complete runs are not repeated;
    failures are reported at the end and do not stop the other runs.
    """
    if dry_run and prices is not None:
        raise UsageError("--dry-run makes no figures: omit --prices")
    dollars = None if prices is None else parse_prices(prices)
    runs, n_repeated = planned_runs(file)
    if n_repeated:
        n_listed = len(runs) + n_repeated
        note(f"{n_repeated} of {n_listed} experiments are repeated in the file; each runs once")
    path = sweep_folder(file, out)
    live = next((one for one in runs if one.command is RunCommand.RUN), None)
    if live is not None and options.queue is Queue.RAY:
        raise SpecError(
            f"--queue ray: '{live}' measures the devices of this machine. "
            "Move it to a sweep with --queue local."
        )
    if not dry_run:
        with WorkProgress() as progress:
            result = run_sweep(runs, path, options, file=file, note=note, progress=progress)
        if dollars is not None:
            note_prices(result.rows, dollars, is_list=prices == LIST)
        return shown_results(result)
    check_is_sweep(path)  # which changes nothing
    folder = SweepFolder(path)
    _states(folder, runs, force=options.force)  # refuses what is in the way
    experiments = _experiments(folder, runs, has_summary=False)
    table = new_table("", "experiment", n_words=2)
    for one in experiments:
        table.add_row(one.state.value, plain(str(one.planned)))
    return _shown(SweepResult(folder=path, experiments=experiments), table)


def note_prices(rows: Sequence[Row], prices: Mapping[str, float], *, is_list: bool) -> None:
    """Adds `token_prices` to rows, one batch of requests after another, and notes chips without a price."""
    unpriced: set[str] = set()
    for row in rows:
        slice_ = parse_topology(row["topology"])
        row["token_prices"] = to_plain(batch_prices(slice_, row, prices))
        unpriced |= set() if slice_.chip.name in prices else {slice_.chip.name}
    for text in (*map("no price of {} is given".format, sorted(unpriced)), *[LIST_NOTE][:is_list]):
        note(text)


def shown_results(result: SweepResult) -> Shown:
    """The runs of a sweep with their figures; an error if an experiment failed or was interrupted."""
    options = [one.planned.options for one in result.experiments if one.summary is not None]
    shown = _shown(result, rich_table(summary_table(result.rows, options)))
    return shown._replace(check=result.check)


def _shown(result: SweepResult, table: RenderableType) -> Shown:
    states = [one.state for one in result.experiments]
    counts = ", ".join(f"{states.count(s)} {s}" for s in RunState if s in states)
    summary = Text(f"{len(states)} experiments: {counts}; in {result.folder}")
    parts, basis = (summary, table), basis_of_rows(result.rows)
    return Shown(result.as_dict, lambda _: with_first_block(parts, Text("")), basis=basis)
