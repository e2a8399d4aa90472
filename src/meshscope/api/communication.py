"""Assertions on the collectives of a run, by meaning, and snapshots of them."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from meshscope.analysis.budget import LIMITS, Budget, Filter, checks_of
from meshscope.api.run import Run
from meshscope.errors import SpecError, nearest
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Phase
from meshscope.reports.budget import row_line, row_lines, sentence
from meshscope.reports.words import short_source_line

E = TypeVar("E", bound=StrEnum)

SNAPSHOT_VERSION = 1
# What makes two collectives of a snapshot the same; lines and instruction names move.
KEY = ("phase", "kind", "axis", "dtype", "shape", "wire_bytes", "inserted_by")


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """The collectives of a compiled function, with assertions; `run` has everything else.

    `snapshot` is the file of the test's next snapshot, and `is_updated` whether it is rewritten.
    """

    run: Run
    snapshot: Path
    is_updated: bool

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

    def matches_snapshot(self) -> None:
        """Asserts that the collectives match the snapshot; `--meshscope-update` rewrites it."""
        __tracebackhide__ = True
        rows = self.run.record.rows_of(self.run.source)
        if self.is_updated:
            self.snapshot.parent.mkdir(parents=True, exist_ok=True)
            # One collective a line, so that a version control system shows what changed.
            lines = ",\n".join(f"  {json.dumps(_entry(row))}" for row in rows)
            body = f"\n{lines}\n" if lines else ""
            text = f'{{"version": {SNAPSHOT_VERSION}, "collectives": [{body}]}}\n'
            self.snapshot.write_text(text, encoding="utf-8")
            return
        lines = list(_differences(_stored(self.snapshot), [_entry(row) for row in rows], rows))
        if lines:
            message = f"the collectives differ from {self.snapshot}:"
            remedy = "If that is meant, run pytest with --meshscope-update."
            raise AssertionError("\n".join([message, *lines, remedy]))


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


def _entry(row: Collective) -> dict[str, Any]:
    return {
        **{name: getattr(row, name) for name in KEY if name not in {"shape", "wire_bytes"}},
        "shape": None if row.shape is None else list(row.shape),
        "wire_bytes": None if row.wire_bytes is None else float(row.wire_bytes),
        "count": row.count,
        "line": None if row.source_line is None else short_source_line(row.source_line),
    }


def _stored(path: Path) -> list[dict[str, Any]]:
    """The collectives of a snapshot file; AssertionError if there is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        message = f"there is no snapshot {path}. Run pytest with --meshscope-update to make it."
        raise AssertionError(message) from None
    except ValueError as error:
        raise SpecError(
            f"{path}: not a snapshot: {error}. Make it with --meshscope-update."
        ) from error
    if not isinstance(document, dict) or document.get("version") != SNAPSHOT_VERSION:
        raise SpecError(f"{path}: of another version. Make it again with --meshscope-update.")
    return document["collectives"]


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    values = (entry[name] for name in KEY)
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def _differences(
    stored: Sequence[Mapping[str, Any]],
    present: Sequence[Mapping[str, Any]],
    rows: Sequence[Collective],
) -> Iterator[str]:
    """`+` for a collective that is new, `-` for one that is gone, with counts where they changed."""
    before, after = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    for counts, entries in ((before, stored), (after, present)):
        for entry in entries:
            counts[_key(entry)] += entry["count"]
    row_of = {_key(entry): row for entry, row in zip(present, rows, strict=True)}
    for key, row in row_of.items():
        if n := after[key] - before[key]:
            was = f" (was {before[key]} x)" if before[key] else ""
            yield f"  {'+' if n > 0 else '-'} {row_line(row)}{was}"
    for key, entry in {_key(entry): entry for entry in stored}.items():
        if key not in row_of:
            shape = "?" if entry["shape"] is None else ",".join(map(str, entry["shape"]))
            yield (
                f"  - {entry['phase']}: {entry['count']} x {entry['kind']} {entry['dtype']}[{shape}] over "
                f"{entry['axis']} at {entry['line']}"
            )
