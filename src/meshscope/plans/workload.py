"""The workload: batch size, sequence lengths and dtypes; and the sequences of a single step."""

import re
from dataclasses import dataclass
from math import inf

from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.model.quantization import PARTIAL_COVERAGES, WEIGHT_DTYPES
from meshscope.units import dtype_name, format_dtype

# Limits that catch typing errors. A million sequences are 100 for each chip of the largest pod (9,216
# TPU7x chips); the longest context of a published model has 10,485,760 positions.
MAX_BATCH = 1_000_000
MAX_CONTEXT = 2**24

ACTIVATION_DTYPES = ("bf16", "f16", "f32")
CACHE_DTYPES = (*ACTIVATION_DTYPES, "s8", "f8e4m3fn", "f8e5m2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A batch of `batch` sequences (over all devices) with `prompt` input and `output` output tokens."""

    batch: int = 1
    prompt: int = 128
    output: int = 128
    weight_dtype: str = "bf16"
    activation_dtype: str = "bf16"
    cache_dtype: str = "bf16"
    routing_skew: float = 1.0  # load of the most loaded device's experts over the mean
    prefill_chunk: int | None = None  # tokens that a data-parallel rank prefills at a time
    decode_tokens: int = 1  # of a sequence in a decode step: more if it verifies a draft

    def __post_init__(self) -> None:
        """Check that counts are positive and dtypes are XLA's names."""
        for name in ("batch", "prompt", "output"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name}={getattr(self, name)} is too small. Use at least 1.")
        if self.batch > MAX_BATCH:
            raise SpecError(f"batch={self.batch} is too large. Use at most {MAX_BATCH:,}.")
        if self.context > MAX_CONTEXT + 1:  # a step over the longest context has one output token
            raise SpecError(
                f"prompt={self.prompt} and output={self.output} are too large. Use at most "
                f"{MAX_CONTEXT:,} positions together."
            )
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise SpecError(f"prefill_chunk={self.prefill_chunk} is too small. Use at least 1.")
        if not 1 <= self.decode_tokens <= max(1, self.output - 1):
            raise SpecError(
                f"decode_tokens={self.decode_tokens} and output={self.output} leave no decode step with so many "
                f"tokens. Use 1 to {max(1, self.output - 1)}, or a longer output."
            )
        if not 1 <= self.routing_skew < inf:
            raise SpecError(
                f"routing_skew={self.routing_skew} is invalid: it is the load of the most loaded device "
                "over the mean. Use at least 1."
            )
        for name in ("weight_dtype", "activation_dtype", "cache_dtype"):
            if getattr(self, name) != dtype_name(getattr(self, name)):
                raise SpecError(f"{name}={getattr(self, name)!r} must be XLA's name of the dtype.")
        self._check_roles()

    def _check_roles(self) -> None:
        activations = format_dtype(self.activation_dtype)
        if self.activation_dtype in {*WEIGHT_DTYPES} - {*ACTIVATION_DTYPES}:
            remedy = f"Use --weight-dtype {activations}"
            if self.activation_dtype in CACHE_DTYPES:
                remedy += f", and --cache-dtype {activations} for the KV cache"
            raise SpecError(
                f"activations and collectives in {activations} are not supported. {remedy}; "
                f"--dtype is one of {', '.join(ACTIVATION_DTYPES)}."
            )
        roles = (
            ("activations", self.activation_dtype, ACTIVATION_DTYPES),
            ("weights", self.weight_dtype, WEIGHT_DTYPES),
            ("the KV cache", self.cache_dtype, CACHE_DTYPES),
        )
        for role, dtype, supported in roles:
            if dtype not in supported:
                whole = [name for name in supported if not name.endswith(PARTIAL_COVERAGES)]
                names = ", ".join(map(format_dtype, whole))
                raise SpecError(f"{role} cannot be {format_dtype(dtype)}. Use one of {names}.")

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
        """Decode steps of the request, if each keeps all its tokens; prefill produces the first output token."""
        return -(-(self.output - 1) // self.decode_tokens)

    @property
    def mean_context(self) -> float:
        """Positions in the mean decode step: decode step i of 1 to output - 1 attends to prompt + i, for the last of its tokens."""
        return self.prompt + (self.output + self.decode_tokens - 1) / 2


_LENGTHS = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*):([1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLengths:
    """Equal sequences of a step, with the queries and the keys present of each."""

    n_sequences: int
    n_queries: int
    n_keys: float


def parse_lengths(text: str) -> dict[Phase | None, tuple[SequenceLengths, ...]]:
    """Parses `63x1:1024,1x2048:8192`: sequences x new tokens : context of each, perhaps after `prefill=` or `decode=`."""
    lengths: dict[Phase | None, tuple[SequenceLengths, ...]] = {}
    phase: Phase | None = None
    for piece in text.split(","):
        name, separator, rest = piece.strip().partition("=")
        if separator and name in set(Phase):
            phase = Phase(name)
        sequences = (rest if separator else name).strip()
        match = _LENGTHS.fullmatch(sequences)
        if match is None:
            raise SpecError(
                f"lengths '{text}': '{sequences}' is not SEQUENCESxTOKENS:CONTEXT. Give for example "
                "'64x1:1024' for 64 sequences that decode one token at a context of 1024."
            )
        n_sequences, n_queries, n_keys = map(int, match.groups())
        if n_queries > n_keys:
            raise SpecError(
                f"lengths '{text}': {n_queries} new tokens exceed the context of {n_keys}, which includes "
                "them. Give a context of at least the new tokens."
            )
        one = SequenceLengths(n_sequences=n_sequences, n_queries=n_queries, n_keys=n_keys)
        lengths[phase] = (*lengths.get(phase, ()), one)
    return lengths
