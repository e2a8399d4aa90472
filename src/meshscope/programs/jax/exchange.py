"""Expert-parallel dispatch and combine by all-to-alls, ragged or with a fixed number of slots.

Every device sorts its rows by expert and all-gathers its row counts. The gathered table determines
all sizes and offsets, so no further metadata is exchanged.

Shapes: n devices of the exchange, E experts of the model, e local experts, T local tokens, K experts
per token, R = T*K rows to send, B rows that a device can receive, C slots per pair of devices.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from meshscope.events.enums import Part
from meshscope.programs.jax.collectives import scope
from meshscope.programs.jax.experts import Experts, combine_rows, count_values, unsort
from meshscope.programs.jax.numerics import Array
from meshscope.programs.jax.runs import ExpertRuns, received_runs
from meshscope.spec.plan.dispatch import Dispatch


def exchange_mixture(
    x: Array,
    expert_ids: Array,
    shares: Array,
    experts: Experts,
    dispatch: Dispatch,
) -> Array:
    """The summed outputs [T, D] of each token's experts on all devices; zero without experts.

    Expert IDs of E and above mean no expert.
    """
    return overlapped_exchange(x, expert_ids, shares, experts, dispatch, meanwhile=None)[0]


def overlapped_exchange(  # noqa: PLR0913  tokens, their routing, the experts, and concurrent work
    x: Array,
    expert_ids: Array,
    shares: Array,
    experts: Experts,
    dispatch: Dispatch,
    *,
    meanwhile: Callable[[], Array] | None,
) -> tuple[Array, Array | None]:
    """As `exchange_mixture`, with the result of the local work `meanwhile`.

    A barrier keeps that work before the experts, where it can hide the dispatch.
    """
    with scope(Part.MOE_DISPATCH):
        flat = expert_ids.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        rows = x[order // dispatch.n_active]  # [R, D]
        table = _table(count_values(flat, experts.moe.n_experts), dispatch)
        received = table.dispatch_rows(rows)  # [B, D]
    beside = None
    if meanwhile is not None:
        received, beside = lax.optimization_barrier((received, meanwhile()))
    with scope(Part.MOE_EXPERTS):
        runs = table.runs
        out = experts(received[runs.sources], runs.rows_of_experts)[runs.places]
    with scope(Part.MOE_COMBINE):
        back = table.combine(out, rows)
        return combine_rows(unsort(back, order), shares), beside


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """The row counts of an exchange: `sizes` [from, to], without dropped rows.

    `starts` [from, to] is the index of the first row for each device on each device; `runs` orders
    the rows that this device receives.
    """

    dispatch: Dispatch
    rank: Array
    sizes: Array
    starts: Array
    runs: ExpertRuns

    def dispatch_rows(self, rows: Array) -> Array:
        """Sends rows to the devices of their experts: [R, D] -> [B, D]."""
        n_slots = self.dispatch.n_slots
        if n_slots is None:
            buffer = jnp.zeros((self.dispatch.n_buffer_rows, rows.shape[1]), rows.dtype)
            return self._ragged(
                rows,
                buffer,
                input_offsets=self.starts[self.rank],
                send_sizes=self.sizes[self.rank],
                output_offsets=_before(self.sizes)[self.rank],
                recv_sizes=self.sizes[:, self.rank],
            )
        slots = jnp.arange(n_slots)[None, :]
        place = self.starts[self.rank][:, None] + slots  # [n, C]
        is_used = slots < self.sizes[self.rank][:, None]
        taken = rows[jnp.minimum(place, rows.shape[0] - 1)]
        taken = jnp.where(is_used[..., None], taken, jnp.zeros((), rows.dtype))
        return self._all_to_all(taken).reshape(-1, rows.shape[1])

    def combine(self, out: Array, rows: Array) -> Array:
        """Returns expert outputs to the devices of their tokens: [B, D] -> [R, D], zero if dropped."""
        n_slots = self.dispatch.n_slots
        if n_slots is None:
            return self._ragged(
                out,
                jnp.zeros(rows.shape, out.dtype),
                input_offsets=_before(self.sizes)[:, self.rank],
                send_sizes=self.sizes[:, self.rank],
                output_offsets=self.starts[:, self.rank],
                recv_sizes=self.sizes[self.rank],
            )
        back = self._all_to_all(out.reshape(-1, n_slots, out.shape[1])).reshape(out.shape)
        place = jnp.arange(rows.shape[0])
        starts = self.starts[self.rank]
        peer = jnp.searchsorted(starts, place, side="right") - 1
        slot = place - starts[peer]
        is_kept = slot < self.sizes[self.rank, peer]
        outputs = back[peer * n_slots + jnp.minimum(slot, n_slots - 1)]
        return jnp.where(is_kept[:, None], outputs, jnp.zeros((), outputs.dtype))

    def _all_to_all(self, x: Array) -> Array:
        """All-to-all of [n, C, D] along n."""
        return lax.all_to_all(x, self.dispatch.axes, split_axis=0, concat_axis=0, tiled=True)

    def _ragged(self, rows: Array, buffer: Array, **sizes: Array) -> Array:
        numbers = {name: size.astype(jnp.int32) for name, size in sizes.items()}
        return lax.ragged_all_to_all(rows, buffer, **numbers, axis_name=self.dispatch.axes)


def _table(counts: Array, dispatch: Dispatch) -> _Table:
    """All-gathers the row counts [E] of all devices and derives the table."""
    n_ranks, n_local = dispatch.n_ranks, dispatch.n_local_experts
    of_peers = counts.reshape((n_ranks, n_local) if n_local > 1 else (n_ranks,))
    grouped = lax.all_gather(of_peers, dispatch.axes, axis=0, tiled=False)
    grouped = grouped.reshape(n_ranks, n_ranks, n_local)  # from, to, expert
    wanted = grouped.sum(axis=2)
    rank = lax.axis_index(dispatch.axes)
    if dispatch.n_slots is None:
        sizes = jnp.clip(dispatch.n_buffer_rows - _before(wanted), 0, wanted)
        bases = _before(sizes)[:, rank]
    else:
        sizes = jnp.minimum(wanted, dispatch.n_slots)
        bases = jnp.arange(n_ranks, dtype=sizes.dtype) * dispatch.n_slots
    return _Table(
        dispatch=dispatch,
        rank=rank,
        sizes=sizes,
        starts=jnp.cumsum(wanted, axis=1) - wanted,
        runs=received_runs(grouped[:, rank], sizes[:, rank], bases, n_rows=dispatch.n_buffer_rows),
    )


def _before(sizes: Array) -> Array:
    """The number of rows [from, to] that devices before `from` send to each device."""
    return jnp.cumsum(sizes, axis=0) - sizes
