"""Speculative decoding: a draft proposes k tokens, and the model verifies them in one step.

The step is that of a decode with k + 1 tokens for each sequence, which read its cache once. With a
probability `acceptance` for each drafted token, independently of the others, a step yields
(1 - acceptance^(k + 1)) / (1 - acceptance) tokens on average (Leviathan et al., arXiv 2211.17192,
equation 1).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from meshscope.cost.closed_form import PlanForm, plan_form
from meshscope.cost.features import Cost
from meshscope.cost.predicted import evaluated
from meshscope.cost.rates import rates_of
from meshscope.errors import SpecError
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.events.step_time import TimeEstimate
from meshscope.interconnect.profile import ChipProfile
from meshscope.prediction import predict
from meshscope.prediction.memory import predicted_memory
from meshscope.spec.experiment import Experiment, experiment_of
from meshscope.spec.model.flops import has_linear_attention
from meshscope.spec.model.model import Layer, MlpKind, Model
from meshscope.spec.plan.caches import device_cache_bytes
from meshscope.spec.plan.memory import Memory
from meshscope.spec.plan.weights import device_weight_bytes, layer_bytes
from meshscope.units import DTYPE_BITS


class DraftMethod(StrEnum):
    """What proposes the tokens."""

    MTP = "mtp"  # the multi-token prediction layer of the model's checkpoint
    EAGLE = "eagle"  # one dense layer of the model's attention (arXiv 2401.15077)
    DRAFT = "draft"  # another model


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A draft of `n_drafted` tokens a step, each accepted with probability `acceptance`.

    `draft` is the other model of the method `draft`.
    """

    method: DraftMethod
    n_drafted: int
    acceptance: float
    draft: Model | None = None

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens of a sequence that a step yields."""
        if self.acceptance == 1:
            return self.n_drafted + 1.0
        return (1 - self.acceptance ** (self.n_drafted + 1)) / (1 - self.acceptance)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeStep:
    """One step of speculative decoding: `n_drafted` steps of the draft and one that verifies.

    `plain` is the decode step without speculation. `memory_bytes` is what the draft adds on a device;
    `fits` is None if the chip's memory is unknown. Rows are those of one step each.
    """

    speculation: Speculation
    verify: TimeEstimate
    draft: TimeEstimate
    plain: TimeEstimate
    verify_rows: tuple[Collective, ...]
    draft_rows: tuple[Collective, ...]
    memory_bytes: int
    fits: bool | None

    @property
    def step_s(self) -> float:
        """Seconds of a step: the drafts one after the other, then the verification."""
        return self.verify.value_s + self.speculation.n_drafted * self.draft.value_s

    @property
    def tpot_s(self) -> float:
        """Seconds per output token of a sequence."""
        return self.step_s / self.speculation.tokens_per_step

    @property
    def gain(self) -> float:
        """The plain time per token over that with speculation."""
        return self.plain.value_s / self.tpot_s


def speculative_step(
    experiment: Experiment, speculation: Speculation, profile: ChipProfile | None = None
) -> SpeculativeStep:
    """The predicted step; SpecError if the model has no such draft, or the plan cannot hold it."""
    if has_linear_attention(experiment.model):
        raise SpecError(
            f"{experiment.model.name}: --speculate does not support linear attention, whose state cannot drop "
            "the tokens that a verification rejects. Drop the option."
        )
    n_tokens = speculation.n_drafted + 1
    wide = _with_batch(experiment, experiment.workload.batch * n_tokens)
    draft, projection_bytes = _draft(experiment, speculation)
    form = plan_form(wide, Phase.DECODE, profile=profile)
    draft_form = plan_form(draft, Phase.DECODE, profile=profile)
    memory_bytes = _memory_bytes(experiment, draft, speculation) + projection_bytes
    base = predicted_memory(experiment)
    rates = rates_of(experiment.topology.chip, profile)
    return SpeculativeStep(
        speculation=speculation,
        verify=_time(_cache_read_once(form, n_tokens), wide),
        draft=_later(_time(draft_form, draft), projection_bytes / rates.hbm_bytes_per_s),
        plain=_time(plan_form(experiment, Phase.DECODE, profile=profile), experiment),
        verify_rows=_decode_rows(wide),
        draft_rows=_decode_rows(draft),
        memory_bytes=memory_bytes,
        fits=_fits(base, memory_bytes),
    )


def _fits(base: Memory, more_bytes: int) -> bool | None:
    if base.hbm_bytes is None or base.total_bytes is None:
        return None
    return base.total_bytes + more_bytes <= base.hbm_bytes


def _with_batch(experiment: Experiment, batch: int) -> Experiment:
    """The experiment with this many sequences, each token of a step being one."""
    return replace(experiment, workload=replace(experiment.workload, batch=batch))


def _cache_read_once(form: PlanForm, n_tokens: int) -> PlanForm:
    """The form of a decode in which `n_tokens` tokens share one read of their sequence's cache."""
    coefficients = form.costs.coefficients.copy()
    coefficients[:, Cost.CACHE_BYTES, :] /= n_tokens
    return replace(form, costs=replace(form.costs, coefficients=np.asarray(coefficients)))


