"""Bursts, gaps, windows and periods, in operations and in seconds."""

import polars as pl
import pytest
from made import collective

from meshscope.analysis.overlap import axis_windows, bursts, period, placed, traffic_intervals
from meshscope.events.enums import Kind, Phase
from meshscope.events.schema import table_of


def made(axis: str, *, n: int = 8, count: int = 1, layer: int | None = 0):
    known = {"phase": Phase.DECODE, "groups": ((0, 1),), "n_steps": 127}
    return collective(Kind.ALL_REDUCE, (n,), layer=layer, axis=axis, count=count, **known)


def with_times(rows, times) -> pl.DataFrame:
    starts, durations = zip(*times, strict=True)
    return table_of(rows).with_columns(
        pl.Series("start_s", starts, dtype=pl.Float64, strict=False),
        pl.Series("dur_s", durations, dtype=pl.Float64, strict=False),
    )


def test_untimed_rows_are_placed_in_operations() -> None:
    intervals = traffic_intervals(table_of([made("tp", count=2), made("dp"), made("tp", count=3)]))
    rows = {row["axis"]: row for row in intervals.iter_rows(named=True)}
    assert set(intervals["unit"]) == {"operations"}
    tp, dp = rows["tp"], rows["dp"]
    assert (tp["n_bursts"], tp["up"], tp["down"], tp["window"]) == (2, 5, 1, 6)
    assert (tp["min_burst"], tp["mean_burst"], tp["max_burst"]) == (2, 2.5, 3)
    assert (tp["min_gap"], tp["max_gap"], tp["mean_burst_wire_bytes"]) == (1, 1, 40)
    assert (dp["n_bursts"], dp["up"], dp["mean_gap"]) == (1, 1, None)


def test_timed_rows_are_placed_in_seconds() -> None:
    table = with_times(
        [made("tp"), made("tp"), made("dp"), made("tp")], [(0, 2), (2.5, 1), (4, 1), (7, 3)]
    )
    by_axis = {row["axis"]: row for row in traffic_intervals(table).iter_rows(named=True)}
    assert by_axis["tp"]["unit"] == "s"
    assert (by_axis["tp"]["n_bursts"], by_axis["tp"]["up"], by_axis["tp"]["down"]) == (3, 6, 4)
    assert (by_axis["tp"]["min_gap"], by_axis["tp"]["max_gap"]) == (0.5, 3.5)
    assert by_axis["tp"]["up_frac"] == pytest.approx(0.6)
    merged = {row["axis"]: row for row in traffic_intervals(table, max_gap=1).iter_rows(named=True)}
    assert (merged["tp"]["n_bursts"], merged["tp"]["up"]) == (2, 6.5)


def test_bursts_contain_every_collective_and_byte_once() -> None:
    table = table_of([made(axis, count=c) for axis, c in zip("abcabca", range(1, 8), strict=True)])
    intervals, merged = traffic_intervals(table), bursts(placed(table))
    assert (intervals["up"] + intervals["down"]).to_list() == intervals["window"].to_list()
    assert [x.sum() for x in (intervals["n_collectives"], intervals["up"])] == [28, 28]
    assert merged["n_collectives"].sum() == 28
    assert merged["wire_bytes"].sum() == (table["wire_bytes"] * table["count"]).sum()


def test_windows_separate_axes() -> None:
    rows = [made("tp"), made("dp"), made("tp"), made("dp")]
    windows = axis_windows(with_times(rows, [(0, 1), (3, 1), (4, 1), (4.5, 2)]))
    lengths = windows.select("from_axis", "to_axis", "n", "min_window_s", "max_window_s").rows()
    assert sorted(lengths) == [("dp", "tp", 1, 0, 0), ("tp", "dp", 2, 0, 2)]
    untimed = axis_windows(table_of(rows[:2]))
    assert untimed.select("from_axis", "to_axis", "n", "mean_window_s").rows() == [
        ("tp", "dp", 1, None)
    ]


def test_a_collective_of_no_length_is_in_a_burst() -> None:
    rows = [made("tp"), made("tp"), made("tp")]
    merged = bursts(placed(with_times(rows, [(0.0, 0.0), (1.0, 1.0), (1.5, 0.0)])))
    assert merged["n_collectives"].to_list() == [1, 2]
    assert merged["end"].to_list() == pytest.approx([0.0, 2.0])


def test_a_loop_over_layers_runs_layer_by_layer() -> None:
    rows = [made("embed", layer=None)]
    rows += [made(axis, layer=layer) for axis in ("attn", "mlp") for layer in range(3)]
    rows += [made("head", layer=None)]
    order = placed(table_of(rows))["axis"].to_list()
    assert order == ["embed", *["attn", "mlp"] * 3, "head"]


def test_layers_are_the_period() -> None:
    body = [made("tp", n=4), made("tp", n=4), made("dp", n=2)]
    result = period(table_of([made("tp", n=9), *body * 5, made("tp", n=1)]))
    (row,) = result.iter_rows(named=True)
    assert (row["period_collectives"], row["n_repeats"], row["n_steps"]) == (3, 5, 127)
    assert row["covered_frac"] == pytest.approx(15 / 17)
    assert row["period_wire_bytes"] == 8 + 8 + 4
    assert row["period_s"] is None


def test_a_period_has_its_time_and_without_repetition_there_is_none() -> None:
    times = [(10 * (i // 2) + 3 * (i % 2), 1) for i in range(8)]
    columns = ("period_collectives", "period_s", "n_repeats", "period_wire_bytes")
    rows = period(with_times([made("tp"), made("dp")] * 4, times)).select(columns).rows()
    assert rows == [(2, 10, 4, 32)]
    assert period(table_of([made("tp"), made("dp")])).select(columns).rows() == [(None,) * 4]
