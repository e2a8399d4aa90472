"""Volume and sizes: any partition sums to the whole."""

from dataclasses import replace

import polars as pl
import pytest
from made import collective

from meshscope.analysis.totals import request_totals, step_totals
from meshscope.analysis.volume import size_distribution, volume
from meshscope.events.enums import REQUEST_PHASES, Kind, Part, Phase
from meshscope.events.schema import table_of


def made(kind: Kind, *, n: int, phase=Phase.PREFILL, **facts):
    n_steps = 9 if phase is Phase.DECODE else 1
    known = {"layer": 0, "groups": ((0, 1, 2),), "phase": phase, "n_steps": n_steps}
    return collective(kind, (n,), **known | facts)


ROWS = [
    made(Kind.ALL_REDUCE, axis="tp", part=Part.MLP, n=100, count=2),
    made(Kind.ALL_REDUCE, axis="tp", part=Part.ATTN, n=100, layer=1),
    made(Kind.ALL_GATHER, axis="dp", part=Part.ATTN, n=31),
    made(Kind.ALL_GATHER, axis="dp", part=Part.LM_HEAD, n=7, phase=Phase.DECODE, layer=None),
    replace(
        made(Kind.PERMUTE, axis="pp", part=Part.STAGE, n=5, phase=Phase.DECODE),
        payload_bytes=None, wire_bytes=None,
    ),
]  # fmt: skip
BYTES = ("count", "payload_bytes", "wire_bytes", "n_unsized")


@pytest.mark.parametrize(
    "by", [(), ("axis",), ("kind", "part"), ("layer",), ("axis", "layer", "part")]
)
def test_the_parts_sum_to_the_totals_of_the_phase(by: tuple[str, ...]) -> None:
    table = volume(table_of(ROWS), by)
    step, request = step_totals(ROWS), request_totals(ROWS)
    for phase in REQUEST_PHASES:
        rows = table.filter(phase=phase.value)
        for name in BYTES:
            assert rows[name].sum() == pytest.approx(float(getattr(step[phase], name)))
        for name in BYTES[:3]:
            whole = float(getattr(request[phase], name))
            assert rows[f"request_{name}"].sum() == pytest.approx(whole)


def test_bytes_of_unknown_size_are_null_not_zero() -> None:
    table = volume(table_of(ROWS), ("axis",)).filter(axis="pp").row(0, named=True)
    assert table["payload_bytes"] is None
    assert table["wire_bytes"] is None
    assert (table["count"], table["n_unsized"], table["request_count"]) == (1, 1, 9)


def test_sizes_are_counted_once_each() -> None:
    table = size_distribution(table_of(ROWS), ("axis",))
    assert table.filter(phase="prefill").select("axis", "payload_bytes", "count").rows() == [
        ("dp", 62, 1),
        ("tp", 200, 3),
    ]
    assert table["count"].sum() == volume(table_of(ROWS))["count"].sum()


def test_rows_without_kind_are_not_counted() -> None:
    compute = table_of(ROWS).with_columns(pl.lit(None, pl.String).alias("kind"))
    assert volume(compute).is_empty()
