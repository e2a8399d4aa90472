"""`meshscope.serve_sim`: continuous batching under load, simulated with predicted step times."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from meshscope.api.console import Shown, note
from meshscope.api.options import (
    NO_CONDITIONS,
    changed_options,
    flag_of,
    hints_of,
    numbers,
    option,
    optional_choice,
    optional_path,
    refuse,
    request,
    takes,
    text,
)
from meshscope.api.records import chip_profile
from meshscope.api.request import (
    AUTO,
    CompileRequest,
    ExperimentRequest,
    PredictRequest,
    idle_option,
)
from meshscope.cost.predicted import has_figures
from meshscope.errors import SpecError, read_only
from meshscope.files import check_new, new_file, path_of
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.hardware.topology import parse_topology
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import DEFAULT_FRONTEND, Frontend
from meshscope.reports.export.benchmark_report import benchmark_report
from meshscope.reports.loads import SIMULATED, load_document, load_lines
from meshscope.reports.model import wrapped
from meshscope.reports.serving import (
    left_out_text,
    program_lines,
    rate_verdict,
    serving_document,
    serving_lines,
)
from meshscope.serialize import picked, to_plain
from meshscope.serving.apart import ApartServer, TransferPath, cache_transfer
from meshscope.serving.benchmarks import BenchResult
from meshscope.serving.engine import check_longest
from meshscope.serving.load import (
    MAX_REQUESTS,
    Arrivals,
    Lengths,
    Load,
    conversation_load,
    random_load,
    read_quantiles,
    recorded_load,
)
from meshscope.serving.loads import (
    REQUESTS_IN_FLIGHT,
    LoadTable,
    load_table,
    parse_loads,
    requests_of,
)
from meshscope.serving.objective import objective_of
from meshscope.serving.placed import Place, place_of
from meshscope.serving.prices import (
    LIST,
    LIST_NOTE,
    PRICES_HELP,
    TokenPrices,
    prices_of,
    served_prices,
)
from meshscope.serving.servers import ENGINES, ServingEngine, serving_engine
from meshscope.serving.simulation import (
    LeftOut,
    PlacedPool,
    ServingOutcome,
    fitted_host,
    reach_sizes,
    simulated_apart,
    simulated_load,
)

DEFAULT_REQUESTS = 1000
MAX_INSTANCES = 256
PAGE = ".html"
_COMPILED = (
    "model",
    "dtype",
    "weight_dtype",
    "cache_dtype",
    "layers",
    "frontend",
    "engine_version",
)
_RATIO = re.compile(r"([0-9]+):([0-9]+)")


@request
class ServeRequest:
    """The options of `serve-sim`, by the names of the command line."""

    model: str = option(ExperimentRequest, converter=text, kw_only=False)
    topology: str = option(ExperimentRequest)
    plan: str = option(
        ExperimentRequest, help="One plan, or several with / between them: tp=8/dp=2,tp=4."
    )
    server: str | None = option(PredictRequest, default=None)
    compiled: bool = option(
        "Step times of programs of --frontend, compiled for the sizes that the load reaches, and the memory of all.",
        default=False,
        flags=("--compile",),
    )
    frontend: Frontend = option(ExperimentRequest, default=DEFAULT_FRONTEND)
    engine_version: str | None = option(CompileRequest, default=None)
    instances: int = option(
        "N: Identical instances, used in turn.", default=1, least=1, most=MAX_INSTANCES
    )
    apart: str | None = option(
        "P:D: Instances that only prefill, and those that decode; not --instances.", default=None
    )
    prefill_topology: str | None = option(
        "SLICE: Slice of an instance that prefills.", default=None, shown="--topology"
    )
    prefill_plan: str | None = option("PLAN: Its plan.", default=None, shown="--plan")
    transfer: TransferPath | None = option(
        "Path of caches from prefill to decode.",
        default=None,
        shown="dcn",
        converter=optional_choice(TransferPath),
    )
    transfer_rate: float | None = option(
        "GB/S: Rate at which a host moves caches over DCN: 4.5 for jax.experimental.transfer.",
        default=None,
        least=0.01,
        most=1000,
        shown="of its network",
    )
    rate: str | None = option(
        "R|R:S[:STEP]|R,...: Requests per second, over all instances; several make a table.",
        default=None,
        converter=numbers,
    )
    arrivals: str = option(
        "poisson|burst|FILE: Random arrivals, or an Azure, BurstGPT or Mooncake trace.",
        default=Arrivals.POISSON.value,
        converter=text,
    )
    max_concurrency: str | None = option(
        "N|N:M[:STEP]|N,...: Most requests in flight; the others wait at the client. Several make a table.",
        default=None,
        flags=("--max-concurrency", "--concurrency"),
        converter=numbers,
    )
    requests: int | None = option(
        "N: Requests.",
        default=None,
        least=1,
        most=MAX_REQUESTS,
        shown=f"{DEFAULT_REQUESTS}; in a table, {REQUESTS_IN_FLIGHT} for each in flight",
    )
    prompt: int = option("Mean input tokens of a request.", default=1024, least=1)
    output: int = option("Mean output tokens of a request.", default=128, least=1)
    lengths: str = option(
        "fixed|geometric|uniform|FILE: Distribution of both; uniform is within 1/9 of the means. FILE has quantiles.",
        default=Lengths.FIXED.value,
        converter=text,
    )
    slo: str | None = option("LIMITS: Limits in seconds, ttft=0.5,tpot=0.03.", default=None)
    dtype: str = option(ExperimentRequest, default=AUTO)
    weight_dtype: str | None = option(ExperimentRequest, default=None)
    cache_dtype: str | None = option(ExperimentRequest, default=None)
    layers: int | None = option(ExperimentRequest, default=None)
    max_sequences: int = option(
        "N: Sequences of an engine in a step.", default=256, least=1, most=1 << 16
    )
    max_step_tokens: int = option(
        "N: Tokens of an engine in a step, prompts included.", default=2048, least=16, most=1 << 20
    )
    separate_steps: bool = option(
        "Steps that either prefill or decode, prefill first.", default=False
    )
    reserve_output: float = option(
        "FRAC: Share of each output that the cache must have room for at admission.",
        default=0.0,
        least=0,
        most=1,
    )
    prefix_hit: float | None = option(
        "FRAC: Share of each prompt in the prefix cache, instead of what prompts share.",
        default=None,
        least=0,
        most=1,
        shown="from a simulated cache",
    )
    turns: int = option(
        "N: Turns of a conversation, each with all that came before in its prompt.",
        default=1,
        least=1,
        most=1000,
    )
    think_time: float = option(
        "S: Mean seconds between an answer and the next turn, exponentially distributed.",
        default=0.0,
        least=0,
        most=1e6,
    )
    host_overhead: float = option(
        "S: Seconds of the host, added to every step.", default=0.0, least=0, most=10
    )
    memory_frac: float = option(
        "FRAC: Share of the HBM for weights and KV cache.", default=0.9, least=0, most=1
    )
    seed: int = option("Seed of arrivals and lengths.", default=0, least=0)
    prices: str | None = option(f"{PRICES_HELP}, for the price of tokens.", default=None)
    profile: Path | None = option(ExperimentRequest, default=None, converter=optional_path)
    out: Path | None = option(
        "FILE: Also write the figures as a Benchmark Report 0.2.1, in YAML, or several loads as a page with a plot, .html.",
        default=None,
        converter=optional_path,
        is_last=True,
    )
    force: bool = option("Replace an earlier FILE.", default=False, is_last=True)

    @property
    def rates(self) -> tuple[float, ...]:
        """Requests per second."""
        return parse_loads(self.rate, "--rate", least=1e-6, most=1e6)

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """Most requests in flight."""
        text, most = self.max_concurrency, float(MAX_REQUESTS)
        loads = parse_loads(text, "--max-concurrency", least=1, most=most, is_whole=True)
        return tuple(map(int, loads))

    @property
    def plans(self) -> tuple[str, ...]:
        """The plans to compare."""
        return tuple(dict.fromkeys(one.strip() for one in self.plan.split("/")))

    @property
    def has_several(self) -> bool:
        """Whether several plans or loads are compared in a table."""
        return max(map(len, (self.plans, self.rates, self.concurrencies))) > 1

    @property
    def engine(self) -> ServingEngine | None:
        """The serving engine, by default that of the front end; None for an ideal one."""
        is_of_engine = self.frontend in {engine.name for engine in ENGINES}
        name = self.server or (self.frontend if is_of_engine else None)
        return None if name is None else serving_engine(name)

    @property
    def ratio(self) -> tuple[int, int] | None:
        """Instances that prefill and instances that decode; None if all do both."""
        if self.apart is None:
            return None
        match = _RATIO.fullmatch(self.apart.strip())
        n_prefill, n_decode = map(int, match.groups()) if match else (0, 0)
        if not 1 <= min(n_prefill, n_decode) <= max(n_prefill, n_decode) <= MAX_INSTANCES:
            raise SpecError(
                f"--apart '{self.apart}' is not PREFILL:DECODE with 1 to {MAX_INSTANCES} instances each. "
                "Use for example 1:3."
            )
        return n_prefill, n_decode


@read_only
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServingRun:
    """The result of `meshscope.serve_sim`: its figures are in `outcome.result`, typed.

    With several plans or loads, `table` has all of them, and `outcome` is the knee of the best plan.
    """

    request: ServeRequest
    outcome: ServingOutcome
    table: LoadTable | None = None

    def as_dict(self) -> dict[str, Any]:
        """The document of `--json`: the answer first, then the conditions."""
        options = picked(
            self.request, *(n for n in hints_of(ServeRequest) if n not in NO_CONDITIONS)
        )
        loads = {"rate": self.request.rates, "max_concurrency": self.request.concurrencies}
        options |= {name: of[0] for name, of in loads.items() if len(of) == 1}
        request = {n: str(v) if isinstance(v, Path) else to_plain(v) for n, v in options.items()}
        document = serving_document(self.outcome, request)
        if self.request.prices is not None:
            document["token_prices"] = to_plain(self.token_prices)
        return document if self.table is None else {"loads": load_document(self.table), **document}

    @property
    def token_prices(self) -> TokenPrices | None:
        """What a million tokens cost under this load; None without a price of the chip."""
        main, prompt = self.outcome.main, self.outcome.mean_tokens[0]
        prices = prices_of(self.request.prices)
        figures = self.outcome.result.figures
        return None if prices is None else served_prices(main, figures, prompt, prices)

    def _price_lines(self) -> Iterator[str]:
        prices, chip = self.token_prices, self.outcome.main.experiment.topology.chip.name
        at_list = " at list prices" if prices and self.request.prices == LIST else ""
        if self.request.prices is not None:
            yield f"cost      {prices or f'unknown: no price of {chip} is given'}{at_list}"
        if self.request.prices == LIST:
            yield from wrapped(LIST_NOTE)

    def lines(self, *, full: bool = False) -> Iterator[str]:
        """The text of the command, line by line; `full` adds conditions and details."""
        if self.table is not None:
            verdict = f"at the knee: {rate_verdict(self.outcome.result)}"
            below = [] if self.table.is_closed else wrapped(verdict)
            below = [*below, *self._price_lines(), *program_lines(self.outcome)]
            prices = prices_of(self.request.prices)
            yield from load_lines(self.table, is_full=full, prices=prices, below=below)
            if not full:
                return
            yield ""
        yield from serving_lines(self.outcome, is_full=full)
        yield from self._price_lines()

    def __repr__(self) -> str:
        return "\n".join(self.lines())


def serve_sim_request(request: ServeRequest) -> ServingRun:
    """Simulates a server of this plan under load: continuous batching with predicted step times.

    Example:
        >>> served = meshscope.serve_sim("Qwen/Qwen3-32B", topology="v6e-8", plan="tp=8", rate=10.0)
        >>> served.outcome.result.figures.ttft.p99_s

    Returns:
        Percentiles of TTFT, TPOT and ITL, goodput, utilization and the stable rate.

    Raises:
        MeshscopeError: An option, the model or the plan is impossible, or the chip has no published
            figures.
    """
    if request.out is None:
        return benchmarked_run(request)
    check_new(request.out, force=request.force)
    run = benchmarked_run(request)
    if run.table is not None and request.out.suffix == PAGE:
        from meshscope.reports.html.page import loads_html  # only a page needs it

        text = loads_html(run.table, prices_of(request.prices))
    else:
        text = benchmark_report(run.outcome)
    with new_file(request.out, force=request.force) as partial:
        partial.write_text(text, encoding="utf-8")
    return run


def benchmarked_run(request: ServeRequest, bench: BenchResult | None = None) -> ServingRun:
    """The simulation of the request, with the host's time fitted to a benchmark if there is one."""
    _check_options(request)
    prices_of(request.prices)  # refused before the simulation
    if not request.has_several:
        return _served_run(request, bench)
    table = _table(request)
    curve, name = table.winner, "max_concurrency" if table.is_closed else "rate"
    at_knee = {name: numbers(curve.knee.load), "requests": curve.knee.n_requests}
    run = _served_run(replace(request, plan=curve.plan, **at_knee), placed=curve.placed)
    return replace(run, request=request, table=table)


