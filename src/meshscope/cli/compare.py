"""`meshscope compare`: predicted with compiled in one run, or two runs with each other."""

from pathlib import Path
from typing import Annotated, Any

import typer

from meshscope.analysis.comparison import compare_sides
from meshscope.analysis.explanation import explain
from meshscope.analysis.sides import Side, source_side
from meshscope.cli.options import JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.errors import RunError
from meshscope.events.enums import Source
from meshscope.store.read import read_run
from meshscope.store.run import RunRecord
from meshscope.views.document import comparison_document, source_verdicts_document
from meshscope.views.explanation_document import explanation_document
from meshscope.views.text import comparison_text


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    other: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="Another run; without it, RUN with its prediction."),
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Compare predicted with compiled, or two runs with each other.

    Tells what the second one does that the first did not ask for: extra, missing and changed
    collectives, their bytes, layers and source lines; of two runs also why, in bytes and time.
    """
    found = read_run(run)
    left, right = _own_sides(found) if other is None else _two_sides(found, read_run(other))
    comparison = compare_sides(left, right)
    if as_json:
        document = comparison_document(comparison, left=_told(left), right=_told(right))
        own = {"verdicts": source_verdicts_document(found)} if other is None else _why(left, right)
        print_json({**document, **own})
        return
    console = new_console()
    print_all(console, comparison_text(comparison, left, right, console))


def _why(left: Side, right: Side) -> dict[str, Any]:
    return {"explanation": explanation_document(explain(left, right))}


def _own_sides(run: RunRecord) -> tuple[Side, Side]:
    source = run.manifest.source
    if source is Source.PREDICTED or Source.PREDICTED not in run.sources:
        raise RunError(
            f"run '{run.path}' holds only what was {source}; there is nothing to compare it with. "
            "Give a second run."
        )
    return source_side(run, Source.PREDICTED), source_side(run, source)


def _two_sides(left: RunRecord, right: RunRecord) -> tuple[Side, Side]:
    """The strongest source that each run has; the conditions say which run is which."""
    return (
        Side(name="A", run=left, source=left.manifest.source),
        Side(name="B", run=right, source=right.manifest.source),
    )


def _told(side: Side) -> dict[str, str]:
    return {"name": side.name, "run": str(side.run.path), "source": side.source.value}
