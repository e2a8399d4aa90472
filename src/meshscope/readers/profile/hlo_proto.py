"""Writes an HLO proto, as profiles contain the programs that ran, as HLO text.

The text has what `meshscope.readers.hlo` and the time model use. It leaves out shardings, windows,
large constants and some attributes of local operations. Field numbers are those
of xla/service/hlo.proto and xla/xla_data.proto (openxla/xla); `tests/profile/test_hlo_proto.py`
compares the text with XLA's own.
"""

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshscope.readers.profile.wire import Message, WireError

MAX_DEPTH = 32  # of nested tuples
MAX_RANK = 64  # dims of an array

_TUPLE = 13
# enum PrimitiveType, from 1 on
_DTYPE_NAMES = (
    "pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2 "
    "f8e4m3fn s4 u4 f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn "
    "f8e8m0fnu"
)
_DTYPES = dict(enumerate(_DTYPE_NAMES.split(), start=1))
# Fields of LiteralProto by dtype: numbers, or bytes with their struct format.
_INTEGERS = {"pred": 2, "s32": 4, "s64": 5, "u32": 6, "u64": 7}
_PACKED = {
    "u8": (3, "<B"),
    "s8": (15, "<b"),
    "u16": (16, "<H"),
    "s16": (17, "<h"),
    "f32": (8, "<f"),
    "f64": (9, "<d"),
    "f16": (11, "<e"),
    "bf16": (13, "<f"),
}

