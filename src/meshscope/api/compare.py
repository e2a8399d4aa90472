"""`meshscope.compare`: predicted with compiled in one run, or two runs; and why collectives were inserted."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from rich.console import Console, RenderableType

from meshscope.analysis.comparison import (
    Side,
    compare_sides,
    compare_sources,
    explain,
    source_side,
    with_axes_of,
)
from meshscope.analysis.insertion import Insertion, insertions
from meshscope.analysis.join import Comparison
from meshscope.api.compare_benchmark import BenchmarkRequest, benchmark_comparison
from meshscope.api.console import Shown, basis_of, rendered
from meshscope.api.findings import faults, place, texts_of
from meshscope.api.options import changed_options, option
from meshscope.api.request import idle_option
from meshscope.api.run import Run
from meshscope.errors import RunError, SpecError, public, read_only
from meshscope.events.enums import Source
from meshscope.files import fetched, path_of
from meshscope.readers.hlo.collectives import module_collectives, reshardings
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.lint.findings import Finding
from meshscope.readers.lint.log import Fault
from meshscope.reports.collectives import insertion_lines
from meshscope.reports.document import (
    comparison_document,
    other_operations_document,
    own_verdicts_document,
)
from meshscope.reports.explanation import explanation_document
from meshscope.reports.loads import SIMULATED
from meshscope.reports.model import plain
from meshscope.reports.text import comparison_text
from meshscope.serialize import to_plain
from meshscope.store.folder import scratch_folder
from meshscope.store.run import RunRecord

if TYPE_CHECKING:
    from meshscope.api.runs import RunSet


@read_only
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunComparison:
    """The collectives of two runs, or of two sources of one run, matched with each other."""

    left: Side
    right: Side
    comparison: Comparison

    @property
    def is_equal(self) -> bool:
        """Whether counts, shapes, groups and bytes of all collectives are equal."""
        return self.comparison.is_exact

    @property
    def verdict(self) -> str:
        """`equal`, `same meaning` or `different`."""
        return str(self.as_dict()["verdict"])

    def as_dict(self) -> Mapping[str, Any]:
        """The document that `compare --json` prints."""
        left, right = (
            {
                "name": side.name,
                "run": str(side.run.path),
                "source": side.source.value,
                "other_operations": other_operations_document(side.run),
            }
            for side in (self.left, self.right)
        )
        document = comparison_document(self.comparison, left=left, right=right)
        document["missing_reductions"] = to_plain(self.missing_reductions)
        if self.left.run is self.right.run:
            return {**document, **own_verdicts_document(self.left.run)}
        explanation = explanation_document(explain(self.left, self.right))
        return {**document, "explanation": explanation}

    @property
    def missing_reductions(self) -> tuple[Finding, ...]:
        """The sums that a compiled program uses without a reduction, if the collectives differ in meaning."""
        sides = {side.run.path: side for side in (self.left, self.right)}
        if self.comparison.is_same_meaning:
            return ()
        every = (one for side in sides.values() for one in faults(side.run) or ())
        return tuple(one for one in every if one.kind is Fault.MISSING)

    def text(self, width: int = 80) -> str:
        """The tables that `meshscope compare` prints, without color."""
        return rendered(partial(_lines, self), width)

    def __repr__(self) -> str:
        return f"<RunComparison of {self.left.name} and {self.right.name}: {self.verdict}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text())}</pre>"


def _lines(result: RunComparison, console: Console) -> Iterable[RenderableType]:
    missing = [
        f"missing reduction, which {'changes' if one.is_certain else 'may change'} results: "
        f"{plain(one.sentence)}; {place(one)}"
        for one in result.missing_reductions
    ]
    sides = (result.comparison, result.left, result.right)
    return comparison_text(*sides, console, missing=missing)


@public
def compare(
    run: Union[Run, "RunSet", str, Path], other: Union[Run, "RunSet", str, Path, None] = None
) -> RunComparison:
    """Compares two runs, or the prediction of one run with its compiled or measured collectives.

    Example:
        >>> meshscope.compare("runs/a", "runs/b").verdict

    Args:
        run: A run, or the folder of one.
        other: Another run or folder; without it `run` is compared with its own prediction, or a trace
            with the programs inside.

    Returns:
        The matched collectives: equal, changed, missing and extra ones.

    Raises:
        RunError: A run cannot be read, or `run` has only one source and there is no other run.
    """
    record = _record(run)
    if other is not None:
        left, right = record, _record(other)
        if (
            left.manifest.experiment.plan is None
        ):  # axes that only their names distinguish have one name
            left = with_axes_of(left, right)
        else:
            right = with_axes_of(right, left)
        sides = (
            Side(name="A", run=left, source=left.manifest.source),
            Side(name="B", run=right, source=right.manifest.source),
        )
    else:
        source = record.manifest.source
        weaker = [
            one for one in record.sources if one is not source
        ]  # a trace with HLO is compiled, too
        if source is Source.PREDICTED or not weaker:
            name = "the run" if record.path is None else f"run '{record.path}'"
            raise RunError(
                f"{name} has only the source {source}, so there is nothing to compare it with. "
                "Give a second run."
            )
        sides = source_side(record, weaker[0]), source_side(record, source)
    left, right = sides
    return RunComparison(left=left, right=right, comparison=compare_sides(left, right))


def _record(run: Union[Run, "RunSet", str, Path]) -> RunRecord:
    if isinstance(run, Run):
        return run.record
    from meshscope.store.read import read_run  # polars is slow to import

    if not isinstance(run, Sequence) or isinstance(run, str):
        return read_run(path_of(run))
    if len(run) != 1:
        raise SpecError(
            f"compare takes one run a side, not {len(run)}. Choose one, such as runs[0]."
        )
    return run[0].record


@read_only
class Explained(tuple[Insertion, ...]):
    """The collectives that the partitioner inserted, shown as `show --inserted` does."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(insertion_lines(self))


