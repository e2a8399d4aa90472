"""Follows every value of a program through its computations, loops and branches."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod

import numpy as np

from meshscope.errors import ParseError
from meshscope.readers.hlo.communication import effect_of, is_communicating_kernel
from meshscope.readers.hlo.groups import integers, parse_groups
from meshscope.readers.hlo.module import Computation, HloModule, Instruction, pieces
from meshscope.readers.lint import dims, operations
from meshscope.readers.lint.log import Fault, Log, Order
from meshscope.readers.lint.operations import COLLECTIVES
from meshscope.readers.lint.states import (
    MIXED,
    REPLICATED,
    SUMS,
    UNKNOWN,
    Factors,
    Tree,
    Value,
    is_split,
    joined,
    leaves,
    mapped,
    split,
)

_MAX_TRIPS = 12  # of a loop until its values no longer change
_MAX_DEPTH = 64
# Dtypes of tokens and positions; narrower integers are weights.
_NUMBERS = frozenset({"s32", "s64", "u32", "u64"})
_UNSETTLED = "a loop whose values do not settle"
_CALLS = frozenset({"call", "call-start"})
_PASSING = _CALLS | frozenset({"fusion", "while", "conditional", "get-tuple-element", "tuple"})
# Opcodes of control flow and the methods that follow them.
_FLOW = {"while": "_loop", "conditional": "_branches", "get-tuple-element": "_element"}
_SAME = frozenset({"copy", "copy-start", "optimization-barrier", "domain"})
_MOVING = _SAME | {"convert", "bitcast", "reshape", "transpose"}
# Custom calls that return their operand, that return an array without contents, and that compute on one device.
_SAME_CALLS = frozenset({"AssumeGatherIndicesInBound", "Sharding", "LayoutConstraint", "ZeroCrop"})
_EMPTY_CALLS = frozenset(
    {"AllocateBuffer", "CreateBuffer", "PrepareAsyncCallStart", "PrepareAsyncCallDone"}
)
_ASYNC_CALLS = ("AsyncCollectiveStart", "AsyncCollectiveDone")  # with a collective, in a fusion


@dataclass(slots=True)
class Walk:
    """The values of a module; what they show goes to the log."""

    module: HloModule
    log: Log
    _depth: int = 0
    _is_in_fusion: bool = False
    _sent: dict[str, Value] = field(default_factory=dict[str, Value])  # by collectives in fusions

    def run(self) -> Tree:
        """Follows the entry computation from its arguments to its result."""
        entry = self.module.entry
        result = self.computation(entry, None)
        self._check_results(entry.root, result)
        self._use([result])
        self.log.close()
        return result

    def _check_results(self, root: Instruction, result: Tree) -> None:
        text, values = root.braced("sharding"), leaves(result)
        declared = [] if text is None else _shardings_of_tuple("{" + text + "}")
        for number, value in enumerate(values):
            stated = None
            if len(declared) == len(values):
                stated = _held_by_sharding(declared[number], len(value.dims), self.log.factors)
            used = {
                f: held == MIXED if stated is None else stated[f] == REPLICATED
                for f, held in enumerate(value.held)
                if held in SUMS
            }
            self.log.missing(root, used, value.sums)

    def computation(self, computation: Computation, arguments: Sequence[Tree] | None) -> Tree:
        """The result of a computation; the entry has no arguments."""
        if self._depth > _MAX_DEPTH:
            at = f"{self.module.origin}:{computation.line}"
            raise ParseError(f"{at}: calls nest deeper than {_MAX_DEPTH}. The text is damaged.")
        self._depth += 1
        values: dict[str, Tree] = {}
        for instruction in computation.instructions:
            operands = [values[name] for name in instruction.operands if name in values]
            try:
                if instruction.opcode != "parameter":
                    value = self._value(computation, instruction, operands)
                elif arguments is None:
                    value = self._argument(instruction)
                else:
                    value = arguments[instruction.parameter_number]
            except (LookupError, ValueError):  # of text that was cut or edited
                what = "argument" if instruction.opcode == "parameter" else instruction.opcode
                value = self._unknown(instruction, f"{what} of another form")
            values[instruction.name] = value = self._made(instruction, value, operands)
            is_passed = arguments is not None and instruction.opcode == "parameter"
            if instruction.opcode not in _PASSING and not is_passed:
                self._count(instruction, value, operands)
        self._depth -= 1
        return values[computation.root.name]

    def _made(self, at: Instruction, value: Tree, operands: list[Tree]) -> Tree:
        """The value with the instruction that made it; an operand that is used is no longer only sliced."""
        if at.opcode in {*_PASSING, *_MOVING, "parameter"} or at.opcode.endswith(
            ("-done", "-update")
        ):
            return value
        if not at.opcode.startswith("dynamic-slice"):
            self._use(operands)
        opcode = at.opcode.removesuffix("-start")
        by = at if isinstance(value, Value) or opcode == "all-to-all" else None
        if opcode in COLLECTIVES and self._is_in_fusion:
            by = None  # libtpu runs a collective in parts, or with the slice of its result
            self._sent[at.name] = leaves(operands[0])[0]
        elif opcode in COLLECTIVES and by is not None:
            self.log.sent(at, leaves(operands[0])[0], leaves(value)[0])
        return mapped(value, lambda one: self.log.of_numbers(one)._replace(by=by))

    def _use(self, trees: Sequence[Tree]) -> None:
        for leaf in (leaf for tree in trees for leaf in leaves(tree)):
            if leaf.by is not None:
                self.log.sliced[leaf.by] = set()

    def _count(self, at: Instruction, value: Tree, operands: Sequence[Tree]) -> None:
        """Counts a value that is unknown first here, by reason."""
        before = [leaf for operand in operands for leaf in leaves(operand)]
        for leaf in leaves(value):
            if leaf.known is not None:  # devices differ in it as its numbers say
                continue
            for f, held in enumerate(leaf.held):
                if held == UNKNOWN and not any(b.held[f] == UNKNOWN for b in before):
                    reason = leaf.reason or f"{at.opcode} of what devices hold differently"
                    self.log.reasons.setdefault(reason, set()).add(at.name)
                    return

    def _argument(self, parameter: Instruction) -> Tree:
        text, arrays = parameter.braced("sharding"), parameter.arrays
        if text is None:
            return self._unknown(parameter, "the text has no shardings of the arguments")
        texts = _shardings_of_tuple("{" + text + "}")
        if len(texts) != len(arrays):
            texts = texts * len(arrays) if len(texts) == 1 else [""] * len(arrays)
        values: list[Value] = []
        for array, one in zip(arrays, texts, strict=True):
            held = _held_by_sharding(one, len(array.dims), self.log.factors)
            if held is None:
                reason = f"a sharding of another form: {one[:60]}"
                values.append(self.log.unknown(parameter, array.dims, reason))
            else:
                name = parameter.op_name or parameter.name
                by = parameter if len(arrays) == 1 else None
                of_rows = ((f, False) for f, h in enumerate(held) if is_split(h))
                origins = frozenset(of_rows if array.dtype in _NUMBERS else ())
                values.append(
                    Value(
                        dims=array.dims,
                        held=held,
                        weight=name,
                        by=by,
                        is_plain=True,
                        origins=origins,
                    )
                )
        return self._results(parameter, values)

    def _results(self, at: Instruction, values: Sequence[Tree]) -> Tree:
        is_tuple = at.shape_text.startswith("(") and not at.opcode.endswith("-start")
        return tuple(values) if is_tuple or len(values) != 1 else values[0]

    def _unknown(self, at: Instruction, reason: str) -> Tree:
        each = [array.dims for array in at.arrays] or [()]
        return self._results(at, [self.log.unknown(at, shape, reason) for shape in each])

    def _value(self, computation: Computation, at: Instruction, operands: list[Tree]) -> Tree:  # noqa: PLR0911  one per form
        opcode, called = at.opcode, at.called
        name = called.get("calls") or (called.get("to_apply") if opcode in _CALLS else None)
        if opcode == "tuple":
            return tuple(operands)
        if operands and (opcode in _SAME or opcode.endswith(("-done", "-update"))):
            return operands[0]
        if operands and opcode in _FLOW:
            return getattr(self, _FLOW[opcode])(at, operands)
        if name and opcode != "custom-call":
            was_in_fusion = self._is_in_fusion
            self._is_in_fusion = was_in_fusion or opcode == "fusion"
            result = self.computation(self.module.computation(name[0], at), operands)
            self._is_in_fusion = was_in_fusion
            return result
        values = [leaf for tree in operands for leaf in leaves(tree)]
        if opcode == "custom-call":
            return self._custom_call(at, values)
        if opcode in {"partition-id", "replica-id"}:
            n, every = self.module.n_partitions, range(self.log.factors.mesh.n_devices)
            numbers = tuple(d % n if opcode == "partition-id" else d // n for d in every)
            return Value(dims=(), held=(), known=numbers)
        if values and opcode == "bitcast":
            return dims.bitcast(at, values[0], computation.producer(at))
        results = operations.results(self.log, at, values)
        if results is None:
            return self._unknown(at, f"{opcode}, which is not followed")
        return self._results(at, results)

    def _element(self, at: Instruction, operands: list[Tree]) -> Tree:
        whole, index = operands[0], at.tuple_index
        if isinstance(whole, Value) or index is None:
            return self._unknown(at, "an element of a tuple that is not followed")
        return whole[index]

    def _custom_call(self, at: Instruction, values: list[Value]) -> Tree:  # noqa: PLR0911  one per kind
        target = at.custom_call_target or ""
        if target in _EMPTY_CALLS:  # zeros, because all of it is written before it is read
            return self._results(at, [self.log.replicated(array.dims, 0.0) for array in at.arrays])
        if target == "SliceId":  # the first one, as in the shardings
            return Value(dims=(), held=(), known=(0,) * self.log.factors.mesh.n_devices)
        if target in _ASYNC_CALLS and (sent := [*filter(self._sent.get, at.operands)]):
            operand, result = self._sent[sent[0]], values[at.operands.index(sent[0])]
            if target.endswith("Done"):
                return result
            others = [self.log.replicated(array.dims) for array in at.arrays[2:]]
            return self._results(at, [operand, result, *others])
        if values and target in _SAME_CALLS:
            return values[0]._replace(dims=at.arrays[0].dims)
        if values and target == "ConcatBitcast":
            return operations.joined_slices(self.log, at, values)
        if is_communicating_kernel(at):
            return self._unknown(at, f"the kernel '{target}', which communicates")
        if not values or effect_of(at) is not None:
            return self._unknown(at, f"the custom call '{target}', which is not followed")
        return self._results(at, operations.kernel(self.log, at, values))

    def _loop(self, at: Instruction, operands: list[Tree]) -> Tree:
        carried = operands[0]
        body = self.module.computation(at.called["body"][0], at)
        condition = self.module.computation(at.called["condition"][0], at)
        start = len(self.log.order)
        for _ in range(_MAX_TRIPS):
            self._use([carried, result := self.computation(body, [carried])])
            after = joined(carried, result)
            self._count(at, after, [carried, result])
            if after == carried:
                break
            carried = after
        else:
            carried = mapped(carried, lambda v: self.log.unknown(at, v.dims, _UNSETTLED))
        predicate = leaves(self.computation(condition, [carried]))[0]
        self._check_order(at, predicate, [self.log.order[start:], []])
        return _by_predicate(joined(carried, self.computation(body, [carried])), predicate)

    def _branches(self, at: Instruction, operands: list[Tree]) -> Tree:
        called = at.called
        names = called.get("branch_computations") or (
            *called["true_computation"],
            *called["false_computation"],
        )
        computations = [self.module.computation(name, at) for name in names]
        pairs = zip(computations, operands[1:], strict=True)
        results, orders = list[Tree](), list[Order]()
        for computation, operand in pairs:
            start = len(self.log.order)
            results.append(self.computation(computation, [operand]))
            orders.append(self.log.order[start:])
        self._use([*operands, *results])
        self._check_order(at, predicate := leaves(operands[0])[0], orders)
        for values in zip(*map(leaves, results), strict=False):
            self.log.disagree(at, [value for value in values if value.constant != 0])
        merged = _by_predicate(reduce(joined, results), predicate)
        self._count(at, merged, [predicate, *results])
        return merged

    def _check_order(self, at: Instruction, predicate: Value, orders: Sequence[Order]) -> None:
        """Devices that take different paths must find each other in the same collectives."""
        crossing = {f for order in orders for _, over in order for f in over}
        texts = [[(i.opcode, i.attribute("replica_groups")) for i, _ in order] for order in orders]
        is_own = [is_split(h) or (h == UNKNOWN and not predicate.reason) for h in predicate.held]
        factors = sorted(f for f in crossing if is_own[f])
        if factors and any(one != texts[0] for one in texts):
            is_certain = predicate.known is not None
            self.log.note(Fault.DIVERGES, at, factors, is_certain=is_certain)


def _by_predicate(result: Tree, predicate: Value) -> Tree:
    """What devices get that may take different paths."""
    differ = [f for f, h in enumerate(predicate.held) if h != REPLICATED]

    def change(value: Value) -> Value:
        held = (UNKNOWN if f in differ and h == REPLICATED else h for f, h in enumerate(value.held))
        reason = value.reason if UNKNOWN in value.held else predicate.reason
        reason = reason or "devices may take different paths"
        return value.spread(held)._replace(reason=reason, constant=None)

    return mapped(result, change) if differ else result


# The `sharding={...}` of arguments and results.
_TILES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))?")
_MESH = re.compile(
    r"(mesh\[[^\]]*\](?:,\s*device_ids=\([^()]*(?:\([\d,]*\))?[^()]*\))?),\s*\[(.*?)\](?:,|$)"
)
_SUBGROUPS = re.compile(r"last_tile_dims=\{([^}]*)\}")


def _held_by_sharding(text: str, n_dims: int, factors: Factors) -> tuple[int, ...] | None:
    """How each factor holds an array with this sharding; None if the text is of an unknown form.

    The forms are from XLA's xla/hlo/ir/hlo_sharding.cc and named_sharding.cc.
    """
    text = text.strip().removeprefix("{").removesuffix("}").strip()
    n = len(factors.all)
    if text == "replicated" or re.fullmatch(r"mesh\[[^\]]*\],\s*replicated", text):
        return (REPLICATED,) * n
    tiles = _tiles(text, factors.mesh.n_devices)
    if tiles is None or len(tiles) != n_dims:
        return None
    along = [factors.along(ids) for ids in tiles]
    dims = ([dim for dim, of in enumerate(along) if f in of] for f in range(n))
    return tuple(UNKNOWN if len(of) > 1 else split(of) if of else REPLICATED for of in dims)


def _shardings_of_tuple(text: str) -> list[str]:
    """The shardings of the elements of a tuple."""
    inner = text.strip()
    if not inner.startswith("{{"):
        return [inner]
    return [one.strip() for one in pieces(re.sub(r"/\*[^*]*\*/", "", inner[1:-1]))]


def _tiles(text: str, n_devices: int) -> list[list[int]] | None:
    """For each dim of an array, the number of the part that each device holds; None for another form."""
    if (match := _MESH.search(text)) is not None:
        try:
            each = [
                parse_groups(f"{match[1]} {{{dim}}}", n_devices=n_devices, where="")
                for dim in re.findall(r"\{([^{}]*)\}", match[2])
            ]
        except ParseError:
            return None
        places = [{d: i for group in groups for i, d in enumerate(group)} for groups in each]
        return [[of[device] for device in range(n_devices)] for of in places]
    match = _TILES.search(text)
    sizes = integers(match[1]) if match else []
    n_tiles = prod(sizes)  # of all slices; the program is of the first one
    if match is None or n_tiles % n_devices or n_devices == 1 < n_tiles:
        return None
    ids = np.array(integers(match[4] or "") or range(n_tiles))
    if match[2]:
        ids = ids.reshape(integers(match[2])).transpose(integers(match[3] or "") or None).ravel()
    subgroups = _SUBGROUPS.search(text)
    kinds = subgroups[1].split(",") if subgroups else []
    if len(ids) != n_tiles or {kind.strip() for kind in kinds} - {"replicated"}:
        return None
    n_dims = len(sizes) - (1 if "last_tile_dim_replicate" in text else len(kinds))
    places = np.empty((len(sizes), n_tiles), dtype=int)
    places[:, ids] = np.array(np.unravel_index(np.arange(n_tiles), sizes))
    return places[:n_dims, :n_devices].tolist()
