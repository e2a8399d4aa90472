"""One line of optimised HLO, as profilers write it into the name of an event: what it tells by itself.

Not a reader of programs: what needs more than the line (loops, callers, meshes of devices) stays
unknown here and comes from the program's own text, by `meshscope.readers.profile.joining`.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

from meshscope.events.enums import Kind
from meshscope.units import DTYPE_BITS, array_bytes

MAX_TEXT = 200_000  # a longer line is not taken apart
MAX_DEVICES = 1_000_000

Groups = list[list[int]]
Array = tuple[str, tuple[int, ...]]

KIND_OF: dict[str, Kind] = {
    "all-reduce-scatter": Kind.REDUCE_SCATTER,  # a fusion of all-reduce and slice, on TPUs
    "all-reduce": Kind.ALL_REDUCE,
    "all-gather": Kind.ALL_GATHER,
    "reduce-scatter": Kind.REDUCE_SCATTER,
    "all-to-all": Kind.ALL_TO_ALL,
    "ragged-all-to-all": Kind.ALL_TO_ALL,
    "collective-permute": Kind.PERMUTE,
    "collective-broadcast": Kind.BROADCAST,
    "send": Kind.SEND,
    "recv": Kind.RECV,
}
CONTAINERS = frozenset({"while", "call", "conditional"})
_MOVES = frozenset({"copy", "async", "slice", "dynamic-slice", "dynamic-update-slice"})

_HEAD = re.compile(r"\s*(?:ROOT\s+)?%?([^\s=%(]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([a-zA-Z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[((?:<?=?\d+,?)*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_NUMBER = re.compile(r"\.\d+$|\.(?:clone|remat)[\w.]*$")
_GROUPS = re.compile(
    r"replica_groups=(\{(?:\{[\d,]*\},?)*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)
_MESH_GROUPS = re.compile(r"replica_groups=(mesh\[[^\]]*\][^{]*\{[^}]*\})")
_PAIRS = re.compile(r"source_target_pairs=(\{(?:\{[\d,]*\},?)*\})")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# NCCL and RCCL name their kernels after the operation: ncclDevKernel_AllReduce_Sum_bf16_RING_LL.
_NCCL = re.compile(r"(?i)^[nr]ccl\w*kernel_(\w+?)(?:_|\(|$)")
_NCCL_KINDS = {
    "allreduce": Kind.ALL_REDUCE,
    "allgather": Kind.ALL_GATHER,
    "reducescatter": Kind.REDUCE_SCATTER,
    "alltoall": Kind.ALL_TO_ALL,
    "sendrecv": Kind.PERMUTE,
    "broadcast": Kind.BROADCAST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HloLine:
    """What the line tells; None where it does not.

    `starts` is the name of the instruction that a `-done` waits for, or of a `-start` itself.
    """

    name: str
    opcode: str | None = None
    starts: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    payload_bytes: int | None = None
    groups_text: str | None = None
    groups: Groups | None = None


def read_hlo_line(text: str) -> HloLine:
    """What one event's name tells, be it a whole line of HLO or only the name of an instruction."""
    head = _HEAD.match(text) if len(text) <= MAX_TEXT else None
    if head is None:
        name = text.lstrip("%")
        opcode = opcode_of_name(name)
        return HloLine(name=name, opcode=opcode, starts=_starts(name, opcode, None))
    result_end = _end_of_result(text, head.end())
    opcode = _OPCODE.match(text, result_end)
    if opcode is None:
        return HloLine(name=head[1])
    operands = text[opcode.end() : _closing(text, opcode.end() - 1)]
    arrays = _payload(opcode[1], _arrays(text[head.end() : result_end]), _arrays(operands))
    groups_text = _groups_text(text, opcode.end())
    return HloLine(
        name=head[1],
        opcode=opcode[1],
        starts=_starts(head[1], opcode[1], _OPERAND.search(operands)),
        dtype=arrays[0][0] if len({dtype for dtype, _ in arrays}) == 1 else None,
        shape=arrays[0][1] if len(arrays) == 1 else None,
        payload_bytes=_bytes(arrays),
        groups_text=groups_text,
        groups=groups_of(groups_text) if groups_text else None,
    )


