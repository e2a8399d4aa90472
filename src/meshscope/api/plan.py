"""`meshscope.plan`: the best plan of a model on a slice, by prediction."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from meshscope.api.plot_tools import plot_tools
from meshscope.api.request import AUTO, request_of
from meshscope.errors import RunError, SpecError, public, read_only
from meshscope.files import path_of
from meshscope.hardware.topology import Topology
from meshscope.interconnect.profile import load_profile
from meshscope.model.config import read_model
from meshscope.model.quantization import UNQUANTIZED_DTYPE
from meshscope.model.stored_format import weight_dtype_of
from meshscope.planner.batches import parse_batches
from meshscope.planner.cheapest import SliceSearch, is_reachable, search_slices, unreachable
from meshscope.planner.combinations import SearchSpace
from meshscope.planner.grid import n_combinations
from meshscope.planner.objective import Goal, objective_of
from meshscope.planner.progress import LARGE, SearchProgress
from meshscope.planner.search import Choice, PlanSearch, plans_of, search
from meshscope.planner.slices import SliceFits, parse_prices, parse_slices, slice_fits
from meshscope.planner.verified import VerifiedChoice
from meshscope.plans.chunks import ChunkRule, chunk_option
from meshscope.plans.experiment import first_layers
from meshscope.plans.workload import Workload
from meshscope.reports.export.files import check_new, new_file
from meshscope.reports.plan import (
    DEFAULT_ROWS,
    plan_document,
    plan_lines,
    verified_document,
    verified_lines,
)
from meshscope.reports.slices import slice_search_document, slice_search_lines
from meshscope.store.folder import default_folder
from meshscope.sweep.queue import Queue
from meshscope.units import dtype_name
from meshscope.workers import Progress

PICTURES = (".png", ".svg", ".pdf")
QUANTIZED = "s8"  # tried beside --dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options of `plan`, by the names that the command line uses."""

    model: str
    topology: str
    slo: str | None = None
    goal: Goal = Goal.THROUGHPUT
    batch: str | None = None
    prompt: int = 1024
    output: int = 128
    dtype: str = AUTO
    weight_dtype: str | None = None
    cache_dtype: str | None = None
    layers: int | None = None
    prefill_chunk: str = ChunkRule.AUTO.value
    verify: int = 0
    queue: Queue = Queue.LOCAL
    address: str | None = None
    profile: Path | None = None
    prices: str | None = None

    def slices(self) -> tuple[Topology, ...]:
        """The slices to choose from; one if the topology names one."""
        return parse_slices(self.topology)

    def slice_prices(self) -> dict[str, float] | None:
        """The prices per chip hour."""
        return None if self.prices is None else parse_prices(self.prices)

    def space(self) -> SearchSpace:
        """What the search varies on the first slice; a MeshscopeError for an impossible option."""
        model = read_model(self.model)
        wide = UNQUANTIZED_DTYPE if self.dtype == AUTO else dtype_name(self.dtype)
        return SearchSpace(
            model=model if self.layers is None else first_layers(model, self.layers),
            topology=self.slices()[0],
            workload=Workload(
                batch=1, prompt=self.prompt, output=self.output, activation_dtype=wide
            ),
            batches=parse_batches(self.batch),
            weight_dtypes=_dtypes(
                "--weight-dtype",
                self.weight_dtype or f"{self.dtype},{QUANTIZED}",
                partial(weight_dtype_of, model),
            ),
            cache_dtypes=_dtypes(
                "--cache-dtype", self.cache_dtype or f"{wide},{QUANTIZED}", dtype_name
            ),
            chunks=tuple(dict.fromkeys(map(chunk_option, self.prefill_chunk.split(",")))),
            profile=None if self.profile is None else load_profile(self.profile),
            n_first_layers=None if self.layers == model.n_layers else self.layers,
        )


