"""Chooses between JAX or XLA kernels and plain operations for each part of a program.

The measurements are in docs/kernels.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING

from meshscope.hardware.chips import Chip, ChipKind
from meshscope.hardware.compiler_facts import compiler_facts
from meshscope.model.layers import AttentionKind
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.mechanisms.grouped import grouped_of
from meshscope.model.model import Model
from meshscope.model.quantization import quantization_of, ragged_dtype_of
from meshscope.plans.caches import cache_slots
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.plan import Plan
from meshscope.plans.workload import Workload
from meshscope.units import format_dtype

if TYPE_CHECKING:
    from meshscope.plans.experiment import Experiment


class Kernels(StrEnum):
    """Whether to use kernels."""

    AUTO = "auto"  # if the chip and the shapes support them
    OFF = "off"


class Kernel(StrEnum):
    """Kernels that programs use."""

    SPLASH = "splash attention"
    FLASH_DECODE = "flash decode attention"
    CUDNN = "cuDNN attention"
    RAGGED_DOT = "XLA's ragged dot kernel"
    GROUPED = "grouped matmul that converts weights in VMEM"


# Block sizes of splash attention in queries and keys; the largest that divides the prompt is used.
# 128 is the kernel's minimum (jax splash_attention_kernel.py, NUM_LANES), 512 is MaxText's default
# (configs/base.yml, sa_block_q).
SPLASH_BLOCKS = (512, 256, 128)

# The scope of splash attention to a block of keys that every query attends to: its operands look like those
# under a causal mask.
WHOLE_BLOCK_SCOPE = "whole_block"

# Other prompts are padded from this length on, by at most this fraction. Shorter ones have small scores.
PADDED_FROM = 1024
MAX_PADDING_FRAC = 1 / 8

# Keys in a block of decode attention. Longer blocks fetch more slots after the last position.
DECODE_BLOCKS = (512, 256, 128)

# Queries of one KV head in decode attention: all tokens of a step times the query heads per KV head. Their
# scores with 512 keys are 2 MiB in float32; the kernel holds a few such arrays at a time in 16 MiB of VMEM.
MAX_DECODE_QUERIES = 1024

_FACTS = compiler_facts()
RAGGED_DOT_ROWS = _FACTS.ragged_dot_row_multiple
MAX_STACKED_EXPERTS = _FACTS.max_stacked_experts
KERNEL_DTYPES = _FACTS.kernel_dtypes
DECODE_CACHE_DTYPES = (*KERNEL_DTYPES, "s8", "f8e4m3fn", "f8e5m2")  # compiled, docs/kernels.md

# Limits of cuDNN attention on GPUs, as JAX 0.11.2 checks them
# (jax/_src/cudnn/fused_attention_stablehlo.py, check_layout and check_is_flash_attention). Hopper
# supports heads of up to 256 channels, but JAX reads the generation from the device and cannot do
# so when compiling without one.
CUDNN_DTYPES = ("bf16", "f16")
CUDNN_MAX_HEAD_DIM = 128
CUDNN_HEAD_DIM_STEP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """The kernel of one part of the program, or the reason for plain operations."""

    kernel: Kernel | None = None
    reason: str | None = None

    def __str__(self) -> str:
        return self.kernel.value if self.kernel else f"plain: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoices:
    """The choice for each part with kernels; None if the model lacks the part."""

    prefill_attention: KernelChoice
    decode_attention: KernelChoice
    experts: KernelChoice | None

    @property
    def has_expert_kernel(self) -> bool:
        """Whether experts use a kernel, which skips those without rows."""
        return self.experts is not None and self.experts.kernel is not None

    def as_dict(self) -> dict[str, str]:
        """One line per part, for the manifest."""
        choices = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: str(choice) for name, choice in choices.items() if choice is not None}


def kernel_choices(experiment: "Experiment", chip: Chip | None = None) -> KernelChoices:
    """The choice for each part, on the chip of the slice unless another is given."""
    program, workload, form = experiment.program, experiment.workload, experiment.dispatch_form
    chip, plain = chip or experiment.topology.chip, program.kernels is Kernels.OFF
    has_kernels, common = not program.frontend.is_traced, None
    if not has_kernels:
        common = "the modules of transformers use no kernels"
    elif plain:
        common = "--kernels off"
    elif chip.kind is not ChipKind.TPU:
        common = "the kernels run on TPU only"
    elif workload.activation_dtype not in KERNEL_DTYPES:
        dtypes = " and ".join(KERNEL_DTYPES)
        common = f"the kernels support {dtypes}, not {workload.activation_dtype}"
    parts = (experiment.model, experiment.plan, workload)
    if chip.kind is ChipKind.GPU and has_kernels and not plain:
        prefill = _choice(Kernel.CUDNN, None, _cudnn_reasons(*parts))
    else:
        prefill = _choice(Kernel.SPLASH, common, _prefill_reasons(*parts))
    # XLA's kernel if it reads the weights as they are stored.
    native_dtypes = compiler_facts(chip.name).ragged_dot_dtypes
    is_native = ragged_dtype_of(workload.weight_dtype) in native_dtypes
    is_native |= quantization_of(workload.weight_dtype) is None
    is_one_hot = form is DispatchForm.ONE_HOT
    lack = iter(["one-hot dispatch has no grouped matmul"] if is_one_hot else [])
    experts = _choice(Kernel.RAGGED_DOT if is_native else Kernel.GROUPED, common, lack)
    return KernelChoices(
        prefill_attention=prefill,
        decode_attention=_choice(Kernel.FLASH_DECODE, common, _decode_reasons(*parts)),
        experts=None if experiment.model.moe is None else experts,
    )


def splash_block(prompt: int) -> int | None:
    """Block size of splash attention for a prompt; None if no block divides it and it is too short to pad."""
    divisors = (size for size in SPLASH_BLOCKS if prompt % size == 0)
    block = next(divisors, None)
    if block is not None or prompt < PADDED_FROM:
        return block
    return next(size for size in SPLASH_BLOCKS if -prompt % size <= MAX_PADDING_FRAC * prompt)


def _choice(kernel: Kernel, common: str | None, reasons: Iterator[str]) -> KernelChoice:
    reason = common or next(reasons, None)
    return KernelChoice(kernel=kernel) if reason is None else KernelChoice(reason=reason)


def _prefill_reasons(model: Model, plan: Plan, workload: Workload) -> Iterator[str]:
    window, n_positions = _chunk_of_attention(model), workload.chunk_positions
    if model.attention.chosen_positions is not None:
        yield "splash attention has no data-dependent masks"
    if window is not None and workload.prompt > window:
        yield f"prompt={workload.prompt} is longer than the chunks of attention ({window})"
    if n_positions % plan.cp or splash_block(n_positions // plan.cp) is None:
        name = "prompt" if n_positions == workload.prompt else "prefill_chunk"
        share = f"{name}={n_positions}" + (f" over cp={plan.cp}" if plan.cp > 1 else "")
        yield f"{share} is not a multiple of {SPLASH_BLOCKS[-1]}"


def _chunk_of_attention(model: Model) -> int | None:
    has_chunks = model.has(AttentionKind.CHUNKED)
    return model.attention.window_of(AttentionKind.CHUNKED) if has_chunks else None


def _cudnn_reasons(model: Model, plan: Plan, workload: Workload) -> Iterator[str]:
    if model.attention.mechanism is not Mechanism.GROUPED:
        yield "cuDNN attention supports grouped-query attention only"
    attention = grouped_of(model.attention)
    if attention.has_sinks or attention.softcap is not None:
        yield f"cuDNN attention has no {'attention sinks' if attention.has_sinks else 'soft caps'}"
    if attention.head_dim > CUDNN_MAX_HEAD_DIM or attention.head_dim % CUDNN_HEAD_DIM_STEP:
        yield (
            f"cuDNN attention supports head sizes up to {CUDNN_MAX_HEAD_DIM} in multiples of "
            f"{CUDNN_HEAD_DIM_STEP}, not {attention.head_dim}"
        )
    if workload.activation_dtype not in CUDNN_DTYPES:
        yield f"cuDNN attention supports {' and '.join(CUDNN_DTYPES)}, not {workload.activation_dtype}"
    if workload.chunk_positions < workload.prompt:
        yield "cuDNN attention has no mask for the positions before a chunk"
    if plan.cp > 1:
        yield "cp splits the sequence"


def _decode_reasons(model: Model, plan: Plan, workload: Workload) -> Iterator[str]:
    window, n_tokens = _chunk_of_attention(model), workload.decode_tokens
    attention, n_slots = model.attention, cache_slots(plan, workload)
    if window is not None and window % DECODE_BLOCKS[0] and plan.cp == 1:
        yield f"chunks of {window} positions are no multiple of {DECODE_BLOCKS[0]}"
    if attention.mechanism is Mechanism.COMPRESSED:
        yield "the kernel reads no compressed caches"
    if n_tokens > 1:  # the kernel reads the cache once for all tokens of a step
        n_kv_heads = max(attention.kv_heads(AttentionKind.SLIDING), plan.tp)
        n_queries = n_tokens * attention.n_heads // n_kv_heads
        if plan.cp > 1:
            yield f"{n_tokens} tokens a step under cp={plan.cp} have positions on several devices"
        if attention.chosen_positions is not None:
            yield f"an indexer chooses other positions for each of {n_tokens} tokens"
        if n_queries > MAX_DECODE_QUERIES:
            yield f"{n_queries} queries of a head exceed the {MAX_DECODE_QUERIES} that VMEM has room for"
    if n_slots < DECODE_BLOCKS[-1]:
        share = "the cache" if plan.cp == 1 else f"the share of the cache under cp={plan.cp}"
        yield f"{share} has fewer than {DECODE_BLOCKS[-1]} positions ({n_slots})"
    if workload.cache_dtype not in DECODE_CACHE_DTYPES:
        yield f"the kernel reads caches in {', '.join(map(format_dtype, DECODE_CACHE_DTYPES))}, not {format_dtype(workload.cache_dtype)}"
