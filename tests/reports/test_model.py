"""The view model: one text for each value, and tables without empty or constant columns."""

import polars as pl
import pytest
from tables import table

from meshscope.reports.metrics import prefill_first, table_of_frame
from meshscope.reports.model import (
    EMPTY_LABEL,
    UNKNOWN_LABEL,
    CellValue,
    Figure,
    Unit,
    format_cell,
    joined,
    label_of,
    unit_of,
)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, Unit.SECONDS, "12.3 ms"),
        (33_600_000, Unit.BYTES, "33.6 MB"),
        (2**30, Unit.MEMORY_BYTES, "1.00 GiB"),
        (9e10, Unit.BYTES_PER_S, "90 GB/s"),
        (3.22e12, Unit.FLOPS, "3.22 TFLOP"),
        (0.125, Unit.FRACTION, "12.5%"),
        (1234, Unit.NUMBER, "1,234"),
        (True, Unit.TEXT, "yes"),
        ("tp", Unit.TEXT, "tp"),
        (None, Unit.SECONDS, EMPTY_LABEL),
        (Figure(value=None, unit=Unit.SECONDS), Unit.TEXT, UNKNOWN_LABEL),
        (Figure(value=0.05, unit=Unit.SECONDS, share_frac=0.25), Unit.TEXT, "50 ms (25%)"),
    ],
)
def test_a_cell_is_written_in_its_unit(value: CellValue, unit: Unit, text: str) -> None:
    assert format_cell(value, unit) == text


def test_a_figure_writes_its_range() -> None:
    figure = Figure(value=0.2, unit=Unit.SECONDS, low=0.1, high=0.4)
    assert figure.range_text == "100 to 400 ms"
    assert Figure(value=0.2, unit=Unit.SECONDS).range_text == UNKNOWN_LABEL


@table
def test_a_column_name_carries_its_unit(column: str, unit: Unit, label: str) -> None:
    assert (unit_of(column), label_of(column)) == (unit, label)


def test_a_frame_becomes_a_table_without_empty_and_constant_columns() -> None:
    frame = pl.DataFrame(
        {
            "source": ["compiled", "compiled"],
            "phase": ["decode", "prefill"],
            "layer": pl.Series([None, None], dtype=pl.Int64),
            "idle_s": [0.1, 0.2],
            "idle_frac": [0.5, 0.25],
            "unit": ["s", "s"],
            "max_gap": [1e-3, None],
        }
    )
    table = table_of_frame(frame, title="Idle")
    assert [(c.key, c.label) for c in table.columns] == [
        ("phase", "phase"),
        ("idle_s", "idle"),
        ("idle_frac", "idle share"),
        ("max_gap_s", "max gap"),
    ]
    assert table.rows == (("prefill", 0.2, 0.25, None), ("decode", 0.1, 0.5, 1e-3))
    assert table.shared == (("source", "compiled"),)


def test_words_are_joined() -> None:
    assert [joined(w) for w in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "", "a", "a and b", "a, b and c",
    ]  # fmt: skip


def test_rows_of_no_phase_keep_their_order() -> None:
    frame = pl.DataFrame({"phase": [None, None], "kind": ["b", "a"]})
    assert prefill_first(frame).rows() == frame.rows()
    empty = frame.clear()
    assert prefill_first(empty).rows() == []
    mixed = pl.DataFrame({"phase": ["decode", None, "prefill"]})
    assert prefill_first(mixed)["phase"].to_list() == ["prefill", "decode", None]