@read_only
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanResult:
    """The result of `meshscope.plan`; `search` has all figures, typed.

    With several slices, `slices` has the search of each, and `search` is that of the best. `verified` are
    the compiled plans, the best by their compiled times first.
    """

    search: PlanSearch
    slices: SliceSearch | None = None
    verified: tuple[VerifiedChoice, ...] = ()

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

    @public
    def report(self, path: str | Path, *, force: bool = False) -> Path:
        """Writes the page for the browser, one HTML file; an existing file only with `force`."""
        from meshscope.reports.html.plan_page import plan_html  # noqa: PLC0415  only a page needs it

        with new_file(path_of(path), force=force) as partial:
            partial.write_text(plan_html(self.search, self.slices, self.verified), encoding="utf-8")
        return Path(path)

    @public
    def plot(self, path: str | Path, *, force: bool = False) -> Path:
        """Writes the Pareto front as a picture: PNG, SVG or PDF by the ending of the path."""
        target = path_of(path)
        _check_picture(target)
        if not self.front:
            raise RunError(
                "there is no Pareto front to draw: no plan meets the objective. "
                "Relax --slo, or drop --plot."
            )
        with plot_tools():
            from meshscope.reports.charts.pictures import write_picture  # noqa: PLC0415  only plots need it
        from meshscope.reports.charts.points import front_chart  # noqa: PLC0415  only plots need it

        space = self.search.space
        title = f"{space.model.name} on {space.topology.name}"
        chart = replace(front_chart(self.search, self.front), title=title)
        with new_file(target, force=force) as partial:
            write_picture(chart, partial, to=target.suffix[1:].lower())
        return target

    def as_dict(self) -> dict[str, Any]:
        """The document of `--json`."""
        document = (
            plan_document(self.search)
            if self.slices is None
            else slice_search_document(self.slices)
        )
        return document | {"verified": [verified_document(one) for one in self.verified]}

    def lines(self, *, n_rows: int = DEFAULT_ROWS, has_launch: bool = False) -> Iterator[str]:
        """The text of the command, line by line."""
        if self.slices is None:
            yield from plan_lines(self.search, n_rows=n_rows, has_launch=has_launch)
        else:
            yield from slice_search_lines(self.slices, n_rows=n_rows, has_launch=has_launch)
        if self.verified:
            yield ""
            yield from verified_lines(self.verified)

    def __repr__(self) -> str:
        """The text of the command."""
        return "\n".join(self.lines())


