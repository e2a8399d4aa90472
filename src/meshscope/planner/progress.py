"""How large a search is, said before it starts, and how long it will take."""

from collections.abc import Callable
from time import monotonic

from meshscope.workers.spawn import Progress

LARGE = 100_000  # combinations that are announced before they are predicted
REPORT_S = 5.0  # between two reports
PART, DONE = "search", "done"


class SearchProgress:
    """Reports a large search, and one of more than some seconds, to a callback.

    `count_all` returns the combinations of the whole search. It is asked once, for the first report of the
    time left, which is that of the others at the speed so far.
    """

    def __init__(
        self,
        callback: Progress | None,
        count_all: Callable[[], int] | None = None,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._callback, self._count_all, self._clock = callback, count_all, clock
        self._n_counted = self._n_done = 0
        self._n_all: int | None = None
        self._started_s = self._reported_s = clock()
        self._is_shown = False

    def counted(self, topology: str, n_plans: int, n_combinations: int) -> None:
        """Takes the size of the search on one slice."""
        self._n_counted += n_combinations
        if n_combinations >= LARGE:
            self._report(f"{n_plans:,} plans and {n_combinations:,} combinations on {topology}")

    def add(self, n_combinations: int) -> None:
        """Takes the number of combinations that were predicted or pruned."""
        self._n_done += n_combinations
        now_s = self._clock()
        if self._callback is None or now_s - self._reported_s < REPORT_S:
            return
        if self._n_all is None:
            self._n_all = self._n_counted if self._count_all is None else self._count_all()
        left_frac = (self._n_all - self._n_done) / max(self._n_done, 1)
        step = f"{self._n_done:,} of {self._n_all:,} combinations"
        self._report(step, (now_s - self._started_s) * left_frac)
        self._reported_s = now_s

    def done(self) -> None:
        """Ends the report, if there was one."""
        if self._is_shown:
            self._report(DONE)

    def _report(self, step: str, left_s: float | None = None) -> None:
        if self._callback is not None:
            self._is_shown = True
            self._callback(PART, step, left_s)