def base_opcode(opcode: str) -> str:
    """The opcode without the half of an asynchronous pair: `all-reduce-start` -> `all-reduce`."""
    return opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")


def opcode_of_name(name: str) -> str | None:
    """The opcode after which XLA named an instruction: a collective, a container or a move."""
    base = name
    while (cut := _NUMBER.sub("", base)) != base:
        base = cut
    known = base_opcode(base) in {*KIND_OF, *_MOVES} or base in CONTAINERS
    return base if known else None


def kind_of(opcode: str | None, *, name: str) -> Kind | None:
    """What a collective means, by opcode, by the name of a fusion, or of a kernel of NCCL."""
    for label in (opcode, opcode_of_name(name)):
        if label and base_opcode(label) in KIND_OF:
            return KIND_OF[base_opcode(label)]
    kernel = _NCCL.match(name)
    return _NCCL_KINDS.get(kernel[1].lower()) if kernel else None


def groups_of(text: str) -> Groups | None:
    """Device groups of a list `{{0,1},{2,3}}` or an iota `[2,2]<=[4]`; None for other forms."""
    iota = _IOTA.fullmatch(text)
    if iota is None:
        found = [_ints(group) for group in re.findall(r"\{([\d,]+)\}", text)]
        return found if found and text.startswith("{") else None
    dims, permutation = _ints(iota[2]), _ints(iota[3] or "")
    if math.prod(dims) > MAX_DEVICES or math.prod(_ints(iota[1])) != math.prod(dims):
        return None
    if permutation and sorted(permutation) != list(range(len(dims))):
        return None
    ids = np.arange(math.prod(dims)).reshape(dims).transpose(permutation or None)
    return ids.reshape(_ints(iota[1])[0], -1).tolist()


def _starts(name: str, opcode: str | None, operand: re.Match[str] | None) -> str | None:
    if opcode is None:
        return None
    if opcode.endswith("-start"):
        return name
    if not opcode.endswith("-done"):
        return None
    return operand[1] if operand else name.replace("-done", "-start", 1)


def _end_of_result(text: str, start: int) -> int:
    """Where the type of the result ends: behind its closing bracket, or at a space."""
    if text.startswith("(", start):
        return _closing(text, start) + 1
    end = text.find(" ", start)
    return len(text) if end < 0 else end


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes; the end of the text if it does not."""
    depth = 0
    for bracket in re.finditer(r"[()]", text[start:]):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return start + bracket.start()
    return len(text)


def _arrays(text: str) -> list[Array]:
    return [
        (dtype, tuple(_ints(dims.replace("<=", ""))))
        for dtype, dims in _ARRAY.findall(text)
        if dtype in DTYPE_BITS
    ]


def _payload(opcode: str, result: list[Array], operands: list[Array]) -> list[Array]:
    """The arrays of the size rule: what all-gather puts out, what reduce-scatter takes in."""
    if base_opcode(opcode) not in KIND_OF:
        return result if len(result) == 1 else []
    if opcode.endswith("-start"):
        return _payload_of_start(base_opcode(opcode), result, operands)
    if opcode in {"reduce-scatter", "all-to-all"} and operands:
        return operands
    if opcode in {"send", "recv"}:
        return (operands or result)[:1]
    return result


def _payload_of_start(base: str, result: list[Array], operands: list[Array]) -> list[Array]:
    if base == "all-gather":  # (inputs ..., outputs ...)
        return result[len(result) // 2 :]
    if base == "collective-permute":  # (input, output, contexts ...)
        return result[1:2]
    return result if base == "all-reduce" else operands


def _bytes(arrays: list[Array]) -> int | None:
    return sum(array_bytes(*array) for array in arrays) if arrays else None


def _groups_text(text: str, start: int) -> str | None:
    for form in (_GROUPS, _MESH_GROUPS, _PAIRS):
        if found := form.search(text, start):
            return found[1]
    return None


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