@public
def plan(  # noqa: PLR0913  the options of the command
    model: str | Path,
    *,
    topology: str,
    slo: str | None = None,
    goal: Goal | str = Goal.THROUGHPUT,
    batch: int | str | None = None,
    prompt: int = 1024,
    output: int = 128,
    dtype: str = AUTO,
    weight_dtype: str | None = None,
    cache_dtype: str | None = None,
    layers: int | None = None,
    prefill_chunk: int | str = ChunkRule.AUTO.value,
    verify: int = 0,
    queue: Queue | str = Queue.LOCAL,
    address: str | None = None,
    profile: str | Path | None = None,
    prices: str | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> PlanResult:
    """Finds the best plan of a model on a slice by predicting every legal one.

    With several slices, picks the cheapest that meets the limits; with prices and without limits, the one
    with the lowest price of an output token.

    Example:
        >>> best = meshscope.plan("Qwen/Qwen3-32B", topology="v6e-8", slo="ttft=0.5,tpot=0.03")
        >>> best.plan

    Args:
        model: A model id, a config.json, or a folder with one.
        topology: The slice: `v6e-8`, a chip grid `v6e:2x4`, or slices `2xv6e:4x4`; or several to choose
            from: a list `v6e-8,v5p-16`, a chip `v6e`, or `any`.
        slo: Limits in seconds, `ttft=0.5,tpot=0.03`, or a preset such as `mlperf-llama2-70b`.
        goal: What to optimize within the limits: `throughput` or `latency`.
        batch: Sequences over all devices, a number, a range such as `8:256`, or one with a step,
            `8:256:8`; all if None.
        prompt: Input tokens of a sequence.
        output: Output tokens of a sequence.
        dtype: Number format of weights, activations and KV cache; `auto` for weights as in the checkpoint and the
            others in bf16.
        weight_dtype: Number formats of the weights to try, joined by commas; `dtype` and int8 if None.
        cache_dtype: Number formats of the KV cache to try, joined by commas; `dtype` and int8 if None.
        layers: Only the first layers of the model; all if None.
        prefill_chunk: Prompt tokens that prefill processes at a time on a data-parallel rank, `off` for
            whole batches, or `auto` to try chunks up to 8,192 and up to 2,048 tokens; several joined by
            commas.
        verify: How many of the best plans to compile, which corrects their order.
        queue: Where plans are compiled: `local`, or `ray` for a Ray cluster.
        address: Address of the Ray cluster; None for a running one, else one on this machine.
        profile: A chip profile that `meshscope calibrate` wrote, for times.
        prices: Prices per chip hour, `v6e=2.7,v5e=1.2`; without them, fewer chips are cheaper.
        out: Folder of the compiled runs, by default `runs/plan-<model>-<slice>`; runs in it are used again.
        progress: Called with a part of the work (a long search, a compilation), its step, and the seconds left
            or None.

    Returns:
        The winner, the Pareto front, and the reasons.

    Raises:
        MeshscopeError: An option or the model is impossible, or the chip has no published figures.
    """
    texts = {"model": str(model), "prefill_chunk": str(prefill_chunk)}
    texts |= {"batch": None if batch is None else str(batch)}
    request = request_of(PlanRequest, {**locals(), **texts})
    result = plan_request(request, progress=progress)
    if not verify:
        return result
    return verified_result(
        request, result, out=None if out is None else path_of(out), progress=progress
    )


def check_files(report: Path | None, plot: Path | None, *, force: bool) -> None:
    """RunError for a file that exists, unless `force` replaces it, and for a plot that is no picture."""
    for path in (report, plot):
        if path is not None:
            check_new(path, force=force)
    if plot is not None:
        _check_picture(plot)


def _check_picture(path: Path) -> None:
    if path.suffix.lower() not in PICTURES:
        raise RunError(f"--plot '{path}' is no picture. Use an ending of {', '.join(PICTURES)}.")


def verified_result(
    request: PlanRequest, result: PlanResult, *, out: Path | None, progress: Progress | None
) -> PlanResult:
    """The result with its best plans compiled."""
    from meshscope.api.sweep import SweepOptions  # noqa: PLC0415  only a verification needs it
    from meshscope.api.verify import verified_choices  # noqa: PLC0415  it loads the backends

    space = result.search.space
    name = space.model.name.rsplit("/", 1)[-1]
    verified = verified_choices(
        result.search,
        model=request.model,
        layers=request.layers,
        n_choices=request.verify,
        out=out or default_folder("plan", name, space.topology.name),
        options=SweepOptions(retry_failed=True, queue=request.queue, address=request.address),
        progress=progress,
    )
    return replace(result, verified=verified)


def plan_request(request: PlanRequest, *, progress: Progress | None = None) -> PlanResult:
    """The result of the request, without compiled plans."""
    objective = objective_of(request.slo, request.goal)
    slices, prices, space = request.slices(), request.slice_prices(), request.space()
    if len(slices) == 1 and prices is None:
        is_large = n_combinations(space, plans_of(space)) >= LARGE
        if is_large and not is_reachable(space, objective):
            raise unreachable([space], objective)
        shown = SearchProgress(progress)
        result = search(space, objective, shown)
        shown.done()
        return PlanResult(search=result)
    result = search_slices(space, slices, objective, prices, progress)
    return PlanResult(search=result.shown, slices=result)


def fit_request(request: PlanRequest) -> SliceFits:
    """What each slice has room for at the batch, by default the smallest, with each named dtype."""
    space, batches = request.space(), parse_batches(request.batch)
    batch = batches.least if batches.least == batches.most else None
    if request.batch is not None and batch is None:
        raise SpecError(
            f"--fit --batch '{request.batch}': the answer is that of one batch. Use a single number."
        )
    chunk, *others = space.chunks
    if others:
        raise SpecError(
            f"--fit --prefill-chunk '{request.prefill_chunk}': the answer is that of one chunk. Use one."
        )
    tried = (
        space.weight_dtypes[: None if request.weight_dtype else 1],
        space.cache_dtypes[: None if request.cache_dtype else 1],
    )
    workloads = [
        replace(space.workload, weight_dtype=weights, cache_dtype=cache)
        for weights, cache in product(*tried)
    ]
    answers = slice_fits(space.model, request.slices(), workloads, batch=batch, chunk=chunk)
    if not answers.fits:
        reasons = dict.fromkeys(answers.refused.values())
        raise SpecError(f"--topology {request.topology}: {' '.join(reasons)}")
    return answers


def _dtypes(option: str, text: str, dtype_of: Callable[[str], str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(dtype_of(name.strip()) for name in text.split(",") if name))
    if not names:
        raise SpecError(f"{option} '{text}' names no dtype. Use for example bf16,int8.")
    return names
