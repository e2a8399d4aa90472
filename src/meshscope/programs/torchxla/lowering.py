"""Rewrites a program traced by torch_xla for the XLA compiler of another target, and compiles it.

torch_xla emits an HLO proto; JAX's compiler client takes StableHLO. The rewrite shards arguments by
the plan, aliases results with the arguments they replace, turns cross-replica collectives into
cross-partition ones (an SPMD program has one replica), and replaces the token with which torch_xla
orders collectives by a constant.

torch_xla marks the boundaries of a manual region, not the operations inside. Values used on both sides
would propagate shardings across the boundary, and the partitioner would take a whole tensor for a
shard. So all operations inside are marked as manual, and constants are copied into the region.

A trace has no branches: it computes the results of all, and a custom call marks the choice among them, which becomes
a `stablehlo.case`. Operations that only one branch uses move into that branch.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib import _jax
from jax._src.lib import xla_client as xc
from jax._src.lib.mlir import ir

from meshscope.errors import ParseError
from meshscope.programs.jax.stablehlo import CompiledStableHlo, compile_stablehlo

_PARAMETER = re.compile(r"^\s+(?:ROOT )?%\S+ = \S+ parameter\((?P<number>\d+)\)")
ORDER = "order"  # name of the zero argument with which torch_xla orders collectives
_OF_GROUPS = ("all_reduce", "all_gather", "reduce_scatter")
_OF_DEVICES = ("all_to_all", "collective_permute")
_PARTITIONS = 1  # channel type between devices of one program (xla_data.proto, ChannelType)
SHARDING = "mhlo.sharding"
BEGINS, ENDS = "SPMDFullToShardShape", "SPMDShardToFullShape"
CHOICE = "meshscope.choice"
# The partitioner looks for annotations and boundaries of regions outside branches.
_OUTSIDE = {BEGINS, ENDS, "Sharding", CHOICE}
_UNREADABLE = "Save one with torch_xla._XLAC._get_xla_tensors_hlo_proto([tensors])."


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A program as torch_xla traced it.

    `parameters` are the argument names by number, None if unnamed; () for imported programs, whose
    arguments are left unchanged. `shardings` has XLA's text per named argument, `result_shardings`
    per result, and `aliases` the argument whose memory a result reuses.
    """

    proto: bytes
    parameters: tuple[str | None, ...] = ()
    shardings: Mapping[str, str] = field(default_factory=dict)
    result_shardings: tuple[str | None, ...] = ()
    aliases: Mapping[int, str] = field(default_factory=dict)


def parameters_of(proto: bytes, prefix: str) -> tuple[str | None, ...]:
    """Parameter names by number, from the scopes in which they were created."""
    text = hlo_text(proto, "the traced program")
    named = re.compile(rf'op_name="(?:[^"]*/)?{re.escape(prefix)}([^"/]*?)(?:\.\d+)?["/]')
    names: dict[int, str | None] = {}
    for line in text[text.index("\nENTRY ") :].splitlines():
        if match := _PARAMETER.match(line):
            name = named.search(line)
            names[int(match["number"])] = None if name is None else name[1]
    return tuple(names[number] for number in range(len(names)))


