"""The collectives of the decoder, explicit under `shard_map` or by sharding annotations.

The model code calls the same methods for both; everything between two calls is local arithmetic.
Shapes: B batch, S positions of this step, D residual width, V vocabulary; lower case is local to
one device (b, s, v).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshscope.model.arrays import Weight
from meshscope.plans.plan import Plan
from meshscope.programs.jax.layout import ShardLayout, TokenSplit
from meshscope.programs.jax.matrix import Matrix
from meshscope.programs.jax.numerics import Array


class MeshCollectives(Protocol):
    """The operations of the decoder that communicate between devices."""

    def weight(self, value: Array, spec: Weight) -> Array:
        """The whole weight, gathered over fsdp."""
        ...

    def gathers(self, spec: Weight) -> bool:
        """Whether `weight` issues an explicit collective."""
        ...

    def uses_local_array(self, spec: Weight) -> bool:
        """Whether a layer uses the local array of the weight unchanged."""
        ...

    def embed(self, table: Matrix, tokens: Array) -> Array:
        """Looks up embeddings in a table sharded over the vocabulary: [B, S] -> [B, S, D]."""
        ...

    def gather_activations(self, x: Array) -> Array:
        """Gathers the input of attention or MLP along the dim that sp splits."""
        ...

    def split_activations(self, x: Array) -> Array:
        """The part of [B, S, D] that the residual stream of a device has: the inverse of a gather."""
        ...

    def reduce_output(self, x: Array) -> Array:
        """Reduces the partial outputs of attention or MLP over tp."""
        ...

    def last_token(self, x: Array) -> Array:
        """Replicates the hidden state of the last position: [B, S, D] -> [B, D]."""
        ...

    def logits(self, x: Array) -> Array:
        """Gathers logits over the vocabulary: [B, v] -> [B, V]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMapCollectives:
    """Explicit collectives on local arrays."""

    plan: Plan
    layout: ShardLayout

    def weight(self, value: Array, spec: Weight) -> Array:
        """All-gather over fsdp along the dim that it splits."""
        dim = spec.fsdp_dim(self.plan)
        if self.plan.fsdp == 1 or dim is None:
            return value
        return lax.all_gather(value, "fsdp", axis=dim, tiled=True)

    def gathers(self, spec: Weight) -> bool:
        """Whether fsdp splits the weight."""
        return self.plan.fsdp > 1 and spec.fsdp_dim(self.plan) is not None

    def uses_local_array(self, spec: Weight) -> bool:
        """Whether the weight is not gathered."""
        return not self.gathers(spec)

    def embed(self, table: Matrix, tokens: Array) -> Array:
        """Looks up local rows, with zeros for other tokens, and reduces over tp."""
        if self.plan.tp == 1:
            return table.rows(tokens)
        n_rows = table.values.shape[0]
        local = tokens - lax.axis_index("tp") * n_rows
        is_local = (local >= 0) & (local < n_rows)
        rows = table.rows(jnp.clip(local, 0, n_rows - 1))
        return self.reduce_output(jnp.where(is_local[..., None], rows, jnp.zeros((), rows.dtype)))

    def gather_activations(self, x: Array) -> Array:
        """All-gather along the dim that sp splits."""
        dim = self.layout.split_dim
        return x if dim is None else lax.all_gather(x, "tp", axis=dim, tiled=True)

    def split_activations(self, x: Array) -> Array:
        """The slice of this device along the dim that sp splits."""
        dim = self.layout.split_dim
        if dim is None:
            return x
        n_local = x.shape[dim] // self.plan.tp
        return lax.dynamic_slice_in_dim(x, lax.axis_index("tp") * n_local, n_local, axis=dim)

    def reduce_output(self, x: Array) -> Array:
        """All-reduce over tp, or reduce-scatter under sp."""
        if self.plan.tp == 1:
            return x
        dim = self.layout.split_dim
        if dim is None:
            return lax.psum(x, "tp")
        return lax.psum_scatter(x, "tp", scatter_dimension=dim, tiled=True)

    def last_token(self, x: Array) -> Array:
        """All-gather of a split batch, or masked all-reduce of a split sequence."""
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
    """Sharding annotations on global arrays; the compiler inserts the collectives."""

    layout: ShardLayout
    mesh: Mesh

    def _annotated(self, x: Array, spec: PartitionSpec) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def weight(self, value: Array, spec: Weight) -> Array:  # noqa: ARG002  the compiler decides when to gather
        """The weight unchanged."""
        return value

    def gathers(self, spec: Weight) -> bool:  # noqa: ARG002  the same for all
        """False: the compiler inserts all collectives."""
        return False

    def uses_local_array(self, spec: Weight) -> bool:  # noqa: ARG002  the same for all
        """False: arrays are global, and the compiler decides."""
        return False

    def embed(self, table: Matrix, tokens: Array) -> Array:
        """A lookup whose result is sharded like the residual stream."""
        return self.reduce_output(table.rows(tokens))

    def gather_activations(self, x: Array) -> Array:
        """Unsharded along the dim that sp splits."""
        return self._annotated(x, self.layout.gathered_spec)

    def split_activations(self, x: Array) -> Array:
        """Sharded like the residual stream."""
        return self._annotated(x, self.layout.residual_spec)

    def reduce_output(self, x: Array) -> Array:
        """Sharded like the residual stream."""
        return self._annotated(x, self.layout.residual_spec)

    def last_token(self, x: Array) -> Array:
        """The last position, replicated over tp."""
        return self._annotated(x[:, -1], self.layout.rows_spec)

    def logits(self, x: Array) -> Array:
        """Computed on the devices of the head's shards, then replicated.

        Without the first annotation, the compiler gathers the head: a thousand times the bytes.
        """
        return self._annotated(self._annotated(x, self.layout.logits_spec), self.layout.rows_spec)


def scope(name: str) -> Any:
    """A named scope, by which the readers attribute operations to phase, layer and part."""
    return jax.named_scope(name)
