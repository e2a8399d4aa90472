"""The study, the best plans and the matrix of compilers hold what the present code makes."""

import json
import re
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest

import meshscope
from meshscope.api.environments import list_compilers
from meshscope.events.enums import REQUEST_PHASES
from meshscope.model.catalog import catalog
from meshscope.serving.objective import Goal

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "evidence" / "study"
NEAR = 0.01
RENEW = "run 'python experiments/study_compiled.py --predictions', then cog as in 'make study'"


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))


def test_no_figure_table_or_constant_changes_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of compiled programs, which no fast test makes again."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    evidence = import_module("evidence")
    changed = list(evidence.differences("data", list(evidence.data(1)), 1))
    assert changed == [], "if it is meant, run 'python tools/evidence.py write data'"


@pytest.fixture
def claims() -> ModuleType:
    return import_module("study_claims")


def sampled() -> list[dict[str, Any]]:
    """Points of every kind, most of them of the kinds whose times move first."""
    points = pl.read_parquet(DATA / "points.parquet").filter(pl.col("refused").is_null())
    n_of_kind = {"batch = 1": 10, "plan like '%pp=%'": 6, "plan like '%cp=%'": 4}
    n_of_kind |= {"plan like '%sp'": 4, "plan like '%ep=%'": 6, "true": 6}
    of_kinds = [
        points.sql(f"select * from self where {kind}").sample(n, seed=24)
        for kind, n in n_of_kind.items()
    ]
    return pl.concat(of_kinds).unique("point", maintain_order=True).to_dicts()


@pytest.mark.parametrize("stored", sampled(), ids=lambda row: row["point"])
def test_points_are_those_of_the_present_prediction(stored: dict[str, Any]) -> None:
    """Counts and bytes are equal, times within 1 %: else run `make study`."""
    study = import_module("study")
    row, collectives = study.predicted_rows(study.point_of(stored))
    assert _inexact(row, stored, study.POINT_COLUMNS) == []
    rows = pl.scan_parquet(DATA / "collectives.parquet")
    kept = rows.filter(pl.col("point") == stored["point"]).collect().to_dicts()
    assert len(kept) == len(collectives)
    for new, old in zip(collectives, kept, strict=True):
        assert _inexact(new, old, study.COLLECTIVE_COLUMNS) == []


def _inexact(new: dict[str, Any], old: dict[str, Any], columns: dict[str, Any]) -> list[str]:
    """The columns whose values differ; seconds may differ by 1 %, and 32-bit columns are rounded."""
    is_time = {name: unit in {"s", "tokens/s"} for name, (_, unit, _) in columns.items()}
    return [
        name
        for name, value in old.items()
        if (pytest.approx(value, rel=NEAR, abs=1e-9) if is_time[name] else value) != new.get(name)
    ]


def test_predictions_of_compiled_programs_are_those_of_the_present_code() -> None:
    """Counts and bytes are equal, times within 1 %."""
    compiled = import_module("study_compiled")
    tables = {"programs": compiled.PROGRAM_COLUMNS, "operations": compiled.OPERATION_COLUMNS}
    for rows, (table, columns) in zip(compiled.predicted_again(), tables.items(), strict=True):
        new, old = (
            one.filter(pl.col("source") == "predicted").sort(pl.all())
            for one in (compiled.frame(rows, columns), pl.read_parquet(DATA / f"{table}.parquet"))
        )
        times = [name for name in columns if name.endswith("_s")]
        assert old.drop(times).equals(new.drop(times)), RENEW
        for name in times:
            assert old[name].to_list() == pytest.approx(new[name].to_list(), rel=NEAR), RENEW


@pytest.mark.parametrize("strategy", ["pp", "ep"])
def test_classes_of_traffic_are_those_of_the_present_code(strategy: str) -> None:
    """Counts and bytes are equal, times within 1 %: else run `make study`. The slow test has all plans."""
    _compare_classes("deepseek-ai/DeepSeek-V2-Lite", strategy)


@pytest.mark.slow
def test_all_classes_of_traffic_are_those_of_the_present_code() -> None:
    """Also of DeepSeek-V4.1, and why a plan is refused."""
    classes = import_module("study_classes")
    for model in classes.MODELS:
        for strategy in classes.PLANS:
            _compare_classes(model, strategy)


def _compare_classes(model: str, strategy: str) -> None:
    classes = import_module("study_classes")
    stored = pl.read_parquet(DATA / "classes.parquet").filter(model=model, strategy=strategy)
    new = list(classes.rows_of(model, strategy))
    assert len(new) == len(stored)
    for row, old in zip(new, stored.iter_rows(named=True), strict=True):
        known = {name: value for name, value in old.items() if value is not None}
        assert _inexact(row, known, classes.COLUMNS) == []


