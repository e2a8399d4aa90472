"""`meshscope import`: HLO text that another tool dumped becomes a run."""

from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.import_ import import_
from meshscope.cli.options import PLAN, TOPOLOGY, ForceOption, FullOption, JsonOption, OutOption
from meshscope.cli.output import print_run
from meshscope.cli.progress import WorkProgress
from meshscope.events.enums import Phase
from meshscope.spec.program import Frontend


def command(  # noqa: PLR0913  the options of the command
    dumps: Annotated[
        list[str],
        typer.Argument(
            metavar="DUMP...",
            help="Optimized HLO text, plain or gzipped; with --frontend torchxla, HLO protos. "
            "decode=DUMP or prefill=DUMP: the step that runs it, after those before it.",
        ),
    ],
    *,
    topology: Annotated[str, TOPOLOGY],
    plan: Annotated[str | None, PLAN] = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="Instead of --plan, other axes: data=8,model=8."),
    ] = None,
    device_order: Annotated[
        str | None,
        typer.Option(metavar="IDS", help="Devices in the order of the mesh: 0,2,4,6,7,5,3,1."),
    ] = None,
    phase: Annotated[
        Phase | None, typer.Option(help="Phase of a dump whose names state none.")
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML rules from names to phase, layer and part."),
    ] = None,
    frontend: Annotated[
        Frontend | None,
        typer.Option(help="torchxla: compile the graphs that torch_xla saved, then read them."),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Read the complete part of truncated text.")
    ] = False,
    out: OutOption = None,
    force: ForceOption = False,
    full: FullOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read HLO text dumped by another tool.

    The plan or mesh lays out the devices of the dump; no model is needed. Names in the text give each collective its
    layer and part. Saves a run. A scheduled TPU program that is one whole phase gets modeled times, too.
    """
    with WorkProgress() as progress:
        run = import_(
            dumps,
            topology=topology,
            plan=plan,
            mesh=mesh,
            device_order=device_order,
            phase=phase,
            rules=rules,
            frontend=frontend,
            partial=partial,
            out=out,
            force=force,
            progress=progress,
        )
    print_run(run, as_json=as_json, is_full=full)
