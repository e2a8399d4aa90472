"""Orders the rows that a device receives by expert, without a sort.

Senders sort their rows by expert, so rows arrive in runs: contiguous rows from one sender for one
expert. The position of its run determines the position of each row. A sort would compile slowly
(16 s for 49,152 rows, libtpu 0.0.42.1).

Shapes: n senders, e experts of this device, B rows of the buffer.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from meshscope.programs.jax.numerics import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRuns:
    """The run from each sender for each expert: `sizes` [n, e] and `starts` [n, e] in the buffer.

    Starts are non-decreasing in row-major order; the buffer has `n_rows` rows.
    """

    sizes: Array
    starts: Array
    n_rows: int

    @property
    def rows_of_experts(self) -> Array:
        """The number of rows of each expert [e]."""
        return self.sizes.sum(axis=0)

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


def received_runs(
    counts: Array, sizes: Array, bases: Array, *, n_rows: int, n_skipped: Array | int = 0
) -> ExpertRuns:
    """The runs of senders with `counts` [n, e] rows for each local expert.

    Each sends `sizes` [n] of its rows, after the first `n_skipped`; they start at `bases` [n] in the
    buffer.
    """
    ends = jnp.cumsum(counts, axis=1) - n_skipped
    before = jnp.clip(ends - counts, 0, sizes[:, None])
    sent = jnp.clip(ends, 0, sizes[:, None]) - before
    return ExpertRuns(sizes=sent, starts=bases[:, None] + before, n_rows=n_rows)


def _before(sizes: Array) -> Array:
    return jnp.cumsum(sizes) - sizes
