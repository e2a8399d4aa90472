"""The event table holds every field of a collective and survives a Parquet round trip."""

from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pytest
from made import collective

from meshscope.errors import RunError
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Phase, Source, wire_factor
from meshscope.events.schema import POLARS_SCHEMA, checked_table, table_of
from meshscope.events.timeline import FOLDED_SCHEMA, unfolded

ALL_REDUCE = collective(
    Kind.ALL_REDUCE, (1, 4096), phase=Phase.DECODE, layer=3, groups=((0, 1, 2), (3, 4, 5)),
    n_steps=127, crosses_slices=False,
)  # fmt: skip
_NOTHING = dict.fromkeys(
    ("phase", "layer", "part", "axis", "dtype", "shape", "payload_bytes", "wire_bytes")
)
UNKNOWN = Collective(
    source=Source.COMPILED, kind=Kind.PERMUTE, opcode="collective-permute", axis_reason="no scope",
    group_size=2, groups=((0, 1),), **_NOTHING,
)  # fmt: skip


def test_payload_and_wire_bytes_derive_from_kind_shape_and_group() -> None:
    facts = (ALL_REDUCE.source, ALL_REDUCE.group_size, ALL_REDUCE.n_groups)
    assert facts == (Source.PREDICTED, 3, 2)
    assert ALL_REDUCE.payload_bytes == 8192
    assert ALL_REDUCE.wire_bytes == Fraction(8192 * 2 * 2, 3)


def test_every_field_of_a_collective_is_a_column() -> None:
    assert {field.name for field in fields(Collective)} <= set(POLARS_SCHEMA)


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


GROUP_SIZES = (2, 3, 4, 8, 256)


class Factor(NamedTuple):
    """A bus bandwidth factor of nccl-tests doc/PERFORMANCE.md: numerator over the group size n."""

    kind: Kind
    numerator: str


@pytest.mark.parametrize("n", GROUP_SIZES)
@pytest.mark.parametrize(
    "case",
    [
        Factor(Kind.ALL_REDUCE, "2*(n-1)"),
        Factor(Kind.ALL_GATHER, "n-1"),
        Factor(Kind.REDUCE_SCATTER, "n-1"),
        Factor(Kind.ALL_TO_ALL, "n-1"),
        Factor(Kind.BROADCAST, "n"),
        Factor(Kind.GATHER, "n"),
        Factor(Kind.REDUCE, "n"),
        Factor(Kind.SCATTER, "n"),
        Factor(Kind.PERMUTE, "n"),
        Factor(Kind.SEND, "n"),
        Factor(Kind.RECV, "0"),
    ],
    ids=lambda case: case.kind,
)
def test_wire_factor_equals_nccl_tests(case: Factor, n: int) -> None:
    assert wire_factor(case.kind, n) == Fraction(eval(case.numerator, {"n": n}), n)


@pytest.mark.parametrize("kind", Kind)
def test_a_single_device_sends_nothing(kind: Kind) -> None:
    assert wire_factor(kind, 1) == 0


def span(lane: str, name: str, start_s: float, repeats: list[int], periods_s: list[float]) -> dict:
    labels = {"source": "compiled", "phase": "prefill", "lane": lane, "hlo_name": name}
    times = {"start_s": start_s, "dur_s": 0.5, "repeats": repeats, "periods_s": periods_s}
    return {**dict.fromkeys(FOLDED_SCHEMA), **labels, **times}


def test_nested_loops_unfold_in_the_order_of_their_starts() -> None:
    folded = pl.DataFrame(
        [
            span("core", "inner", 1.0, [2, 3], [10.0, 2.0]),
            span("core", "once", 0.0, [], []),
            span("collective", "outer", 8.0, [2], [10.0]),
        ],
        schema=FOLDED_SCHEMA,
    )
    rows = unfolded(folded)
    assert rows.height == 6 + 1 + 2
    inner = rows.filter(pl.col("hlo_name") == "inner")["start_s"].to_list()
    assert inner == pytest.approx([1, 3, 5, 11, 13, 15])
    assert rows["start_s"].is_sorted()
    assert rows["dur_s"].to_list() == [0.5] * 9


def test_the_repetitions_of_a_span_have_its_layers_in_turn() -> None:
    """Two chunks of a prompt run a loop over layers 4 to 6; the span before them is of one layer."""
    loop = {**span("core", "loop", 1.0, [2, 3], [10.0, 2.0]), "layers": [4, 5, 6]}
    before = {**span("core", "before", 0.0, [2], [10.0]), "layers": [3]}
    other = span("core", "other", 9.0, [2], [10.0])
    rows = unfolded(pl.DataFrame([loop, before, other], schema=FOLDED_SCHEMA))
    assert rows["layer"].to_list() == [3, 4, 5, 6, None] * 2


def test_an_empty_table_unfolds_to_an_empty_table() -> None:
    rows = unfolded(pl.DataFrame(schema=FOLDED_SCHEMA))
    assert rows.is_empty()
    loops = {"repeats", "periods_s", "layers"}
    assert rows.columns == [*(name for name in FOLDED_SCHEMA if name not in loops), "layer"]
