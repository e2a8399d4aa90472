"""What a search enumerates: the legal plans of a model on a slice, batches, precisions and chunks.

The placement on the slice is the programs': device ids in row-major order over (pp, dp or fsdp,
cp, tp), tp innermost. Other orders of the axes are not plans of this tool.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import lcm

from meshscope.analysis.utilization import model_flops, n_parameters
from meshscope.errors import PlanError, SpecError
from meshscope.events.enums import Phase
from meshscope.hardware.chips import product_speedup
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.hardware.topology import Topology
from meshscope.model.model import Model
from meshscope.plans.checks import check_axes, check_batch, check_model, check_weights
from meshscope.plans.chunks import DEFAULT_CHUNK, ChunkRule, divisors
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import Plan, Tables
from meshscope.plans.program import Program
from meshscope.plans.weights import device_weight_bytes
from meshscope.plans.workload import MAX_BATCH, Workload
from meshscope.units import whole_number

MAX_LOCAL_BATCH = 1024  # sequences of one data-parallel rank
MAX_COMBINATIONS = 20_000_000  # about 3 GB while they are ranked
CHUNK_LIMITS = (DEFAULT_CHUNK, DEFAULT_CHUNK // 4)  # the default, and vLLM's on v6e
# On large slices, the geometry of a plan takes milliseconds. These plans are left out there, by experience
# and not by proof: kernels take no block of fewer positions, and a deep pipeline idles while it fills.
LARGE_DEVICES = 1024
MIN_BLOCK_POSITIONS = 128
MAX_STAGES = 16
SMALL_BLOCKS = f"cp leaves blocks of fewer than {MIN_BLOCK_POSITIONS} positions"
DEEP_PIPELINE = f"more than {MAX_STAGES} pipeline stages"
INDIVISIBLE = "an axis does not divide a size of the model"
NO_AXIS = "the model has no programs with an axis"
PROMPT_INDIVISIBLE = "cp or sp does not divide the prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Sequences over all devices from `least` to `most`.

    They are the data axis of a plan times powers of two, or, with a `step`, each of `least`,
    `least` + `step` and so on that the data axis divides. A single number is that batch alone.
    """

    least: int = 1
    most: int = MAX_BATCH
    step: int | None = None

    def of(self, data_size: int) -> Sequence[int]:
        """The batches of a plan with this data axis, smallest first."""
        if self.least == self.most:
            return () if self.least % data_size else (self.least,)
        if self.step is not None:
            firsts = range(self.least, self.most + 1, self.step)[:data_size]
            first = next((n for n in firsts if n % data_size == 0), self.most + 1)
            return range(first, self.most + 1, lcm(self.step, data_size))
        powers = (1 << power for power in range(MAX_LOCAL_BATCH.bit_length()))
        return tuple(data_size * n for n in powers if self.least <= data_size * n <= self.most)


def parse_batches(text: str | int | None) -> Batches:
    """The batches of `--batch 64`, `8:256` or `8:256:8`; all for None. SpecError for anything else."""
    if text is None:
        return Batches()
    least, separator, rest = str(text).partition(":")
    most, has_step, step = rest.partition(":")
    try:
        first = whole_number(least or "1" if separator else least)
        last = whole_number(most or str(MAX_BATCH)) if separator else first
        every = whole_number(step) if has_step else None
    except ValueError as error:
        raise SpecError(
            f"--batch '{text}' is neither a number nor a range. Use for example 64, 8:256 or 8:256:8."
        ) from error
    if not 1 <= first <= last <= MAX_BATCH:
        raise SpecError(
            f"--batch '{text}' is empty or out of range. Use sizes from 1 to {MAX_BATCH:,}, the smaller first."
        )
    if every is not None and every < 1:
        raise SpecError(f"--batch '{text}': a step of {every} is too small. Use at least 1.")
    return Batches(least=first, most=last, step=every)


