"""`meshscope plan`: the best plan of a model on a slice."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.plan import PRECISIONS, PlanRequest, plan_request
from meshscope.cli.options import OPTIONS, PROFILE, TOPOLOGY, JsonOption
from meshscope.cli.output import print_json
from meshscope.planner.objective import PRESETS, Goal
from meshscope.views.plan import DEFAULT_ROWS, plan_lines

SLO = f"Limits in seconds, ttft=0.5,tpot=0.03, or a preset: {', '.join(PRESETS)}."


def command(  # noqa: PLR0913  the options of the command
    model: Annotated[str, OPTIONS["model"]],
    *,
    topology: Annotated[str, TOPOLOGY],
    slo: Annotated[str | None, typer.Option(metavar="LIMITS", help=SLO)] = None,
    goal: Annotated[
        Goal, typer.Option("--for", help="What to optimize within the limits.")
    ] = Goal.THROUGHPUT,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="N|N:M",
            help="Sequences over all devices: a number or a range.",
            show_default="all",
        ),
    ] = None,
    prompt: Annotated[int, OPTIONS["prompt"]] = 1024,
    output: Annotated[int, OPTIONS["output"]] = 128,
    weight_dtype: Annotated[
        str, typer.Option(metavar="DTYPES", help="Weight dtypes to try.")
    ] = PRECISIONS,
    cache_dtype: Annotated[
        str, typer.Option(metavar="DTYPES", help="KV cache dtypes to try.")
    ] = PRECISIONS,
    top: Annotated[
        int, typer.Option(metavar="K", min=1, help="Rows of the Pareto front.")
    ] = DEFAULT_ROWS,
    launch: Annotated[
        bool, typer.Option("--launch", help="Launch flags of the winner for known servers.")
    ] = False,
    profile: Annotated[Path | None, PROFILE] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best plan of a model on a slice.

    Predicts every legal plan with every batch and precision, and prints the best and the Pareto front.
    """
    request = PlanRequest(
        model=model,
        topology=topology,
        slo=slo,
        goal=goal,
        batch=batch,
        prompt=prompt,
        output=output,
        weight_dtype=weight_dtype,
        cache_dtype=cache_dtype,
        profile=profile,
    )
    result = plan_request(request)
    if as_json:
        print_json(result.as_dict())
        return
    lines = plan_lines(result.search, n_rows=top, has_launch=launch)
    sys.stdout.writelines(f"{line}\n" for line in lines)
