"""Which way each part of a program is computed: by a kernel of JAX or XLA, or plainly, and why.

The figures behind the choices are in docs/kernels.md.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from meshscope.spec.hardware.chips import ChipKind
from meshscope.spec.hardware.compiler_facts import compiler_facts
from meshscope.spec.model.model import CompressedAttention, GroupedAttention, LatentAttention, Model
from meshscope.spec.plan.dispatch import DispatchForm
from meshscope.spec.plan.plan import Plan
from meshscope.spec.workload import Workload


class Kernels(StrEnum):
    """Whether kernels stand in for plain arithmetic."""

    AUTO = "auto"  # where the chip has one and the shapes allow
    ON = "on"  # or refuse
    OFF = "off"


class Kernel(StrEnum):
    """The kernels in use."""

    SPLASH = "splash attention"
    CUDNN = "cuDNN attention"
    RAGGED_DOT = "XLA's ragged dot kernel"


# Rows and columns of the scores that splash attention holds at once, the largest that divides the
# prompt; 128 is the least that the kernel takes (jax splash_attention_kernel.py, NUM_LANES), and
# 512 is what MaxText starts from (configs/base.yml, sa_block_q).
SPLASH_BLOCKS = (512, 256, 128)

_FACTS = compiler_facts()
RAGGED_DOT_ROWS = _FACTS.ragged_dot_row_multiple.value
MAX_STACKED_EXPERTS = _FACTS.max_stacked_experts.value
KERNEL_DTYPES = _FACTS.kernel_dtypes.value

# cuDNN attention on GPUs, as JAX 0.11.2 checks it (jax/_src/cudnn/fused_attention_stablehlo.py,
# check_layout and check_is_flash_attention). Hopper takes heads of up to 256 channels; JAX asks the
# device for its generation, which it cannot do when it compiles without one.
CUDNN_DTYPES = ("bf16", "f16")
CUDNN_MAX_HEAD_DIM = 128
CUDNN_HEAD_DIM_STEP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """The way that one part of the program takes: a kernel, or none for a reason."""

    kernel: Kernel | None = None
    reason: str | None = None

    def __str__(self) -> str:
        return self.kernel.value if self.kernel else f"plain: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoices:
    """The way of each part that has a kernel somewhere; None where the model lacks the part."""

    prefill_attention: KernelChoice
    decode_attention: KernelChoice
    experts: KernelChoice | None

    @property
    def has_expert_kernel(self) -> bool:
        """Whether experts are computed by a kernel, which passes over those without rows."""
        return self.experts is not None and self.experts.kernel is Kernel.RAGGED_DOT

    @property
    def refused(self) -> dict[str, str]:
        """Why parts for which there is a kernel are plain all the same, by part."""
        parts = {"prefill attention": self.prefill_attention, "the experts": self.experts}
        return {name: c.reason for name, c in parts.items() if c is not None and c.reason}

    def as_dict(self) -> dict[str, str]:
        """One line a part, for the manifest."""
        parts = {
            "prefill_attention": self.prefill_attention,
            "decode_attention": self.decode_attention,
            "experts": self.experts,
        }
        return {name: str(choice) for name, choice in parts.items() if choice is not None}


def kernel_choices(  # noqa: PLR0913  the parts of an experiment
    kernels: Kernels,
    *,
    chip: ChipKind,
    model: Model,
    plan: Plan,
    workload: Workload,
    form: DispatchForm,
    has_kernels: bool = True,
) -> KernelChoices:
    """The way of each part; `form` is how rows travel to their experts.

    `has_kernels` is false for a front end that has none.
    """
    common = _common_reason(kernels, chip, workload)
    if not has_kernels:
        common = "the modules of transformers"
    if chip is ChipKind.GPU and has_kernels and kernels is not Kernels.OFF:
        prefill = _choice(Kernel.CUDNN, _cudnn_reason(model, plan, workload))
    else:
        prefill = _choice(Kernel.SPLASH, common or _prefill_reason(model, plan, workload))
    return KernelChoices(
        prefill_attention=prefill,
        decode_attention=KernelChoice(reason=common or _decode_reason(model)),
        experts=None
        if model.moe is None
        else _choice(Kernel.RAGGED_DOT, common or _experts_reason(form)),
    )


def splash_block(prompt: int) -> int | None:
    """Edge of the blocks of splash attention for a prompt; None where none divides it."""
    return next((size for size in SPLASH_BLOCKS if prompt % size == 0), None)


def _choice(kernel: Kernel, reason: str | None) -> KernelChoice:
    return KernelChoice(kernel=kernel) if reason is None else KernelChoice(reason=reason)


def _common_reason(kernels: Kernels, chip: ChipKind, workload: Workload) -> str | None:
    """What stands against every kernel."""
    if kernels is Kernels.OFF:
        return "--kernels off"
    if chip is not ChipKind.TPU:
        return "the kernels run on TPU only"
    if workload.activation_dtype not in KERNEL_DTYPES:
        return f"the kernels take {' and '.join(KERNEL_DTYPES)}, not {workload.activation_dtype}"
    return None


def _prefill_reason(model: Model, plan: Plan, workload: Workload) -> str | None:
    match model.attention:
        case GroupedAttention():
            pass
        case LatentAttention(indexer=None):
            pass
        case _:
            return "the kernel has no mask that is computed from the tokens"
    if plan.cp > 1:
        return "cp splits the sequence"
    if splash_block(workload.prompt) is None:
        return f"prompt={workload.prompt} is not a multiple of {SPLASH_BLOCKS[-1]}"
    return None


def _cudnn_reason(model: Model, plan: Plan, workload: Workload) -> str | None:
    attention = model.attention
    if not isinstance(attention, GroupedAttention):
        return "cuDNN attention takes keys and values of grouped heads only"
    if attention.has_sinks:
        return "cuDNN attention has no sinks"
    if attention.head_dim > CUDNN_MAX_HEAD_DIM or attention.head_dim % CUDNN_HEAD_DIM_STEP:
        return (
            f"cuDNN attention takes heads of at most {CUDNN_MAX_HEAD_DIM} channels, in multiples of "
            f"{CUDNN_HEAD_DIM_STEP}, not {attention.head_dim}"
        )
    if workload.activation_dtype not in CUDNN_DTYPES:
        return (
            f"cuDNN attention takes {' and '.join(CUDNN_DTYPES)}, not {workload.activation_dtype}"
        )
    return "cp splits the sequence" if plan.cp > 1 else None


def _decode_reason(model: Model) -> str:
    match model.attention:
        case GroupedAttention():
            return "the compiler's own fusion reads the cache once, at the rate of the HBM"
        case LatentAttention():
            return "JAX has no kernel for a cache of latents"
        case CompressedAttention():
            return "JAX has no kernel for a cache of compressed entries"
        case _:
            assert_never(model.attention)


def _experts_reason(form: DispatchForm) -> str | None:
    if form in {DispatchForm.ONE_HOT, DispatchForm.ONE_HOT_PINNED}:
        return "one-hot dispatch has no grouped matmul"
    return None
