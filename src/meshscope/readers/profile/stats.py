"""Stats of events in columns, one per stat name.

A stat is a number, a text, bytes, or a reference to a text that the plane stores once. Numbers use
the narrowest integer type that fits, texts become enumerations. Of bytes only the length is kept;
if an event has two stats of one name, the last one counts.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from meshscope.readers.profile.wire import (
    FIXED64,
    SPAN,
    VARINT,
    Bytes,
    Data,
    Ints,
    WireError,
    columns,
)

# Fields of XStat (tsl/profiler/protobuf/xplane.proto): id of the stat, then one of the values.
STAT_ID, DOUBLE, UINT, INT, TEXT, BYTES, REF = range(1, 8)
WIRES = {STAT_ID: VARINT, DOUBLE: FIXED64, UINT: VARINT, INT: VARINT, TEXT: SPAN, BYTES: SPAN}
WIRES[REF] = VARINT
TEXTUAL = (TEXT, BYTES, REF)
PREFIX = "stat."  # of columns with stats

Stat = str | int | float


def expect(number: int, wire: int, wires: Mapping[int, int], position: int) -> None:
    """WireError if a known field has another wire type than its message declares."""
    if wires.get(number, wire) != wire:
        raise WireError(f"field {number} has the wrong wire type", position)


class StatTexts:
    """Distinct texts and their codes."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self.texts: list[str] = []

    def code(self, text: str) -> int:
        """The code of the text; a new text gets the next code."""
        code = self._codes.setdefault(text, len(self.texts))
        if code == len(self.texts):
            self.texts.append(text)
        return code


class StatColumn:
    """One stat of `n_rows` events; null for events without it."""

    def __init__(self, n_rows: int) -> None:
        self.forms = np.zeros(n_rows, np.uint8)  # [n_rows] field number in XStat, 0 if missing
        self.values: NDArray[Any] = np.zeros(
            n_rows, np.int8
        )  # [n_rows] bits of numbers, or codes of texts

    def put(self, rows: Ints, form: int, values: Ints) -> None:
        """Sets the rows; widens the column if a number needs it."""
        needed = np.promote_types(_fewest_bytes(values), self.values.dtype)
        if needed != self.values.dtype:
            self.values = self.values.astype(needed)
        self.values[rows] = values
        self.forms[rows] = form

    def series(self, name: str, texts: StatTexts) -> pl.Series:
        """The column: texts if one value is a text, else floats if one is a float, else integers."""
        present = self.forms > 0
        forms = set(np.unique(self.forms[present]).tolist())
        if forms & set(TEXTUAL):
            values = self._texts(forms, present, texts)
        else:
            values = pl.Series(name, self._numbers(forms))
        if present.all():
            return values.alias(name)
        kept = pl.when(pl.Series(present)).then(values)
        return pl.select(kept.alias(name)).to_series()

    def _numbers(self, forms: set[int]) -> NDArray[Any]:
        if forms == {DOUBLE}:
            return self.values.astype(np.int64).view(np.float64)
        wide = (self.forms == UINT) & (self.values < 0)  # from 2^63 on
        if DOUBLE not in forms:
            return self.values.astype(np.int64).view(np.uint64) if wide.any() else self.values
        numbers = self.values.astype(np.float64)
        numbers[wide] += 2.0**64
        doubles = self.forms == DOUBLE
        numbers[doubles] = self.values[doubles].astype(np.int64).view(np.float64)
        return numbers

    def _texts(self, forms: set[int], present: NDArray[np.bool_], texts: StatTexts) -> pl.Series:
        """An enumeration of the texts in this column; numbers become texts."""
        codes = self.values.astype(np.int64) if forms - set(TEXTUAL) else self.values
        for form in forms - set(TEXTUAL):
            rows = np.flatnonzero(self.forms == form)
            codes[rows] = _written(codes[rows], form, texts)
        used, codes_in_column = np.unique(codes[present], return_inverse=True)
        narrow = np.zeros(len(codes), np.min_scalar_type(len(used)))
        narrow[present] = codes_in_column
        return pl.Series(narrow).cat.to(pl.Enum([texts.texts[code] for code in used]))


