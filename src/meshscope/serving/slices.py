"""Which slice: on which a model fits, with how large a batch and context, and the cheapest for an objective.

A fit considers serving plans only: tp, dp and ep, without pipelines, fsdp and cp. The cheapest slice is the
best over all plans.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from meshscope.cost import memory as capacity
from meshscope.cost.memory import predicted_memory
from meshscope.errors import MeshscopeError, SpecError
from meshscope.hardware.chips import CHIPS, ChipKind, chip_of
from meshscope.hardware.topology import (
    Topology,
    cloud_name,
    every_slice,
    parse_topology,
    standard_slices,
)
from meshscope.model.model import Model
from meshscope.plans.chunks import ChunkRule
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.memory import Memory
from meshscope.plans.plan import Plan
from meshscope.plans.workload import Workload
from meshscope.serialize import picked
from meshscope.serving.grid import SearchProgress, SecondProcess
from meshscope.serving.objective import Goal, Objective, pareto_front
from meshscope.serving.prices import TokenPrices, batch_prices, price_per_hour
from meshscope.serving.search import Choice, PlanSearch, search
from meshscope.serving.space import SearchSpace, all_plans
from meshscope.units import format_seconds
from meshscope.workers import Progress

ANY = "any"
MAX_ANY_CHIPS = 256  # of the slices that `any` means: a pod of v5e or v6e
MAX_UNMET = 150_000  # combinations without an answer, about a minute, after which no larger slice is searched
N_TRIED = 2  # plans of a slice, with the most room, whose largest batch is searched


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFit:
    """What a slice has room for at the batch of `workload`, by default one sequence a data-parallel rank.

    `plan` has the largest batch at the lengths of the workload, and `memory` is its memory for the workload; if
    no batch fits, both are for the plan that needs least. `context` is the largest at its batch.
    """

    topology: Topology
    plan: Plan
    workload: Workload
    memory: Memory
    largest_batch: int
    context: capacity.LargestContext
    context_plan: Plan

    @property
    def name(self) -> str:
        """The cloud's name of the slice, or its grid if it has none."""
        return slice_name(self.topology)


def slice_name(topology: Topology) -> str:
    """The cloud's name of a standard slice, e.g. `v6e-8`, else chip and grid."""
    if topology.chip.kind is ChipKind.TPU and topology in standard_slices(topology.chip):
        return cloud_name(topology.chip, topology.n_chips)
    return topology.name


def parse_slices(text: str) -> tuple[Topology, ...]:
    """The slices of `any`, of a chip (`v6e`), or of a list (`v6e-8,v5p-16`), each once."""
    slices: list[Topology] = []
    for name in (word.strip() for word in text.split(",")):
        if name == ANY:
            slices += [t for t in every_slice() if t.n_chips <= MAX_ANY_CHIPS]
        elif name.lower() in CHIPS and chip_of(name).kind is ChipKind.TPU:
            slices += standard_slices(chip_of(name))
        else:
            slices.append(parse_topology(name))
    return tuple(dict.fromkeys(slices))


def slice_fits(
    model: Model,
    slices: Iterable[Topology],
    workloads: Sequence[Workload],
    *,
    batch: int | None = None,
    chunk: int | ChunkRule = ChunkRule.AUTO,
) -> tuple[list[SliceFit], dict[str, str]]:
    """What each slice has room for with each workload, whose lengths and dtypes count, and why others have no answer."""
    fits, refused = list[SliceFit](), dict[str, str]()
    for topology in slices:
        for workload in workloads:
            try:
                fits.append(slice_fit(model, topology, workload, batch=batch, chunk=chunk))
            except MeshscopeError as error:
                refused[slice_name(topology)] = str(error)
    return fits, refused


def slice_fit(
    model: Model,
    topology: Topology,
    workload: Workload,
    *,
    batch: int | None = None,
    chunk: int | ChunkRule = ChunkRule.AUTO,
) -> SliceFit:
    """What one slice has room for; SpecError if its HBM is unknown, or no plan fills it with `batch`."""
    if topology.chip.device_hbm_bytes is None:
        raise SpecError(f"the HBM of {topology.chip.name} is unknown. Use a TPU slice.")
    every = _experiments(model, topology, workload, batch=batch, chunk=chunk)
    roomy = sorted(every, key=_room, reverse=True)[:N_TRIED]
    most, best = max(((capacity.largest_batch(e), e) for e in roomy), key=lambda pair: pair[0])
    if not most:
        best = min(every, key=lambda e: capacity.needed_bytes(predicted_memory(e)))
    contexts = ((capacity.largest_context(experiment), experiment.plan) for experiment in roomy)
    context, longest = max(contexts, key=lambda pair: pair[0].positions)
    return SliceFit(
        topology=topology,
        plan=best.plan,
        workload=best.workload,
        memory=predicted_memory(best),
        largest_batch=most,
        context=context,
        context_plan=longest,
    )


