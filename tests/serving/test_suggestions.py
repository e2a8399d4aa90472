"""What else to try: changed experiments, and options from the commands of servers."""

import json
import re
import shlex
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
from made import experiment_with, varied
from tables import table

import meshscope
from meshscope.errors import SpecError
from meshscope.plans.experiment import Experiment
from meshscope.reports.answer import answer_of
from meshscope.serving.launched import read_launch
from meshscope.serving.suggestions import (
    MIN_GAIN,
    MIN_SURPRISE,
    Purpose,
    suggestions_of,
    surprises_of,
)
from meshscope.units import format_seconds


def _predicted(command: str) -> meshscope.Run:
    """The run of a `meshscope predict` command."""
    _, _, model, *words = shlex.split(command)
    options = dict(zip(words[::2], words[1::2], strict=True))
    names = {name.removeprefix("--").replace("-", "_"): value for name, value in options.items()}
    sizes = {name: int(names[name]) for name in ("batch", "prompt", "output") if name in names}
    if "routing_skew" in names:
        sizes["routing_skew"] = float(names["routing_skew"])
    return meshscope.predict(model, **{**names, **sizes})  # type: ignore[arg-type]


@pytest.mark.slow
@table
def test_the_gain_is_that_of_predicting_the_suggested_command(model, topology, plan) -> None:
    run = meshscope.predict(model, topology=topology, plan=plan, batch=32, prompt=1024)
    suggestions, before = suggestions_of(run.record), run.time
    assert suggestions
    for one in suggestions:
        after = _predicted(one.command).time
        assert one.ttft_gain_s == pytest.approx(before.ttft_s - after.ttft_s)
        assert one.tpot_gain_s == pytest.approx(before.tpot_s - after.tpot_s)
        assert after.e2e_s == pytest.approx(one.request_s)
        if Purpose.REQUEST in one.purposes:
            assert after.e2e_s < before.e2e_s
        if Purpose.RATE in one.purposes:
            assert after.tpot_s < before.tpot_s
        assert one.purposes
        assert one.fits is not False
    assert run.as_dict()["suggestions"] == [asdict(one) for one in suggestions]


@pytest.mark.slow
@table
def test_no_split_of_the_experts_is_better_than_the_one_suggested(model, batch, plan) -> None:
    """Every dp, tp and ep on the slice, predicted one by one."""
    options = {"topology": "v6e-8", "batch": batch, "prompt": 1024, "output": 256}
    run = meshscope.predict(model, plan=plan, **options)  # type: ignore[arg-type]
    (request_s,) = (s.request_s for s in suggestions_of(run.record)[:1])
    for tp in (1, 2, 4, 8):
        for ep in {1, tp, 8 // tp, 8}:
            other = meshscope.predict(model, plan=f"dp={8 // tp},tp={tp},ep={ep}", **options)  # type: ignore[arg-type]
            if other.memory is not None and other.memory.fits:
                assert (other.time.e2e_s or 0.0) >= request_s * (1 - 1e-9)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        *(("8B", plan) for plan in ("pp=2,tp=4", "cp=4,tp=2", "fsdp=4,tp=2", "pp=2,cp=2,tp=2")),
        *(("30B-A3B", plan) for plan in ("fsdp=8,ep=8", "fsdp=2,tp=4,ep=8", "pp=2,fsdp=4,ep=4")),
    ],
)
def test_no_split_over_dp_and_tp_is_better_than_the_one_suggested(model: str, plan: str) -> None:
    model, request = f"Qwen/Qwen3-{model}", {"batch": 16, "prompt": 1000, "output": 64}
    run = meshscope.predict(model, topology="v6e-8", plan=plan, **request)  # type: ignore[arg-type]
    first, *_ = suggestions_of(run.record)
    for split in ("tp=8", "dp=2,tp=4", "dp=4,tp=2", "dp=8"):
        other = meshscope.predict(model, topology="v6e-8", plan=split, **request)  # type: ignore[arg-type]
        if other.memory is not None and other.memory.fits:
            assert (other.time.e2e_s or 0.0) >= first.request_s * (1 - 1e-9)
    assert first.change.startswith("--plan ")


