"""Bursts, gaps, windows and periods: by hand in operations, by hand in seconds."""

import polars as pl
import pytest

from meshscope.analysis.intervals import axis_windows, bursts, period, placed, traffic_intervals
from meshscope.events.collective import predicted_collective
from meshscope.events.enums import Kind, Part, Phase
from meshscope.events.schema import table_of


def made(axis: str, *, n: int = 8, count: int = 1, layer: int | None = 0, kind=Kind.ALL_REDUCE):
    return predicted_collective(
        phase=Phase.DECODE, layer=layer, part=Part.MLP, kind=kind, axis=axis, groups=((0, 1),),
        dtype="bf16", shape=(n,), count=count, n_steps=127,
    )  # fmt: skip


def with_times(rows, times) -> pl.DataFrame:
    starts, durations = zip(*times, strict=True)
    return table_of(rows).with_columns(
        pl.Series("start_s", starts, dtype=pl.Float64, strict=False),
        pl.Series("dur_s", durations, dtype=pl.Float64, strict=False),
    )


def test_untimed_rows_are_placed_in_operations() -> None:
    found = traffic_intervals(table_of([made("tp", count=2), made("dp"), made("tp", count=3)]))
    rows = {row["axis"]: row for row in found.iter_rows(named=True)}
    assert set(found["unit"]) == {"operations"}
    tp, dp = rows["tp"], rows["dp"]
    assert (tp["n_bursts"], tp["up"], tp["down"], tp["window"]) == (2, 5, 1, 6)
    assert (tp["min_burst"], tp["mean_burst"], tp["max_burst"]) == (2, 2.5, 3)
    assert (tp["min_gap"], tp["max_gap"], tp["mean_burst_wire_bytes"]) == (1, 1, 40)
    assert (dp["n_bursts"], dp["up"], dp["mean_gap"]) == (1, 1, None)


def test_timed_rows_are_placed_in_seconds() -> None:
    table = with_times(
        [made("tp"), made("tp"), made("dp"), made("tp")], [(0, 2), (2.5, 1), (4, 1), (7, 3)]
    )
    found = {row["axis"]: row for row in traffic_intervals(table).iter_rows(named=True)}
    assert found["tp"]["unit"] == "s"
    assert (found["tp"]["n_bursts"], found["tp"]["up"], found["tp"]["down"]) == (3, 6, 4)
    assert (found["tp"]["min_gap"], found["tp"]["max_gap"]) == (0.5, 3.5)
    assert found["tp"]["up_frac"] == pytest.approx(0.6)
    merged = {row["axis"]: row for row in traffic_intervals(table, max_gap=1).iter_rows(named=True)}
    assert (merged["tp"]["n_bursts"], merged["tp"]["up"]) == (2, 6.5)


def test_up_and_down_fill_the_window() -> None:
    table = table_of([made(axis, count=c) for axis, c in zip("abcabca", range(1, 8), strict=True)])
    found = traffic_intervals(table)
    assert (found["up"] + found["down"]).to_list() == found["window"].to_list()
    assert found["n_collectives"].sum() == 28
    assert found["up"].sum() == 28


def test_windows_lie_between_axes() -> None:
    table = with_times(
        [made("tp"), made("dp"), made("tp"), made("dp")], [(0, 1), (3, 1), (4, 1), (4.5, 2)]
    )
    found = {(r["from_axis"], r["to_axis"]): r for r in axis_windows(table).iter_rows(named=True)}
    assert set(found) == {("tp", "dp"), ("dp", "tp")}
    there = found["tp", "dp"]
    assert (there["n"], there["min_window_s"], there["max_window_s"]) == (2, 0, 2)
    assert found["dp", "tp"]["max_window_s"] == 0


def test_windows_of_untimed_rows_have_no_length() -> None:
    found = axis_windows(table_of([made("tp"), made("dp")]))
    assert found.select("from_axis", "to_axis", "n", "mean_window_s").rows() == [
        ("tp", "dp", 1, None)
    ]


def test_bursts_hold_every_collective_and_byte_once() -> None:
    table = table_of([made("tp", count=3), made("dp", n=5), made("tp", n=7)])
    found = bursts(placed(table))
    assert found["n_collectives"].sum() == 5
    assert found["wire_bytes"].sum() == (table["wire_bytes"] * table["count"]).sum()


def test_a_loop_over_layers_runs_layer_by_layer() -> None:
    rows = [made("embed", layer=None)]
    rows += [made(axis, layer=layer) for axis in ("attn", "mlp") for layer in range(3)]
    rows += [made("head", layer=None)]
    order = placed(table_of(rows))["axis"].to_list()
    assert order == ["embed", *["attn", "mlp"] * 3, "head"]


def test_the_period_of_layers_is_found() -> None:
    body = [made("tp", n=4), made("tp", n=4), made("dp", n=2)]
    found = period(table_of([made("tp", n=9), *body * 5, made("tp", n=1)]))
    (row,) = found.iter_rows(named=True)
    assert (row["period_collectives"], row["n_repeats"], row["n_steps"]) == (3, 5, 127)
    assert row["covered_frac"] == pytest.approx(15 / 17)
    assert row["period_wire_bytes"] == 8 + 8 + 4
    assert row["period_s"] is None


def test_the_period_has_its_time() -> None:
    rows = [made("tp"), made("dp")] * 4
    times = [(10 * (i // 2) + 3 * (i % 2), 1) for i in range(8)]
    (row,) = period(with_times(rows, times)).iter_rows(named=True)
    assert (row["period_collectives"], row["period_s"]) == (2, 10)


def test_without_repetition_there_is_no_period() -> None:
    (row,) = period(table_of([made("tp"), made("dp")])).iter_rows(named=True)
    assert (row["period_collectives"], row["n_repeats"], row["period_wire_bytes"]) == (None,) * 3


def test_an_empty_table_has_no_intervals() -> None:
    for metric in (traffic_intervals, axis_windows, period):
        assert metric(table_of([])).is_empty()
