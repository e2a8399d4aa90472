"""Marks the operations of manual regions in a traced program.

torch_xla marks the boundaries of a region, not the operations inside. Values used on both sides
would propagate shardings across the boundary, and the partitioner would take a whole tensor for a
shard. So all operations inside are marked as manual, and constants are copied into the region.
"""

# pyright: reportPrivateImportUsage=false
from collections.abc import Iterator
from typing import Any

from jax._src.lib.mlir import ir

SHARDING = "mhlo.sharding"
BEGINS, ENDS = "SPMDFullToShardShape", "SPMDShardToFullShape"


def mark_regions(main: Any) -> int:
    """Mark every operation inside manual regions of the function; returns their number."""
    block = main.regions[0].blocks[0]
    local: set[Any] = set()  # values that are one device's shard
    fixed: set[Any] = set()  # values computed from constants only
    copies: dict[Any, Any] = {}
    n_marked = 0
    for op in [op.operation for op in block]:
        if op.name == "func.return":
            continue
        target = call_target(op)
        if target == BEGINS:
            local.update(op.results)
        elif target == ENDS:
            continue
        elif any(operand in local for operand in op.operands):
            _take_in(op, local, fixed, copies)
            local.update(op.results)
            n_marked += 1
        elif all(operand in fixed for operand in op.operands):
            fixed.update(op.results)
    return n_marked


def call_target(op: Any) -> str | None:
    """The target of a custom call; None for other operations."""
    if op.name != "stablehlo.custom_call":
        return None
    return ir.StringAttr(op.attributes["call_target_name"]).value


def _take_in(op: Any, local: set[Any], fixed: set[Any], copies: dict[Any, Any]) -> None:
    """Mark an operation of a region, and bring its outside operands into the region."""
    for number, operand in enumerate(op.operands):
        if operand in local:
            continue
        if operand in fixed:
            op.operands[number] = _copied(operand, copies)
            continue
        if operand not in copies:  # a whole tensor is the same on every device
            copies[operand] = _entered(operand, _behind(operand, op))
        op.operands[number] = copies[operand]
    _mark(op)


def _behind(value: Any, user: Any) -> Any:
    """The insertion point after the definition of a value, or the block's start for arguments."""
    is_argument = isinstance(value.owner, ir.Block)
    if is_argument:
        return ir.InsertionPoint.at_block_begin(user.block)
    return ir.InsertionPoint.after(value.owner.operation)


def _copied(value: Any, copies: dict[Any, Any]) -> Any:
    """A copy, inside the region, of a value computed from constants.

    The constants enter like tensors, because XLA merges equal constants whether marked or not.
    """
    for maker in _makers(value):
        if maker.results[0] in copies:
            continue
        behind = ir.InsertionPoint.after(maker)
        if not len(maker.operands):
            copies[maker.results[0]] = _entered(maker.results[0], behind)
            continue
        copy = maker.clone(behind).operation
        for number, operand in enumerate(copy.operands):
            copy.operands[number] = copies[operand]
        _mark(copy)
        copies.update(zip(maker.results, copy.results, strict=True))
    return copies[value]


def _entered(value: Any, place: Any) -> Any:
    """A replicated tensor, inside the region."""
    for target, sharding in (("Sharding", "{replicated}"), (BEGINS, "{manual}")):
        attributes: dict[str, Any] = {
            "call_target_name": ir.StringAttr.get(target),
            SHARDING: ir.StringAttr.get(sharding),
        }
        op = ir.Operation.create(
            "stablehlo.custom_call", [value.type], [value], attributes, ip=place
        )
        value, place = op.results[0], ir.InsertionPoint.after(op)
    return value


def _makers(value: Any) -> Iterator[Any]:
    """The operations that compute a value, operands before users."""
    maker = value.owner.operation
    for operand in maker.operands:
        yield from _makers(operand)
    yield maker


def _mark(op: Any) -> None:
    if SHARDING in op.attributes:
        return
    op.attributes[SHARDING] = ir.StringAttr.get(manual(len(op.results)))


def manual(n_results: int) -> str:
    """The sharding of an operation in a manual region."""
    one = "{manual}"
    return one if n_results == 1 else "{" + ", ".join([one] * n_results) + "}"
