"""Tiny random models give the logits of `transformers`: prefill and 16 decode steps, every plan."""

import importlib
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from meshscope.arch.config import model_from_config
from meshscope.hardware.topology import parse_topology
from meshscope.plan.experiment import Experiment, Loop, Partitioner, Program, experiment_of
from meshscope.plan.plan import parse_plan
from meshscope.plan.workload import Workload
from meshscope.table.kinds import Phase

torch = pytest.importorskip("torch", reason="the oracle needs torch and transformers")
transformers = pytest.importorskip("transformers", reason="the oracle needs torch and transformers")
jax = pytest.importorskip("jax", reason="the programs need JAX")

pytestmark = [pytest.mark.oracle]

BATCH, PROMPT, N_DECODE = 8, 16, 16
# Float32 sums are added in another order on every mesh; logits are of order 1.
TOLERANCE = 2e-5

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 101,  # no multiple of any tp: the vocabulary is padded
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large enough that logits differ between tokens
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": BASE
    | {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "mlp_bias": True}
    | {"attention_bias": True, "rope_parameters": LLAMA3_ROPE},
    "llama-tied": BASE
    | {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 8}
    | {"tie_word_embeddings": True},
    "qwen2": BASE | {"model_type": "qwen2", "num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen3": BASE
    | {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
}
PLANS = ("tp=1", "tp=8", "tp=8,sp", "dp=8", "dp=2,tp=4", "dp=2,tp=4,sp", "fsdp=8", "fsdp=2,tp=4")


class Case(NamedTuple):
    config: str
    plan: str
    partitioner: Partitioner
    loop: Loop


# Every family under every plan with both partitioners; scanned layers for one family.
CASES = [
    Case(config, plan, partitioner, loop)
    for config in CONFIGS
    for plan in PLANS
    for partitioner in Partitioner
    for loop in ((Loop.UNROLL, Loop.SCAN) if config == "qwen3" else (Loop.UNROLL,))
]


@cache
def oracle(name: str) -> tuple[dict[str, np.ndarray], np.ndarray, list[np.ndarray]]:
    """Weights by checkpoint name, the prompt, and the logits of prefill and of each greedy step."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            if "norm" in tensor_name or tensor_name.endswith("bias"):
                tensor.add_(0.1 * torch.randn(tensor.shape))  # ones and zeros would hide a mistake
        prompt = torch.randint(0, config.vocab_size, (BATCH, PROMPT))
        tokens, logits = prompt, []
        for _ in range(1 + N_DECODE):
            logits.append(model(tokens).logits[:, -1].numpy())
            tokens = torch.cat([tokens, torch.tensor(logits[-1].argmax(-1))[:, None]], dim=1)
    weights = {key: value.detach().numpy() for key, value in model.state_dict().items()}
    return weights, prompt.numpy(), logits


def generated_logits(experiment: Experiment, weights: dict[str, np.ndarray], prompt: np.ndarray):
    """Logits of prefill and of each greedy decode step, from our programs."""
    build = importlib.import_module("meshscope.programs.build").build_program
    values = importlib.import_module("meshscope.programs.values")

    devices = jax.devices()[: experiment.plan.n_devices]
    prefill, decode = (build(experiment, phase, devices) for phase in Phase)
    arrays = values.placed_weights(experiment, prefill, weights.__getitem__)
    tokens, logits, cache = prefill.step(arrays, prompt, values.empty_cache(prefill), np.int32(0))
    yield np.asarray(logits)
    for step in range(N_DECODE):
        tokens, logits, cache = decode.step(
            arrays, np.asarray(tokens)[:, None], cache, np.int32(PROMPT + step)
        )
        yield np.asarray(logits)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_logits_equal_those_of_transformers(case: Case) -> None:
    """The same weights, the same greedy tokens, logits equal to within float32 rounding."""
    weights, prompt, expected = oracle(case.config)
    plan = parse_plan(case.plan)
    f32 = {f"{name}_dtype": "f32" for name in ("weight", "activation", "cache")}
    experiment = experiment_of(
        model=model_from_config(CONFIGS[case.config], name="tiny", source="test"),
        plan=plan,
        topology=parse_topology(f"cpu:{plan.n_devices}"),
        workload=Workload(batch=BATCH, prompt=PROMPT, output=1 + N_DECODE, **f32),
        program=Program(partitioner=case.partitioner, loop=case.loop),
    )

    got = list(generated_logits(experiment, weights, prompt))

    assert len(got) == len(expected)
    np.testing.assert_allclose(np.stack(got), np.stack(expected), atol=TOLERANCE, rtol=TOLERANCE)
