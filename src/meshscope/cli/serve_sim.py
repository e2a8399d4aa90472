"""`meshscope serve-sim`: a server under load, simulated with predicted step times."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.request import AUTO, request_of
from meshscope.api.serve import DEFAULT_REQUESTS, Lengths, ServeRequest, simulated
from meshscope.api.serving_files import ENDINGS, check_place
from meshscope.cli.options import OPTIONS, PLAN, PROFILE, TOPOLOGY, JsonOption
from meshscope.cli.output import note, print_json
from meshscope.serving.transfer import TransferPath
from meshscope.views.serving import left_out_note


def command(  # noqa: PLR0913  the options of the command
    model: Annotated[str, OPTIONS["model"]],
    *,
    topology: Annotated[str, TOPOLOGY],
    plan: Annotated[str, PLAN],
    instances: Annotated[
        int, typer.Option(metavar="N", help="Equal instances, which requests take in turn.")
    ] = 1,
    apart: Annotated[
        str | None,
        typer.Option(
            metavar="P:D",
            help="Instances that only prefill, and those that decode; not --instances.",
        ),
    ] = None,
    prefill_topology: Annotated[
        str | None,
        typer.Option(
            metavar="SLICE", help="Slice of an instance that prefills.", show_default="--topology"
        ),
    ] = None,
    prefill_plan: Annotated[
        str | None,
        typer.Option(metavar="PLAN", help="Its plan.", show_default="--plan"),
    ] = None,
    transfer: Annotated[
        TransferPath | None,
        typer.Option(help="Path of caches from prefill to decode.", show_default="dcn"),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="R", help="Requests per second, over all instances.")
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            metavar="poisson|burst|FILE", help="Random arrivals, or an Azure or Mooncake trace."
        ),
    ] = "poisson",
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Requests in flight at most; the others wait at the client."
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Requests.", show_default=str(DEFAULT_REQUESTS)),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Mean input tokens of a request.")] = 1024,
    output: Annotated[int, typer.Option(help="Mean output tokens of a request.")] = 128,
    lengths: Annotated[Lengths, typer.Option(help="Distribution of both.")] = Lengths.FIXED,
    slo: Annotated[
        str | None,
        typer.Option(metavar="SLO", help="Limits in seconds, ttft=0.5,tpot=0.03, or a preset."),
    ] = None,
    dtype: Annotated[str, OPTIONS["dtype"]] = AUTO,
    weight_dtype: Annotated[str | None, OPTIONS["weight_dtype"]] = None,
    cache_dtype: Annotated[str | None, OPTIONS["cache_dtype"]] = None,
    layers: Annotated[int | None, OPTIONS["layers"]] = None,
    max_sequences: Annotated[
        int, typer.Option(metavar="N", help="Sequences of an engine in a step.")
    ] = 256,
    max_step_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of an engine in a step, prompts included.")
    ] = 2048,
    separate_steps: Annotated[
        bool,
        typer.Option("--separate-steps", help="Steps prefill or decode, prompts first."),
    ] = False,
    reserve_output: Annotated[
        float,
        typer.Option(
            metavar="FRAC",
            help="Share of each output that the cache must have room for at admission.",
        ),
    ] = 0.0,
    prefix_hit: Annotated[
        float, typer.Option(metavar="FRAC", help="Share of each prompt in the prefix cache.")
    ] = 0.0,
    host_overhead: Annotated[
        float, typer.Option(metavar="S", help="Seconds of the host, added to every step.")
    ] = 0.0,
    calibrate_host: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Result of vllm bench serve, to fit the overhead to its median ITL.",
        ),
    ] = None,
    memory_frac: Annotated[
        float, typer.Option(metavar="FRAC", help="Share of the HBM for weights and KV cache.")
    ] = 0.9,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals and lengths.")] = 0,
    profile: Annotated[Path | None, PROFILE] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"The simulation over time: {', '.join(ENDINGS)}."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --out.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Conditions and details, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate a server under load: TTFT, TPOT, goodput.

    Continuous batching with a paged KV cache and chunked prefill on the slice, with step times of the
    closed form. docs/serving.md describes the model and what it leaves out.
    """
    request = request_of(ServeRequest, locals())
    if out is not None:
        check_place(out, force=force)
    run = simulated(request)
    if warning := left_out_note(run.outcome):
        note(warning)
    if out is not None:
        run.save(out, force=force)
        note(f"wrote {out}")
    if as_json:
        print_json(run.as_dict())
        return
    sys.stdout.writelines(f"{line}\n" for line in run.lines(full=full))