def hlo_text(proto: bytes, origin: str) -> str:
    """The text of an HLO proto; ParseError if invalid."""
    try:
        return xc.hlo.HloModule.from_serialized_hlo_module_proto(proto).to_string()
    except (RuntimeError, ValueError, xc.XlaRuntimeError) as error:
        raise ParseError(
            f"{origin}: not an HLO proto ({str(error)[:200]}). {_UNREADABLE}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A StableHLO program for these devices."""

    module: Any
    context: Any
    devices: list[Any]

    def compile(self, *, is_loaded: bool = False) -> CompiledStableHlo:
        """Compile one program, partitioned over all devices by torch_xla's annotations (GSPMD)."""
        options = {
            "compiler_options": None,
            "is_tupled": False,
            "is_shardy": False,
            "propagates_to_parameters": (False,),
            "propagates_to_outputs": (False,),
        }
        with self.context:
            bytecode = jax_mlir.module_to_bytecode(self.module)
        return compile_stablehlo(bytecode, self.devices, options=options, is_loaded=is_loaded)


def lowered(traced: Traced, devices: list[Any], *, name: str) -> Lowered:
    """Lower the traced program for these devices, in their order."""
    try:
        bytecode = _jax.mlir.hlo_to_stablehlo(traced.proto)
    except (RuntimeError, ValueError) as error:
        raise ParseError(
            f"the graph is not an HLO proto that this XLA can read ({str(error)[:200]}). {_UNREADABLE}"
        ) from error
    context = jax_mlir.make_ir_context()
    with context, ir.Location.unknown():
        module = ir.Module.parse(bytecode)
        main = next(
            op
            for op in module.body
            if str(op.operation.name) == "func.func" and str(op.name) == '"main"'
        )
        module.operation.attributes["sym_name"] = ir.StringAttr.get(name)
        _give_channels(module)
        if traced.parameters:
            _with_layouts(main, traced)
            _without_tokens(main, traced)
        mark_regions(main)
        outline_branches(main)
    return Lowered(module=module, context=context, devices=devices)


def _operations(op: Any) -> Iterator[Any]:
    for inner in (inner for region in op.regions for block in region for inner in block):
        yield inner.operation
        yield from _operations(inner.operation)


def _give_channels(module: Any) -> None:
    n_channels = 0
    for op in _operations(module.operation):
        name = op.name.removeprefix("stablehlo.")
        if name not in (*_OF_GROUPS, *_OF_DEVICES):
            continue
        n_channels += 1
        op.attributes["channel_handle"] = ir.Attribute.parse(
            f"#stablehlo.channel_handle<handle = {n_channels}, type = {_PARTITIONS}>"
        )
        if name in _OF_GROUPS:
            op.attributes["use_global_device_ids"] = ir.UnitAttr.get()


def _with_layouts(main: Any, traced: Traced) -> None:
    number_of = {name: number for number, name in enumerate(traced.parameters) if name is not None}
    arguments: list[dict[str, Any]] = [{} for _ in traced.parameters]
    for name, text in traced.shardings.items():
        if name in number_of:  # unused arguments are removed by the trace
            arguments[number_of[name]][SHARDING] = ir.StringAttr.get(text)
    for result, name in traced.aliases.items():
        if name in number_of:
            index = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), result)
            arguments[number_of[name]]["tf.aliasing_output"] = index
    main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in arguments])
    results: list[dict[str, Any]] = [
        {} if text is None else {SHARDING: ir.StringAttr.get(text)}
        for text in traced.result_shardings
    ]
    if results:
        main.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in results])


def _without_tokens(main: Any, traced: Traced) -> None:
    """Replace ordering tokens by a constant zero; ParseError for other unnamed arguments."""
    block = main.regions[0].blocks[0]
    for number, name in enumerate(traced.parameters):
        argument = block.arguments[number]
        if name is None:
            raise ParseError(
                f"argument {number} of the traced program ({argument.type}) has no name: torch_xla "
                "transferred it to a device while tracing. Pass it as an argument."
            )
        if name != ORDER:
            continue
        kind = ir.RankedTensorType(argument.type)
        zero = ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(kind.element_type, 0.0))
        place = ir.InsertionPoint.at_block_begin(block)
        constant = ir.Operation.create(
            "stablehlo.constant", results=[kind], attributes={"value": zero}, ip=place
        )
        argument.replace_all_uses_with(constant.results[0])


