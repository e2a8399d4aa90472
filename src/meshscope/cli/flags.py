"""`meshscope flags`: which compiler flags change a program."""

from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.flags import flags as sweep_flags
from meshscope.api.flags import read_flags
from meshscope.cli.options import OPTIONS, PLAN, TOPOLOGY, JsonOption
from meshscope.cli.output import print_json
from meshscope.cli.progress import WorkProgress
from meshscope.reports.flags import flag_document, flag_lines


def command(  # noqa: PLR0913  the options of the command
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model id or config file.")],
    *,
    topology: Annotated[str, TOPOLOGY],
    plan: Annotated[str, PLAN],
    flag: Annotated[
        list[str] | None, typer.Option(help="Compiler flag, --name=value; repeatable.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="File of flags, one per line; # starts a comment.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Only the first N layers.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences over all devices.")] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    compiler: Annotated[str | None, OPTIONS["compiler"]] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the compiler flags that change a program.

    Compiles prefill and decode once for each flag, on all cores. An unchanged program is recognized by its text.
    """
    given = [*(flag or []), *(read_flags(file) if file else [])]
    with WorkProgress() as progress:
        sweep = sweep_flags(
            model,
            flags=given,
            topology=topology,
            plan=plan,
            layers=layers,
            batch=batch,
            prompt=prompt,
            compiler=compiler,
            progress=progress,
        )
    if as_json:
        print_json(flag_document(sweep.program, sweep.topology, sweep.effects))
        return
    for line in flag_lines(sweep.program, sweep.topology, sweep.effects):
        typer.echo(line)