def _experiments(
    model: Model,
    topology: Topology,
    workload: Workload,
    *,
    batch: int | None,
    chunk: int | ChunkRule,
) -> list[Experiment]:
    experiments, reasons = list[Experiment](), list[str]()
    parts = {"has_experts": model.moe is not None, "has_tables": model.engram is not None}
    n_tokens = chunk if isinstance(chunk, int) else None
    for plan in all_plans(topology.n_devices, **parts):
        if not plan.pp == plan.cp == plan.fsdp == 1 or plan.sp:
            continue
        sizes = replace(workload, batch=batch or plan.data_size, prefill_chunk=n_tokens)
        try:
            one = experiment_of(model=model, plan=plan, topology=topology, workload=sizes)
            experiments.append(one.with_auto_chunk() if chunk is ChunkRule.AUTO else one)
        except MeshscopeError as error:  # the plan does not divide model, batch or chunk
            reasons.append(str(error))
    if not experiments:
        *_, reason = reasons  # the plan with tp alone takes any batch
        at_batch = "" if batch is None else f" with batch {batch}"
        head = f"no plan of tp, dp and ep fills the slice{at_batch}: "
        raise SpecError(f"{head if len(set(reasons)) > 1 else ''}{reason}")
    return experiments


def _room(experiment: Experiment) -> float:
    """Sequences beyond the batch that memory has room for, from the cache bytes of each."""
    memory = predicted_memory(experiment)
    assert memory.hbm_bytes is not None
    assert memory.kv_cache_bytes is not None
    free_bytes = memory.hbm_bytes - capacity.needed_bytes(memory)
    return free_bytes / memory.kv_cache_bytes * experiment.workload.batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSearch:
    """The searches of the slices that were tried, cheapest first.

    With limits, or without prices, the last slices have the same price, and at least one of them meets the
    objective; none does if `best` is None. `n_skipped` slices are more expensive and were not searched, as one
    meets the objective or after MAX_UNMET combinations that do not, and `n_too_slow` are above the limits even
    at their peak rates. The chips `unpriced` have no price.
    """

    searches: tuple[PlanSearch, ...]
    best: PlanSearch | None
    n_skipped: int
    n_too_slow: int
    unpriced: tuple[str, ...]
    prices: Mapping[str, float] | None

    @property
    def has_limits(self) -> bool:
        """Whether a latency is limited."""
        return self.searches[0].objective.has_limits

    @property
    def closest(self) -> PlanSearch | None:
        """The search whose closest choice exceeds the limits by the smallest factor."""
        known = [(s, one) for s in self.searches if (one := s.closest) is not None]
        excess = [s.objective.excess(one.ttft_s, one.tpot_s) for s, one in known]
        return known[excess.index(min(excess))][0] if known else None

    @property
    def shown(self) -> PlanSearch:
        """The best search, else the closest, else the largest slice's."""
        return self.best or self.closest or self.searches[-1]

    def price(self, result: PlanSearch) -> float:
        """The price of a slice per hour; its number of chips without prices."""
        return price_per_hour(result.space.topology, self.prices) or 0.0

    def price_per_million(self, result: PlanSearch) -> float | None:
        """The price of a million output tokens of the best choice, with one batch of requests at a time."""
        if self.prices is None or result.winner is None:
            return None
        n_per_hour = result.winner.tokens_per_s_per_chip * result.space.topology.n_chips * 3600
        return 1e6 * self.price(result) / n_per_hour

    def token_prices(self, result: PlanSearch, choice: Choice | None = None) -> TokenPrices | None:
        """What tokens of a choice cost, by default of the best, with one batch of requests at a time."""
        choice = choice or result.winner
        if self.prices is None or choice is None:
            return None
        sizes = picked(choice.experiment.workload, "batch", "prompt", "output")
        batch = sizes | picked(choice, "ttft_s", "e2e_s")
        return batch_prices(result.space.topology, batch, self.prices)

    def frontier(self) -> list[tuple[Choice, TokenPrices]]:
        """Choices of all slices that no other beats in TPOT and in the price of output tokens, the fastest first."""
        every = [(one, self.token_prices(s, one)) for s in self.searches for one in s.front]
        priced = [(one, prices) for one, prices in every if prices is not None]
        figures = [(one.tpot_s, prices.output, 0.0) for one, prices in priced]
        return [priced[row] for row in pareto_front(np.reshape(figures, (-1, 3)))]


