"""`serve-sim`: the verdict on the rate, the same figures as JSON, and refusals."""

import json
from pathlib import Path

import pytest
from tables import table

ASK = ("serve-sim", "Qwen/Qwen3-4B", "--topology", "v6e-8", "--plan", "tp=8", "--requests", "100")


@pytest.mark.parametrize("options", [(), ("--apart", "1:2", "--transfer", "dcn")])
def test_the_answer_has_twelve_lines(meshscope, options: tuple[str, ...]) -> None:
    status, out, err = meshscope(*ASK, "--rate", "2", "--slo", "ttft=0.5,tpot=0.05", *options)
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert (max(map(len, lines)) <= 80, len(lines) <= 12) == (True, True)
    assert "rate      stable: " in out
    assert "requests/s, 100.0% of all, within TTFT 500 ms and TPOT 50 ms" in out
    assert "bound by  the device" in out
    assert "assumed   predicted step times" in out


def test_out_writes_a_file_and_never_over_one(meshscope) -> None:
    ask = (*ASK, "--rate", "2", "--out", "page.html")
    status, out, err = meshscope(*ask)
    assert (status, err) == (0, "wrote page.html\n")
    assert "Sequences in an engine" in Path("page.html").read_text()
    assert out == meshscope(*ask[:-2]).out
    assert "Use --force to replace it" in meshscope(*ask).err
    assert meshscope(*ask, "--force").status == 0
    assert "the ending says what to write" in meshscope(*ask[:-1], "page").err


def test_a_client_with_requests_in_flight_needs_no_rate(meshscope) -> None:
    out = meshscope(*ASK, "--max-concurrency", "4", "--separate-steps", "--full").out
    assert "rate      4 requests in flight; with more, up to " in out
    assert "100 requests, at once, at most 4 in flight" in out
    assert "steps either prefill or decode" in out
    status, apart, _ = meshscope(*ASK, "--max-concurrency", "4", "--apart", "1:2", "--json")
    figures = json.loads(apart)["figures"]
    assert (status, figures["n_finished"]) == (0, 100)
    # Little's law; the last requests leave the client with fewer in flight.
    in_flight = figures["requests_per_s"] * figures["e2e"]["mean_s"]
    assert in_flight == pytest.approx(4, rel=0.05)


def test_full_adds_conditions_behind_the_answer(meshscope) -> None:
    ask = (*ASK, "--rate", "2", "--apart", "1:2")
    short, full = (meshscope(*ask, *option).out for option in ((), ("--full",)))
    kept = [line for line in full.splitlines() if not line.startswith("request ")]
    assert kept[: len(short.splitlines())] == short.splitlines()
    assert max(map(len, kept)) <= 80
    for text in ("100 requests, poisson", "256 sequences and 2,048 tokens", "over DCN; waits "):
        assert text in full
        assert text not in short


def test_a_rate_beyond_the_slice_names_the_stable_one(meshscope) -> None:
    out = meshscope(*ASK, "--rate", "100000", "--requests", "400").out
    assert "NOT STABLE" in out
    document = json.loads(meshscope(*ASK, "--rate", "100000", "--json").out)
    assert document["is_stable"] is False
    assert document["saturated_per_s"] < document["offered_per_s"]
    assert document["figures"]["n_finished"] == 100


def test_the_same_seed_gives_the_same_document(meshscope) -> None:
    ask = (*ASK, "--rate", "5", "--arrivals", "burst", "--lengths", "geometric", "--json")
    assert meshscope(*ask).out == meshscope(*ask).out
    assert meshscope(*ask).out != meshscope(*ask, "--seed", "1").out


def test_a_recorded_load(meshscope) -> None:
    rows = [f"2023-11-16 18:15:{second:02},{300 + second},10" for second in range(20)]
    Path("trace.csv").write_text(
        "\n".join(
            ["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, "2023-11-16 18:16:00,999999,9"]
        )
    )
    ask = ("serve-sim", "Llama-3.1-8B", *ASK[2:], "--arrivals", "trace.csv")  # 131,072 positions
    status, out, err = meshscope(*ask, "--json")
    document = json.loads(out)
    note = "left out: 1 request beyond the context of the model\n"
    assert (status, err, document["left_out"]["n_beyond_context"]) == (0, note, 1)
    assert document["offered_per_s"] == pytest.approx(1.0)


def test_host_time_slows_every_token(meshscope) -> None:
    def tpot_s(*options: str) -> float:
        document = json.loads(meshscope(*ASK, "--rate", "1", "--json", *options).out)
        return document["figures"]["tpot"]["p50_s"]

    assert tpot_s("--host-overhead", "0.01") - tpot_s() == pytest.approx(0.01, rel=0.1)


BENCH = {
    "completed": 60,
    "total_input_tokens": 60 * 512,
    "total_output_tokens": 60 * 32,
    "request_rate": 4.0,
    "burstiness": 1.0,
    "max_concurrency": None,
}


@pytest.mark.parametrize("host_ms", [0.5, 20.0])
def test_a_known_host_time_is_fitted_to_a_benchmark(meshscope, host_ms: float) -> None:
    bench = ("--prompt", "512", "--output", "32", "--requests", "60", "--rate", "4", "--json")
    known = json.loads(meshscope(*ASK, *bench, "--host-overhead", str(host_ms / 1e3)).out)
    itl_ms = known["figures"]["itl"]["p50_s"] * 1e3
    Path("bench.json").write_text(json.dumps(BENCH | {"median_itl_ms": itl_ms}))
    fitted = json.loads(meshscope(*ASK, *bench, "--calibrate-host", "bench.json").out)
    # 0.5 % of the ITL, and the difference between two arrivals of the same rate
    assert fitted["policy"]["host_s"] == pytest.approx(host_ms / 1e3, abs=0.02 * itl_ms / 1e3)
    out = meshscope(*ASK, "--rate", "4", "--calibrate-host", "bench.json").out
    assert ("the host: median ITL" in out, "the device: median ITL" in out) == (
        host_ms > 5,
        host_ms < 5,
    )


@table
def test_another_file_than_a_benchmark_is_refused(meshscope, text: str, message: str) -> None:
    Path("bench.json").write_text(text)
    status, out, err = meshscope(*ASK, "--rate", "4", "--calibrate-host", "bench.json")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert message in err
