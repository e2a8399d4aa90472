"""Producers and users of instructions, across the boundaries of fusions, calls and loops."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from math import prod

import numpy as np

from meshscope.readers.hlo.executions import AsyncChain, CallContext, CallSite, async_chain_ends
from meshscope.readers.hlo.module import Computation, HloModule, Instruction

# Opcodes that keep the elements of their operand and change their location, layout or shape.
MOVEMENT = frozenset({"bitcast", "copy", "reshape", "transpose", "copy-start", "copy-done"})
_SAME_VALUES = MOVEMENT | {"convert"}
_MAX_VISITED = 2_000  # instructions in one search
_MAX_NESTING = 16  # of fusions in fusions
_MAX_DEPTH = 12  # operations between a device's ID and the start of its slice
_MAX_NUMBER = 1 << 40  # of a constant that is followed
_MAX_TEXT = 1 << 20  # characters

# By opcode, and of comparisons by direction.
ARITHMETIC: Mapping[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "subtract": np.subtract,
    "negate": np.negative,
    "multiply": np.multiply,
    "divide": lambda a, b: a // np.maximum(b, 1),
    "remainder": lambda a, b: a % np.maximum(b, 1),
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "select": np.where,
    "shift-left": np.left_shift,
    "shift-right-logical": np.right_shift,
    "clamp": lambda low, value, high: np.clip(value, low, high),
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}

_PASSED = frozenset({"parameter", "get-tuple-element"})
_ALONE = _PASSED | {"negate"}
_FOLLOWED = _PASSED | ARITHMETIC.keys() | {"dynamic-slice"}

Location = tuple[CallContext, Instruction]


class Dataflow:
    """The producers and users of a module's instructions, indexed on first use."""

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self._users: dict[str, dict[str, list[Instruction]]] = {}
        self._opcodes: dict[str, frozenset[str]] = {}
        self._fused: dict[int, Computation] = {}  # by id of the fusion

    @cached_property
    def async_chain_ends(self) -> dict[AsyncChain, Instruction]:
        """The fusion that holds the result of every asynchronous chain."""
        return async_chain_ends(self.module)

    def users(self, computation: Computation, instruction: Instruction) -> list[Instruction]:
        """The instructions of the computation that use this one, in schedule order."""
        if computation.name not in self._users:
            index: dict[str, list[Instruction]] = {}
            for user in computation.instructions:
                for producer in dict.fromkeys(computation.producers(user)):
                    index.setdefault(producer.name, []).append(user)
            self._users[computation.name] = index
        return self._users[computation.name].get(instruction.name, [])

    def is_movement(self, instruction: Instruction) -> bool:
        """Whether the instruction only moves its operand: a copy, a bitcast, or a fusion of those."""
        return self.consists_of(instruction, MOVEMENT)

    def keeps_values(self, instruction: Instruction) -> bool:
        """Whether the instruction only moves its operand or converts its dtype."""
        return self.consists_of(instruction, _SAME_VALUES)

    def moving_users(self, computation: Computation, instruction: Instruction) -> list[Instruction]:
        """The users that only move this result."""
        return [u for u in self.users(computation, instruction) if self.is_movement(u)]

    def consists_of(self, instruction: Instruction, opcodes: frozenset[str]) -> bool:
        """Whether the instruction has one of these opcodes, or is a fusion of only those."""
        if instruction.opcode != "fusion":
            return instruction.opcode in opcodes
        return self._opcodes_in(self.fused(instruction), 0) <= opcodes | {"parameter"}

    def _opcodes_in(self, computation: Computation, depth: int) -> frozenset[str]:
        if depth > _MAX_NESTING:
            return frozenset({"fusion"})
        if computation.name not in self._opcodes:
            opcodes = {i.opcode for i in computation.instructions if i.opcode != "fusion"}
            for nested in computation.instructions:
                if nested.opcode == "fusion":
                    opcodes |= self._opcodes_in(self.fused(nested), depth + 1)
            self._opcodes[computation.name] = frozenset(opcodes)
        return self._opcodes[computation.name]

    def fused(self, fusion: Instruction) -> Computation:
        """The computation of a fusion."""
        if (key := id(fusion)) not in self._fused:
            self._fused[key] = self.module.fused(fusion)
        return self._fused[key]

    def inner(
        self, computation: Computation, depth: int = 0
    ) -> Iterator[tuple[Computation, Instruction]]:
        """The instructions of a fused computation and of its nested fusions."""
        for instruction in computation.instructions:
            yield computation, instruction
            if instruction.opcode == "fusion" and depth < _MAX_NESTING:
                yield from self.inner(self.fused(instruction), depth + 1)

    def skip_moves(self, context: CallContext, instruction: Instruction) -> Instruction:
        """The source of moves and conversions; the instruction itself if it computes."""
        computation = context.computation
        while True:
            source = None
            if self.keeps_values(instruction):
                source = computation.producer(instruction)
            elif instruction.custom_call_target == "ConcatBitcast":
                # libtpu prefetches a large array in slices, which this call joins.
                done = computation.producer(instruction)
                start = computation.producer(done) if done and done.opcode == "slice-done" else None
                is_prefetch = start is not None and start.opcode == "slice-start"
                source = computation.producer(start) if start and is_prefetch else None
            if source is None:
                return instruction
            instruction = source

    def joined_slices(
        self, computation: Computation, slice_start: Instruction
    ) -> Instruction | None:
        """The array that libtpu prefetches in slices such as this one; None if it is no prefetch."""
        if slice_start.opcode != "slice-start":
            return None
        dones = [u for u in self.users(computation, slice_start) if u.opcode == "slice-done"]
        joins = [u for done in dones for u in self.users(computation, done)]
        is_prefetch = len(joins) == 1 and joins[0].custom_call_target == "ConcatBitcast"
        return joins[0] if is_prefetch else None

    def origin(self, context: CallContext, instruction: Instruction) -> Location:
        """The instruction that computes a value, through moves and into fusions."""
        for _ in range(_MAX_NESTING):
            instruction = self.skip_moves(context, instruction)
            index = None
            if instruction.opcode == "get-tuple-element":
                whole = context.computation.producer(instruction)
                if whole is None or whole.opcode != "fusion":
                    break
                instruction, index = whole, instruction.tuple_index
            if instruction.opcode != "fusion":
                break
            context = self.inside(context, instruction)
            instruction = context.computation.root
            if index is not None and instruction.opcode == "tuple":
                instruction = context.computation.producer(instruction, index) or instruction
        return context, instruction

    def inside(self, context: CallContext, fusion: Instruction) -> CallContext:
        """The context of a fused computation, called from this context."""
        site = CallSite(instruction=fusion, context=context, count=1, caveats=())
        return CallContext(computation=self.fused(fusion), callers=(*context.callers, site))

    def inputs(self, context: CallContext, instruction: Instruction) -> list[Location]:
        """The definitions of the operands; for a parameter, the operand of its caller."""
        if instruction.opcode == "parameter":
            return self._argument(context, instruction.parameter_number)
        producers = context.computation.producers(instruction)
        if instruction.opcode == "recv":  # devices receive what the matching send sends
            sends = (i for i in context.computation.instructions if i.opcode == "send")
            known = instruction.rendezvous
            return [(context, i) for i in sends if known is not None and i.rendezvous == known]
        if instruction.opcode == "get-tuple-element" and producers:
            return self._element(context, producers[0], instruction)
        return [(context, i) for i in producers]

    def _argument(self, context: CallContext, number: int) -> list[Location]:
        if (caller := context.caller) is None:
            return []
        outside, start = caller.context.computation, caller.instruction
        if start.opcode == "while":
            number = 0
        arguments = list(outside.producers(start))
        if start.opcode.endswith("-start"):  # newer libtpu passes operands in an update
            for update in self.users(outside, start):
                if update.opcode.endswith("-update"):
                    arguments += outside.producers(update)[1:]
        return [(caller.context, arguments[number])] if 0 <= number < len(arguments) else []

    def _element(
        self, context: CallContext, whole: Instruction, get: Instruction
    ) -> list[Location]:
        """The element that a get-tuple-element takes if the tuple is visible; else the tuple."""
        locations = [(context, whole)]
        if whole.opcode == "parameter":
            locations = self._argument(context, whole.parameter_number) or locations
        (outer, source), index = locations[0], get.tuple_index
        if source.opcode != "tuple" or index is None:
            return locations
        element = outer.computation.producer(source, index)
        return [(outer, element)] if element else []

    def by_device(
        self, context: CallContext, instruction: Instruction, depth: int = 0
    ) -> np.ndarray | None:
        """[n_devices, ...] what a number or a constant table is on each device; None if it is not followed."""
        context, at = self.origin(context, instruction)
        devices, n_partitions = np.arange(self.module.n_devices), self.module.n_partitions
        if at.opcode in {"partition-id", "replica-id"}:
            return (
                devices % n_partitions if at.opcode == "partition-id" else devices // n_partitions
            )
        if at.opcode == "constant":
            return _table(at, len(devices))
        if depth > _MAX_DEPTH or at.opcode not in _FOLLOWED:
            return None
        values = [self.by_device(*one, depth + 1) for one in self.inputs(context, at)]
        known = [value for value in values if value is not None]
        n_inputs = {"clamp": 3, "select": 3}.get(at.opcode, 1 if at.opcode in _ALONE else 2)
        if len(known) < len(values) or len(known) != n_inputs:
            return None
        first, *others = known
        if at.opcode == "dynamic-slice" and first.ndim == 2 and prod(at.arrays[0].dims) == 1:
            return first[devices, np.clip(others[0], 0, first.shape[1] - 1)]
        are_scalars = at.opcode in ARITHMETIC and all(value.ndim == 1 for value in known)
        same = first if at.opcode in _PASSED else None
        return ARITHMETIC[at.opcode](first, *others) if are_scalars else same

    def depends_on(self, context: CallContext, start: Instruction, opcodes: frozenset[str]) -> bool:
        """Whether `start` depends on an instruction with one of these opcodes."""
        stack = [(context, start)]
        seen: set[tuple[str, str]] = set()
        while stack and len(seen) < _MAX_VISITED:
            visited, instruction = stack.pop()
            key = (visited.computation.name, instruction.name)
            if key in seen:
                continue
            seen.add(key)
            if instruction.opcode in opcodes:
                return True
            is_fusion = instruction.opcode == "fusion"
            if is_fusion and self._opcodes_in(self.fused(instruction), 0) & opcodes:
                return True
            stack += self.inputs(visited, instruction)
        return False


def _table(constant: Instruction, n_devices: int) -> np.ndarray | None:
    """[n_devices, ...] the whole numbers of a constant; None for others."""
    dims = constant.arrays[0].dims if len(constant.arrays) == 1 else (0,)
    numbers = [int(text) for text in re.findall(r"-?\d+", constant.operand_text[:_MAX_TEXT])]
    if len(numbers) != prod(dims) or any(abs(number) > _MAX_NUMBER for number in numbers):
        return None
    dims = () if prod(dims) == 1 else dims
    return np.broadcast_to(np.reshape(numbers, dims), (n_devices, *dims))