serve_sim = takes("serve_sim", ServeRequest, serve_sim_request)


def _table(request: ServeRequest) -> LoadTable:
    is_closed = len(request.concurrencies) > 1 or not request.rates
    places, left_out = list[Place](), dict[str, str]()
    for plan in request.plans:
        try:
            places.append(_place(request, request.topology, plan, request.instances))
        except SpecError as error:
            if len(request.plans) == 1:
                raise
            left_out[plan] = str(error)
    if not places:
        raise SpecError(" ".join(dict.fromkeys(left_out.values())))
    least = min(places, key=lambda one: one.blocks.n_tokens)

    def load_of(one: float) -> Load:
        asked: dict[str, Any] = {"max_concurrency" if is_closed else "rate": numbers(one)}
        if request.requests is None and is_closed:
            asked["requests"] = requests_of(one)
        return _fitting(_load(replace(request, **asked))[0], [least])[0]

    loads = request.concurrencies if is_closed else request.rates
    several = {one: load_of(one) for one in loads}
    longest = max(map(_longest, several.values()))
    placed = [place.pool(longest) for place in places]
    if request.compiled:
        for one, load in several.items():
            for of_plan in placed:
                reach_sizes(load, of_plan.pool, int(one) if is_closed else None)
        placed = [
            _compiled(request, one, next(iter(several.values())), places[0].profile)
            for one in placed
        ]
    return load_table(
        placed,
        loads,
        load_of,
        objective_of(request.slo),
        is_closed=is_closed,
        server=request.engine,
        profile=places[0].profile,
        left_out=left_out,
    )


