"""Transfer, waiting, busy and idle time of devices, against brute force and worked examples."""

import random

import polars as pl
import pytest

from meshscope.events.measured import StepLabel
from meshscope.readers.traces.device_times import (
    LABELS,
    loads,
    step_table,
    with_exposure,
    with_transfers,
)

DECODE = LABELS.index(StepLabel.DECODE)


def event(device: int, start_ns: int, dur_ns: int, **values: object) -> dict[str, object]:
    usual = {"op": 0, "label": DECODE, "step": 0, "category": "compute"}
    return {**usual, "device": device, "start_ns": start_ns, "dur_ns": dur_ns, **values}


def reduce(device: int, start_ns: int, dur_ns: int, **values: object) -> dict[str, object]:
    facts = {"kind": "all_reduce", "opcode": "r", "dtype": "f32", "payload_bytes": 4, "axis": "tp"}
    groups = {"groups": [[0, 1], [2, 3]], "category": "collective"}
    return event(device, start_ns, dur_ns, **{**facts, **groups, **values})


def test_waiting_equals_brute_force() -> None:
    chance = random.Random(5)
    rows = [
        reduce(d, 1000 * turn + chance.randrange(500), chance.randrange(1, 500), op=op, payload_bytes=4 + op)
        for turn in range(20)
        for op in range(2)
        for d in range(4)
    ]  # fmt: skip
    for each in with_transfers(pl.DataFrame(rows)).to_dicts():
        members = {
            d: sorted(
                (r["start_ns"], r["dur_ns"]) for r in rows if (r["device"], r["op"]) == (d, each["op"])
            )[each["occurrence"]][1]
            for d in map(int, each["members"].split(","))
        }  # fmt: skip
        assert each["wire_ns"] == min(members.values())
        assert members[each["late"]] == each["wire_ns"]


def test_waiting_is_unknown_unless_all_devices_of_a_group_are_recorded() -> None:
    rows = with_transfers(pl.DataFrame([reduce(0, 0, 5), reduce(2, 0, 7), reduce(3, 1, 6)]))
    assert dict(rows.select("device", "wire_ns").iter_rows()) == {0: None, 2: 6, 3: 6}


def test_load_counts_each_moment_once_and_parts_sum_to_the_window() -> None:
    rows = [event(0, 0, 4), event(0, 2, 4), reduce(0, 7, 2), reduce(1, 8, 1), event(1, 9, 1)]
    table = pl.DataFrame(rows, infer_schema_length=None)
    events, busy = with_exposure(table.with_columns(pl.col("label").cast(pl.Int8)))
    names = ("device", "busy_s", "collective_s", "exposed_s", "idle_s", "window_s")
    read = [
        tuple(getattr(load, name) for name in names) for load in loads(busy, step_table(events))
    ]
    ns = [(0, 8, 2, 2, 1, 9), (1, 2, 1, 1, 0, 2)]
    assert read == [(device, *(pytest.approx(n * 1e-9) for n in times)) for device, *times in ns]
