"""The partition specs of weights, activations and caches in one phase of a plan."""

from dataclasses import dataclass
from enum import StrEnum

from jax.sharding import PartitionSpec as P

from meshscope.events.enums import Phase
from meshscope.model.arrays import CacheArray, Dim, Weight, mesh_axes_of
from meshscope.plans.plan import Plan
from meshscope.plans.workload import Workload


class TokenSplit(StrEnum):
    """The dim of the residual stream that sp splits over tp."""

    NONE = "none"
    SEQUENCE = "sequence"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """The partition specs of one phase; they omit axes of size 1, which the mesh does not have."""

    plan: Plan
    token_split: TokenSplit
    phase: Phase

    @property
    def split_dim(self) -> int | None:
        """The dim of [B, S, D] that sp splits over tp; None without sp."""
        return {TokenSplit.NONE: None, TokenSplit.BATCH: 0, TokenSplit.SEQUENCE: 1}[
            self.token_split
        ]

    def axis(self, name: str) -> str | None:
        """`name` if the mesh has this axis, else None."""
        return name if name in self.plan.mesh.names else None

    @property
    def data(self) -> str | None:
        """The mesh axis that splits the batch."""
        return self.axis(self.plan.data_axis)

    @property
    def context(self) -> str | None:
        """The mesh axis that splits the positions."""
        return self.axis("cp")

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the positions of [B, S, D] between the blocks, outermost first."""
        is_split = self.context is not None and self.phase is Phase.PREFILL
        return ("cp",) * is_split + ("tp",) * (self.token_split is TokenSplit.SEQUENCE)

    @property
    def gathered_spec(self) -> P:
        """[B, S, D] inside attention and MLP."""
        return P(self.data, None, None)

    @property
    def residual_spec(self) -> P:
        """[B, S, D] between attention and MLP."""
        match self.token_split:
            case TokenSplit.NONE:
                return self.gathered_spec
            case TokenSplit.SEQUENCE:
                return P(self.data, "tp", None)
            case TokenSplit.BATCH:
                return P((self.data, "tp") if self.data else "tp", None, None)

    @property
    def rows_spec(self) -> P:
        """[B, ...] of hidden states and logits of the last position."""
        return P(self.data, None)

    @property
    def out_logits_spec(self) -> P:
        """[B, V] of logits as they leave the program; [P, B, V] from the stages of a pipeline."""
        return P("pp", *self.rows_spec) if self.axis("pp") else self.rows_spec

    @property
    def logits_spec(self) -> P:
        """[B, V] of logits before they are gathered."""
        return P(self.data, self.axis("tp"))

    @property
    def tokens_spec(self) -> P:
        """[B, S] of token ids, [B, S, D] of hidden states."""
        return P(self.data, self.context if self.phase is Phase.PREFILL else None)

    @property
    def next_tokens_spec(self) -> P:
        """[B] of sampled token ids."""
        return P(self.data)

    def split(self, dim: Dim) -> str | tuple[str, ...] | None:
        """The partition spec entry of a logical dim."""
        axes = tuple(axis for axis in mesh_axes_of(dim, self.plan) if self.axis(axis))
        return axes if len(axes) > 1 else next(iter(axes), None)

    def cache_spec(self, array: CacheArray, *, is_stacked: bool) -> P:
        """[B, ..., T, H] of a cache array; if stacked, with a leading layer dim that pp splits."""
        *heads, width = map(self.split, array.dims)
        dims = (self.data, *heads, self.context, width)
        return P(self.axis("pp"), *dims) if is_stacked else P(*dims)

    def weight_spec(self, weight: Weight, *, is_stacked: bool) -> P:
        """One weight; if stacked, with a leading layer dim that pp splits."""
        dims = map(self.split, weight.dims)
        return P(self.axis("pp"), *dims) if is_stacked else P(*dims)


def layout_of(plan: Plan, workload: Workload, phase: Phase) -> ShardLayout:
    """The layout of one phase: sp splits the prompt in prefill and the batch in decode.

    If tp does not divide the decode batch, sp has no effect in decode, as in serving engines, which
    apply sequence parallelism only to divisible token counts.
    """
    if not plan.sp:
        split = TokenSplit.NONE
    elif phase is Phase.PREFILL:
        split = TokenSplit.SEQUENCE
    elif workload.batch * workload.decode_tokens // plan.data_size % plan.tp == 0:
        split = TokenSplit.BATCH
    else:
        split = TokenSplit.NONE
    return ShardLayout(plan=plan, token_split=split, phase=phase)
