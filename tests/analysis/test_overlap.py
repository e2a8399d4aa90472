"""Overlap by union of spans, against a grid of small painted cells."""

import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from made import collective

from meshscope.analysis.overlap import (
    axis_windows,
    bursts,
    exposed_by,
    overlap,
    placed,
    traffic_intervals,
)
from meshscope.analysis.timeline import (
    OPS,
    TIMELINE_SCHEMA,
    last_step,
    modeled_timeline,
    read_timeline,
)
from meshscope.events.enums import Kind, Phase
from meshscope.events.schema import POLARS_SCHEMA, table_of
from meshscope.events.timeline import FOLDED_SCHEMA

CELL_S = 1e-6
N_CELLS = 200


def timeline(spans) -> pl.DataFrame:
    """Rows (kind, axis, opcode, device, first cell, last cell)."""
    blank = dict.fromkeys(POLARS_SCHEMA)
    known = {"source": "compiled", "phase": "decode", "count": 1, "n_steps": 1, "time_basis": "x"}
    records = [
        {
            **blank, **known, "kind": kind, "axis": axis, "opcode": opcode, "device": device,
            "start_s": first * CELL_S, "dur_s": (last - first) * CELL_S,
        }
        for kind, axis, opcode, device, first, last in spans
    ]  # fmt: skip
    return pl.DataFrame(records, schema=POLARS_SCHEMA)


def random_spans(seed: int):
    chance = random.Random(seed)
    for _ in range(60):
        first = chance.randrange(N_CELLS)
        last = chance.randrange(first, min(N_CELLS, first + 30) + 1)
        is_collective = chance.random() < 0.5
        kind = "all_reduce" if is_collective else None
        axis = chance.choice(["tp", "dp", None]) if is_collective else None
        opcode = "all-reduce" if is_collective else chance.choice(["fusion", "while", "copy-start"])
        yield kind, axis, opcode, chance.randrange(2), first, last


def painted(spans, device: int, wanted) -> np.ndarray:
    grid = np.zeros(N_CELLS + 1, bool)
    for kind, axis, opcode, on, first, last in spans:
        if on == device and wanted(kind, axis, opcode):
            grid[first:last] = True
    return grid


def is_collective(kind, _axis, _opcode) -> bool:
    return kind is not None


def is_compute(kind, _axis, opcode) -> bool:
    return kind is None and opcode == "fusion"


@pytest.mark.parametrize("seed", range(8))
def test_overlap_equals_a_painted_grid(seed: int) -> None:
    spans = list(random_spans(seed))
    lasting = [s for s in spans if s[5] > s[4]]
    step = max(s[5] for s in lasting) - min(s[4] for s in lasting)
    for row in overlap(timeline(spans)).iter_rows(named=True):
        collective = painted(spans, row["device"], is_collective)
        compute = painted(spans, row["device"], is_compute)
        cells = {
            "collective_s": collective.sum(),
            "compute_s": compute.sum(),
            "hidden_s": (collective & compute).sum(),
            "exposed_s": (collective & ~compute).sum(),
            "idle_s": step - (collective | compute).sum(),
            "step_s": step,
        }
        for name, n_cells in cells.items():
            assert row[name] == pytest.approx(n_cells * CELL_S, abs=1e-12), name


@pytest.mark.parametrize("seed", range(4))
def test_exposed_time_is_shared_cell_by_cell(seed: int) -> None:
    spans = list(random_spans(seed))
    for device in (0, 1):
        compute = painted(spans, device, is_compute)
        axes = {
            axis: painted(spans, device, lambda k, a, _, x=axis: k and a == x)
            for axis in ("tp", "dp", None)
        }
        n = sum(grid.astype(int) for grid in axes.values())
        expected = defaultdict(float)
        for axis, grid in axes.items():
            expected[axis] = (grid & ~compute)[n > 0].astype(float) @ (1 / n[n > 0]) * CELL_S
        exposed = exposed_by(timeline(spans)).filter(pl.col("device") == device)
        for axis, exposed_s in exposed.select("axis", "exposed_s").rows():
            assert exposed_s == pytest.approx(expected[axis], abs=1e-12)


def test_compute_of_one_chip_does_not_hide_collectives_of_another() -> None:
    """CCL-Bench merges all chips into one set, which hides everything here."""
    rows = [(None, None, "fusion", 0, 0, 10), ("all_reduce", "tp", "all-reduce", 1, 0, 10)]
    first, second = overlap(timeline(rows)).sort("device").iter_rows(named=True)
    assert first["overlap_frac"] is None  # no divisor
    assert (second["hidden_s"], second["exposed_s"]) == (0, pytest.approx(10 * CELL_S))

    untimed = timeline(rows).with_columns(pl.lit(None, pl.Float64).alias("dur_s"))
    assert overlap(untimed).is_empty()
    assert exposed_by(untimed).is_empty()


