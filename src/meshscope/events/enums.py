"""Enumerations of the event table, and the wire bytes of each kind of collective."""

from enum import StrEnum
from fractions import Fraction
from typing import assert_never


class Kind(StrEnum):
    """What a collective does, independent of the compiler's or library's name for it."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    PERMUTE = "permute"
    SEND = "send"
    RECV = "recv"
    GATHER = "gather"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SCATTER = "scatter"


class Source(StrEnum):
    """How a row was obtained."""

    PREDICTED = "predicted"
    COMPILED = "compiled"
    MEASURED = "measured"


class Phase(StrEnum):
    """Prefill processes the prompt in one step; decode generates one token per step.

    `step` is one execution of a program that is neither, such as a training step.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    STEP = "step"


REQUEST_PHASES = (Phase.PREFILL, Phase.DECODE)  # the phases of LLM inference


class Part(StrEnum):
    """The part of the model a row belongs to. Programs use these values as scope names."""

    EMBED = "embed"
    ATTN = "attn"
    MLP = "mlp"
    MOE_ROUTER = "moe.router"
    MOE_DISPATCH = "moe.dispatch"
    MOE_EXPERTS = "moe.experts"
    MOE_COMBINE = "moe.combine"
    MOE_SHARED = "moe.shared"
    LM_HEAD = "lm_head"
    STAGE = "stage"
    SAMPLE = "sample"


class OpClass(StrEnum):
    """What an operation that is no collective does, as timelines and exports name it."""

    MATMUL = "matmul"
    ATTENTION = "attention"  # kernels, and products of queries with keys and of weights with values
    EXPERTS = "experts"  # kernels of grouped products
    KERNEL = "kernel"  # another one, such as a sort
    COPY = "copy"  # between memories
    OTHER = "other"


def wire_factor(kind: Kind, group_size: int) -> Fraction:
    """Bytes that one device sends per payload byte.

    Source: nccl-tests doc/PERFORMANCE.md, "Bus bandwidth": all-reduce 2(n-1)/n; all-gather,
    reduce-scatter and all-to-all (n-1)/n; broadcast and reduce 1, and so for gather, scatter and
    point to point. The payload is
    the whole array (all-gather: output; reduce-scatter: input). A group of one device sends
    nothing, and neither does a receiver: a transfer counts at its sender. Headers and
    algorithms that send more than the optimum are left out.
    """
    if group_size <= 1:
        return Fraction(0)
    match kind:
        case Kind.ALL_REDUCE:
            return Fraction(2 * (group_size - 1), group_size)
        case Kind.ALL_GATHER | Kind.REDUCE_SCATTER | Kind.ALL_TO_ALL:
            return Fraction(group_size - 1, group_size)
        case Kind.PERMUTE | Kind.SEND | Kind.GATHER | Kind.BROADCAST | Kind.REDUCE | Kind.SCATTER:
            return Fraction(1)
        case Kind.RECV:
            return Fraction(0)
        case _:
            assert_never(kind)