# The closing quote is optional to keep the search linear in text with an unclosed string.
_BRACE = re.compile(r'[{}]|"(?:[^"\\]|\\.)*"?')
_IN_NAMES = re.compile(r"[^\w.<>$-]")
_ESCAPES = str.maketrans(
    {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    | {chr(c): f"\\{c:03o}" for c in (*range(9), 11, 12, *range(14, 32), 127)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Names of instructions and computations by id, and the async-wrapped root by computation."""

    instructions: Mapping[int, str]
    computations: Mapping[int, str]
    wrapped: Mapping[int, Message]
    starts: Mapping[int, Message]  # async-start and async-update by id


def hlo_text(proto: Message, *, n_devices: int = 1) -> str:
    """The text of a module, given its HloProto; WireError if the bytes are no such message.

    `n_devices` applies if the proto does not assign devices.
    """
    module = proto.message(1)
    computations = module.messages(3)
    if not computations:
        raise WireError("an HLO proto has no computation", 0)
    instructions = {c.number(5): c.messages(2) for c in computations}
    names = _names(computations, instructions)
    sequences = {
        entry.number(1): entry.message(2).numbers(1) for entry in module.message(7).messages(1)
    }
    assignment = module.message(15)
    header = [f"HloModule {_name(module.text(1)) or 'unnamed'}"]
    header += ["is_scheduled=true"] if sequences else []
    header += [f"num_partitions={assignment.number(2) or n_devices}"]
    header += [f"replica_count={max(1, assignment.number(1))}"]
    entry_id = module.number(6)
    parts = [", ".join(header), "", *_tables(module.message(17)), ""]
    for computation in computations:
        ident = computation.number(5)
        if ident in names.wrapped:
            continue  # written as its single instruction
        is_entry = ident == entry_id
        ordered = _in_order(instructions[ident], sequences.get(ident))
        root_id = computation.number(6)
        head = f"{'ENTRY ' if is_entry else ''}%{names.computations[ident]} () -> () {{"
        lines = [_line(i, names, is_root=i.number(35) == root_id) for i in ordered]
        parts += [head, *lines, "}", ""]
    return "\n".join(parts)


def _names(
    computations: Sequence[Message], instructions: Mapping[int, Sequence[Message]]
) -> _Names:
    every = [i for of_computation in instructions.values() for i in of_computation]
    called = {ident for i in every if i.text(2) == "async-start" for ident in i.numbers(38)}
    return _Names(
        instructions={i.number(35): _name(i.text(1)) for i in every},
        computations={c.number(5): _name(c.text(1)) for c in computations},
        wrapped={
            ident: root
            for ident, of_computation in instructions.items()
            if ident in called and (root := _only_instruction(of_computation)) is not None
        },
        starts={i.number(35): i for i in every if i.text(2) in {"async-start", "async-update"}},
    )


def _only_instruction(instructions: Sequence[Message]) -> Message | None:
    """The instruction of a computation that has one besides its parameters."""
    others = [i for i in instructions if i.text(2) != "parameter"]
    return others[0] if len(others) == 1 else None


def _in_order(instructions: Sequence[Message], sequence: Sequence[int] | None) -> Sequence[Message]:
    """The instructions in the order of the schedule, if there is one."""
    if sequence is None:
        return instructions
    by_id = {i.number(35): i for i in instructions}
    ordered = [by_id[ident] for ident in sequence if ident in by_id]
    return ordered if len(ordered) == len(instructions) else instructions


def _tables(index: Message) -> Iterator[str]:
    if not index.has(4):
        return
    for title, field in (("FileNames", 1), ("FunctionNames", 2)):
        rows = (f'{n} "{_escaped(text)}"' for n, text in enumerate(index.texts(field), start=1))
        yield from (title, *rows, "")
    yield "FileLocations"
    for n, at in enumerate(index.messages(3), start=1):
        file, function, line = (at.number(field) for field in (1, 2, 3))
        yield f"{n} {{file_name_id={file} function_name_id={function} line={line}}}"
    yield from ("", "StackFrames")
    for n, frame in enumerate(index.messages(4), start=1):
        location, parent = frame.number(1), frame.number(2)
        yield f"{n} {{file_location_id={location} parent_frame_id={parent}}}"
    yield ""


def _line(instruction: Message, names: _Names, *, is_root: bool) -> str:
    opcode, described = instruction.text(2), instruction
    if opcode.startswith("async-") and (root := _wrapped(instruction, names)) is not None:
        opcode, described = f"{root.text(2)}{opcode.removeprefix('async')}", root
    attributes = [
        *_attributes(described),
        *_computations(described, opcode, names),
        *_metadata(instruction),
        *_configuration(instruction),
    ]
    shape = _shape(instruction.message(3))
    head = f"  {'ROOT ' if is_root else ''}%{_name(instruction.text(1))} = {shape} {_name(opcode)}"
    return ", ".join([f"{head}({_operands(instruction, opcode, names)})", *attributes])


def _wrapped(instruction: Message, names: _Names) -> Message | None:
    """The one instruction that an async-start, its update or its done runs."""
    start: Message | None = instruction
    for _ in range(MAX_DEPTH):
        if start is None:
            return None
        if called := start.numbers(38):
            return names.wrapped.get(called[0])
        operands = start.numbers(36)
        start = names.starts.get(operands[0]) if operands else None
    return None


def _operands(instruction: Message, opcode: str, names: _Names) -> str:
    if opcode == "parameter":
        return str(instruction.number(9))
    if opcode == "constant":
        return _constant(instruction.message(8))
    operands = (names.instructions.get(ident, "unknown") for ident in instruction.numbers(36))
    return ", ".join(f"%{name}" for name in operands)


def _constant(literal: Message) -> str:
    """The value of a scalar; `{...}` for arrays and dtypes that no reader asks for."""
    shape = literal.message(1)
    dtype = _DTYPES.get(shape.number(2), "")
    if shape.has(3):
        return "{...}"
    if dtype in _INTEGERS:
        value = (literal.numbers(_INTEGERS[dtype]) or [0])[-1]
        value = value % 2**64 if dtype == "u64" else value
        return ("true" if value else "false") if dtype == "pred" else str(value)
    if dtype not in _PACKED:
        return "{...}"
    field, form = _PACKED[dtype]
    content = (literal.contents(field) or [bytes(8)])[-1]
    padding = bytes(2) if dtype == "bf16" else b""  # bf16 is the upper half of f32
    content = (padding + content)[: struct.calcsize(form)]
    if len(content) < struct.calcsize(form):
        return "{...}"
    return f"{struct.unpack(form, content)[0]:.9g}"


def _shape(shape: Message, depth: int = 0) -> str:
    """The shape with its layout: `f32[8,1024]{1,0:T(8,128)S(5)}`."""
    kind = shape.number(2)
    if depth > MAX_DEPTH:
        raise WireError(f"a tuple nests deeper than {MAX_DEPTH}", 0)
    if kind == _TUPLE:
        return f"({', '.join(_shape(element, depth + 1) for element in shape.messages(4))})"
    dims = shape.numbers(3)
    if len(dims) > MAX_RANK:
        raise WireError(f"an array has more than {MAX_RANK} dims", 0)
    dynamic = [bool(n) for n in shape.numbers(6)] + [False] * len(dims)
    sizes = ",".join(f"{'<=' if d else ''}{n}" for n, d in zip(dims, dynamic, strict=False))
    return f"{_DTYPES.get(kind, 'opaque')}[{sizes}]{_layout(shape.message(5))}"


def _layout(layout: Message) -> str:
    order = ",".join(map(str, layout.numbers(1)))
    tiles = "".join(
        f"({','.join('*' if n < 0 else str(n) for n in tile.numbers(1))})"
        for tile in layout.messages(6)
    )
    space, element_bits = layout.number(8), layout.number(7)
    physical = f"T{tiles}" if tiles else ""
    physical += f"E({element_bits})" if element_bits else ""
    physical += f"S({space})" if space else ""
    if not order and not physical:
        return ""
    return f"{{{order}:{physical}}}" if physical else f"{{{order}}}"


_WITH_DIMENSIONS = frozenset(
    {"all-gather", "all-to-all", "broadcast", "concatenate", "map", "ragged-all-to-all", "reduce"}
    | {"reduce-scatter", "reverse", "set-dimension-size", "sort", "stochastic-convert", "transpose"}
)


def _attributes(instruction: Message) -> Iterator[str]:
    opcode = instruction.text(2)
    base = opcode.removesuffix("-start")
    if base in _WITH_DIMENSIONS and (instruction.has(14) or opcode == "broadcast"):
        yield f"dimensions={_braces(instruction.numbers(14))}"
    if opcode in _OF_OPCODE:
        yield from _OF_OPCODE[opcode](instruction)
    if instruction.has(30):
        yield from _dot(instruction.message(30))
    if instruction.has(16):
        yield f"dim_labels={_dim_labels(instruction.message(16))}"
    if aliases := instruction.messages(74):
        yield f"output_to_operand_aliasing={{{', '.join(map(_alias, aliases))}}}"
    yield from _communication(instruction, base)


def _slice(instruction: Message) -> Iterator[str]:
    ranges = (tuple(d.number(n) for n in (1, 2, 3)) for d in instruction.messages(17))
    texts = (f"[{a}:{b}]" if step <= 1 else f"[{a}:{b}:{step}]" for a, b, step in ranges)
    yield f"slice={{{', '.join(texts)}}}"


def _gather(instruction: Message) -> Iterator[str]:
    numbers = instruction.message(33)
    for field, name in ((1, "offset_dims"), (2, "collapsed_slice_dims"), (3, "start_index_map")):
        yield f"{name}={_braces(numbers.numbers(field))}"
    yield f"index_vector_dim={numbers.number(4)}"
    yield f"slice_sizes={_braces(instruction.numbers(34))}"


# Attributes that one opcode has.
_OF_OPCODE: Mapping[str, Callable[[Message], Iterable[str]]] = {
    "iota": lambda i: (f"iota_dimension={(i.numbers(14) or [0])[0]}",),
    "get-tuple-element": lambda i: (f"index={i.number(13)}",),
    "slice": _slice,
    "dynamic-slice": lambda i: (f"dynamic_slice_sizes={_braces(i.numbers(20))}",),
    "compare": lambda i: (f"direction={_name(i.text(63))}",),
    "fusion": lambda i: (f"kind={_name(i.text(11))}",),
    "gather": _gather,
    "custom-call": lambda i: (f'custom_call_target="{_escaped(i.text(28))}"',),
}


def _dot(numbers: Message) -> Iterator[str]:
    fields = ("lhs_contracting_dims", "rhs_contracting_dims", "lhs_batch_dims", "rhs_batch_dims")
    for field in (3, 1, 4, 2):
        if numbers.has(field):
            yield f"{fields[field - 1]}={_braces(numbers.numbers(field))}"


def _dim_labels(numbers: Message) -> str:
    """Which dim of a convolution's input, kernel and output is what, as `bf01_01io->bf01`."""

    def labels(first: tuple[int, str], second: tuple[int, str], spatial: int) -> str:
        at = {numbers.number(field): label for field, label in (first, second)}
        at |= {dim: str(n) for n, dim in enumerate(numbers.numbers(spatial))}
        return "".join(at[dim] for dim in sorted(at))

    given = labels((7, "b"), (8, "f"), 11)
    kernel, result = labels((3, "i"), (4, "o"), 6), labels((9, "b"), (10, "f"), 12)
    return f"{given}_{kernel}->{result}"


def _alias(alias: Message) -> str:
    result, operand = _braces(alias.numbers(1)), _braces(alias.numbers(3))
    return f"{result}: ({alias.number(2)}, {operand})"


def _communication(instruction: Message, base: str) -> Iterator[str]:
    if (channel := instruction.number(26)) > 0:
        yield f"channel_id={channel}"
    groups = _groups(instruction)
    if groups is not None or base in {"all-reduce", "all-gather", "all-to-all", "reduce-scatter"}:
        yield f"replica_groups={groups or '{}'}"
    if pairs := instruction.messages(52):
        listed = ",".join(f"{{{p.number(1)},{p.number(2)}}}" for p in pairs)
        yield f"source_target_pairs={{{listed}}}"
    elif base == "collective-permute":
        yield "source_target_pairs={}"
    if instruction.number(71):
        yield "use_global_device_ids=true"
    if instruction.number(47):
        yield "is_host_transfer=true"


def _groups(instruction: Message) -> str | None:
    """Replica groups in any of their forms; None if the instruction has none.

    Fields: 49 a list (old), 87 a list or an iota, 92 an iota, 93 mesh axes (as JAX 0.10.2 writes).
    """
    if instruction.has(93):
        return _mesh_groups(instruction.message(93))
    for iota in (instruction.message(92), instruction.message(87).message(2)):
        if iota.number(1):
            permutation = iota.numbers(4)
            is_transposed = permutation != sorted(permutation)
            order = f"T({','.join(map(str, permutation))})" if is_transposed else ""
            reshape = ",".join(map(str, iota.numbers(3)))
            return f"[{iota.number(1)},{iota.number(2)}]<=[{reshape}]{order}"
    groups = instruction.message(87).messages(1) or instruction.messages(49)
    return f"{{{','.join(_braces(g.numbers(1)) for g in groups)}}}" if groups else None


def _mesh_groups(groups: Message) -> str:
    mesh = groups.message(1)
    axes = [(_name(axis.text(1)), axis.number(2)) for axis in mesh.messages(1)]
    sizes = ",".join(f"'{name}'={size}" for name, size in axes)
    devices = mesh.numbers(2)
    order = f", device_ids=({','.join(map(str, devices))})" if devices else ""
    references: list[str] = []
    for axis in groups.messages(2):
        if not 0 <= axis.number(1) < len(axes):
            raise WireError("replica groups refer to an axis that their mesh lacks", 0)
        part = axis.message(2)
        split = f":({part.number(1)}){part.number(2)}" if part.number(2) else ""
        references.append(f"'{axes[axis.number(1)][0]}'{split}")
    return f"mesh[{sizes}]{order} {{{','.join(references)}}}"


_APPLIES = frozenset({"call", "map", "reduce", "reduce-window", "scatter", "sort", "all-reduce"})


def _computations(instruction: Message, opcode: str, names: _Names) -> Iterator[str]:
    """The computations that an instruction calls, under the name that its opcode gives them."""
    called = [f"%{names.computations.get(c, 'unknown')}" for c in instruction.numbers(38)]
    base = instruction.text(2).removesuffix("-start")
    if not called or opcode.endswith(("-done", "-update")):
        return
    if base == "while" and len(called) == 2:
        yield f"condition={called[1]}"
        yield f"body={called[0]}"
    elif base == "conditional":
        yield f"branch_computations={{{', '.join(called)}}}"
    elif base in {"fusion", "async"}:
        yield f"calls={called[0]}"
    elif base in _APPLIES or base == "reduce-scatter":
        yield f"to_apply={called[0]}"
    else:
        yield f"called_computations={{{', '.join(called)}}}"


def _metadata(instruction: Message) -> Iterator[str]:
    metadata = instruction.message(7)
    texts = [
        f'{name}="{_escaped(text)}"'
        for field, name in ((2, "op_name"), (3, "source_file"))
        if (text := metadata.text(field))
    ]
    numbers = [
        f"{name}={value}"
        for field, name in ((4, "source_line"), (15, "stack_frame_id"))
        if (value := metadata.number(field))
    ]
    if texts or numbers:
        yield f"metadata={{{' '.join([*texts, *numbers])}}}"


def _configuration(instruction: Message) -> Iterator[str]:
    if thread := instruction.text(79):
        yield f'async_execution_thread="{_escaped(thread)}"'
    pairs = [(e.text(1), e.text(2)) for e in instruction.message(68).messages(1)]
    if pairs:
        listed = ",".join(f"{_name(key)}={_value(text)}" for key, text in pairs)
        yield f"frontend_attributes={{{listed}}}"
    if config := instruction.text(43):
        yield f"backend_config={_value(config)}"


def _value(text: str) -> str:
    """The text in quotes, or as it is if one pair of braces encloses it, as XLA writes JSON."""
    return text if _is_object(text) else f'"{_escaped(text)}"'


def _is_object(text: str) -> bool:
    if not text.startswith("{"):
        return False
    depth = 0
    for match in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end() == len(text)
    return False


def _braces(numbers: Sequence[int]) -> str:
    return f"{{{','.join(map(str, numbers))}}}"


def _name(text: str) -> str:
    """The text without characters that end a name in HLO text."""
    return _IN_NAMES.sub("_", text)


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)
