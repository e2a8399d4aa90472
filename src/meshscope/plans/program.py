"""Program options: front end, partitioner, loop, dispatch, context and kernels."""

from dataclasses import dataclass
from enum import StrEnum

from meshscope.errors import SpecError
from meshscope.plans.caches import ContextForm
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.kernel_choice import Kernels


class Frontend(StrEnum):
    """The framework that builds the program."""

    JAX = "jax"
    TORCHXLA = "torchxla"
    VLLM_TPU = "vllm-tpu"
    SGLANG_JAX = "sglang-jax"
    MAXTEXT = "maxtext"

    @property
    def is_own(self) -> bool:
        """Whether the program is meshscope's decoder, with loops, kernels and any order of devices."""
        return self is Frontend.JAX

    @property
    def is_traced(self) -> bool:
        """Whether the program is a trace of the modules of transformers, layer by layer."""
        return self is Frontend.TORCHXLA

    @property
    def is_served(self) -> bool:
        """Whether the program is the model code of a serving engine: several programs per step."""
        return not (self.is_own or self.is_traced)

    @property
    def has_whole_prompts(self) -> bool:
        """Whether prefill takes one whole prompt on all devices."""
        return self is Frontend.MAXTEXT


DEFAULT_FRONTEND = Frontend.JAX


class Partitioner(StrEnum):
    """Who inserts the collectives: the program (`manual`), or the compiler from annotations (`auto`)."""

    MANUAL = "manual"
    AUTO = "auto"


class Loop(StrEnum):
    """How layers are compiled: unrolled, or as the body of a loop."""

    AUTO = "auto"
    UNROLL = "unroll"
    SCAN = "scan"


class Engine(StrEnum):
    """The conventions of the prediction: meshscope's programs, or vLLM as measured in the paper."""

    MESHSCOPE = "meshscope"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Options of the program that runs a model."""

    frontend: Frontend = DEFAULT_FRONTEND
    partitioner: Partitioner = Partitioner.MANUAL
    loop: Loop = Loop.AUTO
    dispatch: DispatchForm = DispatchForm.AUTO
    capacity_factor: float | None = None
    context: ContextForm = ContextForm.AUTO
    microbatches: int | None = None  # of prefill per device; None: at most the stages
    kernels: Kernels = Kernels.AUTO
    engine_version: str | None = None  # the release of the serving engine that is the front end

    def __post_init__(self) -> None:
        """Check the capacity factor and the number of micro-batches."""
        if self.capacity_factor is not None and not self.capacity_factor >= 1:
            raise SpecError(
                f"capacity_factor={self.capacity_factor} is too small for balanced routing. "
                "Use 1 or more, or drop it to allow any routing."
            )
        if self.microbatches is not None and self.microbatches < 1:
            raise SpecError(f"microbatches={self.microbatches} is too small. Use at least 1.")
