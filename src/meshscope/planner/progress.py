"""How large a search is, said before it starts, and how long it will take."""

from collections.abc import Callable
from time import monotonic

from meshscope.workers import Progress

LARGE = 100_000  # combinations that are announced before they are predicted
REPORT_S = 5.0  # between two reports
PART, DONE = "search", "done"


class SearchProgress:
    """Reports a large search, and one of more than some seconds, to a callback.

    With one slice, the time left is that of the other combinations at the speed so far. With several it is
    unknown: the search may end at any of them, and a combination takes longer on a larger slice.
    """

    def __init__(
        self,
        callback: Progress | None,
        *,
        n_slices: int = 1,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._callback, self._n_slices, self._clock = callback, n_slices, clock
        self._n_all = self._n_done = self._slice = 0
        self._started_s = self._reported_s = clock()
        self._is_shown = False

    def counted(self, topology: str, n_plans: int, n_combinations: int) -> None:
        """Takes the size of the search on one slice."""
        self._n_all, self._n_done, self._slice = n_combinations, 0, self._slice + 1
        if n_combinations >= LARGE:
            self._report(f"{n_plans:,} plans and {n_combinations:,} combinations on {topology}")

    def add(self, n_combinations: int) -> None:
        """Takes the number of combinations that were predicted or pruned."""
        self._n_done += n_combinations
        now_s = self._clock()
        if self._callback is None or now_s - self._reported_s < REPORT_S:
            return
        step, left_s = f"{self._n_done:,} of {self._n_all:,} combinations", None
        if self._n_slices == 1:
            left_frac = (self._n_all - self._n_done) / max(self._n_done, 1)
            left_s = (now_s - self._started_s) * left_frac
        else:
            step += f" on slice {self._slice} of {self._n_slices}"
        self._report(step, left_s)
        self._reported_s = now_s

    def done(self) -> None:
        """Ends the report, if there was one."""
        if self._is_shown:
            self._report(DONE)

    def _report(self, step: str, left_s: float | None = None) -> None:
        if self._callback is not None:
            self._is_shown = True
            self._callback(PART, step, left_s)
