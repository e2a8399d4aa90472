"""Memory that one device needs, compared with its HBM."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from meshscope.errors import read_only
from meshscope.plans.caches import device_cache_bytes
from meshscope.plans.experiment import Experiment
from meshscope.plans.weights import device_weight_bytes
from meshscope.units import format_gib


class FitState(StrEnum):
    """Whether a step fits the memory of a device."""

    YES = "yes"
    NO = "no"
    CLOSE = "close"  # the interval of the estimate contains the limit
    UNKNOWN = "unknown"

    @property
    def label(self) -> str:
        """`yes`, `NO`, `close` or `unknown`."""
        return "NO" if self is FitState.NO else self.value


class TempBasis(StrEnum):
    """Where the bytes of temporary buffers come from."""

    COMPILER = "compiler"
    ESTIMATE = "estimate"


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device; None if unknown.

    An estimate of temporary buffers has an interval and states the padding of weights and cache; a compiled total
    includes padding but does not state it. A program whose weights are unknown has arguments and outputs instead.
    """

    weights_bytes: int | None
    kv_cache_bytes: int | None
    temp_bytes: int | None  # activations, logits, gathered weights, copies of layers
    total_bytes: int | None  # the peak of a step
    hbm_bytes: int | None  # that programs may use
    fits: bool | None  # None while the interval contains the limit
    temp_low_bytes: int | None = None
    temp_high_bytes: int | None = None
    temp_basis: TempBasis | None = None
    padding_bytes: int | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None  # of outputs that reuse no argument
    has_assumed_weights: bool = False  # maybe larger than the checkpoint's; never says no

    @property
    def known_bytes(self) -> int:
        """Weights and cache, or the arguments of a program whose weights are unknown."""
        if self.weights_bytes is None or self.kv_cache_bytes is None:
            return self.argument_bytes or 0
        return self.weights_bytes + self.kv_cache_bytes

    @property
    def total_low_bytes(self) -> int | None:
        """The least that a step may need; None without an estimate."""
        return None if self.temp_low_bytes is None else self.resident_bytes + self.temp_low_bytes

    @property
    def total_high_bytes(self) -> int | None:
        """The most that a step may need; None without an estimate."""
        return None if self.temp_high_bytes is None else self.resident_bytes + self.temp_high_bytes

    @property
    def resident_bytes(self) -> int:
        """Weights and cache, with their padding as far as known."""
        return self.known_bytes + (self.padding_bytes or 0)

    @property
    def fit(self) -> FitState:
        """Whether a step fits; close if the interval of the estimate contains the limit."""
        if self.fits is not None:
            return FitState.YES if self.fits else FitState.NO
        if self.has_assumed_weights:
            return FitState.UNKNOWN
        is_estimate = self.temp_basis is TempBasis.ESTIMATE and self.hbm_bytes is not None
        return FitState.CLOSE if is_estimate else FitState.UNKNOWN

    @property
    def fit_reason(self) -> str | None:
        """Why the answer is neither yes nor no."""
        if self.fit is FitState.UNKNOWN:
            what = "HBM of the device" if self.hbm_bytes is None else "size of temporary buffers"
            if self.has_assumed_weights and self.hbm_bytes is not None:
                what = "size of the weights in the checkpoint's own format"
            return f"the {what} is unknown"
        if self.fit is not FitState.CLOSE:
            return None
        low, high = (format_gib(n) for n in (self.total_low_bytes, self.total_high_bytes))
        return f"the estimate, {low} to {high}, contains the limit; compile for an answer"


def compiled_memory(experiment: Experiment, analyses: Iterable[Mapping[str, int]]) -> Memory:
    """Bytes on one device by the compiler's memory analyses (their totals are None without any); the larger phase counts."""
    workload, plan, model = experiment.workload, experiment.plan, experiment.model
    every, parts = list(analyses), ("argument_bytes", "output_bytes", "temp_bytes")
    totals = (sum(one[part] for part in parts) - one["alias_bytes"] for one in every)
    total_bytes = max(totals, default=None)
    hbm_bytes = experiment.topology.chip.device_hbm_bytes
    temp_bytes = max((a["temp_bytes"] for a in every), default=None)
    return Memory(
        weights_bytes=device_weight_bytes(model, plan, workload.weight_dtype),
        kv_cache_bytes=device_cache_bytes(model, plan, workload, layout=experiment.cache_layout),
        temp_bytes=temp_bytes,
        total_bytes=total_bytes,
        hbm_bytes=hbm_bytes,
        fits=None if hbm_bytes is None or total_bytes is None else total_bytes <= hbm_bytes,
        temp_basis=None if temp_bytes is None else TempBasis.COMPILER,
    )
