"""A decode step of several tokens gives the logits of `transformers` at each of their positions."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from tables import read_cases
from tiny_models import TOLERANCE, golden, interpret_kernels, prefilled, tiny_experiment

from meshscope.events.enums import Phase
from meshscope.model.config import model_from_config
from meshscope.plans.experiment import Experiment
from meshscope.plans.kernel_choice import Kernel
from meshscope.plans.program import Loop, Partitioner, Program
from meshscope.programs.jax.build import build_program

N_TOKENS = 4
STARTS = (0, 1, 5, 9)  # the first step is fed one token that is right, the others all


class Case(NamedTuple):
    config: str
    plan: str
    loop: Loop = Loop.UNROLL
    partitioner: Partitioner = Partitioner.MANUAL
    chunk: int | None = None


def _stored(tier: str) -> list[Case]:
    return read_cases(Path(__file__).parent / "verification_cases.csv", Case, tier=tier)


PARAMETERS = [pytest.param(c, id="-".join(map(str, c[:3]))) for c in _stored("usual")] + [
    pytest.param(c, id="-".join(map(str, c)), marks=pytest.mark.matrix) for c in _stored("matrix")
]


def experiment_of_case(case: Case, **workload: int) -> Experiment:
    """The experiment of the golden logits, whose context no limit of the model shortens."""
    model = model_from_config(golden.CONFIGS[case.config], name="tiny", source="test")
    program = Program(loop=case.loop, partitioner=case.partitioner)
    long = replace(model, max_position=None)
    return tiny_experiment(long, case.plan, program, prefill_chunk=case.chunk, **workload)


def verified_logits(experiment: Experiment, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Logits [N_DECODE, B, V] of verifications behind a prefill, and those of `transformers`.

    Each position has the logits of the last step that it is in, so that drafts which a step rejects must
    leave no trace in the cache.
    """
    weights, prompt, expected = golden.read_golden(name)
    devices = jax.devices()[: experiment.plan.n_devices]
    wide = replace(experiment, workload=replace(experiment.workload, decode_tokens=N_TOKENS))
    verify = build_program(wide, Phase.DECODE, devices)
    _, arrays, cache, _ = prefilled(wide, weights, prompt)
    accepted, got = expected.argmax(axis=-1).astype(np.int32), np.zeros_like(expected[1:])
    for start in STARTS:
        tokens = accepted[start : start + N_TOKENS].T.copy()
        if start == 0:
            tokens[:, 1:] = 7
        out = verify.step(arrays, tokens, cache, np.int32(golden.PROMPT + start))
        cache = out[2]
        logits = np.asarray(verify.logits(out)).reshape(golden.BATCH, N_TOKENS, -1)
        got[start : start + N_TOKENS] = logits.swapaxes(0, 1)
    n_verified = STARTS[-1] + N_TOKENS
    return got[:n_verified], expected[1 : 1 + n_verified]


@pytest.mark.parametrize("case", PARAMETERS)
def test_verified_logits_equal_those_of_transformers(case: Case) -> None:
    """One step of four tokens equals four steps of one, behind a step whose drafts were wrong."""
    got, expected = verified_logits(experiment_of_case(case), case.config)

    np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


KERNEL_CASES = [
    pytest.param(Case("qwen3", "dp=2,tp=4", Loop.SCAN), id="grouped"),
    pytest.param(Case("gpt_oss", "tp=4"), id="windows-sinks", marks=pytest.mark.matrix),
    pytest.param(Case("deepseek_v3", "tp=2", Loop.SCAN), id="latent", marks=pytest.mark.matrix),
    pytest.param(Case("gemma4-shared", "tp=2"), id="shared-caches", marks=pytest.mark.matrix),
]


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_the_decode_kernel_reads_the_cache_once_for_all_tokens(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of TPUs, interpreted, in a cache that is longer than the request."""
    interpret_kernels(monkeypatch, "v6e")
    experiment = experiment_of_case(case, output=150)
    assert experiment.kernels.decode_attention.kernel is Kernel.FLASH_DECODE

    got, expected = verified_logits(experiment, case.config)

    np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