def search_slices(
    space: SearchSpace,
    slices: Iterable[Topology],
    objective: Objective,
    prices: Mapping[str, float] | None = None,
    callback: Progress | None = None,
) -> SliceSearch:
    """The best plan on the cheapest slice that meets the objective, of equally cheap ones by its goal.

    With prices and without limits, all slices are searched, and the best has the lowest price of a token, or
    the shortest request. The topology of `space` is replaced by each of the slices. `callback` gets the
    progress of a long search.
    """
    every = tuple(slices)
    priced = {t: price for t in every if (price := price_per_hour(t, prices)) is not None}
    unpriced = tuple(dict.fromkeys(t.chip.name for t in every if t not in priced))
    if not priced:
        raise SpecError(
            f"--prices has no price of {', '.join(unpriced)}, which --topology names. "
            f"Add {unpriced[0]}=PRICE per chip hour."
        )
    spaces = {t: replace(space, topology=t) for t in sorted(priced, key=priced.__getitem__)}
    ordered = tuple(t for t, one in spaces.items() if is_reachable(one, objective))
    if not ordered:
        raise unreachable(tuple(spaces.values()), objective)
    progress, searches = SearchProgress(callback, n_slices=len(ordered)), list[PlanSearch]()
    best: PlanSearch | None = None
    takes_first = objective.has_limits or prices is None  # the cheapest that meets the objective
    with SecondProcess() as second:
        for _, group in groupby(ordered, key=priced.__getitem__):
            results = [search(spaces[t], objective, progress, second) for t in group]
            searches += results
            if takes_first:
                best = min((r for r in results if r.winner is not None), key=_rank, default=None)
                is_long = sum(result.n_combinations for result in searches) >= MAX_UNMET
                if best is not None or is_long:
                    break
    progress.done()
    result = SliceSearch(
        searches=tuple(searches),
        best=best,
        n_skipped=len(ordered) - len(searches),
        n_too_slow=len(spaces) - len(ordered),
        unpriced=unpriced,
        prices=prices,
    )
    if takes_first:
        return result
    is_throughput = objective.goal is Goal.THROUGHPUT
    rank = (lambda one: result.price_per_million(one) or 0.0) if is_throughput else _rank
    able = (one for one in searches if one.winner is not None)
    return replace(result, best=min(able, key=rank, default=None))


def unreachable(spaces: Sequence[SearchSpace], objective: Objective) -> SpecError:
    """The error that no slice's peak rates allow the limits, with the best slice for each."""
    prefill = "prefill of {} prompt tokens, at the peak FLOP and HBM rates,"
    decode = "a decode step, which reads the weights at the peak HBM rate,"
    limits = (("ttft", objective.ttft_s, prefill), ("tpot", objective.tpot_s, decode))
    reasons = list[str]()
    for at, (name, limit_s, what) in enumerate(limits):
        best = min(spaces, key=lambda space: space.least_s[at])
        if limit_s is not None and limit_s < best.least_s[at]:
            tokens = f"{best.batches.least * best.workload.prompt:,}"
            reasons.append(
                f"{name}={limit_s:g} is not possible: {what.format(tokens)} takes at least "
                f"{format_seconds(best.least_s[at])}, on {slice_name(best.topology)}"
            )
    why = "; ".join(reasons) or "no slice allows both limits at its peak rates"
    return SpecError(f"--slo: {why}. Use larger limits.")


def is_reachable(space: SearchSpace, objective: Objective) -> bool:
    """Whether the peak rates of the slice allow the limits."""
    return bool(objective.meets(*space.least_s))


def _rank(result: PlanSearch) -> float:
    winner, n_chips = result.winner, result.space.topology.n_chips
    assert winner is not None
    return result.objective.cost(winner.e2e_s, winner.tokens_per_s_per_chip * n_chips)
