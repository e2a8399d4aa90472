"""Closed forms of the plans of one search, which share costs and collectives wherever those are equal."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import numpy as np

from meshscope.cost.closed_form import PlanForm, plan_form
from meshscope.cost.features import Feature, plan_costs
from meshscope.cost.planned_collectives import CollectiveCost, with_weight_dtype
from meshscope.events.enums import Phase
from meshscope.hardware.topology import Topology
from meshscope.interconnect.profile import ChipProfile
from meshscope.model.model import Model
from meshscope.plans.experiment import Experiment
from meshscope.plans.plan import Plan
from meshscope.plans.program import Program
from meshscope.plans.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class FormKey:
    """What a closed form depends on beside model, slice and lengths.

    `n_microbatches` are those of the pipeline, and `is_split` says whether the decode batch is split over tp.
    `chunk` is that of prompts that cp splits and prefill cuts.
    """

    plan: Plan
    phase: Phase
    weight_dtype: str
    cache_dtype: str
    n_microbatches: int
    is_split: bool
    chunk: int | None = None


@dataclass(slots=True, kw_only=True)
class FormTable:
    """The forms of a search, each built when it is first asked for; `forms` are in that order."""

    model: Model
    topology: Topology
    workload: Workload  # lengths and activations; the rest is that of the key
    program: Program
    profile: ChipProfile | None = None
    forms: list[PlanForm] = field(default_factory=list[PlanForm])
    _index: dict[FormKey, int] = field(default_factory=dict[FormKey, int])
    _bases: dict[Hashable, PlanForm] = field(default_factory=dict[Hashable, PlanForm])
    _shared: dict[Hashable, tuple[CollectiveCost, ...]] = field(
        default_factory=dict[Hashable, tuple[CollectiveCost, ...]]
    )

    def index(self, key: FormKey, batch: int) -> int:
        """The position in `forms` of the form with this key; `batch` is one of its batches."""
        if key not in self._index:
            self._index[key] = len(self.forms)
            self.forms.append(self._form(key, batch))
        return self._index[key]

    def experiment(self, plan: Plan, workload: Workload) -> Experiment:
        """The experiment of a legal plan."""
        return Experiment(
            model=self.model,
            plan=plan,
            topology=self.topology,
            workload=workload,
            program=self.program,
        )

    def _form(self, key: FormKey, batch: int) -> PlanForm:
        workload = replace(
            self.workload,
            batch=batch,
            weight_dtype=key.weight_dtype,
            cache_dtype=key.cache_dtype,
            prefill_chunk=key.chunk,
        )
        experiment = self.experiment(key.plan, workload)
        base = self._base(key, experiment)
        kernels = experiment.kernels
        return replace(
            base,
            costs=plan_costs(experiment, key.phase, base.rates),
            collectives=self._collectives(key, base, experiment),
            n_microbatches=key.n_microbatches,
            has_kernel=kernels.prefill_attention.kernel is not None,
            reads_static_cache=kernels.decode_attention.kernel is None,
        )

    def _base(self, key: FormKey, experiment: Experiment) -> PlanForm:
        """The first form of the same plan and phase, which the others change in a few fields."""
        shared = (key.plan, key.phase, key.is_split, key.chunk)
        base = self._bases.get(shared)
        if base is None:
            base = plan_form(experiment, key.phase, profile=self.profile)
            self._bases[shared] = base
            self._shared[id(base), _gathered(key)] = base.collectives
        return base

    def _collectives(
        self, key: FormKey, base: PlanForm, experiment: Experiment
    ) -> tuple[CollectiveCost, ...]:
        """Those of one micro-batch; weights travel only in the gathers of fsdp."""
        of_dtype = (id(base), _gathered(key))
        if of_dtype not in self._shared:
            self._shared[of_dtype] = with_weight_dtype(base.collectives, experiment, key.phase)
        n = key.n_microbatches / base.n_microbatches
        if n == 1:
            return self._shared[of_dtype]
        of_both = (*of_dtype, n)
        if of_both not in self._shared:
            self._shared[of_both] = _of_microbatches(self._shared[of_dtype], n)
        return self._shared[of_both]


def _gathered(key: FormKey) -> str | None:
    """The dtype of the weights that fsdp gathers."""
    return key.weight_dtype if key.plan.fsdp > 1 else None


def _of_microbatches(
    collectives: tuple[CollectiveCost, ...], n: float
) -> tuple[CollectiveCost, ...]:
    """The collectives with `n` times as many micro-batches; those after the ticks carry all sequences."""
    factors = np.ones(len(Feature))
    factors[[Feature.SEQUENCES, Feature.TOKENS]] = n
    return tuple(replace(c, payload=c.payload * factors) if c.n_once else c for c in collectives)
