"""Temporary buffers of a compiled program on one device, from closed formulas.

The parts are those that a program keeps live in HBM at once: the residual stream, the buffers of the
block that needs most, and gathered or copied weights. docs/evidence/memory.md compares them with the compiler's
memory analysis.

Letters: T tokens of a device in a chunk of prefill or a decode step, D residual width, F width of an MLP
or an expert on the device, N heads on the device, K key and value heads, H width of a head, V vocabulary.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from meshscope.events.enums import Phase
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.compiler_facts import compiler_facts
from meshscope.model.arrays import Dim, Weight
from meshscope.model.mechanisms.attention import AttentionStep
from meshscope.model.model import Model
from meshscope.model.quantization import activation_dtype_of, ragged_dtype_of
from meshscope.plans.caches import device_cache_bytes
from meshscope.plans.dispatch import FUSED_BLOCK_TOKENS, Dispatch, DispatchForm
from meshscope.plans.experiment import Experiment
from meshscope.plans.kernel_choice import Kernel
from meshscope.plans.program import Engine, Partitioner
from meshscope.plans.stages import stored_layers
from meshscope.plans.weights import (
    expert_weights,
    head_weight,
    layer_weights,
    outer_weights,
    padded_vocab,
)
from meshscope.prediction.meshscope_engine import attention_step
from meshscope.units import DTYPE_BITS

F32_BYTES = 4

# The rules and the margins of the interval were made with some cases of benchmarks/memory_grid.csv and are
# judged by the others (docs/evidence/memory.md).
N_WHOLE = (
    3  # inputs and outputs of a dense block and of its reduction, beside the residual stream itself
)
# On-chip memory, in which the compiler keeps the buffers of a dense block as far as they fit: one and a half
# times the VMEM of a v5e and a v6e, which buffers use one after the other; assumed for other chips, too.
VMEM_BYTES = 128 * 2**20  # scaling book, part 2, tpus.md
ON_CHIP_BYTES = VMEM_BYTES * 3 // 2
N_BRANCH_COPIES = 2  # the cache before and after the branch of a stage
LOW, HIGH = 0.45, 1.4
SMALL_BYTES = 64 * 2**20  # beyond the margin


@dataclass(frozen=True, slots=True, kw_only=True)
class TempParts:
    """Bytes of temporary buffers on one device by what they hold; the block with the most counts."""

    residual: float  # the residual stream and the embeddings of layers, which sp splits
    whole: float  # the input or the output of a block: the residual stream of all tokens
    attention: float  # queries, keys, values and outputs of a layer, or of its linear attention
    scores: float  # attention scores, where no kernel avoids them
    mlp: float  # the two intermediates of a dense MLP
    experts: float  # rows of experts before and after their exchange, and their intermediates
    logits: float
    gathered: float  # the largest matrix that fsdp gathers
    layer: (
        float  # the weights of a layer that unrolled programs fetch ahead, as far as VMEM has room
    )
    stacked: float  # projections of linear attention, whose stack scanned programs copy into another layout
    converted: float  # weights of 8 bits in the dtype of their matrix product
    branches: float  # copies of the cache in the branches of a pipeline's stages


@dataclass(frozen=True, slots=True, kw_only=True)
class TempEstimate:
    """Bytes of temporary buffers on one device, with the interval that the judged programs justify."""

    value_bytes: int
    low_bytes: int
    high_bytes: int


def why_no_estimate(experiment: Experiment) -> str | None:
    """The reason why temporary buffers have no estimate; None if they have one."""
    program, chip = experiment.program, experiment.topology.chip
    if experiment.engine is not Engine.MESHSCOPE:
        return f"--engine {experiment.engine} has other programs"
    if not program.frontend.is_own:
        return f"--frontend {program.frontend} has no formulas"
    if program.partitioner is not Partitioner.MANUAL and experiment.model.moe is not None:
        return f"--partitioner {program.partitioner} chooses how experts exchange their rows"
    return None if chip.kind is ChipKind.TPU else f"the formulas are those of TPUs, not {chip.name}"


def temp_estimate(experiment: Experiment) -> TempEstimate | None:
    """Temporary buffers of the phase that needs most; None without formulas."""
    if why_no_estimate(experiment) is not None:
        return None
    return max(
        (phase_estimate(experiment, phase) for phase in experiment.phases),
        key=lambda estimate: estimate.high_bytes,
    )


def phase_estimate(experiment: Experiment, phase: Phase) -> TempEstimate:
    """Temporary buffers of one phase."""
    parts = temp_parts(experiment, phase)
    block = parts.attention + parts.scores + parts.mlp
    dense = max(0.0, parts.residual + N_WHOLE * parts.whole + block - ON_CHIP_BYTES)
    routed = parts.residual + parts.whole + parts.experts if parts.experts else 0.0
    value = max(dense, routed) + parts.gathered + parts.layer + parts.stacked + parts.converted
    value += parts.branches
    return TempEstimate(
        value_bytes=round(value),
        low_bytes=round(LOW * value),
        high_bytes=round(HIGH * value + SMALL_BYTES),
    )


def temp_parts(experiment: Experiment, phase: Phase) -> TempParts:
    """The parts of a phase, in bytes on one device."""
    step = attention_step(experiment, phase, is_cut=experiment.has_cut_prompts)
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    act = DTYPE_BITS[workload.activation_dtype] / 8
    n_streams = model.hyper.n_streams if model.hyper is not None else 1
    of_layers = 0 if model.layer_inputs is None else model.layer_inputs.width * model.n_layers
    split = plan.tp if plan.sp and phase is Phase.PREFILL else 1
    logits = step.n_sequences * padded_vocab(model, plan) * F32_BYTES
    return TempParts(
        residual=step.n_tokens * (model.hidden * n_streams + of_layers) * act / split,
        whole=step.n_tokens * model.hidden * n_streams * act,
        attention=max(model.attention_of(layer).step_bytes(step) for layer in set(model.layers)),
        scores=_scores_elements(experiment, step) * F32_BYTES,
        mlp=2 * step.n_tokens * _widest_mlp(model) / plan.tp * act,
        experts=_experts_elements(experiment, phase, step.n_tokens) * act,
        logits=logits,
        gathered=_gathered_elements(experiment) * act if plan.fsdp > 1 else 0,
        layer=0 if experiment.is_scanned else min(VMEM_BYTES, _layer_elements(experiment) * act),
        stacked=_stacked_elements(experiment) * act if experiment.is_scanned else 0,
        converted=_converted_bytes(experiment, act),
        branches=0 if plan.pp == 1 else N_BRANCH_COPIES * device_cache_bytes(model, plan, workload),
    )


def _widest_mlp(model: Model) -> int:
    """The width of the widest MLP; 0 if no layer has one."""
    return max((model.ffn_of(layer) for layer in set(model.layers) if layer.has_mlp), default=0)


def _scores_elements(experiment: Experiment, step: AttentionStep) -> float:
    """Attention scores of one layer in float32; none if a kernel computes them block by block."""
    kernels, attention = experiment.kernels, experiment.model.attention
    choice = kernels.prefill_attention if step.is_prefill else kernels.decode_attention
    if choice.kernel is not None:
        return 0
    n_heads = attention.n_heads / experiment.plan.tp
    return n_heads * step.n_tokens * attention.score_keys(step)


def _experts_elements(experiment: Experiment, phase: Phase, n_tokens: int) -> float:
    """Rows of experts, before and after them, and their two intermediates; with an exchange, also the other side's.

    Buffers of an exchange have more bytes than the sums of 8-bit rows, which exist before it returns them.
    """
    model, plan, moe = experiment.model, experiment.plan, experiment.model.moe
    if moe is None:
        return 0
    width = moe.ffn if "tp" in plan.expert_axes else moe.ffn / plan.tp
    dispatch = experiment.dispatch(phase)
    if dispatch is None:
        n_rows = n_tokens * min(moe.n_active, moe.n_experts // plan.ep)
        return n_rows * ((1 + _sum_elements(experiment)) * model.hidden + 2 * width)
    if dispatch.form is DispatchForm.FUSED:
        return _fused_elements(experiment, dispatch)
    n_sent, n_received = dispatch.n_rows, dispatch.n_buffer_rows
    return 2 * (n_sent + n_received) * model.hidden + 2 * n_received * width


def _sum_elements(experiment: Experiment) -> float:
    """Elements that take as many bytes as a sum of XLA's kernel of experts, which are wide for 8-bit rows."""
    workload, choice = experiment.workload, experiment.kernels.experts
    is_narrow = activation_dtype_of(workload.weight_dtype) is not None
    has_sums = is_narrow and choice is not None and choice.kernel is Kernel.RAGGED_DOT
    return F32_BYTES * 8 / DTYPE_BITS[workload.activation_dtype] if has_sums else 1


