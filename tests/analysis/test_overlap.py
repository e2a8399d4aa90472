"""Overlap by union of spans, against a grid of small painted cells."""

import random
from collections import defaultdict

import numpy as np
import polars as pl
import pytest

from meshscope.analysis.overlap import exposed_by, length, overlap, union
from meshscope.events.schema import POLARS_SCHEMA

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


def test_a_union_has_the_cells_of_its_spans() -> None:
    chance = np.random.default_rng(1)
    for _ in range(50):
        spans = np.sort(chance.integers(0, 60, (chance.integers(0, 9), 2)), axis=1)
        merged = union(spans)
        assert length(merged) == len({c for a, b in spans for c in range(a, b)})
        assert (merged[1:, 0] > merged[:-1, 1]).all()
