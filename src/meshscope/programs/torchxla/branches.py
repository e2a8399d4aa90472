"""Turns marked calls of a traced program into conditionals, of which a device runs one branch.

A trace has no branches: it computes the results of all, and a custom call marks the choice among them.
Here the call becomes a `stablehlo.case`, and operations that only one branch uses move into that branch. Another
custom call marks results of collectives of all devices, which stay outside branches.
"""

# pyright: reportPrivateImportUsage=false
from typing import Any

from jax._src.lib.mlir import ir

from meshscope.programs.torchxla.regions import BEGINS, ENDS, SHARDING, call_target, manual

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