def test_every_point_of_the_plan_is_in_the_dataset() -> None:
    points = pl.read_parquet(DATA / "points.parquet")
    plan = import_module("yaml").safe_load((ROOT / "experiments" / "study.yaml").read_text("utf-8"))
    assert set(points["model"]) == set(plan["models"])
    assert set(points["chip"]) == set(plan["slices"])
    assert set(points["strategy"]) == set(plan["strategies"])
    assert set(points["n_chips"]) == {4, 8, 16, 32, 64, 128, 256}
    assert points.filter(pl.col("refused").is_null() & pl.col("e2e_s").is_null()).is_empty()


def test_the_page_shows_every_claim_once(claims: ModuleType) -> None:
    page = (ROOT / "docs" / "evidence" / "study.md").read_text("utf-8")
    assert sorted(re.findall(r'study\.finding\("([\w-]+)"\)', page)) == sorted(claims.claims())


def test_a_claim_that_the_data_contradict_fails(claims: ModuleType) -> None:
    def claim(sql: str) -> Any:
        return claims.Claim(name="x", text="", sql=sql, table={})

    assert claims.rows_of(claim("select true as holds"))
    with pytest.raises(SystemExit, match="contradict"):
        claims.rows_of(claim("select plan, e2e_s > 1e9 as holds from points where fits limit 3"))
    with pytest.raises(SystemExit, match="no rows"):
        claims.rows_of(claim("select true as holds from points where batch = -1"))


@pytest.mark.slow
def test_plots_show_the_dataset(tmp_path: Path) -> None:
    plots = import_module("study_plots")
    plots.write(tmp_path)
    for name in plots.PLOTS:
        stored, drawn = ((home / f"{name}.svg").read_text("utf-8") for home in (DATA, tmp_path))
        assert list(_paths(stored)) == list(_paths(drawn)), f"run 'make study': {name}.svg"


def _paths(svg: str) -> Iterator[str]:
    """The curves of a plot, which depend on no font."""
    yield from re.findall(r'id="line2d_\d+">\s*<path d="([^"]+)"', svg)


