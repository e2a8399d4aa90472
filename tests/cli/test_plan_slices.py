"""`meshscope plan` over several slices, and `--fit`."""

import json

import pytest

LLAMA = ("plan", "meta-llama/Llama-3.3-70B")
SLO = ("--slo", "ttft=2,tpot=0.05", "--batch", "1:64")


def test_fit_answers_for_all_slices_within_80_columns(meshscope, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = meshscope(*LLAMA, "--fit")
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line for line in lines if line.startswith(("v", "tpu"))}
    assert "NO" in rows["v6e-4"]
    assert "yes" in rows["v6e-8"]
    assert len(rows) == 37


def test_fit_in_json_has_the_capacity_of_each_slice(meshscope) -> None:
    prices = ("--prices", "v6e=2.7")
    outcome = meshscope(*LLAMA, "--fit", "--topology", "v6e-4,v6e-8", *prices, "--json")
    small, large = json.loads(outcome.out)
    assert (small["fits"], small["largest_batch"], small["largest_context"]) == ("no", 0, 0)
    assert (large["fits"], large["plan"], large["price_per_hour"]) == ("yes", "tp=8", 8 * 2.7)
    assert large["largest_batch"] > 64
    assert large["is_context_of_model"]
    alone = json.loads(
        meshscope(
            "predict",
            *LLAMA[1:],
            "--topology",
            "v6e-8",
            "--plan",
            "tp=8",
            "--prompt",
            "1024",
            "--json",
        ).out
    )
    assert large["largest_batch"] == alone["capacity"]["largest_batch"]


def test_fit_at_a_batch_answers_for_that_batch(meshscope) -> None:
    """64 x 8,192 positions of 70B: 36.9 GiB a device of v6e-8, 28.8 of v5e-16, computed by bytes to 2 %."""
    options = ("--topology", "v6e-8,v5e-16", "--prompt", "8064", "--batch", "64")
    documents = json.loads(meshscope(*LLAMA, "--fit", *options, "--json").out)
    assert [(one["fits"], one["batch"]) for one in documents] == [("no", 64), ("no", 64)]
    gib = [one["memory"]["total_bytes"] / 2**30 for one in documents]
    assert gib == pytest.approx([36.9, 28.8], rel=0.02)
    text = meshscope(*LLAMA, "--fit", *options).out
    assert "batch 64" in text
    assert text.count(" NO ") == 2


def test_fit_on_gpus_has_the_weights_and_the_cache_of_the_batch(meshscope) -> None:
    options = ("--topology", "h100:1,h100:2", "--batch", "64", "--prompt", "4000")
    out = " ".join(meshscope("plan", "Qwen/Qwen3-32B", "--fit", *options).out.split())
    cache_gib = 64 * (4000 + 128) * 64 * 2 * 8 * 128 * 2 / 2**30  # 64 layers, 8 heads of 128, bf16
    weights_gib = 32_762_123_264 * 2 / 2**30
    assert f"h100:1 NO tp=1 >={weights_gib + cache_gib:.2f} of 74.51" in out
    assert f"h100:2 unknown tp=2 >={(weights_gib + cache_gib) / 2:.2f} of 74.51" in out


def test_fit_answers_for_each_precision_and_for_a_chunk(meshscope) -> None:
    options = ("--topology", "v6e-8", "--prompt", "8192", "--batch", "64")
    dtypes = ("--weight-dtype", "bf16,int8", "--cache-dtype", "bf16,int8")
    rows = json.loads(meshscope(*LLAMA, "--fit", *options, *dtypes, "--json").out)
    assert [(r["weight_dtype"], r["cache_dtype"], r["fits"]) for r in rows] == [
        ("bf16", "bf16", "no"),
        ("bf16", "s8", "yes"),
        ("s8", "bf16", "yes"),
        ("s8", "s8", "yes"),
    ]
    (whole,), (cut,) = (
        json.loads(meshscope(*LLAMA, "--fit", *options, "--prefill-chunk", size, "--json").out)
        for size in ("auto", "1024")
    )
    assert cut["memory"]["temp_bytes"] < whole["memory"]["temp_bytes"]


def test_the_cheapest_slice_comes_with_its_plan(meshscope) -> None:
    slices = ("--topology", "v6e-4,v6e-8,v6e-16", "--weight-dtype", "bf16")
    outcome = meshscope(*LLAMA, *slices, *SLO, "--prices", "v6e=2.7")
    assert (outcome.status, outcome.err) == (0, "")
    assert "cheapest: v6e-8, 21.60 an hour" in outcome.out
    assert "And 1 more expensive slice, not searched" in outcome.out
    document = json.loads(meshscope(*LLAMA, *slices, *SLO, "--json").out)
    assert document["topology"] == "v6e:2x4"
    assert [(s["slice"], s["meets"], s["fits"]) for s in document["slices"]] == [
        ("v6e-4", False, False),
        ("v6e-8", True, True),
    ]
