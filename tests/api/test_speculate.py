"""Speculative decoding: tokens a step, what a verification costs, and refusals."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tables import table

import meshscope
from meshscope.analysis.request import SpeculativeStep
from meshscope.api.predict import predict
from meshscope.api.run import Run
from meshscope.errors import RunError, SpecError
from meshscope.events.enums import Source
from meshscope.model.layers import AttentionKind
from meshscope.plans.speculation import DraftMethod, Speculation
from meshscope.units import format_seconds

LLAMA = "meta-llama/Llama-3.1-70B"
DEEPSEEK = "deepseek-ai/DeepSeek-V3.1"


EAGLE = "eagle:k=3,acceptance=0.7"


def speculated(text: str | None, model: str = LLAMA, **options: Any) -> Run:
    """A run of batch 8 with tp=8 on v6e-8."""
    values = {"topology": "v6e-8", "plan": "tp=8", "batch": 8, "output": 128, **options}
    return predict(model, speculate=text, **values)


def step(text: str, model: str = LLAMA, **options: Any) -> SpeculativeStep:
    return speculated(text, model, **options).speculation.step


@pytest.fixture(scope="module")
def eagle() -> Run:
    return speculated(EAGLE)


@pytest.fixture(scope="module")
def plain() -> Run:
    return speculated(None)


@table
def test_tokens_of_a_step_follow_the_acceptance(n_drafted, acceptance, n_tokens) -> None:
    speculation = Speculation(method=DraftMethod.EAGLE, n_drafted=n_drafted, acceptance=acceptance)
    assert speculation.tokens_per_step == pytest.approx(n_tokens, abs=0.005)


def test_a_verification_sends_the_tokens_of_all_drafts(eagle: Run, plain: Run) -> None:
    """Four tokens for each of eight sequences: four times the bytes, in as many collectives."""
    verified = eagle.speculation.step.verify_rows
    decode = [row for row in plain.record.rows if row.phase == "decode"]
    assert sum(row.count for row in verified) == sum(row.count for row in decode)
    sent, sent_plain = (
        sum(row.count * row.payload_bytes for row in rows) for rows in (verified, decode)
    )
    assert sent == 4 * sent_plain


def test_a_verification_reads_the_cache_of_a_sequence_once() -> None:
    """At 60,000 positions the cache is most of the bytes: five times the tokens take little longer."""
    wide = speculated(None, batch=40, prompt=60_000).time.tpot_s
    verified = step("eagle:k=4,acceptance=0.7", prompt=60_000)
    assert verified.plain.value_s < verified.verify.value_s < 1.3 * verified.plain.value_s
    assert wide > 2 * verified.verify.value_s


def test_time_per_token_is_that_of_the_step_over_its_tokens() -> None:
    mtp = step(
        "mtp:k=2,acceptance=0.5", DEEPSEEK, topology="v6e-64", plan="dp=8,tp=8,ep=64", batch=64
    )
    assert mtp.step_s == mtp.verify.value_s + 2 * mtp.draft.value_s
    assert mtp.tpot_s == pytest.approx(mtp.step_s / 1.75)
    assert mtp.gain == pytest.approx(mtp.plain.value_s / mtp.tpot_s)
    assert (sum(row.count for row in mtp.draft_rows), mtp.fits) == (8, True)


def test_one_pass_of_deepseek_v4_1_drafts_five_tokens() -> None:
    """Three blocks with windows of 132 positions and the weights of the checkpoint's drafts, with both tables elsewhere."""
    plan = {"topology": "v6e-64", "plan": "dp=64", "batch": 64, "output": 64}
    dspark = step("dspark:k=4,acceptance=0.5", "deepseek-ai/DeepSeek-V4.1-Flash", **plan)
    assert dspark.step_s == dspark.verify.value_s + dspark.draft.value_s
    assert dspark.draft_rows == ()
    assert dspark.memory_bytes == 7_932_874_632 + 3 * 132 * 528


