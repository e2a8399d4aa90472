"""The event table holds every field of a collective and survives a Parquet round trip."""

from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import polars as pl
import pytest
from made import collective

from meshscope.errors import RunError
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Phase, Source
from meshscope.events.schema import COLUMNS, POLARS_SCHEMA, checked_table, table_of

ALL_REDUCE = collective(
    Kind.ALL_REDUCE,
    (1, 4096),
    phase=Phase.DECODE,
    layer=3,
    groups=((0, 1, 2), (3, 4, 5)),
    n_steps=127,
    crosses_slices=False,
)
UNKNOWN = Collective(
    source=Source.COMPILED,
    phase=None,
    layer=None,
    part=None,
    kind=Kind.PERMUTE,
    opcode="collective-permute",
    axis=None,
    axis_reason="no scope",
    group_size=2,
    groups=((0, 1),),
    dtype=None,
    shape=None,
    payload_bytes=None,
    wire_bytes=None,
)


def test_payload_and_wire_bytes_derive_from_kind_shape_and_group() -> None:
    assert (ALL_REDUCE.source, ALL_REDUCE.group_size, ALL_REDUCE.n_groups) == (
        Source.PREDICTED,
        3,
        2,
    )
    assert ALL_REDUCE.payload_bytes == 8192
    assert ALL_REDUCE.wire_bytes == Fraction(8192 * 2 * 2, 3)


def test_every_field_of_a_collective_is_a_column() -> None:
    assert {field.name for field in fields(Collective)} <= set(POLARS_SCHEMA)


def test_column_names_are_unique_and_have_a_meaning() -> None:
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)
    assert all(column.meaning for column in COLUMNS)


def test_a_row_keeps_its_values_and_unknown_ones_are_null() -> None:
    known, unknown = table_of([ALL_REDUCE, UNKNOWN]).to_dicts()

    assert {name: value for name, value in known.items() if value is not None} == {
        "source": "predicted",
        "phase": "decode",
        "layer": 3,
        "part": "mlp",
        "kind": "all_reduce",
        "axis": "tp",
        "group_size": 3,
        "n_groups": 2,
        "groups": [[0, 1, 2], [3, 4, 5]],
        "dtype": "bf16",
        "shape": [1, 4096],
        "payload_bytes": 8192,
        "wire_bytes": pytest.approx(8192 * 4 / 3, rel=1e-15),  # stored as float64
        "count": 1,
        "n_steps": 127,
        "inserted_by": "program",
        "crosses_slices": False,
    }
    assert {name for name, value in unknown.items() if value is not None} == {
        *("source", "kind", "opcode", "axis_reason", "group_size", "n_groups", "groups"),
        *("count", "n_steps"),
    }


@pytest.mark.parametrize("rows", [[], [ALL_REDUCE, UNKNOWN]], ids=["empty", "two rows"])
def test_a_table_survives_a_parquet_round_trip(tmp_path: Path, rows: list[Collective]) -> None:
    table = table_of(rows)
    table.write_parquet(tmp_path / "events.parquet")
    again = checked_table(pl.read_parquet(tmp_path / "events.parquet"), "events.parquet")
    assert again.equals(table, null_equal=True)


def test_a_table_of_another_schema_is_refused_with_the_remedy() -> None:
    other = table_of([ALL_REDUCE]).drop("axis").with_columns(mesh=pl.lit("tp"))
    with pytest.raises(
        RunError,
        match=r"old.parquet: .*missing columns \['axis'\], unknown columns \['mesh'\].*--force",
    ):
        checked_table(other, "old.parquet")


def test_a_column_of_another_type_is_refused() -> None:
    with pytest.raises(RunError):
        checked_table(table_of([ALL_REDUCE]).cast({"layer": pl.Int64}), "old.parquet")
