"""Which slice: whether a model fits on each of many, with how large a batch and context, and at what price.

The plans are those of serving: tp, dp and ep, without pipelines, fsdp and cp.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
from meshscope.planner.capacity import (
    LargestContext,
    largest_batch,
    largest_context,
    needed_bytes,
)
from meshscope.plans.chunks import ChunkRule, divisors
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.memory import Memory
from meshscope.plans.plan import Plan
from meshscope.plans.workload import Workload
from meshscope.prediction.memory import predicted_memory
from meshscope.units import decimal_number

ANY = "any"
MAX_ANY_CHIPS = 256  # of the slices that `any` means: a pod of v5e or v6e
N_TRIED = 2  # plans of a slice whose largest batch is searched, those with the most room


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFit:
    """What a slice has room for at the batch of `workload`, by default one sequence a data-parallel rank.

    `plan` is the plan with the largest batch at the lengths of the workload, `memory` that of the workload;
    both are of the plan that needs least if no batch fits. `context` is the largest at its batch.
    """

    topology: Topology
    plan: Plan
    workload: Workload
    memory: Memory
    largest_batch: int
    context: LargestContext
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


def parse_prices(text: str) -> dict[str, float]:
    """Prices per chip hour of `v6e=2.7,v5e=1.2`; SpecError for anything else."""
    prices: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = (word.strip() for word in item.partition("="))
        chip = chip_of(name).name
        if chip in prices:
            raise SpecError(f"--prices '{text}': {chip} appears twice. Give it once.")
        prices[chip] = _price(text, chip, value)
    return prices


def _price(text: str, chip: str, value: str) -> float:
    try:
        price = decimal_number(value)
    except ValueError:
        price = 0.0
    if not 0 < price < float("inf"):
        raise SpecError(
            f"--prices '{text}': {chip}='{value}' is no positive price. Use for example {chip}=2.7."
        )
    return price


def price_per_hour(topology: Topology, prices: Mapping[str, float] | None) -> float | None:
    """The price of a slice per hour, None if its chip has none; its number of chips without prices."""
    price = 1.0 if prices is None else prices.get(topology.chip.name)
    return None if price is None else topology.n_chips * price


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFits:
    """What slices have room for, and why others have no answer, by name."""

    fits: tuple[SliceFit, ...]
    refused: Mapping[str, str]


def slice_fits(
    model: Model,
    slices: Iterable[Topology],
    workloads: Sequence[Workload],
    *,
    batch: int | None = None,
    chunk: int | ChunkRule = ChunkRule.AUTO,
) -> SliceFits:
    """What each slice has room for with each workload, whose lengths and dtypes count."""
    fits, refused = list[SliceFit](), dict[str, str]()
    for topology in slices:
        for workload in workloads:
            try:
                fits.append(slice_fit(model, topology, workload, batch=batch, chunk=chunk))
            except MeshscopeError as error:
                refused[slice_name(topology)] = str(error)
    return SliceFits(fits=tuple(fits), refused=refused)


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
    most, best = max(((largest_batch(e), e) for e in roomy), key=lambda pair: pair[0])
    if not most:
        best = min(every, key=lambda e: needed_bytes(predicted_memory(e)))
    contexts = ((largest_context(experiment), experiment.plan) for experiment in roomy)
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
    """The experiments of all plans that fill the slice; with `batch` None, each with its smallest batch."""
    experiments, reasons = list[Experiment](), list[str]()
    for plan in _plans(model, topology.n_devices):
        n_tokens = chunk if isinstance(chunk, int) else None
        sizes = replace(workload, batch=batch or plan.data_size, prefill_chunk=n_tokens)
        try:
            experiment = experiment_of(model=model, plan=plan, topology=topology, workload=sizes)
        except (
            MeshscopeError
        ) as error:  # the plan does not divide the model, the batch or the chunk
            reasons.append(str(error))
            continue
        is_auto = chunk is ChunkRule.AUTO
        experiments.append(experiment.with_auto_chunk() if is_auto else experiment)
    if not experiments:
        *_, reason = reasons  # the plan with tp alone takes any batch
        at_batch = "" if batch is None else f" with batch {batch}"
        head = f"no plan of tp, dp and ep fills the slice{at_batch}: "
        raise SpecError(f"{head if len(set(reasons)) > 1 else ''}{reason}")
    return experiments


def _plans(model: Model, n_devices: int) -> Iterator[Plan]:
    """The plans of tp and dp in all sizes, with experts over none, either or both."""
    for tp in divisors(n_devices):
        dp = n_devices // tp
        for ep in dict.fromkeys((1, tp, dp, n_devices)) if model.moe is not None else (1,):
            yield Plan(tp=tp, dp=dp, ep=ep)


def _room(experiment: Experiment) -> float:
    """Batches like that of the experiment that the memory has room for, by its share of the cache."""
    memory = predicted_memory(experiment)
    assert memory.hbm_bytes is not None
    assert memory.kv_cache_bytes is not None
    free_bytes = memory.hbm_bytes - needed_bytes(memory)
    return free_bytes / memory.kv_cache_bytes * experiment.workload.batch