def _alike(numbers: NDArray[Any]) -> Iterator[tuple[int, Any]]:
    """Each distinct number with an index of its rows; usually all are the same."""
    if len(numbers) and (numbers == numbers[0]).all():
        yield int(numbers[0]), slice(None)
        return
    for number in np.unique(numbers).tolist():
        yield number, np.flatnonzero(numbers == number)


def _fewest_bytes(values: Ints) -> np.dtype[Any]:
    low, high = int(values.min()), int(values.max())
    for candidate in (np.int8, np.int16, np.int32):
        info = np.iinfo(candidate)
        if info.min <= low and high <= info.max:
            return np.dtype(candidate)
    return np.dtype(np.int64)


def _written(bits: Ints, form: int, texts: StatTexts) -> Ints:
    unique, inverse = np.unique(bits, return_inverse=True)
    view = {DOUBLE: unique.view(np.float64), UINT: unique.view(np.uint64)}.get(form, unique)
    codes = [texts.code(str(number)) for number in view.tolist()]
    return np.array(codes, np.int64)[inverse]


class StatTable:
    """The stats of the events of one plane, one column per name that occurs.

    `names` are stat names by id. `wanted` lists the stats to keep; None keeps all.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        n_rows: int,
        *,
        texts: StatTexts,
        wanted: Collection[str] | None,
    ) -> None:
        self._names = names
        self._n_rows = n_rows
        self._texts = texts
        self._wanted = wanted
        self._columns: dict[str, StatColumn] = {}

    def take(self, data: Data, view: Bytes, rows: Ints, spans: tuple[Ints, Ints]) -> None:
        """Reads the stats in these byte ranges into the rows [n] of their events."""
        stat_ids = np.zeros(len(rows), np.int64)
        forms = np.zeros(len(rows), np.uint8)
        values = np.zeros(len(rows), np.int64)
        ends = spans[1].copy()
        for column in columns(view, *spans):
            expect(column.number, column.wire, WIRES, int(spans[0][column.rows[0]]))
            if column.number == STAT_ID:
                stat_ids[column.rows] = column.starts
            elif column.number in WIRES:
                forms[column.rows] = column.number
                values[column.rows] = column.starts
                ends[column.rows] = column.ends
        for stat_id, of_stat in _alike(stat_ids):
            for form, index in _alike(forms[of_stat]):
                if form:
                    cells = (rows[of_stat][index], values[of_stat][index], ends[of_stat][index])
                    self._put(data, stat_id, form, cells)

    def _put(self, data: Data, stat_id: int, form: int, cells: tuple[Ints, Ints, Ints]) -> None:
        name = self._names.get(stat_id, f"stat {stat_id}")
        if self._wanted is not None and name not in self._wanted:
            return
        rows, values, ends = cells
        if form in TEXTUAL:
            values = self._codes(data, form, values, ends)
        if name not in self._columns:
            self._columns[name] = StatColumn(self._n_rows)
        self._columns[name].put(rows, form, values)

    def _codes(self, data: Data, form: int, values: Ints, ends: Ints) -> Ints:
        if form == REF:
            unique, inverse = np.unique(values, return_inverse=True)
            codes = [self._texts.code(self._names.get(ref, f"text {ref}")) for ref in unique]
            return np.array(codes, np.int64)[inverse]
        code, spans = self._texts.code, zip(values.tolist(), ends.tolist(), strict=True)
        if form == BYTES:
            return np.array([code(f"<{end - start} bytes>") for start, end in spans], np.int64)
        read = (data[start:end].decode(errors="replace") for start, end in spans)
        return np.array([code(text) for text in read], np.int64)

    def series(self) -> list[pl.Series]:
        """The columns, named `stat.NAME`; frees the source of each as it is built."""
        return [
            self._columns.pop(name).series(PREFIX + name, self._texts)
            for name in sorted(self._columns)
        ]
