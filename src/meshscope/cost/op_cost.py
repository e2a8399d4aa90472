"""What each instruction of a schedule takes on the core, and from where that is known."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from meshscope.cost.arrays import flops, held, traffic
from meshscope.cost.elementwise import pass_price
from meshscope.cost.kernel_cost import ExpertLoad, known_flops, ragged_dot_cost, stated_cost
from meshscope.cost.rates import KERNEL_FRAC, KERNEL_INTERVAL, OpCost, Rates
from meshscope.events.step_time import TimeBasis
from meshscope.readers.hlo.attribution import scope_of
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.module import Computation, Instruction
from meshscope.readers.hlo.semantics import KIND_OF_OPCODE

# Bookkeeping, nothing but addresses, and calls, whose work is that of what they call.
FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all"}
    | {"partition-id", "replica-id", "add-dependency", "domain"}
)
CALLS = frozenset({"while", "call", "conditional"})
_FREE_CALLS = frozenset(
    {"AllocateBuffer", "ConcatBitcast", "SliceId", "AssumeGatherIndicesInBound"}
    | {"AsyncCollectiveStart", "AsyncCollectiveDone", "Sharding", "ZeroCrop"}
)
_BESIDE_THE_CORE = ("-start", "-update", "-done")
# Operations that move or compute element by element: their bytes say what they take.
_PLAIN = frozenset(
    [
        "abs",
        "add",
        "and",
        "atan2",
        "broadcast",
        "cbrt",
        "ceil",
        "clamp",
        "clz",
        "compare",
        "complex",
        "concatenate",
        "convert",
        "convolution",
        "copy",
        "cosine",
        "divide",
        "dot",
        "dynamic-slice",
        "dynamic-update-slice",
        "erf",
        "exponential",
        "exponential-minus-one",
        "floor",
        "fusion",
        "gather",
        "imag",
        "iota",
        "is-finite",
        "log",
        "log-plus-one",
        "logistic",
        "map",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "or",
        "pad",
        "popcnt",
        "power",
        "real",
        "reduce",
        "reduce-precision",
        "reduce-window",
        "remainder",
        "reshape",
        "reverse",
        "rng",
        "rng-bit-generator",
        "round-nearest-afz",
        "round-nearest-even",
        "rsqrt",
        "scatter",
        "select",
        "select-and-scatter",
        "shift-left",
        "shift-right-arithmetic",
        "shift-right-logical",
        "sign",
        "sine",
        "slice",
        "sort",
        "sqrt",
        "stochastic-convert",
        "subtract",
        "tan",
        "tanh",
        "transpose",
        "triangular-solve",
        "xor",
        "bitcast-convert",
        "topk",
        "dynamic-reshape",
        "custom-call",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an instruction does on the core; `is_estimated` is false where no estimate of the compiler is."""

    price: OpCost
    flops: float
    hbm_bytes: float
    is_estimated: bool
    is_known: bool


