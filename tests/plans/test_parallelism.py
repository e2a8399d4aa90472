"""What causes a collective, by the plan that it belongs to."""

import json
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import polars as pl
import pytest

import meshscope
from meshscope.api.compare import compare
from meshscope.events.enums import Part, Phase, Source
from meshscope.plans.plan import parallelism_of, parse_plan
from meshscope.store.write import sha256

DENSE, MIXTURE = "Qwen/Qwen3-4B", "deepseek-ai/DeepSeek-V2-Lite"


class Case(NamedTuple):
    model: str
    plan: str
    expected: dict[str, set[str]]  # parallelism: parts of a prefill


CASES = (
    Case(DENSE, "tp=8", {"tp": {"embed", "attn", "mlp", "lm_head"}}),
    Case(DENSE, "dp=2,tp=4", {"tp": {"embed", "attn", "mlp", "lm_head"}}),
    Case(DENSE, "tp=8,sp", {"sp": {"embed", "attn", "mlp", "lm_head"}, "tp": {"lm_head"}}),
    Case(
        DENSE,
        "fsdp=2,tp=4",
        {
            "fsdp": {"embed", "attn", "mlp"},
            "tp": {"embed", "attn", "mlp", "lm_head"},
        },
    ),
    Case(
        DENSE,
        "cp=2,tp=4",
        {"cp": {"attn", "lm_head"}, "tp": {"embed", "attn", "mlp", "lm_head"}},
    ),
    Case(
        DENSE,
        "pp=2,tp=4",
        {"pp": {"stage", "sample"}, "tp": {"embed", "attn", "mlp", "lm_head"}},
    ),
    Case(
        MIXTURE,
        "dp=2,tp=4,ep=8",
        {
            "ep": {"moe.dispatch", "moe.combine"},
            "tp": {"embed", "attn", "mlp", "moe.shared", "lm_head"},
        },
    ),
    Case(
        MIXTURE,
        "dp=2,tp=4,ep=2",
        {
            "ep": {"moe.dispatch", "moe.combine"},
            "tp": {"embed", "attn", "mlp", "moe.combine", "lm_head"},
        },
    ),
    Case(
        MIXTURE,
        "tp=8,ep=8",
        {"ep": {"moe.combine"}, "tp": {"embed", "attn", "mlp", "lm_head"}},
    ),
    Case(
        MIXTURE,
        "tp=8,ep=8,sp",
        {
            "ep": {"moe.combine"},
            "sp": {"embed", "attn", "mlp", "moe.dispatch", "lm_head"},
            "tp": {"lm_head"},
        },
    ),
)


def _predicted(model: str, plan: str) -> meshscope.Run:
    return meshscope.predict(model, topology="v6e-8", plan=plan, batch=8, prompt=256, layers=4)


@pytest.mark.parametrize("case", CASES, ids=[f"{case.model}-{case.plan}" for case in CASES])
def test_each_predicted_row_has_the_parallelism_that_causes_it(case: Case):
    rows = _predicted(case.model, case.plan).record.rows
    parallelisms: dict[str | None, set[str]] = defaultdict(set)
    for row in rows:
        if row.phase is Phase.PREFILL:
            parallelisms[row.parallelism].add(str(row.part))
    assert parallelisms == case.expected


@pytest.mark.parametrize("source", [Source.COMPILED, Source.MEASURED])
def test_rows_of_any_source_are_classified_alike(source: Source):
    run = _predicted(MIXTURE, "dp=2,tp=4,ep=8")
    plan = parse_plan("dp=2,tp=4,ep=8")
    for row in run.record.rows:
        seen = replace(row, source=source, opcode="all-reduce", parallelism=None)
        assert parallelism_of(seen, plan) == row.parallelism


def test_the_parallelism_of_an_unknown_axis_is_unknown():
    row = next(r for r in _predicted(DENSE, "tp=8").record.rows if r.part is Part.ATTN)
    assert parallelism_of(replace(row, axis=None), parse_plan("tp=8")) is None
    assert parallelism_of(replace(row, axis="model"), None) is None
    assert parallelism_of(replace(row, axis="dp+tp"), None) == "dp+tp"


def test_a_stored_run_can_be_grouped_by_parallelism(tmp_path):
    folder = tmp_path / "run"
    run = meshscope.predict(
        MIXTURE, topology="v6e-8", plan="dp=2,tp=4,ep=8", layers=2, batch=8, out=folder
    )
    query = "select parallelism, sum(wire_bytes * count) from collectives group by parallelism"
    sums = dict(meshscope.open(folder).sql(query).rows())
    assert sums == {
        name: pytest.approx(
            sum(row.wire_bytes * row.count for row in run.record.rows if row.parallelism == name)
        )
        for name in ("ep", "tp")
    }


def test_a_run_of_an_older_version_opens_with_its_parallelism(tmp_path):
    folder = tmp_path / "run"
    written = meshscope.predict(DENSE, topology="v6e-8", plan="tp=8,sp", layers=2, out=folder)
    table = pl.read_parquet(folder / "events.parquet")
    table.drop("parallelism").write_parquet(folder / "events.parquet")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["digest"]
    manifest["files"]["events.parquet"] = sha256(folder / "events.parquet")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert meshscope.open(folder)[0].record.rows == written.record.rows


def test_a_comparison_of_two_plans_names_the_axes_of_each():
    """The devices of fsdp=8 are those of pp=2,tp=4, and its traffic is still of fsdp."""
    pipeline, gathered = (_predicted(DENSE, plan) for plan in ("pp=2,tp=4", "fsdp=8"))
    comparison = compare(pipeline, gathered)
    axes = {m.right.axis for m in comparison.comparison.matches if m.right is not None}
    assert axes == {"fsdp"}