@table
def test_the_command_of_another_plan_leaves_out_what_was_of_the_first(plan, option, value) -> None:
    words = ("--topology", "v6e-8", "--plan", plan, "--batch", "64", "--prompt", "4096")
    command = ("meshscope", "predict", "Qwen/Qwen3-30B-A3B", *words, option, value)
    run = _predicted(shlex.join(command)).record
    run = varied(run, manifest={"command": command})
    plans = [one for one in suggestions_of(run) if one.change.startswith("--plan")]
    assert plans
    for suggestion in plans:
        assert option not in suggestion.command
        changed = _predicted(suggestion.command)
        assert changed.time.e2e_s == pytest.approx(suggestion.request_s)


def test_a_change_names_only_what_it_is_good_for() -> None:
    """Prefill of 64 long prompts takes most of the request, which an int8 cache leaves as it is."""
    run = _predicted(
        "meshscope predict meta-llama/Llama-3.3-70B-Instruct --topology v6e-8 --plan tp=8 "
        "--batch 64 --prompt 8064 --weight-dtype int8"
    )
    by_change = {s.change: s.purposes for s in suggestions_of(run.record)}
    assert by_change["--cache-dtype int8"] == (Purpose.RATE,)
    assert "try --cache-dtype int8: TTFT 0 us, TPOT -" in run.text(full=True)

    run = _predicted(
        "meshscope predict Qwen/Qwen3-30B-A3B --topology v6e-8 --plan dp=8,ep=8 --batch 64 "
        "--prompt 1024 --prefill-chunk 4096"
    )
    first, *_ = answer_of(run.record).suggestion_sentences
    assert first.startswith("try --prefill-chunk 2048: TTFT -")
    assert "TPOT" not in first


def test_a_plan_that_does_not_fit_gets_one_that_may_and_a_chip_without_figures_none() -> None:
    run = meshscope.predict("Qwen/Qwen3-32B", topology="v6e-8", plan="dp=8", batch=8)
    assert run.memory.fits is False
    first = suggestions_of(run.record)[0]
    assert first.purposes == (Purpose.FIT,)
    assert first.fits is not False
    assert "fits" in first.reason
    run = meshscope.predict("Qwen/Qwen3-8B", topology="cpu:8", plan="tp=8")
    assert suggestions_of(run.record) == ()


QWEN = "meshscope predict Qwen/Qwen3-32B --topology v6e-8 --plan tp=8 --batch 8"


@table
def test_a_run_that_is_slower_than_a_larger_neighbor_says_why(command, option, reason) -> None:
    """The attention of servers takes prompts of any length."""
    sentences = surprises_of(_predicted(command).record)
    said = [one for one in sentences if option is not None and one.startswith(option)]
    assert bool(sentences) is bool(said) is (option is not None)
    assert all(reason in one for one in said)