class OpCosts:
    """The work of instructions, each looked at once."""

    def __init__(
        self,
        flow: Dataflow,
        rates: Rates,
        profile: Mapping[str, int] | None = None,
        experts: ExpertLoad | None = None,
    ) -> None:
        self._experts = experts
        self._flow = flow
        self._profile = profile or {}
        self._rates = rates
        self._works: dict[int, Work | None] = {}

    def work(self, computation: Computation, instruction: Instruction) -> Work | None:
        """What the core works on an instruction; None where it does not."""
        key = id(instruction)
        if key not in self._works:
            self._works[key] = self._work(computation, instruction)
        return self._works[key]

    def copied(self, start: Instruction) -> OpCost:
        """A copy between memories that runs beside the core: what it writes, at the HBM's rate."""
        return self._rates.roofline(hbm_bytes=copied_bytes(start))

    def _work(self, computation: Computation, instruction: Instruction) -> Work | None:
        opcode = instruction.opcode
        is_free = opcode in FREE | CALLS or instruction.custom_call_target in _FREE_CALLS
        if is_free or opcode.endswith(_BESIDE_THE_CORE) or opcode in KIND_OF_OPCODE:
            return None
        if opcode in {"send", "recv"}:
            return None
        moved = traffic(self._flow, computation, instruction)
        n_flops = flops(self._flow, computation, instruction)
        profiled = self._profile.get(instruction.name) if opcode != "custom-call" else None
        cycles = instruction.estimated_cycles if profiled is None else profiled
        if cycles is not None:
            is_profiled = profiled is not None
            basis = TimeBasis.CYCLE_PROFILE if is_profiled else TimeBasis.COMPILER_CYCLES
            price = self._rates.cycles(cycles, basis)
            passed = pass_price(self._flow, computation, instruction, moved, self._rates)
            if (
                passed is not None
                and not is_profiled
                and passed.seconds.value_s < price.seconds.value_s
            ):
                price = passed
            return Work(
                price=price,
                flops=n_flops,
                hbm_bytes=moved.hbm_bytes,
                is_estimated=True,
                is_known=True,
            )
        if all(not array.dims for array in instruction.arrays) and opcode != "custom-call":
            return self._scalar_kernel(instruction)
        if opcode == "custom-call":
            return self._kernel(computation, instruction)
        sorts = self._sorted_bytes(instruction)
        price = self._rates.roofline(
            flops=n_flops, hbm_bytes=moved.hbm_bytes, vmem_bytes=moved.vmem_bytes + sorts
        )
        is_known = opcode in _PLAIN
        if not is_known:
            price = self._rates.unknown(n_bytes=moved.n_bytes)
        return Work(
            price=price,
            flops=n_flops,
            hbm_bytes=moved.hbm_bytes,
            is_estimated=False,
            is_known=is_known,
        )

    def _scalar_kernel(self, instruction: Instruction) -> Work | None:
        """A fusion to a scalar, as of a norm: its launch where that was measured, else nothing."""
        if self._rates.measured is None or instruction.opcode != "fusion":
            return None
        price = self._rates.roofline()
        return Work(price=price, flops=0.0, hbm_bytes=0.0, is_estimated=False, is_known=True)

    def _kernel(self, computation: Computation, instruction: Instruction) -> Work:
        """A kernel by what its author states, by its operands where we know it, else by its bytes."""
        moved = traffic(self._flow, computation, instruction)
        load, stated = self._experts, stated_cost(instruction)
        ragged = None if load is None else ragged_dot_cost(computation, instruction, load)
        n_flops: int | None
        if ragged is not None:
            n_flops, hbm_bytes = ragged
        elif stated is not None:
            n_flops, hbm_bytes = stated[0], max(moved.hbm_bytes, stated[1])
        else:
            n_flops, hbm_bytes = known_flops(computation, instruction), moved.hbm_bytes
        if n_flops is None:
            price = self._rates.unknown(n_bytes=moved.n_bytes)
        else:
            price = self._rates.roofline(
                flops=n_flops,
                hbm_bytes=hbm_bytes,
                flops_frac=KERNEL_FRAC,
                flops_interval=KERNEL_INTERVAL,
            )
        return Work(
            price=price,
            flops=n_flops or 0,
            hbm_bytes=hbm_bytes,
            is_estimated=False,
            is_known=n_flops is not None,
        )

    def _sorted_bytes(self, instruction: Instruction) -> int:
        """Bytes that the passes of a bitonic sort move in VMEM: log2(n)(log2(n)+1)/2 of them."""
        if instruction.opcode != "sort" or not instruction.arrays:
            return 0
        along = instruction.dimensions[0] if instruction.dimensions else -1
        dims = instruction.arrays[0].dims
        n_steps = log2(max(2, dims[along])) if dims else 1
        return round(held(instruction.shape_text).n_bytes * n_steps * (n_steps + 1))


def copied_bytes(start: Instruction) -> int:
    """Bytes that a copy moves: its start holds the source, perhaps more of it than is taken, and the target."""
    sizes = [array.n_bytes or 0 for array in start.arrays if array.dims]
    return min(sizes[:2], default=0)


def part_of(instruction: Instruction) -> str | None:
    """The part of the model that an instruction belongs to, as far as its own name says."""
    part = scope_of(instruction.op_name).part
    return None if part is None else part.value
