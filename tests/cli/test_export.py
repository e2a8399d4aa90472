"""`export`: every form from the command line, beside the run or where asked."""

import gzip
import json
from pathlib import Path

import pytest

ASK = ("meta-llama/Llama-3.1-8B", "--topology", "v6e-8", "--plan", "tp=8", "--layers", "2")
OUTPUTS = {
    "perfetto": "one.perfetto-trace",
    "chrome": "one.trace.json.gz",
    "card": "one.card.yaml",
    "csv": "one.csv",
    "parquet": "one.parquet",
    "chakra": "one-chakra",
    "ccl-bench": "one-ccl-bench",
}


@pytest.fixture
def run(meshscope):
    assert meshscope("predict", *ASK, "--out", "one").status == 0
    return meshscope


@pytest.mark.parametrize(("form", "name"), OUTPUTS.items())
def test_every_form_is_written_once(run, form: str, name: str) -> None:
    before = sorted(Path("one").rglob("*"))
    status, out, err = run("export", "one", "--to", form)
    assert (status, out) == (0, "")
    assert err.startswith(f"wrote {name}")
    assert Path(name).exists()
    status, _, err = run("export", "one", "--to", form)
    assert (status, "--force" in err) == (1, True)
    assert run("export", "one", "--to", form, "--force").status == 0
    assert sorted(Path("one").rglob("*")) == before
    assert sorted(p.name for p in Path().iterdir()) == sorted(["one", name])


def test_order_is_not_called_time(run) -> None:
    document = json.loads(run("export", "one", "--to", "chrome", "--json").out)
    assert document["note"] == "the order of the schedule, not time"
    text = gzip.decompress(Path("one.trace.json.gz").read_bytes()).decode()
    assert "order, not time" in text


def test_an_unknown_form_is_a_usage_error(run) -> None:
    status, out, err = run("export", "one", "--to", "nothing")
    assert (status, out) == (2, "")
    assert "perfetto" in err


def test_a_place_that_cannot_be_written_is_one_message(run) -> None:
    Path("file").write_text("")
    status, _, err = run("export", "one", "--to", "csv", "--out", "file/x.csv")
    assert (status, err.count("\n")) == (1, 1)
    assert "Choose another --out" in err
