"""A simulation over time: the samples, the page, the plot and the traces."""

import json
from pathlib import Path

import numpy as np
import pytest

import meshscope
from meshscope.api.serve import ServingRun
from meshscope.errors import RunError, SpecError
from meshscope.reports.html.serving_page import serving_charts
from meshscope.serving.engine import BatchingEngine
from meshscope.serving.simulation import MAX_SAMPLES

ASK = {"topology": "v6e-4", "plan": "tp=4", "requests": 120}


@pytest.fixture(scope="module")
def served() -> ServingRun:
    return meshscope.serve_sim("Qwen/Qwen3-4B", apart="2:1", rate=40.0, output=32, **ASK)


def events(served: ServingRun, path: Path) -> list[dict]:
    served.save(path)
    return json.loads(path.read_text())["traceEvents"]


def traces(served: ServingRun) -> list[BatchingEngine]:
    return [one for ones in served.outcome.simulation.engines.values() for one in ones]


def test_the_means_of_a_timeline_are_those_of_the_samples(served: ServingRun) -> None:
    trace = traces(served)[-1]
    assert len(trace.samples) > MAX_SAMPLES
    pool = served.outcome.result.pools[-1]
    assert len(pool.timeline) == MAX_SAMPLES
    weights_s = np.diff(np.append(trace.samples[:, 0], trace.now_s))
    expected = float(trace.samples[:, 1] @ weights_s) / (trace.now_s - trace.samples[0, 0])
    assert np.mean([sample.n_running for sample in pool.timeline]) == pytest.approx(expected)


def test_steps_of_the_trace_take_the_busy_time(served: ServingRun, tmp_path: Path) -> None:
    slices = [e for e in events(served, tmp_path / "t.json") if e["ph"] == "X"]
    steps = [e for e in slices if e["pid"] == 1]
    busy_us = sum(one.busy_s for one in traces(served)) * 1e6
    assert sum(e["dur"] for e in steps) == pytest.approx(busy_us, rel=1e-6)
    assert {e["name"] for e in steps} == {"prefill", "decode"}
    n_tokens = sum(e["args"]["prompt_tokens"] for e in steps)
    assert n_tokens == served.outcome.simulation.requests.arrival_s.size * 1024


def test_each_request_is_on_a_line_of_the_trace(served: ServingRun, tmp_path: Path) -> None:
    slices = [e for e in events(served, tmp_path / "t.json") if e["ph"] == "X" and e["pid"] == 2]
    requests = served.outcome.simulation.requests
    firsts = {e["args"]["request"]: e["dur"] for e in slices if e["name"] == "first token"}
    ttft_us = (requests.first_token_s - requests.arrival_s) * 1e6
    assert [firsts[i] for i in range(len(ttft_us))] == pytest.approx(ttft_us, abs=1e-3)
    by_line: dict[int, list[tuple[float, float]]] = {}
    for e in slices:
        by_line.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in by_line.values():
        ends = [end for _, end in sorted(spans)]
        assert all(
            end <= start + 1e-3 for end, (start, _) in zip(ends, sorted(spans)[1:], strict=False)
        )


def test_counters_follow_the_samples(served: ServingRun, tmp_path: Path) -> None:
    counters = [e for e in events(served, tmp_path / "t.json") if e["ph"] == "C"]
    used = [e["args"]["blocks"] for e in counters if e["name"] == "decode: cache in use"]
    assert used == traces(served)[-1].samples[:, 3].tolist()
    assert {e["name"].split(":")[0] for e in counters} == {"prefill 0", "prefill 1", "decode"}


def test_the_page_has_the_answer_and_its_charts(served: ServingRun, tmp_path: Path) -> None:
    served.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "Qwen/Qwen3-4B: 2 x v6e:2x2 tp=4 prefill, 1 x v6e:2x2 tp=4 decode" in text
    for part in (
        "stable: ",
        "Sequences in an engine",
        "Cache in use",
        "Tokens of a step",
        "over DCN",
    ):
        assert part in text
    start = text.index('<script type="application/json" id="data">')
    data = json.loads(text[text.index(">", start) + 1 : text.index("</script>", start)])
    charts = list(serving_charts(served.outcome))
    assert [one["kind"] for one in data["charts"]] == ["series"] * len(charts)
    lines = data["charts"][2]["spec"]["layer"][0]["data"]["values"]
    assert [line["name"] for line in lines] == ["prefill: prompt", "decode: decoded"]


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("p.png", b"\x89PNG"),
        ("p.svg", b"<svg"),
        ("t.json.gz", b"\x1f\x8b"),
    ],
)
def test_the_ending_says_what_is_written(served, tmp_path, name, start) -> None:
    served.save(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(RunError, match="Use force=True to replace it"):
        served.save(tmp_path / name)
    served.save(tmp_path / name, force=True)


def test_another_ending_is_refused_before_anything_is_written(served, tmp_path) -> None:
    with pytest.raises(SpecError, match=r"the ending says what to write\. Use \.html, \.png"):
        served.save(tmp_path / "p.pdf")
    assert list(tmp_path.iterdir()) == []


def test_only_instances_that_decode_reserve_room_for_outputs() -> None:
    served = meshscope.serve_sim(
        "Qwen/Qwen3-4B", apart="1:1", rate=10.0, reserve_output=1.0, **ASK | {"requests": 4}
    )
    assert served.outcome.prefill.pool.policy.reserved_frac == 0.0
    assert served.outcome.main.pool.policy.reserved_frac == 1.0
