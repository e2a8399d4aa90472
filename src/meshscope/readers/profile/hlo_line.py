"""Event names of profiles: a line of optimized HLO, or an instruction name.

A line cannot show trip counts, callers or the device mesh. Those come from the HLO module, which
`meshscope.readers.profile.joining` reads.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshscope.events.enums import Kind
from meshscope.plans.mesh import Groups
from meshscope.readers.hlo.groups import groups_without_module, is_complete
from meshscope.readers.hlo.module import ArrayShape, Instruction
from meshscope.readers.hlo.parse import parse_instruction_line
from meshscope.readers.hlo.semantics import ALL_REDUCE_SCATTER, KIND_OF_OPCODE
from meshscope.readers.hlo.shapes import result_arrays

MAX_TEXT = 200_000  # characters; longer event names are not parsed as HLO
MAX_DEVICE = 1 << 31  # device ids and bytes beyond these are damage, and do not fit into columns
MAX_BYTES = 1 << 62
N_CACHED = 1 << 16  # distinct names, shared by all devices of a profile

KIND_OF: dict[str, Kind] = KIND_OF_OPCODE | {
    ALL_REDUCE_SCATTER: Kind.REDUCE_SCATTER,
    "send": Kind.SEND,
    "recv": Kind.RECV,
}
CONTAINERS = frozenset({"while", "call", "conditional"})
_MOVES = frozenset({"copy", "async", "slice", "dynamic-slice", "dynamic-update-slice"})
_NAMED_OPCODES = frozenset({*KIND_OF, *_MOVES, *CONTAINERS})

_NAME = re.compile(r"\s*(?:ROOT\s+)?%?([^\s=%(]+)\s+=(?:\s|$)")
_SUFFIX = re.compile(r"\.\d+$|\.(?:clone|remat)[\w.]*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class HloLine:
    """The facts in one event name; None if the name does not show them.

    `starts` names the instruction that a `-done` waits for; for a `-start` it is its own name.
    """

    name: str
    opcode: str | None = None
    starts: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    payload_bytes: int | None = None
    groups_text: str | None = None
    groups: Groups | None = None


@lru_cache(maxsize=N_CACHED)
def read_hlo_line(text: str) -> HloLine:
    """Reads an event name, either a line of HLO or only an instruction name."""
    instruction = parse_instruction_line(text) if len(text) <= MAX_TEXT else None
    if instruction is None:
        return _name_only(text)
    arrays = _payload(instruction)
    sizes = [array.n_bytes for array in arrays]
    n_bytes = sum(n for n in sizes if n is not None)
    is_sized = bool(sizes) and n_bytes < MAX_BYTES
    groups_text = _groups_text(instruction)
    return HloLine(
        name=instruction.name,
        opcode=instruction.opcode,
        starts=_starts(instruction.name, instruction.opcode, instruction.operands),
        dtype=arrays[0].dtype if len({array.dtype for array in arrays}) == 1 else None,
        shape=arrays[0].dims if len(arrays) == 1 and is_sized else None,
        payload_bytes=n_bytes if is_sized else None,
        groups_text=groups_text,
        groups=_groups(groups_text),
    )


def _groups(text: str | None) -> Groups | None:
    """The groups of the text; None if it names devices that no machine has."""
    groups = groups_without_module(text) if text else None
    is_damaged = any(device >= MAX_DEVICE for group in groups or () for device in group)
    return None if is_damaged else groups


def base_opcode(opcode: str) -> str:
    """The opcode without the suffix of an asynchronous half: `all-reduce-start` -> `all-reduce`."""
    return opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")


def opcode_of_name(name: str) -> str | None:
    """The opcode in an instruction name that XLA derived from a collective, container or move."""
    opcode = name
    while (shorter := _SUFFIX.sub("", opcode)) != opcode:
        opcode = shorter
    return opcode if opcode in CONTAINERS or base_opcode(opcode) in _NAMED_OPCODES else None


def kind_of(opcode: str | None, *, name: str) -> Kind | None:
    """The kind of a collective, by its opcode or the name of its fusion."""
    for label in (opcode, opcode_of_name(name)):
        if label and base_opcode(label) in KIND_OF:
            return KIND_OF[base_opcode(label)]
    return None


def _name_only(text: str) -> HloLine:
    """A bare instruction name, or the name in a line that is truncated before its opcode."""
    match = _NAME.match(text[:MAX_TEXT])
    if match is not None:
        return HloLine(name=match[1])
    name = text.lstrip("%")
    opcode = opcode_of_name(name)
    return HloLine(name=name, opcode=opcode, starts=_starts(name, opcode, ()))


def _starts(name: str, opcode: str | None, operands: Sequence[str]) -> str | None:
    if opcode is None:
        return None
    if opcode.endswith("-start"):
        return name
    if not opcode.endswith("-done"):
        return None
    return operands[0] if operands else name.replace("-done", "-start", 1)


def _payload(instruction: Instruction) -> tuple[ArrayShape, ...]:
    """The arrays that make up the payload: the whole array of a gather or scatter, not a shard."""
    opcode = instruction.opcode
    base, is_start = base_opcode(opcode), opcode.endswith("-start")
    if base not in KIND_OF:
        sized = _sized(instruction.arrays)
        return sized if len(sized) == 1 else ()
    if base == "reduce-scatter" and not opcode.endswith("-done"):
        operands = _sized(instruction.operand_arrays)
        return operands if operands or is_start else _sized(instruction.arrays)
    if is_start or opcode in {"send", "recv"}:
        return _sized(result_arrays(instruction))
    return _sized(instruction.arrays)


def _sized(arrays: Sequence[ArrayShape]) -> tuple[ArrayShape, ...]:
    """The arrays of a known width, which leaves out tokens."""
    return tuple(array for array in arrays if array.n_bytes is not None)


def _groups_text(instruction: Instruction) -> str | None:
    """The text of the replica groups or source-target pairs; None if it is truncated."""
    texts = (instruction.replica_groups, instruction.attribute("source_target_pairs"))
    return next((text for text in texts if text is not None and is_complete(text)), None)
