"""`meshscope import`: HLO text and traces of other tools become a run."""

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
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Optimized HLO text, plain or gzipped; with --frontend torchxla, HLO protos. "
            "decode=FILE or prefill=FILE: the step that runs it, after those before it. Or traces: a file "
            "for each rank or host, or a folder.",
        ),
    ],
    *,
    topology: Annotated[str | None, TOPOLOGY] = None,
    plan: Annotated[str | None, PLAN] = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="Instead of --plan, other axes: data=8,model=8."),
    ] = None,
    device_order: Annotated[
        str | None,
        typer.Option(metavar="IDS", help="Devices in the order of the mesh: 0,2,4,6,7,5,3,1."),
    ] = None,
    card: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CCL-Bench card of the traces: their plan and slice."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model behind traces, to predict its collectives, or behind a dump of a few layers.",
        ),
    ] = None,
    phase: Annotated[
        Phase | None, typer.Option(help="Phase of a dump whose names state none.")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Layers of the whole model, if the dump has only a few."),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="NxQ:K",
            help="Sequences of a step on a device: N with Q new tokens at a context of K, for attention "
            "kernels. 64x1:1024, or mixed 63x1:1024,1x2048:8192.",
        ),
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
    """Read HLO text or traces of another tool.

    The plan or mesh lays out the devices; no model is needed. Names in HLO text give each collective its layer and
    part. Saves a run. A scheduled TPU program that is one whole phase gets modeled times, too. Traces of the PyTorch
    profiler (vLLM, SGLang), of nsys and of the TPU profiler are recognized by their content; docs/traces.md lists them.
    """
    with WorkProgress() as progress:
        run = import_(
            files,
            topology=topology,
            plan=plan,
            mesh=mesh,
            device_order=device_order,
            card=card,
            model=model,
            phase=phase,
            layers=layers,
            lengths=lengths,
            rules=rules,
            frontend=frontend,
            partial=partial,
            out=out,
            force=force,
            progress=progress,
        )
    print_run(run, as_json=as_json, is_full=full)
