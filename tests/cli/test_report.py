"""`report`: where the file goes, and what is refused; sessions.yaml has more."""

import json
from importlib import resources
from pathlib import Path

import pytest
from tests.cli.conftest import words_of


def test_a_report_of_the_largest_model_stays_small(meshscope) -> None:
    """At most 3 MB with what the compiler tells."""
    line = "predict deepseek-ai/DeepSeek-V3.1-Base --topology v6e:8x8 --plan dp=8,tp=8,ep=64"
    assert meshscope(*words_of(f"{line} --batch 64 --prompt 1024 --out one")).status == 0
    document = json.loads(meshscope("report", "one", "--json").out)
    charts = len(resources.files("meshscope.reports.html").joinpath("vega.js").read_bytes())
    assert 50_000 < document["file_bytes"] - charts < 1_000_000


def test_several_runs_are_reported_in_their_folder(meshscope, here: Path) -> None:
    Path("sweep").mkdir()
    for name in "ab":
        (here / name).rename(here / "sweep" / name)
    Path("sweep/summary.parquet").write_bytes(b"PAR1")
    for paths in (("sweep",), ("sweep/*",), ("sweep/a", "sweep/b", "sweep/summary.parquet")):
        status, out, err = meshscope("report", *paths, "--json", "--force")
        document = json.loads(out)
        assert (document["path"], status) == ("sweep/report.html", 0)
        assert document["runs"] == ["sweep/a", "sweep/b"]
        is_named = "sweep/summary.parquet" in paths
        assert ("skipped sweep/summary.parquet: not a run" in err) is is_named
    assert document["file_bytes"] == Path("sweep/report.html").stat().st_size


@pytest.mark.usefixtures("here")
def test_open_is_a_flag_and_opens_the_file(meshscope, monkeypatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert meshscope("report", "a", "--open", "--out", "x.html").status == 0
    assert opened == [Path("x.html").resolve().as_uri()]


@pytest.mark.usefixtures("here")
def test_too_many_runs_are_refused(meshscope) -> None:
    status, _, err = meshscope("report", *["a"] * 201, "--out", "x.html")
    assert (status, "at most 200" in err) == (1, True)
