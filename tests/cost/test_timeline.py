"""The timeline as a table, folded and written out."""

import polars as pl
import pytest

from meshscope.cost.timeline import SCHEMA, expanded_table


def _row(lane: str, name: str, start_s: float, repeats: list[int], periods_s: list[float]) -> dict:
    values = {"source": "compiled", "phase": "prefill", "lane": lane, "hlo_name": name}
    times = {"start_s": start_s, "dur_s": 0.5, "repeats": repeats, "periods_s": periods_s}
    return {**dict.fromkeys(SCHEMA), **values, **times}


def test_nested_repetitions_are_written_out_in_the_order_of_their_start():
    folded = pl.DataFrame(
        [
            _row("core", "inner", 1.0, [2, 3], [10.0, 2.0]),
            _row("core", "once", 0.0, [], []),
            _row("collective", "outer", 8.0, [2], [10.0]),
        ],
        schema=SCHEMA,
    )
    written = expanded_table(folded)
    assert written.height == 6 + 1 + 2
    inner = written.filter(pl.col("hlo_name") == "inner")["start_s"].to_list()
    assert inner == pytest.approx([1, 3, 5, 11, 13, 15])
    assert written["start_s"].is_sorted()
    assert written["dur_s"].to_list() == [0.5] * 9
