"""Runs that are odd or hostile: every command that reads a run shows them, or says what to do."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tables import table

from meshscope.store.read import read_run
from meshscope.store.write import write_run

ASK = ("meta-llama/Llama-3.1-8B", "--topology", "v6e-8", "--layers", "2")
HOSTILE = '</script><script>alert("x")</script>\'"\x00\x1b[31m\u202e\r\n' + "x" * 1_000_000
READERS = (("show", "RUN"), ("show", "RUN", "--metrics"), ("compare", "RUN", "other"))
FORMS = ("perfetto", "chrome", "card", "csv", "parquet", "chakra", "ccl-bench")


@pytest.fixture
def runs(meshscope):
    """`other`, a usual run."""
    assert meshscope("predict", *ASK, "--plan", "tp=8", "--out", "other").status == 0
    return meshscope


def rewritten(name: str, **changes: object) -> None:
    """The usual run with other rows or another manifest, as a run of its own."""
    run = read_run(Path("other"))
    rows = changes.get("rows", run.rows)
    manifest = replace(run.manifest, **{k: v for k, v in changes.items() if k != "rows"})
    Path(name).mkdir()
    write_run(Path(name), replace(run, rows=rows, manifest=manifest), metrics={})


@pytest.fixture
def hostile(runs):
    run = read_run(Path("other"))
    rows = tuple(
        replace(
            row, hlo_name=HOSTILE, source_line=HOSTILE, algorithm=HOSTILE, opcode=HOSTILE,
            axis=HOSTILE, axis_reason=HOSTILE, dtype=HOSTILE, inserted_by=HOSTILE,
        )
        for row in run.rows
    )  # fmt: skip
    experiment = run.manifest.experiment
    experiment = replace(experiment, model=replace(experiment.architecture, name=HOSTILE))
    rewritten("bad", rows=rows, experiment=experiment, flags={"XLA_FLAGS": HOSTILE})
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("width", ["80", "200"])
@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_hostile_names_neither_steer_nor_flood_a_terminal(hostile, monkeypatch, words, width):
    monkeypatch.setenv("COLUMNS", width)
    status, out, err = hostile(*("bad" if word == "RUN" else word for word in words))
    assert (status, err) == (0, "")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)
    assert len(out) < 60_000
    assert max(map(len, out.splitlines())) <= int(width)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_hostile_names_are_harmless_in_every_export(hostile, form: str) -> None:
    status, _, err = hostile("export", "bad", "--to", form, "--out", "x")
    assert (status, "wrote x" in err) == (0, True)
    files = [Path("x")] if Path("x").is_file() else [p for p in Path("x").rglob("*") if p.is_file()]
    if form != "parquet":  # which holds the table as it is
        assert sum(path.stat().st_size for path in files) < 4_000_000
        for path in files:
            assert b"\x1b[31m" not in path.read_bytes()


def test_hostile_names_stay_values_in_sql(hostile) -> None:
    rows = json.loads(hostile("sql", "bad", "select distinct axis from collectives", "--json").out)
    assert rows == [{"axis": HOSTILE}]


@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_an_empty_run_is_shown(runs, words) -> None:
    rewritten("empty", rows=())
    status, out, err = runs(*("empty" if word == "RUN" else word for word in words))
    assert (status, err) == (0, "")
    assert out


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_run_is_exported(runs, form: str) -> None:
    rewritten("empty", rows=())
    assert runs("export", "empty", "--to", form, "--out", "x").status == 0


@table
def test_a_run_of_another_schema_is_refused_with_the_command_that_makes_it(runs, words) -> None:
    rewritten("old")
    manifest = json.loads(Path("old/manifest.json").read_text())
    Path("old/manifest.json").write_text(json.dumps(manifest | {"schema": 0}))
    before = sorted(Path().rglob("*"))
    status, out, err = runs(*("old" if word == "RUN" else word for word in words))
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "has schema 0, this version reads" in err
    assert "Make it again: meshscope predict meta-llama/Llama-3.1-8B" in err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.usefixtures("runs")
def test_every_kept_run_has_a_valid_card() -> None:
    import yaml  # noqa: PLC0415

    from meshscope.reports.export.card import faults_of  # noqa: PLC0415

    assert list(faults_of(yaml.safe_load(Path("other/card.yaml").read_text()))) == []
    assert "card.yaml" in json.loads(Path("other/manifest.json").read_text())["files"]


@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_colours_change_no_word(runs, monkeypatch, words) -> None:
    asked = ["other" if word == "RUN" else word for word in words]
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = runs(*asked).out
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = runs(*asked).out
    assert "\x1b[" in coloured
    assert "\x1b" not in plain
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in stripped.splitlines()] == plain.splitlines()