def folded(*rows) -> pl.DataFrame:
    """Rows (lane, kind, start, duration, repeats, periods, name)."""
    return pl.DataFrame(
        [
            {
                **dict.fromkeys(FOLDED_SCHEMA), "source": "compiled", "phase": "decode", "lane": lane,
                "part": "mlp", "kind": kind, "axis": "tp" if kind else None, "start_s": start,
                "dur_s": dur, "repeats": repeats, "periods_s": periods, "time_basis": "x",
                "hlo_name": name, "layers": range(len(repeats) and 3), "exposed_s": dur if kind else None,
            }
            for lane, kind, start, dur, repeats, periods, name in rows
        ],
        schema=FOLDED_SCHEMA,
    )  # fmt: skip


def events() -> pl.DataFrame:
    rows = [
        collective(Kind.ALL_REDUCE, (n,), phase=Phase.DECODE, layer=layer, groups=((0, 1),), n_steps=9)
        for layer in range(3) for n in (8, 2)
    ]  # fmt: skip
    return table_of(rows).with_columns(
        pl.lit("compiled").alias("source"), pl.lit("psum.1").alias("hlo_name")
    )


WORK = ("op_class", "flops", "hbm_bytes")


def test_each_execution_knows_what_its_instruction_sends() -> None:
    """Two arrays of one instruction add up; three layers do not."""
    table = modeled_timeline(
        folded(("collective", "all_reduce", 0.0, 2.0, [3], [5.0], "psum.1")), events()
    )
    assert table.columns == [*POLARS_SCHEMA, "step", "stream", "step_class", "activity", *WORK]
    assert table.schema == pl.Schema(TIMELINE_SCHEMA)
    assert table["payload_bytes"].to_list() == [20, 20, 20]
    assert table["start_s"].to_list() == [0, 5, 10]
    assert table["layer"].to_list() == [0, 1, 2]
    assert table["exposed_s"].to_list() == [2, 2, 2]
    assert table["n_steps"].to_list() == [9] * 3


def test_copies_are_no_compute() -> None:
    rows = [
        ("core", None, 0.0, 4.0, [], [], "fusion"),
        ("copy", None, 3.0, 5.0, [], [], "copy-start"),
        ("collective", "all_reduce", 4.0, 3.0, [], [], "psum.1"),
    ]
    shown = overlap(modeled_timeline(folded(*rows), events()))
    columns = ("compute_s", "exposed_s", "hidden_s", "step_s", "idle_s")
    assert shown.select(columns).row(0) == pytest.approx((4, 3, 0, 8, 1))


def written(folder: Path, *rows: dict[str, object]) -> None:
    """Writes operations of decode steps with these columns."""
    blank = {**dict.fromkeys(POLARS_SCHEMA), "phase": "decode"}
    schema = {**POLARS_SCHEMA, "step": pl.Int64, "host": pl.UInt16}
    (folder / "trace").mkdir()
    pl.DataFrame([blank | row for row in rows], schema=schema).write_parquet(folder / OPS)


def test_measured_steps_are_numbered_and_averaged(tmp_path: Path) -> None:
    """Two decode steps of one device, 10 and 20 s long; what no step holds is left out."""
    assert read_timeline(tmp_path, events()) is None  # yet
    known = {"source": "measured", "device": 3, "host": 0}
    work = known | {"opcode": "fusion"}
    sent = known | {"opcode": "all-reduce", "kind": "all_reduce", "axis": "tp"}
    written(
        tmp_path,
        work | {"step": 7, "start_s": 0.0, "dur_s": 4.0},
        sent | {"step": 7, "start_s": 4.0, "dur_s": 6.0},
        work | {"step": 9, "start_s": 50.0, "dur_s": 20.0},
        work | {"step": None, "start_s": 30.0, "dur_s": 5.0},
    )
    table = read_timeline(tmp_path, events())
    assert table["step"].to_list() == [0, 0, 1]
    columns = ("device", "n_steps_seen", "step_s", "compute_s", "exposed_s")
    assert overlap(table).select(columns).rows() == [(3, 2, 15, 12, 3)]
    assert exposed_by(table)["exposed_s"].to_list() == [3]
    assert last_step(table)["start_s"].to_list() == [50]


def test_a_measured_row_knows_how_many_steps_the_request_has(tmp_path: Path) -> None:
    known = {"n_steps": 1, "start_s": 0.0, "dur_s": 1.0, "step": 4}
    written(tmp_path, *(known | {"source": source} for source in ("measured", "compiled")))
    measured_events = events().with_columns(
        pl.lit("measured").alias("source"), pl.lit("decode").alias("phase")
    )
    assert read_timeline(tmp_path, measured_events)["n_steps"].to_list() == [9, 1]


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
