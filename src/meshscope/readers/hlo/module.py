"""An HLO module: its computations and instructions in schedule order, with lazily parsed attributes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from meshscope.errors import ParseError
from meshscope.units import DTYPE_BITS, array_bytes

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\]")
_LAYOUT = re.compile(r"\{[^{}]*\}|/\*[^*]*\*/")
_NAME = re.compile(r"%([^\s,(){}]+)")
_TYPE_BEFORE_NAME = re.compile(r"^.*\s")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
    r"|called_computations)=(\{[^{}]*\}|[^\s,{}]+)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_STACK_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE_FILE = re.compile(r'source_file="((?:[^"\\]|\\.)*)" source_line=(\d+)')
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)"?')
_TARGET = re.compile(r'\bcustom_call_target="((?:[^"\\]|\\.)*)"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_DIMENSIONS = re.compile(r"\bdimensions=\{([\d,]*)\}")
_TILES = re.compile(r"\bdevices=\[([\d,]+)\]")
_MESH_GROUPS = re.compile(r"mesh[^{]*\{[^}]*\}")
# The closing quote is optional to keep the search linear in text with an unclosed string.
_MARK = re.compile(r'[,(){}\[\]]|"(?:[^"\\]|\\.)*"?')


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayShape:
    """A dense array: XLA's name of its dtype, and its dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def n_bytes(self) -> int | None:
        """Bytes of the array; None if the dtype has no known width (tokens, opaque values)."""
        return array_bytes(self.dtype, self.dims) if self.dtype in DTYPE_BITS else None

    def __str__(self) -> str:
        """The shape in HLO notation, without its layout: `bf16[8,1024]`."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Instruction:
    """One instruction of HLO text; `line` is the first of its lines, attributes are unparsed text.

    `scope` is a path such as `decode/layer3/attn` that the text does not contain (see `scopes.py`).
    """

    name: str
    opcode: str
    shape_text: str
    operand_text: str
    attributes: str
    line: int
    is_root: bool
    scope: str = ""

    @property
    def shape(self) -> str:
        """The result's shape without layouts: `bf16[8,1024]` or `(f32[2], s32[])`."""
        return _LAYOUT.sub("", self.shape_text)

    @property
    def arrays(self) -> tuple[ArrayShape, ...]:
        """The arrays of the result, with nested tuples flattened."""
        return _arrays(self.shape)

    @property
    def operand_arrays(self) -> tuple[ArrayShape, ...]:
        """The arrays of the operands; empty if the text names operands without their types."""
        return _arrays(_LAYOUT.sub("", self.operand_text))

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands; empty for a constant or a parameter."""
        if self.opcode in {"constant", "parameter", "iota"}:
            return ()
        if "%" in self.operand_text:
            return tuple(_NAME.findall(self.operand_text))
        texts = (piece.strip() for piece in pieces(_LAYOUT.sub("", self.operand_text)))
        return tuple(_TYPE_BEFORE_NAME.sub("", piece) for piece in texts if piece)

    @property
    def whole_dims(self) -> tuple[int, ...] | None:
        """The dimensions of an array before it was split over devices; None if its sharding has no tiles."""
        tiles = _TILES.search(self.braced("sharding") or "")
        if tiles is None or len(self.arrays) != 1:
            return None
        counts = map(int, tiles[1].split(","))  # a replicated dimension comes last
        return tuple(size * n for size, n in zip(self.arrays[0].dims, counts, strict=False))

    @property
    def parameter_number(self) -> int:
        """The index of a parameter among the arguments; -1 if its text is not a number."""
        return int(self.operand_text) if self.operand_text.isdecimal() else -1

    @property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the called computations, by attribute (`calls`, `body`, `condition`, ...)."""
        ends = (self.attributes.find(f", {name}={{") for name in ("metadata", "backend_config"))
        end = next((end for end in ends if end >= 0), len(self.attributes))
        return {
            key: tuple(n.strip().lstrip("%") for n in names.strip("{}").split(","))
            for key, names in _CALLED.findall(self.attributes[:end])
        }

    @property
    def op_name(self) -> str | None:
        """The scope path that the frontend assigned, after the `scope` of the instruction."""
        match = _first(_OP_NAME, 'op_name="', self.attributes)
        if match is None:
            return self.scope or None
        return f"{self.scope}/{match[1]}" if self.scope else match[1]

    @property
    def stack_frame_id(self) -> int:
        """Key into the stack frames of the module; 0 if the instruction has none."""
        return _number(_first(_STACK_FRAME, "stack_frame_id=", self.attributes)) or 0

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's estimate in clock cycles; None if it gives none."""
        return _number(_CYCLES.search(self.attributes))

    @property
    def custom_call_target(self) -> str | None:
        """The target of a custom call."""
        match = _TARGET.search(self.attributes)
        return match[1] if match else None

    @property
    def channel_id(self) -> int | None:
        """The channel ID, which collectives under shard_map may share."""
        return _number(_CHANNEL.search(self.attributes))

    @property
    def tuple_index(self) -> int | None:
        """The element that a get-tuple-element takes."""
        return _number(_INDEX.search(self.attributes))

    @property
    def rendezvous(self) -> str | None:
        """What a send or recv of the host or of the megascale runtime shares with its partner."""
        match = _RENDEZVOUS.search(self.attributes)
        return match[1] if match else None

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The `dimensions={...}` of an all-gather, reduce-scatter or transpose."""
        match = _DIMENSIONS.search(self.attributes)
        return tuple(int(d) for d in match[1].split(",") if d) if match else ()

    @property
    def replica_groups(self) -> str | None:
        """The text of `replica_groups`.

        Its mesh form contains a comma: `mesh['x'=8], device_ids=(...) {'x'}`.
        """
        label = "replica_groups="
        start = self.attributes.find(label + "mesh[")
        match = _MESH_GROUPS.match(self.attributes, start + len(label)) if start >= 0 else None
        return match[0] if match else self.attribute("replica_groups")

    def attribute(self, name: str) -> str | None:
        """The text after `name=` up to the next top-level comma; None if the attribute is absent."""
        match = re.search(rf"(?:^|, ){name}=", self.attributes)
        if match is None:
            return None
        return next(pieces(self.attributes[match.end() :])).strip()

    def braced(self, name: str) -> str | None:
        """The text between the braces of `name={...}`; None if the attribute is absent."""
        start = self.attributes.find(f"{name}={{")
        if start < 0:
            return None
        start += len(name) + 1
        ends = (match.start() for match, depth in marks(self.attributes, start) if depth == 0)
        return next((self.attributes[start + 1 : end] for end in ends), None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computation:
    """A computation with its instructions in schedule order."""

    name: str
    is_entry: bool
    instructions: tuple[Instruction, ...]
    line: int
    _by_name: Mapping[str, Instruction] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Index the instructions by name."""
        object.__setattr__(self, "_by_name", {i.name: i for i in self.instructions})

    @property
    def root(self) -> Instruction:
        """The instruction marked ROOT, or the last one."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {i.parameter_number: i for i in self.instructions if i.opcode == "parameter"}

    def get(self, name: str) -> Instruction | None:
        """The instruction of that name; None if the computation has none."""
        return self._by_name.get(name)

    def producers(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The instructions that define its operands, in order; definitions precede uses."""
        defined = (self._by_name.get(name) for name in instruction.operands)
        return tuple(i for i in defined if i is not None and i.line < instruction.line)

    def producer(self, instruction: Instruction, index: int = 0) -> Instruction | None:
        """The instruction that defines one operand; None if no earlier line defines it."""
        names = instruction.operands
        defined = self._by_name.get(names[index]) if index < len(names) else None
        return defined if defined is not None and defined.line < instruction.line else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """A source location: file, function and line; `callers` are the functions around it, outermost first."""

    file: str
    function: str
    line: int
    callers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HloModule:
    """A module of HLO text."""

    name: str
    origin: str
    is_scheduled: bool
    n_partitions: int
    n_replicas: int
    computations: Mapping[str, Computation]
    frames: Mapping[int, StackFrame]

    @property
    def n_devices(self) -> int:
        """The number of devices that run the module together."""
        return self.n_partitions * self.n_replicas

    @property
    def instructions(self) -> Iterator[Instruction]:
        """The instructions of all computations, in the order of the text."""
        return (i for computation in self.computations.values() for i in computation.instructions)

    @property
    def entry(self) -> Computation:
        """The entry computation."""
        return next(c for c in self.computations.values() if c.is_entry)

    def computation(self, name: str, caller: Instruction) -> Computation:
        """The computation that `caller` names; ParseError if the text does not define it."""
        if (computation := self.computations.get(name)) is None:
            raise ParseError(
                f"{self.where(caller)}: '{caller.name}' calls '{name}', which the text does not define. "
                "Give the whole text of the module."
            )
        return computation

    def fused(self, fusion: Instruction) -> Computation:
        """The computation of a fusion; ParseError if the fusion names none."""
        names = fusion.called.get("calls")
        if not names:
            raise ParseError(
                f"{self.where(fusion)}: fusion '{fusion.name}' has no 'calls=%computation'. "
                "Give the text as the compiler wrote it."
            )
        return self.computation(names[0], fusion)

    def where(self, instruction: Instruction) -> str:
        """The instruction's `file:line` in the HLO text, for messages."""
        return f"{self.origin}:{instruction.line}"

    def functions(self, instruction: Instruction) -> str:
        """The functions that traced the instruction, outermost first, joined by `/`; or an empty text."""
        frame = self.frames.get(instruction.stack_frame_id)
        return "" if frame is None else "/".join((*frame.callers, frame.function))

    def source_line(self, instruction: Instruction) -> str | None:
        """The instruction's `file:line` in the source program; None if the text does not say."""
        if frame := self.frames.get(instruction.stack_frame_id):
            return f"{frame.file}:{frame.line}"
        match = _first(_SOURCE_FILE, 'source_file="', instruction.attributes)
        return f"{match[1]}:{match[2]}" if match else None