def test_an_interrupted_study_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that exist are not predicted again, and those of another plan are not used."""
    study = import_module("study")
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "models: [Qwen/Qwen3-4B]\nslices: {v6e: {4: 2x2}, v5e: {4: 2x2}}\nbatch: [1]\nprompt: [128]\n"
        "output: 8\nstrategies: {tensor: tp=-1, impossible: tp=3}\n"
    )
    for name, value in {
        "PLAN": plan,
        "PARTS": tmp_path / "parts",
        "DATA": tmp_path / "data",
    }.items():
        monkeypatch.setattr(study, name, value)
    made: list[str] = []
    monkeypatch.setattr(study, "make_part", _recorded(study.make_part, made))
    study.make_part("Qwen/Qwen3-4B", "v6e")
    study.make_parts(n_jobs=0, force=False)
    assert made == ["v6e", "v5e"]
    points = pl.read_parquet(tmp_path / "data" / "points.parquet")
    assert points["plan"].to_list() == ["tp=4", None, "tp=4", None]
    assert "divide" in points["refused"][1] or "devices" in points["refused"][1]


def _recorded(make: Any, made: list[str]) -> Any:
    def make_part(model: str, chip: str) -> None:
        made.append(chip)
        make(model, chip)

    return make_part


SAMPLED = slice(3, None, 83)  # every so many cells


@pytest.fixture
def page() -> ModuleType:
    return import_module("best_plans_table")


def known_cells() -> list[dict[str, Any]]:
    text = (ROOT / "docs" / "evidence" / "best-plans" / "cells.js").read_text("utf-8")
    cells = json.loads(text[text.index("[") : text.rindex("]") + 1])
    return [cell for cell in cells if "options" in cell]


def test_every_model_has_a_cell_for_each_generation_and_goal(page: ModuleType) -> None:
    keys = [(cell["model"], cell["chip"], cell["goal"]) for cell in page.cells()]
    assert len(keys) == len(set(keys))
    assert len(catalog()) >= 100
    missing = {(m, c, g.value) for m in catalog() for c in page.CHIPS for g in Goal} - set(keys)
    assert missing == set(), "run 'make best-plans'"


@pytest.mark.parametrize("cell", known_cells()[SAMPLED], ids=lambda c: f"{c['chip']}-{c['model']}")
def test_cells_are_those_of_the_present_prediction(cell: dict[str, Any]) -> None:
    """Counts and bytes are equal, times within 1 %: else run `make best-plans`."""
    document = meshscope.predict(cell["model"], **cell["options"]).as_dict()
    for phase in (phase.value for phase in REQUEST_PHASES):
        totals = document["totals"].get(phase, {"count": 0, "wire_bytes": 0})
        assert cell["predicted"][phase]["count"] == totals["count"]
        assert cell["predicted"][phase]["wire_bytes"] == round(totals["wire_bytes"])
    assert document["time"]["tpot_s"] == pytest.approx(cell["tpot_s"][0], rel=0.01)
    assert document["memory"]["fits"]


def test_compiled_cells_say_how_they_compare_with_the_prediction() -> None:
    compiled = [cell for cell in known_cells() if cell["compiled"]]
    for cell in compiled:
        assert cell["compiled"]["verdict"] in {"equal", "same meaning", "different"}
        if cell["compiled"]["verdict"] == "equal":
            same = {phase: cell["compiled"][phase]["wire_bytes"] for phase in ("prefill", "decode")}
            assert same == {p: cell["predicted"][p]["wire_bytes"] for p in same}


def test_a_failed_search_is_a_cell_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    program = import_module("best_plans")

    def refuse(*_: object, **__: object) -> None:
        raise meshscope.MeshscopeError("no such slice")

    monkeypatch.setattr(program.meshscope, "plan", refuse)
    cell = program.cell_of("Qwen/Qwen3-32B", "v6e", Goal.THROUGHPUT)
    assert cell["refused"] == "no such slice"


def test_a_search_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = import_module("best_plans")
    monkeypatch.setattr(program, "RUNS", tmp_path)
    key = ("Qwen/Qwen3-0.6B", "v6e", Goal.THROUGHPUT)
    first = program.searched(*key)
    monkeypatch.setattr(program, "cell_of", lambda *_: pytest.fail("it was searched again"))
    assert program.searched(*key) == first
    assert program.read_cells([key]) == [first | {"compiled": None}]


def test_a_compiled_program_stays_on_the_page_while_its_command_is_the_same(tmp_path, monkeypatch):
    program = import_module("best_plans")
    cell = next(cell for cell in known_cells() if cell["compiled"])
    monkeypatch.setattr(program, "RUNS", tmp_path)
    key = (cell["model"], cell["chip"], Goal(cell["goal"]))
    file = (
        tmp_path
        / "cells"
        / f"{cell['chip']}-{cell['goal']}-{cell['model'].replace('/', '--')}.json"
    )
    file.parent.mkdir()
    file.write_text(json.dumps(cell | {"compiled": None}))
    assert program.read_cells([key])[0]["compiled"] == cell["compiled"]
    other = cell | {"compiled": None, "options": cell["options"] | {"batch": 7}}
    file.write_text(json.dumps(other))
    assert program.read_cells([key])[0]["compiled"] is None


@pytest.mark.slow
def test_the_site_carries_the_run_folder_of_each_cell(tmp_path: Path) -> None:
    program = import_module("best_plans")
    cell = next(cell for cell in known_cells() if cell["model"] == "Qwen/Qwen3-0.6B")
    program.write_runs(tmp_path / "runs", [cell], n_jobs=1)
    (archive,) = (tmp_path / "runs").glob("*.zip")
    shutil.unpack_archive(archive, tmp_path)
    run = meshscope.open(tmp_path / archive.stem).as_dict()
    assert run["time"]["tpot_s"] == pytest.approx(cell["tpot_s"][0], rel=0.2)
    listed = (tmp_path / "runs" / "runs.js").read_text().partition(" = ")[2].rstrip(";\n")
    compiled = Path(program.RUNS, "compiled", (cell["compiled"] or {"run": "none"})["run"])
    assert json.loads(listed) == {archive.name: compiled.is_dir()}


REBUILT = "Qwen/Qwen2.5-0.5B"


@pytest.fixture
def tables() -> ModuleType:
    return import_module("compiler_tables")


def test_each_cell_is_there_once_and_names_its_versions(tables: ModuleType) -> None:
    cells = tables.stored_cells()
    keys = [(cell["model"], cell["compiler"]) for cell in cells]
    assert len(keys) == len(set(keys))
    known = {c["compiler"]: {"jax": c["jax"], "libtpu": c["libtpu"]} for c in list_compilers()}
    for cell in cells:
        assert cell["model"] in catalog()
        assert cell.get("versions", known[cell["compiler"]]) == known[cell["compiler"]]


def test_the_page_compares_a_model_of_most_families(tables: ModuleType) -> None:
    experiment = import_module("compilers")
    assert tables.COMPILERS == experiment.COMPILERS
    families = {cells[tables.COMPILERS[0]]["family"] for cells in tables.compared().values()}
    assert len(families) >= 12


@pytest.mark.slow
@pytest.mark.tpu
def test_a_cell_is_what_the_compiler_of_the_tests_makes(tables: ModuleType) -> None:
    (name,) = (c["compiler"] for c in list_compilers() if c["is_own"])
    stored = tables.compared()[REBUILT][name]
    made = import_module("compilers").cell_of(REBUILT, name)
    for phase, values in made["phases"].items():
        expected = stored["phases"].pop(phase)
        assert values.pop("step_s") == pytest.approx(expected.pop("step_s"), rel=1e-3)
        assert values.pop("exposed_s") == pytest.approx(expected.pop("exposed_s"), rel=1e-3)
        for group in values["collectives"]:
            group["shape"] = list(group["shape"])
        assert values == expected
    assert made["memory"] == stored["memory"]
