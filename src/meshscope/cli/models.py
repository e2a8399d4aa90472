"""`meshscope models`: the model catalog."""

from typing import Annotated

import typer

from meshscope.cli.options import JsonOption
from meshscope.cli.output import new_console, print_all, print_json
from meshscope.reports.choices import model_documents, model_table

NOTE = (
    "By owner, family and size. Params: all, and those that one token uses. Length:\n"
    "the longest sequence. Weights: their format by default. A search also lists\n"
    "variants, such as -FP8. Any config.json of these families works, too: give its\n"
    "path as MODEL."
)


def command(
    search: Annotated[
        str, typer.Argument(metavar="SEARCH", help="Part of an id or of a family's name.")
    ] = "",
    *,
    as_json: JsonOption = False,
) -> None:
    """List or search the models of the catalog."""
    documents = model_documents(search)
    if as_json:
        print_json(documents)
        return
    print_all(new_console(), [model_table(documents), "", NOTE])
