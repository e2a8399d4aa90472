"""Manual regions of a traced program, told apart from what the partitioner lays out.

torch_xla marks where a region begins and ends, and nothing inside it. Numbers that both sides use
would carry the mark of one to the other when XLA spreads shardings, and the partitioner then takes a
whole tensor for a share. So everything inside is marked, with constants of its own.
"""

# pyright: reportPrivateImportUsage=false
from collections.abc import Iterator
from typing import Any

from jax._src.lib.mlir import ir

SHARDING = "mhlo.sharding"
BEGINS, ENDS = "SPMDFullToShardShape", "SPMDShardToFullShape"


def mark_regions(main: Any) -> int:
    """Marks every operation inside a manual region of the function; how many there are."""
    block = main.regions[0].blocks[0]
    local: set[Any] = set()  # values that are one device's share
    fixed: set[Any] = set()  # values made of constants alone
    copies: dict[Any, Any] = {}
    n_marked = 0
    for op in [op.operation for op in block]:
        if op.name == "func.return":
            continue
        target = _target(op)
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


def _target(op: Any) -> str | None:
    if op.name != "stablehlo.custom_call":
        return None
    return ir.StringAttr(op.attributes["call_target_name"]).value


def _take_in(op: Any, local: set[Any], fixed: set[Any], copies: dict[Any, Any]) -> None:
    """Marks an operation of a region, and brings in what it uses of outside."""
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
    """The place right behind what makes a value, or at the front for an argument."""
    is_argument = isinstance(value.owner, ir.Block)
    if is_argument:
        return ir.InsertionPoint.at_block_begin(user.block)
    return ir.InsertionPoint.after(value.owner.operation)


def _copied(value: Any, copies: dict[Any, Any]) -> Any:
    """A copy inside of a value made of constants.

    The constants themselves enter as tensors do: XLA makes one of equal constants, marked or not.
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
    """A tensor that is the same on every device, inside the region."""
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
    """The operations that make a value, inputs before users."""
    maker = value.owner.operation
    for operand in maker.operands:
        yield from _makers(operand)
    yield maker


def _mark(op: Any) -> None:
    if SHARDING in op.attributes:
        return
    manual = "{manual}"
    if len(op.results) > 1:
        manual = "{" + ", ".join([manual] * len(op.results)) + "}"
    op.attributes[SHARDING] = ir.StringAttr.get(manual)
