"""`meshscope serve-sim`: a server under load, simulated with predicted step times."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.request import AUTO
from meshscope.api.serve import DEFAULT_REQUESTS, Lengths, ServeRequest, ServingRun, simulated
from meshscope.cli.options import OPTIONS, PLAN, PROFILE, TOPOLOGY, JsonOption
from meshscope.cli.output import new_console, note, print_all, print_json
from meshscope.units import format_seconds
from meshscope.views.serving import serving_text


def command(  # noqa: PLR0913  the options of the command
    model: Annotated[str, OPTIONS["model"]],
    *,
    topology: Annotated[str, TOPOLOGY],
    plan: Annotated[str, PLAN],
    rate: Annotated[
        float | None, typer.Option(metavar="R", help="Requests per second, over all ranks.")
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            metavar="poisson|burst|FILE", help="Random arrivals, or an Azure or Mooncake trace."
        ),
    ] = "poisson",
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
        int, typer.Option(metavar="N", help="Sequences of a rank in a step.")
    ] = 256,
    max_step_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a rank in a step, prompts included.")
    ] = 2048,
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
    as_json: JsonOption = False,
) -> None:
    """Simulate a server under load: TTFT, TPOT, goodput.

    Continuous batching with a paged KV cache and chunked prefill on the slice, with step times of the
    closed form. docs/serving.md describes the model and what it leaves out.
    """
    values = dict(locals())
    values.pop("as_json")
    run = simulated(ServeRequest(**values))
    if as_json:
        print_json(run.as_dict())
        return
    if run.n_left_out:
        note(f"{run.n_left_out:,} requests exceed the context of the model and are left out")
    n_chips = run.experiment.topology.n_chips
    text = serving_text(
        run.result, run.objective, n_chips=n_chips, conditions=tuple(_conditions(run))
    )
    print_all(new_console(), text)


def _conditions(run: ServingRun) -> Iterator[str]:
    """What was asked, and what is assumed."""
    experiment, request, policy = run.experiment, run.request, run.policy
    workload = experiment.workload
    yield f"model     {experiment.model.name}, {experiment.model.n_layers} layers"
    yield (
        f"slice     {experiment.topology.name}, plan {experiment.plan}; weights {workload.weight_dtype}, "
        f"cache {workload.cache_dtype}"
    )
    is_random = request.arrivals in {"poisson", "burst"}
    sizes = f", prompt {request.prompt}, output {request.output} ({request.lengths})"
    n_all = run.result.figures.n_requests * run.result.n_ranks
    yield f"load      about {n_all:,} requests, {request.arrivals}{sizes if is_random else ''}"
    yield (
        f"limits    {policy.max_sequences} sequences and {policy.max_step_tokens:,} tokens a step, "
        f"{run.n_cache_tokens:,} tokens of cache"
    )
    host = format_seconds(policy.host_s) if policy.host_s else "no time"
    yield (
        f"assumed   {host} of the host in a step, prefix hits {policy.prefix_hit_frac:.0%}; step times by "
        "the closed form, not compared with a server on a TPU"
    )
    fit = run.host_fit
    if fit is not None:
        bound = "host-bound" if fit.is_host_bound else "device-bound"
        measured, device = map(format_seconds, (fit.measured_itl_s, fit.device_itl_s))
        yield f"host      {bound}: median ITL {measured} measured, {device} without host time"
    if run.result.n_ranks > 1:
        yield f"ranks     {run.result.n_ranks}, which take turns; times are those of one, rates of all"
