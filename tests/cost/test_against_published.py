"""The closed form against published steps on real TPUs; docs/evidence/times.md has the distribution."""

from dataclasses import replace
from math import exp, sqrt
from statistics import median

import pytest
from accuracy_parts import compared_parts
from accuracy_published import ComparedStep, compared_steps, is_ranked, ranked_pairs
from accuracy_steps import PEAKS
from engine_grid import published_s
from made import closed_of, estimate, experiment_with
from published_steps import Half, PublishedStep, closed_time, published_steps
from tables import table

from meshscope.cost.features import Cost
from meshscope.cost.predicted import predicted_times
from meshscope.events.enums import Phase
from meshscope.events.step_time import Activity
from meshscope.hardware.compiler_facts import FITTED_CONSTANTS, fitted_constants, read_facts

STEPS = published_steps()
STUDENT_95 = {2: 2.92, 9: 1.833}  # the quantile of Student's t by degrees of freedom


def steps_of(*halves: Half) -> list[ComparedStep]:
    return [step for step in compared_steps() if step.published.half in halves]


def errors_of(*halves: Half) -> list[float]:
    return sorted(abs(step.error) for step in steps_of(*halves))


@table
def test_errors_are_those_in_the_documentation(half: Half, n, typical, worst) -> None:
    errors = errors_of(half)
    assert len(errors) == n
    assert median(errors) < typical
    assert errors[-1] < worst


def test_halves_alternate_within_each_kind() -> None:
    """No hand chooses: the first row of a kind is fitted, the second judges, and so on."""
    for kind in {step.kind for step in STEPS}:
        halves = [s.half for s in STEPS if s.kind == kind and s.half in {Half.FITTED, Half.JUDGING}]
        assert set(halves[::2]) <= {Half.FITTED}
        assert set(halves[1::2]) <= {Half.JUDGING}


def test_constants_name_the_rows_that_they_saw() -> None:
    rows = read_facts(FITTED_CONSTANTS)["libtpu"]["0.0.42.1"]["closed_form"]["rows"]
    assert rows == [step.id for step in STEPS if step.half is Half.FITTED]


def test_attention_with_many_kv_heads_takes_its_keys_apart() -> None:
    """32 KV heads: the part that grows with the context is 258 ms, and 78 ms for 8 KV heads (sglang-jax, one v6e)."""
    times = {step.id: closed_time(step).value_s for step in STEPS if step.phase is Phase.PREFILL}

    def grown_ms(whole: str, short: str) -> float:
        return (times[whole] - 4 * times[short]) * 1e3

    assert grown_ms("ci-q7v1-tp1-P-i8192", "ci-q7v1-tp1-P-i1024") == pytest.approx(258, rel=0.1)
    grouped = ("sgl-q8b-tp1-P-c128-i8192", "sgl-q8b-tp1-P-c128-i1024")
    assert grown_ms(*grouped) == pytest.approx(78, rel=0.3)


def test_each_group_that_judges_is_within_a_tenth_and_its_worst_step_within_a_quarter() -> None:
    judges = steps_of(Half.JUDGING)
    groups = {step.group for step in judges}
    assert len(groups) == 6
    for group in groups:
        errors = [abs(step.error) for step in judges if step.group == group]
        assert median(errors) < 0.1
        assert max(errors) < 0.25


@table
def test_compiled_prefills_of_other_models_are_nearer_than_the_closed_form(name, limit) -> None:
    step = next(step for step in compared_steps() if step.published.id == name)
    assert step.compiled is not None
    error = abs(step.published.error_of(step.compiled.value_s))
    assert error < limit
    assert error < abs(step.error)


