"""`meshscope import`: HLO text and traces of other tools become a run."""

from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.import_ import import_
from meshscope.api.import_each import import_each
from meshscope.api.sweep import SweepOptions
from meshscope.cli.options import (
    PLAN,
    TOPOLOGY,
    ForceOption,
    FullOption,
    JsonOption,
    OutOption,
)
from meshscope.cli.output import note, print_run
from meshscope.cli.progress import WorkProgress
from meshscope.cli.queue_options import AddressOption, QueueOption
from meshscope.cli.sweep import print_results, show_progress
from meshscope.events.enums import Phase
from meshscope.plans.program import Frontend
from meshscope.sweep.queue import Queue

# Options of one import and of many.
SHARED = (
    *("topology", "plan", "mesh", "device_order", "card", "model", "phase", "rules"),
    *("frontend", "partial", "out"),
)


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
        typer.Option(metavar="AXES", help="Other axes, instead of --plan: data=8,model=8."),
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
        Phase | None, typer.Option(help="Phase of a dump whose names do not state it.")
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
    each: Annotated[
        bool,
        typer.Option("--each", help="One run per path, made on all cores; --out is their folder."),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --each: paths in parallel.", show_default="all cores"
        ),
    ] = None,
    queue: QueueOption = Queue.LOCAL,
    address: AddressOption = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --each: retry paths that failed before.")
    ] = False,
    out: OutOption = None,
    force: ForceOption = False,
    full: FullOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read HLO text or traces from other tools.

    The plan or mesh lays out the devices; no model is needed. Names in HLO text give each collective its layer and
    part. Saves a run. A scheduled TPU program that is one whole phase gets modeled times, too. Traces of the PyTorch
    profiler (vLLM, SGLang), of nsys and of the TPU profiler are recognized by their content; docs/traces.md lists them.
    """
    values = locals()
    options = {name: values[name] for name in SHARED}
    if each:
        result = import_each(
            files,
            **options,
            sweep=SweepOptions(
                force=force, retry_failed=retry_failed, n_jobs=jobs, queue=queue, address=address
            ),
            note=note,
            show=show_progress,
        )
        print_results(result, as_json=as_json)
        result.check()
        return
    if jobs or retry_failed or address is not None or queue is not Queue.LOCAL:
        raise typer.BadParameter("--jobs, --queue, --address and --retry-failed need --each")
    with WorkProgress() as progress:
        run = import_(
            files,
            **options,
            layers=layers,
            lengths=lengths,
            force=force,
            progress=progress,
        )
    print_run(run, as_json=as_json, is_full=full)
