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

from meshscope.api.database import _json_value, unique
from meshscope.events.schema import POLARS_SCHEMA

COUNTS = "select part, sum(count) as n from collectives where phase = 'prefill' group by part order by part"


@pytest.fixture
def sql(meshscope):
    ask = ("Qwen/Qwen3-32B", "--topology", "v6e-8", "--plan", "tp=8", "--layers", "3")
    assert meshscope("predict", *ask, "--out", "one").status == 0

    def run(query: str, *options: str):
        return meshscope("sql", "one", query, *options)

    return run


def test_a_table_for_people(sql) -> None:
    lines = [line.split() for line in sql(COUNTS).out.splitlines()]
    assert lines[0] == ["part", "n"]
    assert lines[2:] == [["attn", "3"], ["embed", "1"], ["lm_head", "1"], ["mlp", "3"]]


def test_json_and_csv_have_the_same_rows(sql) -> None:
    rows = json.loads(sql(COUNTS, "--json").out)
    read = csv.DictReader(io.StringIO(sql(COUNTS, "--csv").out))
    assert rows == [
        {"part": p, "n": n}
        for p, n in zip(("attn", "embed", "lm_head", "mlp"), (3, 1, 1, 3), strict=True)
    ]
    assert [{**row, "n": int(row["n"])} for row in read] == rows


def test_the_views_have_the_columns_of_the_table(sql) -> None:
    for view in ("events", "collectives"):
        rows = json.loads(sql(f"describe {view}", "--json").out)
        assert [row["column_name"] for row in rows] == [*POLARS_SCHEMA, "run"]


def test_lists_stay_lists(sql) -> None:
    query = "select groups, shape from collectives limit 1"
    assert json.loads(sql(query, "--json").out) == [
        {"groups": [list(range(8))], "shape": [1, 128, 5120]}
    ]
    assert sql(query, "--csv").out == 'groups,shape\n"[[0,1,2,3,4,5,6,7]]","[1,128,5120]"\n'


def test_values_that_json_has_no_form_for(sql) -> None:
    query = "select 'nan'::double as a, date '2026-01-02' as b, null as c, {'x': 1.5} as d, 1 as a"
    assert json.loads(sql(query, "--json").out) == [
        {"a": None, "b": "2026-01-02", "c": None, "d": {"x": 1.5}, "a_2": 1}
    ]
    assert sql(query, "--csv").out.splitlines()[1].startswith("nan,2026-01-02,,")


def test_hostile_values_are_escaped_on_screen(sql) -> None:
    out = sql("select chr(27) || '[31m[bold]x' as a").out
    assert out.splitlines()[2] == "\\x1b[31m[bold]x"


def test_an_answer_without_rows_has_its_names(sql) -> None:
    query = "select part, kind from collectives where false"
    assert sql(query).out.split()[:2] == ["part", "kind"]
    assert sql(query, "--json").out == "[]\n"
    assert sql(query, "--csv").out == "part,kind\n"


@pytest.mark.parametrize("columns", ["80", "100"])
def test_rows_that_do_not_fit_are_printed_one_value_a_line(sql, monkeypatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    status, out, err = sql("select * from collectives")
    lines = out.splitlines()
    records = [line for line in lines if line.startswith("row ")]
    assert (status, records) == (0, [f"row {n}" for n in range(1, 11)])
    assert ["part", "embed"] in [line.split() for line in lines]
    assert max(map(len, lines)) <= int(columns)
    assert len(lines) < 10 * (len(POLARS_SCHEMA) + 12)
    assert err == (
        "10 of 16 rows; --rows N for more, fewer columns or --wide for a table, --csv or --json "
        "for all.\n"
    )


def test_a_wide_table_keeps_its_columns(sql) -> None:
    status, out, err = sql("select * from collectives", "--wide", "--rows", "2")
    lines = out.splitlines()
    assert (status, len(lines)) == (0, 2 + 2)
    assert lines[0].split() == [*POLARS_SCHEMA, "run"]
    assert err == "2 of 16 rows; --rows N for more, --csv or --json for all.\n"


def test_long_tables_are_cut_with_a_hint(sql) -> None:
    _, out, err = sql("select range as n from range(1000)")
    assert (len(out.splitlines()), err.startswith("100 of 1,000 rows; ")) == (2 + 100, True)
    assert len(sql("select range as n from range(1000)", "--csv").out.splitlines()) == 1001


@pytest.mark.usefixtures("sql")
def test_runs_are_ranked_by_their_times_and_memory(meshscope) -> None:
    ask = ("Qwen/Qwen3-32B", "--topology", "v6e-8", "--plan", "dp=2,tp=4")
    options = ("--batch", "2", "--layers", "3", "--out", "two")
    assert meshscope("predict", *ask, *options).status == 0
    query = "select run, tpot_s, decode_tokens_per_s, total_bytes from summary order by tpot_s"
    rows = json.loads(meshscope("sql", ".", query, "--json").out)
    shown = {name: json.loads(meshscope("show", name, "--json").out) for name in ("one", "two")}
    assert sorted(row["run"] for row in rows) == ["one", "two"]
    assert rows[0]["tpot_s"] < rows[1]["tpot_s"]
    for row in rows:
        document = shown[row["run"]]
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


def test_a_damaged_run_is_refused(sql) -> None:
    Path("one/events.parquet").write_bytes(b"PAR1")
    status, _, err = sql("select 1")
    assert (status, err.count("\n")) == (1, 1)
    assert "damaged or was changed. Make it again: meshscope predict" in err


def test_one_output_form_at_a_time(sql) -> None:
    status, out, err = sql("select 1", "--json", "--csv")
    assert (status, out) == (2, "")
    assert "give one of --json and --csv" in err


def test_unique_names() -> None:
    assert unique(["a", "b", "a", "a"]) == ["a", "b", "a_2", "a_3"]


def test_json_values() -> None:
    values = (float("inf"), (1, [float("nan")]), True, b"x")
    assert _json_value(values) == [None, [1, [None]], True, "b'x'"]


def test_ctrl_c_while_tables_are_read_is_no_traceback(sql, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise RuntimeError("Query interrupted")

    monkeypatch.setattr("meshscope.api.database.scratch_folder", interrupted)
    assert sql("select 1") == (130, "", "")


# The second query never checks for signals while it runs.
@pytest.mark.slow
@table
@pytest.mark.usefixtures("sql")
def test_ctrl_c_ends_a_query(query: str) -> None:
    program = "import meshscope.api.database as s; q = s.answer; s.answer = lambda *a: print('on', flush=True) or q(*a); from meshscope.cli import main; main()"
    command = [sys.executable, "-c", program, "sql", str(Path("one").resolve()), query]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "on\n"
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, "", "")


def test_an_endless_result_is_cut_and_a_missing_table_answered_with_the_views(sql) -> None:
    status, out, err = sql("select * from range(100000000)")
    assert (status, len(out.splitlines())) == (0, 102)
    assert err.startswith("100 of 100,000 or more rows; --rows N for more")
    status, _, err = sql("select * from rows")
    assert (status, "Views: events, collectives, runs, summary, timeline." in err) == (1, True)
