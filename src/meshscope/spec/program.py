"""Which program of a model is meant: who writes it, who partitions it, and in which forms."""

from dataclasses import dataclass
from enum import StrEnum

from meshscope.errors import SpecError
from meshscope.spec.plan.context_form import ContextForm
from meshscope.spec.plan.dispatch import DispatchForm
from meshscope.spec.plan.kernel_choice import Kernels


class Frontend(StrEnum):
    """Who writes the program."""

    JAX = "jax"
    TORCHXLA = "torchxla"


class Partitioner(StrEnum):
    """Who inserts the collectives: we (`manual`), or the compiler from annotations (`auto`)."""

    MANUAL = "manual"
    AUTO = "auto"


class Loop(StrEnum):
    """How layers are written: one after the other, or one body in a loop."""

    AUTO = "auto"
    UNROLL = "unroll"
    SCAN = "scan"


class Engine(StrEnum):
    """Whose conventions the prediction follows: our programs, or vLLM's as the paper measured them."""

    MESHSCOPE = "meshscope"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Which of the programs of a model is meant.

    `microbatches` is how many follow each other through a pipeline in prefill, on one device's share
    of the batch; None is the largest number up to the number of stages that divides it.
    """

    frontend: Frontend = Frontend.JAX
    partitioner: Partitioner = Partitioner.MANUAL
    loop: Loop = Loop.AUTO
    dispatch: DispatchForm = DispatchForm.AUTO
    capacity_factor: float | None = None
    context: ContextForm = ContextForm.AUTO
    microbatches: int | None = None
    kernels: Kernels = Kernels.AUTO

    def __post_init__(self) -> None:
        """A capacity is at least what balanced routing needs; there is at least one micro-batch."""
        if self.capacity_factor is not None and not self.capacity_factor >= 1:
            raise SpecError(
                f"capacity_factor={self.capacity_factor} leaves no room for balanced routing. "
                "Use 1 or more, or leave it out: then there is room for every routing."
            )
        if self.microbatches is not None and self.microbatches < 1:
            raise SpecError(f"microbatches={self.microbatches} must be at least 1.")