def test_a_verification_keeps_the_state_of_linear_attention_after_each_token() -> None:
    """Qwen3.5-9B: 24 layers with 32 states of 128 x 128 and 8,192 channels of a convolution of width 4, in float32."""
    run = speculated("mtp:k=2,acceptance=0.8", "Qwen/Qwen3.5-9B")
    plain, verified = (
        r.record.memory[Source.PREDICTED].kv_cache_bytes for r in (run, run.speculation.verify)
    )
    state, inputs, full = 32 * 128 * 128, 8192, 256 * 2 * 256 * 2  # a KV head on each device
    assert (plain, verified) == tuple(
        8 * (24 * 4 * (n * state + (2 + n) * inputs) // 8 + 8 * full) for n in (1, 3)
    )


def test_bytes_of_states_are_one_read_and_a_write_after_each_token() -> None:
    """At a short context, each token of 512 sequences adds a write of all states to the time of the step."""
    times = [
        step(f"mtp:k={k},acceptance=0.8", "Qwen/Qwen3.5-9B", batch=512, prompt=8).verify.value_s
        for k in (1, 2, 3)
    ]
    written_s = 512 * 24 * 4 * (32 * 128 * 128 + 8192) / 8 / 1.64e12  # HBM of v6e
    assert min(after - before for before, after in itertools.pairwise(times)) > written_s


def test_a_head_of_a_hybrid_model_has_full_attention() -> None:
    for model, method in (
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "mtp"),
        ("Qwen/Qwen3.5-9B", "eagle"),
    ):
        run = speculated(f"{method}:k=1,acceptance=0.8", model, layers=2)
        draft = run.speculation.draft.record.manifest.experiment.architecture
        assert [layer.attention for layer in draft.layers] == [AttentionKind.FULL]
        assert (draft.moe is not None) == (method == "mtp")


def test_a_draft_model_brings_its_weights_and_cache() -> None:
    """Llama-3.1-8B in bf16 over eight devices: 16.06 GB / 8, and 33.6 MB of cache a sequence."""
    drafted = step("draft:meta-llama/Llama-3.1-8B,k=4,acceptance=0.7")
    cache_bytes = 8 * 256 * 2 * 32 * 1024 * 2 // 8
    assert drafted.memory_bytes == pytest.approx(16.06e9 / 8 + cache_bytes, rel=0.002)


def test_the_document_has_the_step(eagle: Run) -> None:
    entry = json.loads(json.dumps(eagle.as_dict(), default=str))["speculation"]
    assert (entry["method"], entry["n_drafted"], entry["draft_model"]) == ("eagle", 3, None)
    assert entry["tpot_s"] < entry["step_s"]
    assert entry["sources"]["predicted"]["verify"] == entry["verify"]
    assert eagle.speculation.steps.keys() == {Source.PREDICTED}


@table
def test_an_impossible_speculation_is_refused_with_a_remedy(text, model, remedy) -> None:
    if remedy is None:
        remedy = "no dense layer"
    with pytest.raises(SpecError, match=remedy):
        step(text, model)


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(SpecError, match="one output token needs no decode step"):
        step("eagle:k=1,acceptance=0.5", output=1)
    with pytest.raises(SpecError, match="Use output=5 or more, or a smaller k"):
        step("eagle:k=3,acceptance=0.5", output=4)
    with pytest.raises(SpecError, match="Give a profile=, or drop the option"):
        step("eagle:k=1,acceptance=0.5", topology="cpu:8")


@pytest.mark.slow
def test_a_saved_run_has_its_parts_as_runs(tmp_path: Path) -> None:
    """They open like any other run, and the run shows its speculation again."""
    run = speculated(EAGLE, out=tmp_path / "run")
    opened = meshscope.open(tmp_path / "run")[0]

    assert opened.speculation.step == run.speculation.step
    assert opened.text() == run.text()
    assert "eagle, k=3, acceptance 0.7: 2.53 tokens per step" in opened.text()
    verify = meshscope.open(tmp_path / "run" / "speculation" / "verify")[0]
    assert verify.collectives.equals(run.speculation.verify.collectives)
    assert (verify.time.tpot_s, verify.time.prefill_s) == (None, None)
    assert verify.time.decode_step_s == run.speculation.step.verify.value_s
    assert "4 tokens of a sequence in a decode step" in verify.text()
    assert opened.speculation.draft.experiment.model_name == f"{LLAMA} eagle"
    moved = opened.save(tmp_path / "copy")
    assert moved.speculation.verify.path == tmp_path / "copy" / "speculation" / "verify"


def test_a_damaged_part_names_the_command_of_its_run(tmp_path: Path) -> None:
    home = tmp_path / "run"
    speculated("eagle:k=1,acceptance=0.7", out=home)
    (home / "speculation" / "draft" / "events.parquet").write_bytes(b"")
    with pytest.raises(RunError, match=rf"--out {home} --force"):
        meshscope.open(home)[0]


@pytest.mark.slow
def test_the_report_shows_the_times_of_verification_and_draft(eagle, plain, tmp_path) -> None:
    page = eagle.report(tmp_path / "speculative.html").read_text()
    assert "2.53 tokens per step: 3 drafted by eagle, acceptance 0.7" in page
    assert format_seconds(eagle.speculation.step.tpot_s) in page
    assert "Speculative decoding" not in plain.report(tmp_path / "plain.html").read_text()