def _time(form: PlanForm, experiment: Experiment) -> TimeEstimate:
    return evaluated(form, experiment.workload)[1]


def _later(time: TimeEstimate, seconds: float) -> TimeEstimate:
    """The time with these seconds added."""
    return TimeEstimate(
        value_s=time.value_s + seconds,
        low_s=None if time.low_s is None else time.low_s + seconds,
        high_s=None if time.high_s is None else time.high_s + seconds,
    )


def _decode_rows(experiment: Experiment) -> tuple[Collective, ...]:
    rows: Iterable[Collective] = predict(experiment)
    return tuple(row for row in rows if row.phase is Phase.DECODE)


def _draft(experiment: Experiment, speculation: Speculation) -> tuple[Experiment, int]:
    """The draft on the same plan, and the bytes of the projection that joins its two inputs."""
    model, workload = experiment.model, experiment.workload
    match speculation.method:
        case DraftMethod.DRAFT:
            assert speculation.draft is not None
            draft, projection = speculation.draft, 0
            workload = replace(workload, weight_dtype=draft.default_weight_dtype)
        case DraftMethod.MTP:
            draft, projection = _one_layer(model, _mtp_layer(model)), _projection_bytes(experiment)
        case DraftMethod.EAGLE:
            draft, projection = (
                _one_layer(model, _eagle_layer(model)),
                _projection_bytes(experiment),
            )
    checked = experiment_of(
        model=draft,
        plan=replace(experiment.plan, ep=1) if draft.moe is None else experiment.plan,
        topology=experiment.topology,
        workload=workload,
        program=experiment.program,
        engine=experiment.engine,
        device_order=experiment.device_order,
    )
    return checked, projection


def _mtp_layer(model: Model) -> Layer:
    """The layer after the last, which has its kind."""
    if not model.n_mtp_layers:
        raise SpecError(
            f"--speculate mtp: {model.name} has no layer for multi-token prediction "
            "(num_nextn_predict_layers). Use eagle or draft:MODEL."
        )
    return model.layers[-1]


def _eagle_layer(model: Model) -> Layer:
    if model.ffn is None:
        raise SpecError(
            f"--speculate eagle: {model.name} has no dense layer whose width an EAGLE head would have. "
            "Use mtp or draft:MODEL."
        )
    return replace(model.layers[0], mlp=MlpKind.DENSE)


def _one_layer(model: Model, layer: Layer) -> Model:
    """The model with this layer alone, between the embedding and the head that it shares."""
    moe = None if layer.mlp is MlpKind.DENSE else model.moe
    return replace(model, layers=(layer,), moe=moe)


def _projection_bytes(experiment: Experiment) -> int:
    """Bytes of the replicated matrix [2D, D] that joins an embedding and a hidden state."""
    bits = DTYPE_BITS[experiment.workload.activation_dtype]
    return 2 * experiment.model.hidden**2 * bits // 8


def _memory_bytes(experiment: Experiment, draft: Experiment, speculation: Speculation) -> int:
    """Weights and cache of the draft on a device; embedding and head are the model's unless it is another."""
    dtype = draft.workload.weight_dtype
    if speculation.method is DraftMethod.DRAFT:
        weights = device_weight_bytes(draft.model, draft.plan, dtype)
    else:
        weights = layer_bytes(draft.model, draft.plan, draft.model.layers[0], dtype)
    return weights + device_cache_bytes(draft.model, draft.plan, experiment.workload)
