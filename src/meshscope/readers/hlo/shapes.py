"""The array that a collective carries, as the instruction has it and as the program sees it."""

from dataclasses import dataclass, replace
from math import prod

from meshscope.readers.hlo.attribution import Scope, same_name
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.executions import CallContext
from meshscope.readers.hlo.module import ArrayShape, Computation, Instruction

_MAX_MOVES = 50  # copies and reshapes followed behind a collective


def result_arrays(instruction: Instruction) -> tuple[ArrayShape, ...]:
    """The arrays that the collective yields, one for each operand that it combines.

    A start's tuple holds the operands in front (all-reduce-start excepted) and contexts behind.
    """
    arrays, n = instruction.arrays, len(instruction.operands)
    match instruction.opcode:
        case (
            "all-gather-start"
            | "collective-permute-start"
            | "reduce-scatter-start"
            | "all-to-all-start"
            | "collective-broadcast-start"
        ):
            return arrays[n : 2 * n]
        case "ragged-all-to-all-start":
            return arrays[n : n + 1]
        case "ragged-all-to-all" | "send" | "recv":
            return arrays[:1]
        case _:
            return arrays[:n]


def reduce_scatter_input(part: ArrayShape, dimensions: tuple[int, ...], n: int) -> ArrayShape:
    """The input of a reduce-scatter that leaves each of `n` devices this part."""
    dim = dimensions[0] if dimensions else 0
    return replace(part, dims=tuple(s * n if d == dim else s for d, s in enumerate(part.dims)))


def merge_device_dim(part: ArrayShape, whole: ArrayShape) -> ArrayShape:
    """A gathered array whose devices were laid along a dim of their own, in front of the gathered one.

    `[256,1,1024]` gathered to `[256,2,1024]` is `[256,2048]`.
    """
    for dim, (one, n) in enumerate(zip(part.dims, whole.dims, strict=False)):
        if one == 1 and n > 1 and dim + 1 < len(whole.dims) == len(part.dims):
            merged = (n * whole.dims[dim + 1],)
            return replace(whole, dims=whole.dims[:dim] + merged + whole.dims[dim + 2 :])
    return whole


def shape_in_program(  # noqa: PLR0913  the array and where it stands
    flow: Dataflow,
    context: CallContext,
    result: Instruction | None,
    array: ArrayShape,
    *,
    op_name: str | None,
    is_split: bool,
) -> ArrayShape:
    """`array` in the shape that the source operation gives it.

    The compiler may gather along a new outermost dim (`is_split`) or flatten, and put copies and
    reshapes behind that keep the op_name of the collective; the last of them has the program's
    shape. Behind a split the reshapes that undo it may carry no name at all.
    """
    if result is None:
        return array
    path = _Path(flow=flow, computation=context.computation, op_name=op_name, is_split=is_split)
    seen = path.end(result, array, n_left=_MAX_MOVES)
    if len(seen.dims) == 1 or (is_split and seen == array):
        seen = _before_flattening(flow, context.computation, result, seen)
    if seen.dims[-1:] == (1,) and array.dims[-1:] != (1,):  # a layout for the dot behind it
        return replace(seen, dims=seen.dims[:-1])
    return seen


def _before_flattening(
    flow: Dataflow, computation: Computation, result: Instruction, flat: ArrayShape
) -> ArrayShape:
    """A flattened array in the shape that the reshape behind it gives back, without its dims of 1.

    The compiler merges its own reshape with one of the program's that adds or drops such dims. Where
    devices have a dim of their own, that reshape takes it and the dim behind it together.
    """
    merged = [
        (*flat.dims[:dim], flat.dims[dim] * flat.dims[dim + 1], *flat.dims[dim + 2 :])
        for dim in range(len(flat.dims) - 1)
        if 1 not in flat.dims[dim : dim + 2]
    ]
    for moved in flow.moving_users(computation, result):
        for shape in moved.arrays[:1]:
            dims = _long_dims(shape)
            is_same = len(dims) > 1 and prod(dims) == prod(flat.dims) and shape.dims != flat.dims
            if (
                shape.dtype == flat.dtype
                and is_same
                and dims in (merged if len(flat.dims) > 1 else [dims])
            ):
                return replace(shape, dims=dims)
    return flat


