"""`meshscope plan`: options of the search, several slices, and `--fit`."""

import json
import re
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


def test_if_every_plan_is_refused_the_answer_does_not_blame_the_memory(meshscope, tmp_path) -> None:
    answer = meshscope(*words_of("$plan --prefill-chunk 777 --report plan.html"))
    assert "no plan is left" in answer.out
    assert "as prefill cannot run in chunks of --prefill-chunk" in " ".join(answer.out.split())
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "does not fit" not in page.partition("</header>")[0]


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
