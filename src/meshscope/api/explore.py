"""`meshscope.explore`: one offline page in which a user changes plan, slice and request, and sees the prediction."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from meshscope.api.console import WorkProgress, Written
from meshscope.api.options import option, optional_path, request, takes, text, text_or_number
from meshscope.api.plan import PlanRequest
from meshscope.api.request import AUTO, CompileRequest, PredictRequest
from meshscope.cost.predicted import has_figures
from meshscope.errors import SpecError
from meshscope.files import check_new, new_file
from meshscope.hardware.topology import Topology
from meshscope.plans.weights import device_weight_bytes
from meshscope.plans.workload import MAX_BATCH, MAX_CONTEXT
from meshscope.serialize import picked
from meshscope.serving.explorer import N_FRONTS, Settings, explorer_document
from meshscope.serving.grid import SearchProgress
from meshscope.serving.prices import LIST, LIST_NOTE, PRICES_HELP, prices_of
from meshscope.serving.servers import ServingEngine, serving_engine
from meshscope.serving.slices import parse_slices, slice_name
from meshscope.serving.space import Batches, SearchSpace, parse_batches
from meshscope.units import format_bytes, whole_number
from meshscope.workers import Progress

MAX_SIZES = 4  # slices of a chip that is named without a size
MAX_CHIPS = 64  # of them
MAX_SLICES = 12
MAX_LENGTHS = 8
MAX_BATCHES = 24
MAX_SERVED = 8  # lengths and precisions at which a server is simulated
DEFAULT_OUT = "explorer.html"


@request
class ExploreRequest:
    """The options of `explore`, by the names that the command line uses."""

    model: str = option(CompileRequest, converter=text, kw_only=False)
    topology: str = option(
        f"SLICES: Slices to choose from, v6e-8,tpu7x-16; a chip stands for its {MAX_SIZES} smallest that have room."
    )
    batch: str = option(
        "N|N:M[:STEP]: Sequences over all devices; with --server, requests in flight.",
        default="1:1024",
        flags=("--batch", "--concurrency"),
        converter=text_or_number,
    )
    prompt: str = option(
        "N,N,...: Input tokens to choose from.",
        default="128,512,1024,2048,8192,32768",
        converter=text_or_number,
    )
    output: str = option(
        "N,N,...: Output tokens to choose from.", default="128,512,2048", converter=text_or_number
    )
    dtype: str = option(CompileRequest, default=AUTO)
    weight_dtype: str | None = option(PlanRequest, default=None)
    cache_dtype: str | None = option(PlanRequest, default=None)
    server: str | None = option(PredictRequest, default=None)
    prices: str | None = option(f"{PRICES_HELP}, which the page can change.", default=LIST)
    out: Path | None = option(
        "FILE: The HTML file.",
        default=None,
        shown=DEFAULT_OUT,
        converter=optional_path,
        is_last=True,
    )
    force: bool = option("Replace an earlier FILE.", default=False, is_last=True)
    progress: Progress | None = option(CompileRequest, default=None)


def explore_request(request: ExploreRequest) -> Path:
    """Writes a page that predicts the good plans of a model for the slice, batch and lengths that its user sets.

    The page needs no server and makes no network requests. It has the figures of `predict`.

    Example:
        >>> meshscope.explore("Qwen/Qwen3-32B", topology="v6e,tpu7x", out="explorer.html")

    Returns:
        The path of the page.

    Raises:
        MeshscopeError: An option or the model is impossible, or the model fits no slice.
    """
    out = request.out or Path(DEFAULT_OUT)
    check_new(out, force=request.force)
    shared = ("model", "topology", "dtype", "weight_dtype", "cache_dtype", "prices")
    space = PlanRequest(**picked(request, *shared)).space()
    settings = Settings(
        **picked(space, "weight_dtypes", "cache_dtypes"),
        batches=tuple(_batches(parse_batches(request.batch))),
        prompts=_lengths("--prompt", request.prompt),
        outputs=_lengths("--output", request.output),
    )
    limit = space.model.max_position or MAX_CONTEXT
    prompts = tuple(n for n in settings.prompts if n <= limit - settings.outputs[-1])
    if not prompts:
        raise SpecError(
            f"prompt={settings.prompts[0]} and output={settings.outputs[-1]} need more positions than the {limit:,} of "
            f"{space.model.name}. Shorten one of them."
        )
    settings = replace(settings, prompts=prompts)
    slices = explored_slices(request.topology, space)
    server = None if request.server is None else _server(request.server, settings)
    progress = SearchProgress(request.progress, n_slices=len(slices), n_searches=N_FRONTS)
    document = explorer_document(space, slices, settings, progress, server=server)
    progress.done()
    from meshscope.reports.html.explorer_page import explorer_html  # it loads polars

    note = LIST_NOTE if request.prices == LIST else ""
    document["command"] = ["meshscope", "predict", shlex.quote(request.model)]
    page = explorer_html(document, prices_of(request.prices) or {}, note)
    with new_file(out, force=request.force) as partial:
        partial.write_text(page, encoding="utf-8")
    return out


explore = takes("explore", ExploreRequest, explore_request)


def _server(name: str, settings: Settings) -> ServingEngine:
    """The serving engine; SpecError if it would have to be simulated at too many sizes."""
    n_served = len(settings.prompts) * len(settings.outputs)
    n_served *= len(settings.weight_dtypes) * len(settings.cache_dtypes)
    if n_served > MAX_SERVED:
        raise SpecError(
            f"--server is simulated at each of the {n_served} combinations of lengths and precisions, and up to "
            f"{MAX_SERVED} are. Name fewer, such as --prompt 1024 --output 128 --weight-dtype bf16 --cache-dtype bf16."
        )
    return serving_engine(name)


def explored_slices(names: str, space: SearchSpace) -> list[Topology]:
    """The named slices, and of a chip or `any` the smallest ones that have room for the weights."""
    slices: list[Topology] = []
    for name in (word.strip() for word in names.split(",")):
        named = parse_slices(name)
        taken = named
        if len(named) > 1:
            by_chip: dict[str, list[Topology]] = {}
            for one in named:
                if one.n_chips <= MAX_CHIPS and has_room(space, one):
                    by_chip.setdefault(one.chip.name, []).append(one)
            taken = tuple(one for of_chip in by_chip.values() for one in of_chip[:MAX_SIZES])
            if not taken:
                raise SpecError(
                    f"the weights of {space.model.name} fit no slice of {name} with up to {MAX_CHIPS} chips. Name a "
                    f"larger one, such as {slice_name(named[-1])}, or a narrower --weight-dtype."
                )
        slices += taken
    slices = list(dict.fromkeys(slices))
    if len(slices) > MAX_SLICES:
        raise SpecError(
            f"--topology '{names}' names {len(slices)} slices, and a page has room for {MAX_SLICES}. Name fewer."
        )
    for one in slices:
        if not has_figures(one.chip, space.profile):
            raise SpecError(
                f"'{one.name}' has no published peaks, which predicted times need. Use a TPU or GPU slice."
            )
    return slices


def has_room(space: SearchSpace, topology: Topology) -> bool:
    """Whether the narrowest weights fit the devices of a slice with any plan."""
    limit, plans = topology.chip.device_hbm_bytes, replace(space, topology=topology).legal.plans
    needed = (device_weight_bytes(space.model, *of) for of in product(plans, space.weight_dtypes))
    return limit is None or any(n_bytes <= limit for n_bytes in needed)


def _batches(batches: Batches) -> Iterator[int]:
    """The numbers of a range with a step, else its powers of two."""
    least, most = batches.least, batches.most
    taken = list(range(least, most + 1, batches.step or 1))
    if batches.step is None and least < most:
        powers = (1 << power for power in range(MAX_BATCH.bit_length()))
        taken = [n for n in powers if least <= n <= most]
    if not 0 < len(taken) <= MAX_BATCHES:
        raise SpecError(
            f"--batch has {len(taken)} sizes to choose from; a page has room for 1 to {MAX_BATCHES}. "
            "Use a range such as 1:1024, whose powers of two count, or a larger step."
        )
    yield from taken


def _lengths(name: str, values: str) -> tuple[int, ...]:
    try:
        lengths = sorted({whole_number(word) for word in values.split(",")})
    except ValueError as error:
        raise SpecError(
            f"{name} '{values[:80]}' is no list of token counts. Use for example 512,1024,8192."
        ) from error
    if not 0 < lengths[0] <= lengths[-1] <= MAX_CONTEXT or len(lengths) > MAX_LENGTHS:
        raise SpecError(
            f"{name} '{values[:80]}': use 1 to {MAX_LENGTHS} lengths of 1 to {MAX_CONTEXT:,} tokens."
        )
    if name == "--output" and lengths[0] == 1:
        raise SpecError("--output 1 has no decode step to predict. Use at least 2.")
    return tuple(lengths)


def command(request: ExploreRequest) -> Written:
    """Write a page to explore plans, slices, times and costs.

    One HTML file that needs no network and no server. It has the figures of predict, computed in the page.
    """
    with WorkProgress() as progress:
        path = explore_request(replace(request, progress=progress))
    size = path.stat().st_size
    document = {"path": str(path), "file_bytes": size}
    return Written(document, f"wrote {path} ({format_bytes(size)})")