def test_where_an_engines_own_program_is_right_the_closed_form_is_too() -> None:
    """The step as the engine's own code compiles, simulated, for at least 20 published ones."""
    walked = {one: seconds for one in STEPS if (seconds := published_s(one)) is not None}
    assert len(walked) >= 20
    errors = {
        one: abs(one.error_of(seconds))
        for one, seconds in walked.items()
        if one.half is not Half.BOUND
    }
    assert median(errors.values()) < 0.07
    assert max(errors.values()) < 0.17
    right = [one for one, error in errors.items() if error < 0.15]
    assert max(abs(one.error_of(closed_time(one).value_s)) for one in right) < 0.15


def test_weights_of_a_prefill_arrive_during_its_products() -> None:
    """As in its simulated schedules: products of a chunk take several times as long as its weights."""
    step = next(step for step in STEPS if step.id == "sgl-q7b-tp1-P-c128-i1024")
    (time,) = (t for t in predicted_times(step.experiment) if t.phase is Phase.PREFILL)
    waits = [spent.seconds for spent in time.activities if spent.activity is Activity.COPY]
    assert sum(waits) < 0.02 * time.step.value_s


def step_with(host_s: float, least_host_s: float) -> PublishedStep:
    return replace(STEPS[0], published_s=14e-3, host_s=host_s, least_host_s=least_host_s)


@table
def test_an_error_counts_from_the_nearer_end_of_a_range(
    predicted_ms, nearest_ms, *, is_inside
) -> None:
    """A known host leaves no range."""
    step, value_s = step_with(host_s=4e-3, least_host_s=0.0), predicted_ms / 1e3
    time = estimate(value_s, 0.94 * value_s, 1.06 * value_s)
    assert step.nearest_s(value_s) == pytest.approx(nearest_ms / 1e3)
    assert step.is_inside(time) is is_inside
    known = step_with(host_s=4e-3, least_host_s=4e-3)
    assert known.nearest_s(value_s) == pytest.approx(10e-3)


def test_only_servers_on_several_chips_have_a_range() -> None:
    ranges = [step for step in STEPS if step.most_device_s > step.device_s]
    assert len(ranges) == 8
    for step in ranges:
        assert step.experiment.topology.n_chips == 4
        assert step.phase is Phase.DECODE


@table
def test_host_time_leaves_less_than_the_bytes_of_two_unseen_steps_take(name, floor_ms) -> None:
    step = next(step for step in STEPS if step.id == name)
    chip = step.experiment.topology.chip
    costs = closed_of(step.experiment, step.phase, efficiency=PEAKS)[1].costs[0]
    read = costs[:, [Cost.WEIGHT_BYTES, Cost.CHOSEN_BYTES, Cost.CACHE_BYTES]].sum()
    floor_s = float(read) / (chip.hbm_bytes_per_s or 1)
    assert floor_s * 1e3 == pytest.approx(floor_ms, abs=0.05)
    assert step.device_s < 1.01 * floor_s


@pytest.mark.parametrize("half", [Half.FITTED, Half.JUDGING])
def test_intervals_contain_the_published_times_and_are_narrow(half: Half) -> None:
    steps = steps_of(half)
    assert sum(step.is_inside for step in steps) >= 0.9 * len(steps)
    widths = [(s.predicted.upper_s - s.predicted.lower_s) / 2 / s.predicted.value_s for s in steps]
    assert median(widths) < 0.2


@table
def test_intervals_are_as_wide_as_the_errors_for_what_was_left_out(name, errors) -> None:
    """Nine models and two chips, each left out of the fit in turn; the widths saw no step that judges."""
    spread = fitted_constants("v6e")["closed_form"][name]
    of_further = STUDENT_95[len(errors)] * sqrt(sum(e**2 for e in errors) / len(errors))
    assert spread == pytest.approx(exp(of_further), rel=0.003)


def test_steps_of_a_fitted_kind_have_the_interval_of_a_further_model() -> None:
    spread = fitted_constants("v6e")["closed_form"]["model_spread"]
    for step in steps_of(Half.JUDGING):
        time = step.predicted
        assert time.lower_s <= time.value_s / spread * 1.001
        assert time.upper_s >= time.value_s * spread * 0.999


