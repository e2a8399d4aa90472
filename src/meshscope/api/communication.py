"""Assertions on the collectives of a run, by meaning."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from meshscope.analysis.budget import LIMITS, OF_COLLECTIVES, Budget, Filter, checks_of, filter_of
from meshscope.api.run import Run
from meshscope.reports.budget import row_lines, sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """The collectives of a compiled function, with assertions; `run` has everything else."""

    run: Run

    def expect(
        self, *, axis: str | None = None, phase: str | None = None, **expected: float
    ) -> None:
        """Asserts counts by kind, such as `all_reduce=64`, and limits, in one step on one device.

        Limits are those of a budget file, such as `max_wire_bytes=1e6`. With counts, the limits on collectives
        cover these kinds together; without, all kinds. `axis` selects the collectives that cross an axis, and
        `phase` the ones in a phase.
        """
        limits = {name: value for name, value in expected.items() if name in LIMITS}
        any_kind = filter_of(axis=axis, phase=phase)
        counts = {
            filter_of(kind=name, axis=axis, phase=phase): n
            for name, n in expected.items()
            if name not in limits
        }
        of_collectives = {n: v for n, v in limits.items() if LIMITS[n].quantity in OF_COLLECTIVES}
        of_step = {name: value for name, value in limits.items() if name not in of_collectives}
        self._assert(
            [
                *(_budget(chosen, count=n) for chosen, n in counts.items()),
                *(_budget(chosen, **of_collectives) for chosen in counts or [any_kind]),
                _budget(Filter(phase=any_kind.phase), **of_step),
            ]
        )

    def none(
        self, kind: str | None = None, *, axis: str | None = None, phase: str | None = None
    ) -> None:
        """Asserts that no collective is like this; one over an unknown axis may be."""
        self._assert([_budget(filter_of(kind=kind, axis=axis, phase=phase), count=0)])

    def _assert(self, budgets: Sequence[Budget]) -> None:
        __tracebackhide__ = True
        broken = [check for check in checks_of(self.run.record, budgets) if not check.is_kept]
        lines = ([sentence(one), *(f"  {row}" for row in row_lines(one.rows))] for one in broken)
        if broken:
            raise AssertionError("\n".join(chain.from_iterable(lines)))


def _budget(chosen: Filter, **limits: float) -> Budget:
    return Budget(of=chosen, limits=tuple(replace(LIMITS[n], value=v) for n, v in limits.items()))
