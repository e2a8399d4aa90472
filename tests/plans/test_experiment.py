"""Experiments are consistent and stored without loss; rows that devices of experts exchange."""

from fractions import Fraction
from statistics import mean
from typing import Any

import msgspec
import pytest
from made import experiment_with
from tables import table

from meshscope.errors import PlanError, SpecError
from meshscope.events.enums import REQUEST_PHASES
from meshscope.model.config import read_model
from meshscope.plans.caches import ContextForm, layer_cache
from meshscope.plans.dispatch import Dispatch, DispatchForm, dispatch_of, routed_tokens
from meshscope.plans.experiment import Experiment, experiment_from_dict
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Engine, Program
from meshscope.plans.weights import layer_weights
from meshscope.plans.workload import Workload


def _experiment(
    plan: str, topology: str = "v6e-8", *, model: str = "Llama-3.1-8B", **facts: Any
) -> Experiment:
    return experiment_with(model, plan, topology, batch=8, **facts)


def test_the_plan_fills_the_slice_and_the_model_is_truncated() -> None:
    experiment = _experiment("fsdp=-1,tp=2", n_layers=4)
    assert str(experiment.plan) == "fsdp=4,tp=2"
    assert experiment.model.n_layers == 4
    with pytest.raises(SpecError, match=r"microbatches=0 is too small. Use at least 1"):
        Program(microbatches=0)


@table
def test_an_impossible_experiment_is_refused_with_a_remedy(model, plan, facts, message) -> None:
    """`facts` are the slice, the engine, the program, the number of layers, and sizes."""
    parts = {"topology": "v6e-8", "batch": 8} | facts
    types = {"engine": Engine, "program": Program}
    parts = {n: msgspec.convert(v, types[n]) if n in types else v for n, v in parts.items()}
    with pytest.raises((PlanError, SpecError), match=message):
        experiment_with(model, plan, **parts)


def test_allgather_is_the_default_without_a_ring_and_requesting_a_ring_is_refused() -> None:
    """Pipeline stages on CPU devices, and compressed attention."""
    ring = Program(context=ContextForm.RING)
    for plan, topology, model in (
        ("pp=2,cp=2,tp=2", "cpu:8", "Llama-3.1-8B"),
        ("cp=2,tp=4", "v6e-8", "DeepSeek-V4"),
    ):
        gathered = _experiment(plan, topology, model=model)
        assert gathered.context_form is ContextForm.ALLGATHER
        with pytest.raises(
            SpecError, match=r"does not support --context ring: .* Use --context allgather, or"
        ):
            _experiment(plan, topology, model=model, program=ring)
    for plan, topology in (("pp=2,cp=2,tp=2", "v6e-8"), ("cp=2,tp=4", "cpu:8")):
        assert _experiment(plan, topology).context_form is ContextForm.RING


@table
def test_prefill_has_microbatches_and_a_decode_step_is_one(plan, microbatches, prefill) -> None:
    experiment = _experiment(plan, program=Program(microbatches=microbatches))
    assert [experiment.n_microbatches(phase) for phase in REQUEST_PHASES] == [prefill, 1]


@table
def test_groups_cross_slices_if_a_group_has_devices_of_two(plan, topology, *, tp, data) -> None:
    experiment = _experiment(plan, topology)
    groups = experiment.plan.mesh.groups
    assert experiment.topology.crosses_slices(groups("tp")) is tp
    if data is not None:
        assert experiment.topology.crosses_slices(groups("dp")) is data


@pytest.mark.parametrize("form", ContextForm)
@pytest.mark.parametrize("plan", ["tp=8", "fsdp=2,tp=4,sp", "cp=2,tp=4", "pp=2,tp=4"])
def test_an_experiment_is_read_back_unchanged(plan: str, form: ContextForm) -> None:
    experiment = _experiment(plan, n_layers=2, program=Program(context=form))
    assert experiment_from_dict(experiment.as_dict()) == experiment


def test_a_stored_experiment_with_a_missing_value_is_refused() -> None:
    values = _experiment("tp=8").as_dict()
    del values["engine"]
    with pytest.raises(SpecError, match=r"lacks engine\. Rerun the experiment"):
        experiment_from_dict(values)


GLM_52 = "zai-org/GLM-5.2"


def test_layers_that_share_an_indexer_have_no_weights_and_no_cache_of_one() -> None:
    model, plan = read_model(GLM_52), parse_plan("tp=8")
    with_indexer, without = model.layers[6], model.layers[7]
    for layer, count in ((with_indexer, 5), (without, 0)):
        weights = [weight.name for weight in layer_weights(model, plan, layer)]
        assert sum(name.startswith("index_") for name in weights) == count
    caches = [
        [array.name for array in layer_cache(model, plan, one)] for one in (with_indexer, without)
    ]
    assert caches == [["latent", "index_k"], ["latent"]]


def test_prefill_produces_the_first_output_token() -> None:
    workload = Workload(prompt=1024, output=128)
    assert (workload.context, workload.n_decode_steps) == (1152, 127)
    assert Workload(output=5, decode_tokens=4).n_decode_steps == 1


