"""Runs that are odd or hostile: every command that reads a run shows them, or says what to do."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from card_template import faults_of
from tables import table

from meshscope.events.collective import Collective
from meshscope.store.read import read_run
from meshscope.store.write import write_run

HOSTILE = '</script><script>alert("x")</script>\'"\x00\x1b[31m\u202e\r\n' + "x" * 200_000
READERS = (("show", "RUN"), ("show", "RUN", "--metrics"), ("compare", "RUN", "a"))
FORMS = ("perfetto", "chrome", "card", "csv", "parquet", "chakra", "ccl-bench")


def rewritten(name: str, *, rows: tuple[Collective, ...] | None = None, **changes: Any) -> None:
    """The usual run with other rows or another manifest, as a run of its own."""
    run = read_run(Path("a"))
    run = replace(run, manifest=replace(run.manifest, **changes))
    Path(name).mkdir()
    write_run(Path(name), run if rows is None else replace(run, rows=rows), metrics={})


@pytest.fixture
def runs(meshscope, here):  # noqa: ARG001  which has the usual run
    """Runs a command on a run of this name in the place of RUN."""
    return lambda name, words: meshscope(*(name if word == "RUN" else word for word in words))


@pytest.fixture
def hostile(runs):
    run = read_run(Path("a"))
    names = ("hlo_name", "source_line", "algorithm", "opcode", "axis", "axis_reason", "dtype")
    facts = dict.fromkeys((*names, "inserted_by"), HOSTILE)
    experiment = run.manifest.experiment
    experiment = replace(experiment, model=replace(experiment.architecture, name=HOSTILE))
    rows = tuple(replace(row, **facts) for row in run.rows)
    rewritten("bad", rows=rows, experiment=experiment, flags={"XLA_FLAGS": HOSTILE})
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("width", ["80", "200"])
@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_hostile_names_neither_steer_nor_flood_a_terminal(hostile, monkeypatch, words, width):
    monkeypatch.setenv("COLUMNS", width)
    status, out, err = hostile("bad", words)
    assert (status, err) == (0, "")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)
    assert len(out) < 60_000
    assert max(map(len, out.splitlines())) <= int(width)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_hostile_names_are_harmless_in_every_export(hostile, form: str) -> None:
    status, _, err = hostile("bad", ("export", "RUN", "--to", form, "--out", "x"))
    assert (status, "wrote x" in err) == (0, True)
    files = [Path("x")] if Path("x").is_file() else [p for p in Path("x").rglob("*") if p.is_file()]
    if form != "parquet":  # which holds the table as it is
        assert sum(path.stat().st_size for path in files) < 4_000_000
        for path in files:
            assert b"\x1b[31m" not in path.read_bytes()


@pytest.mark.slow
def test_hostile_names_stay_values_in_sql(hostile) -> None:
    rows = json.loads(
        hostile("bad", ("sql", "RUN", "select distinct axis from collectives", "--json")).out
    )
    assert rows == [{"axis": HOSTILE}]


@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_an_empty_run_is_shown(runs, words) -> None:
    rewritten("empty", rows=())
    status, out, err = runs("empty", words)
    assert (status, err, out != "") == (0, "", True)


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_run_is_exported(runs, form: str) -> None:
    rewritten("empty", rows=())
    assert runs("empty", ("export", "RUN", "--to", form, "--out", "x")).status == 0


@table
def test_a_run_of_another_schema_is_refused_with_the_command_that_makes_it(runs, words) -> None:
    rewritten("old")
    manifest = json.loads(Path("old/manifest.json").read_text())
    Path("old/manifest.json").write_text(json.dumps(manifest | {"schema": 0}))
    before = sorted(Path().rglob("*"))
    status, out, err = runs("old", words)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "has schema 0, this version reads" in err
    assert "Make it again: meshscope predict Qwen/Qwen3-32B" in err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.usefixtures("here")
def test_every_kept_run_has_a_valid_card() -> None:
    assert list(faults_of(yaml.safe_load(Path("a/card.yaml").read_text()))) == []
    assert "card.yaml" in json.loads(Path("a/manifest.json").read_text())["files"]


@pytest.mark.slow
@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_colours_change_no_word(runs, monkeypatch, words) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = runs("b", words).out
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = runs("b", words).out
    assert "\x1b[" in coloured
    assert "\x1b" not in plain
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in stripped.splitlines()] == plain.splitlines()
