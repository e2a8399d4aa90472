"""Folded timelines written out."""

import polars as pl
import pytest

from meshscope.events.timeline import FOLDED_SCHEMA, unfolded


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
