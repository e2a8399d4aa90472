"""Transfer, waiting, busy and idle time, against brute force and worked examples."""

import random

import polars as pl
import pytest

from meshscope.events.schema import POLARS_SCHEMA
from meshscope.readers.profile.executions import EXTRA_SCHEMA, loads, participants

SCHEMA = {**POLARS_SCHEMA, **EXTRA_SCHEMA}


def row(device: int | None, start_s: float, dur_s: float, **values: object) -> dict[str, object]:
    times = {"device": device, "start_s": start_s, "dur_s": dur_s, "exposed_s": dur_s}
    usual = {"module": "m", "hlo_name": "x", "is_async": False, "source": "measured"}
    return {**usual, **times, **values}


def reduce(device: int | None, start_s: float, dur_s: float, **values: object) -> dict[str, object]:
    facts = {"kind": "all_reduce", "group_size": 2, "hlo_name": "r", "wire_bytes": 6.0}
    return row(device, start_s, dur_s, **{"groups": [[0, 1], [2, 3]], **facts, **values})


def table(*rows: dict[str, object]) -> pl.DataFrame:
    filled = [{name: each.get(name) for name in SCHEMA} for each in rows]
    return pl.DataFrame(filled, schema=SCHEMA)


def test_waiting_equals_brute_force() -> None:
    chance = random.Random(5)
    rows = [
        reduce(d, turn + chance.random(), chance.random(), hlo_name=name)
        for turn in range(20)
        for name in ("a", "b")
        for d in range(4)
    ]
    for each in participants(table(*rows)).to_dicts():
        name, group = each["hlo_name"], each["group"]
        members = {
            d: sorted(
                (r["start_s"], r["dur_s"])
                for r in rows
                if (r["device"], r["hlo_name"]) == (d, name)
            )[each["occurrence"]]
            for d in group
        }
        wire_s = min(dur for _, dur in members.values())
        assert each["wire_s"] == wire_s
        assert each["wait_s"] == pytest.approx(members[each["device"]][1] - wire_s)


def test_waiting_is_unknown_for_ops_without_device_number() -> None:
    rows = participants(table(*(reduce(None, 0.0, dur, groups=None) for dur in (1.0, 2.0))))
    assert rows["wait_s"].to_list() == [None, None]


def test_pairs_form_a_chain() -> None:
    pairs = {"kind": "permute", "groups": [[0, 1], [1, 2]]}
    rows = participants(table(*(reduce(d, 0.0, 1.0 + d, **pairs) for d in range(3))))
    assert rows["wire_s"].to_list() == [1.0] * 3


def test_load_counts_each_moment_once_and_parts_sum_to_the_window() -> None:
    rows = table(
        row(0, 0.0, 4.0),
        row(0, 2.0, 4.0),
        reduce(0, 7.0, 2.0),
        reduce(1, 8.0, 1.0),
        row(1, 9.0, 1.0),
    )
    columns = ("device", "n_ops", "busy_s", "collective_s", "wait_s", "idle_s")
    assert loads(rows).select(columns).rows() == [
        (0, 3, 8.0, 2.0, 1.0, 2.0),
        (1, 2, 2.0, 1.0, 0.0, 8.0),
    ]


def test_a_pair_blocks_its_device_only_while_waiting() -> None:
    pair = reduce(0, 0.0, 10.0, is_async=True, exposed_s=3.0)
    background = row(0, 0.0, 10.0, is_async=True, exposed_s=None)
    assert loads(table(pair, background))["busy_s"].to_list() == [3.0]


def test_an_empty_table_has_no_loads_and_no_participants() -> None:
    assert loads(table()).is_empty()
    assert participants(table()).is_empty()