def _compiled(
    request: ServeRequest, placed: PlacedPool, load: Load, profile: ChipProfile | None
) -> PlacedPool:
    """The engines with the times of programs for the sizes that they have reached."""
    prompt, how = round(load.n_prompt.mean()), picked(request, *_COMPILED)
    programs = import_module("meshscope.api.serve_programs")  # it loads the backends
    return programs.with_programs(placed, prompt, how, profile)


def _longest(load: Load) -> int:
    return int((load.n_prompt + load.n_output).max())


def _served_run(
    request: ServeRequest, bench: BenchResult | None = None, placed: PlacedPool | None = None
) -> ServingRun:
    objective = objective_of(request.slo)
    load, n_empty = _load(request)
    ratio, (limit,) = request.ratio, request.concurrencies or (None,)
    n_decode = request.instances if ratio is None else ratio[1]
    places = [_place(request, request.topology, request.plan, n_decode)]
    if ratio is not None:
        topology, plan = request.prefill_topology, request.prefill_plan
        where = (topology or request.topology, plan or request.plan, ratio[0])
        places.append(_place(request, *where, is_prefill=True))
    load, left_out = _fitting(load, places)
    longest = max(_longest(load), 0 if bench is None else bench.prompt + bench.output)
    main, *prefills = (place.pool(longest) for place in places)
    main = placed or main
    if request.compiled and placed is None and not prefills:
        reach_sizes(load, main.pool, limit)
        main = _compiled(request, main, load, places[0].profile)
    prefill, host_fit, transfer = None, None, None
    if bench is not None:
        host_fit = fitted_host(bench, main.pool)
        policy = replace(main.pool.policy, host_s=host_fit.host_s)
        main = replace(main, pool=replace(main.pool, policy=policy))
    if not prefills:
        result = simulated_load(load, main.pool, objective, max_concurrency=limit)
    else:
        (prefill,), profile = prefills, places[0].profile
        transfer = cache_transfer(
            prefill.experiment,
            main.experiment,
            request.transfer or TransferPath.DCN,
            profile and profile.constants,
        )
        if request.transfer_rate is not None:
            transfer = replace(transfer, host_bytes_per_s=request.transfer_rate * 1e9)
        if request.compiled:
            ApartServer(
                load=load,
                prefill_pool=prefill.pool,
                decode_pool=main.pool,
                transfer=transfer,
                max_concurrency=limit,
            ).run()
            prefill, main = (_compiled(request, one, load, profile) for one in (prefill, main))
        result = simulated_apart(
            load,
            prefill=prefill.pool,
            decode=main.pool,
            transfer=transfer,
            objective=objective,
            max_concurrency=limit,
        )
    flight = "" if limit is None else f", at most {limit:,} in flight"
    mean_tokens = float(load.n_prompt.mean()), float(load.n_output.mean())
    is_named, is_random = request.lengths in set(Lengths), request.arrivals in set(Arrivals)
    means = (request.prompt, request.output) if is_named else mean_tokens
    sizes = ", prompt {:.0f}, output {:.0f}".format(*means) + f" ({request.lengths})"
    arrivals = "at once" if is_random and request.rate is None else request.arrivals
    outcome = ServingOutcome(
        main=main,
        prefill=prefill,
        transfer=transfer,
        load=f"{load.n_requests:,} requests, {arrivals}{flight}{sizes if is_random else ''}",
        mean_tokens=mean_tokens,
        objective=objective,
        left_out=replace(left_out, n_empty=n_empty),
        host_fit=host_fit,
        result=result,
        server=request.engine,
    )
    return ServingRun(request=request, outcome=outcome)


