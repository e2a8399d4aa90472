"""What --json prints: exactly the documented fields, and sums that agree with the rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made import varied
from tables import stored

import meshscope
from meshscope.analysis.comparison import compare_sources, explain, source_side
from meshscope.analysis.join import compare
from meshscope.events.enums import Source
from meshscope.events.schema import POLARS_SCHEMA
from meshscope.model.layers import ShallowLayers
from meshscope.plans.experiment_record import LayerForm
from meshscope.reports.document import comparison_document, metrics_document, run_document
from meshscope.reports.sweep import summary_row
from meshscope.store.run import RunRecord

FIELDS: dict[str, list[str] | None] = stored(Path(__file__).with_suffix(".yaml"))["fields"]


@pytest.fixture(params=["predicted_run", "compiled_run"])
def run(request: pytest.FixtureRequest) -> RunRecord:
    return request.getfixturevalue(request.param)


def test_the_document_has_exactly_the_documented_fields_of_the_strongest_source_without_loss(
    run: RunRecord,
) -> None:
    document = run_document(run)
    assert list(document) == list(FIELDS)
    for name, fields in FIELDS.items():
        assert fields is None or set(document[name]) == set(fields)
    for total in document["totals"].values():
        assert set(total) == {"count", "payload_bytes", "wire_bytes", "request"}
    for row in document["collectives"]:
        assert set(row) == {*POLARS_SCHEMA, "layers"}
    document = run_document(run)
    assert {row["source"] for row in document["collectives"]} == {document["source"]}
    assert document["source"] == run.manifest.source
    document = run_document(replace(run, path=Path("runs/one")))
    assert json.loads(json.dumps(document, allow_nan=False)) == _listed(document)
    assert document["run"] == "runs/one"


def test_collectives_add_up_to_the_totals(run: RunRecord) -> None:
    document = run_document(run)
    for phase, total in document["totals"].items():
        rows = [row for row in document["collectives"] if row["phase"] == phase]
        for figures, key in ((total, None), (total["request"], "n_steps")):
            times = [row["count"] * (1 if key is None else row[key]) for row in rows]
            assert figures["count"] == sum(times)
            for name in ("payload_bytes", "wire_bytes"):
                values = [row[name] for row in rows]
                assert figures[name] == sum(t * v for t, v in zip(times, values, strict=True))


def test_the_verdict_and_metrics_have_every_source(predicted_run, compiled_run) -> None:
    assert run_document(predicted_run)["verdict"] is None
    fields = {"verdict", "summary", "is_time_within", "time_summary", "times"}
    assert set(run_document(compiled_run)["verdict"]) == fields
    metrics = metrics_document(compiled_run)
    assert set(metrics["step_totals"]) == {"predicted", "compiled"}
    assert metrics["request_totals"]["predicted"]["decode"]["count"] == 9
    assert metrics["verdict"]["verdict"] == "different"
    assert metrics_document(predicted_run)["verdict"] is None


def _listed(value: Any) -> Any:
    """Tuples as JSON reads them back."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def test_what_is_unknown_is_null_and_what_is_not_there_zero(predicted_run: RunRecord) -> None:
    document = run_document(replace(predicted_run, memory={}))
    assert set(document["memory"].values()) == {None}
    assert set(document["time"].values()) == {None}
    zero = {"count": 0, "payload_bytes": 0, "wire_bytes": 0}
    totals = run_document(replace(predicted_run, rows=()))["totals"]
    assert totals == dict.fromkeys(("prefill", "decode"), zero | {"request": zero})


def test_sums_of_which_a_part_is_unknown_say_so(predicted_run: RunRecord) -> None:
    known = replace(predicted_run.rows[0], count=2)
    lost = replace(known, payload_bytes=None, wire_bytes=None, count=3)
    run = replace(predicted_run, rows=(known, lost))
    total = run_document(run)["totals"]["prefill"]
    assert (total["count"], total["payload_bytes"]) == (5, 2 * (known.payload_bytes or 0))
    assert total["n_unsized"] == total["request"]["n_unsized"] == 3
    row = summary_row("run", run)
    names = ("prefill_count", "prefill_wire_bytes", "request_wire_bytes")
    assert [row[name] for name in names] == [5, None, None]


def test_a_prediction_is_that_of_unrolled_layers() -> None:
    """A program of 28 layers compiles as a loop, and is timed unrolled."""
    run = meshscope.predict("Qwen/Qwen3-0.6B", topology="v6e-4", plan="tp=4").record
    assert run.manifest.experiment.layers_are is LayerForm.UNROLLED
    compiled = varied(run, experiment={"layers_are": LayerForm.SCANNED})
    side = source_side(run, Source.PREDICTED)
    (setting,) = explain(replace(side, run=compiled), side).differences
    assert (setting.name, setting.left, setting.right) == ("layers are", "scanned", "unrolled")
    timed = varied(compiled, manifest={"timed_layers": ShallowLayers(layers=(0, 1), folds=())})
    assert not explain(replace(side, run=timed), side).differences


def test_what_has_no_phase_stands_under_unknown(predicted_run: RunRecord) -> None:
    lost = replace(predicted_run.rows[0], phase=None, axis_reason="no scope")
    document = run_document(replace(predicted_run, rows=(lost,)))
    assert document["totals"]["unknown"]["count"] == 1
    assert document["unattributed"] == {
        "count": 1,
        "payload_bytes": lost.payload_bytes,
        "reasons": {"no scope": 1},
    }


def test_differences_are_added_up_for_a_step_and_for_the_request(compiled_run: RunRecord) -> None:
    comparison = compare_sources(compiled_run)
    assert comparison is not None
    sides = {"left": {"name": "predicted"}, "right": {"name": "compiled"}}
    differences = comparison_document(comparison, **sides)["differences"]
    nothing = {"count": 0, "payload_bytes": 0, "wire_bytes": 0}
    assert set(differences["prefill"]) == {"costlier", "changed", "extra"}
    assert differences["prefill"]["extra"] == {
        "count": 1,
        "step": {"left": nothing, "right": {"count": 1, "payload_bytes": 16, "wire_bytes": 12}},
        "request": {"left": nothing, "right": {"count": 1, "payload_bytes": 16, "wire_bytes": 12}},
    }
    once = {"count": 1, "payload_bytes": 2048, "wire_bytes": 1536}
    nine = {"count": 9, "payload_bytes": 9 * 2048, "wire_bytes": 9 * 1536}
    assert differences["decode"] == {
        "missing": {
            "count": 1,
            "step": {"left": once, "right": nothing},
            "request": {"left": nine, "right": nothing},
        }
    }


def test_the_comparison_names_source_line_and_layers_of_what_was_not_asked_for(compiled_run):
    comparison = compare_sources(compiled_run)
    assert comparison is not None
    sides = {"left": {"name": "predicted"}, "right": {"name": "compiled"}}
    document = comparison_document(comparison, **sides)
    rows = [
        (row["verdict"], row["layers"], row["right"]["source_line"])
        for row in document["rows"]
        if row["verdict"] in {"extra", "changed"}
    ]
    line = "/home/me/src/meshscope/programs/decoder.py:7"
    assert rows == [("extra", [], line), ("changed", [1], line)]
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize(("extra", "word"), [(0, "equal"), (1, "same meaning")])
def test_the_verdict_is_a_word_for_programs(predicted_run, extra, word) -> None:
    left = predicted_run.rows
    right = (replace(left[0], wire_bytes=left[0].wire_bytes + extra), *left[1:])
    sides = {"left": {"name": "a"}, "right": {"name": "b"}}
    assert comparison_document(compare(left, right), **sides)["verdict"] == word
