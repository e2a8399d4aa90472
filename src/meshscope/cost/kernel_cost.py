"""Work and time of kernels: by their algorithm if it is known, else as their author states, else by bytes.

What custom calls communicate is priced as a collective, not here.
"""

import re
from collections.abc import Sequence

from meshscope.cost.attention_kernels import attention_work
from meshscope.cost.expert_load import ExpertLoad
from meshscope.cost.grouped_kernels import fused_work, grouped_work
from meshscope.cost.kernel_work import (
    KernelWork,
    WorkSource,
    operand_traffic,
    touched_traffic,
)
from meshscope.cost.rates import OpTime, Rates, exactly, longest
from meshscope.cost.sequence_lengths import SequenceLengths
from meshscope.cost.traffic import ArrayTraffic
from meshscope.events.step_time import TimeBasis, TimeEstimate
from meshscope.readers.hlo.module import Computation, Instruction
from meshscope.spec.hardware.operation_rates import (
    BYTES_INTERVAL,
    KERNEL_FRAC,
    KERNEL_INTERVAL,
    MODEL_INTERVAL,
)

_FLOPS = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_BYTES = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)')

_BASIS = {
    WorkSource.ALGORITHM: TimeBasis.KERNEL_MODEL,
    WorkSource.AUTHOR: TimeBasis.KERNEL_STATED,
    WorkSource.BYTES: TimeBasis.ROOFLINE,
}


def declared_cost(instruction: Instruction) -> tuple[int, int] | None:
    """FLOPs and bytes that the kernel's author declares; None without a declaration."""
    flops, accessed = (pattern.search(instruction.attributes) for pattern in (_FLOPS, _BYTES))
    if flops is None or accessed is None:
        return None
    cost = int(flops[1]), int(accessed[1])
    return cost if any(cost) else None


def kernel_work(
    computation: Computation,
    instruction: Instruction,
    rates: Rates,
    *,
    experts: ExpertLoad | None = None,
    lengths: Sequence[SequenceLengths] = (),
) -> KernelWork:
    """The work of a kernel, for the given load of experts and lengths of sequences."""
    return (
        fused_work(computation, instruction, experts)
        or grouped_work(computation, instruction, experts)
        or _stated_work(computation, instruction)
        or attention_work(computation, instruction, lengths, rates)
        or KernelWork(source=WorkSource.BYTES, moved=touched_traffic(computation, instruction))
    )


def _stated_work(computation: Computation, instruction: Instruction) -> KernelWork | None:
    """The author's estimate; a kernel in place touches less than the buffers that are its operands.

    The bytes count in each memory by its share of the operands.
    """
    declared = declared_cost(instruction)
    if declared is None:
        return None
    flops, n_bytes = declared
    operands = operand_traffic(computation, instruction)
    hbm_bytes = round(n_bytes * operands.hbm_bytes / max(1, operands.n_bytes))
    moved = ArrayTraffic(hbm_bytes=hbm_bytes, vmem_bytes=n_bytes - hbm_bytes)
    if not n_bytes:
        moved = touched_traffic(computation, instruction)
    return KernelWork(source=WorkSource.AUTHOR, flops=flops, moved=moved)


def kernel_time(rates: Rates, work: KernelWork) -> OpTime:
    """The longer of the kernel's cycles (or its FLOPs below the peak) and its bytes."""
    basis = _BASIS[work.source]
    if work.source is WorkSource.BYTES:
        low, high = BYTES_INTERVAL.value
        s = rates.roofline(moved=work.moved).seconds.value_s
        seconds = TimeEstimate(value_s=s, low_s=s * low, high_s=s * high)
        return OpTime(seconds=seconds, basis=basis, hbm=rates.hbm_busy(work.moved))
    if work.cycles is None:
        time = rates.roofline(
            flops=work.flops,
            moved=work.moved,
            flops_frac=KERNEL_FRAC.value,
            flops_interval=KERNEL_INTERVAL.value,
        )
        return OpTime(seconds=time.seconds, basis=basis, hbm=time.hbm)
    low, high = MODEL_INTERVAL.value
    body_s = work.cycles / (rates.clock_hz or 1e9)
    body = TimeEstimate(value_s=body_s, low_s=body_s * low, high_s=body_s * high)
    seconds = longest(body, rates.hbm(work.moved), exactly(0.0))
    return OpTime(seconds=seconds, basis=basis, hbm=rates.hbm_busy(work.moved))
