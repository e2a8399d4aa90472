"""`plan` and `serve-sim` on the command line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import words_of


def searched(meshscope, line: str) -> Any:
    outcome = meshscope(*words_of(line), "--json")
    assert outcome.status == 0, outcome.err
    return json.loads(outcome.out)


@pytest.mark.slow
def test_fewer_layers_take_less_time(meshscope) -> None:
    whole, half = (searched(meshscope, f"$plan --layers {n}")["winner"] for n in (36, 18))
    assert half["tpot_s"] < 0.7 * whole["tpot_s"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "expected"), [("off", {None}), ("2048", {2048}), ("auto", {None, 2048, 8192})]
)
def test_prefill_chunk_chooses_the_chunks_to_try(meshscope, chunk, expected) -> None:
    document = searched(meshscope, f"$plan --prefill-chunk {chunk}")
    assert {choice["prefill_chunk"] for choice in document["front"]} <= expected
    plans = {choice["plan"] for choice in document["best"]}
    assert any("pp=" in plan for plan in plans) is (chunk != "2048")
    refused = document["space"]["n_refused"]
    reason = "prefill cannot run in chunks of --prefill-chunk"
    assert chunk != "2048" or refused[reason] > 0


def test_if_every_plan_is_refused_the_answer_does_not_blame_the_memory(meshscope) -> None:
    answer = meshscope(*words_of("$plan --prefill-chunk 777"))
    assert "no plan is left" in answer.out
    assert "as prefill cannot run in chunks of --prefill-chunk" in " ".join(answer.out.split())


def test_dtype_is_that_of_activations_and_of_what_is_not_quantized(meshscope) -> None:
    document = searched(meshscope, "$plan --dtype f32")
    choices = [*document["front"], document["unquantized"]]
    assert {choice["weight_dtype"] for choice in choices} == {"f32", "s8"}
    assert document["unquantized"]["cache_dtype"] == "f32"


@pytest.mark.slow
def test_fit_answers_for_all_slices_within_80_columns(meshscope, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = meshscope(*words_of("$search --fit --full"))
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line for line in lines if line.startswith(("v", "tpu"))}
    assert "NO" in rows["v6e-4"]
    assert "yes" in rows["v6e-8"]
    assert len(rows) == 37
    answer = " ".join(outcome.out.partition("\n\n")[0].split())
    assert "; the smallest are " in answer
    assert re.findall(r"v6e-\d+ \(.*?\)", answer) == ["v6e-8 (tp=8)"]


def test_fit_in_json_has_the_capacity_of_each_slice(meshscope) -> None:
    small, large = searched(meshscope, "$search --fit --topology v6e-4,v6e-8 --prices v6e=2.7")
    assert (small["fits"], small["largest_batch"], small["largest_context"]) == ("no", 0, 0)
    assert (large["fits"], large["plan"], large["price_per_hour"]) == ("yes", "tp=8", 8 * 2.7)
    assert large["largest_batch"] > 64
    assert large["is_context_of_model"]
    alone = searched(meshscope, "predict meta-llama/Llama-3.3-70B $tp8 --prompt 1024")
    assert large["largest_batch"] == alone["capacity"]["largest_batch"]


def test_fit_at_a_batch_answers_for_that_batch(meshscope) -> None:
    """64 x 8,192 positions of 70B: 36.9 GiB a device of v6e-8, 28.8 of v5e-16, computed by bytes to 2 %."""
    line = "$search --fit --topology v6e-8,v5e-16 --prompt 8064 --batch 64"
    documents = searched(meshscope, line)
    assert [(one["fits"], one["batch"]) for one in documents] == [("no", 64), ("no", 64)]
    gib = [one["memory"]["total_bytes"] / 2**30 for one in documents]
    assert gib == pytest.approx([36.9, 28.8], rel=0.02)
    text = meshscope(*words_of(line)).out
    assert "batch 64" in text
    assert text.count(" NO ") == 2


def test_fit_on_gpus_has_the_weights_and_the_cache_of_the_batch(meshscope) -> None:
    line = "plan Qwen/Qwen3-32B --fit --topology h100:1,h100:2 --batch 64 --prompt 4000"
    out = " ".join(meshscope(*words_of(line)).out.split())
    cache_gib = 64 * (4000 + 128) * 64 * 2 * 8 * 128 * 2 / 2**30  # 64 layers, 8 heads of 128, bf16
    weights_gib = 32_762_123_264 * 2 / 2**30
    assert f"h100:1 NO tp=1 >={weights_gib + cache_gib:.2f} of 74.51" in out
    assert f"h100:2 unknown tp=2 >={(weights_gib + cache_gib) / 2:.2f} of 74.51" in out


def test_fit_of_a_chunk_needs_less(meshscope) -> None:
    line = "$search --fit --topology v6e-8 --prompt 8192 --batch 64 --prefill-chunk"
    (whole,), (cut,) = (searched(meshscope, f"{line} {size}") for size in ("auto", "1024"))
    assert cut["memory"]["temp_bytes"] < whole["memory"]["temp_bytes"]


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
