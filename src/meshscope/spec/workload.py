"""The workload: batch size, sequence lengths and dtypes."""

from dataclasses import dataclass
from math import inf

from meshscope.errors import SpecError
from meshscope.units import dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A batch of `batch` sequences (over all devices) with `prompt` input and `output` output tokens.

    `routing_skew` is the load of the most loaded device's experts over the mean. `prefill_chunk` is the
    number of prompt tokens that a data-parallel rank processes at a time; None for all of them.
    """

    batch: int = 1
    prompt: int = 128
    output: int = 128
    weight_dtype: str = "bf16"
    activation_dtype: str = "bf16"
    cache_dtype: str = "bf16"
    routing_skew: float = 1.0
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        """Check that counts are positive and dtypes are XLA's names."""
        for name in ("batch", "prompt", "output"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name}={getattr(self, name)} is too small. Use at least 1.")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise SpecError(f"prefill_chunk={self.prefill_chunk} is too small. Use at least 1.")
        if not 1 <= self.routing_skew < inf:
            raise SpecError(
                f"routing_skew={self.routing_skew} is invalid: it is the load of the most loaded device "
                "over the mean. Use at least 1."
            )
        for name in ("weight_dtype", "activation_dtype", "cache_dtype"):
            if getattr(self, name) != dtype_name(getattr(self, name)):
                raise SpecError(f"{name}={getattr(self, name)!r} must be XLA's name of the dtype.")

    @property
    def context(self) -> int:
        """Positions in the static cache: prompt plus output."""
        return self.prompt + self.output

    @property
    def chunk_positions(self) -> int:
        """Positions of a prompt in one chunk of prefill."""
        return min(self.prompt, self.prefill_chunk or self.prompt)

    @property
    def n_decode_steps(self) -> int:
        """Decode steps of the request; prefill produces the first output token."""
        return self.output - 1

    @property
    def mean_context(self) -> float:
        """Positions present in the mean decode step of a request: the prompt and half of the output.

        Decode step i of 1 to output - 1 attends to prompt + i positions, its own included.
        """
        return self.prompt + self.output / 2
