"""Chooses between JAX or XLA kernels and plain operations for each part of a program.

The measurements behind the choices are in docs/kernels.md.
"""

from dataclasses import dataclass
from enum import StrEnum

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


class Kernels(StrEnum):
    """Whether to use kernels."""

    AUTO = "auto"  # if the chip and the shapes support them
    ON = "on"  # raise an error if a kernel cannot be used
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

# Queries of one KV head in decode attention: all tokens of a step times the query heads of the head. Their
# scores with 512 keys are 2 MiB in float32, of which the kernel has a few at a time in 16 MiB of VMEM.
MAX_DECODE_QUERIES = 1024

_FACTS = compiler_facts()
RAGGED_DOT_ROWS = _FACTS.ragged_dot_row_multiple.value
MAX_STACKED_EXPERTS = _FACTS.max_stacked_experts.value
KERNEL_DTYPES = _FACTS.kernel_dtypes.value
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

    @property
    def refused(self) -> dict[str, str]:
        """The reason for plain operations, by part that has a kernel."""
        parts = {
            "prefill attention": self.prefill_attention,
            "decode attention": self.decode_attention,
            "the experts": self.experts,
        }
        return {name: c.reason for name, c in parts.items() if c is not None and c.reason}

    def as_dict(self) -> dict[str, str]:
        """One line per part, for the manifest."""
        parts = {
            "prefill_attention": self.prefill_attention,
            "decode_attention": self.decode_attention,
            "experts": self.experts,
        }
        return {name: str(choice) for name, choice in parts.items() if choice is not None}


def kernel_choices(  # noqa: PLR0913  the parts of an experiment
    kernels: Kernels,
    *,
    chip: Chip,
    model: Model,
    plan: Plan,
    workload: Workload,
    form: DispatchForm,
    has_kernels: bool = True,
) -> KernelChoices:
    """The choice for each part; `form` is the dispatch form of the experts.

    `has_kernels` is False for front ends without kernels.
    """
    common = _common_reason(kernels, chip.kind, workload)
    if not has_kernels:
        common = "the modules of transformers use no kernels"
    if chip.kind is ChipKind.GPU and has_kernels and kernels is not Kernels.OFF:
        prefill = _choice(Kernel.CUDNN, _cudnn_reason(model, plan, workload))
    else:
        prefill = _choice(Kernel.SPLASH, common or _prefill_reason(model, plan, workload))
    return KernelChoices(
        prefill_attention=prefill,
        decode_attention=_choice(
            Kernel.FLASH_DECODE, common or _decode_reason(model, plan, workload)
        ),
        experts=None
        if model.moe is None
        else _choice(_experts_kernel(chip, workload, form), common or _experts_reason(form)),
    )


def splash_block(prompt: int) -> int | None:
    """Block size of splash attention for a prompt; None if no block divides it and it is too short to pad."""
    divisors = (size for size in SPLASH_BLOCKS if prompt % size == 0)
    block = next(divisors, None)
    if block is not None or prompt < PADDED_FROM:
        return block
    return next(size for size in SPLASH_BLOCKS if -prompt % size <= MAX_PADDING_FRAC * prompt)


def _choice(kernel: Kernel, reason: str | None) -> KernelChoice:
    return KernelChoice(kernel=kernel) if reason is None else KernelChoice(reason=reason)


def _common_reason(kernels: Kernels, chip: ChipKind, workload: Workload) -> str | None:
    """The reason that rules out all kernels, if any."""
    if kernels is Kernels.OFF:
        return "--kernels off"
    if chip is not ChipKind.TPU:
        return "the kernels run on TPU only"
    if workload.activation_dtype not in KERNEL_DTYPES:
        return f"the kernels support {' and '.join(KERNEL_DTYPES)}, not {workload.activation_dtype}"
    return None


