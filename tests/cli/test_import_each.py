"""`import --each`: every file is a run of its own, made once, and a damaged one stops no other."""

import json
from pathlib import Path

import polars as pl
import pytest
from tables import table

from meshscope.backends.sweep import queue
from meshscope.store.read import read_run

pytestmark = pytest.mark.slow  # starts processes

DUMP = (Path(__file__).parents[1] / "golden/hlo/foreign_step.hlo.txt").read_text()
TP4 = ("--topology", "v6e-4", "--plan", "tp=4")
OUT = Path("runs/imports")
FILES = ("a.txt", "c.txt")


@pytest.fixture(autouse=True)
def dumps(tmp_path: Path) -> None:
    """Two dumps; the last one is cut short."""
    for name in FILES:
        (tmp_path / name).write_text(DUMP if name != "c.txt" else DUMP[:400])


def runs() -> dict[str, Path]:
    """The runs by the file that they are made of."""
    paths = (path for path in OUT.iterdir() if path.is_dir())
    return {read_run(p).manifest.experiment.as_dict()["imported"][0]: p for p in paths}


def test_every_file_is_a_run_and_a_damaged_one_is_named(meshscope, monkeypatch) -> None:
    done = meshscope("import", "--each", *FILES, *TP4)
    assert done.status == 1
    assert "1 of 2 experiments failed; the others are done" in done.err
    assert "import file=c.txt" in done.err
    assert sorted(runs()) == ["a.txt"]
    assert meshscope("import", "a.txt", *TP4, "--out", "alone").status == 0
    assert read_run(runs()["a.txt"]).rows == read_run(Path("alone")).rows
    summary = pl.read_parquet(OUT / "summary.parquet")
    (row,) = summary.to_dicts()
    assert row["run"] == runs()["a.txt"].name
    # Nothing is made again: a command that ends with an error would be a failure.
    monkeypatch.setattr(queue, "CHILD", ("-c", "raise SystemExit(7)"))
    again = meshscope("import", "--each", "a.txt", *TP4, "--json")
    assert again.status == 0
    assert [one["state"] for one in json.loads(again.out)["experiments"]] == ["done"]


def test_a_failed_file_is_retried_on_request(meshscope) -> None:
    ask = ("import", "--each", "c.txt", *TP4)
    assert meshscope(*ask).status == 1
    Path("c.txt").write_text(DUMP)
    assert meshscope(*ask).status == 1  # the failure is kept
    assert meshscope(*ask, "--retry-failed").status == 0
    assert list(runs()) == ["c.txt"]


@table
def test_a_fault_is_one_message(meshscope, options, status: int, message: str) -> None:
    done = meshscope("import", *options, *TP4)
    assert (done.status, message in " ".join(done.err.split())) == (status, True)
    assert not OUT.exists()
