"""What single operations reach of a chip's peaks, and their fixed times: published measurements.

`operation_rates.json` holds the values with their sources, `compiler_facts.json` what depends on the compiler, and
`fitted_constants.json` what was fitted to whole steps. No figure was measured on a TPU by this project.
"""

from dataclasses import dataclass
from typing import TypeVar

from meshscope.hardware.compiler_facts import Fact, read_facts
from meshscope.serialize import from_plain

T = TypeVar("T")

Interval = tuple[float, float]  # factors, or fractions, at the bounds of a range


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakEfficiency:
    """Fraction of the published peaks that large operations reach, with the measured range.

    `hbm` is that of one op that reads, `hbm_write` of one that writes, `hbm_busy` that of reads by several
    transfers at a time. `hbm_interval` is relative to all three.
    """

    matmul: float
    matmul_interval: Interval
    hbm: float
    hbm_write: float
    hbm_busy: float
    hbm_interval: Interval


_STORED = read_facts("operation_rates.json")


def _fact(name: str, kind: type[T]) -> Fact[T]:
    stored = _STORED[name]
    return Fact(value=from_plain(kind, stored["value"]), source=stored["source"])


TPU_EFFICIENCY = _fact("tpu_efficiency", PeakEfficiency)
GPU_EFFICIENCY = _fact("gpu_efficiency", PeakEfficiency)
MEASURED_EFFICIENCY = _fact("measured_efficiency", PeakEfficiency)
KERNEL_FRAC = _fact("kernel_frac", float)
KERNEL_INTERVAL: Fact[Interval] = _fact("kernel_interval", Interval)
MODEL_INTERVAL: Fact[Interval] = _fact("model_interval", Interval)
BYTES_INTERVAL: Fact[Interval] = _fact("bytes_interval", Interval)
VMEM_OVER_HBM = _fact("vmem_over_hbm", float)
READ_LATENCY_S = _fact("read_latency_s", float)
WRITE_LATENCY_S = _fact("write_latency_s", float)
LAUNCH_S = _fact("launch_s", float)
OWN_OP_S = _fact("own_op_s", float)
LATENCY_INTERVAL: Fact[Interval] = _fact("latency_interval", Interval)
# An op below this, of which launch and latency take more than half, is a small one.
SMALL_S = _fact("small_s", float)
CORE_SHARE = _fact("core_share", float)
UNKNOWN_FACTORS: Fact[Interval] = _fact("unknown_factors", Interval)
SPREAD = _fact("spread", float)
