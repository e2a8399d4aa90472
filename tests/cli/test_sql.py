"""`sql`: reads the run and nothing else."""

import csv
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tables import table

from meshscope.events.schema import POLARS_SCHEMA

COUNTS = "select part, sum(count) as n from collectives where phase = 'prefill' group by part order by part"


@pytest.fixture
def sql(meshscope, here):  # noqa: ARG001  which has the run
    return lambda query, *options: meshscope("sql", "a", query, *options)


def test_people_json_and_csv_have_the_same_rows(sql) -> None:
    expected = [
        {"part": p, "n": n}
        for p, n in zip(("attn", "embed", "lm_head", "mlp"), (3, 1, 1, 3), strict=True)
    ]
    head, _, *lines = (line.split() for line in sql(COUNTS).out.splitlines())
    assert [dict(zip(head, line, strict=True)) for line in lines] == [
        {**row, "n": str(row["n"])} for row in expected
    ]
    read = csv.DictReader(io.StringIO(sql(COUNTS, "--csv").out))
    assert [{**row, "n": int(row["n"])} for row in read] == expected
    assert json.loads(sql(COUNTS, "--json").out) == expected


def test_the_views_have_the_columns_of_the_table(sql) -> None:
    for view in ("events", "collectives"):
        rows = json.loads(sql(f"describe {view}", "--json").out)
        assert [row["column_name"] for row in rows] == [*POLARS_SCHEMA, "run"]


def test_lists_and_values_that_json_has_no_form_for_are_written(sql) -> None:
    query = "select groups, shape from collectives limit 1"
    assert json.loads(sql(query, "--json").out) == [
        {"groups": [list(range(8))], "shape": [2, 128, 5120]}
    ]
    assert sql(query, "--csv").out == 'groups,shape\n"[[0,1,2,3,4,5,6,7]]","[2,128,5120]"\n'
    query = (
        "select 'nan'::double as a, date '2026-01-02' as b, null as c, {'x': 1.5} as d, 1 as a, 2 as a, "
        "['inf'::double, 1] as e, true as f, 'x'::blob as g"
    )
    assert json.loads(sql(query, "--json").out) == [
        {"a": None, "b": "2026-01-02", "c": None, "d": {"x": 1.5}, "a_2": 1, "a_3": 2}
        | {"e": [None, 1], "f": True, "g": "b'x'"}
    ]
    assert sql(query, "--csv").out.splitlines()[1].startswith("nan,2026-01-02,,")


def test_a_table_stops_after_the_rows_of_an_answer_and_escapes_hostile_values(sql) -> None:
    out = sql("select chr(27) || '[31m[bold]x' as a").out
    assert out.splitlines()[2] == "\\x1b[31m[bold]x"
    query = "select part, count from collectives"
    lines = sql(query).out.splitlines()
    assert len(lines) == 2 + 9 + 1
    assert lines[-1] == "9 of 16 rows; --full, --csv or --json for all"
    assert len(sql(query, "--full").out.splitlines()) == 2 + 16


def test_an_answer_without_rows_has_its_names(sql) -> None:
    query = "select part, kind from collectives where false"
    assert sql(query).out.split()[:2] == ["part", "kind"]
    assert sql(query, "--json").out == "[]\n"
    assert sql(query, "--csv").out == "part,kind\n"


@pytest.mark.parametrize("columns", ["80", "100"])
def test_rows_that_do_not_fit_are_printed_one_value_a_line(sql, monkeypatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    first, whole = (sql("select * from collectives", *more) for more in ((), ("--full",)))
    lines = whole.out.splitlines()
    records = [line for line in lines if line.startswith("row ")]
    assert (whole.status, records) == (0, [f"row {n}" for n in range(1, 17)])
    assert ["part", "embed"] in [line.split() for line in lines]
    assert max(map(len, lines)) <= int(columns)
    assert first.out.splitlines()[:-1] == lines[:11]


@pytest.mark.usefixtures("here")
def test_runs_are_ranked_by_their_times_and_memory(meshscope) -> None:
    query = "select run, tpot_s, decode_tokens_per_s, total_bytes from summary order by tpot_s"
    rows = json.loads(meshscope("sql", ".", query, "--json").out)
    assert sorted(row["run"] for row in rows) == ["a", "b", "c"]
    assert rows[0]["tpot_s"] < rows[-1]["tpot_s"]
    for row in rows:
        document = json.loads(meshscope("show", row["run"], "--json").out)
        n = document["experiment"]["workload"]["batch"]
        assert row["tpot_s"] == document["time"]["tpot_s"]
        assert row["decode_tokens_per_s"] == n / document["time"]["decode_step_s"]
        assert row["total_bytes"] == document["memory"]["total_bytes"]


@table
def test_mistakes_and_ways_out_are_one_message(sql, query: str) -> None:
    Path("secret.csv").write_text("a\n1\n")
    before = sorted(Path().rglob("*"))
    status, out, err = sql(query.replace("{here}", str(Path.cwd())))
    assert (status, out) == (1, "")
    assert err.startswith("meshscope: SQL: ")
    assert "Traceback" not in err
    assert sorted(Path().rglob("*")) == before


def test_ctrl_c_while_tables_are_read_is_no_traceback(sql, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise RuntimeError("Query interrupted")

    monkeypatch.setattr("meshscope.api.database.scratch_folder", interrupted)
    assert sql("select 1") == (130, "", "")


# The second query never checks for signals while it runs.
@pytest.mark.slow
@table
@pytest.mark.usefixtures("here")
def test_ctrl_c_ends_a_query(query: str) -> None:
    program = "import meshscope.api.database as s; q = s.answer; s.answer = lambda *a: print('on', flush=True) or q(*a); from meshscope.cli import main; main()"
    command = [sys.executable, "-c", program, "sql", str(Path("a").resolve()), query]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "on\n"
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (-signal.SIGINT, "", "")  # which shells report as 130