MODELS = ("google/gemma-3-4b-it", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-32B")
PROMPTS = (100, 128, 129, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025)
BATCHES = (1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 64, 65, 128, 129)
MORE_BITS = ("int4", "int8", "bf16")
CHIPS = (("v6e:1x2", "tp=2"), ("v6e:2x2", "tp=4"), ("v6e:2x4", "tp=8"))
SIZED = {"TTFT": "ttft_s", "TPOT": "tpot_s"}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_no_run_is_silently_slower_than_one_with_more_work(model: str) -> None:
    """31 sequences took 2.2 times as long as 32, in chunks of one, 512 tokens longer than 513, and nothing said so."""

    def run(topology="v6e:2x2", plan="tp=4", **sizes) -> meshscope.Run:
        sizes = {"batch": 4, "prompt": 512} | sizes
        return meshscope.predict(model, topology=topology, plan=plan, **sizes)

    rows = [
        (MIN_GAIN, [(("TTFT",), run(prompt=prompt)) for prompt in PROMPTS]),
        (MIN_GAIN, [(("TTFT", "TPOT"), run(batch=batch)) for batch in BATCHES]),
        (MIN_SURPRISE, [(("TTFT", "TPOT"), run(weight_dtype=dtype)) for dtype in MORE_BITS]),
        (MIN_SURPRISE, [(("TTFT", "TPOT"), run(*on)) for on in reversed(CHIPS)]),
    ]
    silent: list[str] = []
    for least, row in rows:
        for (names, less), (_, more) in pairwise(row):
            tips = [one for one in less.as_dict()["notes"] if one.startswith("try ")]
            for name in names:
                old, new = (getattr(one.time, SIZED[name]) for one in (less, more))
                is_slower = (1 - least) * old > 1.001 * new and more.memory.fits is not False
                if is_slower and not any(name in tip or "request" in tip for tip in tips):
                    silent.append(f"{less.record.manifest.command}: {name} {old} > {new}")
    assert silent == []


def test_weights_with_fewer_bytes_are_no_wider_weights(tmp_path) -> None:
    """int8 in all matrices was said to be as much work as int8 in layers, with a head of 16 bits."""
    layers = {
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        "targets": ["Linear"],
    }
    quantized = {"quant_method": "compressed-tensors", "config_groups": {"group_0": layers}}
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 4,
    }
    config |= {"num_attention_heads": 16, "vocab_size": 32000, "quantization_config": quantized}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = meshscope.predict(tmp_path, topology="v6e-4", plan="tp=4", batch=4, prompt=512)
    assert "int8_layers" in run.warnings[0]
    assert not [one for one in surprises_of(run.record) if "--weight-dtype" in one]


@pytest.mark.parametrize(
    "sizes",
    [
        "meta-llama/Llama-3.1-8B --topology v6e-8 --plan tp=8 --batch 1 --prompt 512",
        "deepseek-ai/DeepSeek-V2-Lite --topology v6e-8 --plan tp=8 --batch 32 --prompt 512",
    ],
)
def test_no_size_is_tried_for_a_gain_that_the_prediction_does_not_resolve(sizes) -> None:
    """A batch of 8 instead of 1 was suggested for 1 % of a step."""
    base = _predicted(f"meshscope predict {sizes}")
    for sentence in surprises_of(base.record):
        sized = re.match(r"try (--(?:prompt|batch|prefill-chunk) \d+): (TTFT|TPOT) -", sentence)
        if sized is not None:
            changed = _predicted(f"meshscope predict {sizes} {sized[1]}")
            old, new = (getattr(one.time, SIZED[sized[2]]) for one in (base, changed))
            assert new < (1 - MIN_GAIN) * old, sentence


def test_the_gain_of_a_surprise_is_that_of_predicting_the_neighbor() -> None:
    (sentence,) = surprises_of(_predicted(f"{QWEN} --batch 1").record)
    times = [_predicted(f"{QWEN} --batch {n}").time.tpot_s for n in (1, 2)]
    assert None not in times
    assert f"TPOT -{format_seconds(times[0] - times[1])};" in sentence


def _experiment(topology: str, plan: str) -> Experiment:
    return experiment_with("Qwen/Qwen3-8B", plan, topology, batch=8, prompt=1024, output=128)


FOLDER = Path(__file__).with_name("launch_commands")


@table
def test_a_command_gives_options(command: str, expected: str, left: str) -> None:
    launched = read_launch(command.replace("FOLDER", str(FOLDER)))
    shown = " ".join(f"{name}={value}" for name, value in launched.options.items())
    assert (shown, ", ".join(launched.not_simulated)) == (expected, left)


@table
def test_a_command_that_says_too_little_is_refused(command: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        read_launch(command)


def test_an_option_of_the_command_line_replaces_that_of_the_command(meshscope) -> None:
    command = "vllm serve Qwen/Qwen3-4B --tensor-parallel-size 8"
    done = meshscope("predict", "--from-command", command, "--plan", "tp=4", "--topology", "v6e-4")
    assert "on v6e:2x2 (4 chips), tp=4" in done.out
    assert "Qwen/Qwen3-4B --server vllm-tpu\n" in done.err
