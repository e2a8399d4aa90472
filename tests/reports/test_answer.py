"""The answer of a run: figures, fit, and a verdict on times apart from collectives."""

from contextlib import suppress
from dataclasses import replace
from io import StringIO
from typing import Any, NamedTuple

import pytest
from made import estimate, part_cost, step_time, varied
from rich.console import Console
from tables import table

import meshscope
from meshscope.analysis.join import Agreement
from meshscope.errors import PlanError
from meshscope.events.enums import Phase, Source
from meshscope.events.step_time import Activity, ActivityTime, StepTime
from meshscope.model.catalog import catalog
from meshscope.model.config import read_model
from meshscope.plans.caches import CacheLayout, whole_windows
from meshscope.plans.memory import Memory
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Partitioner
from meshscope.plans.workload import Workload
from meshscope.reports.answer import (
    Answer,
    FitState,
    SourceAgreement,
    answer_of,
    fit_of,
    gains_text,
)
from meshscope.reports.answer_text import answer_lines
from meshscope.reports.document import run_document
from meshscope.reports.ranking import ranked
from meshscope.reports.tables import MAX_LINES
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


def test_a_prediction_without_times_has_unknown_figures_and_no_agreement(
    predicted_run: RunRecord,
) -> None:
    predicted = answer_of(predicted_run).strongest
    assert {predicted.ttft.text, predicted.decode_tokens_per_s.text} == {"unknown"}
    assert answer_of(predicted_run).agreements == ()


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


def test_the_title_and_the_request_name_what_was_asked_if_it_is_no_default(
    predicted_run: RunRecord,
) -> None:
    answer = answer_of(predicted_run)
    assert answer.title == "tiny (3 layers) on v6e:2x2 (4 chips), tp=4"
    assert answer.request == "batch 2, prompt 8, output 10, bf16, cache int8"
    program = replace(predicted_run.manifest.experiment.program, partitioner=Partitioner.AUTO)
    request = answer_of(varied(predicted_run, experiment={"program": program})).request
    assert request.endswith(", cache int8, auto partitioner")


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
    assert (memory.fit, fit_of(memory).text) == (state, text)


def test_the_answer_says_what_of_the_config_is_not_counted(predicted_run: RunRecord) -> None:
    keys: dict[str, Any] = {
        "text_part_of": "qwen2_5_vl",
        "unread_keys": ("odd=5", "twice=2"),
        "max_position": None,
    }
    model = replace(read_model("Qwen/Qwen3-0.6B"), name="tiny", **keys)
    run = varied(predicted_run, experiment={"model": model})
    notes = (
        "only the text part of this multimodal model (qwen2_5_vl) is counted",
        "not read from the config: odd=5, twice=2",
        "the config has no max_position_embeddings: the longest context is unknown",
    )
    assert answer_of(run).notes[:3] == notes
    assert run_document(run, has_suggestions=False)["notes"][:3] == [*notes]


@pytest.fixture(scope="module")
def predicted() -> Answer:
    run = meshscope.predict("Qwen/Qwen3-32B", topology="v6e-8", plan="tp=8", batch=64, prompt=1024)
    return answer_of(run.record)


def _text(answer: Answer, *, is_full: bool = False) -> str:
    console = Console(width=80, file=StringIO())
    console.print(*answer_lines(answer, is_full=is_full), sep="\n")
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_no_change_of_throughput_has_no_sign(predicted: Answer) -> None:
    one = replace(predicted.suggestions[0], tpot_gain_s=-4e-5, tokens_per_s_frac=-0.003)
    assert gains_text(one).endswith("TPOT +40 us, decode tokens/s equal")


def test_one_source_is_shown_with_its_room_and_all_suggestions(predicted: Answer) -> None:
    text = _text(predicted)
    assert "room for batch" in text
    assert text.count("- try ") == len(predicted.suggestions) > 0


def test_two_sources_with_long_sentences_stay_within_the_limit(predicted: Answer) -> None:
    (source,) = predicted.sources
    compiled = replace(source, source=Source.COMPILED)
    tail = ", 401 us exposed tp communication, 201 us latency of small ops"
    long = {phase: sentence + tail for phase, sentence in predicted.why.items()}
    text = _text(replace(predicted, sources=(source, compiled), why=long))
    assert len(text.rstrip("\n").splitlines()) <= MAX_LINES
    for line in ("TTFT, prefill", "decode rate", " per chip\n", "fits", "- prefill ", "- try "):
        assert line in text
    assert "401 us" not in text
    assert text.rstrip().splitlines()[-1].startswith("basis: constants fitted")


def test_what_else_to_try_comes_before_what_widens_intervals(predicted: Answer) -> None:
    tip, wide = "try --weight-dtype bf16: request -116 ms", ("no published step " * 5).strip()
    answer = replace(predicted, notes=(tip,), basis=("constants", wide, f"{wide} either"))
    text = _text(answer)
    assert tip in text
    assert "either" not in text
    assert len(text.rstrip("\n").splitlines()) <= MAX_LINES


