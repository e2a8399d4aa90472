"""Expert-parallel dispatch and combine by all-to-alls, ragged or with a fixed number of slots.

Every device sorts its rows by expert and all-gathers its row counts. The gathered table determines
all sizes and offsets. Ragged rows arrive in the order of experts: each device sends one slice for each expert.
If the buffer is smaller than the worst routing, the exchange repeats in rounds; balanced routing needs one.

Rows in a fixed number of slots arrive in runs: contiguous rows from one sender for one expert. The
position of its run determines the position of each row. A sort would compile slowly (16 s for 49,152
rows, libtpu 0.0.42.1).

Shapes: n devices of the exchange, E experts of the model, e local experts, T local tokens, K experts
per token, R = T*K rows to send, B rows that a device can receive, C slots per pair of devices. Rows
have the shape [D], or [D/128, 128] (see `by_lanes`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import jax.numpy as jnp
from jax import lax

from meshscope.events.enums import Part
from meshscope.plans.dispatch import ROUNDS_SCOPE, Dispatch, fills_tiles
from meshscope.programs.jax.collectives import scope
from meshscope.programs.jax.experts import ROWS_OF_TILE, Experts, combine_rows, count_values
from meshscope.programs.jax.numerics import Array

LANES = 128


def exchange_mixture(  # noqa: PLR0913  tokens, their routing, the experts, and concurrent work
    x: Array,
    expert_ids: Array,
    shares: Array,
    experts: Experts,
    dispatch: Dispatch,
    *,
    meanwhile: Callable[[], Array] | None = None,
) -> tuple[Array, Array | None]:
    """The summed outputs [T, D] of each token's experts on all devices, and the result of the local work `meanwhile`.

    Expert IDs of E and above mean no expert. A barrier keeps the local work before the experts, where it can hide
    the dispatch; with rounds, it precedes the exchange.
    """
    with scope(Part.MOE_DISPATCH):
        flat = expert_ids.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        rows = by_lanes(x)[order // dispatch.n_active]  # [R, D]
        # All-gathers the row counts [E] of all devices. The barrier keeps XLA from gathering them in the shape of
        # one of their uses.
        counts = count_values(flat, experts.moe.n_experts)
        gathered = lax.optimization_barrier(lax.all_gather(counts, dispatch.axes, axis=0))
        table = _Table(
            dispatch=dispatch,
            rank=lax.axis_index(dispatch.axes),
            counts=gathered.reshape(dispatch.n_ranks, dispatch.n_ranks, dispatch.n_local_experts),
        )

    def one_round(
        index: Array | int, back: Array, meanwhile: Callable[[], Array] | None
    ) -> tuple[Array, Array | None]:
        with scope(Part.MOE_DISPATCH):
            n = dispatch.n_slots
            step = _RaggedRound(table, index) if n is None else _SlotRound(table, n, index * n)
            received = step.dispatch_rows(rows).reshape(-1, x.shape[1])  # [B, D]
        beside = None
        if meanwhile is not None:
            received, beside = lax.optimization_barrier((received, meanwhile()))
        with scope(Part.MOE_EXPERTS):
            out = experts(received, step.rows_of_experts)
        with scope(Part.MOE_COMBINE):
            return step.combine(out.reshape(-1, *rows.shape[1:]), back), beside

    with scope(Part.MOE_COMBINE):
        # Rounds write every row that has an expert; without them, dropped rows stay zeros.
        back = lax.empty(rows.shape, rows.dtype) if dispatch.has_rounds else jnp.zeros_like(rows)
    if dispatch.has_rounds:
        beside = None if meanwhile is None else meanwhile()
        with scope(ROUNDS_SCOPE):
            _, back = lax.while_loop(
                lambda state: state[0] < table.n_rounds,
                lambda state: (state[0] + 1, one_round(state[0], state[1], None)[0]),
                (jnp.int32(0), back),
            )
    else:
        back, beside = one_round(0, back, meanwhile)
    with scope(Part.MOE_COMBINE):
        # Else XLA sums each row of a token in the layout of a matrix, after as many relayouts.
        out = lax.optimization_barrier(combine_rows(back, order, shares))
        return out.reshape(x.shape), beside


def by_lanes(x: Array) -> Array:
    """[N, D] as [N, D/128, 128] if both fill tiles, so that each row is contiguous in memory.

    In the layout of a matrix, eight rows share a tile, and TPUs would split every row into two
    halves of its own tiles before an exchange.
    """
    n_rows, width = x.shape
    is_contiguous = n_rows >= ROWS_OF_TILE and fills_tiles(width)
    return x.reshape(n_rows, -1, LANES) if is_contiguous else x


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """The row counts of an exchange: `counts` [from, to, expert]."""

    dispatch: Dispatch
    rank: Array
    counts: Array

    @property
    def n_rounds(self) -> Array:
        room, axes = self.dispatch.n_slots, (2,)
        if room is None:
            room, axes = self.dispatch.n_buffer_rows, (0, 2)
        return -(-self.counts.sum(axis=axes).max() // room)

    @property
    def starts(self) -> Array:
        """The index of the first row for each expert among the rows of each device [from, to, e]."""
        return _before(self.counts.reshape(self.counts.shape[0], -1)).reshape(self.counts.shape)


@dataclass(frozen=True, slots=True)
class _RaggedRound:
    """The round that fills the buffer with rows from `index` * B on, in the order of experts."""

    table: _Table
    index: Array | int

    @property
    def _slices(self) -> tuple[Array, Array, Array]:
        """Rows to skip, rows to send, and places in the buffer, each [from, to, expert]."""
        counts, room = self.table.counts, self.table.dispatch.n_buffer_rows
        n_ranks, _, n_local = counts.shape
        by_device = counts.transpose(1, 2, 0).reshape(n_ranks, -1)  # to, expert and from
        begins = _before(by_device).reshape(n_ranks, n_local, n_ranks).transpose(2, 0, 1)
        begins = begins - self.index * room
        skipped = jnp.clip(-begins, 0, counts)
        sizes = jnp.clip(room - begins, 0, counts) - skipped
        return skipped, sizes, jnp.clip(begins, 0, room)

    @property
    def rows_of_experts(self) -> Array:
        return self._slices[1][:, self.table.rank].sum(axis=0)

    def dispatch_rows(self, rows: Array) -> Array:
        """Sends rows to the devices of their experts: [R, D] -> [B, D] in the order of experts."""
        rank, n_rows = self.table.rank, self.table.dispatch.n_buffer_rows
        skipped, sizes, places = self._slices
        firsts = self.table.starts + skipped
        buffer = lax.empty((n_rows, *rows.shape[1:]), rows.dtype)
        of_rank = firsts[rank], sizes[rank], places[rank], sizes[:, rank]
        return self._exchange(rows, buffer, *of_rank)

    def combine(self, out: Array, back: Array) -> Array:
        """Writes expert outputs [B, D] into `back` [R, D] on the devices of their tokens."""
        rank = self.table.rank
        skipped, sizes, places = self._slices
        firsts = self.table.starts + skipped
        of_rank = (places[:, rank], sizes[:, rank], firsts[:, rank], sizes[rank])
        return self._exchange(out, back, *of_rank)

    def _exchange(self, rows: Array, buffer: Array, *slices: Array) -> Array:
        """A ragged all-to-all of slices [n, e]: input offsets, sizes to send, output offsets and sizes to receive."""
        numbers = (s.astype(jnp.int32).reshape(-1) for s in slices)
        return lax.ragged_all_to_all(rows, buffer, *numbers, axis_name=self.table.dispatch.axes)


@dataclass(frozen=True, slots=True)
class _SlotRound:
    """The round that sends `n_slots` C rows from the `first` one on between each pair of devices."""

    table: _Table
    n_slots: int
    first: Array | int

    @property
    def _sizes(self) -> Array:
        """Rows of this round [from, to]."""
        return jnp.clip(self.table.counts.sum(axis=2) - self.first, 0, self.n_slots)

    @property
    def _runs(self) -> "ExpertRuns":
        """Each sender sends rows for its experts in turn, from `first` on, to slots of its own."""
        rank, dispatch = self.table.rank, self.table.dispatch
        counts, sizes = self.table.counts[:, rank], self._sizes[:, rank, None]
        bases = jnp.arange(dispatch.n_ranks, dtype=jnp.int32)[:, None] * self.n_slots
        ends = jnp.cumsum(counts, axis=1) - self.first
        before = jnp.clip(ends - counts, 0, sizes)
        sent = jnp.clip(ends, 0, sizes) - before
        return ExpertRuns(sizes=sent, starts=bases + before, n_rows=dispatch.n_buffer_rows)

    @property
    def _starts(self) -> Array:
        """The index of this device's first row for each device in this round [to]."""
        return self.table.starts[self.table.rank, :, 0] + self.first

    @property
    def rows_of_experts(self) -> Array:
        return self._runs.sizes.sum(axis=0)

    def dispatch_rows(self, rows: Array) -> Array:
        place = self._starts[:, None] + jnp.arange(self.n_slots)[None, :]  # [n, C]
        received = self._all_to_all(rows[jnp.minimum(place, rows.shape[0] - 1)])
        return received.reshape(-1, *rows.shape[1:])[self._runs.sources]

    def combine(self, out: Array, back: Array) -> Array:
        n_slots, rank = self.n_slots, self.table.rank
        slots = out[self._runs.places].reshape(-1, n_slots, *out.shape[1:])
        returned = self._all_to_all(slots).reshape(out.shape)
        place = jnp.arange(back.shape[0])
        peer = jnp.searchsorted(self.table.starts[rank, :, 0], place, side="right") - 1
        slot = place - self._starts[peer]
        is_returned = (slot >= 0) & (slot < self._sizes[rank, peer])
        outputs = returned[peer * n_slots + jnp.clip(slot, 0, n_slots - 1)]
        return jnp.where(is_returned.reshape(-1, *(1,) * (back.ndim - 1)), outputs, back)

    def _all_to_all(self, x: Array) -> Array:
        axes = self.table.dispatch.axes
        flat = x.reshape(*x.shape[:2], prod(x.shape[2:]))
        return lax.all_to_all(flat, axes, split_axis=0, concat_axis=0, tiled=True).reshape(x.shape)