@pytest.mark.parametrize("output", [2, 5, 128])
def test_mean_context_is_the_mean_over_the_decode_steps(output: int) -> None:
    workload = Workload(prompt=1024, output=output)
    # The token of decode step i, the first output token in step 1, attends to itself, too.
    present = [1024 + step for step in range(1, workload.n_decode_steps + 1)]
    assert workload.mean_context == mean(present)


@pytest.mark.parametrize(("output", "n_tokens"), [(17, 4), (128, 2), (5, 4)])
def test_mean_context_of_several_tokens_is_that_of_the_last(output: int, n_tokens: int) -> None:
    """Steps may start behind any number of accepted tokens, and end before the last output token."""
    workload = Workload(prompt=1024, output=output, decode_tokens=n_tokens)
    present = [1024 + start + n_tokens - 1 for start in range(1, output - n_tokens + 1)]
    assert workload.mean_context == mean(present)


@table
def test_impossible_sizes_and_dtypes_are_refused(values, remedy) -> None:
    with pytest.raises(SpecError, match=remedy):
        Workload(**values)


DEEPSEEK = read_model("DeepSeek-V3").moe  # 256 experts, 8 of them a token
RAGGED, CAPACITY = DispatchForm.RAGGED, DispatchForm.CAPACITY


def _dispatch(
    plan: str,
    n_tokens: int,
    form: DispatchForm = RAGGED,
    factor: float | None = None,
    **slots: bool,
) -> Dispatch:
    parsed = parse_plan(plan)
    return dispatch_of(
        DEEPSEEK, parsed, n_tokens=n_tokens, form=form, capacity_factor=factor, **slots
    )


@table
def test_only_a_capacity_factor_drops_rows(
    form: DispatchForm, factor, n_buffer_rows, n_slots, n_worst_dropped
) -> None:
    dispatch = _dispatch("dp=8,tp=8,ep=64", 128, form, factor)
    assert dispatch.n_rows == 1024
    assert (dispatch.n_buffer_rows, dispatch.n_slots) == (n_buffer_rows, n_slots)
    assert dispatch.n_worst_dropped == n_worst_dropped


def test_a_note_says_which_routing_takes_further_rounds() -> None:
    assert "1,280 rows to a device" in _dispatch("dp=8,tp=8,ep=64", 128).rounds_note
    capacity = _dispatch("dp=8,tp=8,ep=64", 128, CAPACITY)
    assert "40 rows from one device to another" in capacity.rounds_note


def test_few_tokens_have_room_for_the_worst_routing() -> None:
    """A decode step of 64 sequences on 64 devices: all tokens may choose the same four experts."""
    dispatch = _dispatch("dp=8,tp=8,ep=64", 1)
    assert (dispatch.n_buffer_rows, dispatch.has_rounds) == (64 * 4, False)


@pytest.mark.parametrize("plan", ["tp=8", "tp=8,ep=8", "dp=2,tp=4,ep=4"])
def test_no_rows_are_exchanged_if_all_expert_devices_have_the_same_tokens(plan: str) -> None:
    assert _dispatch(plan, 8) is None


@table
def test_axes_and_tokens_of_an_exchange(plan, axes, n_tokens) -> None:
    assert routed_tokens(parse_plan(plan), 100) == n_tokens
    assert list(_dispatch(plan, n_tokens).axes) == axes


def test_received_rows_grow_with_the_skew_up_to_the_buffer_and_all_rows() -> None:
    dispatch = _dispatch("dp=8,tp=8,ep=64", 128)
    assert dispatch.received_rows(1) == Fraction(1024 * 63, 64)
    assert dispatch.received_rows(1.5) == Fraction(3, 2) * dispatch.received_rows(1)
    assert dispatch.received_rows(1e9) == dispatch.n_most_rows == 128 * 4 * 63
    bounded = _dispatch("dp=8,tp=8,ep=64", 128, RAGGED, 1.25)
    assert bounded.received_rows(1e9) == Fraction(1280 * 63, 64)


def test_fixed_slots_are_sent_for_any_routing() -> None:
    dispatch = _dispatch("dp=8,ep=8", 10, CAPACITY, 2.0)
    assert dispatch.n_slots == 20
    assert {dispatch.received_rows(skew) for skew in (1, 2, 100)} == {Fraction(7 * 20)}
    assert dispatch.n_most_rows == 7 * 20


@table
def test_expert_slots_are_reserved_for_one_expert(factor, n_expert_slots, n_worst_dropped) -> None:
    dispatch = _dispatch("dp=8,ep=8", 10, CAPACITY, factor, has_expert_slots=True)
    assert dispatch.n_expert_slots == n_expert_slots
    assert dispatch.n_slots == 32 * n_expert_slots
    assert dispatch.n_buffer_rows == 8 * 32 * n_expert_slots
    assert dispatch.n_worst_dropped == n_worst_dropped
