"""What a GPU kernel does for communication, by its name and by what the trace says about it.

NCCL and RCCL kernels carry their collective in their name (`ncclDevKernel_AllReduce_Sum_bf16_...`).
Newer Kineto traces repeat it with sizes as arguments, and these take precedence: `SendRecv`
kernels carry out sends and all-to-alls, and old NCCL names kernels after others. Libraries and engines
bring kernels that communicate without NCCL; their names say no size, so their bytes are unknown.
"""

import re
from functools import lru_cache
from typing import Any, NamedTuple

from meshscope.events.enums import Kind
from meshscope.readers.traces import meanings, names
from meshscope.readers.traces.trace import Category
from meshscope.units import DTYPE_BITS

_ENDINGS = re.compile(r"(?:_|(?<=[a-z]))(?:base|coalesced|into_?tensor|tensor|oop|inplace|single)$")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class KernelCollective(NamedTuple):
    """What the name of a kernel says; `kind` is None if it communicates in an unknown way."""

    kind: Kind | None
    opcode: str
    dtype: str | None = None
    group_size: int | None = None


def kind_of(name: str) -> Kind | None:
    """The kind of a collective by its name in c10d, NCCL or MPI: `_allgather_base`, `send 0->1`."""
    text = name.lower().removeprefix("nccl:").removeprefix("rccl:").partition(" ")[0].strip("_")
    while (shorter := _ENDINGS.sub("", text)) != text:
        text = shorter
    kind = meanings("collectives").get(text.replace("_", "").replace("-", ""))
    return None if kind is None else Kind(kind)


def dtype_of(name: str | None) -> str | None:
    """XLA's name of a dtype that c10, NCCL or a template names; None if it is none of them."""
    return None if name is None else meanings("dtypes").get(name.strip().lower())


@lru_cache(maxsize=1 << 16)
def kernel_collective(name: str) -> KernelCollective | None:
    """The collective of a kernel; None for a kernel that does not communicate."""
    name = _without_mangling(name)
    known = names("kernels")
    if re.search(known["nccl"], name):
        return _nccl(name)
    for pattern, kind in known["patterns"]:
        if re.search(pattern, name.lower()):
            n_ranks, dtype = (re.search(known[fact], name) for fact in ("ranks", "dtype"))
            return KernelCollective(
                kind=Kind(kind),
                opcode=short_name(name),
                dtype=dtype_of(dtype[1]) if dtype else None,
                group_size=int(n_ranks[1] or n_ranks[2]) if n_ranks else None,
            )
    if re.search(known["opaque"], name):
        return KernelCollective(kind=None, opcode=short_name(name))
    return None


@lru_cache(maxsize=1 << 16)
def is_named_like_communication(name: str) -> bool:
    """Whether the name of a kernel says that it communicates, as a reader of the trace would take it."""
    path = short_name(name).split("::")
    spaces, last = (
        " ".join(_WORDS.findall(part)).lower() for part in (" ".join(path[:-1]), path[-1])
    )
    known = names("kernels")
    if re.search(known["on_one_device"], last):
        return False
    if re.search(known["like_collective"], f"{spaces} {last}"):
        return True
    is_broadcast = "broadcast" in last and re.fullmatch(known["like_broadcast"], last)
    is_exchange = is_broadcast or re.search(known["like_exchange"], last)
    return bool(is_exchange and not re.search(known["of_attention"], last))


def _without_mangling(name: str) -> str:
    """`mori::moe::EpCombineKernel` of `_ZN4mori3moe15EpCombineKernelIfEEv...`."""
    if not name.startswith(("_ZN", "_Z")):
        return name
    at, parts = (3 if name.startswith("_ZN") else 2), list[str]()
    while size := re.match(r"\d{1,3}", name[at:]):
        first = at + len(size[0])
        at = first + int(size[0])
        parts.append(name[first:at])
    return "::".join(parts) or name


def _nccl(name: str) -> KernelCollective:
    """`ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)`: all-reduce of bf16."""
    words = re.split(r"[_(<]", name.removeprefix("void "))[1:]
    kind = next((kind for word in words if word and (kind := kind_of(word)) is not None), None)
    if kind is Kind.PERMUTE:  # SendRecv: any exchange, and the type of its buffer
        return KernelCollective(None, short_name(name))
    named = reversed(name.partition("(")[0].removesuffix("_t").split("_"))
    return KernelCollective(kind, short_name(name), next(filter(None, map(dtype_of, named)), None))


def short_name(name: str) -> str:
    """The name of a kernel without its arguments and template: `vllm::cross_device_reduce_1stage`."""
    head = re.split(r"[(<]", _without_mangling(name).removeprefix("void "), maxsplit=1)[0]
    return head.strip()[:120] or name[:120]


def op_facts(name: str, *, is_copy: bool) -> dict[str, Any]:
    """The row of OPS_SCHEMA that the name of a kernel or a copy gives."""
    kernel = None if is_copy else kernel_collective(name)
    if kernel is None:
        category = Category.COPY if is_copy else Category.COMPUTE
        return {"name": name if is_copy else short_name(name), "category": category.value}
    named = {"name": short_name(name), "category": Category.COLLECTIVE.value}
    return named | kernel._asdict()


def payload_bytes(
    kind: Kind | None,
    *,
    n_in: int | None,
    n_out: int | None,
    dtype: str | None,
    group_size: int | None,
) -> int | None:
    """Size of the logical array by the rule of nccl-tests; None if it does not follow.

    `n_in`, `n_out` are the elements that one rank passes and gets. An all-gather's array is the
    output, a reduce-scatter's the input.
    """
    n_ranks = group_size or 0
    match kind:
        case None:
            n = None
        case Kind.ALL_GATHER | Kind.GATHER:
            n = n_out or (n_in or 0) * n_ranks
        case Kind.REDUCE_SCATTER:
            n = n_in or (n_out or 0) * n_ranks
        case Kind.SCATTER:
            n = max(n_in or 0, (n_out or 0) * n_ranks)
        case Kind.RECV:
            n = n_out or n_in
        case _:
            n = n_in or n_out
    if not n or dtype is None or dtype not in DTYPE_BITS:
        return None
    return -(-n * DTYPE_BITS[dtype] // 8)
