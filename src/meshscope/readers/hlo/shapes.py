"""The arrays of a collective: in its instruction, and in the source program."""

from dataclasses import replace
from math import prod

from meshscope.readers.hlo.attribution import Scope, same_name
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.executions import CallContext
from meshscope.readers.hlo.module import ArrayShape, Computation, Instruction

_MAX_MOVES = 50  # copies and reshapes to follow after a collective


def result_arrays(instruction: Instruction) -> tuple[ArrayShape, ...]:
    """The result arrays of a collective, one for each combined operand.

    The tuple of a start begins with the operands (except all-reduce-start) and ends with contexts.
    """
    arrays, n = instruction.arrays, len(instruction.operands)
    if "slice_sizes=" in instruction.attributes:  # a permute that writes into its second operand
        return arrays[1:2] if instruction.opcode.endswith("-start") else arrays[:1]
    match instruction.opcode:
        case "ragged-all-to-all-start":
            return arrays[n : n + 1]
        case "ragged-all-to-all" | "send" | "recv":
            return arrays[:1]
        case opcode if opcode.endswith("-start") and opcode != "all-reduce-start":
            return arrays[n : 2 * n] or arrays[:n]
        case _:
            return arrays[:n]


def merge_device_dim(part: ArrayShape, whole: ArrayShape) -> ArrayShape:
    """The shape of an all-gather whose separate device dim is merged with the gathered dim.

    `[256,1,1024]` gathered to `[256,2,1024]` is `[256,2048]` in the program.
    """
    for dim, (one, n) in enumerate(zip(part.dims, whole.dims, strict=False)):
        if one == 1 and n > 1 and dim + 1 < len(whole.dims) == len(part.dims):
            merged = (n * whole.dims[dim + 1],)
            return replace(whole, dims=whole.dims[:dim] + merged + whole.dims[dim + 2 :])
    return whole


def shape_in_program(  # noqa: PLR0913  the array and its position in the dataflow
    flow: Dataflow,
    context: CallContext,
    result: Instruction | None,
    array: ArrayShape,
    *,
    op_name: str | None,
    is_split: bool,
) -> ArrayShape:
    """The shape of `array` in the source operation.

    The compiler may gather along a new outermost dim (`is_split`) or flatten the array. The copies
    and reshapes that follow keep the op_name of the collective, and the last of them has the
    program's shape. Reshapes that undo a split may have no op_name.
    """
    if result is None:
        return array

    def after(moved: Instruction, before: ArrayShape) -> ArrayShape | None:
        """The shape after a move; None if another operation begins or elements are lost."""
        name, arrays = moved.op_name, moved.arrays
        is_other = name is not None and not same_name(name, op_name)
        if not arrays or is_other or arrays[0].dtype != before.dtype:
            return None
        if prod(arrays[0].dims) != prod(before.dims):
            return None
        is_merged = is_split and _long_dims(arrays[0]) != _long_dims(before)
        return arrays[0] if name is not None or is_merged else before

    def end(instruction: Instruction, shape: ArrayShape, n_left: int) -> ArrayShape:
        """The last shape of the array, which has `shape` at this instruction.

        If the result has several users (one copy is kept, another used), a path that reshapes wins.
        If paths disagree, the shape before they split wins. Paths that differ only in unit dims
        agree on the shortest shape.
        """
        users = flow.moving_users(context.computation, instruction) if n_left else ()
        moves = [(moved, after(moved, shape)) for moved in users]
        ends = {end(moved, to, n_left - 1) for moved, to in moves if to is not None} - {shape}
        shortest, *others = sorted(ends, key=lambda one: len(one.dims)) or [shape]
        if others and equal_up_to_unit_dims(shape, shortest):
            return shape
        do_agree = all(
            equal_up_to_unit_dims(one, shortest) and len(one.dims) > len(shortest.dims)
            for one in others
        )
        return shortest if do_agree else shape

    shape = end(result, array, _MAX_MOVES)
    if len(shape.dims) == 1 or (is_split and shape == array):
        shape = _unflattened(flow, context.computation, result, shape)
    if shape.dims[-1:] == (1,) and array.dims[-1:] != (1,):  # a layout for the dot that follows
        return replace(shape, dims=shape.dims[:-1])
    return shape


def _unflattened(
    flow: Dataflow, computation: Computation, result: Instruction, flat: ArrayShape
) -> ArrayShape:
    """The shape that a reshape restores from a flattened array, without unit dims.

    The compiler merges its reshape with one of the program that adds or drops unit dims. The
    reshape also merges a separate device dim with the dim after it.
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
            is_wanted = len(flat.dims) == 1 or dims in merged
            if shape.dtype == flat.dtype and is_same and is_wanted:
                return replace(shape, dims=dims)
    return flat


def shape_of_source(
    flow: Dataflow, context: CallContext, operand: Instruction, array: ArrayShape
) -> ArrayShape:
    """The shape in which the operand was computed, before moves.

    For a reduce-scatter that lost its name in rewrites: its result has only the shard's shape.
    """
    arrays = flow.skip_moves(context, operand).arrays
    is_same = len(arrays) == 1 and arrays[0].dtype == array.dtype
    return arrays[0] if is_same and prod(arrays[0].dims) == prod(array.dims) else array


def equal_up_to_unit_dims(one: ArrayShape, other: ArrayShape) -> bool:
    """Whether two shapes are equal without their unit dims."""
    return _long_dims(one) == _long_dims(other)


def untiled_shape(
    flow: Dataflow, context: CallContext, operand: Instruction, tiles: ArrayShape
) -> ArrayShape:
    """The computed shape of an array that is sent tile by tile, without unit dims.

    For example `[8,3072]`, sliced from `[8,1,3072]` and sent as `[24,8,128]`.
    """
    whole = shape_of_source(flow, *flow.origin(context, operand), tiles)
    return tiles if whole is tiles else replace(whole, dims=_long_dims(whole))


def _long_dims(array: ArrayShape) -> tuple[int, ...]:
    return tuple(size for size in array.dims if size != 1)


def without_layer_dim(
    flow: Dataflow, context: CallContext, operand: Instruction, array: ArrayShape, *, scope: Scope
) -> ArrayShape:
    """The array without the leading unit dim that remains of the layer dim.

    Weights are stacked over layers in loops over layers and in pipeline stages; a pipeline stage may
    have a stack of one layer.
    """
    is_stage = scope.stages is not None and scope.layers is not None
    if array.dims[:1] != (1,) or not (scope.n_layers > 1 or is_stage):
        return array
    without = replace(array, dims=array.dims[1:])
    context, source = flow.origin(context, operand)
    if is_stage and source.opcode in {"parameter", "get-tuple-element"}:
        return without
    stack = context.computation.producer(source)
    if source.opcode not in {"dynamic-slice", "slice"} or stack is None:
        return array
    one, all_ = ([n for a in i.arrays for n in a.dims[:1]] for i in (source, stack))
    is_layer = one == [1] and len(all_) == 1 and all_[0] >= max(scope.n_layers, 2)
    return without if is_layer else array
