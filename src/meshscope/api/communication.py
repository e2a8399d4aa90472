"""Assertions on the collectives of a run, by meaning."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import TypeVar

from meshscope.analysis.budget import LIMITS, Budget, Filter, checks_of
from meshscope.api.run import Run
from meshscope.errors import SpecError, nearest
from meshscope.events.enums import Kind, Phase
from meshscope.reports.budget import row_lines, sentence

E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """The collectives of a compiled function, with assertions; `run` has everything else."""

    run: Run

    def expect(
        self,
        *,
        axis: str | None = None,
        phase: str | None = None,
        max_count: int | None = None,
        max_payload_bytes: float | None = None,
        max_wire_bytes: float | None = None,
        max_exposed_s: float | None = None,
        max_step_s: float | None = None,
        max_memory_bytes: float | None = None,
        min_flops: float | None = None,
        **counts: int,
    ) -> None:
        """Asserts counts by kind, such as `all_reduce=64`, and limits, in one step on one device.

        With counts, the limits on collectives cover these kinds together; without, all kinds. `axis` selects
        the collectives that cross an axis, and `phase` the ones in a phase.
        """
        of_collectives = {
            "max_count": max_count,
            "max_payload_bytes": max_payload_bytes,
            "max_wire_bytes": max_wire_bytes,
            "max_exposed_s": max_exposed_s,
        }
        of_step = {
            "max_step_s": max_step_s,
            "max_memory_bytes": max_memory_bytes,
            "min_flops": min_flops,
        }
        any_kind = _filter(axis=axis, phase=phase)
        filters = [replace(any_kind, kind=_known(Kind, n, "kind of collective")) for n in counts]
        self._assert(
            [
                *(
                    _budget(chosen, count=n)
                    for chosen, n in zip(filters, counts.values(), strict=True)
                ),
                *(_budget(chosen, **of_collectives) for chosen in filters or [any_kind]),
                _budget(Filter(phase=any_kind.phase), **of_step),
            ]
        )

    def none(
        self, kind: str | None = None, *, axis: str | None = None, phase: str | None = None
    ) -> None:
        """Asserts that no collective is like this; one over an unknown axis may be."""
        self._assert([_budget(_filter(kind, axis=axis, phase=phase), count=0)])

    def _assert(self, budgets: Sequence[Budget]) -> None:
        __tracebackhide__ = True
        broken = [check for check in checks_of(self.run.record, budgets) if not check.is_kept]
        lines = ([sentence(one), *(f"  {row}" for row in row_lines(one.rows))] for one in broken)
        if broken:
            raise AssertionError("\n".join(chain.from_iterable(lines)))


def _known(kind: type[E], name: str, what: str) -> E:
    if name not in set(kind):
        raise SpecError(f"'{name}' is no {what}. {nearest(name, kind)}")
    return kind(name)


def _filter(
    kind: str | None = None, *, axis: str | None = None, phase: str | None = None
) -> Filter:
    return Filter(
        kind=None if kind is None else _known(Kind, kind, "kind of collective"),
        axis=axis,
        phase=None if phase is None else _known(Phase, phase, "phase"),
    )


def _budget(chosen: Filter, **limits: float | None) -> Budget:
    given = {name: value for name, value in limits.items() if value is not None}
    return Budget(of=chosen, limits=tuple(replace(LIMITS[n], value=v) for n, v in given.items()))