def _check_options(request: ServeRequest) -> None:
    is_page = request.out is not None and request.out.suffix == PAGE
    refuse(
        (request.force and request.out is None, "--force replaces the FILE of --out: add it."),
        (
            is_page and not request.has_several,
            f"--out {request.out} is a page of several loads or plans. Give them, or a .yaml FILE.",
        ),
        (
            request.transfer_rate is not None and request.transfer is TransferPath.ICI,
            "--transfer-rate limits hosts on DCN. Omit it, or use --transfer dcn.",
        ),
        (
            len(request.rates) > 1 and len(request.concurrencies) > 1,
            "--rate and --max-concurrency both name several loads. Give one value of one of them.",
        ),
        (
            request.has_several and request.apart,
            "--apart simulates one load of one plan. Give one --rate, --max-concurrency and --plan.",
        ),
        (
            request.prices is not None and request.apart,
            "--prices is for instances that prefill and decode. Omit --prices, or --apart.",
        ),
        (
            request.turns > 1 and request.apart,
            "--turns keeps a conversation's cache where its next turn goes. Omit --turns, or --apart.",
        ),
        (
            request.turns == 1 and request.think_time,
            "--think-time is between turns. Add --turns, such as --turns 5.",
        ),
        *(
            (
                not request.compiled and name in changed_options(request),
                f"{flag_of(name)} is the program of --compile: add it, or use --server for an engine's policy.",
            )
            for name in ("frontend", "engine_version")
        ),
        (
            request.max_step_tokens < request.max_sequences,
            f"--max-step-tokens {request.max_step_tokens} is less than --max-sequences {request.max_sequences}. Raise it.",
        ),
        (
            request.engine is not None and request.host_overhead,
            f"--server {request.server} brings its own host time. Omit --host-overhead, or --server.",
        ),
        (
            request.apart is not None and request.instances != 1,
            "--apart gives the numbers of instances. Omit --instances.",
        ),
        *(
            (
                request.apart is None and value is not None,
                f"{flag_of(name)} {value} needs instances that only prefill. Add --apart 1:1.",
            )
            for name in ("prefill_topology", "prefill_plan", "transfer", "transfer_rate")
            for value in [getattr(request, name)]
        ),
    )


