"""Memory that a plan needs on one device, from closed formulas, and the largest batch and context that fit.

Weights, cache and their padding, and temporary buffers: what a program keeps live in HBM at once, the residual stream,
the buffers of the block that needs most, and gathered or copied weights. docs/evidence/memory.md compares them with
the compiler's memory analysis.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import NamedTuple

from meshscope.cost.collectives import stored_vocab
from meshscope.cost.meshscope_engine import attention_step
from meshscope.errors import MeshscopeError, read_only
from meshscope.events.enums import Phase
from meshscope.hardware.chips import ChipKind
from meshscope.hardware.compiler_facts import compiler_facts
from meshscope.model.arrays import LANES, Dim, Weight
from meshscope.model.quantization import activation_dtype_of, ragged_dtype_of
from meshscope.plans import chunks
from meshscope.plans import weights as stored
from meshscope.plans.caches import cache_slots, device_cache_bytes, joined_narrow_heads, layer_cache
from meshscope.plans.dispatch import FUSED_BLOCK_TOKENS, DispatchForm, gathered_ranks
from meshscope.plans.experiment import Experiment, experiment_of_record
from meshscope.plans.kernel_choice import Kernel
from meshscope.plans.memory import Memory, TempBasis
from meshscope.plans.program import Engine, Partitioner
from meshscope.plans.stages import stage_layers, stored_layers
from meshscope.plans.workload import MAX_BATCH, MAX_CONTEXT
from meshscope.store.run import RunRecord
from meshscope.units import DTYPE_BITS

F32_BYTES = 4

# The rules and the margins of the interval were made with some cases of benchmarks/memory_grid.csv and are
# judged by the others (docs/evidence/memory.md).
N_WHOLE = 3  # inputs and outputs of a dense block and of its reduction, with the residual stream
# On-chip memory, in which the compiler keeps the buffers of a dense block as far as they fit: one and a half
# times the VMEM of a v5e and a v6e, which buffers use in turn; assumed for other chips, too.
VMEM_BYTES = 128 * 2**20  # scaling book, part 2, tpus.md
ON_CHIP_BYTES = VMEM_BYTES * 3 // 2
N_ROW_COPIES = 2  # of looked-up rows: each, and joined for a token
N_BRANCH_COPIES = 2  # the cache before and after the branch of a stage
LOW, HIGH = 0.45, 1.4
SMALL_BYTES = 64 * 2**20  # beyond the margin


def predicted_memory(experiment: Experiment) -> Memory:
    """Memory of one device in bytes; in a pipeline, of a device in the largest stage.

    Meshscope's pipeline is one program for all stages, so each stage allocates the largest number
    of layers of each kind that any stage has, plus embedding and head. A vLLM stage allocates only
    its own layers.

    Padding and temporary buffers are estimated for programs with formulas (`why_no_estimate`). `fits` is
    True if the high end of the estimate fits, False if weights, cache and the low end do not.
    """
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    if experiment.engine is Engine.MESHSCOPE:
        weights_bytes = stored.device_weight_bytes(model, plan, workload.weight_dtype)
        kv_cache_bytes = device_cache_bytes(model, plan, workload, layout=experiment.cache_layout)
    else:
        stages = enumerate(stage_layers(model.n_layers, plan.pp))
        of_stages = (_vllm_stage_bytes(experiment, stage, layers) for stage, layers in stages)
        weights_bytes, kv_cache_bytes = max(of_stages, key=sum)
    hbm_bytes, temp = experiment.topology.chip.device_hbm_bytes, temp_estimate(experiment)
    value, low, high = temp or (None, None, None)
    padding = None if temp is None else padding_bytes(experiment)
    known_bytes = weights_bytes + kv_cache_bytes + (padding or 0)
    is_assumed = workload.weight_dtype == model.assumed_dtype
    fits = None
    if hbm_bytes is not None and known_bytes + (low or 0) > hbm_bytes:
        fits = None if is_assumed else False
    elif hbm_bytes is not None and high is not None and known_bytes + high <= hbm_bytes:
        fits = True
    return Memory(
        weights_bytes=weights_bytes,
        kv_cache_bytes=kv_cache_bytes,
        temp_bytes=value,
        total_bytes=None if value is None else known_bytes + value,
        hbm_bytes=hbm_bytes,
        fits=fits,
        temp_low_bytes=low,
        temp_high_bytes=high,
        temp_basis=None if temp is None else TempBasis.ESTIMATE,
        padding_bytes=padding,
        has_assumed_weights=is_assumed,
    )


def _vllm_stage_bytes(experiment: Experiment, stage: int, indices: range) -> tuple[int, int]:
    """Bytes of weights and of cache on a vLLM worker of this stage.

    The first stage holds the embedding, the last one the final norm and the head. If the head is
    tied to the embedding, the last stage holds a copy of the embedding.
    """
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    model, dtype = replace(model, vocab=stored_vocab(model)), workload.weight_dtype
    is_last = stage == plan.pp - 1
    embed, norm, *head = stored.outer_weights(model, plan)
    has_table = stage == 0 or (is_last and model.has_tied_embeddings)
    weights = [*([embed] if has_table else []), *([norm, *head] if is_last else [])]
    layers = model.layers[indices.start : indices.stop]
    weights_bytes = sum(weight.local_bytes(plan, dtype) for weight in weights)
    weights_bytes += sum(stored.layer_bytes(model, plan, layer, dtype) for layer in layers)
    cache_bytes = device_cache_bytes(model, plan, workload, layers, layout=experiment.cache_layout)
    return weights_bytes, cache_bytes


def padding_bytes(experiment: Experiment) -> int:
    """Bytes of padding on one device of a TPU, whose rows are whole multiples of 128 elements.

    The compiler avoids it by another order of the dimensions, except where a program fixes the order: weights
    that lookups and grouped matmuls read row by row, and the cache that the decode kernel reads.
    """
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    layers, n_positions = stored_layers(model, plan.pp), cache_slots(plan, workload, model)

    def missing(shape: Sequence[int], bits: int) -> int:
        return prod(shape[:-1]) * (-shape[-1] % LANES) * bits

    def of(weights: Sequence[Weight]) -> int:
        return sum(
            missing(w.local_shape(plan), DTYPE_BITS[w.stored_dtype(workload.weight_dtype)]) // 8
            for w in weights
            if w.is_row_major
        )

    padding = of(stored.outer_weights(model, plan))
    padding += sum(n * of(stored.layer_weights(model, plan, layer)) for layer, n in layers.items())
    if experiment.kernels.decode_attention.kernel is None:
        return padding
    n_tokens, dtype = workload.decode_tokens, workload.cache_dtype
    bits = sum(
        n * missing(array.local_shape(plan), array.bits(dtype)) * array.n_slots(n_positions)
        for layer, n in layers.items()
        for array in joined_narrow_heads(layer_cache(model, plan, layer, n_tokens=n_tokens))
    )
    return padding + bits * (workload.batch // plan.data_size) // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TempParts:
    """Bytes of temporary buffers on one device by what they hold; the block with the most counts."""

    residual: float  # the residual stream and the embeddings of layers, which sp splits
    whole: float  # the input or the output of a block: the residual stream of all tokens
    attention: float  # queries, keys, values and outputs of a layer, or of its linear attention
    scores: float  # attention scores, where no kernel avoids them
    mlp: float  # the two intermediates of a dense MLP
    experts: float  # rows of experts before and after their exchange, and their intermediates
    gathered: float  # the largest matrix that fsdp gathers
    layer: float  # the weights, without experts, of a layer that unrolled programs fetch ahead
    stacked: float  # weights of all layers whose stack scanned programs copy into another layout
    converted: float  # weights of 8 bits in the dtype of their matrix product
    branches: float  # copies of the cache in the branches of a pipeline's stages
    looked_up: float  # rows of a table of n-grams, each and joined for a token, before their sum over devices


class TempEstimate(NamedTuple):
    """Bytes of temporary buffers on one device, with the interval that the judged programs justify."""

    value_bytes: int
    low_bytes: int
    high_bytes: int


def why_no_estimate(experiment: Experiment) -> str | None:
    """The reason why temporary buffers have no estimate; None if they have one."""
    program, chip = experiment.program, experiment.topology.chip
    is_split = program.partitioner is not Partitioner.MANUAL and experiment.model.moe is not None
    reasons = {
        f"--engine {experiment.engine} has other programs": experiment.engine is Engine.MESHSCOPE,
        f"--frontend {program.frontend} has no formulas": program.frontend.is_own,
        f"--partitioner {program.partitioner} chooses how experts exchange their rows": not is_split,
        f"the formulas are for TPUs, not {chip.name}": chip.kind is ChipKind.TPU,
    }
    return next((reason for reason, has_formula in reasons.items() if not has_formula), None)


def temp_estimate(experiment: Experiment) -> TempEstimate | None:
    """Temporary buffers of the phase that needs most; None without formulas."""
    if why_no_estimate(experiment) is not None:
        return None
    most = max(phase_temp_bytes(experiment, phase) for phase in experiment.phases)
    most += branch_copies_bytes(experiment)
    return TempEstimate(round(most), round(LOW * most), round(HIGH * most + SMALL_BYTES))


def phase_temp_bytes(experiment: Experiment, phase: Phase) -> float:
    """Temporary buffers of a phase in bytes on one device, without the copies of `branch_copies_bytes`."""
    parts = temp_parts(experiment, phase)
    block = parts.attention + parts.scores + parts.mlp
    dense = max(0.0, parts.residual + N_WHOLE * parts.whole + block - ON_CHIP_BYTES)
    routed = parts.residual + parts.whole + parts.experts if parts.experts else 0.0
    value = max(dense, routed) + parts.gathered + parts.layer + parts.stacked
    return value + parts.converted + parts.looked_up


def branch_copies_bytes(experiment: Experiment) -> int:
    """Copies of the cache in the branches of a pipeline's stages, in bytes on one device."""
    parts = (experiment.model, experiment.plan, experiment.workload)
    return 0 if experiment.plan.pp == 1 else N_BRANCH_COPIES * device_cache_bytes(*parts)


