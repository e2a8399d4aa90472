"""Assertions on the collectives of a run, by meaning, and snapshots of them."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from meshscope.analysis.budget import Bound, Budget, Check, Filter, Limit, Quantity, checks_of
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

    def expect(  # noqa: PLR0913  one for each limit
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

        With counts, the limits on collectives are of these kinds together; without, of all. `axis` selects
        the collectives that cross an axis, and `phase` those of a phase.
        """
        kinds = [_known(Kind, name, "kind of collective") for name in counts]
        limits = {
            Quantity.COUNT: max_count,
            Quantity.PAYLOAD_BYTES: max_payload_bytes,
            Quantity.WIRE_BYTES: max_wire_bytes,
            Quantity.EXPOSED_S: max_exposed_s,
        }
        of_step = {Quantity.STEP_S: max_step_s, Quantity.MEMORY_BYTES: max_memory_bytes}
        of_phase = None if phase is None else _known(Phase, phase, "phase")
        filters = [Filter(kind=kind, axis=axis, phase=of_phase) for kind in kinds]
        budgets = [
            Budget(of=chosen, limits=(_limit(Quantity.COUNT, Bound.EQUAL, n),))
            for chosen, n in zip(filters, counts.values(), strict=True)
        ]
        bounds = tuple(_limit(q, Bound.MAX, n) for q, n in limits.items() if n is not None)
        budgets += [
            Budget(of=chosen, limits=bounds)
            for chosen in filters or [Filter(axis=axis, phase=of_phase)]
        ]
        whole = [_limit(q, Bound.MAX, n) for q, n in of_step.items() if n is not None]
        whole += [] if min_flops is None else [_limit(Quantity.FLOPS, Bound.MIN, min_flops)]
        budgets.append(Budget(of=Filter(phase=of_phase), limits=tuple(whole)))
        self._assert(budgets)

    def none(
        self, kind: str | None = None, *, axis: str | None = None, phase: str | None = None
    ) -> None:
        """Asserts that no collective is like this; one over an unknown axis may be."""
        chosen = Filter(
            kind=None if kind is None else _known(Kind, kind, "kind of collective"),
            axis=axis,
            phase=None if phase is None else _known(Phase, phase, "phase"),
        )
        self._assert([Budget(of=chosen, limits=(_limit(Quantity.COUNT, Bound.EQUAL, 0),))])

    def _assert(self, budgets: Sequence[Budget]) -> None:
        __tracebackhide__ = True
        broken = [check for check in checks_of(self.run.record, budgets) if not check.is_kept]
        if broken:
            raise AssertionError("\n".join(self._message(broken)))

    def _message(self, broken: Sequence[Check]) -> Iterator[str]:
        for check in broken:
            yield sentence(check)
            yield from (f"  {line}" for line in row_lines(check.rows))

    def matches_snapshot(self) -> None:
        """Asserts that the collectives are those of the snapshot; `--meshscope-update` rewrites it."""
        __tracebackhide__ = True
        rows = self.run.record.rows_of(self.run.source)
        if self.is_updated:
            self.snapshot.parent.mkdir(parents=True, exist_ok=True)
            self.snapshot.write_text(_snapshot_text(rows), encoding="utf-8")
            return
        lines = list(_differences(_stored(self.snapshot), [_entry(row) for row in rows], rows))
        if lines:
            message = f"the collectives differ from {self.snapshot}:"
            remedy = "If that is meant, run pytest with --meshscope-update."
            raise AssertionError("\n".join([message, *lines, remedy]))


def _known(kind: type[E], name: str, what: str) -> E:
    """The member of this name; SpecError with the nearest ones."""
    if name not in set(kind):
        raise SpecError(f"'{name}' is no {what}. {nearest(name, kind)}")
    return kind(name)


def _limit(quantity: Quantity, bound: Bound, value: float) -> Limit:
    return Limit(quantity=quantity, bound=bound, value=value)


def _entry(row: Collective) -> dict[str, Any]:
    """A collective of a snapshot."""
    return {
        **{name: getattr(row, name) for name in KEY if name not in {"shape", "wire_bytes"}},
        "shape": None if row.shape is None else list(row.shape),
        "wire_bytes": None if row.wire_bytes is None else float(row.wire_bytes),
        "count": row.count,
        "line": None if row.source_line is None else short_source_line(row.source_line),
    }


def _snapshot_text(rows: Sequence[Collective]) -> str:
    """One collective a line, so that a version control system shows what changed."""
    lines = ",\n".join(f"  {json.dumps(_entry(row))}" for row in rows)
    body = f"\n{lines}\n" if lines else ""
    return f'{{"version": {SNAPSHOT_VERSION}, "collectives": [{body}]}}\n'


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
    before, after = _counts(stored), _counts(present)
    row_of = {_key(entry): row for entry, row in zip(present, rows, strict=True)}
    for key, row in row_of.items():
        if n := after[key] - before[key]:
            was = f" (was {before[key]} x)" if before[key] else ""
            yield f"  {'+' if n > 0 else '-'} {row_line(row)}{was}"
    entry_of = {_key(entry): entry for entry in stored}
    for key, entry in entry_of.items():
        if key not in row_of:
            yield f"  - {_entry_line(entry)}"


def _counts(entries: Sequence[Mapping[str, Any]]) -> Counter[tuple[Any, ...]]:
    counts: Counter[tuple[Any, ...]] = Counter()
    for entry in entries:
        counts[_key(entry)] += entry["count"]
    return counts


def _entry_line(entry: Mapping[str, Any]) -> str:
    shape = "[?]" if entry["shape"] is None else f"[{','.join(map(str, entry['shape']))}]"
    return (
        f"{entry['phase']}: {entry['count']} x {entry['kind']} {entry['dtype']}{shape} over "
        f"{entry['axis']} at {entry['line']}"
    )