def _place(
    request: ServeRequest, topology: str, plan: str, n_instances: int, *, is_prefill: bool = False
) -> Place:
    """Instances with one sequence on each data-parallel rank, and a prompt that the axes of the plan split."""
    parsed = parse_plan(plan).filled(parse_topology(topology).n_devices)
    n_shards = parsed.cp * (parsed.tp if parsed.sp else 1)
    experiment = ExperimentRequest(
        topology=topology,
        plan=plan,
        batch=parsed.data_size,
        prompt=-(-request.prompt // n_shards) * n_shards,
        **picked(request, "model", "output", "dtype", "weight_dtype", "cache_dtype", "layers"),
    ).experiment()
    chip = experiment.topology.chip
    profile = chip_profile(request.profile, chip)
    if not has_figures(chip, profile):
        raise SpecError(
            f"{chip.name} has no published figures for times. Give --profile FILE, as 'meshscope calibrate' "
            "writes it."
        )
    limits = ("max_sequences", "max_step_tokens", "memory_frac")
    given: dict[str, Any] = {n: v for n, v in changed_options(request).items() if n in limits}
    given["prefix_hit_frac"] = request.prefix_hit or 0.0
    if request.engine is None:
        given |= picked(request, *limits[:2]) | {"host_s": request.host_overhead}
    # Instances of an ideal engine that only prefill need no room for outputs.
    if request.reserve_output and not (is_prefill and request.engine is None):
        given["reserved_frac"] = request.reserve_output
    if request.separate_steps:
        given["has_mixed_steps"] = False
    where = {"profile": profile, "n_instances": n_instances}
    return place_of(experiment, request.engine, **where, **given)


def _load(request: ServeRequest) -> tuple[Load, int]:
    """The requests, and the number of those in a trace that have no tokens."""
    n_requests = DEFAULT_REQUESTS if request.requests is None else request.requests
    (rate,), changed = request.rates or (None,), changed_options(request)
    is_trace, is_named = request.arrivals not in set(Arrivals), request.lengths in set(Lengths)
    said = (
        f"'{request.arrivals}' is a trace" if is_trace else f"'{request.lengths}' has the lengths"
    )
    idle = ("lengths", "seed", "turns", "think_time") if is_trace else ("prompt", "output")
    for name in idle:
        if name in changed and (is_trace or not is_named):
            raise idle_option(name, changed[name], said)
    if is_trace:
        file = path_of(request.arrivals)
        load, n_empty = recorded_load(file, rate_per_s=rate, n_requests=n_requests)
        return (load if request.prefix_hit is None else load.unshared()), n_empty
    if request.rate is None and request.max_concurrency is None:
        raise SpecError(
            "--rate is missing. Give requests per second, such as --rate 4, or --max-concurrency."
        )
    load = random_load(
        Arrivals(request.arrivals).burstiness,
        rate_per_s=rate,
        n_requests=n_requests,
        lengths=Lengths(request.lengths) if is_named else read_quantiles(path_of(request.lengths)),
        **picked(request, "prompt", "output", "seed"),
    )
    if request.turns > 1:
        load = conversation_load(load, request.turns, request.think_time, request.seed)
        load = load if request.prefix_hit is None else load.unshared()
    return load, 0


def _fitting(load: Load, places: Sequence[Place]) -> tuple[Load, LeftOut]:
    """The requests within the context of the model and the caches, and the numbers of others."""
    n_total = load.n_prompt + load.n_output
    most = places[0].experiment.model.max_position
    in_context = np.ones(load.n_requests, bool) if most is None else n_total <= most
    if most is not None and not in_context.any():
        raise SpecError(
            f"the shortest request has {int(n_total.min()):,} tokens, and {places[0].experiment.model.name} "
            f"has {most:,} positions. Use shorter requests."
        )
    in_cache = in_context.copy()
    for place, n_tokens in zip(places, (n_total, load.n_prompt + 1), strict=False):
        check_longest(int(n_tokens[in_context].min()), place.blocks)
        in_cache &= n_tokens <= place.blocks.n_tokens
    if load.conversations is not None and not in_cache.all():
        raise SpecError(
            f"the longest conversation has {int(n_total.max()):,} tokens, more than the context of the model or "
            "the cache. Use fewer --turns or shorter ones."
        )
    left_out = LeftOut(
        n_beyond_context=int((~in_context).sum()),
        n_beyond_cache=int((in_context & ~in_cache).sum()),
    )
    return load.only(in_cache), left_out


def command(*, request: ServeRequest) -> Shown:
    """Simulate a server under load: TTFT, TPOT, goodput.

    Continuous batching with a paged KV cache and chunked prefill on the slice, with step times of the
    closed form. docs/serving.md describes the model and what it leaves out.
    """
    run = serve_sim_request(request)
    if request.out is not None:
        note(f"wrote {request.out}")
    if left_out := left_out_text(run.outcome):
        note(f"left out: {left_out}")
    views = (lambda _: run.lines(), lambda _: run.lines(full=True))
    return Shown(
        run.as_dict, *views, basis=SIMULATED if run.table and not run.request.compiled else ""
    )
