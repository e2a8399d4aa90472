"""Parses HLO text: header tables, computations and instructions; and its hash."""

import gzip
import hashlib
import json
import re
import zlib
from pathlib import Path

from meshscope.errors import ParseError
from meshscope.files import check_regular
from meshscope.readers.hlo.module import Computation, HloModule, Instruction, StackFrame, marks

MAX_TEXT_BYTES = 512 * 2**20  # decompressed text of one module; the largest seen has 30 MB
_READ_BYTES = 2**20
_GZIP_MAGIC = b"\x1f\x8b"

_HEAD = r"(?P<root>ROOT )?%?(?P<name>[^\s=]+) = (?P<shape>.*?) (?P<opcode>[a-z][\w-]*)\("
_INSTRUCTION = re.compile(r"\s+" + _HEAD)
_INSTRUCTION_LINE = re.compile(r"\s*" + _HEAD)
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(){}=]+)(?: \(.*)? \{")
_MODULE = re.compile(r"HloModule (?P<name>[^\s,]+)(?P<rest>.*)")
_TABLE_ROW = re.compile(r"(\d+) (.*)")
_PAIR = re.compile(r"(\w+)=(\d+)")
_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|/\*[^*]*\*/')

# Custom calls that XLA's async_collective_custom_call_rewriter replaces by the collectives that they name.
_COLLECTIVE_CALL = re.compile(
    r'\bcustom_call_target="((?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)'
    r'-(?:start|done))"'
)
_COLLECTIVE_CONFIG = re.compile(r'\{\\?"[^{}]*\}')
_COLLECTIVE_DIMENSIONS = ("all_gather_dimension", "scatter_dimension", "split_dimension")
_GIVE = (
    "Give optimized HLO text, e.g. from `compiled.as_text()` or --xla_dump_hlo_as_text, or a trace of "
    "docs/traces.md."
)
_GIVE_WHOLE = "Give the whole text of one module."
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def read_hlo(path: Path | str) -> HloModule:
    """Reads a file of optimized HLO text, plain or gzipped."""
    origin = str(path)
    try:
        text = _decompressed(Path(path), origin).decode()
    except OSError as error:
        raise ParseError(
            f"{origin}: cannot be read ({error.strerror}). Give a file of HLO text."
        ) from error
    except UnicodeDecodeError as error:
        raise ParseError(
            f"{origin}: is not text (byte {error.start} is not UTF-8). {_GIVE}"
        ) from error
    return parse_hlo(text, origin)


def _decompressed(path: Path, origin: str) -> bytes:
    check_regular(path)
    with path.open("rb") as file:
        opener = gzip.open if file.read(2) == _GZIP_MAGIC else open
    content, is_checked = bytearray(), False
    try:
        with opener(path, "rb") as file:
            while len(content) <= MAX_TEXT_BYTES and (piece := file.read1(_READ_BYTES)):
                content.extend(piece)
                if len(content) >= _READ_BYTES and not is_checked:
                    is_checked = True
                    if b"HloModule" not in content:
                        raise ParseError(
                            f"{origin}:1: expected a line 'HloModule NAME, ...'. {_GIVE}"
                        )
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ParseError(f"{origin}: the gzip file is damaged ({error}). Copy it again.") from error
    if len(content) > MAX_TEXT_BYTES:
        raise ParseError(
            f"{origin}: has more than {MAX_TEXT_BYTES} bytes of text. Give the text of one module."
        )
    return bytes(content)


def parse_hlo(text: str, origin: str) -> HloModule:
    """Parses the text of one module; `origin` names the file in messages. Raises ParseError if it is truncated."""
    text = text.replace("\r\n", "\n")
    lines = text.rstrip("\n").split("\n")
    before = ((n, line) for n, line in enumerate(lines) if not line.startswith("//"))
    header = next((n for n, line in before if line.strip()), None)
    if header is None:
        raise ParseError(f"{origin}:1: is empty. {_GIVE}")
    attributes = lines[header]
    if (match := _MODULE.match(attributes)) is None:
        raise _unexpected(origin, header, "a line 'HloModule NAME, ...'", attributes, _GIVE)
    tables, body_start = _tables(lines, header, origin)
    computations = _computations(lines, body_start, origin)
    if not any(c.is_entry for c in computations.values()):
        raise _truncated(origin, len(lines), "the computation marked ENTRY")
    counts = (
        re.search(rf", {name}=([1-9]\d*)", attributes)
        for name in ("num_partitions", "replica_count")
    )
    n_partitions, n_replicas = (int(count[1]) if count else 1 for count in counts)
    return HloModule(
        name=match["name"],
        origin=origin,
        is_scheduled="is_scheduled=true" in attributes,
        n_partitions=n_partitions,
        n_replicas=n_replicas,
        computations=computations,
        frames=_frames(tables, origin),
    )


def parse_instruction_line(text: str) -> Instruction | None:
    """Parses one instruction outside a module, e.g. an event name in a profile.

    Returns None if the text is not an instruction. Profilers truncate long lines, so the operands
    and attributes may be incomplete.
    """
    match = _INSTRUCTION_LINE.match(text)
    if match is None:
        return None
    rest = text[match.end() :]
    close = _closing_parenthesis(rest)
    return _instruction(match, rest, close if close >= 0 else len(rest), line=1)


def _tables(lines: list[str], header: int, origin: str) -> tuple[dict[str, dict[int, str]], int]:
    """The rows of each header table by number, and the index of the first computation's line."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    current: dict[int, str] | None = None
    for number in range(header + 1, len(lines)):
        line = lines[number]
        if line in tables:
            current = tables[line]
        elif _COMPUTATION.fullmatch(line):
            return tables, number
        elif current is not None and (row := _TABLE_ROW.fullmatch(line)):
            current[int(row[1])] = row[2]
        elif line.strip() and not line.startswith("//"):
            raise _unexpected(origin, number, "a header table or a computation", line)
    return tables, len(lines)


def _frames(tables: dict[str, dict[int, str]], origin: str) -> dict[int, StackFrame]:
    files, functions = (tables[name] for name in _TABLES[:2])
    locations, frames = (
        {n: {key: int(value) for key, value in _PAIR.findall(row)} for n, row in table.items()}
        for table in (tables[name] for name in _TABLES[2:])
    )
    parents = {number: frame.get("parent_frame_id", 0) for number, frame in frames.items()}
    # Roots refer to themselves if the text counts parents from 1, as in libtpu 0.0.42 and 0.0.50.
    shift = any(parents[number] == number for number in parents)
    stack_frames: dict[int, StackFrame] = {}
    for number, frame in frames.items():
        try:
            location = locations[frame["file_location_id"]]
            parent = stack_frames.get(parents[number] - shift)
            stack_frames[number] = StackFrame(
                file=files[location["file_name_id"]].strip('"'),
                function=functions[location["function_name_id"]].strip('"'),
                line=location["line"],
                callers=() if parent is None else (*parent.callers, parent.function),
            )
        except KeyError as error:
            raise ParseError(
                f"{origin}: stack frame {number} refers to {error}, missing from the header tables. "
                f"{_GIVE_WHOLE}"
            ) from error
    return stack_frames


def _computations(lines: list[str], start: int, origin: str) -> dict[str, Computation]:
    """The computations by name."""
    computations: dict[str, Computation] = {}
    number = start
    while number < len(lines):
        if not lines[number].strip():
            number += 1
            continue
        if (match := _COMPUTATION.fullmatch(lines[number])) is None:
            expected = "a computation '%name (...) -> ... {'"
            raise _unexpected(origin, number, expected, lines[number])
        instructions, end = _body(lines, number + 1, origin)
        if end is None:
            expected = f"the end '}}' of computation '{match['name']}'"
            raise _truncated(origin, len(lines), expected)
        if not instructions:
            raise ParseError(
                f"{origin}:{number + 1}: computation '{match['name']}' has no instructions. "
                f"{_GIVE_WHOLE}"
            )
        computations[match["name"]] = Computation(
            name=match["name"],
            is_entry=match["entry"] is not None,
            instructions=tuple(instructions),
            line=number + 1,
        )
        number = end + 1
    return computations


def _body(lines: list[str], start: int, origin: str) -> tuple[list[Instruction], int | None]:
    """The instructions of a computation, and the index of its closing line; None if it is missing.

    An instruction continues on the next line if it leaves a brace open or ends with a comma.
    """
    instructions: list[Instruction] = []
    number = start
    while number < len(lines):
        match = _INSTRUCTION.match(lines[number])
        if match is None:
            if lines[number][:1] == "}":
                return instructions, number
            expected = "an instruction '%name = shape opcode(...)'"
            remedy = "Give the text as the compiler wrote it."
            raise _unexpected(origin, number, expected, lines[number].strip(), remedy)
        last = number + 1
        if last < len(lines) and _INSTRUCTION.match(lines[last]) is None:
            n_open = _n_open(lines[number])
            while last < len(lines) and (n_open > 0 or lines[last - 1].endswith(",")):
                n_open += _n_open(lines[last])
                last += 1
        rest = "\n".join((lines[number][match.end() :], *lines[number + 1 : last]))
        close = _closing_parenthesis(rest)
        if close < 0:
            raise _truncated(origin, number + 1, f"the closing parenthesis of '{match['name']}'")
        instructions.append(_instruction(match, rest, close, line=number + 1))
        number = last
    return instructions, None


def _unexpected(
    origin: str, number: int, expected: str, line: str, remedy: str = _GIVE_WHOLE
) -> ParseError:
    return ParseError(f"{origin}:{number + 1}: expected {expected}, got {line[:60]!r}. {remedy}")


def _n_open(text: str) -> int:
    bare = _STRING_OR_COMMENT.sub("", text)
    return bare.count("{") - bare.count("}")


def _instruction(match: re.Match[str], rest: str, close: int, *, line: int) -> Instruction:
    """The instruction whose operands end at `close` in the text after the opening parenthesis."""
    opcode, attributes = match["opcode"], rest[close + 1 :]
    if opcode == "custom-call" and (call := _COLLECTIVE_CALL.search(attributes)):
        opcode, attributes = call[1], f"{attributes}{_collective_attributes(attributes)}"
    return Instruction(
        name=match["name"],
        opcode=opcode,
        shape_text=match["shape"],
        operand_text=rest[:close],
        attributes=attributes,
        line=line,
        is_root=match["root"] is not None,
    )


def _collective_attributes(text: str) -> str:
    """The attributes of a collective from the JSON configuration of its custom call; empty for a done."""
    match = _COLLECTIVE_CONFIG.search(text)
    try:
        config = json.loads(match[0].replace('\\"', '"')) if match else {}
    except ValueError:
        return ""
    braces = str.maketrans("[]", "{}", ' "')  # numbers may be texts
    values = {
        "replica_groups": config.get("replica_groups"),
        "source_target_pairs": config.get("source_target_pairs", config.get("permutation")),
        "dimensions": next(
            ([config[key]] for key in _COLLECTIVE_DIMENSIONS if config.get(key) is not None), None
        ),
        "channel_id": config.get("channel_id") or None,
        "use_global_device_ids": True if config.get("use_global_device_ids") else None,
    }
    known = {name: value for name, value in values.items() if value is not None}
    return "".join(f", {name}={json.dumps(v).translate(braces)}" for name, v in known.items())


def _closing_parenthesis(text: str) -> int:
    """The position of the parenthesis that ends an operand list; -1 if `text` does not hold it."""
    close = text.find(")")
    if close < 0 or ("(" not in text[:close] and '"' not in text[:close]):
        return close
    return next((match.start() for match, depth in marks(text) if depth < 0), -1)


def _truncated(origin: str, line: int, expected: str) -> ParseError:
    return ParseError(
        f"{origin}:{line}: the text is truncated: expected {expected}. Give the whole text of the module."
    )


_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_NAME = re.compile(r"%[\w.\-]+")
_FIRST_COMPUTATION = re.compile(r"^(?:ENTRY )?%", re.MULTILINE)


def canonical_hash(path: Path) -> str:
    """The hash of a program: instructions in their order, layouts, algorithms and estimates."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return hashlib.sha256(canonical_text(file.read()).encode()).hexdigest()


def canonical_text(text: str) -> str:
    """The computations without metadata, with names numbered in the order of their first use."""
    first = _FIRST_COMPUTATION.search(text)
    body = _METADATA.sub("", text[first.start() :] if first else text)
    numbers: dict[str, str] = {}
    return _NAME.sub(lambda match: numbers.setdefault(match[0], f"%{len(numbers)}"), body)