def shape_of_source(
    flow: Dataflow, context: CallContext, operand: Instruction, array: ArrayShape
) -> ArrayShape:
    """`array` in the shape in which it was computed, before it was moved into context.

    For a scatter that the compiler rewrote so far that it lost its name: its result is a part.
    """
    arrays = flow.skip_moves(context, operand).arrays
    is_same = len(arrays) == 1 and arrays[0].dtype == array.dtype
    return arrays[0] if is_same and prod(arrays[0].dims) == prod(array.dims) else array


def equal_up_to_unit_dims(one: ArrayShape, other: ArrayShape) -> bool:
    """Whether two shapes differ in dims of 1 at most."""
    return _long_dims(one) == _long_dims(other)


def untiled_shape(
    flow: Dataflow, context: CallContext, operand: Instruction, tiles: ArrayShape
) -> ArrayShape:
    """An array that travels as its tiles lie in memory in the shape in which it was computed.

    Without its dims of 1: a sum of `[8,3072]` whose rows were cut out of `[8,1,3072]`.
    """
    whole = shape_of_source(flow, *flow.origin(context, operand), tiles)
    return tiles if whole is tiles else replace(whole, dims=_long_dims(whole))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """The way of a collective's result through instructions that only move it."""

    flow: Dataflow
    computation: Computation
    op_name: str | None
    is_split: bool

    def end(self, instruction: Instruction, seen: ArrayShape, *, n_left: int) -> ArrayShape:
        """The last shape that the array takes, from `seen` at this instruction on.

        Where the way forks (one copy is kept, another is used), a branch that reshapes counts; where
        branches disagree, the shape before the fork. Branches that differ in dims of 1 alone do not:
        they are the same array, of which the shortest shape counts.
        """
        ends = {
            self.end(moved, after, n_left=n_left - 1)
            for moved in self.flow.moving_users(self.computation, instruction)
            if n_left and (after := self._after(moved, seen)) is not None
        }
        shortest, *others = sorted(ends - {seen}, key=lambda end: len(end.dims)) or [seen]
        if others and equal_up_to_unit_dims(seen, shortest):
            return seen
        is_one = all(
            equal_up_to_unit_dims(end, shortest) and len(end.dims) > len(shortest.dims)
            for end in others
        )
        return shortest if is_one else seen

    def _after(self, moved: Instruction, seen: ArrayShape) -> ArrayShape | None:
        """The shape behind a move; None where another operation begins or elements are lost."""
        name, arrays = moved.op_name, moved.arrays
        if not arrays:
            return None
        shape = arrays[0]
        is_other = name is not None and not same_name(name, self.op_name)
        if is_other or shape.dtype != seen.dtype or prod(shape.dims) != prod(seen.dims):
            return None
        is_merged = self.is_split and _long_dims(shape) != _long_dims(seen)
        return shape if name is not None or is_merged else seen


def _long_dims(array: ArrayShape) -> tuple[int, ...]:
    """The dims without those of 1, which anything may add or drop."""
    return tuple(size for size in array.dims if size != 1)


def without_layer_dim(
    flow: Dataflow, context: CallContext, operand: Instruction, array: ArrayShape, *, scope: Scope
) -> ArrayShape:
    """`array` without the leading 1 that taking one layer out of a stack leaves behind.

    Layers are stacked where a loop runs over them, and in the stages of a pipeline.
    """
    is_stage = scope.stages is not None and scope.layers is not None
    is_one = array.dims[:1] == (1,) and (scope.n_layers > 1 or is_stage)
    if is_one and _is_layer_of_stack(flow, context, operand, scope.n_layers, is_stage=is_stage):
        return replace(array, dims=array.dims[1:])
    return array


def _is_layer_of_stack(
    flow: Dataflow, context: CallContext, operand: Instruction, n_layers: int, *, is_stage: bool
) -> bool:
    """Whether an array is one of a stack; what a stage takes as it is can be a stack of one."""
    context, source = flow.origin(context, operand)
    if is_stage and source.opcode in {"parameter", "get-tuple-element"}:
        return True
    stack = context.computation.producer(source)
    if source.opcode not in {"dynamic-slice", "slice"} or stack is None:
        return False
    taken, whole = ([n for array in i.arrays for n in array.dims[:1]] for i in (source, stack))
    return taken == [1] and len(whole) == 1 and whole[0] >= max(n_layers, 2)