def test_an_answer_that_is_too_long_goes_on_after_an_empty_line(predicted: Answer) -> None:
    agreement = SourceAgreement(
        left=Source.PREDICTED,
        right=Source.COMPILED,
        agreement=Agreement.DIFFERENT,
        collectives="; ".join(["they differ", *(f"finding {n}" for n in range(9))]),
        times=(),
        time_sentences=(),
    )
    first, _, rest = _text(replace(predicted, agreements=(agreement,))).partition("\n\n")
    assert len(first.splitlines()) <= MAX_LINES
    assert "finding 0" in first
    assert "- decode takes" in rest


@table
def test_a_room_that_depends_on_whole_windows_says_so(model, engine, beyond: str | None) -> None:
    """tpu-inference b8692ff0 frees no page of Gemma 4, whose heads have two sizes (kv_cache_manager.py)."""
    asked: dict[str, Any] = {"batch": 64, "prompt": 16256, "engine": engine}
    run = meshscope.predict(model, topology="v6e-4", plan="tp=4", **asked)
    said = [note for note in answer_of(run.record).notes if "beyond windows" in note]
    assert len(said) == (beyond is not None)
    assert said in ([], [f"{beyond} per sequence beyond windows of 1,024 tokens"])
    first, _, _ = _text(answer_of(run.record)).partition("\n\n")
    assert all(note in first for note in said)
    small = meshscope.predict(model, topology="v6e-4", plan="tp=4", engine="meshscope")
    assert not any("beyond windows" in note for note in answer_of(small.record).notes)


