"""Mixtures of experts in one kernel that exchanges rows with other chips itself (`fused_ep_moe`).

The kernels of tpu-inference and SGLang-JAX declare neither bytes nor FLOPs. Their operands are tokens
[T, D], packed as [T, 2, D/2] in bf16; weights [E, 2, D, F] and [E, F, D] of the local experts; logits [T, all
experts]; and a buffer [all experts, ...] for the results. The number of experts of a token is in the name, and
in that of SGLang-JAX the tokens of a block, too: `fused-moe-k_8-bt_512_128_128-...` (source:
kernels/fused_moe in both projects, November 2026).
"""

import re
from dataclasses import dataclass
from math import prod

from meshscope.readers.hlo.module import ArrayShape, Computation, Instruction
from meshscope.units import DTYPE_BITS

_NAME = re.compile(r"fused[-_](?:ep[-_])?moe(?:[-_]v\d+)?[-_]k[-_](\d+)(?:.*?[-_]bt[-_](\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedExperts:
    """Sizes of the kernel on one device; `n_expert_weights` are the numbers in the matrices of one expert."""

    dtype: str
    n_tokens: int
    block_tokens: int  # that read the weights together; all if unknown
    n_active: int  # experts of a token
    n_local: int  # experts of the device
    n_experts: int  # experts of all devices
    hidden: int
    n_expert_weights: int
    weights_bytes: int

    @property
    def n_ranks(self) -> int:
        """Devices that share the experts."""
        return self.n_experts // self.n_local

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of the rows that a device sends to experts and gets back, those of its own experts included."""
        row_bytes = self.hidden * DTYPE_BITS[self.dtype] // 8
        return 2 * self.n_tokens * self.n_active * row_bytes


def fused_experts(computation: Computation, kernel: Instruction) -> FusedExperts | None:
    """The sizes of a fused mixture of experts; None for another kernel, or one with other operands."""
    match = _NAME.search(f"{kernel.name} {kernel.op_name or ''}")
    arrays = [p.arrays[0] for p in computation.producers(kernel) if len(p.arrays) == 1]
    if match is None or not arrays or arrays[0].dtype not in DTYPE_BITS:
        return None
    tokens, hidden = arrays[0], prod(arrays[0].dims[1:])
    buffers = [array for array in arrays[1:] if _is_buffer(array, hidden)]
    weights = [array for array in arrays[1:] if array not in buffers and _is_weight(array, hidden)]
    n_experts = max((array.dims[0] for array in buffers), default=0)
    if not weights or not n_experts or n_experts % weights[0].dims[0]:
        return None
    return FusedExperts(
        dtype=tokens.dtype,
        n_tokens=tokens.dims[0],
        block_tokens=int(match[2] or tokens.dims[0]),
        n_active=int(match[1]),
        n_local=weights[0].dims[0],
        n_experts=n_experts,
        hidden=hidden,
        n_expert_weights=sum(prod(array.dims[1:]) for array in weights),
        weights_bytes=sum(array.n_bytes or 0 for array in weights),
    )


def _is_buffer(array: ArrayShape, hidden: int) -> bool:
    """Whether rows of the residual stream fill the last two dims, as in the buffer for results."""
    return len(array.dims) == 4 and prod(array.dims[2:]) == hidden


def _is_weight(array: ArrayShape, hidden: int) -> bool:
    return len(array.dims) in {3, 4} and hidden in array.dims[1:]
