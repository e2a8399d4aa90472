"""`meshscope plan`: the best plan of a model on a slice."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshscope.api.plan import (
    PlanRequest,
    check_files,
    fit_request,
    plan_request,
    verified_result,
)
from meshscope.api.request import AUTO, request_of
from meshscope.cli.options import OPTIONS, PROFILE, JsonOption
from meshscope.cli.output import new_console, note, print_all, print_json
from meshscope.cli.progress import WorkProgress
from meshscope.cli.queue_options import AddressOption, QueueOption
from meshscope.planner.objective import PRESETS, Goal
from meshscope.planner.search import N_BEST
from meshscope.planner.slices import ANY
from meshscope.plans.chunks import ChunkRule
from meshscope.reports.plan import DEFAULT_ROWS
from meshscope.reports.slices import fit_notes, slice_fit_document, slice_fits_table
from meshscope.sweep.queue import Queue

TIMED_OPTIONS = "--slo, --for, --top, --launch, --verify, --profile, --report and --plot"
SLO = f"Limits in seconds, ttft=0.5,tpot=0.03, or a preset: {', '.join(PRESETS)}."


def command(  # noqa: PLR0913  the options of the command
    model: Annotated[str, OPTIONS["model"]],
    *,
    topology: Annotated[
        str,
        typer.Option(
            "--topology",
            metavar="SLICES",
            help="One slice (v6e-8, v6e:2x4, 2xv6e:4x4), or several to choose from: a list, a chip, any.",
        ),
    ] = ANY,
    slo: Annotated[str | None, typer.Option(metavar="LIMITS", help=SLO)] = None,
    goal: Annotated[
        Goal, typer.Option("--for", help="What to optimize within the limits.")
    ] = Goal.THROUGHPUT,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="N|N:M[:STEP]",
            help="Sequences over all devices: a number or a range.",
            show_default="all",
        ),
    ] = None,
    prompt: Annotated[int, OPTIONS["prompt"]] = 1024,
    output: Annotated[int, OPTIONS["output"]] = 128,
    dtype: Annotated[str, OPTIONS["dtype"]] = AUTO,
    weight_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPES", help="Weight dtypes to try.", show_default="--dtype and int8"
        ),
    ] = None,
    cache_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPES", help="KV cache dtypes to try.", show_default="--dtype and int8"
        ),
    ] = None,
    layers: Annotated[int | None, OPTIONS["layers"]] = None,
    prefill_chunk: Annotated[
        str,
        typer.Option(
            metavar="N|auto|off,...",
            help="Prompt tokens that prefill processes at a time on a data-parallel rank, to try.",
        ),
    ] = ChunkRule.AUTO.value,
    prices: Annotated[
        str | None,
        typer.Option(
            metavar="CHIP=PRICE,...",
            help="Prices per chip hour; without them, fewer chips are cheaper.",
        ),
    ] = None,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Only what fits on each slice at --batch, with the largest batch and context.",
        ),
    ] = False,
    top: Annotated[
        int, typer.Option(metavar="K", min=1, help="Rows of the Pareto front.")
    ] = DEFAULT_ROWS,
    launch: Annotated[
        bool, typer.Option("--launch", help="Launch flags of the winner for known servers.")
    ] = False,
    verify: Annotated[
        int,
        typer.Option(
            metavar="K", min=0, max=N_BEST, help="Plans to compile, which corrects their order."
        ),
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of compiled runs, reused by later searches."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the result as a page for the browser."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also draw the Pareto front: .png, .svg or .pdf; needs the extra plots.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier FILE.")] = False,
    queue: QueueOption = Queue.LOCAL,
    address: AddressOption = None,
    profile: Annotated[Path | None, PROFILE] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best plan of a model on a slice.

    Predicts every legal plan with every batch and precision, and prints the best and the Pareto front.
    With several slices, picks the cheapest that meets the limits.
    """
    timed = (slo, launch, verify, profile, goal is not Goal.THROUGHPUT, top != DEFAULT_ROWS)
    _check_options(
        fit_with_times=fit and any((*timed, report, plot)),
        force_without_file=force and not (report or plot),
        out_without_verify=out is not None and not verify,
        queue_without_verify=not verify and (address is not None or queue is not Queue.LOCAL),
    )
    request = request_of(PlanRequest, locals())
    if fit:
        _print_fits(request, as_json=as_json)
        return
    check_files(report, plot, force=force)
    with WorkProgress() as progress:
        result = plan_request(request, progress=progress)
    if verify:
        with WorkProgress() as progress:
            result = verified_result(request, result, out=out, progress=progress)
    if report is not None:
        note(f"wrote {result.report(report, force=force)}")
    if plot is not None:
        note(f"wrote {result.plot(plot, force=force)}")
    if as_json:
        print_json(result.as_dict())
        return
    lines = result.lines(n_rows=top, has_launch=launch)
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _check_options(
    *,
    fit_with_times: bool,
    force_without_file: bool,
    out_without_verify: bool,
    queue_without_verify: bool,
) -> None:
    """A usage error for options that have no effect together."""
    for is_wrong, message in (
        (
            fit_with_times,
            f"--fit predicts no times: omit {TIMED_OPTIONS}",
        ),
        (force_without_file, "--force replaces the FILE of --report or --plot: add one"),
        (
            out_without_verify,
            "--out is the folder of the runs that --verify compiles: add it",
        ),
        (queue_without_verify, "--queue and --address are those of --verify: add it"),
    ):
        if is_wrong:
            raise typer.BadParameter(message)


def _print_fits(request: PlanRequest, *, as_json: bool) -> None:
    """The slices with what they have room for."""
    answers, prices = fit_request(request), request.slice_prices()
    if as_json:
        documents = [slice_fit_document(fit, prices) for fit in answers.fits]
        refused = [
            {"slice": name, "fits": None, "reason": r} for name, r in answers.refused.items()
        ]
        print_json([*documents, *refused])
        return
    model = request.space().model
    table = slice_fits_table(answers.fits, request.batch, prices)
    print_all(new_console(), [table, "", *fit_notes(model, answers, request.batch)])
