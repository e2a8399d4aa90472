"""`meshscope serve-sim`: a server under load, simulated with predicted step times."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from meshscope.api.serve import DEFAULT_REQUESTS, ServeRequest, simulated
from meshscope.api.serving_files import ENDINGS, check_place
from meshscope.cli.options import OPTIONS, JsonOption, command_of
from meshscope.cli.output import note, print_json
from meshscope.reports.serving import left_out_note

SERVE_OPTIONS: dict[str, Any] = OPTIONS | {
    "instances": typer.Option(metavar="N", help="Identical instances, used in turn."),
    "apart": typer.Option(
        metavar="P:D", help="Instances that only prefill, and those that decode; not --instances."
    ),
    "prefill_topology": typer.Option(
        metavar="SLICE", help="Slice of an instance that prefills.", show_default="--topology"
    ),
    "prefill_plan": typer.Option(metavar="PLAN", help="Its plan.", show_default="--plan"),
    "transfer": typer.Option(help="Path of caches from prefill to decode.", show_default="dcn"),
    "rate": typer.Option(metavar="R", help="Requests per second, over all instances."),
    "arrivals": typer.Option(
        metavar="poisson|burst|FILE",
        help="Random arrivals, or an Azure, BurstGPT or Mooncake trace.",
    ),
    "max_concurrency": typer.Option(
        metavar="N", help="Most requests in flight; the others wait at the client."
    ),
    "requests": typer.Option(
        metavar="N", min=1, help="Requests.", show_default=str(DEFAULT_REQUESTS)
    ),
    "prompt": typer.Option(help="Mean input tokens of a request."),
    "output": typer.Option(help="Mean output tokens of a request."),
    "lengths": typer.Option(help="Distribution of both."),
    "slo": typer.Option(metavar="SLO", help="Limits in seconds, ttft=0.5,tpot=0.03, or a preset."),
    "max_sequences": typer.Option(metavar="N", help="Sequences of an engine in a step."),
    "max_step_tokens": typer.Option(
        metavar="N", help="Tokens of an engine in a step, prompts included."
    ),
    "separate_steps": typer.Option(
        "--separate-steps", help="Steps that either prefill or decode, prefill first."
    ),
    "reserve_output": typer.Option(
        metavar="FRAC", help="Share of each output that the cache must have room for at admission."
    ),
    "prefix_hit": typer.Option(metavar="FRAC", help="Share of each prompt in the prefix cache."),
    "host_overhead": typer.Option(metavar="S", help="Seconds of the host, added to every step."),
    "calibrate_host": typer.Option(
        metavar="FILE", help="Result of vllm bench serve, to fit the overhead to its median ITL."
    ),
    "memory_frac": typer.Option(metavar="FRAC", help="Share of the HBM for weights and KV cache."),
    "seed": typer.Option(min=0, help="Seed of arrivals and lengths."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOutput:
    """Where the simulation is written and printed."""

    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"File of the simulation over time: {', '.join(ENDINGS)}; pictures need the extra plots.",
        ),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --out.")] = False
    full: Annotated[bool, typer.Option("--full", help="Also conditions and details.")] = False
    as_json: JsonOption = False


def _command(request: ServeRequest, output: ServeOutput) -> None:
    """Simulate a server under load: TTFT, TPOT, goodput.

    Continuous batching with a paged KV cache and chunked prefill on the slice, with step times of the
    closed form. docs/serving.md describes the model and what it leaves out.
    """
    if output.out is not None:
        check_place(output.out, force=output.force)
    run = simulated(request)
    if warning := left_out_note(run.outcome):
        note(warning)
    if output.out is not None:
        run.save(output.out, force=output.force)
        note(f"wrote {output.out}")
    if output.as_json:
        print_json(run.as_dict())
        return
    sys.stdout.writelines(f"{line}\n" for line in run.lines(full=output.full))


command = command_of(_command, ServeRequest, options=SERVE_OPTIONS, output=ServeOutput)
