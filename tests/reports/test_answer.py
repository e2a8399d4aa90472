"""The answer of a run: figures, fit, and a verdict on times apart from collectives."""

from dataclasses import replace
from typing import Any

import pytest
from made import estimate, part_cost, step_time
from tables import table

from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import StepTime
from meshscope.model.config import read_model
from meshscope.plans.memory import Memory
from meshscope.plans.program import Partitioner
from meshscope.reports.answer import FitState, answer_of, fit_of
from meshscope.reports.document import figures_document
from meshscope.store.run import RunRecord

GIB = 2**30


def step(source: Source, phase: Phase, seconds: float, *, other_s: float = 0.0) -> StepTime:
    """A step with an interval of 10%, and `other_s` seconds outside the parts of the model."""
    return step_time(
        phase,
        estimate(seconds, 0.9 * seconds, 1.1 * seconds),
        seconds,
        source=source,
        by_basis_s={"roofline": seconds},
        parts=(part_cost("mlp", seconds - other_s), part_cost(None, other_s)),
    )


@pytest.fixture
def timed_run(compiled_run: RunRecord) -> RunRecord:
    """The compiled prefill agrees with the prediction; decode takes five times as long."""
    times = (
        step(Source.PREDICTED, Phase.PREFILL, 0.2),
        step(Source.PREDICTED, Phase.DECODE, 0.1),
        step(Source.COMPILED, Phase.PREFILL, 0.23),
        step(Source.COMPILED, Phase.DECODE, 0.5, other_s=0.4),
    )
    return replace(compiled_run, times=times)


def test_rates_follow_from_the_times(timed_run: RunRecord) -> None:
    """Batch 2, output 10, 4 chips: 2 / 0.1 s, and 2 x 10 / (0.2 + 9 x 0.1) s."""
    predicted = answer_of(timed_run).sources[0]
    assert predicted.decode_tokens_per_s.value == pytest.approx(20)
    assert predicted.decode_tokens_per_s_per_chip.value == pytest.approx(5)
    assert predicted.output_tokens_per_s.value == pytest.approx(20 / 1.1)
    assert predicted.requests_per_s.value == pytest.approx(2 / 1.1)
    assert predicted.ttft.range_text == "180 to 220 ms"


def test_figures_without_a_time_are_unknown(predicted_run: RunRecord) -> None:
    predicted = answer_of(predicted_run).strongest
    assert {predicted.prefill.text, predicted.decode_tokens_per_s.text} == {"unknown"}


def test_times_beyond_their_intervals_are_reported_with_the_largest_cost(timed_run) -> None:
    (agreement,) = answer_of(timed_run).agreements
    assert agreement.time_sentences == (
        "prefill agree within their intervals",
        (
            "compiled decode takes 5.0 x the prediction: "
            "400 of 500 ms are copies and other work outside the parts of the model"
        ),
    )
    assert agreement.is_time_within is False
    assert agreement.collectives.startswith("collectives: predicted and compiled differ")


def test_a_run_of_one_source_has_no_agreement(predicted_run: RunRecord) -> None:
    assert answer_of(predicted_run).agreements == ()


def test_the_title_and_the_request_name_what_was_asked(predicted_run: RunRecord) -> None:
    answer = answer_of(predicted_run)
    assert answer.title == "tiny (3 layers) on v6e:2x2 (4 chips), tp=4"
    assert answer.request == "batch 2, prompt 8, output 10, bf16, cache int8"


@table
def test_the_fit_has_the_bytes_that_are_known(total_gib, state: FitState, text) -> None:
    memory = Memory(
        weights_bytes=2 * GIB,
        kv_cache_bytes=GIB,
        temp_bytes=None,
        total_bytes=None if total_gib is None else total_gib * GIB,
        hbm_bytes=int(31.25 * GIB),
        fits={FitState.YES: True, FitState.NO: False, FitState.UNKNOWN: None}[state],
    )
    assert (fit_of(memory).state, fit_of(memory).text) == (state, text)


def test_options_that_are_not_defaults_are_named(predicted_run: RunRecord) -> None:
    experiment = predicted_run.manifest.experiment
    assert experiment.program is not None
    program = replace(experiment.program, partitioner=Partitioner.AUTO)
    manifest = replace(predicted_run.manifest, experiment=replace(experiment, program=program))
    request = answer_of(replace(predicted_run, manifest=manifest)).request
    assert request.endswith(", cache int8, auto partitioner")


def test_the_answer_says_what_of_the_config_is_not_counted(predicted_run: RunRecord) -> None:
    experiment = predicted_run.manifest.experiment
    keys: dict[str, Any] = {
        "text_part_of": "qwen2_5_vl",
        "unread_keys": ("odd=5", "twice=2"),
        "max_position": None,
    }
    model = replace(read_model("Qwen/Qwen3-0.6B"), name="tiny", **keys)
    manifest = replace(predicted_run.manifest, experiment=replace(experiment, model=model))
    run = replace(predicted_run, manifest=manifest)
    notes = (
        "only the text part of this multimodal model (qwen2_5_vl) is counted",
        "not read from the config: odd=5, twice=2",
        "the config has no max_position_embeddings: the longest context is unknown",
    )
    assert answer_of(run).notes[:3] == notes
    assert figures_document(run)["notes"][:3] == [*notes]
