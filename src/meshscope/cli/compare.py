"""`meshscope compare`: predicted with compiled in one run, or two runs with each other."""

from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.compare import compare
from meshscope.cli.options import JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.reports.text import comparison_text


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="Another run; without it, the prediction of the first."
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
