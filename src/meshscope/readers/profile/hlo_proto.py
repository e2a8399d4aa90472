"""Writes an HLO proto, as profiles contain the programs that ran, as HLO text.

The text has what `meshscope.readers.hlo` and the time model use. It leaves out shardings, windows,
large constants and some attributes of local operations. Field numbers are from
xla/service/hlo.proto and xla/xla_data.proto (openxla/xla); `tests/profile/test_hlo_proto.py`
compares the text with XLA's own.
"""

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence

from meshscope.readers.hlo.module import marks
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


_IN_NAMES = re.compile(r"[^\w.<>$-]")
_ESCAPES = str.maketrans(
    {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    | {chr(c): f"\\{c:03o}" for c in (*range(9), 11, 12, *range(14, 32), 127)}
)


def hlo_text(proto: Message) -> str:
    """The text of a module, given its HloProto; WireError if the bytes are no such message."""
    module = proto.message(1)
    computations = module.messages(3)
    if not computations:
        raise WireError("an HLO proto has no computation")
    names = _Names(computations)
    sequences = {
        entry.number(1): entry.message(2).numbers(1) for entry in module.message(7).messages(1)
    }
    assignment = module.message(15)
    header = [f"HloModule {_name(module.text(1)) or 'unnamed'}"]
    header += ["is_scheduled=true"] if sequences else []
    header += [f"num_partitions={max(1, assignment.number(2))}"]
    header += [f"replica_count={max(1, assignment.number(1))}"]
    parts = [", ".join(header), "", *_tables(module.message(17)), ""]
    for computation in computations:
        ident, root_id = computation.number(5), computation.number(6)
        if ident in names.wrapped:
            continue  # written as its single instruction
        instructions = names.inside[ident]
        by_id = {i.number(35): i for i in instructions}
        ordered = [by_id[n] for n in sequences.get(ident, ()) if n in by_id]
        if len(ordered) < len(instructions):  # without a schedule of all instructions
            ordered = instructions
        entry = "ENTRY " if ident == module.number(6) else ""
        lines = [_line(i, names, is_root=i.number(35) == root_id) for i in ordered]
        parts += [f"{entry}%{names.computations[ident]} () -> () {{", *lines, "}", ""]
    return "\n".join(parts)


class _Names:
    """Instructions of computations, names by id, and what the asynchronous instructions run."""

    def __init__(self, computations: Sequence[Message]) -> None:
        self.inside = {c.number(5): c.messages(2) for c in computations}
        every = [i for instructions in self.inside.values() for i in instructions]
        self.instructions = {i.number(35): _name(i.text(1)) for i in every}
        self.computations = {c.number(5): _name(c.text(1)) for c in computations}
        # async-start and async-update by id, and the only instruction of a computation that they call
        starts = [i for i in every if i.text(2) in {"async-start", "async-update"}]
        self.starts = {i.number(35): i for i in starts}
        self.wrapped: dict[int, Message] = {}
        for ident in {n for i in starts if i.text(2) == "async-start" for n in i.numbers(38)}:
            others = [i for i in self.inside.get(ident, ()) if i.text(2) != "parameter"]
            if len(others) == 1:
                self.wrapped[ident] = others[0]


def _tables(index: Message) -> Iterator[str]:
    if not index.has(4):
        return
    for title, field in (("FileNames", 1), ("FunctionNames", 2)):
        rows = (f'{n} "{_escaped(text)}"' for n, text in enumerate(index.texts(field), start=1))
        yield from (title, *rows, "")
    for title, field, facts in (
        ("FileLocations", 3, ("file_name_id", "function_name_id", "line")),
        ("StackFrames", 4, ("file_location_id", "parent_frame_id")),
    ):
        yield title
        for n, row in enumerate(index.messages(field), start=1):
            shown = (f"{fact}={row.number(at)}" for at, fact in enumerate(facts, start=1))
            yield f"{n} {{{' '.join(shown)}}}"
        yield ""


def _line(instruction: Message, names: _Names, *, is_root: bool) -> str:
    opcode, described = instruction.text(2), instruction
    if opcode.startswith("async-") and (root := _wrapped(instruction, names)) is not None:
        opcode, described = f"{root.text(2)}{opcode.removeprefix('async')}", root
    match opcode:
        case "parameter":
            operands = str(instruction.number(9))
        case "constant":
            operands = _constant(instruction.message(8))
        case _:
            known = (names.instructions.get(i, "unknown") for i in instruction.numbers(36))
            operands = ", ".join(f"%{name}" for name in known)
    head = f"  {'ROOT ' if is_root else ''}%{_name(instruction.text(1))}"
    attributes = _attributes(described)
    if not opcode.endswith(("-done", "-update")):
        attributes |= _computations(described, names)
    attributes |= _metadata(instruction)
    shown = [f"{name}={value}" for name, value in attributes.items() if value is not None]
    shape = _shape(instruction.message(3))
    return ", ".join([f"{head} = {shape} {_name(opcode)}({operands})", *shown])


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


def _constant(literal: Message) -> str:
    """The value of a scalar; `{...}` for arrays and dtypes that no reader asks for."""
    shape = literal.message(1)
    dtype = "" if shape.has(3) else _DTYPES.get(shape.number(2), "")
    if dtype in _INTEGERS:
        value = (literal.numbers(_INTEGERS[dtype]) or [0])[-1]
        if dtype == "pred":
            return "true" if value else "false"
        return str(value % 2**64 if dtype == "u64" else value)
    field, form = _PACKED.get(dtype, (0, "<B"))
    content = (literal.contents(field) or [bytes(8)])[-1] if field else b""
    padding = bytes(2) if dtype == "bf16" else b""  # bf16 is the upper half of f32
    content = (padding + content)[: struct.calcsize(form)]
    is_known = field and len(content) == struct.calcsize(form)
    return f"{struct.unpack(form, content)[0]:.9g}" if is_known else "{...}"


def _shape(shape: Message, depth: int = 0) -> str:
    """The shape with its layout: `f32[8,1024]{1,0:T(8,128)S(5)}`."""
    kind = shape.number(2)
    if depth > MAX_DEPTH:
        raise WireError(f"a tuple nests deeper than {MAX_DEPTH}")
    if kind == _TUPLE:
        return f"({', '.join(_shape(element, depth + 1) for element in shape.messages(4))})"
    dims = shape.numbers(3)
    if len(dims) > MAX_RANK:
        raise WireError(f"an array has more than {MAX_RANK} dims")
    dynamic = [bool(n) for n in shape.numbers(6)] + [False] * len(dims)
    sizes = ",".join(f"{'<=' if d else ''}{n}" for n, d in zip(dims, dynamic, strict=False))
    layout = shape.message(5)
    tiles = (["*" if n < 0 else str(n) for n in tile.numbers(1)] for tile in layout.messages(6))
    tiled = "".join(f"({','.join(tile)})" for tile in tiles)
    space, element_bits = layout.number(8), layout.number(7)
    physical = f"T{tiled}" if tiled else ""
    physical += f"E({element_bits})" if element_bits else ""
    physical += f"S({space})" if space else ""
    order = ",".join(map(str, layout.numbers(1))) + (f":{physical}" if physical else "")
    return f"{_DTYPES.get(kind, 'opaque')}[{sizes}]{f'{{{order}}}' if order else ''}"


_WITH_DIMENSIONS = frozenset(
    {"all-gather", "all-to-all", "broadcast", "concatenate", "map", "ragged-all-to-all", "reduce"}
    | {"reduce-scatter", "reverse", "set-dimension-size", "sort", "stochastic-convert", "transpose"}
)
_WITH_GROUPS = frozenset({"all-reduce", "all-gather", "all-to-all", "reduce-scatter"})
# Names and fields of lists in gather_dimension_numbers and dot_dimension_numbers.
_GATHER = (("offset_dims", 1), ("collapsed_slice_dims", 2), ("start_index_map", 3))
_DOT = (
    *(("lhs_batch_dims", 3), ("lhs_contracting_dims", 1)),
    *(("rhs_batch_dims", 4), ("rhs_contracting_dims", 2)),
)


def _attributes(instruction: Message) -> dict[str, str | None]:
    """The values of attributes in the order of XLA's text; None for those that it leaves out."""
    i, opcode = instruction, instruction.text(2)
    base = opcode.removesuffix("-start")
    numbers, pairs, groups = i.message(33), i.messages(52), _groups(i)
    has_dimensions = base in _WITH_DIMENSIONS and (i.has(14) or opcode == "broadcast")
    ranges = ([d.number(n) for n in (1, 2, 3)] for d in i.messages(17))
    slices = (f"[{a}:{b}]" if step <= 1 else f"[{a}:{b}:{step}]" for a, b, step in ranges)
    aliases = (
        f"{_braces(a.numbers(1))}: ({a.number(2)}, {_braces(a.numbers(3))})" for a in i.messages(74)
    )
    listed = ",".join(f"{{{p.number(1)},{p.number(2)}}}" for p in pairs)
    of_opcode: dict[str, Callable[[], dict[str, str]]] = {
        "iota": lambda: {"iota_dimension": str((i.numbers(14) or [0])[0])},
        "get-tuple-element": lambda: {"index": str(i.number(13))},
        "slice": lambda: {"slice": f"{{{', '.join(slices)}}}"},
        "dynamic-slice": lambda: {"dynamic_slice_sizes": _braces(i.numbers(20))},
        "compare": lambda: {"direction": _name(i.text(63))},
        "fusion": lambda: {"kind": _name(i.text(11))},
        "gather": lambda: {
            **{name: _braces(numbers.numbers(field)) for name, field in _GATHER},
            "index_vector_dim": str(numbers.number(4)),
            "slice_sizes": _braces(i.numbers(34)),
        },
        "custom-call": lambda: {"custom_call_target": f'"{_escaped(i.text(28))}"'},
    }
    return {
        "dimensions": _braces(i.numbers(14)) if has_dimensions else None,
        **of_opcode.get(opcode, dict[str, str])(),
        **{n: _braces(i.message(30).numbers(at)) for n, at in _DOT if i.message(30).has(at)},
        "dim_labels": _dim_labels(i.message(16)) if i.has(16) else None,
        "output_to_operand_aliasing": f"{{{', '.join(aliases)}}}" if i.has(74) else None,
        "channel_id": str(i.number(26)) if i.number(26) > 0 else None,
        "replica_groups": groups or ("{}" if base in _WITH_GROUPS else None),
        "source_target_pairs": f"{{{listed}}}" if pairs or base == "collective-permute" else None,
        "use_global_device_ids": "true" if i.number(71) else None,
        "is_host_transfer": "true" if i.number(47) else None,
    }


def _dim_labels(numbers: Message) -> str:
    """Which dim of a convolution's input, kernel and output is what, as `bf01_01io->bf01`."""
    labels: list[str] = []
    # Fields of the first and of the second named dim, and of the spatial ones.
    for first, second, spatial, names in ((7, 8, 11, "bf"), (3, 4, 6, "io"), (9, 10, 12, "bf")):
        at = {numbers.number(first): names[0], numbers.number(second): names[1]}
        at |= {dim: str(n) for n, dim in enumerate(numbers.numbers(spatial))}
        labels.append("".join(at[dim] for dim in sorted(at)))
    return f"{labels[0]}_{labels[1]}->{labels[2]}"


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
    devices = ",".join(map(str, mesh.numbers(2)))
    references: list[str] = []
    for axis in groups.messages(2):
        if not 0 <= axis.number(1) < len(axes):
            raise WireError("replica groups refer to an axis that their mesh lacks")
        part = axis.message(2)
        split = f":({part.number(1)}){part.number(2)}" if part.number(2) else ""
        references.append(f"'{axes[axis.number(1)][0]}'{split}")
    order = f", device_ids=({devices})" if devices else ""
    return f"mesh[{sizes}]{order} {{{','.join(references)}}}"


_APPLIES = frozenset(
    {"call", "map", "reduce", "reduce-window", "scatter", "sort", "all-reduce", "reduce-scatter"}
)


def _computations(instruction: Message, names: _Names) -> dict[str, str]:
    """The computations that an instruction calls, under the name that its opcode gives them."""
    called = [f"%{names.computations.get(c, 'unknown')}" for c in instruction.numbers(38)]
    base = instruction.text(2).removesuffix("-start")
    if not called:
        return {}
    if base == "while" and len(called) == 2:
        return {"condition": called[1], "body": called[0]}
    if base in {"fusion", "async"}:
        return {"calls": called[0]}
    if base in _APPLIES:
        return {"to_apply": called[0]}
    several = "branch_computations" if base == "conditional" else "called_computations"
    return {several: f"{{{', '.join(called)}}}"}


def _metadata(instruction: Message) -> dict[str, str | None]:
    metadata, pairs = instruction.message(7), instruction.message(68).messages(1)
    texts = ((name, metadata.text(at)) for name, at in (("op_name", 2), ("source_file", 3)))
    numbers = ((n, metadata.number(at)) for n, at in (("source_line", 4), ("stack_frame_id", 15)))
    facts = [f'{name}="{_escaped(text)}"' for name, text in texts if text]
    facts += [f"{name}={value}" for name, value in numbers if value]
    listed = ",".join(f"{_name(pair.text(1))}={_value(pair.text(2))}" for pair in pairs)
    thread, config = instruction.text(79), instruction.text(43)
    return {
        "metadata": f"{{{' '.join(facts)}}}" if facts else None,
        "async_execution_thread": f'"{_escaped(thread)}"' if thread else None,
        "frontend_attributes": f"{{{listed}}}" if pairs else None,
        "backend_config": _value(config) if config else None,
    }


def _value(text: str) -> str:
    """The text in quotes, or as it is if one pair of braces encloses it, as XLA writes JSON."""
    ends = (match.end() for match, depth in marks(text) if depth == 0)
    is_enclosed = text.startswith("{") and next(ends, 0) == len(text)
    return text if is_enclosed else f'"{_escaped(text)}"'


def _braces(numbers: Iterable[int]) -> str:
    return f"{{{','.join(map(str, numbers))}}}"


def _name(text: str) -> str:
    """The text without characters that end a name in HLO text."""
    return _IN_NAMES.sub("_", text)


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)
