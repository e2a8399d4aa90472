"""Imports many files, each into a run of its own, like the experiments of a sweep."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from meshscope.api.console import WorkProgress, note, print_run
from meshscope.api.import_ import ImportRequest, import_request
from meshscope.api.options import RunOutput, changed_options, option, request
from meshscope.api.sweep import (
    ADDRESS,
    QUEUE,
    ShowProgress,
    SweepOptions,
    SweepPlan,
    SweepResult,
    listed,
    run_sweep,
)
from meshscope.api.sweep_shown import SweepProgress, print_results
from meshscope.errors import SpecError, UsageError
from meshscope.store.folder import RUNS
from meshscope.sweep.planned import planned_import
from meshscope.sweep.queue import Queue

IMPORTS = RUNS / "imports"
OF_ONE = ("layers", "lengths")  # options of a single dump


def plan_imports(request: ImportRequest) -> SweepPlan:
    """A run for each path, with the options of the request; SpecError for a path that does not exist.

    A path that is given twice is imported once.
    """
    names = list(dict.fromkeys(request.paths))
    missing = [f"  {name}" for name in names if not Path(name).exists()]
    if missing:
        raise SpecError(
            f"{len(missing)} of {len(names)} paths do not exist; nothing was started. With --each, a path "
            f"is a file or a folder.\n{listed(missing)}"
        )
    given = {
        name: value if value is True else str(value)
        for name, value in changed_options(request).items()
        if name != "paths" and name not in OF_ONE
    }
    runs = {one.name: one for one in (planned_import(name, given) for name in names)}
    n_repeated = len(request.paths) - len(runs)
    return SweepPlan(file=None, runs=tuple(runs.values()), n_repeated=n_repeated)


def import_each(
    request: ImportRequest,
    options: SweepOptions,
    *,
    note: Callable[[str], None],
    show: ShowProgress,
) -> SweepResult:
    """Imports every path into its own run, on all cores or on a Ray cluster.

    Runs that are complete are not made again, and a failure does not stop the others.
    """
    plan = plan_imports(request)
    return run_sweep(plan, request.out or IMPORTS, options, note=note, show=show)


@request
class EachRequest:
    """How many imports are made."""

    each: bool = option(
        "One run per path, made on all cores; --out is their folder.", default=False
    )
    jobs: int | None = option(
        "With --each: paths in parallel.", default=None, metavar="N", least=1, shown="all cores"
    )
    queue: Queue = option(QUEUE, default=Queue.LOCAL)
    address: str | None = option(ADDRESS, default=None)
    retry_failed: bool = option("With --each: retry paths that failed before.", default=False)


def command(request: ImportRequest, many: EachRequest, output: RunOutput) -> None:
    """Read HLO text or traces from other tools.

    The plan or mesh lays out the devices; no model is needed. Names in HLO text give each collective its layer and
    part. Saves a run. A scheduled TPU program that is one whole phase gets modeled times, too. Traces of the PyTorch
    profiler (vLLM, SGLang), of nsys and of the TPU profiler are recognized by their content; docs/traces.md lists them.
    """
    if many.each:
        options = SweepOptions(
            force=request.force,
            retry_failed=many.retry_failed,
            n_jobs=many.jobs,
            queue=many.queue,
            address=many.address,
        )
        result = import_each(request, options, note=note, show=SweepProgress)
        print_results(result, as_json=output.as_json)
        result.check()
        return
    is_elsewhere = many.address is not None or many.queue is not Queue.LOCAL
    if many.jobs or many.retry_failed or is_elsewhere:
        raise UsageError("--jobs, --queue, --address and --retry-failed need --each")
    with WorkProgress() as progress:
        run = import_request(replace(request, progress=progress))
    print_run(run, as_json=output.as_json, is_full=output.full)