def temp_parts(experiment: Experiment, phase: Phase) -> TempParts:
    """The parts of a phase, in bytes on one device."""
    step = attention_step(experiment, phase, is_cut=experiment.prefill_chunks.is_cut)
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    kernels, layers, is_scanned = experiment.kernels, set(model.layers), experiment.is_scanned
    act, tp = DTYPE_BITS[workload.activation_dtype] / 8, plan.tp
    n_streams = model.hyper.n_streams if model.hyper is not None else 1
    of_layers = 0 if model.layer_inputs is None else model.layer_inputs.width * model.n_layers
    split = tp if plan.sp and phase is Phase.PREFILL else 1
    attention = kernels.prefill_attention if step.is_prefill else kernels.decode_attention
    n_heads = max(model.attention.query_heads(layer.attention) for layer in layers)
    n_scores = n_heads / tp * step.n_tokens * model.attention.score_keys(step)
    mlp_widths = [model.ffn_of(layer) for layer in layers if layer.has_mlp]
    weights = {layer: stored.layer_weights(model, plan, layer) for layer in layers}

    def n_elements(chosen: Iterator[Weight]) -> int:
        return sum(prod(weight.local_shape(plan)) for weight in chosen)

    engram, n_rows = model.engram, 0
    if engram is not None and model.tables:
        n_rows = step.n_tokens * experiment.n_microbatches(phase) * plan.n_looked_up * engram.n_read
    gathered = largest = copied = 0
    if plan.fsdp > 1:
        every = (*stored.outer_weights(model, plan), *(w for of in weights.values() for w in of))
        sizes = (prod(w.gathered_shape(plan)) for w in every if w.fsdp_dim(plan) is not None)
        gathered = max(sizes, default=0)
    if is_scanned:
        for kind, n in stored_layers(model, plan.pp).items():
            stacks = model.attention_of(kind).copied_stacks
            copied += n * n_elements(w for w in weights[kind] if w.name in stacks)
    else:
        largest = max(
            n_elements(w for w in of if Dim.EXPERT not in w.dims) for of in weights.values()
        )
    return TempParts(
        residual=step.n_tokens * (model.hidden * n_streams + of_layers) * act / split,
        whole=step.n_tokens * model.hidden * n_streams * act,
        attention=max(model.attention_of(layer).step_bytes(step) for layer in layers),
        scores=0 if attention.kernel is not None else n_scores * F32_BYTES,
        mlp=2 * step.n_tokens * max(mlp_widths, default=0) / tp * act,
        experts=_experts_elements(experiment, phase, step.n_tokens) * act,
        gathered=gathered * act,
        layer=min(VMEM_BYTES, largest * act),
        stacked=copied * act,
        converted=_converted_bytes(experiment, act),
        branches=branch_copies_bytes(experiment),
        looked_up=0 if engram is None else N_ROW_COPIES * n_rows * engram.head_dim * act,
    )


