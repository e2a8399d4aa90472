"""Suggestions against predictions of the changed experiment."""

import shlex
from dataclasses import asdict, replace

import pytest

import meshscope
from meshscope.reports.answer import answer_of
from meshscope.serving.suggestions import Purpose, follow_ups, suggestions_of, surprises_of
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


@pytest.mark.parametrize(
    ("model", "topology", "plan"),
    [
        ("Qwen/Qwen3-32B", "v6e-8", "tp=8"),
        ("Qwen/Qwen3-30B-A3B", "v6e-8", "dp=2,tp=4"),
        ("meta-llama/Llama-3.1-70B", "v5e-16", "tp=16"),
    ],
)
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


@pytest.mark.parametrize(
    ("model", "batch", "plan"),
    [
        ("Qwen/Qwen3-30B-A3B", 256, "tp=8"),
        ("Qwen/Qwen3-30B-A3B", 64, "tp=8,ep=8"),
        ("openai/gpt-oss-20b", 64, "dp=8"),
        ("mistralai/Mixtral-8x7B-v0.1", 64, "dp=2,tp=4"),
    ],
)
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


def test_the_best_follow_up_of_several_runs_may_be_on_the_second() -> None:
    """int8 weights gain more with tp=8 than with tp=8,sp, which is faster in bf16."""
    options = {"topology": "v6e-8", "batch": 8, "prompt": 1024}
    first, second = (
        meshscope.predict("Qwen/Qwen3-32B", plan=plan, **options)  # type: ignore[arg-type]
        for plan in ("tp=8,sp", "tp=8")
    )
    (at, suggestion), *_ = follow_ups([first.record, second.record])
    changed = meshscope.predict("Qwen/Qwen3-32B", plan="tp=8", weight_dtype="int8", **options)  # type: ignore[arg-type]
    assert (at, suggestion.change) == (1, "--weight-dtype int8")
    assert suggestion.request_s == pytest.approx(changed.time.e2e_s)
    assert suggestion.request_gain_s == pytest.approx(
        (first.time.e2e_s or 0.0) - suggestion.request_s
    )


@pytest.mark.parametrize(
    ("plan", "option", "value"),
    [
        ("dp=8,ep=8", "--routing-skew", "4.0"),
        ("tp=8", "--prefill-chunk", "1024"),
        ("dp=4,tp=2", "--device-order", "x:tp=2,y:dp=4"),
    ],
)
def test_the_command_of_another_plan_leaves_out_what_was_of_the_first(plan, option, value) -> None:
    words = ("--topology", "v6e-8", "--plan", plan, "--batch", "64", "--prompt", "4096")
    command = ("meshscope", "predict", "Qwen/Qwen3-30B-A3B", *words, option, value)
    run = _predicted(shlex.join(command)).record
    run = replace(run, manifest=replace(run.manifest, command=command))
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
    assert "for more decode tokens/s" in run.text()
    assert "for a shorter request: TTFT 0 us" not in run.text()

    run = _predicted(
        "meshscope predict Qwen/Qwen3-30B-A3B --topology v6e-8 --plan dp=8,ep=8 --batch 64 "
        "--prompt 1024 --prefill-chunk 4096"
    )
    first, *_ = answer_of(run.record).suggestion_sentences
    assert first.startswith("try --prefill-chunk 2048 for a shorter request: TTFT -")
    assert "TPOT" not in first


def test_a_plan_that_does_not_fit_gets_one_that_may_and_a_chip_without_figures_none() -> None:
    run = meshscope.predict("Qwen/Qwen3-32B", topology="v6e-8", plan="dp=8", batch=8)
    assert run.memory.fits is False
    first = suggestions_of(run.record)[0]
    assert (first.fits is not False, first.purposes, "fits" in first.reason) == (
        True,
        (Purpose.FIT,),
        True,
    )
    run = meshscope.predict("Qwen/Qwen3-8B", topology="cpu:8", plan="tp=8")
    assert suggestions_of(run.record) == ()


QWEN = "meshscope predict Qwen/Qwen3-32B --topology v6e-8 --plan tp=8 --batch 8"


@pytest.mark.parametrize(
    ("command", "option", "reason"),
    [
        (f"{QWEN} --prompt 1000", "try --prompt 1024: TTFT -", "1000 positions has no kernel"),
        (f"{QWEN} --prompt 500", "try --prompt 512: TTFT -", "500 positions has no kernel"),
        (
            "meshscope predict google/gemma-3-27b-it --topology v6e-8 --plan tp=8 --batch 16 --prompt 1000",
            "try --prompt 1024 --prefill-chunk 8192: TTFT -",
            "1000 positions has no kernel",
        ),
        (f"{QWEN} --batch 1", "try --batch 2: TPOT -1.1", "multiply a vector"),
        (
            "meshscope predict Qwen/Qwen2.5-14B --topology v6e-4 --plan fsdp=2,tp=2 --batch 2",
            "try --batch 4: TPOT -",
            "multiply a vector",
        ),
        (f"{QWEN} --weight-dtype int4", "try --weight-dtype int8: request -", "int4 is slower"),
        (f"{QWEN} --weight-dtype awq", "try --weight-dtype int8: request -", "int4 is slower"),
    ],
)
def test_a_run_that_is_slower_than_a_larger_neighbor_says_why(command, option, reason) -> None:
    (sentence,) = surprises_of(_predicted(command).record)
    assert sentence.startswith(option)
    assert reason in sentence


@pytest.mark.parametrize("sizes", ["--prompt 1024", "--prompt 1025", "--prompt 1500", "--batch 2"])
def test_a_run_without_a_faster_larger_neighbor_has_no_surprise(sizes: str) -> None:
    """Prompts from 1,024 on are padded to a block of the kernel."""
    assert surprises_of(_predicted(f"{QWEN} {sizes}").record) == ()


def test_the_gain_of_a_surprise_is_that_of_predicting_the_neighbor() -> None:
    (sentence,) = surprises_of(_predicted(f"{QWEN} --prompt 1000").record)
    times = [_predicted(f"{QWEN} --prompt {n}").time.ttft_s for n in (1000, 1024)]
    assert None not in times
    assert f"TTFT -{format_seconds(times[0] - times[1])};" in sentence