def _first(pattern: re.Pattern[str], label: str, text: str) -> re.Match[str] | None:
    """The first match of a pattern that begins with the word `label`.

    The body of a kernel may fill an attribute with a megabyte, through which only `str.find` is fast.
    """
    start = text.find(label)
    while start > 0 and (text[start - 1].isalnum() or text[start - 1] == "_"):
        start = text.find(label, start + 1)
    return pattern.match(text, start) if start >= 0 else None


def _arrays(shape: str) -> tuple[ArrayShape, ...]:
    return tuple(
        ArrayShape(dtype=dtype, dims=tuple(int(d) for d in re.findall(r"\d+", dims)))
        for dtype, dims in _ARRAY.findall(shape)
    )


def marks(text: str, start: int = 0) -> Iterator[tuple[re.Match[str], int]]:
    """The brackets and commas outside of strings, each with the depth of brackets after it."""
    depth = 0
    for match in _MARK.finditer(text, start):
        depth += (match[0] in "({[") - (match[0] in ")}]")
        yield match, depth


def pieces(text: str) -> Iterator[str]:
    """The text between commas outside of brackets and strings."""
    start = 0
    for match, depth in marks(text):
        if depth == 0 and match[0] == ",":
            yield text[start : match.start()]
            start = match.end()
    yield text[start:]


def _number(match: re.Match[str] | None) -> int | None:
    return int(match[1]) if match else None
