"""The rows that a device receives for its experts: how they lie in its buffer, and in the order of experts.

Every sender has its rows in the order of experts, so that they arrive in runs: those of one sender for
one expert lie together. Where each run lies says where each row goes, without a sort, which takes
the compiler longer the more rows there are (16 s for 49,152, libtpu 0.0.42.1).

Shapes: n senders, e experts of this device, B rows of the buffer.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from meshscope.programs.jax.numerics import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRuns:
    """`sizes` [n, e] rows from each sender for each expert, at `starts` [n, e] of a buffer of `n_rows`.

    Starts do not fall from one run to the next, sender by sender.
    """

    sizes: Array
    starts: Array
    n_rows: int

    @property
    def rows_of_experts(self) -> Array:
        """[e]: how many rows each expert has."""
        return self.sizes.sum(axis=0)

    @property
    def sources(self) -> Array:
        """[B]: the row of the buffer at each place in the order of experts; any row behind the last."""
        sizes, starts = self.sizes.T.reshape(-1), self.starts.T.reshape(-1)
        return self._shifted(_before(sizes), starts)

    @property
    def places(self) -> Array:
        """[B]: the place in the order of experts of each row of the buffer; any place for empty rows."""
        sizes = self.sizes.T
        sorted_starts = _before(sizes.reshape(-1)).reshape(sizes.shape).T
        return self._shifted(self.starts.reshape(-1), sorted_starts.reshape(-1))

    def _shifted(self, begins: Array, targets: Array) -> Array:
        """[B]: each row moved as far as its run, the last that begins at or before it.

        The shift of a run is the sum of all steps up to it: additions alone, no table to look up.
        """
        steps = jnp.diff(targets - begins, prepend=0)
        rows = jnp.arange(self.n_rows, dtype=jnp.int32)
        has_begun = rows[:, None] >= begins[None, :]
        moved = rows + jnp.where(has_begun, steps[None, :], 0).sum(axis=1)
        return jnp.clip(moved, 0, self.n_rows - 1)


def received_runs(counts: Array, sizes: Array, bases: Array, *, n_rows: int) -> LayerRuns:
    """The runs of senders with `counts` [n, e] rows for each expert here.

    They send their first `sizes` [n], which lie at `bases` [n].
    """
    before = jnp.minimum(jnp.cumsum(counts, axis=1) - counts, sizes[:, None])
    kept = jnp.minimum(counts, sizes[:, None] - before)
    return LayerRuns(sizes=kept, starts=bases[:, None] + before, n_rows=n_rows)


def _before(sizes: Array) -> Array:
    return jnp.cumsum(sizes) - sizes
