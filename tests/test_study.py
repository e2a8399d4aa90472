"""The dataset of the study is what `predict` says, and its page says what the dataset does."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "evidence" / "study"
NEAR = 0.01
RENEW = "run 'python experiments/study_compiled.py --predictions', then cog as in 'make study'"


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))


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
