"""The legal plans of a model on a slice: every size of every axis, counted first and pruned with reasons.

The placement on the slice is that of the programs: device ids in row-major order over (pp, dp or fsdp,
cp, tp), tp innermost. Other orders of the axes are not plans of this tool.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshscope.errors import PlanError
from meshscope.model.model import Model
from meshscope.plans.checks import check_batch, check_model, check_weights
from meshscope.plans.chunks import divisors
from meshscope.plans.plan import Plan
from meshscope.plans.workload import Workload

# On large slices, the geometry of a plan takes milliseconds. These plans are left out there, by experience
# and not by proof: kernels take no block of fewer positions, and a deep pipeline idles while it fills.
LARGE_DEVICES = 1024
MIN_BLOCK_POSITIONS = 128
MAX_STAGES = 16
SMALL_BLOCKS = f"cp leaves blocks of fewer than {MIN_BLOCK_POSITIONS} positions"
DEEP_PIPELINE = f"more than {MAX_STAGES} pipeline stages"
INDIVISIBLE = "an axis does not divide a size of the model"
PROMPT_INDIVISIBLE = "cp or sp does not divide the prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpace:
    """The legal plans, the number of plans before any check, and the refused ones by reason."""

    n_counted: int
    plans: tuple[Plan, ...]
    n_refused: Mapping[str, int]


def plan_space(model: Model, n_devices: int, *, prompt: int) -> PlanSpace:
    """The plans that fill `n_devices` devices and divide the model and the prompt."""
    has_experts = model.moe is not None
    checked: dict[Plan, bool] = {}
    refused: Counter[str] = Counter()
    plans: list[Plan] = []
    n_counted = 0
    for plan in all_plans(n_devices, has_experts=has_experts):
        n_counted += 1
        if reason := _why_not(plan, model, prompt, checked):
            refused[reason] += 1
        else:
            plans.append(plan)
    return PlanSpace(n_counted=n_counted, plans=tuple(plans), n_refused=dict(refused))


def all_plans(n_devices: int, *, has_experts: bool) -> Iterator[Plan]:
    """Every plan that fills the devices, whether or not it divides a model."""
    for tp in divisors(n_devices):
        for cp in divisors(n_devices // tp):
            for pp in divisors(n_devices // (tp * cp)):
                data = n_devices // (tp * cp * pp)
                yield from _of_sizes(pp=pp, data=data, cp=cp, tp=tp, has_experts=has_experts)


def _of_sizes(*, pp: int, data: int, cp: int, tp: int, has_experts: bool) -> Iterator[Plan]:
    """The plans of four sizes: dp or fsdp, with and without sp, every size of ep."""
    sizes = (1, tp, data, data * tp) if has_experts else (1,)
    for axis in ("dp", "fsdp") if data > 1 else ("dp",):
        for ep in dict.fromkeys(sizes):
            for sp in (False, True) if tp > 1 else (False,):
                yield Plan(pp=pp, cp=cp, tp=tp, ep=ep, sp=sp, **{axis: data})


def _why_not(plan: Plan, model: Model, prompt: int, checked: dict[Plan, bool]) -> str | None:
    """The reason why the plan is refused; `checked` holds what was found about splits of the weights."""
    if plan.n_devices > LARGE_DEVICES and plan.pp > MAX_STAGES:
        return DEEP_PIPELINE
    if plan.n_devices > LARGE_DEVICES and plan.cp > 1 and prompt < plan.cp * MIN_BLOCK_POSITIONS:
        return SMALL_BLOCKS
    try:
        check_batch(plan, Workload(batch=plan.data_size, prompt=prompt))
    except PlanError:
        return PROMPT_INDIVISIBLE
    split = replace(plan, cp=1, sp=False, dp=plan.dp if "dp" in plan.expert_axes else 1)
    if split not in checked:
        checked[split] = _divides(split, model)
    return None if checked[split] else INDIVISIBLE


def _divides(plan: Plan, model: Model) -> bool:
    try:
        check_model(plan, model)
        check_weights(plan, model)
    except PlanError:
        return False
    return True
