"""Tiny random models give the logits of `transformers`, whatever the plan: what torch_xla traces is run.

The traced program runs on virtual CPU devices of JAX's runtime, after the preparation of its manual regions. `CASES` is
the table of what is run, and of each manual region some case is: no plan is compiled only.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import make_golden_logits as golden
import numpy as np
import pytest
from made import experiment_with
from tables import cases

pytest.importorskip("torch_xla.core", reason="the extra 'torchxla' has an environment of its own")
pytestmark = pytest.mark.filterwarnings("ignore:.*XLA_USE_SPMD is being deprecated")

import running  # noqa: E402

from meshscope.events.enums import REQUEST_PHASES  # noqa: E402
from meshscope.model.config import model_from_config  # noqa: E402  after the skip
from meshscope.model.quantization import FP8_BLOCKS, quantization_of  # noqa: E402
from meshscope.plans.caches import ContextForm  # noqa: E402
from meshscope.plans.experiment import Experiment  # noqa: E402
from meshscope.plans.plan import parse_plan  # noqa: E402
from meshscope.plans.program import Frontend, Partitioner, Program  # noqa: E402

TOLERANCE = 2e-5  # float32 sums in another order; logits are of order 1
N_DECODE = 4


class Case(NamedTuple):
    config: str
    plan: str
    partitioner: Partitioner = Partitioner.MANUAL
    context: ContextForm = ContextForm.RING
    microbatches: int | None = None


DENSE = (
    *("llama", "llama-tied", "qwen2", "qwen3"),
    *("mistral", "ministral", "ministral3", "gemma2", "gemma3"),
)
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v2-limited", "deepseek_v3", "glm4_moe")
MIXTURES += ("gpt_oss", "deepseek_v4")
PLANS = ("tp=8", "tp=8,sp", "dp=8", "dp=2,tp=4", "dp=2,tp=4,sp", "fsdp=8", "fsdp=2,tp=4")
EXPERT_PLANS = (
    *("tp=8,sp", "tp=8,ep=8", "dp=8,ep=8", "dp=4,tp=2,ep=4", "dp=2,tp=4,ep=8"),
    *("dp=2,tp=4,ep=2,sp", "fsdp=2,tp=4,ep=2"),
)
CASES = [
    Case(config, plan, partitioner)
    for config in DENSE
    for plan in PLANS
    for partitioner in Partitioner
]
CASES += [Case(config, plan) for config in MIXTURES for plan in EXPERT_PLANS]
RING, ALLGATHER = ContextForm.RING, ContextForm.ALLGATHER
CASES += [
    Case(config, plan, context=form)
    for config in (
        *("llama", "qwen3", "mixtral", "deepseek_v2", "deepseek_v3"),
        *("mistral", "ministral3", "gemma2", "gemma3", "glm4_moe", "gpt_oss"),
    )
    for plan, form in (
        ("cp=8", RING),
        ("cp=8", ALLGATHER),
        ("cp=2,tp=4,sp", RING),
        ("fsdp=2,cp=4", RING),
        ("dp=2,cp=2,tp=2", ALLGATHER),
        ("dp=2,cp=2,tp=2,ep=4", RING),
    )
    if "ep" not in plan or config not in DENSE
]
CASES += cases(__file__, Case, "pipelines") + cases(__file__, Case, "pipelines_with_context")
TELLING = set(cases(__file__, Case, "telling"))


def _marked(case: Case) -> Any:
    marks = () if case in TELLING else (pytest.mark.matrix,)
    return pytest.param(case, marks=marks, id="-".join(map(str, case)))


def tiny_experiment(
    case: Case, prompt: int = golden.PROMPT, output: int = 1 + N_DECODE
) -> Experiment:
    facts = case._asdict()
    config, dtype = golden.QUANTIZED.get(case.config, (case.config, "f32"))
    del facts["config"]
    model = model_from_config(golden.CONFIGS[config], name="tiny", source="test")
    plan = parse_plan(facts.pop("plan"))
    sizes = {"batch": golden.BATCH, "prompt": prompt, "output": output}
    sizes |= {"activation_dtype": "f32", "cache_dtype": "f32"}
    sizes["weight_dtype"] = {"block8": FP8_BLOCKS}.get(dtype, dtype)
    program = Program(frontend=Frontend.TORCHXLA, **facts)
    return experiment_with(model, plan, f"cpu:{plan.n_devices}", program=program, **sizes)


def check_logits(experiment: Experiment, name: str, n_tokens: int) -> None:
    """Prefill and a step for each further one of the first tokens."""
    _, prompt, expected = golden.read_golden(name)
    rounded = golden.QUANTIZED.get(name)
    oracle = golden.oracle_model(name) if rounded is None else golden.quantized_model(*rounded)
    weights = {name: tensor.numpy() for name, tensor in oracle.state_dict().items()}
    tokens = np.concatenate([prompt, expected[:-1].argmax(axis=-1).T], axis=1)
    n_prompt, first = experiment.workload.prompt, max(experiment.workload.prompt, golden.PROMPT)
    prefill, decode = (running.Running(experiment, phase, weights) for phase in REQUEST_PHASES)
    cache = prefill.new_cache()
    got: list[np.ndarray] = []
    for start in (0, *range(n_prompt, n_tokens)):
        step, end = (decode, start + 1) if start else (prefill, n_prompt)
        next_tokens, logits, cache = step.step(tokens[:, start:end], cache, start)
        got.append(logits.reshape(golden.BATCH, -1)[:, : expected.shape[-1]])
        assert (next_tokens == got[-1].argmax(axis=-1)).all()
    wanted = expected[first - golden.PROMPT : n_tokens + 1 - golden.PROMPT]
    np.testing.assert_allclose(
        np.stack(got[first - n_prompt :]), wanted, atol=TOLERANCE, rtol=TOLERANCE
    )


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_logits_equal_those_of_transformers(case: Case) -> None:
    """The vocabulary of 101 divides by no tp."""
    check_logits(tiny_experiment(case), case.config, golden.PROMPT + N_DECODE)


@pytest.mark.parametrize("plan", ["fsdp=4,tp=2", "dp=2,tp=4,ep=8", "pp=2,fsdp=2,tp=2"])
def test_fp8_in_blocks_gives_the_logits_of_dequantized_weights(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 8 x 8, as checkpoints of DeepSeek-V3 have blocks of 128 x 128."""
    blocks = quantization_of(FP8_BLOCKS)
    assert blocks is not None
    small = {FP8_BLOCKS: replace(blocks, block=golden.BLOCK)}
    monkeypatch.setattr("meshscope.model.quantization._QUANTIZATIONS", small)
    experiment = tiny_experiment(Case("deepseek_v3-block8", plan))

    check_logits(experiment, "deepseek_v3-block8", golden.PROMPT + N_DECODE)


@pytest.mark.parametrize("n_prompt", [3, pytest.param(21, marks=pytest.mark.matrix)])
def test_prefill_may_end_inside_a_window(n_prompt: int) -> None:
    """DeepSeek-V4: before the first entry (4 positions), and inside windows of 4 and 8 positions."""
    experiment = tiny_experiment(Case("deepseek_v4", "tp=8"), n_prompt, 25 - n_prompt)
    check_logits(experiment, "deepseek_v4", 24)
