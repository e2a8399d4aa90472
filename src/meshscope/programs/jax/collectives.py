"""How a plan splits arrays, and the collectives of the decoder: under `shard_map`, or by annotations.

The model code calls the same methods for both; everything between two calls is local arithmetic.
Shapes: B batch, S positions of this step, D residual width, V vocabulary; lower case is local to
one device (b, s, v).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshscope.events.enums import Phase
from meshscope.model.arrays import Dim, Weight, mesh_axes_of
from meshscope.plans.plan import Plan
from meshscope.plans.workload import Workload
from meshscope.programs.jax.matrix import Matrix
from meshscope.programs.jax.numerics import Array


def _row_major(x: Array) -> Array:
    """The array with its dims in order in memory: XLA scatters no sums along the outermost of a few rows."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """The partition specs of one phase; they omit axes of size 1, which the mesh does not have."""

    plan: Plan
    phase: Phase
    split_dim: int | None = None  # of the residual stream [B, S, D], by sp over tp; None without

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
    def gathered_spec(self) -> P:
        """[B, S, D] inside attention and MLP."""
        return P(self.data, None, None)

    @property
    def residual_spec(self) -> P:
        """[B, S, D] between attention and MLP."""
        if self.split_dim is None:
            return self.gathered_spec
        if self.split_dim == 1:
            return P(self.data, "tp", None)
        return P((self.data, "tp") if self.data else "tp", None, None)

    @property
    def rows_spec(self) -> P:
        """[B, ...] of hidden states and logits of the last position."""
        return P(self.data, None)

    def split(self, dim: Dim) -> str | tuple[str, ...] | None:
        """The partition spec entry of a logical dim."""
        axes = tuple(axis for axis in mesh_axes_of(dim, self.plan) if self.axis(axis))
        return axes if len(axes) > 1 else next(iter(axes), None)

    def spec(self, dims: Iterable[Dim | str | None], *, is_stacked: bool) -> P:
        """An array with logical dims or mesh axes; if stacked, with a leading layer dim that pp splits."""
        entries = [self.split(dim) if isinstance(dim, Dim) else dim for dim in dims]
        return P(self.axis("pp"), *entries) if is_stacked else P(*entries)


def layout_of(plan: Plan, workload: Workload, phase: Phase) -> ShardLayout:
    """The layout of one phase: sp splits the prompt in prefill and, as in serving engines if tp divides it, the batch in decode."""
    n_rows = workload.batch * workload.decode_tokens // plan.data_size
    is_prefill = phase is Phase.PREFILL
    is_split = plan.sp and (is_prefill or n_rows % plan.tp == 0)
    return ShardLayout(plan=plan, phase=phase, split_dim=int(is_prefill) if is_split else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMapCollectives:
    """Explicit collectives on local arrays."""

    plan: Plan
    layout: ShardLayout

    def weight(self, value: Array, spec: Weight) -> Array:
        """The whole weight: an all-gather over fsdp along the dim that it splits."""
        dim = spec.fsdp_dim(self.plan)
        if self.plan.fsdp == 1 or dim is None:
            return value
        return lax.all_gather(value, "fsdp", axis=dim, tiled=True)

    def gathers(self, spec: Weight) -> bool:
        """Whether `weight` issues a collective; else a layer uses the local array unchanged."""
        return self.plan.fsdp > 1 and spec.fsdp_dim(self.plan) is not None

    def embed(self, table: Matrix, tokens: Array) -> Array:
        """[B, S] -> [B, S, D]: looks up local rows, with zeros for other tokens, and reduces over tp."""
        if self.plan.tp == 1:
            return table.rows(tokens)
        n_rows = table.values.shape[0]
        local = tokens - lax.axis_index("tp") * n_rows
        is_local = (local >= 0) & (local < n_rows)
        rows = table.rows(jnp.clip(local, 0, n_rows - 1))
        return self.reduce_output(jnp.where(is_local[..., None], rows, jnp.zeros((), rows.dtype)))

    def table_rows(self, tables: Mapping[int, Matrix], index: Array) -> dict[int, Array]:
        """Rows [B, S, R*W] of tables whose rows are split over the plan's axes; `index` is [B, S, L, R].

        The indices of all devices reach each of them, which looks up the rows that it has; sums over the axes give each its
        tokens. If cp splits both, `index` has the indices of all its devices.
        """
        axes = tuple(axis for axis in self.plan.table_axes if self.layout.axis(axis))
        data = self.layout.data if self.layout.data in axes else None
        if "tp" not in axes:
            index = self.split_activations(index)
        if data is not None:
            index = lax.all_gather(index, data, axis=0, tiled=True)
        of_tables: dict[int, Array] = {}
        for number, (layer, table) in enumerate(tables.items()):
            one, n_rows = index[:, :, number], table.values.shape[0]
            shape, one = (*one.shape[:2], -1), one.reshape(-1)  # else the dims of tokens are minor
            if not axes:
                of_tables[layer] = table.rows(one).reshape(shape)
                continue
            local = one - lax.axis_index(axes) * n_rows
            rows = table.rows(jnp.clip(local, 0, n_rows - 1))
            is_local = (local >= 0) & (local < n_rows)
            rows = jnp.where(is_local[..., None], rows, jnp.zeros((), rows.dtype))
            # Else XLA moves the reshape after the sum, or the sum to where it is used.
            rows = lax.optimization_barrier(rows.reshape(shape))
            if data is not None:
                rows = lax.psum_scatter(rows, data, scatter_dimension=0, tiled=True)
            is_block = "cp" in axes and self.layout.phase is Phase.PREFILL
            if is_block:
                rows = lax.psum_scatter(_row_major(rows), "cp", scatter_dimension=1, tiled=True)
            if "tp" in axes:
                is_split = self.layout.split_dim == 1
                rows = self.reduce_output(_row_major(rows) if is_split else rows)
            alike = tuple(a for a in ("pp", "cp") if a in axes and not (a == "cp" and is_block))
            rows = lax.psum(rows, alike) if alike else rows
            of_tables[layer] = lax.optimization_barrier(rows)
        return of_tables

    def last_positions(self, x: Array, n: int) -> Array:
        """The last `n` of all positions of x [B, S, ...], summed over cp; if sp splits them, this device's by a reduce-scatter."""
        n_local, is_split = x.shape[1], self.layout.split_dim == 1
        splits = {"cp": self.plan.cp > 1, "tp": is_split}
        axes = tuple(axis for axis in splits if splits[axis])
        if not axes:
            return x[:, n_local - n :]
        first = lax.axis_size(axes) * n_local - n - lax.axis_index(axes) * n_local
        numbers = first + jnp.arange(n)
        is_local = (numbers >= 0) & (numbers < n_local)
        rows = jnp.take(x, jnp.clip(numbers, 0, n_local - 1), axis=1)
        is_local = is_local.reshape(1, n, *(1,) * (x.ndim - 2))
        rows = jnp.where(is_local, rows, jnp.zeros((), x.dtype))
        if is_split:
            flat = lax.optimization_barrier(rows.reshape(*rows.shape[:2], -1))
            rows = self.reduce_output(flat).reshape(len(x), -1, *x.shape[2:])
        return lax.psum(rows, "cp") if self.plan.cp > 1 else rows

    def gather_activations(self, x: Array) -> Array:
        """The input of attention or MLP: an all-gather along the dim that sp splits."""
        dim = self.layout.split_dim
        return x if dim is None else lax.all_gather(x, "tp", axis=dim, tiled=True)

    def split_activations(self, x: Array) -> Array:
        """The slice of this device along the dim that sp splits: the inverse of a gather."""
        dim = self.layout.split_dim
        if dim is None:
            return x
        n_local = x.shape[dim] // self.plan.tp
        return lax.dynamic_slice_in_dim(x, lax.axis_index("tp") * n_local, n_local, axis=dim)

    def reduce_output(self, x: Array) -> Array:
        """Partial outputs of attention or MLP: an all-reduce over tp, or a reduce-scatter under sp."""
        if self.plan.tp == 1:
            return x
        dim = self.layout.split_dim
        if dim is None:
            return lax.psum(x, "tp")
        return lax.psum_scatter(x, "tp", scatter_dimension=dim, tiled=True)

    def mean(self, x: Array) -> Array:
        """The mean of the tp devices' values."""
        return x if self.plan.tp == 1 else lax.psum(x, "tp") / self.plan.tp

    def last_token(self, x: Array, *, is_whole: bool = False) -> Array:
        """[B, S, D] -> [B, D]: an all-gather of a split batch, or a masked all-reduce of a split sequence.

        It `is_whole` if all devices of cp have the last tokens.
        """
        if self.layout.split_dim == 0:
            return lax.all_gather(x, "tp", axis=0, tiled=True)[:, -1]
        is_split = self.layout.context is not None and self.layout.phase is Phase.PREFILL
        is_split = is_split and not is_whole
        splits = {"cp": is_split, "tp": self.layout.split_dim == 1}
        axes = tuple(axis for axis in splits if splits[axis])
        if not axes:
            return x[:, -1]
        is_last = lax.axis_index(axes) == lax.axis_size(axes) - 1
        return lax.psum(jnp.where(is_last, x[:, -1], jnp.zeros((), x.dtype)), axes)

    def logits(self, x: Array) -> Array:
        """[B, v] -> [B, V]: an all-gather of the vocabulary over tp."""
        return x if self.plan.tp == 1 else lax.all_gather(x, "tp", axis=1, tiled=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GspmdCollectives:
    """Sharding annotations on global arrays; the compiler inserts the collectives."""

    layout: ShardLayout
    mesh: Mesh

    def annotated(self, x: Array, spec: P) -> Array:
        """`x` with this sharding."""
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def weight(self, value: Array, spec: Weight) -> Array:  # noqa: ARG002  the compiler decides when to gather
        """The weight unchanged."""
        return value

    def gathers(self, spec: Weight) -> None:
        """None: arrays are global, and the compiler decides."""

    def embed(self, table: Matrix, tokens: Array) -> Array:
        """A lookup whose result is sharded like the residual stream."""
        return self.reduce_output(table.rows(tokens))

    def gather_activations(self, x: Array) -> Array:
        """Unsharded along the dim that sp splits."""
        return self.annotated(x, self.layout.gathered_spec)

    def split_activations(self, x: Array) -> Array:
        """Sharded like the residual stream."""
        return self.annotated(x, self.layout.residual_spec)

    reduce_output = split_activations

    def mean(self, x: Array) -> Array:
        """The value, which all devices share."""
        return x

    def last_token(self, x: Array, *, is_whole: bool = False) -> Array:  # noqa: ARG002  no cp
        """The last position, replicated over tp."""
        return self.annotated(x[:, -1], self.layout.rows_spec)

    def logits(self, x: Array) -> Array:
        """Computed on the devices of the head's shards, then replicated."""
        # Without the first annotation, the compiler gathers the head: a thousand times the bytes.
        local = self.annotated(x, P(self.layout.data, self.layout.axis("tp")))
        return self.annotated(local, self.layout.rows_spec)


MeshCollectives = ShardMapCollectives | GspmdCollectives


def scope(name: str) -> Any:
    """A named scope, by which the readers attribute operations to phase, layer and part."""
    return jax.named_scope(name)