def explained(run: RunRecord, hlo: Path | None = None) -> Explained:
    """The collectives that the partitioner inserted; RunError without HLO text.

    First those that the plan of the run lacks, then the costliest. `hlo` is the text of a run without a folder.
    """
    topology = run.manifest.experiment.topology
    mesh = run.manifest.experiment.device_mesh
    texts = texts_of(run, hlo)
    if topology is None or not mesh.axes or not texts:
        raise RunError(
            f"{run.path or 'the run'} has no compiled program. Compile one, into a folder if it is to be explained later."
        )
    rows = run.rows_of(Source.COMPILED)
    comparison = compare_sources(run, Source.COMPILED)
    experiment = run.manifest.experiment
    is_of_user = experiment.architecture is None or experiment.imported is not None
    every: list[Insertion] = []
    for text in texts:
        collectives = module_collectives(
            read_hlo(text), mesh=mesh, crosses_slices=topology.crosses_slices
        )
        phase = text.name.split(".")[0]
        of_phase = [row for row in rows if len(texts) == 1 or row.phase in {None, phase}]
        moved = reshardings(collectives)
        every += insertions(of_phase, moved, comparison, is_of_user=is_of_user)
    return Explained(sorted(every, key=lambda one: bool(one.is_planned)))


def command(
    *,
    run: Path = option(
        "RUN: Folder of a run, result of a benchmark tool, or metrics of a server.", kw_only=False
    ),
    other: Path | None = option(
        "[RUN]: Another run; without it, the prediction of the first.", default=None, kw_only=False
    ),
    request: BenchmarkRequest,
) -> Shown:
    """Compare sources, runs, or a benchmark with its simulation.

    Lists extra, missing and changed collectives with their bytes, layers and source lines; for two
    runs also explains the difference in bytes and time. For a result of vllm bench serve,
    sglang.bench_serving, AIPerf, GuideLLM or a Benchmark Report, or the Prometheus text of a vLLM or
    SGLang server under load, simulates its load.
    """
    with scratch_folder() as scratch, fetched([run], scratch) as (local,):
        if local.is_file():
            if other is not None:
                raise SpecError(
                    f"'{local}' is a benchmark, which has no other run. Omit '{other}'."
                )
            served = benchmark_comparison(local, request)
            return Shown(served.as_dict, lambda _: served.lines(), basis=SIMULATED)
        if local.exists() and (given := changed_options(request)):
            raise idle_option(*next(iter(given.items())), f"'{local}' is not a benchmark result")
        result = compare(local, other)
        sides = result.left.run, result.right.run
        basis = "" if sides[0] is sides[1] else basis_of(*sides)
        return Shown(result.as_dict, partial(_lines, result), basis=basis)
