"""`report`: where the file goes, what is refused, and what broken runs say."""

import json
from importlib import resources
from pathlib import Path

import pytest

ASK = ("meta-llama/Llama-3.1-8B", "--topology", "v6e-8", "--plan", "tp=8", "--layers", "2")


@pytest.fixture
def run(meshscope):
    assert meshscope("predict", *ASK, "--out", "one").status == 0
    return meshscope


def test_a_report_lies_in_its_run_and_the_run_stays_readable(run) -> None:
    status, out, err = run("report", "one")
    assert (status, out) == (0, "")
    assert err.startswith("wrote one/report.html (")
    assert Path("one/report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert run("show", "one").status == 0
    status, _, err = run("report", "one")
    assert (status, "--force" in err) == (1, True)
    assert run("report", "one", "--force").status == 0


def test_a_report_of_the_largest_model_stays_small(meshscope) -> None:
    plan = (
        *("--topology", "v6e:8x8", "--plan", "dp=8,tp=8,ep=64", "--batch", "64"),
        *("--prompt", "1024"),
    )
    assert meshscope("predict", "deepseek-ai/DeepSeek-V3.1-Base", *plan, "--out", "one").status == 0
    document = json.loads(meshscope("report", "one", "--json").out)
    charts = len(resources.files("meshscope.reports.html").joinpath("vega.js").read_bytes())
    assert (
        50_000 < document["file_bytes"] - charts < 1_000_000
    )  # at most 3 MB with what the compiler tells


def test_several_runs_are_reported_in_their_folder(run) -> None:
    assert run("predict", *ASK, "--batch", "2", "--out", "sweep/a").status == 0
    assert run("predict", *ASK, "--batch", "4", "--out", "sweep/b").status == 0
    Path("sweep/summary.parquet").write_bytes(b"PAR1")
    for paths in (("sweep",), ("sweep/*",), ("sweep/a", "sweep/b", "sweep/summary.parquet")):
        status, out, err = run("report", *paths, "--json", "--force")
        document = json.loads(out)
        assert (document["path"], status) == ("sweep/report.html", 0)
        assert document["runs"] == ["sweep/a", "sweep/b"]
        is_named = "sweep/summary.parquet" in paths
        assert ("skipped sweep/summary.parquet: not a run" in err) is is_named
    assert document["file_bytes"] == Path("sweep/report.html").stat().st_size


def test_runs_in_different_folders_need_a_place(run) -> None:
    assert run("predict", *ASK, "--out", "other/two").status == 0
    status, _, err = run("report", "one", "other/two")
    assert (status, "--out FILE" in err) == (1, True)
    assert run("report", "one", "other/two", "--out", "two.html").status == 0


def test_open_is_a_flag_and_opens_the_file(run, monkeypatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert run("report", "one", "--open", "--out", "x.html").status == 0
    assert opened == [Path("x.html").resolve().as_uri()]


def test_a_broken_run_is_one_message_and_leaves_no_file(run) -> None:
    Path("one/events.parquet").write_bytes(b"PAR1")
    status, _, err = run("report", "one", "--out", "x.html")
    assert (status, err.count("\n")) == (1, 1)
    assert "damaged" in err
    assert not Path("x.html").exists()
    assert run("report", "none").status == 1


def test_a_broken_timeline_is_one_message(run) -> None:
    Path("one/timeline.parquet").write_bytes(b"PAR1")
    status, _, err = run("report", "one")
    assert (status, err.count("\n")) == (1, 1)
    assert "cannot read 'one/timeline.parquet'" in err
    assert "--force" in err


def test_too_many_runs_are_refused(run) -> None:
    status, _, err = run("report", *["one"] * 201, "--out", "x.html")
    assert (status, "at most 200" in err) == (1, True)
