"""Runs from Python: found by path or pattern, read as tables, shown with every text escaped."""

from pathlib import Path

import polars as pl
import pytest

import meshscope
from meshscope.errors import RunError, SpecError

HOSTILE = '<script>alert("x")</script>\x00\x1b[31m' + "y" * 1_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs in a folder, and what is none beside them."""
    for name in ("a", "b"):
        asked = {"topology": "v6e-4", "plan": "tp=4", "layers": 1, "out": tmp_path / "runs" / name}
        meshscope.predict("Qwen/Qwen3-4B", **asked)
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("")
    return tmp_path / "runs"


def test_a_run_a_folder_and_a_pattern_are_found(folder: Path) -> None:
    assert len(meshscope.open(str(folder / "a"))) == 1
    for pattern in (folder, folder / "*", folder / "[ab]"):
        assert [path.name for path in meshscope.open(str(pattern)).folders] == ["a", "b"]


@pytest.mark.parametrize("pattern", ["none", "runs/x*", "runs/notes"])
def test_no_run_is_one_message(folder: Path, monkeypatch, pattern: str) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(RunError, match="Give the folder of a run"):
        meshscope.open(pattern)


def test_tables_have_the_rows_of_all_runs(folder: Path) -> None:
    runs = meshscope.open(str(folder))
    each = len(pl.read_parquet(folder / "a" / "events.parquet"))
    assert runs.events["run"].to_list() == ["a"] * each + ["b"] * each
    assert runs.table["run"].to_list() == ["a", "b"]
    assert runs.timeline.is_empty()
    counts = runs.sql("select run, sum(count) as n from collectives group by run order by run")
    assert counts.rows() == [("a", 8), ("b", 8)]
    assert [run.path for run in runs] == list(runs.folders)


def test_metrics_of_all_runs_stand_together(folder: Path) -> None:
    metrics = meshscope.open(str(folder)).metrics()
    assert metrics["volume"]["run"].unique(maintain_order=True).to_list() == ["a", "b"]
    assert metrics.unknown.filter(metric="latency")["run"].to_list() == ["a", "b"]
    with pytest.raises(
        SpecError, match="no run has the metric 'latency': only runs on live devices"
    ):
        metrics["latency"]
    with pytest.raises(SpecError, match="Did you mean 'volume'"):
        metrics["volumes"]


def test_a_query_only_reads(folder: Path) -> None:
    runs = meshscope.open(str(folder))
    for query in ("drop view collectives", "select * from '/etc/passwd'", "select 1; select 2"):
        with pytest.raises(SpecError, match="SQL"):
            runs.sql(query)


def test_a_notebook_shows_runs_and_metrics(folder: Path) -> None:
    runs = meshscope.open(str(folder))
    assert "shape: (2, " in runs._repr_html_()
    assert "Volume" in runs.metrics()._repr_html_()


def test_a_run_is_shown_in_one_line(folder: Path) -> None:
    text = repr(meshscope.open(str(folder))[0])
    assert text.startswith("<Run predicted: ")
    assert (text.count("\n"), len(text) < 400) == (0, True)