@pytest.mark.parametrize(("kind", "limit"), [("copy", 0.06), ("product", 0.13)])
def test_published_products_and_copies_are_near_without_a_fit(kind: str, limit: float) -> None:
    """Copies from 4 MiB to 8 GiB on tpu7x have one HBM rate: the rest is launch and latency."""
    errors = [abs(part.error) for part in compared_parts() if part.group[1] == kind]
    assert len(errors) > 4
    assert max(errors) < limit


@pytest.mark.parametrize(
    ("kind", "typical", "worst"), [("layer", 0.1, 0.13), ("fused layer", 0.05, 0.11)]
)
def test_layers_of_experts_on_tpu7x_are_near_where_no_constant_saw_them(
    kind: str, typical: float, worst: float
) -> None:
    """Unfused, 4,096 tokens of Qwen3-Coder multiply with one-hot masks and take longer than 8,192, which gather."""
    errors = [abs(part.error) for part in compared_parts() if part.group[1] == f"{kind}, judging"]
    assert len(errors) >= 7
    assert median(errors) < typical
    assert max(errors) < worst


@pytest.mark.parametrize(
    "step", [s for s in STEPS if s.half is Half.BOUND], ids=lambda step: step.id
)
def test_device_is_faster_than_a_server_that_waits_for_its_host(step) -> None:
    assert 0.3 * step.published_s < closed_time(step).value_s < step.published_s


def _ratio(batch: int, phase: Phase) -> float:
    """Llama-3.1-70B in int8 on v5e-16: two replicas over tp=8, relative to tp=16."""
    sizes = {"batch": batch, "prompt": 2048, "output": 2, "weight_dtype": "s8", "cache_dtype": "s8"}
    replicas_s, whole_s = (
        {time.phase: time.step.value_s for time in predicted_times(experiment)}[phase]
        for experiment in (
            experiment_with("meta-llama/Llama-3.1-70B", plan, "v5e:4x4", **sizes)
            for plan in ("dp=2,tp=8", "tp=16")
        )
    )
    return replicas_s / whole_s


def test_plans_rank_as_published() -> None:
    """Decode steps/s and seconds of prefill: jax-llm-examples@8b4b246, llama3/README.md."""
    assert _ratio(8, Phase.DECODE) == pytest.approx(159 / 84.4, rel=0.1)
    assert _ratio(128, Phase.DECODE) < 1
    assert _ratio(8, Phase.PREFILL) == pytest.approx(1 / 1.6, rel=0.1)


def test_all_steps_of_a_model_rank_as_published() -> None:
    pairs = ranked_pairs()
    assert len(pairs) >= 100
    assert all(is_ranked(fast, slow) for fast, slow in pairs)


@pytest.mark.parametrize(("chip", "is_known"), [("v6e", True), ("v5p", False)])
def test_a_chip_without_published_steps_says_so(chip: str, is_known: bool) -> None:  # noqa: FBT001
    slices = {"v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}
    experiment = experiment_with("Qwen/Qwen3-8B", "tp=4", slices[chip], batch=8, prompt=1024)
    time = predicted_times(experiment)[0]
    assert any(f"none of {chip} is known" in note for note in time.notes) is not is_known


@table
def test_a_kind_without_published_steps_has_the_interval_of_a_chip_left_out(
    chip, dtype, *, is_fitted
) -> None:
    experiment = experiment_with(
        "Qwen/Qwen3-8B", "tp=4", chip, batch=8, prompt=1024, weight_dtype=dtype
    )
    time = predicted_times(experiment)[0]
    constants = fitted_constants(experiment.topology.chip.name)["closed_form"]
    spread = constants["model_spread" if is_fitted else "other_spread"]
    assert time.step.upper_s >= time.step.value_s * spread * 0.999
    assert any("its interval comes from another chip" in n for n in time.notes) is not is_fitted