def _prefill_reason(model: Model, plan: Plan, workload: Workload) -> str | None:
    window = model.attention.window_of(AttentionKind.CHUNKED)
    if model.attention.chosen_positions is not None:
        return "splash attention has no data-dependent masks"
    if _has_chunks(model) and window is not None and workload.prompt > window:
        return f"prompt={workload.prompt} is longer than the chunks of attention ({window})"
    n_positions = workload.chunk_positions
    if n_positions % plan.cp or splash_block(n_positions // plan.cp) is None:
        name = "prompt" if n_positions == workload.prompt else "prefill_chunk"
        share = f"{name}={n_positions}" + (f" over cp={plan.cp}" if plan.cp > 1 else "")
        return f"{share} is not a multiple of {SPLASH_BLOCKS[-1]}"
    return None


def _has_chunks(model: Model) -> bool:
    return any(layer.attention is AttentionKind.CHUNKED for layer in model.layers)


def _cudnn_reason(model: Model, plan: Plan, workload: Workload) -> str | None:
    if model.attention.mechanism is not Mechanism.GROUPED:
        return "cuDNN attention supports grouped-query attention only"
    attention = grouped_of(model.attention)
    if attention.has_sinks or attention.softcap is not None:
        return f"cuDNN attention has no {'attention sinks' if attention.has_sinks else 'soft caps'}"
    if attention.head_dim > CUDNN_MAX_HEAD_DIM or attention.head_dim % CUDNN_HEAD_DIM_STEP:
        return (
            f"cuDNN attention supports head sizes up to {CUDNN_MAX_HEAD_DIM} in multiples of "
            f"{CUDNN_HEAD_DIM_STEP}, not {attention.head_dim}"
        )
    if workload.activation_dtype not in CUDNN_DTYPES:
        return f"cuDNN attention supports {' and '.join(CUDNN_DTYPES)}, not {workload.activation_dtype}"
    if workload.chunk_positions < workload.prompt:
        return "cuDNN attention has no mask for the positions before a chunk"
    return "cp splits the sequence" if plan.cp > 1 else None


def _decode_reason(model: Model, plan: Plan, workload: Workload) -> str | None:
    window = model.attention.window_of(AttentionKind.CHUNKED)
    has_parts = window is not None and window % DECODE_BLOCKS[0] and plan.cp == 1
    if _has_chunks(model) and has_parts:
        return f"chunks of {window} positions are no multiple of {DECODE_BLOCKS[0]}"
    if model.attention.mechanism is Mechanism.COMPRESSED:
        return "the kernel reads no compressed caches"
    reason = _token_reason(model, plan, workload)
    if reason is not None:
        return reason
    n_slots = cache_slots(plan, workload)
    if n_slots < DECODE_BLOCKS[-1]:
        share = "the cache" if plan.cp == 1 else f"the share of the cache under cp={plan.cp}"
        return f"{share} has fewer than {DECODE_BLOCKS[-1]} positions ({n_slots})"
    if workload.cache_dtype not in DECODE_CACHE_DTYPES:
        return f"the kernel reads caches in {', '.join(map(format_dtype, DECODE_CACHE_DTYPES))}, not {format_dtype(workload.cache_dtype)}"
    return None


def _token_reason(model: Model, plan: Plan, workload: Workload) -> str | None:
    """The reason why the kernel cannot read the cache once for several tokens; None for one token."""
    n_tokens, attention = workload.decode_tokens, model.attention
    if n_tokens == 1 or attention.mechanism is Mechanism.COMPRESSED:
        return None
    if plan.cp > 1:
        return f"{n_tokens} tokens a step under cp={plan.cp} have positions on several devices"
    if attention.chosen_positions is not None:
        return f"an indexer chooses other positions for each of {n_tokens} tokens"
    n_kv_heads = max(attention.kv_heads(AttentionKind.SLIDING), plan.tp)
    n_queries = n_tokens * attention.n_heads // n_kv_heads
    if n_queries > MAX_DECODE_QUERIES:
        return (
            f"{n_queries} queries of a head exceed the {MAX_DECODE_QUERIES} that VMEM has room for"
        )
    return None


def _experts_kernel(chip: Chip, workload: Workload, form: DispatchForm) -> Kernel:
    """XLA's kernel if it reads the weights as they are stored; rows gathered by the compiler leave no choice."""
    dtype = ragged_dtype_of(workload.weight_dtype)
    is_native = dtype in compiler_facts(chip.name).ragged_dot_dtypes.value
    is_native |= quantization_of(workload.weight_dtype) is None
    return Kernel.RAGGED_DOT if is_native or form is DispatchForm.GATHERED else Kernel.GROUPED


def _experts_reason(form: DispatchForm) -> str | None:
    if form in {DispatchForm.ONE_HOT, DispatchForm.ONE_HOT_PINNED}:
        return "one-hot dispatch has no grouped matmul"
    return None