def _fused_elements(experiment: Experiment, dispatch: Dispatch) -> int:
    """Buffers of a fused kernel: of the rows that each of its experts may get and returns, and of all results.

    Beyond a share of the HBM, fewer experts have one at a time.
    """
    n_block = min(FUSED_BLOCK_TOKENS, dispatch.n_tokens)
    of_expert = 2 * dispatch.n_ranks * n_block
    n_results = dispatch.n_ranks * dispatch.n_local_experts * n_block
    return (dispatch.n_local_experts * of_expert + n_results) * experiment.model.hidden


def _gathered_elements(experiment: Experiment) -> int:
    """The largest matrix that fsdp gathers."""
    model, plan = experiment.model, experiment.plan
    layers = (layer_weights(model, plan, layer) for layer in dict.fromkeys(model.layers))
    every = (weight for weights in (outer_weights(model, plan), *layers) for weight in weights)
    gathered = (weight for weight in every if weight.fsdp_dim(plan) is not None)
    return max((prod(weight.gathered_shape(plan)) for weight in gathered), default=0)


def _converted_bytes(experiment: Experiment, act: float) -> float:
    """The head, or a layer's matrix of experts for a kernel that does not read their dtype."""
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    if DTYPE_BITS[workload.weight_dtype] >= DTYPE_BITS[workload.activation_dtype]:
        return 0
    head = prod(head_weight(model, plan).local_shape(plan)) * act
    facts = compiler_facts(experiment.topology.chip.name)
    of_kernel = ragged_dtype_of(workload.weight_dtype)
    if model.moe is None or of_kernel in facts.ragged_dot_dtypes.value:
        return head
    experts = max(prod(weight.local_shape(plan)) for weight in expert_weights(model))
    return max(head, experts * F32_BYTES)


def _layer_elements(experiment: Experiment) -> int:
    """The weights of the largest layer on one device, without experts."""
    model, plan = experiment.model, experiment.plan
    return max(
        sum(prod(weight.local_shape(plan)) for weight in _dense(layer_weights(model, plan, layer)))
        for layer in dict.fromkeys(model.layers)
    )


def _stacked_elements(experiment: Experiment) -> int:
    """Weights of all layers on one device whose stacks are copied."""
    model, plan = experiment.model, experiment.plan
    return sum(
        n_layers * prod(weight.local_shape(plan))
        for layer, n_layers in stored_layers(model, plan.pp).items()
        for weight in layer_weights(model, plan, layer)
        if weight.name in model.attention_of(layer).copied_stacks
    )


def _dense(weights: Iterable[Weight]) -> Iterator[Weight]:
    return (weight for weight in weights if Dim.EXPERT not in weight.dims)
