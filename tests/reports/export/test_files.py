"""Exports are there whole or not at all, and replace nothing unasked."""

import csv
import json
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import yaml
from card_template import TEMPLATE, faults_of
from made import varied
from tables import table

from meshscope.analysis.catalog import events_of
from meshscope.api.export import write_csv
from meshscope.errors import RunError
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Measured
from meshscope.events.schema import POLARS_SCHEMA, table_of
from meshscope.files import new_directory, new_file
from meshscope.reports.export.card import card_of, yaml_of


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    for maker in (new_file, new_directory):
        with pytest.raises(RunError), maker(tmp_path / "x", force=False) as partial:
            (partial / "half" if maker is new_directory else partial).read_text()
    assert left(tmp_path) == []


def test_a_folder_that_is_no_export_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").write_text("")
    with pytest.raises(RunError, match="never replaced"), new_directory(tmp_path / "x", force=True):
        pass
    assert left(tmp_path / "x") == ["mine"]


def test_a_folder_in_the_way_of_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(RunError, match="is a folder"), new_file(tmp_path / "x", force=True):
        pass


def rows_of(path: Path) -> list[dict[str, str]]:
    limit = csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    finally:
        csv.field_size_limit(limit)  # of the whole process: other tests rely on it


def test_parquet_and_csv_have_every_row_and_column(make_run, tmp_path: Path) -> None:
    run = make_run()
    events_of(run).write_parquet(tmp_path / "t.parquet")
    assert pl.read_parquet(tmp_path / "t.parquet").equals(table_of(run.rows))
    run = make_run()
    write_csv(run, tmp_path / "t.csv")
    rows = rows_of(tmp_path / "t.csv")
    assert len(rows) == len(run.rows)
    assert list(rows[0]) == list(POLARS_SCHEMA)
    assert json.loads(rows[0]["groups"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [float(r["wire_bytes"]) for r in rows] == [float(r.wire_bytes) for r in run.rows]
    assert {r["dur_s"] for r in rows} == {""}


def test_hostile_texts_are_cut_and_start_no_formula(hostile_run, tmp_path: Path) -> None:
    from dataclasses import replace  # noqa: PLC0415

    formula = replace(
        hostile_run.rows[0], hlo_name='=HYPERLINK("http://x")', axis="@x", dtype="-1+1"
    )
    write_csv(replace(hostile_run, rows=(formula, *hostile_run.rows)), tmp_path / "t.csv")
    rows = rows_of(tmp_path / "t.csv")
    assert len(rows) == len(hostile_run.rows) + 1
    assert (rows[0]["hlo_name"][:2], rows[0]["axis"], rows[0]["dtype"]) == ("'=", "'@x", "'-1+1")
    assert max(len(value) for row in rows for value in row.values()) < 2_100
    assert not {"\x00", "\x1b", "\n"} & set(rows[1]["hlo_name"])


def test_every_known_field_is_filled(make_run) -> None:
    card = yaml.safe_load(yaml_of(card_of(make_run(n_layers=32))))
    assert card["hf_url"] == "https://huggingface.co/meta-llama/Llama-3.1-8B"
    workload, executor = card["workload"], card["Model-executor"]
    assert workload["model"] == {
        "phase": "inference", "moe": False, "granularity": "model_fwd",
        "model_family": "llama-3.1-8b", "precision": "bf16", "epochs": None, "iteration": None,
        "model_arch": {
            "num_params": 8_030_261_248, "num_params_active": 8_030_261_248,
            "num_params_embedding": 525_336_576, "num_layers": 32, "num_heads": 32, "head_dim": 128,
        },
    }  # fmt: skip
    assert workload["data"] == {
        "batch_size": 8, "seq_len": 64, "input_len": 64, "output_len": 10, "dataset": "none: shapes only, no program was run",
    }  # fmt: skip
    assert workload["hardware"]["xpu_spec"] == {
        "type": "TPU", "model": "tpu_v6e", "total_count": 8, "count_per_node": 8,
    }  # fmt: skip
    assert workload["hardware"]["network_topo"]["bandwidth_gbps"] == [None, 2880.0]
    assert executor["model_plan_parallelization"] == {
        "dp_replicate": 2, "dp_shard": 1, "tp": 4, "pp": 1, "cp": 1, "ep": 1, "pp_mb": 1,
    }  # fmt: skip
    assert executor["protocol_selection"] == ["ici"]


@table
def test_cards_of_all_models_and_slices_are_valid(make_run, model, plan, topology) -> None:
    card = yaml.safe_load(yaml_of(card_of(make_run(model, plan=plan, topology=topology))))
    assert list(faults_of(card)) == []


def test_a_measured_run_has_its_input_and_number_of_steps(make_run) -> None:
    run = make_run(plan="tp=8", topology="cpu:8")
    measured = Measured(
        requests=(), n_profiled_steps={Phase.PREFILL: 1, Phase.DECODE: 4}, loads=(), times=(),
        findings=(), costs=(),
    )  # fmt: skip
    versions = {"jaxlib": "0.10.2", "libtpu": "0.0.42.1"}
    changes = {"source": Source.MEASURED, "versions": versions}
    live = varied(run, manifest=changes, measured=measured)
    card = card_of(live)
    assert card["workload"]["model"]["iteration"] == 5
    assert card["workload"]["data"]["dataset"] == "random tokens"
    assert card["workload"]["hardware"]["xpu_spec"]["count_per_node"] == 8
    assert card["workload"]["hardware"]["driver_version"] is None
    library = card["Model-executor"]["communication_library"]
    assert (library["name"], library["version"]) == ("xla", "jaxlib 0.10.2")
    with_text = card_of(replace(live, measured=replace(measured, texts=("It was",))))
    assert with_text["workload"]["data"]["dataset"] == "one prompt of text"


def test_a_microbatch_is_a_number_of_sequences(make_run) -> None:
    plan = card_of(make_run(plan="pp=2,tp=4"))["Model-executor"]["model_plan_parallelization"]
    assert (plan["pp"], plan["pp_mb"]) == (2, 4)


@table
def test_a_fault_has_its_path(make_run, path, value, fault: str) -> None:
    card = deepcopy(card_of(make_run()))
    inner = card
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    (message,) = faults_of(card)
    assert fault in message


def test_a_missing_field_is_named(make_run) -> None:
    card = deepcopy(card_of(make_run()))
    del card["workload"]["data"]["output_len"]
    assert list(faults_of(card)) == ["card.workload.data: 'output_len' is missing"]


def test_hostile_texts_stay_texts(hostile_run) -> None:
    text = yaml_of(card_of(hostile_run))
    card = yaml.safe_load(text)
    assert list(faults_of(card)) == []
    assert len(text) < 20_000
    assert not {"\x00", "\x1b", "\u202e"} & set(
        card["Model-executor"]["communication_library"]["env"]["XLA_FLAGS"]
    )


def test_the_table_has_every_section_of_the_template() -> None:
    assert list(TEMPLATE) == [
        "version", "description", "hf_url", "trace_url", "contributor", "contact", "workload",
        "Model-executor", "metric_source",
    ]  # fmt: skip
