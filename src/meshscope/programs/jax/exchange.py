"""Rows on their way to the devices of their experts and back: ragged, or a fixed number to each.

Every device sorts its rows by expert and tells all others how many it has for each; from this table
alone everyone knows what comes from where, so that no further word is needed.

Shapes: n devices of the exchange, E experts of the model, e of one device, T tokens of this device,
K experts a token, R = T*K rows that leave, B rows that a device can receive, C slots for each pair.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from meshscope.events.enums import Part
from meshscope.programs.jax.collectives import scope
from meshscope.programs.jax.experts import Experts, counted, summed_rows, unsorted
from meshscope.programs.jax.numerics import Array
from meshscope.programs.jax.runs import LayerRuns, received_runs
from meshscope.spec.plan.dispatch import Dispatch


def exchanged_mixture(
    x: Array,
    chosen: Array,
    shares: Array,
    experts: Experts,
    dispatch: Dispatch,
) -> Array:
    """[T, D]: each token's experts, wherever they are, summed; tokens without expert come out zero.

    An expert beyond the last means none.
    """
    return exchanged_beside(x, chosen, shares, experts, dispatch, meanwhile=None)[0]


def exchanged_beside(  # noqa: PLR0913  tokens, their routing, the experts, and what else there is to do
    x: Array,
    chosen: Array,
    shares: Array,
    experts: Experts,
    dispatch: Dispatch,
    *,
    meanwhile: Callable[[], Array] | None,
) -> tuple[Array, Array | None]:
    """As `exchanged_mixture`, and what `meanwhile` makes of what this device has already.

    That work is held to the time before the experts', so that it can hide the dispatch.
    """
    with scope(Part.MOE_DISPATCH):
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        rows = x[order // dispatch.n_active]  # [R, D]
        table = _table(counted(flat, experts.moe.n_experts), dispatch)
        received = table.sent(rows)  # [B, D]
    beside = None
    if meanwhile is not None:
        received, beside = lax.optimization_barrier((received, meanwhile()))
    with scope(Part.MOE_EXPERTS):
        runs = table.runs
        out = experts(received[runs.sources], runs.rows_of_experts)[runs.places]
    with scope(Part.MOE_COMBINE):
        back = table.returned(out, rows)
        return summed_rows(unsorted(back, order), shares), beside


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Who sends how many rows to whom; `sizes` [n, n] is [from, to], dropped rows left out.

    `starts` [n, n] is where the rows for each device start on each, [from, to]; `runs` how those that
    come to this one lie in its buffer.
    """

    dispatch: Dispatch
    me: Array
    sizes: Array
    starts: Array
    runs: LayerRuns

    def sent(self, rows: Array) -> Array:
        """The rows of all devices for the experts of this one: [R, D] -> [B, D]."""
        n_slots = self.dispatch.n_slots
        if n_slots is None:
            buffer = jnp.zeros((self.dispatch.n_buffer_rows, rows.shape[1]), rows.dtype)
            return self._ragged(
                rows,
                buffer,
                input_offsets=self.starts[self.me],
                send_sizes=self.sizes[self.me],
                output_offsets=_before(self.sizes)[self.me],
                recv_sizes=self.sizes[:, self.me],
            )
        slots = jnp.arange(n_slots)[None, :]
        place = self.starts[self.me][:, None] + slots  # [n, C]
        is_used = slots < self.sizes[self.me][:, None]
        taken = rows[jnp.minimum(place, rows.shape[0] - 1)]
        taken = jnp.where(is_used[..., None], taken, jnp.zeros((), rows.dtype))
        return self._all_to_all(taken).reshape(-1, rows.shape[1])

    def returned(self, out: Array, rows: Array) -> Array:
        """The outputs of other devices for the rows of this one: [B, D] -> [R, D], zeros if dropped."""
        n_slots = self.dispatch.n_slots
        if n_slots is None:
            return self._ragged(
                out,
                jnp.zeros(rows.shape, out.dtype),
                input_offsets=_before(self.sizes)[:, self.me],
                send_sizes=self.sizes[:, self.me],
                output_offsets=self.starts[:, self.me],
                recv_sizes=self.sizes[self.me],
            )
        back = self._all_to_all(out.reshape(-1, n_slots, out.shape[1])).reshape(out.shape)
        place = jnp.arange(rows.shape[0])
        starts = self.starts[self.me]
        peer = jnp.searchsorted(starts, place, side="right") - 1
        slot = place - starts[peer]
        is_kept = slot < self.sizes[self.me, peer]
        found = back[peer * n_slots + jnp.minimum(slot, n_slots - 1)]
        return jnp.where(is_kept[:, None], found, jnp.zeros((), found.dtype))

    def _all_to_all(self, x: Array) -> Array:
        """[n, C, D], one part for each device -> [n, C, D], one part from each."""
        return lax.all_to_all(x, self.dispatch.axes, split_axis=0, concat_axis=0, tiled=True)

    def _ragged(self, rows: Array, buffer: Array, **sizes: Array) -> Array:
        numbers = {name: size.astype(jnp.int32) for name, size in sizes.items()}
        return lax.ragged_all_to_all(rows, buffer, **numbers, axis_name=self.dispatch.axes)


def _table(counts: Array, dispatch: Dispatch) -> _Table:
    """From how many rows this device has for each expert, [E]: one small all-gather."""
    n_ranks, n_local = dispatch.n_ranks, dispatch.n_local_experts
    of_peers = counts.reshape((n_ranks, n_local) if n_local > 1 else (n_ranks,))
    grouped = lax.all_gather(of_peers, dispatch.axes, axis=0, tiled=False)
    grouped = grouped.reshape(n_ranks, n_ranks, n_local)  # from, to, expert
    wanted = grouped.sum(axis=2)
    me = lax.axis_index(dispatch.axes)
    if dispatch.n_slots is None:
        sizes = jnp.clip(dispatch.n_buffer_rows - _before(wanted), 0, wanted)
        bases = _before(sizes)[:, me]
    else:
        sizes = jnp.minimum(wanted, dispatch.n_slots)
        bases = jnp.arange(n_ranks, dtype=sizes.dtype) * dispatch.n_slots
    return _Table(
        dispatch=dispatch,
        me=me,
        sizes=sizes,
        starts=jnp.cumsum(wanted, axis=1) - wanted,
        runs=received_runs(grouped[:, me], sizes[:, me], bases, n_rows=dispatch.n_buffer_rows),
    )


def _before(sizes: Array) -> Array:
    """[n, n]: how many rows come to each device from the devices before this one."""
    return jnp.cumsum(sizes, axis=0) - sizes
