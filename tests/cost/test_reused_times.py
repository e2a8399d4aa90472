"""Predicted times of DeepSeek-V4.1: prefill through half of the layers, decode through all, and the passes that choose."""

import pytest

from meshscope.analysis.utilization import model_flops
from meshscope.api.request import ExperimentRequest
from meshscope.cost.memory import predicted_memory
from meshscope.cost.predicted import predicted_times
from meshscope.events.enums import Phase
from meshscope.events.step_time import StepTime
from meshscope.plans.experiment import Experiment

N_DEVICES = 64


def experiment(prompt: int, batch: int = N_DEVICES) -> Experiment:
    return ExperimentRequest(
        model="deepseek-ai/DeepSeek-V4.1-Flash",
        topology="v6e-64",
        plan="dp=64,ep=64",
        batch=batch,
        prompt=prompt,
    ).experiment()


@pytest.mark.parametrize(
    ("topology", "plan", "fits"),
    [
        ("v5p-8", "tp=4,ep=4", False),
        ("v5p-8", "tp=4,ep=4,tables=host", True),
        ("v5p-16", "dp=2,tp=4,ep=8", True),
        ("v6e-8", "dp=2,tp=4,ep=8,tables=host", False),
        ("v6e-16", "dp=2,tp=8,ep=16", False),
        ("v6e-16", "dp=2,tp=8,ep=16,tables=host", True),
        ("v6e-32", "dp=4,tp=8,ep=32", True),
        ("tpu7x-4", "tp=4,ep=4", False),
        ("tpu7x-4", "tp=4,ep=4,tables=host", True),
        ("tpu7x-8", "dp=2,tp=4,ep=8", True),
    ],
)
def test_the_smallest_slices_that_hold_it(topology: str, plan: str, *, fits: bool) -> None:
    """510 GB without drafts and images, 203 GB of them tables, which hosts may hold."""
    request = ExperimentRequest(
        model="deepseek-ai/DeepSeek-V4.1-Flash", topology=topology, plan=plan, batch=8, prompt=1024
    )
    assert predicted_memory(request.experiment()).fits is fits


def times(prompt: int) -> dict[Phase, StepTime]:
    return {time.phase: time for time in predicted_times(experiment(prompt))}


@pytest.mark.parametrize("prompt", [1024, 8192])
def test_flops_of_prefill_are_those_of_half_the_layers_and_of_the_last_tokens(prompt: int) -> None:
    """Within what the busiest device has more of experts, and the pairs that a causal mask leaves out."""
    flops = sum(part.flops for part in times(prompt)[Phase.PREFILL].parts) * N_DEVICES
    of_model = model_flops(experiment(prompt).model, experiment(prompt).workload, Phase.PREFILL)
    assert flops == pytest.approx(of_model, rel=0.15)


def test_steps_have_the_passes_that_choose_entries() -> None:
    """Keys of 68 bytes for each entry, 2.5 of a token in four layers; the candidates of four others do not grow."""
    short, long = (
        next(p for p in times(n)[Phase.DECODE].parts if p.part == "attn").hbm_bytes
        for n in (1 << 16, 1 << 17)
    )
    keys, scores = (
        2.5 * 68 * (1 << 16),
        2.5 * 4 * 4 * (1 << 16),
    )  # four passes, which may be in VMEM
    assert keys < long - short <= keys + scores
    assert not any("lacks the passes" in note for t in times(8192).values() for note in t.notes)