def test_bytes_beyond_windows_are_those_of_the_window_subtracted() -> None:
    """Gemma 4 31B: 50 layers of 16 heads of 256, window 1,024, tp=4, 2 bytes, keys and values."""
    model, size = read_model("google/gemma-4-31B-it"), Workload(prompt=16256, output=128)
    kept = whole_windows(model, parse_plan("tp=4"), size, CacheLayout.VLLM_TPU)
    assert kept is not None
    assert kept.n_bytes == 50 * (16384 - 1024) * 2 * (16 // 4) * 256 * 2
    assert kept.cache_bytes > kept.n_bytes


def test_notes_that_the_first_block_does_not_hold_are_counted(predicted: Answer) -> None:
    notes = tuple(f"part {n} of this model is not counted" for n in range(20))
    many = replace(predicted, notes=notes)
    text = _text(many)
    lines = [line.rstrip() for line in text.splitlines()]
    assert len(lines) == MAX_LINES
    shown = sum("is not counted" in line for line in lines)
    assert f"- and {20 - shown} more with --full" in lines
    assert _text(many, is_full=True).count("is not counted") == 20


def test_another_chunk_leaves_the_first_lines_to_a_suggestion_that_gains_more() -> None:
    answer = answer_of(
        meshscope.predict(
            "Qwen/Qwen3-30B-A3B", topology="v6e-8", plan="tp=8", batch=256, prompt=1024
        ).record
    )
    assert any("--prefill-chunk" in note for note in answer.notes)
    text = _text(answer)
    assert "try --plan dp=8,ep=8: TTFT -" in text
    assert "--prefill-chunk" not in text


@pytest.mark.parametrize(
    ("name", "topology"),
    [("openai/gpt-oss-120b", "tpu7x-8"), ("mistralai/Mixtral-8x7B-v0.1", "v5p-16")],
)
def test_a_second_reason_leaves_the_first_lines_to_what_to_try(name: str, topology: str) -> None:
    run = meshscope.predict(name, topology=topology, plan="tp=8", batch=128, prompt=1024)
    text = _text(answer_of(run.record))
    assert "try --plan dp=8,ep=8: TTFT -" in text
    assert "- prefill takes" in text
    assert len(text.splitlines()) <= MAX_LINES


def test_what_narrower_weights_do_not_gain_comes_before_another_slice() -> None:
    run = meshscope.predict(
        "Qwen/Qwen3-32B", topology="v6e-8", plan="tp=8", batch=8, weight_dtype="int4"
    )
    answer = answer_of(run.record)
    assert any(note.startswith("try --topology") for note in answer.notes)
    text = _text(answer)
    assert "try --weight-dtype int8: the same request to within 3%" in text
    assert "try --topology" not in text


PLANS = ("tp=8", "fsdp=-1", "pp=2,tp=4", "dp=2,tp=4", "tp=8,sp")


MODELS = [
    pytest.param(at, name, marks=[pytest.mark.matrix] * (at % 4 != 0))
    for at, name in enumerate(sorted(catalog()))
]


@pytest.mark.slow
@pytest.mark.parametrize(("at", "name"), MODELS)
def test_the_answer_of_every_model_has_twelve_lines_of_eighty_columns(at: int, name: str) -> None:
    options = {"topology": "v6e-8", "batch": 64, "prompt": 1024, "weight_dtype": "int8"}
    for plan in (PLANS[at % len(PLANS)], "dp=8"):
        with suppress(PlanError):  # a model without this plan
            run = meshscope.predict(name, plan=plan, **options)
            break
    lines = run.text().partition("\n\n")[0].splitlines()
    assert len(lines) <= MAX_LINES == 12
    assert max(map(len, lines)) <= 80


MATMUL, EXPOSED = Activity.MATMUL, Activity.EXPOSED


def timed(run: RunRecord, seconds: float, *, fits: bool | None = None) -> RunRecord:
    step = step_time(Phase.PREFILL, estimate(seconds), seconds, source=Source.PREDICTED)
    memory = replace(run.memory[Source.PREDICTED], fits=fits)
    times = (step, replace(step, phase=Phase.DECODE))
    return replace(run, times=times, memory={Source.PREDICTED: memory})


def names(runs: dict[str, RunRecord]) -> list[str]:
    return [entry.name for ranking in ranked(runs) for entry in ranking.runs]


def test_a_run_that_does_not_fit_comes_last(predicted_run: RunRecord) -> None:
    runs = {
        "untimed": predicted_run,
        "too large": timed(predicted_run, 0.1, fits=False),
        "slow": timed(predicted_run, 2.0),
        "fast": timed(predicted_run, 1.0, fits=True),
    }
    assert names(runs) == ["fast", "slow", "untimed", "too large"]


def other_batch(run: RunRecord, batch: int) -> RunRecord:
    return varied(run, experiment={"workload": Workload(batch=batch, prompt=8, output=10)})


def test_runs_of_different_work_are_grouped(predicted_run: RunRecord) -> None:
    """No run is ranked against one of another batch, whose request is shorter."""
    large = other_batch(predicted_run, 8)
    runs = {
        "short": timed(other_batch(predicted_run, 1), 0.1),
        "slow": timed(large, 2.0),
        "fast": timed(large, 1.0),
    }
    shared, others = ranked(runs)
    assert shared.sentence == "fast serves the request fastest: 10 s"
    assert [[run.name for run in group.runs] for group in (shared, others)] == [
        ["fast", "slow"],
        ["short"],
    ]
    assert (others.work, others.ranked) == (None, ())


class Pair(NamedTuple):
    case: str
    left: dict[Activity, float]
    right: dict[Activity, float]
    spread: float | None  # of the interval to each side
    is_equal: bool


PAIRS = (
    Pair("hidden by others", {MATMUL: 1.0, EXPOSED: 0.5}, {MATMUL: 1.4, EXPOSED: 0.2}, 0.2, True),
    Pair("less of the same", {MATMUL: 1.0, EXPOSED: 0.5}, {MATMUL: 0.85, EXPOSED: 0.5}, 0.2, False),
    Pair("not resolved", {MATMUL: 1.0}, {MATMUL: 1.02}, 0.2, True),
    Pair("narrow intervals", {MATMUL: 1.0}, {MATMUL: 1.02}, 0.005, False),
    Pair("no intervals, apart", {MATMUL: 1.0}, {MATMUL: 1.02}, None, False),
    Pair("no intervals, same", {MATMUL: 1.0}, {MATMUL: 1.004}, None, True),
    Pair("unknown activities", {}, {}, 0.2, True),
)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.case)
def test_runs_are_equal_within_the_errors_that_they_do_not_share(pair, predicted_run) -> None:
    def run(activities: dict[Activity, float], default_s: float) -> RunRecord:
        seconds, spread = sum(activities.values()) or default_s, pair.spread
        low_s, high_s = (
            (None, None) if spread is None else (seconds / (1 + spread), seconds * (1 + spread))
        )
        base = timed(predicted_run, seconds)
        step = replace(
            base.times[0],
            step=estimate(seconds, low_s, high_s),
            activities=tuple(
                ActivityTime(activity=a, seconds=s, hbm_busy_s=0.0) for a, s in activities.items()
            ),
        )
        return replace(base, times=(step, replace(step, phase=Phase.DECODE)))

    runs = {"left": run(pair.left, 1.0), "right": run(pair.right, 1.15)}
    (ranking,) = ranked(runs)
    assert (len(ranking.best) == 2) == pair.is_equal
    assert (" are equal: " in ranking.sentence) == pair.is_equal


def test_equal_runs_share_their_unit(predicted_run: RunRecord) -> None:
    one, other = (timed(predicted_run, seconds) for seconds in (0.2, 0.2008))
    (ranking,) = ranked({"tp=8,sp": one, "tp=8": other})
    assert ranking.sentence == "tp=8,sp and tp=8 are equal: 2 and 2.01 s"


def test_runs_of_unknown_requests_are_not_taken_for_the_same_work(predicted_run) -> None:
    unknown = varied(predicted_run, experiment={"workload": None})
    assert [group.work for group in ranked({"one": unknown, "other": unknown})] == [None]
    (group,) = ranked({"one": predicted_run, "other": predicted_run})
    assert group.work is not None
