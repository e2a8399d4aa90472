"""Imports many files, each into a run of its own, like the experiments of a sweep."""

from collections.abc import Callable, Sequence
from pathlib import Path

from meshscope.api.sweep import (
    MAX_LISTED,
    ShowProgress,
    SweepOptions,
    SweepPlan,
    SweepResult,
    run_sweep,
)
from meshscope.errors import SpecError
from meshscope.store.folder import RUNS
from meshscope.sweep.planned import planned_import

IMPORTS = RUNS / "imports"


def plan_imports(
    paths: Sequence[str | Path], options: dict[str, str | Path | bool | None]
) -> SweepPlan:
    """A run for each path, with these options of `import_`; SpecError for a path that does not exist.

    A path that is given twice is imported once.
    """
    names = list(dict.fromkeys(map(str, paths)))
    missing = [f"  {name}" for name in names if not Path(name).exists()]
    if missing:
        more = [f"  and {len(missing) - MAX_LISTED} more"] * (len(missing) > MAX_LISTED)
        listed = "\n".join([*missing[:MAX_LISTED], *more])
        raise SpecError(
            f"{len(missing)} of {len(names)} paths do not exist; nothing was started. With --each, a path "
            f"is a file or a folder.\n{listed}"
        )
    given = {n: v if v is True else str(v) for n, v in options.items() if v not in {None, False}}
    runs = {one.name: one for one in (planned_import(name, given) for name in names)}
    return SweepPlan(file=None, runs=tuple(runs.values()), n_repeated=len(paths) - len(runs))


def import_each(
    paths: Sequence[str | Path],
    *,
    out: Path | None = None,
    sweep: SweepOptions | None = None,
    note: Callable[[str], None] = lambda _: None,
    show: ShowProgress,
    **options: str | Path | bool | None,
) -> SweepResult:
    """Imports every path into its own run in `out`, on all cores or on a Ray cluster.

    `options` are those of `import_`, for every path. Runs that are complete are not made again, and a
    failure does not stop the others.
    """
    plan = plan_imports(paths, options)
    return run_sweep(plan, out or IMPORTS, sweep or SweepOptions(), note=note, show=show)
