"""`serve-sim`: the verdict on the rate, the same figures as JSON, and fits to a benchmark."""

import json
from pathlib import Path

import pytest
from tests.cli.conftest import words_of


def simulated(meshscope, line: str) -> dict:
    return json.loads(meshscope(*words_of(f"$serve {line} --json")).out)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--apart 1:2 --transfer dcn"])
def test_the_answer_has_twelve_lines(meshscope, options: str) -> None:
    status, out, err = meshscope(*words_of(f"$serve --rate 2 --slo ttft=0.5,tpot=0.05 {options}"))
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert (max(map(len, lines)) <= 80, len(lines) <= 12) == (True, True)
    assert "rate      stable: " in out
    assert "requests/s, 100.0% of all, within TTFT 500 ms and TPOT 50 ms" in out
    assert "bound by  the device" in out
    assert "basis     an ideal engine" in out


@pytest.mark.slow
def test_full_adds_conditions_behind_the_answer(meshscope) -> None:
    ask = words_of("$serve --rate 2 --apart 1:2")
    short, full = (meshscope(*ask, *option).out for option in ((), ("--full",)))
    kept = [line for line in full.splitlines() if not line.startswith("request ")]
    assert kept[: len(short.splitlines())] == short.splitlines()
    assert max(map(len, kept)) <= 80
    for text in ("100 requests, poisson", "256 sequences and 2,048 tokens", "over DCN; waits "):
        assert text in full
        assert text not in short


def test_a_recorded_load(meshscope) -> None:
    rows = [f"2023-11-16 18:15:{second:02},{300 + second},10" for second in range(20)]
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, "2023-11-16 18:16:00,999999,9"]
    Path("trace.csv").write_text("\n".join(rows))
    line = "serve-sim Llama-3.1-8B $tp8 --requests 100 --arrivals trace.csv --json"
    status, out, err = meshscope(*words_of(line))  # 131,072 positions
    document = json.loads(out)
    note = "left out: 1 request beyond the context of the model\n"
    assert (status, err, document["left_out"]["n_beyond_context"]) == (0, note, 1)
    assert document["offered_per_s"] == pytest.approx(1.0)


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
    bench = "--prompt 512 --output 32 --requests 60 --rate 4"
    known = simulated(meshscope, f"{bench} --host-overhead {host_ms / 1e3}")
    itl_ms = known["figures"]["itl"]["p50_s"] * 1e3
    Path("bench.json").write_text(json.dumps(BENCH | {"median_itl_ms": itl_ms}))
    of_server = "--model Qwen/Qwen3-4B --topology v6e-8 --plan tp=8 --fit-host"
    fitted = json.loads(meshscope(*words_of(f"compare bench.json {of_server} --json")).out)
    # 0.5 % of the ITL, and the difference between two arrivals of the same rate
    assert fitted["host_s"] == pytest.approx(host_ms / 1e3, abs=0.02 * itl_ms / 1e3)
    assert fitted["bound_by"] == ("host" if host_ms > 5 else "device")


@pytest.mark.slow
def test_a_rate_of_the_transfer_moves_caches(meshscope) -> None:
    line = "serve-sim Qwen/Qwen3-4B --topology v6e-4 --plan tp=4 --apart 1:1 --rate 2 --requests 10"
    ask = words_of(f"{line} --transfer-rate 4.5 --json")
    moved = json.loads(meshscope(*ask).out)["transfers"]
    assert moved["mean_s"] == pytest.approx(moved["mean_bytes"] / 4.5e9)  # one host a side
    status, _, err = meshscope(*words_of(f"{line} --transfer ici --transfer-rate 4.5"))
    assert (status, "--transfer-rate limits hosts on DCN" in err) == (1, True)
