"""Time, FLOPs and bytes of each instruction on the core, and the basis of its time.

A kernel is timed by its algorithm if it is known, else as its author states, else by bytes. What custom calls
communicate is priced as a collective, not here.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2, prod

from meshscope.cost import array_traffic as arrays
from meshscope.cost.expert_load import ExpertLoad
from meshscope.cost.kernels import attention_work, fused_work, grouped_work
from meshscope.cost.rates import (
    NO_TRAFFIC,
    ArrayTraffic,
    OpTime,
    Rates,
    longest,
    row_cycles,
    scaled,
)
from meshscope.events.step_time import Activity, TimeBasis
from meshscope.hardware.compiler_facts import OPERATIONS, CompilerFacts
from meshscope.model.arrays import LANES
from meshscope.plans.workload import SequenceLengths
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.communication import local_operations
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.module import Computation, Instruction
from meshscope.readers.hlo.semantics import KIND_OF_OPCODE

CONVERSION_NOTE = "kernels of 4-bit experts take as long as the conversion in VMEM, not the reading"
REGISTER_BYTES = 4096  # 8 x 128 numbers of 32 bits
# Ops that change the layout, the memory or the dtype of an array, and none of its values.
_RELAYOUTS = frozenset({"copy", "bitcast", "transpose", "reshape", "convert", "bitcast-convert"})
_ASYNC_SUFFIXES = ("-start", "-update", "-done")
# Kernels of attention and experts, by the part of the model or by the name.
_OF_MODEL = re.compile(r"^(attn|moe\.)|attention|mha|mqa|gmm")
_FLOPS = re.compile(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
_BYTES = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """Cost of an instruction on the core.

    `is_estimated`: the compiler states its cycles. `is_known`: its cost model applies. `note` says what
    it assumes.
    """

    time: OpTime
    flops: float = 0.0
    hbm_bytes: float = 0.0
    is_estimated: bool = False
    is_known: bool = True
    activity: Activity = Activity.SMALL
    padding_flops: float = 0.0
    note: str | None = None


class OpCostModel:
    """The costs of a module's instructions, each computed once."""

    def __init__(
        self,
        flow: Dataflow,
        rates: Rates,
        experts: ExpertLoad | None = None,
        lengths: Sequence[SequenceLengths] = (),
    ) -> None:
        self._experts = experts
        self._lengths = lengths
        self._flow = flow
        self.rates = rates
        self._costs: dict[int, OpCost | None] = {}

    def cost(self, computation: Computation, instruction: Instruction) -> OpCost | None:
        """The cost of an instruction; None if the core does nothing for it."""
        key = id(instruction)
        if key not in self._costs:
            self._costs[key] = self._cost(computation, instruction)
        return self._costs[key]

    def _cost(self, computation: Computation, instruction: Instruction) -> OpCost | None:
        opcode, rates, local = instruction.opcode, self.rates, local_operations()
        is_free = opcode in local.free or instruction.custom_call_target in local.free_calls
        if is_free or opcode.endswith(_ASYNC_SUFFIXES) or opcode in KIND_OF_OPCODE:
            return None
        is_library = arrays.is_library_product(instruction)
        if opcode == "custom-call" and instruction.estimated_cycles is None and not is_library:
            return self._kernel_cost(computation, instruction)
        moved = arrays.traffic(self._flow, computation, instruction)
        matmuls = arrays.products(self._flow, computation, instruction)
        n_flops: float = sum(product.flops for product in matmuls)
        # Multiplications of a product on the vector units, whose bundles are known.
        n_products = 0 if n_flops else arrays.vector_products(self._flow, instruction)
        time, is_known = self._cycles_time(instruction, moved, n_flops, n_products), True
        is_estimated = time is not None
        n_flops += 2 * n_products
        if time is None:
            if all(not array.dims for array in instruction.arrays):
                return None  # a fusion to a scalar, as in a norm
            gathered = gather_cycles(self._flow, computation, instruction, rates.facts)
            if gathered is not None:  # the longer of its loop over rows and its bytes
                time = rates.loop(gathered, moved)
                is_of_experts = (part_of(instruction) or "").startswith("moe.")
                activity = Activity.BY_EXPERT if is_of_experts else Activity.GATHER
                return OpCost(time=time, hbm_bytes=moved.hbm_bytes, activity=activity)
            is_known = opcode in local.roofline or is_library
            if not is_known:
                time = rates.unknown(moved)
            elif cycles := _sort_cycles(instruction, rates.facts):
                time = rates.loop(cycles, moved)
            else:
                time = rates.roofline(flops=n_flops, moved=moved)
        mxu_dim = rates.mxu_dim
        padding = 0.0 if mxu_dim is None else sum((p.padding_flops(mxu_dim) for p in matmuls), 0.0)
        return OpCost(
            time=time,
            flops=n_flops,
            hbm_bytes=moved.hbm_bytes,
            is_estimated=is_estimated,
            is_known=is_known,
            activity=self._activity(instruction, time, moved, n_flops),
            padding_flops=padding,
        )

    def _activity(
        self, instruction: Instruction, time: OpTime, moved: ArrayTraffic, n_flops: float
    ) -> Activity:
        if n_flops:
            return Activity.MATMUL
        if self.rates.is_small(time, moved):
            return Activity.SMALL
        if instruction.opcode == "sort":
            return Activity.SORT
        is_relayout = self._flow.consists_of(instruction, _RELAYOUTS)
        return Activity.RELAYOUT if is_relayout else Activity.ELEMENTWISE

    def _cycles_time(
        self, instruction: Instruction, moved: ArrayTraffic, n_flops: float, n_products: int
    ) -> OpTime | None:
        cycles = instruction.estimated_cycles
        if cycles is None:
            return None
        if n_products:
            return self.rates.vector_product(n_products, moved)
        if not n_flops:
            return self.rates.elementwise(cycles, moved)
        return self.rates.product(cycles, n_flops, moved)

    def _kernel_cost(self, computation: Computation, instruction: Instruction) -> OpCost:
        work = kernel_work(
            computation, instruction, self.rates, experts=self._experts, lengths=self._lengths
        )
        time = kernel_time(self.rates, work)
        conversion_s = self.rates.loop_s(work.conversion_cycles).value_s
        is_converting = 0 < time.seconds.value_s <= conversion_s
        is_of_model = work.basis is TimeBasis.KERNEL_MODEL or _OF_MODEL.search(
            f"{part_of(instruction)}/{instruction.name}"
        )
        return OpCost(
            time=time,
            flops=work.flops,
            hbm_bytes=work.moved.hbm_bytes,
            is_known=work.basis is not TimeBasis.ROOFLINE,
            activity=Activity.KERNEL if is_of_model else Activity.OTHER_KERNEL,
            note=CONVERSION_NOTE if is_converting else work.note,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What the costs computed so far assume."""
        notes = (cost.note for cost in self._costs.values() if cost is not None and cost.note)
        return tuple(dict.fromkeys(notes))


def _sort_cycles(instruction: Instruction, facts: CompilerFacts) -> float:
    """Cycles of a bitonic sort, log2(n)(log2(n)+1)/2 passes over its registers; 0 for other ops."""
    if instruction.opcode != "sort" or not instruction.arrays:
        return 0.0
    along = instruction.dimensions[0] if instruction.dimensions else -1
    dims = instruction.arrays[0].dims
    n_steps = ceil(log2(max(2, dims[along]))) if dims else 1
    n_registers = arrays.array_traffic(instruction.shape_text).n_bytes / REGISTER_BYTES
    return facts.sorted_register_cycles * n_registers * n_steps * (n_steps + 1) / 2


def copied(start: Instruction) -> ArrayTraffic:
    """HBM traffic of an asynchronous copy or slice between memories."""
    sides = arrays.traffic_of_arrays(start.shape_text)[:2]
    if len(sides) < 2:
        return NO_TRAFFIC
    target, source = sides if start.opcode.startswith("copy") else sides[::-1]
    n = min(source.n_bytes, target.n_bytes)
    written = n if target.hbm_bytes else 0
    read = n if source.hbm_bytes else 0
    return ArrayTraffic(hbm_bytes=read + written, hbm_written_bytes=written)


def part_of(instruction: Instruction) -> str | None:
    """The part of the model named in an instruction's scope."""
    part = scope_of(instruction.op_name).part
    return None if part is None else part.value


def gather_cycles(
    flow: Dataflow, computation: Computation, instruction: Instruction, facts: CompilerFacts
) -> float | None:
    """Cycles of the gather that an instruction, or the fusion that it is, consists of; None for others."""
    gather, table = instruction, computation.producer(instruction)
    if instruction.opcode == "fusion":
        fused = flow.fused(instruction)
        gather = next((i for i in fused.instructions if i.opcode == "gather"), instruction)
        table = fused.producer(gather) if gather is not instruction else None
        if table is not None and table.opcode == "parameter":
            table = computation.producer(instruction, table.parameter_number)
    sizes = gather.braced("slice_sizes") if gather.opcode == "gather" else None
    if not sizes or not gather.arrays or table is None:
        return None
    *others, width = (int(size) for size in sizes.split(","))
    if prod(others) != 1:
        return None  # blocks, which are copied as such
    n_rows = prod(gather.arrays[0].dims) // width
    if width < LANES:
        return n_rows * width * facts.gathered_element_cycles
    is_in_hbm = arrays.array_traffic(table.shape_text).hbm_bytes > 0
    return n_rows * row_cycles(width, facts, is_in_hbm=is_in_hbm)


def kernel_work(
    computation: Computation,
    instruction: Instruction,
    rates: Rates,
    *,
    experts: ExpertLoad | None = None,
    lengths: Sequence[SequenceLengths] = (),
) -> arrays.KernelWork:
    """The work of a kernel, for the given load of experts and lengths of sequences."""
    return (
        fused_work(computation, instruction, experts, rates.facts)
        or grouped_work(computation, instruction, experts, rates.facts)
        or _stated_work(computation, instruction)
        or attention_work(computation, instruction, lengths, rates)
        or arrays.KernelWork(
            basis=TimeBasis.ROOFLINE, moved=arrays.touched_traffic(computation, instruction)
        )
    )


def _stated_work(computation: Computation, instruction: Instruction) -> arrays.KernelWork | None:
    """The author's estimate; a kernel in place touches less than the buffers that are its operands.

    The bytes count in each memory by its share of the operands.
    """
    stated = [pattern.search(instruction.attributes) for pattern in (_FLOPS, _BYTES)]
    flops, n_bytes = (0 if match is None else int(match[1]) for match in stated)
    if None in stated or not flops + n_bytes:
        return None
    shapes = (operand.shape_text for operand in computation.producers(instruction))
    operands = sum(map(arrays.array_traffic, shapes), start=NO_TRAFFIC)
    hbm_bytes = round(n_bytes * operands.hbm_bytes / max(1, operands.n_bytes))
    moved = ArrayTraffic(hbm_bytes=hbm_bytes, vmem_bytes=n_bytes - hbm_bytes)
    if not n_bytes:
        moved = arrays.touched_traffic(computation, instruction)
    return arrays.KernelWork(basis=TimeBasis.KERNEL_STATED, flops=flops, moved=moved)


def kernel_time(rates: Rates, work: arrays.KernelWork) -> OpTime:
    """The longer of the kernel's cycles (or its FLOPs below the peak) and its bytes."""
    if work.basis is TimeBasis.ROOFLINE:
        seconds = scaled(
            rates.roofline(moved=work.moved).seconds.value_s, OPERATIONS.bytes_interval
        )
    elif work.cycles is None:
        time = rates.roofline(
            flops=work.flops / rates.speedup(work.operand_dtype),
            moved=work.moved,
            flops_frac=OPERATIONS.kernel_frac,
            flops_interval=OPERATIONS.kernel_interval,
        )
        seconds = longest(time.seconds, rates.loop_s(work.conversion_cycles))
    else:
        body = rates.loop_s(max(work.cycles, work.conversion_cycles))
        seconds = longest(body, rates.hbm(work.moved), scaled(0.0))
    return OpTime(seconds=seconds, basis=work.basis, hbm_s=rates.hbm_busy_s(work.moved))