def _experts_elements(experiment: Experiment, phase: Phase, n_tokens: int) -> float:
    """Rows of experts, before and after them, and their two intermediates; with an exchange, also the other side's.

    Buffers of an exchange have more bytes than the sums of 8-bit rows, which exist before it returns them.
    """
    model, plan, moe = experiment.model, experiment.plan, experiment.model.moe
    if moe is None:
        return 0
    width = moe.ffn if "tp" in plan.expert_axes else moe.ffn / plan.tp
    dispatch, choice = experiment.dispatch(phase), experiment.kernels.experts
    if dispatch is None:
        # Sums of XLA's kernel of experts are float32 for 8-bit rows, counted in elements of activations.
        is_narrow = activation_dtype_of(experiment.workload.weight_dtype) is not None
        has_sums = is_narrow and choice is not None and choice.kernel is Kernel.RAGGED_DOT
        wide = F32_BYTES * 8 / DTYPE_BITS[experiment.workload.activation_dtype]
        n_rows = n_tokens * gathered_ranks(plan, experiment.dispatch_form)
        n_rows *= min(moe.n_active, moe.n_experts // plan.ep)
        return n_rows * ((1 + (wide if has_sums else 1)) * model.row_width + 2 * width)
    if dispatch.form is DispatchForm.FUSED:
        # Buffers of the rows that each local expert may get and returns, and of all results. Beyond a share of the
        # HBM, fewer experts have one at a time.
        n_block = min(FUSED_BLOCK_TOKENS, dispatch.n_tokens)
        return 3 * dispatch.n_local_experts * dispatch.n_ranks * n_block * model.row_width
    n_sent, n_received = dispatch.n_rows, dispatch.n_buffer_rows
    return 2 * (n_sent + n_received) * model.row_width + 2 * n_received * width


def _converted_bytes(experiment: Experiment, act: float) -> float:
    """The head, or a layer's matrix of experts for a kernel that does not read their dtype."""
    model, plan, workload = experiment.model, experiment.plan, experiment.workload
    if DTYPE_BITS[workload.weight_dtype] >= DTYPE_BITS[workload.activation_dtype]:
        return 0
    head = prod(stored.head_weight(model, plan).local_shape(plan)) * act
    facts = compiler_facts(experiment.topology.chip.name)
    of_kernel = ragged_dtype_of(workload.weight_dtype)
    if model.moe is None or of_kernel in facts.ragged_dot_dtypes:
        return head
    experts = max(prod(weight.local_shape(plan)) for weight in stored.expert_weights(model))
    return max(head, experts * F32_BYTES)


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What fits on a slice with a plan, by the high end of the predicted memory.

    `largest_batch` is in steps of `batch_step` sequences at the prompt and output of the experiment,
    `largest_context` (prompt and output) in steps of `context_step` positions at its batch and output;
    0 if not even one step fits. Both are at least the experiment's own if it fits, and below it if it may not, but a
    prompt that is no multiple of the step may fit once it is padded to one. `is_context_of_model` is whether the
    model, not memory, limits the context. `n_cache_tokens` are the KV cache positions over all sequences that fit
    with weights and temporary buffers; the experiment leaves `n_cache_tokens_left` unused.
    With `is_upper_bound`, temporary buffers are unknown and count as 0.
    """

    batch_step: int
    largest_batch: int
    context_step: int
    largest_context: int
    is_context_of_model: bool
    n_cache_tokens: int
    n_cache_tokens_left: int
    is_upper_bound: bool


def capacity_of(experiment: Experiment) -> Capacity | None:
    """The capacity of a slice for an experiment; None without a limit of HBM."""
    memory = predicted_memory(experiment)
    if memory.hbm_bytes is None:
        return None
    workload, context = experiment.workload, largest_context(experiment)
    # Positions of the cache over all sequences that fit, by the bytes of one more block of positions.
    step = _context_step(experiment)
    longer = predicted_memory(_resized(experiment, prompt=workload.prompt + step))
    block_bytes = longer.resident_bytes - memory.resident_bytes
    fixed_bytes = memory.resident_bytes - block_bytes * workload.context // step
    free_bytes = memory.hbm_bytes - fixed_bytes - (memory.temp_high_bytes or 0)
    n_tokens = workload.batch * context.positions  # caches of windows alone do not grow
    if block_bytes:
        n_tokens = max(0, free_bytes * workload.batch * step // block_bytes)
    return Capacity(
        batch_step=experiment.plan.data_size,
        largest_batch=largest_batch(experiment),
        context_step=step,
        largest_context=context.positions,
        is_context_of_model=context.is_of_model,
        n_cache_tokens=n_tokens,
        n_cache_tokens_left=max(0, n_tokens - workload.batch * workload.context),
        is_upper_bound=memory.temp_bytes is None,
    )


def largest_batch(experiment: Experiment) -> int:
    """The largest batch that fits at the prompt and output of an experiment on devices with known HBM."""
    step, batch = experiment.plan.data_size, experiment.workload.batch
    limit, least = (MAX_BATCH, batch) if _fits(experiment) else (batch - 1, 0)
    n = _largest(lambda n: _fits(_resized(experiment, batch=n * step)), limit // step)
    return max(n * step, least)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestContext:
    """Positions of prompt and output, 0 if none fit, and whether the model limits them, not memory."""

    positions: int
    is_of_model: bool


def largest_context(experiment: Experiment) -> LargestContext:
    """The largest context that fits at the batch and output of an experiment on devices with known HBM."""
    step, output = _context_step(experiment), experiment.workload.output
    of_model = max(0, (experiment.model.max_position or MAX_CONTEXT) - output) // step
    prompt, limit, fits = experiment.workload.prompt, of_model, _fits(experiment)
    if prompt % step == 0 and not fits:
        limit = min(limit, prompt // step - 1)
    n = _largest(lambda n: _fits(_resized(experiment, prompt=n * step)), limit)
    longest = max(n * step + output if n else 0, experiment.workload.context if fits else 0)
    return LargestContext(positions=longest, is_of_model=0 < n == of_model)


def experiment_of_run(run: RunRecord) -> Experiment | None:
    """The experiment of a run; None if it is imported and does not know all of it, or is a part of a decode step."""
    try:
        experiment = experiment_of_record(run.manifest.experiment)
    except MeshscopeError:
        return None
    return None if experiment.is_part_of_decode else experiment


def capacity_of_run(run: RunRecord) -> Capacity | None:
    """The capacity for the request of a run; None if the run does not know one, or without HBM."""
    experiment = experiment_of_run(run)
    return None if experiment is None else capacity_of(experiment)


def _context_step(experiment: Experiment) -> int:
    """Positions by which a prompt grows: whole blocks of the kernels, divisible by cp and by tp under sp."""
    plan = experiment.plan
    return lcm(chunks.POSITION_STEP * plan.cp, plan.tp if plan.sp else 1)


def _resized(experiment: Experiment, **sizes: int) -> Experiment:
    """The experiment with another batch or prompt, and the chunk that it chose, or the longest of the default rule.

    Memory then grows with either size: chunks that divide a batch evenly would make it jump.
    """
    workload, chunk = replace(experiment.workload, **sizes), experiment.workload.prefill_chunk
    reason = chunks.why_auto_is_whole(experiment.plan, experiment.program, experiment.engine)
    if experiment.with_auto_chunk().workload.prefill_chunk == chunk and reason is None:
        is_whole = chunks.why_no_position_chunks(experiment.model, experiment.plan) is not None
        chunk = max(chunks.DEFAULT_CHUNK, workload.prompt) if is_whole else chunks.DEFAULT_CHUNK
    return replace(experiment, workload=replace(workload, prefill_chunk=chunk))


def _fits(experiment: Experiment) -> bool:
    memory = predicted_memory(experiment)
    assert memory.hbm_bytes is not None
    return needed_bytes(memory) <= memory.hbm_bytes


def needed_bytes(memory: Memory) -> int:
    """The high end of the memory that a device needs; without temporary buffers if they are unknown."""
    return memory.resident_bytes + (memory.temp_high_bytes or 0)


def _largest(is_possible: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which all smaller ones are possible, too; by bisection.

    It starts small, because memory does not grow evenly where microbatches divide the batch.
    """
    low, high = 0, 1
    while high <= limit and is_possible(high):
        low, high = high, high * 2
    return low + bisect_left(
        range(low + 1, min(high, limit + 1)), x=True, key=lambda n: not is_possible(n)
    )
