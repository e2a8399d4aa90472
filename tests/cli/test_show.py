"""`show`: the answer of one run, and several runs ranked."""

import json
from dataclasses import asdict

import pytest
from tables import table

from meshscope import open as open_runs

ASK = ("Qwen/Qwen3-32B", "--topology", "v6e-8", "--layers", "4")
MAX_LINES = 12  # in the answer at 80 columns


def keep(meshscope, name: str, *options: str) -> None:
    assert meshscope("predict", *ASK, *options, "--out", name).status == 0


@table
def test_the_answer_is_short_and_first(meshscope, ask: tuple[str, ...]) -> None:
    out = meshscope("predict", *ask).out
    answer = out.partition("\n\n")[0].splitlines()
    assert len(answer) <= MAX_LINES
    assert max(map(len, out.splitlines())) <= 80
    labels = [line.split("  ")[0] for line in answer]
    first = labels.index("TTFT, prefill")
    assert labels[first : first + 4] == ["TTFT, prefill", "TPOT, decode", "throughput", "fits"]


def test_full_adds_totals_times_and_memory(meshscope) -> None:
    keep(meshscope, "a", "--plan", "tp=8")
    short, full = meshscope("show", "a").out, meshscope("show", "a", "--full").out
    for words in ("time of one step", "memory of one device", "groups", "unattributed: none"):
        assert words in full
        assert words not in short


@pytest.mark.parametrize("paths", [("a", "b"), ("*",), (".",)], ids=["named", "pattern", "folder"])
def test_several_runs_are_ranked_by_their_request(meshscope, paths: tuple[str, ...]) -> None:
    """Layers split over eight devices are faster than over four, twice."""
    keep(meshscope, "a", "--plan", "dp=2,tp=4", "--batch", "2")
    keep(meshscope, "b", "--plan", "tp=8", "--batch", "2")
    lines = meshscope("show", *paths).out.splitlines()
    assert "b serves the request fastest: " in " ".join(lines[:2])
    assert [line.split()[0] for line in lines if line.startswith(("a ", "b "))] == ["b", "a"]
    assert lines[-1].startswith("ranked by end-to-end time of the request")
    document = json.loads(meshscope("show", *paths, "--json").out)
    assert [run["run"] for run in document["runs"]] == ["b", "a"]
    assert [run["is_best"] for run in document["runs"]] == [True, False]
    assert {run["work"] for run in document["runs"]} == {
        "Qwen/Qwen3-32B, 4 layers, batch 2, prompt 128, output 128"
    }


def test_options_of_one_run_are_refused_for_several(meshscope) -> None:
    keep(meshscope, "a", "--plan", "tp=8")
    keep(meshscope, "b", "--plan", "tp=8")
    status, _, err = meshscope("show", "a", "b", "--metrics")
    assert status == 2
    assert "take one run" in err


def test_missing_times_have_a_reason(meshscope) -> None:
    out = meshscope("predict", "Qwen/Qwen3-4B", "--topology", "cpu:4", "--plan", "tp=4").out
    assert "- times are unknown: cpu has no published rates; a --profile supplies them" in out


def test_times_without_an_interval_say_why_in_text_json_plan_and_report(meshscope, tmp_path):
    reason = "no published times of collectives on h100 give the error of the model"
    options = ("Qwen/Qwen3-4B", "--topology", "h100:2", "--plan", "tp=2")
    out = " ".join(meshscope("predict", *options, "--out", "gpu").out.split())
    assert out.count("(no interval)") == 2
    assert out.count(f"predicted times have no interval: {reason}") == 1
    assert "unknown: at least 3.76 of 74.51 GiB without temporaries, room for at most" in out
    document = json.loads(meshscope("show", "gpu", "--json").out)
    assert document["time"]["no_interval"] == reason
    page = tmp_path / "page.html"
    meshscope("report", "gpu", "--out", str(page))
    assert page.read_text().count(reason) == 1
    assert page.read_text().count("no interval; predicted") == 2
    plan = ("plan", "Qwen/Qwen3-4B", "--topology", "h100:2", "--batch", "2")
    assert f"times have no interval: {reason}" in " ".join(meshscope(*plan).out.split())
    assert json.loads(meshscope(*plan, "--json").out)["no_interval"] == reason
    known = ("predict", "Qwen/Qwen3-4B", "--topology", "v6e-4", "--plan", "tp=4", "--json")
    assert json.loads(meshscope(*known).out)["time"]["no_interval"] is None


def test_a_request_of_one_token_has_no_decode(meshscope) -> None:
    keep(meshscope, "a", "--plan", "tp=8", "--output", "1")
    out = meshscope("show", "a").out
    assert "TTFT, prefill" in out
    assert "decode" not in out.partition("\n\n")[0]


def test_python_has_the_throughput_of_json(meshscope) -> None:
    keep(meshscope, "a", "--plan", "tp=8", "--batch", "16")
    document = json.loads(meshscope("show", "a", "--json").out)
    throughput = open_runs("a").throughput
    assert asdict(throughput) == document["throughput"]
    assert throughput.decode_tokens_per_s == pytest.approx(16 / document["time"]["decode_step_s"])


def test_a_plan_that_does_not_fit_says_so_in_the_answer(meshscope) -> None:
    """70 billion weights of two bytes need 32.9 GiB on each of four devices, which have 31.25."""
    ask = ("meta-llama/Llama-3.3-70B", "--topology", "v6e-4", "--plan", "tp=4")
    status, out, _ = meshscope("predict", *ask)
    answer = out.partition("\n\n")[0]
    assert status == 0
    assert "fits           NO: " in answer
    assert "of 31.25 GiB, no batch fits" in answer
    assert " to fit: " in answer
