"""Marks the operations of manual regions in a traced program.

torch_xla marks the boundaries of a region, not the operations inside. Values used on both sides
would propagate shardings across the boundary, and the partitioner would take a whole tensor for a
shard. So all operations inside are marked as manual, and constants are copied into the region.

A trace has no branches: it computes the results of all, and a custom call marks the choice among them, which becomes
a `stablehlo.case`. Operations that only one branch uses move into that branch. Another custom call marks results of
collectives of all devices, which stay outside branches.
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


CHOICE = "meshscope.choice"
OF_ALL = "meshscope.of_all"
SHARDED = (
    "Sharding"  # the partitioner looks for annotations and boundaries of regions outside branches
)


def outline_branches(main: Any) -> int:
    """Replace every choice of the function by a conditional; returns their number."""
    block = main.regions[0].blocks[0]
    _without_unused(block)
    choices = [op.operation for op in block if call_target(op.operation) == CHOICE]
    for choice in reversed(choices):  # a choice depends on earlier ones
        operations = [op.operation for op in block]
        _outline(choice, operations[: operations.index(choice)])
    for mark in [op.operation for op in block if call_target(op.operation) == OF_ALL]:
        _replace(mark, mark.operands)
    return len(choices)


def _replace(call: Any, results: Any) -> None:
    """Replace a call that returns a tuple by the results of other operations."""
    for part in [use.owner.operation for use in call.results[0].uses]:
        index = ir.IntegerAttr(part.attributes["index"]).value
        part.results[0].replace_all_uses_with(results[index])
        part.erase()
    call.erase()


def _without_unused(block: Any) -> None:
    """Erase operations without effect, such as ordering tokens: they would count as users outside branches."""
    for op in reversed([op.operation for op in block]):
        is_used = any(len(list(result.uses)) for result in op.results)
        if op.name != "func.return" and not is_used:
            op.erase()


def _outline(choice: Any, before: list[Any]) -> None:
    """Replace a choice with the operands [branch, results of branch 0, results of branch 1, ...]."""
    kinds = _types(choice)
    number, *results = choice.operands
    case = ir.Operation.create(
        "stablehlo.case",
        results=kinds,
        operands=[number],
        attributes={SHARDING: ir.StringAttr.get(manual(len(kinds)))},
        regions=len(results) // len(kinds),
        loc=choice.location,
        ip=ir.InsertionPoint(choice),
    )
    branch_of = _branch_of(choice, before, n_results=len(kinds))
    ends: list[Any] = []
    for region in case.regions:
        of_branch, results = results[: len(kinds)], results[len(kinds) :]
        place = ir.InsertionPoint(region.blocks.append())
        ends.append(ir.Operation.create("stablehlo.return", operands=of_branch, ip=place))
    for op in before:
        if op in branch_of:
            op.move_before(ends[branch_of[op]])
    _replace(choice, case.results)


def _types(choice: Any) -> list[Any]:
    """The types of the tuple that a choice returns."""
    kind = ir.TupleType(choice.results[0].type)
    return [kind.get_type(number) for number in range(kind.num_types)]


def _branch_of(choice: Any, before: list[Any], *, n_results: int) -> dict[Any, int]:
    """The branch of each operation whose results only this branch uses."""
    branch_of: dict[Any, int] = {}
    for op in reversed(before):
        if call_target(op) in {BEGINS, ENDS, SHARDED, CHOICE, OF_ALL}:
            continue
        uses = [use for result in op.results for use in result.uses]
        users = {_user(use, choice, n_results, branch_of) for use in uses}
        branch = users.pop() if len(users) == 1 else None
        if branch is not None:
            branch_of[op] = branch
    return branch_of


def _user(use: Any, choice: Any, n_results: int, branch_of: dict[Any, int]) -> int | None:
    """The branch in which a result is used; None if outside."""
    owner = use.owner.operation
    if owner != choice:
        return branch_of.get(owner)
    return (use.operand_number - 1) // n_results if use.operand_number else None
