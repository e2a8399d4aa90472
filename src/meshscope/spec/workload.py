"""The request that is served: how many sequences, how long, in which number formats."""

from dataclasses import dataclass
from math import inf

from meshscope.errors import SpecError
from meshscope.units import dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A batch of `batch` sequences (over all devices), each `prompt` tokens in and `output` tokens out.

    `routing_skew` is how often the experts of the most loaded device are chosen, over the mean.
    """

    batch: int = 1
    prompt: int = 128
    output: int = 128
    weight_dtype: str = "bf16"
    activation_dtype: str = "bf16"
    cache_dtype: str = "bf16"
    routing_skew: float = 1.0

    def __post_init__(self) -> None:
        """Counts are positive; number formats are XLA's names."""
        for name in ("batch", "prompt", "output"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name}={getattr(self, name)} must be at least 1.")
        if not 1 <= self.routing_skew < inf:
            raise SpecError(
                f"routing_skew={self.routing_skew} must be at least 1: the load of the most loaded "
                "device over the mean."
            )
        for name in ("weight_dtype", "activation_dtype", "cache_dtype"):
            if getattr(self, name) != dtype_name(getattr(self, name)):
                raise SpecError(f"{name}={getattr(self, name)!r} must be XLA's name of the format.")

    @property
    def context(self) -> int:
        """Positions that the static cache holds: prompt and output."""
        return self.prompt + self.output

    @property
    def n_decode_steps(self) -> int:
        """Decode steps of the request; prefill makes the first output token."""
        return self.output - 1
