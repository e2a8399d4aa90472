"""Metrics of a run as text and as JSON: every metric has values or a reason."""

import json
from io import StringIO

import pytest
from rich.console import Console

from meshscope.analysis.catalog import METRICS
from meshscope.events.enums import Source
from meshscope.reports.metrics import metrics_document, metrics_text
from meshscope.store.run import RunRecord
from meshscope.units import format_bytes


def metrics_output(run: RunRecord, width: int) -> str:
    console = Console(file=StringIO(), width=width, highlight=False, markup=False, emoji=False)
    for part in metrics_text(run, console):
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 200])
def test_every_metric_is_shown_or_explained(compiled_run: RunRecord, width: int) -> None:
    text = metrics_output(compiled_run, width)
    assert max(map(len, text.splitlines())) <= width
    for metric in METRICS:
        assert metric.title in " ".join(text.split())
    assert "only runs on live devices have a profile" in text
    assert "nan" not in text.lower().split()


def test_the_document_has_rows_or_a_reason(compiled_run: RunRecord) -> None:
    document = json.loads(json.dumps(metrics_document(compiled_run), allow_nan=False))
    assert list(document) == [metric.name for metric in METRICS]
    for metric in document.values():
        assert ("rows" in metric) != ("reason" in metric)
        assert metric["unit"]
    assert {row["source"] for row in document["volume"]["rows"]} == {"predicted", "compiled"}
    assert "neither timed" in document["bandwidth"]["reason"]


def test_every_metric_has_a_definition_and_a_source() -> None:
    for metric in METRICS:
        assert len(metric.definition) > 40, metric.name
        assert len(metric.source) > 15, metric.name
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_a_small_traffic_matrix_is_a_grid_and_a_wide_one_a_list(compiled_run: RunRecord) -> None:
    grid = [
        line.split()
        for line in metrics_output(compiled_run, 80).splitlines()
        if line[:2] in {"0 ", "3 "}
    ]
    sent = sum(
        float(r.wire_bytes) * r.count
        for r in compiled_run.rows_of(Source.COMPILED)
        if r.phase == "prefill"
    )
    assert grid[0] == ["0", *format_bytes(sent).split()]
    assert grid[1] == ["3", *format_bytes(sent).split()]
    assert "from \\ to" not in metrics_output(compiled_run, 30)