def _before(sizes: Array) -> Array:
    return jnp.cumsum(sizes, axis=-1) - sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRuns:
    """The run from each sender for each expert, in row-major order of non-decreasing starts."""

    sizes: Array  # [n, e]
    starts: Array  # [n, e] in the buffer
    n_rows: int  # of the buffer

    @property
    def sources(self) -> Array:
        """The buffer row at each position in expert order [B]; arbitrary after the last row."""
        sizes, starts = self.sizes.T.reshape(-1), self.starts.T.reshape(-1)
        return self._shifted(_before(sizes), starts)

    @property
    def places(self) -> Array:
        """The position of each buffer row in expert order [B]; arbitrary for empty rows."""
        sizes = self.sizes.T
        sorted_starts = _before(sizes.reshape(-1)).reshape(sizes.shape).T
        return self._shifted(self.starts.reshape(-1), sorted_starts.reshape(-1))

    def _shifted(self, begins: Array, targets: Array) -> Array:
        """Each row index [B] plus the shift of its run, the last that begins at or before it.

        A run's shift is the sum of all steps up to it, which needs additions but no lookup.
        """
        steps = jnp.diff(targets - begins, prepend=0)
        rows = jnp.arange(self.n_rows, dtype=jnp.int32)
        has_begun = rows[:, None] >= begins[None, :]
        moved = rows + jnp.where(has_begun, steps[None, :], 0).sum(axis=1)
        return jnp.clip(moved, 0, self.n_rows - 1)
