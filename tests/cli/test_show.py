"""`show` and `compare`: the answer of one run, and what differs between two."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from tables import table
from tests.cli.conftest import words_of

from meshscope import open as open_runs

MAX_LINES = 12  # in the answer at 80 columns


@table
def test_the_answer_is_short_and_first(meshscope, ask: tuple[str, ...]) -> None:
    out = meshscope("predict", *ask).out
    answer = out.partition("\n\n")[0].splitlines()
    assert len(answer) <= MAX_LINES
    assert max(map(len, out.splitlines())) <= 80
    labels = [line.split("  ")[0] for line in answer]
    first = labels.index("TTFT, prefill")
    assert labels[first : first + 4] == ["TTFT, prefill", "TPOT, decode", "throughput", "fits"]


def test_times_without_an_interval_say_why_in_text_json_plan_and_report(meshscope) -> None:
    reason = "no published times of collectives on h100 give the error of the model"
    ask = words_of("predict Qwen/Qwen3-4B --topology h100:2 --plan tp=2 --out gpu")
    out = " ".join(meshscope(*ask).out.split())
    assert out.count("(no interval)") == 2
    assert out.count(f"predicted times have no interval: {reason}") == 1
    assert "unknown: at least 3.76 of 74.51 GiB without temporaries, room for at most" in out
    assert json.loads(meshscope("show", "gpu", "--json").out)["time"]["no_interval"] == reason
    meshscope("report", "gpu", "--out", "page.html")
    page = Path("page.html").read_text()
    assert (page.count(reason), page.count("no interval; predicted")) == (1, 2)
    plan = words_of("plan Qwen/Qwen3-4B --topology h100:2 --batch 2")
    assert f"times have no interval: {reason}" in " ".join(meshscope(*plan).out.split())
    assert json.loads(meshscope(*plan, "--json").out)["no_interval"] == reason
    known = words_of("predict Qwen/Qwen3-4B --topology v6e-4 --plan tp=4 --json")
    assert json.loads(meshscope(*known).out)["time"]["no_interval"] is None


@pytest.mark.usefixtures("here")
def test_python_has_the_throughput_of_json(meshscope) -> None:
    document = json.loads(meshscope("show", "a", "--json").out)
    throughput = open_runs("a").throughput
    assert asdict(throughput) == document["throughput"]
    assert throughput.decode_tokens_per_s == pytest.approx(2 / document["time"]["decode_step_s"])


@pytest.mark.usefixtures("here")
def test_sequence_parallelism_is_told_as_changed_and_extra(meshscope) -> None:
    """Each all-reduce of prefill becomes a reduce-scatter, and an all-gather is added.

    It sends as many bytes for a layer, in twice the collectives.
    """
    document = json.loads(meshscope("compare", "a", "b", "--json").out)
    prefill = [
        (row["verdict"], row["right"]["part"], row["layers"], row["note"])
        for row in document["rows"]
        if (row["right"] or row["left"])["phase"] == "prefill" and row["verdict"] != "equal"
    ]
    changed = "all_reduce -> reduce_scatter"
    expected = {"changed": changed, "extra": None}
    for part in ("attn", "mlp"):
        for verdict, note in expected.items():
            assert (verdict, part, [0, 1, 2], note) in prefill
    side = {"source": "predicted", "other_operations": []}
    assert document["left"] == {"name": "A", "run": "a", **side}
    assert document["verdict"] == "different"
    explanation = document["explanation"]
    places = {(p["axis"], p["part"]): p for p in explanation["phases"]["prefill"]["places"]}
    assert places["tp", "mlp"]["right"]["kinds"] == {"all_gather": 3, "reduce_scatter": 3}
    assert places["tp", "mlp"]["wire_bytes_change"] == 0
    assert explanation["sentences"]
