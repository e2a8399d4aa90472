"""The points where devices meet, supplied in two ways: by hand under `shard_map`, or by annotation.

The model text calls the same points for both; everything between two points is local arithmetic.
Shapes: B batch, S positions of this step, D residual width, V vocabulary; lower case is one
device's share (b, s, v).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshscope.programs.jax.layout import ShardLayout, TokenSplit
from meshscope.programs.jax.numerics import Array
from meshscope.spec.plan.plan import Plan
from meshscope.spec.plan.weights import Weight


class MeshCollectives(Protocol):
    """What happens where devices meet."""

    def weight(self, value: Array, spec: Weight) -> Array:
        """A weight as the layer uses it: gathered over fsdp."""
        ...

    def gathers(self, spec: Weight) -> bool:
        """Whether `weight` is a collective that is written here."""
        ...

    def is_used_as_held(self, spec: Weight) -> bool:
        """Whether a layer uses the array that its device holds, as it is."""
        ...

    def embedded(self, table: Array, tokens: Array) -> Array:
        """Rows of the embedding, which tp splits over the vocabulary: [B, S] -> [B, S, D]."""
        ...

    def entered(self, x: Array) -> Array:
        """Activations at the entrance of attention or MLP: whole again where sp had split them."""
        ...

    def summed(self, x: Array) -> Array:
        """The partial sums at the end of attention or MLP added up over tp."""
        ...

    def last(self, x: Array) -> Array:
        """The hidden state of the last position on every device: [B, S, D] -> [B, D]."""
        ...

    def logits(self, x: Array) -> Array:
        """Logits gathered over the vocabulary: [B, v] -> [B, V]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMapCollectives:
    """Every collective written out; arrays are one device's share."""

    plan: Plan
    layout: ShardLayout

    def weight(self, value: Array, spec: Weight) -> Array:
        """All-gather over fsdp along the dimension that it splits."""
        dim = spec.fsdp_dim(self.plan)
        if self.plan.fsdp == 1 or dim is None:
            return value
        return lax.all_gather(value, "fsdp", axis=dim, tiled=True)

    def gathers(self, spec: Weight) -> bool:
        """Where fsdp splits it."""
        return self.plan.fsdp > 1 and spec.fsdp_dim(self.plan) is not None

    def is_used_as_held(self, spec: Weight) -> bool:
        """Where nothing is gathered."""
        return not self.gathers(spec)

    def embedded(self, table: Array, tokens: Array) -> Array:
        """Each device looks up the rows that it holds, zeros elsewhere; the sum is the embedding."""
        if self.plan.tp == 1:
            return table[tokens]
        n_rows = table.shape[0]
        local = tokens - lax.axis_index("tp") * n_rows
        is_here = (local >= 0) & (local < n_rows)
        rows = table[jnp.clip(local, 0, n_rows - 1)]
        return self.summed(jnp.where(is_here[..., None], rows, jnp.zeros((), rows.dtype)))

    def entered(self, x: Array) -> Array:
        """All-gather of the dimension that sp splits."""
        dim = self.layout.split_dim
        return x if dim is None else lax.all_gather(x, "tp", axis=dim, tiled=True)

    def summed(self, x: Array) -> Array:
        """All-reduce over tp; a reduce-scatter under sp."""
        if self.plan.tp == 1:
            return x
        dim = self.layout.split_dim
        if dim is None:
            return lax.psum(x, "tp")
        return lax.psum_scatter(x, "tp", scatter_dimension=dim, tiled=True)

    def last(self, x: Array) -> Array:
        """Where the sequence is split the last position lives on one device: a masked sum tells all."""
        if self.layout.token_split is TokenSplit.BATCH:
            return lax.all_gather(x, "tp", axis=0, tiled=True)[:, -1]
        axes = self.layout.sequence_axes
        if not axes:
            return x[:, -1]
        is_last = lax.axis_index(axes) == lax.axis_size(axes) - 1
        return lax.psum(jnp.where(is_last, x[:, -1], jnp.zeros((), x.dtype)), axes)

    def logits(self, x: Array) -> Array:
        """All-gather of the vocabulary over tp."""
        return x if self.plan.tp == 1 else lax.all_gather(x, "tp", axis=1, tiled=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GspmdCollectives:
    """Nothing but annotations; the compiler inserts the collectives. Arrays are global."""

    layout: ShardLayout
    mesh: Mesh

    def _annotated(self, x: Array, spec: PartitionSpec) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def weight(self, value: Array, spec: Weight) -> Array:  # noqa: ARG002  the compiler decides when to gather
        """The weight as it is."""
        return value

    def gathers(self, spec: Weight) -> bool:  # noqa: ARG002  the same for all
        """The collectives are the compiler's."""
        return False

    def is_used_as_held(self, spec: Weight) -> bool:  # noqa: ARG002  the same for all
        """Not known here: arrays are global, and the compiler decides."""
        return False

    def embedded(self, table: Array, tokens: Array) -> Array:
        """A plain look-up, its result laid out like the residual stream."""
        return self.summed(table[tokens])

    def entered(self, x: Array) -> Array:
        """Whole along the dimension that sp splits."""
        return self._annotated(x, self.layout.entered_spec)

    def summed(self, x: Array) -> Array:
        """Laid out like the residual stream."""
        return self._annotated(x, self.layout.residual_spec)

    def last(self, x: Array) -> Array:
        """The last position, replicated over tp."""
        return self._annotated(x[:, -1], self.layout.rows_spec)

    def logits(self, x: Array) -> Array:
        """Made where the head's rows are, then replicated.

        Without the first annotation the compiler gathers the head, a thousand times the bytes.
        """
        return self._annotated(self._annotated(x, self.layout.logits_spec), self.layout.rows_spec)


def scope(name: str) -> Any:
    """A named scope: the readers find phase, layer and part of an operation by these names."""
    return jax.named_scope(name)
