"""Memory that one device needs, compared with its HBM."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshscope.spec.experiment import Experiment
from meshscope.spec.plan.caches import device_cache_bytes
from meshscope.spec.plan.weights import device_weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device; None if unknown.

    `total_bytes` is the peak of a step; `fits` compares it with the HBM of one device.
    """

    weights_bytes: int
    kv_cache_bytes: int
    temp_bytes: int | None
    total_bytes: int | None
    hbm_bytes: int | None
    fits: bool | None


def compiled_memory(experiment: Experiment, analyses: Iterable[Mapping[str, int]]) -> Memory:
    """Bytes on one device by the compiler's memory analysis; the larger phase counts.

    An analysis holds argument_bytes, output_bytes, alias_bytes and temp_bytes of one program.
    Without any, everything except weights and cache is None.
    """
    workload, plan, model = experiment.workload, experiment.plan, experiment.model
    every = list(analyses)
    totals = [
        a["argument_bytes"] + a["output_bytes"] + a["temp_bytes"] - a["alias_bytes"] for a in every
    ]
    total_bytes = max(totals, default=None)
    hbm_bytes = experiment.topology.chip.device_hbm_bytes
    return Memory(
        weights_bytes=device_weight_bytes(model, plan, workload.weight_dtype),
        kv_cache_bytes=device_cache_bytes(model, plan, workload),
        temp_bytes=max((a["temp_bytes"] for a in every), default=None),
        total_bytes=total_bytes,
        hbm_bytes=hbm_bytes,
        fits=None if hbm_bytes is None or total_bytes is None else total_bytes <= hbm_bytes,
    )