def mark_regions(main: Any) -> None:
    """Mark every operation inside manual regions of the function."""
    local: set[Any] = set()  # values that are one device's shard
    fixed: set[Any] = set()  # values computed from constants only
    copies: dict[Any, Any] = {}
    for op in [op.operation for op in main.regions[0].blocks[0]]:
        target = _call_target(op)
        if op.name == "func.return" or target == ENDS:
            continue
        if target == BEGINS:
            local.update(op.results)
        elif any(operand in local for operand in op.operands):
            for number, operand in enumerate(op.operands):
                if operand in fixed and operand not in local:
                    op.operands[number] = _copied(operand, copies)
                elif operand not in local:
                    if operand not in copies:  # a whole tensor is the same on every device
                        is_argument = isinstance(operand.owner, ir.Block)
                        place = (
                            ir.InsertionPoint.at_block_begin(op.block)
                            if is_argument
                            else ir.InsertionPoint.after(operand.owner.operation)
                        )
                        copies[operand] = _entered(operand, place)
                    op.operands[number] = copies[operand]
            _mark(op)
            local.update(op.results)
        elif all(operand in fixed for operand in op.operands):
            fixed.update(op.results)


def _call_target(op: Any) -> str | None:
    if op.name != "stablehlo.custom_call":
        return None
    return ir.StringAttr(op.attributes["call_target_name"]).value


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
    if SHARDING not in op.attributes:
        op.attributes[SHARDING] = ir.StringAttr.get(_manual(len(op.results)))


def _manual(n_results: int) -> str:
    """The sharding of an operation in a manual region."""
    one = "{manual}"
    return one if n_results == 1 else "{" + ", ".join([one] * n_results) + "}"


def outline_branches(main: Any) -> None:
    """Replace every choice of the function by a conditional."""
    block = main.regions[0].blocks[0]
    for op in reversed([op.operation for op in block]):
        # Operations without effect, such as ordering tokens, would count as users outside branches.
        if op.name != "func.return" and not any(len(list(result.uses)) for result in op.results):
            op.erase()
    choices = [op.operation for op in block if _call_target(op.operation) == CHOICE]
    for choice in reversed(choices):  # a choice depends on earlier ones
        operations = [op.operation for op in block]
        _outline(choice, operations[: operations.index(choice)])


def _outline(choice: Any, before: list[Any]) -> None:
    """Replace a choice with the operands [branch, results of branch 0, results of branch 1, ...]."""
    kind = ir.TupleType(choice.results[0].type)
    kinds = [kind.get_type(number) for number in range(kind.num_types)]
    number, *results = choice.operands
    case = ir.Operation.create(
        "stablehlo.case",
        results=kinds,
        operands=[number],
        attributes={SHARDING: ir.StringAttr.get(_manual(len(kinds)))},
        regions=len(results) // len(kinds),
        loc=choice.location,
        ip=ir.InsertionPoint(choice),
    )
    branch_of: dict[Any, int] = {}  # of the operations whose results only this branch uses

    def branch(use: Any) -> int | None:
        owner = use.owner.operation
        if owner != choice:
            return branch_of.get(owner)
        return (use.operand_number - 1) // len(kinds) if use.operand_number else None

    for op in reversed(before):
        users = {branch(use) for result in op.results for use in result.uses}
        if (
            _call_target(op) not in _OUTSIDE
            and len(users) == 1
            and (user := users.pop()) is not None
        ):
            branch_of[op] = user
    ends: list[Any] = []
    for region in case.regions:
        of_branch, results = results[: len(kinds)], results[len(kinds) :]
        place = ir.InsertionPoint(region.blocks.append())
        ends.append(ir.Operation.create("stablehlo.return", operands=of_branch, ip=place))
    for op in before:
        if op in branch_of:
            op.move_before(ends[branch_of[op]])
    for part in [use.owner.operation for use in choice.results[0].uses]:  # of its tuple
        index = ir.IntegerAttr(part.attributes["index"]).value
        part.results[0].replace_all_uses_with(case.results[index])
        part.erase()
    choice.erase()
