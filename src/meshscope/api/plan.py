"""`meshscope.plan`: the best plan of a model on a slice, by prediction."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from meshscope.api.console import Shown, WorkProgress, note
from meshscope.api.options import (
    choice,
    numbers,
    option,
    optional_path,
    refuse,
    request,
    takes,
    text,
    text_or_number,
)
from meshscope.api.request import AUTO, CompileRequest, PredictRequest
from meshscope.errors import SpecError, UsageError, read_only
from meshscope.files import check_new, new_file
from meshscope.hardware.interconnect.profile import load_profile
from meshscope.model.config import read_model
from meshscope.model.quantization import UNQUANTIZED_DTYPE
from meshscope.model.stored_format import weight_dtype_of
from meshscope.plans.checks import has_fixed_cache
from meshscope.plans.chunks import ChunkRule, chunk_option
from meshscope.plans.experiment import first_layers
from meshscope.plans.workload import ACTIVATION_DTYPES, CACHE_DTYPES, Workload
from meshscope.reports.answer import fitted_to
from meshscope.reports.loads import SIMULATED, load_document, load_lines, measurement_lines
from meshscope.reports.model import wrapped
from meshscope.reports.plan import DEFAULT_ROWS, plan_document, plan_lines
from meshscope.reports.slices import (
    fit_notes,
    fits_lines,
    slice_fit_document,
    slice_fits_table,
    slice_lines,
    slices_document,
)
from meshscope.reports.tables import with_first_block
from meshscope.serialize import picked, to_plain
from meshscope.serving.grid import LARGE, SearchProgress
from meshscope.serving.loads import parse_loads, served_figures, sharding_table
from meshscope.serving.objective import Goal, objective_of
from meshscope.serving.prices import LIST, LIST_NOTE, PRICES_HELP, prices_of
from meshscope.serving.search import Choice, PlanSearch, search
from meshscope.serving.servers import serving_engine
from meshscope.serving.slices import (
    ANY,
    SliceSearch,
    is_reachable,
    parse_slices,
    search_slices,
    slice_fits,
    unreachable,
)
from meshscope.serving.space import MAX_BATCH, SearchSpace, parse_batches
from meshscope.store.run import ServedFigures
from meshscope.units import dtype_name
from meshscope.workers import Progress

QUANTIZED = "s8"  # tried as well as --dtype


@request
class PlanRequest:
    """The options of `plan`, by the names that the command line uses."""

    model: str = option(CompileRequest, converter=text, kw_only=False)
    topology: str = option(
        "SLICES: One slice (v6e-8, v6e:2x4, 2xv6e:4x4), or several to choose from: a list, a chip, any.",
        default=ANY,
    )
    slo: str | None = option(
        "LIMITS: Limits in seconds, ttft=0.5,tpot=0.03.",
        default=None,
    )
    goal: Goal = option(
        "What to optimize within the limits.",
        default=Goal.THROUGHPUT,
        flags=("--for",),
        converter=choice(Goal),
    )
    batch: str | None = option(
        "N|N:M[:STEP]: Sequences over all devices: a number or a range.",
        default=None,
        shown="all",
        converter=text_or_number,
    )
    prompt: int = option(CompileRequest, default=1024)
    output: int = option("Output tokens of a sequence.", default=128)
    dtype: str = option(CompileRequest, default=AUTO)
    weight_dtype: str | None = option(
        "DTYPES: Weight dtypes to try.", default=None, shown="--dtype and int8"
    )
    cache_dtype: str | None = option(
        "DTYPES: KV cache dtypes to try.", default=None, shown="--dtype and int8"
    )
    layers: int | None = option(CompileRequest, default=None)
    prefill_chunk: str = option(
        CompileRequest,
        metavar="N|auto|off,...",
        default=ChunkRule.AUTO.value,
        converter=text_or_number,
    )
    prices: str | None = option(
        f"{PRICES_HELP}; without them, fewer chips are cheaper.", default=None
    )
    server: str | None = option(PredictRequest, default=None)
    profile: Path | None = option(CompileRequest, default=None, converter=optional_path)
    progress: Progress | None = option(CompileRequest, default=None)

    def space(self) -> SearchSpace:
        """What the search varies on the first slice; a MeshscopeError for an impossible option."""
        model = read_model(self.model)
        is_auto = self.dtype == AUTO
        wide = UNQUANTIZED_DTYPE if is_auto else dtype_name(self.dtype, ACTIVATION_DTYPES)
        weights = self.weight_dtype or f"{self.dtype},{QUANTIZED}"
        caches = self.cache_dtype or (wide if has_fixed_cache(model) else f"{wide},{QUANTIZED}")
        cache_dtype = partial(dtype_name, supported=CACHE_DTYPES)
        sizes = picked(self, "prompt", "output")
        return SearchSpace(
            model=model if self.layers is None else first_layers(model, self.layers),
            topology=parse_slices(self.topology)[0],
            workload=Workload(batch=1, activation_dtype=wide, **sizes),
            batches=parse_batches(self.batch),
            weight_dtypes=_dtypes("--weight-dtype", weights, partial(weight_dtype_of, model)),
            cache_dtypes=_dtypes("--cache-dtype", caches, cache_dtype),
            chunks=tuple(dict.fromkeys(map(chunk_option, self.prefill_chunk.split(",")))),
            profile=None if self.profile is None else load_profile(self.profile),
            n_first_layers=None if self.layers == model.n_layers else self.layers,
        )


@read_only
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanResult:
    """The result of `meshscope.plan`; `search` has all figures, typed.

    With several slices, `slices` has the search of each, and `search` is the best one. `served` is what a
    server delivers with the winner.
    """

    search: PlanSearch
    slices: SliceSearch | None = None
    served: ServedFigures | None = None

    @property
    def plan(self) -> str | None:
        """The best plan, e.g. `dp=2,tp=4`; None if nothing meets the objective."""
        winner = self.search.winner
        return None if winner is None else str(winner.experiment.plan)

    @property
    def winner(self) -> Choice | None:
        """The best choice with its figures; None if nothing meets the objective."""
        return self.search.winner

    @property
    def front(self) -> tuple[Choice, ...]:
        """The Pareto front of TTFT, TPOT and request tokens/s per chip, the best first."""
        return self.search.front

    def as_dict(self) -> dict[str, Any]:
        """The document of `--json`."""
        slices = {} if self.slices is None else slices_document(self.slices)
        served = {} if self.served is None else {"served": to_plain(self.served)}
        return {**plan_document(self.search), **slices, **served}

    def lines(self, *, n_rows: int = DEFAULT_ROWS) -> Iterator[str]:
        """The text of the command, line by line."""
        if self.slices is not None:
            yield from slice_lines(self.slices)
        yield from plan_lines(self.search, n_rows=n_rows)
        if self.served is not None:
            fits = "" if self.served.fits is None else f"; fits {self.served.fits}"
            yield from ("", *wrapped(f"as served: {self.served}{fits}"))

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        from meshscope.api.export import in_notebook  # polars is slow to import

        return in_notebook(repr(self), lambda pictures: pictures.plan_figures(self.search))


def plan_request(request: PlanRequest) -> PlanResult:
    """Finds the best plan of a model on a slice by predicting every legal one.

    With several slices, picks the cheapest that meets the limits; with prices and without limits, the one
    with the lowest price of an output token.

    Example:
        >>> best = meshscope.plan("Qwen/Qwen3-32B", topology="v6e-8", slo="ttft=0.5,tpot=0.03")
        >>> best.plan

    Returns:
        The winner, the Pareto front, and the reasons.

    Raises:
        MeshscopeError: An option or the model is impossible, or the chip has no published figures.
    """
    objective = objective_of(request.slo, request.goal)
    slices, prices = parse_slices(request.topology), prices_of(request.prices)
    space = request.space()
    if request.server is not None:
        serving_engine(request.server)  # before a long search
    if len(slices) > 1 or prices is not None:
        by_slice = search_slices(space, slices, objective, prices, request.progress)
        result = PlanResult(search=by_slice.shown, slices=by_slice)
    else:
        if space.n_combinations >= LARGE and not is_reachable(space, objective):
            raise unreachable([space], objective)
        shown = SearchProgress(request.progress)
        result = PlanResult(search=search(space, objective, shown))
        shown.done()
    winner, profile = result.winner, result.search.space.profile
    if request.server is not None and winner is not None:
        result = replace(result, served=served_figures(winner.experiment, request.server, profile))
    return result


plan = takes("plan", PlanRequest, plan_request)


def _dtypes(option: str, text: str, dtype_of: Callable[[str], str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(dtype_of(name.strip()) for name in text.split(",") if name))
    if not names:
        raise SpecError(f"{option} '{text}' names no dtype. Use for example bf16,int8.")
    return names


def command(
    *,
    request: PlanRequest,
    fit: bool = option(
        "Only what fits on each slice at --batch, with the largest batch and context.",
        default=False,
    ),
    concurrency: str | None = option(
        "N|N:M[:STEP]|N,...: Requests in flight, for a table of the best plan at each.",
        default=None,
        converter=numbers,
    ),
    next_measurement: bool = option(
        "Cheapest benchmarks that would settle which plan is better where the table has equal ones.",
        default=False,
    ),
    top: int = option("K: Rows of the Pareto front.", default=DEFAULT_ROWS, least=1),
    report: Path | None = option(
        "FILE: Also write the table of --concurrency as a page with its plot.", default=None
    ),
    force: bool = option("Replace an earlier FILE.", default=False),
) -> Shown:
    """Find the best plan of a model on a slice.

    Predicts every legal plan with every batch and precision, and prints the best and the Pareto front.
    With several slices, picks the cheapest that meets the limits.
    """
    has_goal = request.goal is not Goal.THROUGHPUT
    timed = (has_goal, request.slo, request.profile, top != DEFAULT_ROWS)
    refuse(
        (
            fit and any(timed),
            "--fit predicts no times: omit --slo, --for, --top and --profile",
        ),
        (force and report is None, "--force replaces the FILE of --report: add it"),
        (
            concurrency is None and (next_measurement or report is not None),
            "--next-measurement and --report belong to the table of --concurrency: add it",
        ),
        (
            concurrency is not None and any((has_goal, request.batch, fit)),
            "--concurrency serves each plan as it is: omit --batch, --for and --fit",
        ),
        kind=UsageError,
    )
    if fit:
        return _fits(request)
    if concurrency is not None:
        return _shardings(request, concurrency, report, has_next=next_measurement, force=force)
    with WorkProgress() as progress:
        result = plan_request(replace(request, progress=progress))
    if request.prices == LIST:
        note(LIST_NOTE)
    return Shown(
        result.as_dict,
        lambda _: result.lines(n_rows=top),
        is_whole=top != DEFAULT_ROWS,
        basis=next(fitted_to(result.search.times), "times of each plan in closed form"),
    )


def _shardings(
    request: PlanRequest, concurrency: str, report: Path | None, *, has_next: bool, force: bool
) -> Shown:
    """The best plan of a server at each concurrency, with the first named dtypes."""
    if report is not None:
        check_new(report, force=force)
    space, slices = request.space(), parse_slices(request.topology)
    refuse(
        (
            len(slices) > 1,
            f"--concurrency compares plans on one slice. Give one --topology, such as {slices[0].name}.",
        ),
        (
            any(dtypes and "," in dtypes for dtypes in (request.weight_dtype, request.cache_dtype)),
            "--concurrency compares plans at one precision. Name one --weight-dtype and --cache-dtype.",
        ),
        (
            request.prefill_chunk != ChunkRule.AUTO,
            f"--prefill-chunk {request.prefill_chunk}: a server has its own chunks. Omit the option.",
        ),
    )
    loads = parse_loads(concurrency, "--concurrency", least=1, most=MAX_BATCH, is_whole=True)
    dtypes = {"weight_dtype": space.weight_dtypes[0], "cache_dtype": space.cache_dtypes[0]}
    plans, workload = space.legal.plans, replace(space.workload, **dtypes)
    table = sharding_table(
        [space.experiment(plan, replace(workload, batch=plan.data_size)) for plan in plans],
        loads,
        objective_of(request.slo),
        server=None if request.server is None else serving_engine(request.server),
        profile=space.profile,
    )
    prices = prices_of(request.prices)
    if report is not None:
        from meshscope.reports.html.page import loads_html  # only a page needs it

        with new_file(report, force=force) as partial:
            partial.write_text(loads_html(table, prices), encoding="utf-8")
        note(f"wrote {report}")
    below = [*measurement_lines(table)] if has_next else []
    return Shown(
        lambda: load_document(table),
        lambda _: load_lines(table, prices=prices, below=below),
        lambda _: [*load_lines(table, is_full=True, prices=prices), *below],
        basis=SIMULATED,
    )


def _fits(request: PlanRequest) -> Shown:
    """What each slice has room for at the batch, by default the smallest, with each named dtype."""
    space, batches = request.space(), parse_batches(request.batch)
    batch = batches.least if batches.least == batches.most else None
    chunk, *others = space.chunks
    refuse(
        (
            request.batch is not None and batch is None,
            f"--fit --batch '{request.batch}': --fit answers for one batch. Use a single number.",
        ),
        (
            others,
            f"--fit --prefill-chunk '{request.prefill_chunk}': --fit answers for one chunk. Use one.",
        ),
    )
    weights = space.weight_dtypes[: None if request.weight_dtype else 1]
    caches = space.cache_dtypes[: None if request.cache_dtype else 1]
    workloads = [
        replace(space.workload, weight_dtype=weight, cache_dtype=cache)
        for weight, cache in product(weights, caches)
    ]
    slices, prices = parse_slices(request.topology), prices_of(request.prices)
    fits, refused = slice_fits(space.model, slices, workloads, batch=batch, chunk=chunk)
    if not fits:
        reasons = dict.fromkeys(refused.values())
        raise SpecError(f"--topology {request.topology}: {' '.join(reasons)}")
    without = [{"slice": name, "fits": None, "reason": r} for name, r in refused.items()]
    notes = fit_notes(space.model, fits, refused, request.batch)
    sentence = fits_lines(space.model, fits, request.batch)
    shown = slice_fits_table(fits, request.batch, prices)
    return Shown(
        lambda: [*(slice_fit_document(fit, prices) for fit in fits), *without],
        lambda _: [*with_first_block((*sentence, shown), ""), "", *notes],
        basis="published HBM, weights and caches, estimated buffers",
    )
