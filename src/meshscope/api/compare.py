"""`meshscope.compare`: predicted with compiled in one run, or two runs with each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

from meshscope.analysis.comparison import Side, compare_sides, source_side, with_axes_of
from meshscope.analysis.explanation import explain
from meshscope.analysis.join import Comparison
from meshscope.api.console import new_console, print_all, print_json, rendered
from meshscope.api.options import JsonOption, Option
from meshscope.api.run import Run
from meshscope.errors import RunError, SpecError, public, read_only
from meshscope.events.enums import Source
from meshscope.files import path_of
from meshscope.reports.document import (
    comparison_document,
    other_operations_document,
    own_verdicts_document,
)
from meshscope.reports.explanation import explanation_document
from meshscope.reports.text import comparison_text
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
        left, right = _named(self.left), _named(self.right)
        document = comparison_document(self.comparison, left=left, right=right)
        if self.left.run is self.right.run:
            return {**document, **own_verdicts_document(self.left.run)}
        explanation = explanation_document(explain(self.left, self.right))
        return {**document, "explanation": explanation}

    def text(self, width: int = 80) -> str:
        """The tables that `meshscope compare` prints, without color."""
        return rendered(partial(comparison_text, self.comparison, self.left, self.right), width)

    def __repr__(self) -> str:
        """One line with the verdict."""
        return f"<RunComparison of {self.left.name} and {self.right.name}: {self.verdict}>"

    def _repr_html_(self) -> str:
        """The text tables, for notebooks."""
        return f"<pre>{escape(self.text())}</pre>"


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
    left, right = _own_sides(record) if other is None else _two_sides(record, _record(other))
    return RunComparison(left=left, right=right, comparison=compare_sides(left, right))


def _record(run: Union[Run, "RunSet", str, Path]) -> RunRecord:
    if isinstance(run, Run):
        return run.record
    from meshscope.store.read import read_run  # noqa: PLC0415  polars is slow to import

    if not isinstance(run, Sequence) or isinstance(run, str):
        return read_run(path_of(run))
    if len(run) != 1:
        raise SpecError(
            f"compare takes one run a side, not {len(run)}. Choose one, such as runs[0]."
        )
    return run[0].record


def _own_sides(run: RunRecord) -> tuple[Side, Side]:
    source = run.manifest.source
    weaker = [one for one in run.sources if one is not source]  # a trace with HLO is compiled, too
    if source is Source.PREDICTED or not weaker:
        raise RunError(
            f"run '{run.path}' has only the source {source}, so there is nothing to compare it with. "
            "Give a second run."
        )
    return source_side(run, weaker[0]), source_side(run, source)


def _two_sides(left: RunRecord, right: RunRecord) -> tuple[Side, Side]:
    """The strongest source of each run; axes that only their names distinguish have one name."""
    if left.manifest.experiment.plan is None:
        left = with_axes_of(left, right)
    else:
        right = with_axes_of(right, left)
    return (
        Side(name="A", run=left, source=left.manifest.source),
        Side(name="B", run=right, source=right.manifest.source),
    )


def _named(side: Side) -> dict[str, Any]:
    return {
        "name": side.name,
        "run": str(side.run.path),
        "source": side.source.value,
        "other_operations": other_operations_document(side.run),
    }


def command(
    run: Annotated[Path, Option(help="Folder of a run.", metavar="RUN", is_argument=True)],
    other: Annotated[
        Path | None,
        Option(
            help="Another run; without it, the prediction of the first.",
            metavar="[RUN]",
            is_argument=True,
        ),
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Compare predicted with compiled, or two runs with each other.

    Lists extra, missing and changed collectives with their bytes, layers and source lines; for two
    runs also explains the difference in bytes and time.
    """
    result = compare(run, other)
    if as_json:
        print_json(result.as_dict())
        return
    console = new_console()
    print_all(console, comparison_text(result.comparison, result.left, result.right, console))