@dataclass(frozen=True, kw_only=True)  # without slots, so that it keeps what it derives
class SearchSpace:
    """What a search varies: the plans, batches and precisions for prompts and outputs of one length."""

    model: Model
    topology: Topology
    workload: Workload  # prompt, output and activations
    batches: Batches
    weight_dtypes: tuple[str, ...]
    cache_dtypes: tuple[str, ...]
    chunks: tuple[int | ChunkRule, ...] = (ChunkRule.AUTO,)  # of prefill
    program: Program = field(default_factory=Program)
    profile: ChipProfile | None = None
    n_first_layers: int | None = None  # of a truncated model

    @property
    def chunk_rules(self) -> tuple[tuple[int | ChunkRule, int], ...]:
        """The chunks to try, each with a limit in tokens, which AUTO has two of.

        For prompts that cp splits, the second one of AUTO stands for whole prompts.
        """
        return tuple(
            (chunk, limit)
            for chunk in self.chunks
            for limit in (CHUNK_LIMITS if chunk is ChunkRule.AUTO else CHUNK_LIMITS[:1])
        )

    @cached_property
    def least_s(self) -> tuple[float, float]:
        """Seconds that prefill and a decode step take at least, in any plan: all chips at their peak rates.

        The smallest batch has its prompts multiplied with the active weights, and the weights that one token
        needs, in the narrowest format, are read once. Without attention, communication and overheads.
        """
        chip, n_chips = self.topology.chip, self.topology.n_chips
        if not chip.bf16_flops_per_s or not chip.hbm_bytes_per_s or self.profile is not None:
            return (0.0, 0.0)
        one, two = (
            model_flops(self.model, Workload(prompt=n, output=2), Phase.PREFILL) for n in (1, 2)
        )
        n_total, n_active, n_embedding = n_parameters(self.model)
        speedup = max(product_speedup(dtype, chip) for dtype in self.weight_dtypes)
        flops_s = (two - one) * self.batches.least * self.workload.prompt
        flops_s /= chip.bf16_flops_per_s * speedup * n_chips
        weight_bytes = min(device_weight_bytes(self.model, Plan(), d) for d in self.weight_dtypes)
        # Embeddings have two bytes in every format, or fewer, and are not read as a whole.
        read_bytes = max(0, weight_bytes - 2 * n_embedding) * (n_active - n_embedding)
        read_s = read_bytes / (n_total - n_embedding) / (chip.hbm_bytes_per_s * n_chips)
        return max(flops_s, read_s), read_s

    @cached_property
    def legal(self) -> "PlanSpace":
        """The plans that fill the slice and divide the model and the prompt."""
        return plan_space(self.model, self.topology.n_devices, prompt=self.workload.prompt)

    @cached_property
    def n_combinations(self) -> int:
        """Combinations of the legal plans with batches, precisions and chunks; SpecError for too many."""
        n = sum(map(self.n_combinations_of, self.legal.plans))
        if n > MAX_COMBINATIONS:
            raise SpecError(
                f"the search on {self.topology.name} has {n:,} combinations of {len(self.legal.plans):,} plans with "
                f"batch, precision and chunk, and ranks at most {MAX_COMBINATIONS:,}. Narrow --batch, or name fewer "
                "dtypes and chunks."
            )
        return n

    def n_combinations_of(self, plan: Plan) -> int:
        """Combinations of a plan, before any check."""
        n_dtypes = len(self.weight_dtypes) * len(self.cache_dtypes)
        n_batches = len(self.batches.of(plan.data_size))
        return n_batches * n_dtypes * len(self.chunk_rules)

    def experiment(self, plan: Plan, workload: Workload) -> Experiment:
        """The experiment of a legal plan."""
        return Experiment(
            model=self.model,
            plan=plan,
            topology=self.topology,
            workload=workload,
            program=self.program,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpace:
    """The legal plans, the number of plans before any check, and the refused ones by reason."""

    n_counted: int
    plans: tuple[Plan, ...]
    n_refused: Mapping[str, int]


def plan_space(model: Model, n_devices: int, *, prompt: int) -> PlanSpace:
    """The plans that fill `n_devices` devices and divide the model and the prompt."""
    checked, refused, plans = dict[Plan, bool](), Counter[str](), list[Plan]()
    has_tables = model.engram is not None
    for plan in all_plans(n_devices, has_experts=model.moe is not None, has_tables=has_tables):
        if reason := _why_not(plan, model, prompt, checked):
            refused[reason] += 1
        else:
            plans.append(plan)
    n_counted = len(plans) + refused.total()
    return PlanSpace(n_counted=n_counted, plans=tuple(plans), n_refused=dict(refused))


def all_plans(n_devices: int, *, has_experts: bool, has_tables: bool = False) -> Iterator[Plan]:
    """Every plan that fills the devices, whether or not it divides a model, with each placement of tables."""
    sizes = (
        (tp, cp, pp, n_devices // (tp * cp * pp))
        for tp in divisors(n_devices)
        for cp in divisors(n_devices // tp)
        for pp in divisors(n_devices // (tp * cp))
    )
    for tp, cp, pp, data in sizes:
        for axis in ("dp", "fsdp") if data > 1 else ("dp",):
            for ep in dict.fromkeys((1, tp, data, data * tp) if has_experts else (1,)):
                # Tables over an axis of size 1, or of all devices, are no other placement.
                whole = {1, n_devices}
                places = {Tables.TP: tp, Tables.DP: data, Tables.HOST: 0} if has_tables else {}
                tables = (Tables.ALL, *(place for place, n in places.items() if n not in whole))
                for sp, of in product((False, True) if tp > 1 else (False,), tables):
                    yield Plan(pp=pp, cp=cp, tp=tp, ep=ep, sp=sp, tables=of, **{axis: data})


def _why_not(plan: Plan, model: Model, prompt: int, checked: dict[Plan, bool]) -> str | None:
    """The reason why the plan is refused; `checked` holds what was found about splits of the weights."""
    if plan.n_devices > LARGE_DEVICES and plan.pp > MAX_STAGES:
        return DEEP_PIPELINE
    if plan.n_devices > LARGE_DEVICES and plan.cp > 1 and prompt < plan.cp * MIN_BLOCK_POSITIONS:
        return SMALL_BLOCKS
    try:
        check_axes(plan, model, prompt)
    except PlanError:
        return NO_AXIS
    try:
        check_batch(plan, Workload(batch=plan.data_size, prompt=prompt))
    except PlanError:
        return PROMPT_INDIVISIBLE
    split = replace(plan.of_weights, pp=plan.pp)
    if split not in checked:
        try:
            check_model(split, model)
            check_weights(split, model)
            checked[split] = True
        except PlanError:
            checked[split] = False
    return None if checked[split] else INDIVISIBLE
